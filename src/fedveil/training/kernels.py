"""A list of kernels made short: the same numbers from fewer calls, each of which costs less.

Where arrays are small, calling a kernel takes longer than what it computes. Three changes to a list leave every number
as it is (:mod:`fedveil.training.kernel_replay` compares them before it uses a list):

* what nobody reads is not computed;
* what follows from no argument, such as the hashed positions of a dropout mask, is computed once;
* a kernel that is a method of tensors is called as one: a view takes a third of the time so.
"""

from __future__ import annotations

from types import MethodDescriptorType
from typing import Final

from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

_KEPT: Final = 1 << 14
"""Numbers of a tensor that is computed once, at most: every list keeps its own."""

_NAMES: Final = {"aten::_unsafe_view": "view"}
"""Of methods that are called otherwise."""


def optimise_graph(kernels: GraphModule) -> None:
    """Make a list of kernels short, in place."""
    kernels.graph.eliminate_dead_code()
    _compute_once(kernels)
    _call_methods(kernels.graph)


def _compute_once(kernels: GraphModule) -> None:
    """Put numbers in the place of kernels that read no argument, unless somebody could write to them."""
    settled = _settled(kernels)
    computed = [node for node in settled if node.op != "get_attr"]
    outside = {user for node in computed for user in node.users if user not in settled}
    if any(user.op == "output" or _hands_on(user) for user in outside):
        return
    for number, node in enumerate(reversed(list(settled))):
        if node.users and node.op != "get_attr":
            name = f"_settled_{number}"
            kernels.register_buffer(name, settled[node])
            with kernels.graph.inserting_before(node):
                node.replace_all_uses_with(kernels.graph.get_attr(name))
        if not node.users:
            kernels.graph.erase_node(node)


def _settled(kernels: GraphModule) -> dict[Node, Tensor]:
    """Return the small tensors that follow from no argument, in the order of the list."""
    found: dict[Node, Tensor] = {}
    for node in kernels.graph.nodes:
        if node.op == "get_attr":
            found[node] = getattr(kernels, str(node.target))
        elif isinstance(node.target, OpOverload) and all(one in found for one in node.all_input_nodes):
            args, kwargs = map_arg((node.args, node.kwargs), found.__getitem__)
            result = node.target(*args, **kwargs)
            if isinstance(result, Tensor) and result.numel() <= _KEPT:
                found[node] = result
    return found


def _hands_on(node: Node) -> bool:
    """Return whether a kernel writes to the memory of what it reads, or gives it away as a view."""
    if not isinstance(node.target, OpOverload):
        return False
    return any(argument.alias_info is not None for argument in node.target._schema.arguments)


def _call_methods(graph: Graph) -> None:
    """Call kernels by the methods of tensors that PyTorch makes from the same declarations."""
    for node in list(graph.nodes):
        name = _method(node)
        if name is not None:
            with graph.inserting_before(node):
                node.replace_all_uses_with(graph.call_method(name, node.args, node.kwargs))
            graph.erase_node(node)


def _method(node: Node) -> str | None:
    """Return the method that is this kernel: declared with a first argument ``self``, and not written in Python."""
    if not isinstance(node.target, OpOverload):
        return None
    declared = node.target._schema
    name = _NAMES.get(declared.name, declared.name.removeprefix("aten::"))
    takes_self = bool(declared.arguments) and declared.arguments[0].name == "self"
    return name if takes_self and isinstance(getattr(Tensor, name, None), MethodDescriptorType) else None
