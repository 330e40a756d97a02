"""Replay a function of tensors as a list of kernels, traced once per shape.

``vmap`` and ``grad`` run the Python code of a model, and their own, in every step of every contribution. For small
models this is most of a step. A function that is often called with tensors of one shape is therefore traced by
PyTorch's ``make_fx``, which records the kernels below vmap and autograd. The list then runs instead: the same
kernels, on the same tensors, in the same order, so the same bits. Only kernels with known or unread results are left
out (:mod:`fedveil.training.kernel_replay`). docs/theory/vectorised-training.md.

The list must be a function of the tensors alone. It is traced with made-up tensors, so it holds no private records.
It is used only if

* during the trace, no Python code read numbers from a tensor, no kernel's result has a data-dependent shape, and no
  code ran that PyTorch does not trace (``torch.autograd.Function``);
* it writes to none of its inputs, and every tensor in it is a constant of the model or a single number;
* it gives the same bits as the function for two sets of made-up tensors.

Whether a list exists follows from shapes, the function, and how often a shape occurred. The last may depend on the
other contributions, but it changes no bit. Under autocast no lists are made, because composite kernels choose the
precision again when they are replayed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from operator import getitem
from types import MethodDescriptorType
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import CodeGen
from torch.fx.node import map_arg
from torch.overrides import TorchFunctionMode

from fedveil.training.shapes import equal_with_nan, single_threaded

# --- optimised lists ----------------------------------------------------------------------------------------
# Optimise a traced list of kernels: the same numbers from fewer and cheaper calls.
#
# For small arrays, the call of a kernel takes longer than its computation. Five changes to a list keep every number;
# :mod:`fedveil.training.kernel_replay` compares results before it uses a list:
#
# * Results that nothing reads are not computed.
# * A kernel that is called twice with the same arguments is called once: the slopes of a layer lay out the same arrays
#   as its outputs did.
# * Results that depend on no argument, such as the hashed positions of a dropout mask, are computed once.
# * A kernel that is a method of tensors is called as a method: this takes a third of the time of a view.
# * Max-pooling reads a copy with its channels innermost, where the same kernel computes many channels by one
#   instruction: it chooses among numbers and rounds none.


_KEPT: Final = 1 << 14
"""Largest number of elements of a tensor that is computed once; every list keeps its own tensors."""

_CHANNELS: Final = 16  # from so many channels the copies cost less than pooling saves
_POOL: Final = torch.ops.aten.max_pool2d_with_indices.default
_NAMES: Final = {"aten::_unsafe_view": "view"}
"""Kernels whose method has another name."""


def optimise_graph(kernels: GraphModule) -> None:
    """Shorten a list of kernels, in place."""
    kernels.graph.eliminate_dead_code()
    _share_results(kernels.graph)
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


def _share_results(graph: Graph) -> None:
    """Replace a kernel by an earlier call with the same arguments, unless a kernel of the list writes to its inputs.

    Kernels that draw random numbers are not shared. Results that the list returns are not shared either: the caller
    may write to one of them.
    """
    calls = [node for node in graph.nodes if node.op == "call_function"]
    if any(isinstance(node.target, OpOverload) and node.target._schema.is_mutable for node in calls):
        return
    returned = _returned(graph)
    first_calls: dict[tuple[Any, ...], Node] = {}
    for node in calls:
        draws = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        if draws or node in returned:
            continue
        same = (node.target, repr(node.args), repr(node.kwargs))
        earlier = first_calls.setdefault(same, node)
        if earlier is not node:
            node.replace_all_uses_with(earlier)
            graph.erase_node(node)


def _returned(graph: Graph) -> set[Node]:
    """Return the results whose memory the caller may receive: those that are returned, or of which a view is."""
    results: set[Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "output" or (node in results and (node.op != "call_function" or _hands_on(node))):
            results.update(node.all_input_nodes)
    return results


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
    constants: dict[Node, Tensor] = {}
    for node in kernels.graph.nodes:
        if node.op == "get_attr":
            constants[node] = getattr(kernels, str(node.target))
        elif isinstance(node.target, OpOverload) and all(
            input_node in constants for input_node in node.all_input_nodes
        ):
            args, kwargs = map_arg((node.args, node.kwargs), constants.__getitem__)
            result = node.target(*args, **kwargs)
            if isinstance(result, Tensor) and result.numel() <= _KEPT:
                constants[node] = result
    return constants


def _hands_on(node: Node) -> bool:
    """Return whether a kernel writes to the memory of its inputs, or returns a view of it."""
    if not isinstance(node.target, OpOverload):
        return node.target is getitem
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


# --- replay -------------------------------------------------------------------------------------------------


Tensors: TypeAlias = dict[str, Tensor]
GradientFunction: TypeAlias = Callable[[Tensors, Tensor, Tensor, Tensor, Tensor], Tensors]

CALLS: Final = 128
"""Calls with tensors of one shape before the shape is traced: a trace takes as long as about a hundred calls save."""
CALLS_OF_POOLING: Final = 30
"""The same for models with max-pooling layers, whose list saves a quarter of every call."""
_MOST: Final = 256
"""Largest number of traced shapes; other shapes call the function."""

_READS: Final = frozenset(
    {
        Tensor.numpy,
        Tensor.tolist,
        Tensor.item,
        Tensor.__array__,
        Tensor.__dlpack__,
        Tensor.data_ptr,
        Tensor.untyped_storage,
    }
)
"""Tensor methods that give numbers to Python; all other ways call ``item``, which cannot be traced."""

_Shapes: TypeAlias = tuple[tuple[torch.Size, tuple[int, ...], int, torch.dtype], ...]


class ReplayedGradient:
    """A batched gradient that runs as a list of kernels for shapes that occur often.

    Args:
        function: takes parameters by name and a batch; its results are named like the parameters.
        constants: tensors that it reads in addition to its arguments.
        calls: number of calls with tensors of one shape after which that shape is traced.
    """

    def __init__(
        self, function: GradientFunction, constants: Iterable[Tensor] = (), calls: int = CALLS
    ) -> None:
        self._function, self._constants, self._calls = function, tuple(constants), calls
        self._met: Counter[_Shapes] = Counter()
        self._lists: dict[_Shapes, Callable[..., tuple[Tensor, ...]]] = {}

    @property
    def lists(self) -> int:
        """Number of shapes that run as lists of kernels."""
        return len(self._lists)

    def __call__(
        self, parameters: Tensors, features: Tensor, targets: Tensor, mask: Tensor, seeds: Tensor
    ) -> Tensors:
        """Return the function's result, bit for bit."""
        tensors = (*parameters.values(), features, targets, mask, seeds)
        shapes = tuple(
            (tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.dtype) for tensor in tensors
        )
        kernels = self._lists.get(shapes)
        if kernels is not None:
            return dict(zip(parameters, kernels(*tensors), strict=True))
        self._met[shapes] += 1
        if self._met[shapes] == self._calls and len(self._lists) < _MOST:
            kernels = self._traced(tuple(parameters), tensors)
            if kernels is not None:
                self._lists[shapes] = kernels
        return self._function(parameters, features, targets, mask, seeds)

    def _traced(
        self, names: tuple[str, ...], tensors: tuple[Tensor, ...]
    ) -> Callable[..., tuple[Tensor, ...]] | None:
        """Return the list of kernels for tensors of these shapes; None if no list can be relied on."""

        def flat(*tensors: Tensor) -> tuple[Tensor, ...]:
            results = self._function(dict(zip(names, tensors, strict=False)), *tensors[len(names) :])
            return tuple(results[name] for name in names)

        try:
            # Tracing patches modules of PyTorch for a while, so no other training may run.
            with single_threaded():
                return self._tried(flat, tensors)
        except Exception:  # the caller then runs the function itself, which raises its own error if it fails
            return None

    def _tried(
        self, function: Callable[..., tuple[Tensor, ...]], like: Sequence[Tensor]
    ) -> Callable[..., tuple[Tensor, ...]] | None:
        """Return a function's list of kernels; None if it may differ from the function."""
        from torch.fx.experimental.proxy_tensor import make_fx

        made_up = _made_up(like, 0)
        with _Unread():
            graph = make_fx(function)(*made_up)
        # PyTorch counts the writes to a tensor in _version.
        written = any(tensor._version for tensor in made_up)
        if written or _follows_numbers(graph) or not all(self._known(tensor) for tensor in _held(graph)):
            return None
        optimise_graph(graph)
        # Node metadata keep tensors of the trace alive. The plain CodeGen calls the list with flat arguments.
        for node in graph.graph.nodes:
            node.meta.clear()
        graph.graph.set_codegen(CodeGen())
        graph.recompile()
        kernels: Callable[..., tuple[Tensor, ...]] = graph.forward
        for inputs in (made_up, _made_up(like, 1)):
            if not all(
                equal_with_nan(*both) for both in zip(kernels(*inputs), function(*inputs), strict=True)
            ):
                return None
        return kernels

    def _known(self, tensor: Tensor) -> bool:
        return tensor.ndim == 0 or any(tensor is constant for constant in self._constants)


