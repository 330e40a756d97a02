"""Replay a function of tensors as a list of kernels, traced once per shape.

``vmap`` and ``grad`` run the Python code of a model, and their own, in every step of every contribution. For small
models this is most of a step. A function that is often called with tensors of one shape is therefore traced by
PyTorch's ``make_fx``, which records the kernels below vmap and autograd. The list then runs instead: the same
kernels, on the same tensors, in the same order, so the same bits. Only kernels with known or unread results are left
out (:mod:`fedveil.training.kernels`). docs/theory/vectorised-training.md.

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
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.fx import GraphModule
from torch.fx.graph import CodeGen
from torch.overrides import TorchFunctionMode

from fedveil.training.kernels import optimise_graph
from fedveil.training.shapes import equal_with_nan, single_threaded

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
        shapes = tuple((one.shape, one.stride(), int(one.storage_offset()), one.dtype) for one in tensors)
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

        def flat(*given: Tensor) -> tuple[Tensor, ...]:
            found = self._function(dict(zip(names, given, strict=False)), *given[len(names) :])
            return tuple(found[name] for name in names)

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
        for given in (made_up, _made_up(like, 1)):
            if not all(equal_with_nan(*both) for both in zip(kernels(*given), function(*given), strict=True)):
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
    for dtype in {one.dtype for one in like}:
        most = max(_reach(one) for one in like if one.dtype == dtype)
        if dtype.is_floating_point:
            numbers = 0.1 * torch.randn(most, generator=generator)
        else:
            numbers = (torch.arange(most) + turn) % 2
        memory[dtype] = numbers.to(like[0].device, dtype)
    # Views share the version counter of their base. A detached base starts at 0, so a later count above 0 is a write.
    return tuple(
        torch.as_strided(memory[one.dtype].detach(), one.shape, one.stride(), one.storage_offset())
        for one in like
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
            raise RuntimeError(f"{func} cannot stand in a list of kernels")
        return func(*args, **(kwargs or {}))
