"""Compose a statistic as a method: bounded vectors of (silo, user) pairs, summed with noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedveil.errors import CompositionError
from fedveil.methods.contributions import SiloUserContribution
from fedveil.methods.gaussian_shares import GaussianShares
from fedveil.methods.guarantee import PublicFacts
from fedveil.methods.method import Method
from fedveil.methods.protection_stage import ProtectionStage
from fedveil.methods.weights import Weights
from fedveil.privacy.bounds import FixedVector
from fedveil.privacy.noise import grid_for
from fedveil.privacy.sampling import Everyone
from fedveil.statistics.local_vectors import PersonVector
from fedveil.training.server.optimizers import STATELESS, Model, Optimizer, State, Vector

_EXACT_BITS = 52


@dataclass(frozen=True)
class ReleaseSum(Optimizer):
    """Server of a statistic: it releases the noisy sum, from which every figure is decoded."""

    steps_models: ClassVar[bool] = False

    def init(self, model: Model) -> State:
        """Return the empty state: every release is complete in itself."""
        return STATELESS

    def step(self, model: Model, mean: Vector, state: State) -> tuple[Model, State]:
        """Return the noisy sum, whatever was released before."""
        return mean.float(), STATELESS


def statistic(
    *,
    local: PersonVector,
    public: PublicFacts,
    weights: Weights,
    noise_multiplier: float,
    protection: ProtectionStage,
    colluding_silos: int = 0,
) -> Method:
    """Release sum_su w_su v_su + N(0, sigma^2), with ||v_su|| <= 1 and sum_s w_su <= 1.

    A person changes the sum by at most 1.

    Raises:
        CompositionError: sums over so many people are not exact on the grid of this noise, or the stages do not
            combine.
    """
    channel = GaussianShares(
        noise_multiplier=noise_multiplier,
        scale=1.0,
        colluding_silos=colluding_silos,
        max_dropouts=protection.max_dropouts,
        users=public.n_users,
    )
    # Sums are float64, exact below 2^53 grid steps: 2^52 for the people's sum, and one bit for the noise.
    grid = grid_for(channel.share_std(public.n_silos), at_most=1.0)
    if public.n_users / grid >= 2.0**_EXACT_BITS:
        raise CompositionError(
            f"statistics: {public.n_users} people on the grid of this noise exceed exact sums of 2^{_EXACT_BITS} "
            "steps; take more noise (a smaller epsilon), or fewer people"
        )
    return Method(
        name="statistics",
        contribution=SiloUserContribution(),
        sampler=Everyone(),
        local=local,
        bound=FixedVector(norm=1.0, step=grid),
        weights=weights,
        channel=channel,
        server=ReleaseSum(),
        protection=protection,
        released="statistics",
    )
