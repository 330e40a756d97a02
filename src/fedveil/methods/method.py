"""A method is a value: the stages of one round, from who takes part to what the server does with the sum.

What cannot combine is refused when the value is built, with the reason. What the composition guarantees is derived from
it by :func:`fedveil.methods.guarantee.derive`, never stated beside it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from fedveil.errors import CompositionError
from fedveil.local.steps import LocalDpSgd, LocalGradient, LocalSgd
from fedveil.methods.protections import NO_PROTECTION, Protection, SecureAggregation
from fedveil.methods.stages import (
    CentralGaussian,
    Channel,
    ClientContribution,
    Contribution,
    GaussianShares,
    LayeredShares,
    RecordContribution,
    SiloUserContribution,
    Weights,
)
from fedveil.privacy.bounds import Clip, Unbounded
from fedveil.privacy.sampling import Everyone, PoissonUsers, UniformClients
from fedveil.server.denoise import NO_DENOISER, DenoiserValue
from fedveil.server.optimizers import ServerSgd


@dataclass(frozen=True, kw_only=True)
class Method:
    """One round, stage by stage; a frozen value that can be compared, printed and recombined.

    With Delta_i the update of contribution i (``local``), w_i its weight and clip the ``bound``, silo s sends
    ``channel( sum_{i in s} w_i clip(Delta_i) )`` and the server adds the silos' messages up, divides by
    :meth:`divisor`, estimates what lies under the noise (``denoiser``) and applies ``server``.

    Attributes:
        name: what reports call it.
        contribution: what is trained and bounded: a silo, a (silo, user) pair, a client, a record.
        sampler: which users (or clients) take part in a round.
        local: what one contribution computes.
        bound: the l2 bound of one contribution's update.
        weights: how contributions enter their silo's sum.
        channel: what a silo does to its sum before it leaves, or the server to the sum of all.
        protection: what hides a single silo's message from the server.
        denoiser: the server's estimate of the mean under its noise: post-processing, free of charge.
        server: what happens to the mean of the sums.
        denominator: "expected" divides by how many take part in expectation; "actual" by how many did, which is
            private and not covered by the guarantee: for reproduction only.
    """

    name: str
    contribution: Contribution
    sampler: Everyone | PoissonUsers | UniformClients
    local: LocalSgd | LocalGradient | LocalDpSgd
    bound: Clip | Unbounded
    weights: Weights
    channel: Channel
    server: ServerSgd
    protection: Protection = NO_PROTECTION
    denoiser: DenoiserValue = NO_DENOISER
    denominator: Literal["expected", "actual"] = "expected"

    def __post_init__(self) -> None:
        pairs = isinstance(self.contribution, SiloUserContribution)
        clients = isinstance(self.contribution, ClientContribution)
        noisy = isinstance(self.channel, GaussianShares | LayeredShares | CentralGaussian)
        if noisy and isinstance(self.bound, Unbounded):
            raise CompositionError(
                f"{self.name}: noise on unbounded contributions guarantees nothing; give the method a clip bound"
            )
        if not isinstance(self.sampler, Everyone) and not (pairs or clients):
            raise CompositionError(
                f"{self.name}: users are sampled, but a contribution is not one user's; "
                "sampling of users needs (silo, user) or client contributions"
            )
        if clients and isinstance(self.channel, GaussianShares | LayeredShares):
            raise CompositionError(
                f"{self.name}: clients have no silo to add a share of the noise; use CentralGaussian"
            )
        if isinstance(self.protection, SecureAggregation) and not isinstance(self.channel, GaussianShares):
            raise CompositionError(f"{self.name} cannot run under secure aggregation: {self._unmaskable()}")
        if self.denominator == "actual" and not clients:
            raise CompositionError(
                f"{self.name}: only a mean over clients can be divided by how many took part"
            )
        if self.denoiser.needs_noise_std and self.noise_std(1) is None:
            raise CompositionError(
                f"{self.name}: {self.denoiser.description} needs the size of the noise, which DP-SGD inside the "
                "silos leaves unknown; use the Laplacian denoiser"
            )
        if pairs and self.weights is Weights.ONE:
            raise CompositionError(
                f"{self.name}: with weight 1 a user's influence grows with the number of silos she appears in; "
                "weights of a user must sum to at most 1 over the silos (uniform or by records)"
            )
        if not pairs and self.weights is not Weights.ONE:
            raise CompositionError(
                f"{self.name}: weights {self.weights.value} are those of (silo, user) pairs"
            )
        if isinstance(self.contribution, RecordContribution) and isinstance(self.channel, LayeredShares):
            raise CompositionError(
                f"{self.name}: DP-SGD has its noise inside the silos; the noise of a channel would come on top of it"
            )
        if isinstance(self.contribution, RecordContribution) != isinstance(self.local, LocalDpSgd):
            raise CompositionError(
                f"{self.name}: records are contributions of DP-SGD, and of DP-SGD only (LocalDpSgd)"
            )

    def _unmaskable(self) -> str:
        """Say why messages without shares of noise have no place under secure aggregation."""
        if isinstance(self.bound, Unbounded):
            return "unbounded updates lie on no grid and in no range; give the method a clip bound and GaussianShares"
        if isinstance(self.local, LocalDpSgd):
            return "DP-SGD inside the silos ends in floating-point models, which masks over whole numbers do not fit"
        if isinstance(self.channel, CentralGaussian):
            return "its noise is added by a server that is trusted with every update; silos must add GaussianShares"
        return (
            "silos must send whole numbers on one grid with their share of the noise (GaussianShares), not messages "
            "that the server decodes one by one"
        )

    def divisor(self, n_silos: int, n_users: int) -> float:
        """Return what the sum is divided by; public numbers only, so that it reveals nothing.

        |S| where every silo contributes once; q |U| |S| for (silo, user) pairs and q |U| for clients: the expected
        number of users who take part, never the number who did.
        """
        if isinstance(self.contribution, ClientContribution):
            return self.sampler.rate * n_users
        if isinstance(self.contribution, SiloUserContribution):
            return self.sampler.rate * n_users * n_silos
        return float(n_silos)

    def noise_std(self, n_silos: int) -> float | None:
        """Return the standard deviation, per coordinate, of the noise on the sum over all silos; None if unknown."""
        shares = self.channel.shares if isinstance(self.channel, LayeredShares) else self.channel
        if isinstance(shares, GaussianShares):
            return shares.share_std(n_silos) * math.sqrt(n_silos)
        if isinstance(self.channel, CentralGaussian):
            return self.channel.std
        return None if isinstance(self.local, LocalDpSgd) else 0.0
