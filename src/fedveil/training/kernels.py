"""Optimise a traced list of kernels: the same numbers from fewer and cheaper calls.

For small arrays, the call of a kernel takes longer than its computation. Four changes to a list keep every number;
:mod:`fedveil.training.kernel_replay` compares results before it uses a list:

* Results that nothing reads are not computed.
* Results that depend on no argument, such as the hashed positions of a dropout mask, are computed once.
* A kernel that is a method of tensors is called as a method: this takes a third of the time of a view.
* Max-pooling reads a copy with its channels innermost, where the same kernel computes many channels by one instruction:
  it chooses among numbers and rounds none.
"""

from __future__ import annotations

from types import MethodDescriptorType
from typing import Any, Final

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

_KEPT: Final = 1 << 14
"""Largest number of elements of a tensor that is computed once; every list keeps its own tensors."""

_CHANNELS: Final = 16  # from so many channels the copies cost less than pooling saves
_POOL: Final = torch.ops.aten.max_pool2d_with_indices.default
_NAMES: Final = {"aten::_unsafe_view": "view"}
"""Kernels whose method has another name."""


def optimise_graph(kernels: GraphModule) -> None:
    """Shorten a list of kernels, in place."""
    kernels.graph.eliminate_dead_code()
    _compute_once(kernels)
    _pool_channels_last(kernels.graph)
    _call_methods(kernels.graph)


def max_pool_channels_last(planes: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
    """Return maxima and their positions as ``aten::max_pool2d_with_indices`` does, in the same memory layout.

    >>> planes = torch.tensor([[[[1.0, 2.0], [2.0, 0.0]]]]).expand(1, 32, 2, 2).contiguous()
    >>> [one.unique().tolist() for one in max_pool_channels_last(planes, [2, 2])]  # the first of equal numbers
    [[2.0], [1]]
    """
    suited = planes.ndim == 4 and planes.shape[1] >= _CHANNELS and planes.device.type == "cpu"
    if not suited or not planes.is_contiguous():
        maxima, positions = _POOL(planes, *settings)
        return maxima, positions
    maxima, positions = _POOL(planes.contiguous(memory_format=torch.channels_last), *settings)
    return maxima.contiguous(), positions.contiguous()


def _pool_channels_last(graph: Graph) -> None:
    """Call :func:`max_pool_channels_last` wherever the list pools."""
    for node in graph.nodes:
        if node.target is _POOL and not node.kwargs:
            node.target = max_pool_channels_last


def _compute_once(kernels: GraphModule) -> None:
    """Replace kernels that read no argument by their results, unless another kernel could write to these."""
    settled = _settled(kernels)
    computed = [node for node in settled if node.op != "get_attr"]
    outside = {user for node in computed for user in node.users if user not in settled}
    # A kept tensor is reused in all later calls. A kernel that wrote to it, or a caller that received it, would
    # change the results of later steps.
    if any(user.op == "output" or _hands_on(user) for user in outside):
        return
    # In reverse order, all users of a node are replaced or erased before the node itself.
    for number, node in enumerate(reversed(list(settled))):
        if node.users and node.op != "get_attr":
            name = f"_settled_{number}"
            kernels.register_buffer(name, settled[node])
            with kernels.graph.inserting_before(node):
                node.replace_all_uses_with(kernels.graph.get_attr(name))
        if not node.users:
            kernels.graph.erase_node(node)


def _settled(kernels: GraphModule) -> dict[Node, Tensor]:
    """Return the small tensors that depend on no argument, in the order of the list."""
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
    """Return whether a kernel writes to the memory of its inputs, or returns a view of it."""
    if not isinstance(node.target, OpOverload):
        return False
    return any(argument.alias_info is not None for argument in node.target._schema.arguments)


def _call_methods(graph: Graph) -> None:
    """Call kernels through the tensor methods that PyTorch generates from the same declarations."""
    for node in list(graph.nodes):
        name = _method(node)
        if name is not None:
            with graph.inserting_before(node):
                node.replace_all_uses_with(graph.call_method(name, node.args, node.kwargs))
            graph.erase_node(node)


def _method(node: Node) -> str | None:
    """Return the name of the tensor method that is this kernel, or None.

    The kernel must be declared with a first argument ``self``, and its method must not be written in Python.
    """
    if not isinstance(node.target, OpOverload):
        return None
    declared = node.target._schema
    name = _NAMES.get(declared.name, declared.name.removeprefix("aten::"))
    takes_self = bool(declared.arguments) and declared.arguments[0].name == "self"
    return name if takes_self and isinstance(getattr(Tensor, name, None), MethodDescriptorType) else None
