"""Private weighting of a round's contributions, in one process: contributions of weight 1 in, the server's sum out.

Nobody multiplies by n_{s,u} / N_u in the clear, so the silos hand over single contributions instead of sums
(:mod:`fedveil.protection.private_weighting`). What comes out is the weighted sum plus the shares of the noise, rounded
to the grid of the messages by dithers that the account includes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Float64, Int64

from fedveil.crypto.agreement import RUN_BYTES
from fedveil.crypto.paillier import PaillierPrivateKey
from fedveil.engine.aggregation import NOISE_REACH
from fedveil.engine.silo_side import SiloInput
from fedveil.methods.method import Method
from fedveil.methods.protections import PrivateWeighting
from fedveil.methods.stages import GaussianShares
from fedveil.population.records import Groups
from fedveil.privacy.bounds import Clip
from fedveil.protection.driver import NOBODY, Absent
from fedveil.protection.paillier_weights import PaillierEvaluator, PaillierKeyHolder, choose_layout
from fedveil.protection.private_weighting import Contributions, Evaluator, KeyHolder
from fedveil.protection.rlwe_weights import RlweEvaluator, RlweKeyHolder, choose_parameters
from fedveil.protection.session import WeightingSession
from fedveil.protection.transcript import Transcript
from fedveil.protection.weighting_plan import WeightingPlan


@dataclass(frozen=True, kw_only=True)
class CipherSizes:
    """Bytes of what travels under a cipher.

    Attributes:
        key: the public key.
        number: a number modulo the plaintext modulus.
        weight: an encrypted weight.
        ciphertext: one ciphertext of a silo's sum.
        ciphertexts: how many a sum has.
    """

    key: int
    number: int
    weight: int
    ciphertext: int
    ciphertexts: int


@dataclass(frozen=True, kw_only=True, eq=False)
class WeightingRange:
    """What the parties of a run under private weighting agree on, and what each silo alone knows: its counts.

    Attributes:
        plan: the public numbers; every session gives it a run of its own.
        grid: the step of the integers, a power of two, in the unit of the update.
        counts: (|S|, |U|) n_{s,u}; row s is silo s's own. In a federation a silo has its own row, and the coordinator
            none: what it has means nothing.
        protection: cipher and key size.
    """

    plan: WeightingPlan
    grid: float
    counts: Int64[np.ndarray, "silos users"]
    protection: PrivateWeighting

    @classmethod
    def of(
        cls, method: Method, groups: Groups, *, n_silos: int, n_users: int, length: int, rounds: int
    ) -> WeightingRange | None:
        """Return the range of a method; None if it runs without private weighting.

        Raises:
            ProtocolError: sums that the cipher does not hold.
        """
        protection = method.protection
        if not isinstance(protection, PrivateWeighting):
            return None
        channel, bound = method.channel, method.bound
        assert isinstance(channel, GaussianShares)
        assert isinstance(bound, Clip)
        grid = channel.message_grid(bound.grid, n_silos)
        chosen, places = protection.places(method.sampler.rate)
        plan = WeightingPlan(
            run=bytes(RUN_BYTES),
            silos=n_silos,
            users=n_users,
            length=length,
            largest_count=protection.largest_count,
            norm_limit=math.ceil(bound.norm / grid),
            noise_limit=math.ceil(NOISE_REACH * channel.share_std(n_silos) / grid),
            renewed=method.sampler.rate < 1,
            places=places,
            chosen=chosen,
            rounds=rounds,
        )
        counts = np.zeros((n_silos, n_users), dtype=np.int64)
        counts[groups.silo, groups.user] = groups.size
        if protection.cipher == "paillier":
            choose_layout(plan, protection.key_bits)
        else:
            choose_parameters(plan)
        return cls(plan=plan, grid=grid, counts=counts, protection=protection)

    def check_counts(self) -> None:
        """Return if no total exceeds N_max and somebody has a record; asked where one process has all silos' records.

        Raises:
            ProtocolError: a count above N_max / |S|, naming the silo, or no record at all.
        """
        for silo, row in enumerate(self.counts):
            self.plan.check_counts(row, silo)
        self.plan.check_users(self.counts.sum(0) > 0)

    def units(
        self, contributions: Float64[np.ndarray, "m d"], share: Float64[np.ndarray, " d"]
    ) -> tuple[Contributions, Int64[np.ndarray, " d"]]:
        """Return contributions and noise as whole numbers of grid steps; exact, because they are multiples of it."""
        dtype = np.int32 if self.plan.norm_limit < 2**31 else np.int64
        return (contributions / self.grid).astype(dtype), (share / self.grid).astype(np.int64)

    def key_holder(self, plan: WeightingPlan) -> KeyHolder:
        """Return a server's side of the cipher, with new keys."""
        if self.protection.cipher == "paillier":
            return PaillierKeyHolder(plan, PaillierPrivateKey.generate(self.protection.key_bits))
        return RlweKeyHolder(plan)

    def evaluator(self, plan: WeightingPlan, public: bytes) -> Evaluator:
        """Return a silo's side of the cipher for the server's public key."""
        if self.protection.cipher == "paillier":
            return PaillierEvaluator(plan, public)
        return RlweEvaluator(plan, public)

    def sizes(self) -> CipherSizes:
        """Return how many bytes the cipher's messages have."""
        plan = self.plan
        if self.protection.cipher == "paillier":
            number = self.protection.key_bits // 8
            blocks = math.ceil(plan.coordinates / choose_layout(plan, self.protection.key_bits).slots)
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

    def session(self) -> WeightingSession:
        """Return new parties that have gone through the setup, with keys that serve no other session."""
        plan = replace(self.plan, run=os.urandom(RUN_BYTES))
        return WeightingSession(plan, self.counts, holder=self.key_holder(plan), evaluator=self.evaluator)


class WeightedSum:
    """The parties of a run under private weighting, played in this process; all that passes between them is bytes.

    Every object makes new keys, so a run that is resumed uses none twice.

    Args:
        agreed: what the parties agree on.
    """

    def __init__(self, agreed: WeightingRange) -> None:
        self._agreed = agreed
        self._session = agreed.session()

    @property
    def transcript(self) -> Transcript:
        """What has passed between the parties."""
        return self._session.transcript

    def total(
        self,
        round_number: int,
        silos: Iterable[SiloInput],
        drawn: Bool[np.ndarray, " users"] | None,
        *,
        attempt: int = 0,
        absent: Absent = NOBODY,
        dither: Callable[[int], bytes | None] = lambda silo: None,
    ) -> Float64[np.ndarray, " d"]:
        """Return sum_s ( sum_u n_{s,u}/N_u y_{s,u} + z_s ), as the server learns it.

        Args:
            round_number: counts from 1; each pair of round and attempt can be played once.
            silos: per silo its contributions and its share of the noise, multiples of the grid; taken one by one, so
                that no two silos' contributions need be in memory together.
            drawn: (|U|,) the users that the server draws; read only if the plan has it draw them.
            attempt: how often this round was begun before.
            absent: which silos vanish on the way.
            dither: per silo the key of its share of the remainders modulo C; None: a new one.

        Raises:
            SiloVanished: the attempt is over.
            ProtocolError: a value beyond the range, naming the silo, or a sum that fails its check.
        """
        plan = self._session.plan
        inputs = (self._agreed.units(units, share) for units, share in silos)
        by_server = plan.renewed and not plan.places
        sums = self._session.aggregate(
            round_number,
            inputs,
            drawn=drawn if by_server else None,
            attempt=attempt,
            absent=absent,
            dither=dither,
        )
        return np.asarray(sums * self._agreed.grid)