def _held(graph: GraphModule) -> list[Tensor]:
    """Return the tensors that are stored in a list of kernels."""
    return [getattr(graph, str(node.target)) for node in graph.graph.nodes if node.op == "get_attr"]


def _follows_numbers(graph: GraphModule) -> bool:
    """Return whether a shape, and so the path of the Python code, depends on the numbers in a tensor."""
    tags = {tag for node in graph.graph.nodes for tag in getattr(node.target, "tags", ())}
    return torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags


def _made_up(like: Sequence[Tensor], turn: int) -> tuple[Tensor, ...]:
    """Return made-up tensors with the memory layout of these: small numbers, zeros and ones."""
    generator = torch.Generator().manual_seed(turn)
    memory: dict[torch.dtype, Tensor] = {}
    for dtype in {tensor.dtype for tensor in like}:
        most = max(_reach(tensor) for tensor in like if tensor.dtype == dtype)
        if dtype.is_floating_point:
            numbers = 0.1 * torch.randn(most, generator=generator)
        else:
            numbers = (torch.arange(most) + turn) % 2
        memory[dtype] = numbers.to(like[0].device, dtype)
    # Views share the version counter of their base. A detached base starts at 0, so a later count above 0 is a write.
    return tuple(
        torch.as_strided(
            memory[tensor.dtype].detach(), tensor.shape, tensor.stride(), tensor.storage_offset()
        )
        for tensor in like
    )


def _reach(tensor: Tensor) -> int:
    """Return the number of elements of its memory up to the end of a tensor."""
    steps = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset() + max(0, steps) + 1)


class _Unread(TorchFunctionMode):
    """Mode that refuses reads of tensor numbers by Python, and code that PyTorch does not trace."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _READS or isinstance(func, HigherOrderOperator):
            raise RuntimeError(f"{func} cannot be recorded in a list of kernels")
        return func(*args, **(kwargs or {}))
