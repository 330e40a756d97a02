"""Private weighting of a round's contributions, in one process: contributions of weight 1 in, the server's sum out.

Nobody multiplies by n_{s,u} / N_u in the clear, so the silos hand over single contributions instead of sums
(:mod:`fedveil.protection.weighting.private_weighting`). What comes out is the weighted sum plus the shares of the
noise, rounded to the grid of the messages by dithers that the account includes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float32, Float64, Int64
from torch import Tensor

from fedveil.crypto.agreement import RUN_BYTES
from fedveil.crypto.paillier import PaillierPrivateKey
from fedveil.engine.rounds.aggregation import NOISE_REACH
from fedveil.engine.rounds.turn import Turn
from fedveil.engine.rounds.workload import Contributions
from fedveil.methods.method import Method
from fedveil.methods.protections import PrivateWeighting
from fedveil.population.records import Groups
from fedveil.protection.weighting.paillier_weights import PaillierEvaluator, PaillierKeyHolder, choose_layout
from fedveil.protection.weighting.plan import CipherSizes, WeightingPlan
from fedveil.protection.weighting.private_weighting import Contributions as Rows
from fedveil.protection.weighting.private_weighting import Evaluator, KeyHolder
from fedveil.protection.weighting.rlwe_weights import RlweEvaluator, RlweKeyHolder, choose_parameters
from fedveil.protection.weighting.weighted_sums import WeightedGiven, WeightedSums
from fedveil.randomness import PrivacyRandomness


@dataclass(frozen=True, kw_only=True, eq=False)
class WeightingRange:
    """What the parties of a run under private weighting agree on, and what each silo alone knows: its counts.

    Attributes:
        plan: the public numbers; every session gives it a run of its own.
        grid: the step of the integers, a power of two, in the unit of the update.
        counts: (|S|, |U|) n_{s,u}, at most N_max / |S|; row s is silo s's own. In a federation a silo has its own row,
            and the coordinator none: what it has means nothing.
        protection: cipher and key size.
    """

    plan: WeightingPlan
    grid: float
    counts: Int64[np.ndarray, "silos users"]
    protection: PrivateWeighting

    @classmethod
    def of(
        cls, method: Method, groups: Groups, *, n_silos: int, n_users: int, length: int, rounds: int
    ) -> WeightingRange:
        """Return the range of a method under private weighting.

        A silo counts at most N_max / |S| records of a user, and never refuses one who has more: whether a run goes on
        must not depend on her, and N_max is the coordinator's to choose. Her weights still sum to 1.

        Raises:
            ProtocolError: sums that the cipher does not hold.
        """
        channel, bound = method.channel, method.bound
        protection: Any = method.protection
        assert protection.weighs
        assert bound.bounded, "the protection refuses unbounded contributions"
        grid = channel.message_grid(bound.grid, n_silos)
        chosen, places = protection.places(method.sampler.rate)
        plan = WeightingPlan(
            run=bytes(RUN_BYTES),
            silos=n_silos,
            users=n_users,
            length=length,
            largest_count=protection.n_max,
            norm_limit=math.ceil(bound.norm / grid),
            noise_limit=math.ceil(NOISE_REACH * channel.message_std(n_silos) / grid),
            renewed=method.sampler.rate < 1,
            places=places,
            chosen=chosen,
            rounds=rounds,
        )
        counts = np.zeros((n_silos, n_users), dtype=np.int64)
        scores = method.weights.scores(groups.size, n_silos)
        counts[groups.silo, groups.user] = np.minimum(scores, plan.count_limit)
        if protection.cipher == "paillier":
            choose_layout(plan, protection.modulus_bits)
        else:
            choose_parameters(plan)
        return cls(plan=plan, grid=grid, counts=counts, protection=protection)

    def units(
        self, contributions: Float64[np.ndarray, "m d"], share: Float64[np.ndarray, " d"]
    ) -> tuple[Rows, Int64[np.ndarray, " d"]]:
        """Return contributions and noise as whole numbers of grid steps; exact, because they are multiples of it."""
        dtype = np.int32 if self.plan.norm_limit < 2**31 else np.int64
        return (contributions / self.grid).astype(dtype), (share / self.grid).astype(np.int64)

    def key_holder(self, plan: WeightingPlan) -> KeyHolder:
        """Return a server's side of the cipher, with new keys."""
        if self.protection.cipher == "paillier":
            return PaillierKeyHolder(plan, PaillierPrivateKey.generate(self.protection.modulus_bits))
        return RlweKeyHolder(plan)

    def evaluator(self, plan: WeightingPlan, public: bytes) -> Evaluator:
        """Return a silo's side of the cipher for the server's public key."""
        if self.protection.cipher == "paillier":
            return PaillierEvaluator(plan, public, bits=self.protection.modulus_bits)
        return RlweEvaluator(plan, public)

    def sizes(self) -> CipherSizes:
        """Return how many bytes the cipher's messages have."""
        plan = self.plan
        if self.protection.cipher == "paillier":
            number = self.protection.modulus_bits // 8
            blocks = math.ceil(plan.coordinates / choose_layout(plan, self.protection.modulus_bits).slots)
            return CipherSizes(
                key=number, number=number, weight=2 * number, ciphertext=2 * number, ciphertexts=blocks
            )
        parameters = choose_parameters(plan)
        size, primes = parameters.ring.ciphertext_bytes, parameters.plain_count
        return CipherSizes(
            key=size * primes,
            number=(parameters.plain_bits * primes + 7) // 8,
            weight=size * primes,
            ciphertext=size,
            ciphertexts=math.ceil(plan.coordinates / parameters.ring.degree) * primes,
        )

    def protocol(self, privacy: PrivacyRandomness) -> WeightedSums:
        """Return the protocol of these numbers; no noise is drawn in the middle of a round."""
        return WeightedSums(
            plan=self.plan,
            counts=self.counts,
            holder=self.key_holder,
            evaluator=self.evaluator,
            sizes=self.sizes(),
        )

    def workload(self, turn: Turn, initial: Float32[Tensor, " d"]) -> Contributions:
        """Return the silos' contributions to a round, in grid units."""
        return Contributions(turn, self.given, self.vector)

    def given(
        self, contributions: Float64[np.ndarray, "m d"], share: Float64[np.ndarray, " d"], dither: bytes
    ) -> WeightedGiven:
        """Return what a silo puts into a round, in grid units."""
        units, noise = self.units(contributions, share)
        return WeightedGiven(contributions=units, noise=noise, dither=dither)

    def vector(self, units: Float64[np.ndarray, " d"]) -> Float64[np.ndarray, " d"]:
        """Return the weighted sum from units of the grid."""
        return np.asarray(units * self.grid)
