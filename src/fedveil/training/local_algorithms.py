"""Define local algorithms: what a contribution does with a gradient.

Local SGD (:class:`~fedveil.training.steps.LocalSgd`) computes a gradient and takes a step. A local algorithm changes
the direction of the step.

**Claim.** The update of a contribution is clipped last, whatever its algorithm is. It is a function of the
contribution's own records, the released model, public numbers and its seeds. So one user changes the sum of a round by
at most the bound: an algorithm changes no privacy event.

**Conditions**, and where they are enforced: the rows of a batch are independent, and nothing is remembered between
calls or written to the global model, from which others start (:func:`check_rows`, tried with made-up rows, and
:func:`fedveil.training.state_leak_check.check_algorithm_unchanged` in every round); nothing but the update leaves a
contribution (:class:`LocalAlgorithm` has no other output). Not enforced: that an algorithm computes rows apart in
later calls as it did when it was tried.

docs/how-to/local-algorithms.md shows how to add one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Final

import torch
from jaxtyping import Float
from torch import Tensor

from fedveil.arguments import explain_arguments
from fedveil.config_keys import NonNegative
from fedveil.errors import CompositionError, ModelError
from fedveil.stage import Stage, duty


@dataclass(frozen=True, kw_only=True)
class LocalAlgorithm(Stage):
    """Base of local algorithms: a frozen value whose fields are keys of the table ``[local]``.

    Attributes:
        changes: whether the direction of a step differs from the gradient.
        in_span: whether the direction is one linear combination of gradient, model and start for all coordinates, so
            that the Gram trainer can compute it.
    """

    changes: ClassVar[bool] = True
    in_span: ClassVar[bool] = False

    @duty
    def slope(
        self, gradient: Float[Tensor, "m d"], at: Float[Tensor, "m d"], start: Float[Tensor, " d"]
    ) -> Float[Tensor, "m d"]:
        """Return the direction of a step of m contributions, in place of the gradient.

        Row i may depend on row i of ``gradient`` and ``at``, and on ``start``, alone. ``at`` and ``start`` are not
        modified, and the result is no view of them: at the first step, ``at`` is the global model itself.

        Args:
            gradient: (m, d) gradients of the mean loss of each batch; may be modified.
            at: (m, d) models at which they were computed.
            start: (d,) global model at the start of the round.
        """
        return gradient


@dataclass(frozen=True, kw_only=True)
class PlainSgd(LocalAlgorithm):
    """Plain gradient steps, as FedAVG and ULDP-AVG take them."""

    changes: ClassVar[bool] = False
    in_span: ClassVar[bool] = True

    def slope(
        self, gradient: Float[Tensor, "m d"], at: Float[Tensor, "m d"], start: Float[Tensor, " d"]
    ) -> Float[Tensor, "m d"]:
        return gradient


@explain_arguments
@dataclass(frozen=True, kw_only=True)
class FedProx(LocalAlgorithm):
    """Gradient steps with a pull towards the global model: g + mu (w - w_t) (Li et al. 2020, FedProx).

    This is the gradient of the local loss plus mu / 2 ||w - w_t||^2. Nothing is kept and nothing more is sent.

    Attributes:
        mu: strength of the pull; 0 is plain SGD. Steps are stable for a learning rate below 2 / (L + mu), with L the
            curvature of the loss.
    """

    mu: NonNegative

    in_span: ClassVar[bool] = True

    def slope(
        self, gradient: Float[Tensor, "m d"], at: Float[Tensor, "m d"], start: Float[Tensor, " d"]
    ) -> Float[Tensor, "m d"]:
        return gradient + self.mu * (at - start)

    def refuses(self, method: Any) -> Iterable[str]:
        """Refuse a rate at which the pull alone makes steps overshoot more at every step."""
        rate = method.local.learning_rate
        if rate * self.mu >= _STABLE:
            yield (
                f"local.mu = {self.mu:g} at local.learning_rate = {rate:g}: steps are stable for a learning_rate below "
                f"2 / mu = {_STABLE / self.mu:g}; take a smaller mu or learning_rate"
            )


_STABLE: Final = 2.0
PLAIN: Final = PlainSgd()


@dataclass(frozen=True)
class Combination:
    """The direction of a step in the span: gradient * g + model * w + start * w_t.

    Attributes:
        gradient: factor of the gradient.
        model: factor of the model.
        start: factor of the global model.
    """

    gradient: float
    model: float
    start: float


def direction(
    algorithm: LocalAlgorithm,
    gradient: Float[Tensor, "m d"],
    at: Float[Tensor, "m d"],
    start: Float[Tensor, " d"],
) -> Float[Tensor, "m d"]:
    """Return the direction of a step of m contributions; args as for :meth:`LocalAlgorithm.slope`.

    Raises:
        ModelError: the direction has another type or shape than the gradient. One row for all would be broadcast.
    """
    slope = algorithm.slope(gradient, at, start)
    if not isinstance(slope, Tensor) or slope.shape != gradient.shape or slope.dtype != torch.float32:
        kind = f"{tuple(slope.shape)} of {slope.dtype}" if isinstance(slope, Tensor) else type(slope).__name__
        raise ModelError(
            f"{type(algorithm).__name__}, given as local algorithm: slope() is {kind}; a float32 tensor of the shape "
            "of the gradient is needed"
        )
    return slope.contiguous()  # trainers write to it, and rows of an expanded tensor share their numbers


@lru_cache(maxsize=64)  # trainers ask before every block
def linear_combination(algorithm: LocalAlgorithm) -> Combination:
    """Return the factors of an algorithm that declares ``in_span``.

    Raises:
        CompositionError: the direction is not one linear combination for all coordinates and lengths.
    """
    units = torch.eye(3).unbind()
    gradient, model, start = (
        float(algorithm.slope(g.view(1, 1), w.view(1, 1), s.view(1))) for g, w, s in units
    )
    generator = torch.Generator().manual_seed(0)
    g, w, s = (scale * torch.randn(2, _TRIED, generator=generator) for scale in (1.0, 3.0, 100.0))
    computed = algorithm.slope(g.clone(), w.clone(), s[0].clone()).double()
    expected = gradient * g.double() + model * w.double() + start * s[0].double()
    size = abs(gradient) + 3 * abs(model) + 100 * abs(start)
    if not bool(((computed - expected).abs() <= _ROUNDING * size * 10).all()):
        raise CompositionError(
            f"{type(algorithm).__name__}, given as local algorithm, says in_span = True, and its slope() is not one "
            "linear combination of gradient, model and start: leave in_span out"
        )
    return Combination(gradient, model, start)


_TRIED: Final = 17
_WRITTEN: Final = 3.0
_ROUNDING: Final = 1e-5
_ROWS: Final = (1, 2, 5, 8, 64)
_EXTREMES: Final = (0.0, 1e30, -3e38, math.inf, math.nan)
"""Numbers of other contributions that a guard over a whole block would react to."""


def check_rows(algorithm: LocalAlgorithm, dimension: int = 257) -> None:
    """Check, with made-up rows, that an algorithm computes each contribution by itself and remembers nothing.

    Args:
        algorithm: the algorithm.
        dimension: d of the made-up rows.

    A bound on each contribution bounds nothing if the update of one depends on another, so bits must agree.

    Raises:
        CompositionError: a result of another shape or type; a row that depends on its neighbours or on earlier calls;
            a global model that is written to.
    """
    where = f"{type(algorithm).__name__}, given as local algorithm: slope()"
    count = _ROWS[-1]
    generator = torch.Generator().manual_seed(1)
    gradient, at = (torch.randn(count, dimension, generator=generator) for _ in range(2))
    start = torch.randn(dimension, generator=generator)

    def computed(chosen: Tensor, filler: float | None = None) -> Tensor:
        """Return the directions of some rows; ``filler`` stands in all odd rows."""
        odd = torch.zeros_like(chosen, dtype=torch.bool) if filler is None else chosen % 2 == 1
        slopes, models = (torch.where(odd[:, None], filler or 0.0, rows[chosen]) for rows in (gradient, at))
        shared = models.clone(), start.clone()
        try:
            directions = direction(algorithm, slopes, *shared)
        except ModelError as error:
            raise CompositionError(str(error)) from None
        # Bytes are compared: rows may hold NaN.
        unchanged = (
            after.numpy().tobytes() == before.numpy().tobytes()
            for after, before in zip(shared, (models, start), strict=True)
        )
        addresses = {tensor.untyped_storage().data_ptr() for tensor in shared}
        if not all(unchanged) or directions.untyped_storage().data_ptr() in addresses:
            raise CompositionError(
                f"{where} writes to the model or returns a view of it: other contributions start from that model, so "
                "bounding each bounds nothing; compute with operations that return new tensors"
            )
        kept_apart = directions.clone()
        # As trainers write to it: a tensor that the algorithm holds would carry one contribution into the next call.
        directions.fill_(_WRITTEN)
        return kept_apart

    whole = computed(torch.arange(count))

    def compare(computed: Tensor, expected: Tensor) -> None:
        if not torch.equal(computed, expected):
            raise CompositionError(
                f"{where} of one contribution depends on those computed beside it, or on earlier calls, so bounding "
                "each bounds nothing: compute each row by itself"
            )

    for size in _ROWS:
        for chosen in (torch.arange(size), torch.arange(size).flip(0), torch.arange(count - size, count)):
            compare(computed(chosen), whole[chosen])
    for extreme in _EXTREMES:
        compare(computed(torch.arange(count), extreme)[::2], whole[::2])
