"""A function of tensors as the list of kernels that it calls: written down once for every shape, then run by itself.

``vmap`` and ``grad`` go through the Python of a model, and their own, in every step of every contribution: most of a
step where models are small. A function that is often called with tensors of one shape is therefore traced, by
``make_fx`` of PyTorch, which notes what reaches the kernels below vmap and autograd, and the list is run instead: the
same kernels, of the same tensors, in the same order, so the same bits, but for those whose results are known or that
nobody reads (:mod:`fedveil.training.kernels`). docs/theory/vectorised-training.md.

The list must be a function of the tensors alone. It is written down from made-up tensors, so it holds nobody's records,
and is used only if

* nothing was read out of a tensor meanwhile, by whatever way Python has, no kernel's result has a shape that follows
  from numbers, and no code ran that PyTorch does not look into (``torch.autograd.Function``);
* it writes to nothing that it is given, and every tensor that stands in it is a constant of the model or one number;
* it gives what the function gives, bit for bit, for two sets of made-up tensors.

So whether there is a list follows from shapes, the function and how often a shape was met: of the three, the last may
hang on who else is there, and it changes no bit. Under autocast there are no lists: kernels that call others ask for
the precision again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.graph import CodeGen
from torch.overrides import TorchFunctionMode

from fedveil.training.kernels import optimise_graph
from fedveil.training.shapes import equal_with_nan, single_threaded

Tensors: TypeAlias = dict[str, Tensor]
GradientFunction: TypeAlias = Callable[[Tensors, Tensor, Tensor, Tensor, Tensor], Tensors]

CALLS: Final = 128
"""With tensors of one shape, after which it is traced: tracing takes as long as about a hundred calls save."""
_MOST: Final = 256
"""Shapes that are kept; others are computed as before."""

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
"""What gives the numbers of a tensor to Python; whatever else does calls ``item``, which cannot be traced."""

_Shapes: TypeAlias = tuple[tuple[torch.Size, tuple[int, ...], int, torch.dtype], ...]


class ReplayedGradient:
    """A batched gradient that runs as a list of kernels where its shapes come often.

    Args:
        function: of parameters by name and of a batch; its results are named like the parameters.
        constants: tensors that it reads beside its arguments.
        calls: with tensors of one shape, after which they are traced.
    """

    def __init__(
        self, function: GradientFunction, constants: Iterable[Tensor] = (), calls: int = CALLS
    ) -> None:
        self._function, self._constants, self._calls = function, tuple(constants), calls
        self._met: Counter[_Shapes] = Counter()
        self._lists: dict[_Shapes, Callable[..., tuple[Tensor, ...]]] = {}

    @property
    def lists(self) -> int:
        """How many shapes run as lists of kernels."""
        return len(self._lists)

    def __call__(
        self, parameters: Tensors, features: Tensor, targets: Tensor, mask: Tensor, seeds: Tensor
    ) -> Tensors:
        """Return what the function returns, bit for bit."""
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
        """Return the list of kernels for tensors of these shapes, None where there is none to rely on."""

        def flat(*given: Tensor) -> tuple[Tensor, ...]:
            found = self._function(dict(zip(names, given, strict=False)), *given[len(names) :])
            return tuple(found[name] for name in names)

        try:
            with single_threaded():  # others would find modules changed that tracing changes for a while
                return self._tried(flat, tensors)
        except Exception:  # the function itself is called, and says what is wrong with it, if anything is
            return None

    def _tried(
        self, function: Callable[..., tuple[Tensor, ...]], like: Sequence[Tensor]
    ) -> Callable[..., tuple[Tensor, ...]] | None:
        """Return the list of a function's kernels, None where it is not the function or could be another one."""
        made_up = _made_up(like, 0)
        with _Unread():
            graph = make_fx(function)(*made_up)
        written = any(tensor._version for tensor in made_up)
        if written or _follows_numbers(graph) or not all(self._known(tensor) for tensor in _held(graph)):
            return None
        optimise_graph(graph)
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
    """Return the tensors that stand in a list of kernels itself."""
    return [getattr(graph, str(node.target)) for node in graph.graph.nodes if node.op == "get_attr"]


def _follows_numbers(graph: GraphModule) -> bool:
    """Return whether shapes, and so what Python did, follow from the numbers in tensors."""
    tags = {tag for node in graph.graph.nodes for tag in getattr(node.target, "tags", ())}
    return torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags


def _made_up(like: Sequence[Tensor], turn: int) -> tuple[Tensor, ...]:
    """Return tensors that lie in memory as these do, with small numbers, zeros and ones that belong to nobody."""
    generator = torch.Generator().manual_seed(turn)
    memory: dict[torch.dtype, Tensor] = {}
    for dtype in {one.dtype for one in like}:
        most = max(_reach(one) for one in like if one.dtype == dtype)
        if dtype.is_floating_point:
            numbers = 0.1 * torch.randn(most, generator=generator)
        else:
            numbers = (torch.arange(most) + turn) % 2
        memory[dtype] = numbers.to(like[0].device, dtype)
    # A version counts what is written; views of a detached tensor begin at 0, with it.
    return tuple(
        torch.as_strided(memory[one.dtype].detach(), one.shape, one.stride(), one.storage_offset())
        for one in like
    )


def _reach(tensor: Tensor) -> int:
    """Return behind how many numbers of its memory a tensor ends."""
    steps = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset() + max(0, steps) + 1)


class _Unread(TorchFunctionMode):
    """Refuses whatever gives numbers of tensors to Python, and code that PyTorch does not look into."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _READS or isinstance(func, HigherOrderOperator):
            raise RuntimeError(f"{func} cannot stand in a list of kernels")
        return func(*args, **(kwargs or {}))
