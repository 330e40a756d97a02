"""Define local algorithms: what a contribution does with a gradient, and what it remembers between rounds.

Local SGD (:class:`~fedveil.training.steps.LocalSgd`) computes a gradient and takes a step. A local algorithm changes
the direction of the step. It may keep tensors of a contribution from round to round, and the server may send it
tensors that it computes from released means.

**Claim.** The update of a contribution is clipped last, whatever its algorithm is. Given everything released before,
it is a function of the contribution's own records, its own earlier state, public numbers and its seeds. So one user
changes the sum of a round by at most the bound, and rounds compose adaptively: an algorithm changes no privacy event.
If users are Poisson-sampled, a contribution's state also depends on the user's earlier draws. The law of a round is
then a mixture, over these draws, of sampled Gaussian releases whose shifts have at most the length of the bound; the
hockey-stick divergence is jointly convex, so the event is the same.

**Conditions**, and where they are enforced: the rows of a batch are independent (:func:`check_rows`, tried with
made-up rows); nothing but the update leaves a contribution (:class:`LocalAlgorithm` has no other output); the state
that a contribution keeps is that of its last round, from the clipped update.

docs/how-to/local-algorithms.md shows how to add one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, ClassVar, Final, TypeAlias

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from fedveil.arguments import explain_arguments
from fedveil.config_keys import NonNegative
from fedveil.errors import CompositionError
from fedveil.stage import Stage, duty

Tensors: TypeAlias = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class LocalState:
    """State that a local algorithm reads beside the gradients of m contributions.

    Attributes:
        start: (d,) global model at the start of the round.
        rate_sum: sum of the learning rates of a contribution's steps, K eta for K steps at rate eta; public only if
            all contributions take equally many steps.
        kept: (m, d) tensors by name, one row per contribution: what :meth:`LocalAlgorithm.finish` returned last.
        broadcast: (d,) tensors by name: the server's state, computed from released means.
    """

    start: Float[Tensor, " d"]
    rate_sum: float = 0.0
    kept: Tensors = field(default_factory=dict)
    broadcast: Tensors = field(default_factory=dict)

    def rows(self, chosen: slice | Tensor) -> LocalState:
        """Return the state of some of the contributions."""
        if not self.kept:
            return self
        return replace(self, kept={name: rows[chosen] for name, rows in self.kept.items()})


@dataclass(frozen=True, kw_only=True)
class LocalAlgorithm(Stage):
    """Base of local algorithms: a frozen value whose fields are keys of the table ``[local]``.

    Attributes:
        changes: whether the direction of a step differs from the gradient.
        keeps: whether a contribution keeps tensors between rounds.
        in_span: whether the direction is one linear combination of gradient, model and start for all coordinates,
            without kept tensors, so that the Gram trainer can compute it.
    """

    changes: ClassVar[bool] = True
    keeps: ClassVar[bool] = False
    in_span: ClassVar[bool] = False

    @duty
    def slope(
        self, gradient: Float[Tensor, "m d"], at: Float[Tensor, "m d"], state: LocalState
    ) -> Float[Tensor, "m d"]:
        """Return the direction of a step of m contributions, in place of the gradient.

        Row i may depend on row i of the arguments, on ``start`` and on ``broadcast`` alone.

        Args:
            gradient: (m, d) gradients of the mean loss of each batch.
            at: (m, d) models at which they were computed.
            state: of these contributions.
        """
        return gradient

    def begin(self, dimension: int) -> Tensors:
        """Return a contribution's state before its first round, as (d,) tensors by name."""
        return {}

    def finish(self, sent: Float[Tensor, "m d"], state: LocalState) -> Tensors:
        """Return the state of m contributions after a round, as (m, d) tensors by name.

        Args:
            sent: (m, d) updates after the bound, before the weights; zero for an update that was not finite.
            state: of these contributions before the round.
        """
        return state.kept

    def begin_server(self, dimension: int) -> Tensors:
        """Return the server's state before the first round, as (d,) tensors by name."""
        return {}

    def step_server(self, mean: Float64[Tensor, " d"], state: LocalState) -> Tensors:
        """Return the server's state after a round.

        Args:
            mean: (d,) released mean of the updates, with its noise, in the unit of the model.
            state: of the round: ``start``, ``rate_sum`` and ``broadcast``.
        """
        return state.broadcast


