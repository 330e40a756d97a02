"""A function of tensors as the list of kernels that it calls: written down once for every shape, then run by itself.

``vmap`` and ``grad`` go through the Python of a model, and their own, in every step of every contribution: most of a
step where models are small. A function that is often called with tensors of one shape is therefore traced, by
``make_fx`` of PyTorch, which notes what reaches the kernels below vmap and autograd, and the list is run instead: the
same kernels, of the same tensors, in the same order, so the same bits. docs/theory/vectorised-training.md.

The list must be a function of the tensors alone. What is read out of a tensor (``item``) or steers Python makes
tracing fail, as it makes vmap fail; a tensor in the list that was neither handed over nor is a single number of the
model's own code could hold anybody's records, and keeps the list from being used. Whether a list is used changes no
bit, so it may follow from how often a shape was met.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final, TypeAlias

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.graph import CodeGen

Tensors: TypeAlias = dict[str, Tensor]
GradientFunction: TypeAlias = Callable[[Tensors, Tensor, Tensor, Tensor, Tensor], Tensors]

CALLS: Final = 128
"""With tensors of one shape, after which it is traced: tracing takes as long as about a hundred calls save."""
_MOST: Final = 256
"""Shapes that are kept; others are computed as before."""

_Shapes: TypeAlias = tuple[tuple[torch.Size, tuple[int, ...]], ...]


class Replayed:
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
        shapes = tuple((tensor.shape, tensor.stride()) for tensor in tensors)
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
            graph = make_fx(flat)(*tensors)
        except (RuntimeError, NotImplementedError, TypeError, ValueError, AssertionError):
            return None  # the function itself is called, and says what is wrong with it, if anything is
        if not all(self._known(tensor) for tensor in _held(graph)):
            return None
        for node in graph.graph.nodes:
            node.meta.clear()
        graph.graph.set_codegen(CodeGen())
        graph.recompile()
        return graph.forward

    def _known(self, tensor: Tensor) -> bool:
        return tensor.ndim == 0 or any(tensor is constant for constant in self._constants)


def _held(graph: GraphModule) -> list[Tensor]:
    """Return the tensors that stand in a list of kernels itself."""
    return [getattr(graph, str(node.target)) for node in graph.graph.nodes if node.op == "get_attr"]
