"""Define the computation of one contribution from the global model: local training as a value.

=================  ====================================================================================
step               update Delta of a contribution with records D, from the model w
=================  ====================================================================================
LocalSgd           w_Q - w after Q epochs of mini-batch SGD on D (ULDP-AVG, FedAVG), by a local algorithm
LocalGradient      -(gradient of the mean loss over D at w) (ULDP-SGD)
LocalDpSgd         w_T - w after T noisy steps of DP-SGD on D (ULDP-GROUP, inside each silo)
=================  ====================================================================================

Each update is a model difference: the server ADDS the aggregate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Final, TypeAlias

import torch
from jaxtyping import Float32
from pydantic import Field
from torch import Tensor

from fedveil.config_keys import (
    Count,
    Fraction,
    NonNegative,
    Positive,
    calibrated_field,
    composed_field,
    is_number,
)
from fedveil.errors import CompositionError, ConfigError
from fedveil.privacy.claims import Claim, Reveals, covered_knowledge, no_guarantee
from fedveil.privacy.events import Event
from fedveil.privacy.group import published_group_epsilon, worst_split
from fedveil.privacy.noise import DiscreteGaussian, grid_for
from fedveil.privacy.statement import show_at_least, show_at_most
from fedveil.stage import Published, Sensitivity, Source, answers, everyone_adds
from fedveil.training.local_algorithms import PLAIN, LocalAlgorithm

_LARGEST: Final = 3e38
"""Upper limit of learning rate and weight decay: steps are computed in float32, whose largest number is 3.4e38."""


@dataclass(frozen=True, kw_only=True)
class LocalSgd(Source):
    """Q epochs of mini-batch SGD; the update is Delta = w_end - w_start.

    Each epoch visits the records in a new random order, in batches of ``batch_size``. The last batch may be smaller;
    its loss is the mean over its records. With momentum mu and weight decay lambda, as in ``torch.optim.SGD``:

        v <- mu v + (grad + lambda w),    w <- w - learning_rate v,    v starting at 0 in every contribution.

    With a ``projection`` L, every step is followed by (DP-Fed-LS, Algorithm 1)

        w <- w_t + (w - w_t) / max(1, ||w - w_t|| / L).

    An ``algorithm`` replaces grad by another direction (:mod:`fedveil.training.local_algorithms`).

    The model then never leaves the ball of radius L around the global model w_t, up to float32 rounding. Not claimed:
    a privacy guarantee of the projection. It is part of the training; the method enforces its own bound on the update
    in any case.

    Attributes:
        learning_rate: eta_l, the local rate in the first round. In an experiment ``"by-rule"`` takes 1 / (c (p + 1))
            for p features, c the curvature of the loss (docs/theory/recommended.md).
        epochs: Q, passes over the contribution's records.
        steps: tau, number of batches after which the single pass over the records stops; None makes whole passes.
            Needs epochs = 1.
        batch_size: records per step; None takes all records of the contribution.
        momentum: mu.
        weight_decay: lambda.
        decay: the factor by which the learning rate falls from round to round.
        projection: L, same unit as the update; None projects nothing. The method sets it.
        algorithm: direction of a step; ``local.name`` selects it.

    Raises:
        ConfigError: a value outside its range, or steps of several epochs.
    """

    own_noise: ClassVar[bool] = False  # whether the steps add noise and claim privacy for it
    one_gradient: ClassVar[bool] = False  # whether the update is a gradient; only the data bound its length

    learning_rate: Annotated[Positive, calibrated_field("by-rule")] = 0.1
    epochs: Count = 1
    steps: Count | None = None
    batch_size: Annotated[Count, Field(le=1_000_000_000)] | None = None
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    weight_decay: NonNegative = 0.0
    decay: Fraction = 1.0
    projection: Annotated[Positive | None, composed_field()] = None
    algorithm: Annotated[LocalAlgorithm, composed_field()] = PLAIN

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps is not None and self.epochs != 1:
            raise ConfigError(
                f"local steps end the one pass over the records; epochs must be 1, not {self.epochs}"
            )
        if not self.has_rate and str(self.learning_rate) != "by-rule":
            raise ConfigError(f"learning_rate = {self.learning_rate!r}: a number, or 'by-rule', is needed")
        for name in ("learning_rate", "weight_decay"):
            if is_number(getattr(self, name)) and getattr(self, name) > _LARGEST:
                raise ConfigError(
                    f"{name} = {getattr(self, name):g}: training is in float32; at most {_LARGEST:g}"
                )

    @property
    def has_rate(self) -> bool:
        """Return whether the learning rate is a number; an experiment finds it where it is a word."""
        return is_number(self.learning_rate)

    def refuses(self, method: Any) -> Iterable[str]:
        """Refuse a rate that only an experiment can find, and what the algorithm refuses."""
        if not self.has_rate:
            yield "local learning_rate = 'by-rule' is found for an experiment; give a number"
            return
        yield from self.algorithm.refuses(method)

    def count(self, records: int) -> int:
        """Return the number of gradient steps of a contribution with this many records."""
        batches = -(-records // (self.batch_size or max(1, records)))
        return self.epochs * batches if self.steps is None else min(self.steps, batches)

    def at_round(self, number: int) -> LocalSgd:
        """Return the training of round 1, 2, ...: the decayed learning rate, with ``decay`` set to 1."""
        if self.decay == 1:
            return self
        rate = self.learning_rate * self.decay ** (number - 1)
        return replace(self, learning_rate=rate, decay=1.0)


@dataclass(frozen=True, kw_only=True)
class LocalGradient(Source):
    """One gradient: Delta = -grad of the mean loss over all records of the contribution.

    This equals one full-batch step of rate 1, so the trainers implement only :class:`LocalSgd`.
    """

    own_noise: ClassVar[bool] = False
    one_gradient: ClassVar[bool] = True

    def at_round(self, number: int) -> LocalGradient:
        """Return the step itself: it has no learning rate that decays."""
        return self

    def as_sgd(self) -> LocalSgd:
        """Return the full-batch SGD step of rate 1 that computes the same update."""
        return LocalSgd(learning_rate=1.0, epochs=1)


@dataclass(frozen=True, kw_only=True)
class PoissonSchedule:
    """Batches of DP-SGD on a silo.

    Each record joins each of ``steps`` steps with probability ``rate``.
    """

    rate: float
    steps: int


@dataclass(frozen=True, kw_only=True)
class LocalDpSgd(Source):
    """DP-SGD on the records of a silo: Poisson batches, per-record clipping and noise in every step.

    With C the bound of the method and n the number of records of the silo, one step is (Abadi et al. 2016, Algorithm
    1, with Opacus's divisor, the expected batch size):

        w <- w - learning_rate (sum over the batch of clip(grad_i, C) + N(0, noise_multiplier^2 C^2 I)) /
        (rate n)

    Args:
        learning_rate: local rate eta_l > 0.
        epochs: Q >= 1, passes over the silo in expectation.
        batch_size: desired batch size B; the rate is 1 / ceil(n / B) as in Opacus.
        noise_multiplier: sigma >= 0, in units of C.

    Raises:
        ConfigError: a value outside these ranges.
    """

    own_noise: ClassVar[bool] = True
    one_gradient: ClassVar[bool] = False

    learning_rate: Positive
    epochs: Count
    batch_size: Count
    noise_multiplier: float

    def __post_init__(self) -> None:
        super().__post_init__()
        LocalSgd(learning_rate=self.learning_rate, epochs=self.epochs, batch_size=self.batch_size)
        if not (is_number(self.noise_multiplier) and 0 <= self.noise_multiplier < math.inf):
            raise ConfigError(f"local noise_multiplier must be a number >= 0, not {self.noise_multiplier}")

    def plan(self, records: int) -> PoissonSchedule:
        """Return the sampling rate and the number of steps of one round for a silo with this many records.

        A silo without records gets the plan of a silo with one record. Otherwise removing its last record would also
        remove its noise, and the absence would show.
        """
        batches = -(-max(1, records) // self.batch_size)
        return PoissonSchedule(rate=1 / batches, steps=self.epochs * batches)

    @property
    def content(self) -> Reveals:
        """Content of a silo's update: noisy if the noise multiplier is positive, else exact."""
        return Reveals.MESSAGE if self.noise_multiplier else Reveals.EXACT

    def claims(self, sensitivity: Sensitivity) -> tuple[Claim, ...]:
        """Claim the noise of all steps against a reader of the silos' models.

        The claim holds for the worst division of a user's records among the silos.
        """
        if self.noise_multiplier == 0:
            return (no_guarantee("DP-SGD runs without noise"),)
        if sensitivity.records is None:
            return (no_guarantee("the number of records in each silo is not known"),)
        event, _ = self._worst(sensitivity)
        return (Claim(covered_knowledge(Reveals.SUM, Reveals.EXACT, Reveals.MESSAGE, Reveals.OWN), event),)

    def grid_loss(self, sensitivity: Sensitivity) -> float:
        if self.noise_multiplier == 0 or sensitivity.records is None:
            return 0.0
        std, grid = self.noise_multiplier * sensitivity.norm, sensitivity.bound.grid
        # The accountant assumes continuous Gaussian noise, and each step adds discrete noise. With N steps in all
        # silos, epsilon rises by at most 2 N eta per coordinate, eta = log_ratio_to_gaussian
        # (docs/theory/discrete-gaussian.md).
        law = DiscreteGaussian(std=std, grid=grid_for(std, at_most=grid))
        steps = sum(self.plan(records).steps for records in sensitivity.records)
        return 2 * steps * law.log_ratio_to_gaussian

    def mechanisms(self, sensitivity: Sensitivity) -> tuple[str, ...]:
        """Return the sampling rates and steps of every silo, and the division of records that decides epsilon."""
        if self.noise_multiplier == 0 or sensitivity.records is None:
            return ()
        plans = [self.plan(records) for records in sensitivity.records]
        return (
            f"DP-SGD in each silo with noise multiplier {show_at_least(self.noise_multiplier)}; in each round, silo by "
            "silo: "
            + "; ".join(
                f"{plan.steps} steps at Poisson sampling rate {show_at_most(plan.rate)}" for plan in plans
            ),
            f"at most {sensitivity.group} records of a user are trained on, over all silos together; the "
            "guarantee holds "
            "however they are divided among the silos (the division nearest to the bound is "
            f"{self._worst(sensitivity)[1]})",
        )

    def uncovered_facts(self, method: Any) -> tuple[str, ...]:
        """Return the facts that the guarantee does not cover.

        These are the record counts, which set the rates; the choice of a user's kept records; and the trust that
        every silo adds its noise.
        """
        if self.noise_multiplier == 0:
            return ()
        return (
            "the number of records that each silo trains on: it sets the silo's sampling rate and counts as public",
            "which of a user's records are kept: this depends on how many records the user has in each silo; whoever "
            "chooses them learns these numbers, and a silo learns something about them from which of its own records "
            "are kept",
            everyone_adds("silo", 0),
        )

    def published_figures(self, method: Any, public: Any) -> tuple[Published, ...]:
        """Return the epsilon of Theorem 2 of ULDP-FL, as its published program computes it."""
        if self.noise_multiplier == 0 or public.silo_records is None:
            return ()
        per_user, sigma, silos = (
            method.contribution.per_user,
            self.noise_multiplier,
            self._rates(public.silo_records),
        )

        def theorem_2(rounds: int, delta: float) -> float:
            whole_run = tuple((rate, steps * rounds) for rate, steps in silos)
            return published_group_epsilon(
                group_size=per_user, noise_multiplier=sigma, silos=whole_run, delta=delta
            )

        gap = "it uses Renyi orders that the lemma excludes, and rounds the group size down to a power of two"
        return (
            Published(name="Theorem 2 of ULDP-FL, as its program computes it", gap=gap, epsilon=theorem_2),
        )

    def _rates(self, records: tuple[int, ...]) -> tuple[tuple[float, int], ...]:
        return tuple((plan.rate, plan.steps) for plan in map(self.plan, records))

    def _worst(self, moves: Sensitivity) -> tuple[Event, tuple[int, ...]]:
        assert moves.records is not None
        return _worst_split(moves.group, self.noise_multiplier, self._rates(moves.records))


# worst_split searches over divisions of the records, and claims and mechanisms ask for the same arguments.
@lru_cache(maxsize=32)
def _worst_split(
    group: int, noise_multiplier: float, silos: tuple[tuple[float, int], ...]
) -> tuple[Event, tuple[int, ...]]:
    return worst_split(group_size=group, noise_multiplier=noise_multiplier, silos=silos)


LocalStep: TypeAlias = LocalSgd | LocalGradient


def check_computed(local: Any) -> None:
    """Check that trainers can compute these local steps exactly.

    Trainers read the fields of the built-in classes and call no method of a subclass, so a subclass is refused.

    Raises:
        CompositionError: a class that trainers do not know, even if it derives from a known one.
    """
    if isinstance(local, LocalSgd) and not answers(local.algorithm, "slope"):
        raise CompositionError(
            f"{type(local.algorithm).__name__}, given as local algorithm, does not define slope(), which every local "
            "algorithm must define"
        )
    if type(local) not in _COMPUTED:
        supported = ", ".join(kind.__name__ for kind in _COMPUTED)
        raise CompositionError(
            f"{type(local).__name__}, given as local: trainers compute {supported} from their fields, and would ignore "
            "what another class defines; take one of these, or write a local algorithm (LocalSgd.algorithm)"
        )


def as_sgd(local: LocalStep) -> LocalSgd:
    """Return the SGD that computes the update of these local steps.

    Raises:
        CompositionError: steps of a class that trainers do not know.
    """
    check_computed(local)
    return local.as_sgd() if isinstance(local, LocalGradient) else local


_COMPUTED: Final = (LocalSgd, LocalGradient, LocalDpSgd)


# --- projection of DP-Fed-LS --------------------------------------------------------------------------------
# Project models as DP-Fed-LS does: after every step, pull a model back into a ball around its start.


def project_(models: Float32[Tensor, "b d"], centre: Float32[Tensor, " d"] | None, radius: float) -> None:
    """Replace every row w by c + (w - c) / max(1, ||w - c|| / radius), in place.

    Norms are computed in float64, so that no finite row overflows. A row that is not finite stays so; the bound on
    contributions counts it and drops it later.

    Args:
        models: (b, d) one model, or one update, per row.
        centre: c; None is the origin.
        radius: L > 0, same unit as the updates.

    >>> rows = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
    >>> project_(rows, None, 1.0)
    >>> [[round(x, 4) for x in row] for row in rows.tolist()]
    [[0.6, 0.8], [0.3, 0.4]]
    """
    moves = models if centre is None else models - centre
    norms = torch.linalg.vector_norm(moves, dim=1, dtype=torch.float64)
    outside = (norms > radius).nonzero().flatten()
    if len(outside):
        shortened = moves[outside].mul_((radius / norms[outside]).float()[:, None])
        models[outside] = shortened if centre is None else shortened.add_(centre)