@dataclass(frozen=True, kw_only=True)
class PlainSgd(LocalAlgorithm):
    """Plain gradient steps, as FedAVG and ULDP-AVG take them."""

    changes: ClassVar[bool] = False
    in_span: ClassVar[bool] = True

    def slope(
        self, gradient: Float[Tensor, "m d"], at: Float[Tensor, "m d"], state: LocalState
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
        self, gradient: Float[Tensor, "m d"], at: Float[Tensor, "m d"], state: LocalState
    ) -> Float[Tensor, "m d"]:
        return gradient + self.mu * (at - state.start)

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


@lru_cache(maxsize=64)  # trainers ask before every block
def linear_combination(algorithm: LocalAlgorithm) -> Combination:
    """Return the factors of an algorithm that declares ``in_span``.

    Raises:
        CompositionError: the direction is not one linear combination for all coordinates and lengths.
    """
    units = torch.eye(3).unbind()
    gradient, model, start = (
        float(algorithm.slope(g.view(1, 1), w.view(1, 1), LocalState(start=s.view(1)))) for g, w, s in units
    )
    generator = torch.Generator().manual_seed(0)
    g, w, s = (scale * torch.randn(2, _TRIED, generator=generator) for scale in (1.0, 3.0, 100.0))
    found = algorithm.slope(g.clone(), w.clone(), LocalState(start=s[0].clone())).double()
    wanted = gradient * g.double() + model * w.double() + start * s[0].double()
    size = abs(gradient) + 3 * abs(model) + 100 * abs(start)
    if not bool(((found - wanted).abs() <= _ROUNDING * size * 10).all()):
        raise CompositionError(
            f"{type(algorithm).__name__}, given as local algorithm, says in_span = True, and its slope() is not one "
            "linear combination of gradient, model and start: leave in_span out"
        )
    return Combination(gradient, model, start)


_TRIED: Final = 17
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
            tensors that ``begin`` does not name.
    """
    name = type(algorithm).__name__
    count = _ROWS[-1]
    generator = torch.Generator().manual_seed(1)

    def rows() -> Tensor:
        return torch.randn(count, dimension, generator=generator)

    made = {"gradient": rows(), "at": rows(), "sent": rows()}
    gradient = made["gradient"]
    kept = {one: rows() for one in algorithm.begin(dimension)}
    broadcast = {one: rows()[0] for one in algorithm.begin_server(dimension)}
    if bool(kept) != algorithm.keeps:
        raise CompositionError(
            f"{name}, given as local algorithm: keeps = {algorithm.keeps}, and begin() names {list(kept)}"
        )
    state = LocalState(start=rows()[0], rate_sum=0.5, kept=kept, broadcast=broadcast)

    def computed(chosen: Tensor, given: dict[str, Tensor] = made) -> dict[str, Tensor]:
        part = state.rows(chosen)
        found = {
            "slope()": algorithm.slope(given["gradient"][chosen].clone(), given["at"][chosen].clone(), part)
        }
        after = algorithm.finish(given["sent"][chosen].clone(), part) if algorithm.keeps else {}
        if set(after) != set(kept):
            raise CompositionError(
                f"{name}, given as local algorithm: finish() returns {sorted(after)}, and begin() names {sorted(kept)}"
            )
        return found | {f"finish()'s {one}": value for one, value in after.items()}

    whole = computed(torch.arange(count))
    _check_shapes(name, whole, gradient)

    def compare(found: dict[str, Tensor], chosen: Tensor, among: Tensor) -> None:
        for what, value in found.items():
            if not torch.equal(value[among], whole[what][chosen]):
                raise CompositionError(
                    f"{name}, given as local algorithm: {what} of one contribution depends on those computed "
                    "beside it, or on earlier calls, so bounding each bounds nothing: compute each row by itself"
                )

    for size in _ROWS:
        for chosen in (torch.arange(size), torch.arange(size).flip(0), torch.arange(count - size, count)):
            compare(computed(chosen), chosen, torch.arange(size))
    every, even = torch.arange(count), torch.arange(0, count, 2)
    for extreme in _EXTREMES:
        others = {one: torch.where((every % 2 == 1)[:, None], extreme, value) for one, value in made.items()}
        compare(computed(every, others), even, even)


def _check_shapes(name: str, results: dict[str, Tensor], like: Tensor) -> None:
    """Check that results have the shape and the type of a gradient."""
    for what, value in results.items():
        if value.shape != like.shape or value.dtype != torch.float32:
            raise CompositionError(
                f"{name}, given as local algorithm: {what} is {tuple(value.shape)} of {value.dtype}; float32 of the "
                "shape of the gradient is needed"
            )
