"""Compute the weights n_su / N_u under encryption, so that no party learns another's record counts.

The protocol is in :mod:`fedveil.protocols.weighting`; docs/theory/private-weighting.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Annotated, Any, ClassVar, Final, Literal

import numpy as np
from pydantic import Field

from fedveil.config_keys import Count
from fedveil.crypto.oblivious_transfer import EXPONENT_BITS
from fedveil.data.records import Groups
from fedveil.errors import CompositionError, PrivacyError
from fedveil.methods.capabilities import GridShares, nominal_multiplier
from fedveil.methods.guarantee import PublicFacts
from fedveil.methods.protection_stage import (
    DOWN,
    OF_KEYS,
    UP,
    ProtectionStage,
    Sends,
    masking_obstacle,
    plain_round,
)
from fedveil.methods.weights import NOT_WHOLE
from fedveil.privacy.claims import Claim, Reveals, Role, Sent, with_side_knowledge
from fedveil.privacy.noise import NOISE_REACH
from fedveil.privacy.statement import show_delta
from fedveil.protocols.messages import Announcement, Directory, OwnMask, RevealRequest
from fedveil.protocols.protocol import MOST_REPEATS
from fedveil.protocols.session_messages import ProtocolMessage, SamplingCommitment
from fedveil.protocols.weighting.plan import (
    CHECK_DISTANCE,
    BlindedHistogram,
    EncryptedSum,
    EncryptedWeights,
    Participants,
    SealedSeed,
    TransferAnswers,
    TransferOffer,
    TransferRequests,
    WeightingKey,
    WeightingPlan,
    rounded_sensitivity,
)
from fedveil.protocols.weighting.protocol_spec import Paillier, PrivateWeightingSpec, Rlwe
from fedveil.protocols.weighting.rlwe_weights import shown_distance
from fedveil.stage import Sensitivity, redefined

_MOST_PLACES: Final = 64
_SHOWN: Final = {Reveals.CIPHERTEXTS}
_PRESENT: Final = (
    "which users have a record in any silo: epsilon covers what records say, not whether there are any"
)


@dataclass(frozen=True, kw_only=True)
class PrivateWeighting(ProtectionStage):
    """Private weighting: the server learns the sum weighted by n_su / N_u, no party another's counts.

    This is Protocol 1 of ULDP-FL.

    Attributes:
        n_max: N_max, the largest number of records of a user that counts; a silo counts at most N_max / |S| of them,
            so it is |S| or more.
        counts: "exact", or "powers-of-ten": a silo counts the nearest power of ten by ratio, so that the sums under the
            cipher are far shorter and N_max may be large.
        cipher: "paillier", or "rlwe" (ring-LWE) for models of many parameters and a small N_max.
        key_bits: size of a Paillier modulus.
        private_sampling: users are sampled by oblivious transfer, so that the server does not learn the sample.
        on_dropout: reaction to a silo that drops out of a round: "end" ends the run; "retry" repeats the round under
            fresh keys once all silos are back, because the weights of the others depend on its records.
        dropout_rate: simulation: probability that a silo drops out of an attempt at a round.
    """

    n_max: Count = 2000
    counts: Literal["exact", "powers-of-ten"] = "exact"
    cipher: Literal["paillier", "rlwe"] = "paillier"
    key_bits: Literal[2048, 3072, 4096] | None = None
    private_sampling: bool = False
    parties: ClassVar[tuple[Role, ...]] = (UP | DOWN,)
    weighs: ClassVar[bool] = True

    on_dropout: Literal["end", "retry"] = "end"
    dropout_rate: Annotated[float, Field(ge=0, lt=1)] = field(default=0.0, compare=False)

    def __post_init__(self) -> None:
        """Refuse a modulus size for a cipher without a modulus."""
        super().__post_init__()
        if self.key_bits is not None and self.cipher == "rlwe":
            raise CompositionError(
                "key_bits: the size of a Paillier modulus; rlwe chooses its ring by the sums"
            )

    @property
    def modulus_bits(self) -> int:
        """Size of the Paillier modulus in bits; 3072 by default."""
        return self.key_bits or 3072

    @property
    def draws_blindly(self) -> bool:
        """Return whether oblivious transfer samples the users."""
        return self.private_sampling

    def refuses(self, method: Any) -> Iterable[str]:
        """Refuse methods other than sums of pairs weighted by records, with shares of noise (Protocol 1)."""
        if not method.weights.by_records:
            yield (
                "cannot run under private weighting: it computes the weights n_su / N_u, and this method has none; use "
                "uldp-avg-w, or secure aggregation"
            )
        elif not method.weights.supports_user_totals:
            yield f"cannot run under private weighting with weights {method.weights.description}: {NOT_WHOLE}"
        if not isinstance(method.channel, GridShares):
            yield f"cannot run under private weighting: {masking_obstacle(method)}"
        for stage, name in (
            ("weights", "for_groups"),
            ("weights", "for_population"),
            ("contribution", "limit_weights"),
        ):
            if redefined(getattr(method, stage), name):
                yield (
                    f"cannot run under private weighting: {type(getattr(method, stage)).__name__}, given as {stage}, "
                    f"defines {name}(), and Protocol 1 computes weights from the silos' scores alone"
                )
        if self.private_sampling:
            yield from self._refuses_draw(method.sampler)

    def _refuses_draw(self, sampler: Any) -> Iterable[str]:
        """Refuse a sampler that oblivious transfer cannot implement."""
        if redefined(sampler, "draw"):
            yield (
                f"cannot run under private weighting with private_sampling: {type(sampler).__name__} defines draw(), "
                "and oblivious transfer draws by the rate alone"
            )
        near = _nearest(sampler.rate)
        if float(near) != sampler.rate or not 0 < near < 1:
            yield (
                f"private sampling draws a user with probability a / P, P at most {_MOST_PLACES} places; "
                f"user_sampling_rate = {sampler.rate:g} is not such a number between 0 and 1 (the nearest is {near})"
            )
        if sampler.fixed_size:
            yield (
                "cannot run under private weighting with private_sampling: oblivious transfer draws every user "
                "independently (PoissonUsers), not a fixed number of them"
            )

    def adjust_sensitivity(self, sensitivity: Sensitivity, method: Any, public: Any) -> Sensitivity:
        """Return the sensitivity of the sum after rounding to the grid g of the messages: C + sqrt(d) g."""
        if public.dimension is None:
            raise PrivacyError(
                "the guarantee of private weighting depends on the number of parameters: give it"
            )
        if nominal_multiplier(method.channel) == 0:
            return sensitivity
        grid = method.channel.message_grid(method.bound.grid, public.n_silos)
        return replace(sensitivity, total=rounded_sensitivity(sensitivity.total, public.dimension, grid))

    def claims(self, claims: Iterable[Claim], sensitivity: Sensitivity) -> tuple[Claim, ...]:
        """Claim the same against parties that learn which users exist; no party learns their counts.

        Every silo knows the seed of the blinds r_u, with which a server can compute N_u from r_u N_u. So a server
        with a silo knows the counts, and no claim covers that. A party that decrypts ciphertexts sees them at a
        statistical distance.
        """
        extended_claims = with_side_knowledge(claims, Reveals.PRESENCE, _PRESENT)
        distance = self.distance(sensitivity)
        return (
            *extended_claims,
            *(replace(claim, covers=claim.covers | _SHOWN, distance=distance) for claim in extended_claims),
        )

    def distance(self, moves: Sensitivity) -> float:
        """Return the statistical distance between the server's view of a charge and a function of its sum.

        Masks, blinds and v_s are exactly uniform. Under ring-LWE every ciphertext shows flooded noise, also in
        attempts that do not finish. Under oblivious transfer the single decrypted sum shows a blinded count.
        """
        # One charge may cover MOST_REPEATS attempts, and each shows a ciphertext of every sender.
        flooded = shown_distance(moves.n_senders * MOST_REPEATS) if self.cipher == "rlwe" else 0.0
        return flooded + (CHECK_DISTANCE if self.private_sampling else 0.0)

    def make_protocol_spec(
        self, method: Any, public: PublicFacts, known_groups: Groups, rounds: int
    ) -> PrivateWeightingSpec:
        """Return the public numbers of Protocol 1, and the counts of the silos that the caller knows.

        A silo counts at most N_max / |S| records of a user, and never refuses a user with more. A refusal would make
        the run's progress depend on that user, and the coordinator chooses N_max. The user's weights still sum to 1.

        Raises:
            ProtocolError: sums beyond the range of the cipher.
        """
        channel, silos = method.channel, public.n_silos
        grid = channel.message_grid(method.bound.grid, silos)
        chosen, places = self.places(method.sampler.rate)
        plan = WeightingPlan(
            silos=silos,
            users=public.n_users,
            length=public.length,
            largest_count=self.n_max,
            norm_limit=math.ceil(method.bound.norm / grid),
            noise_limit=math.ceil(NOISE_REACH * channel.message_std(silos) / grid),
            renewed=method.sampler.rate < 1,
            places=places,
            chosen=chosen,
            rounds=rounds,
            powers_of_ten=self.counts == "powers-of-ten",
        )
        counts = np.zeros((silos, public.n_users), dtype=np.int64)
        # The limit N_max / |S| per silo keeps a user's total at most N_max without any silo knowing the others'
        # counts.
        counts[known_groups.silo, known_groups.user] = plan.limit_counts(
            method.weights.scores(known_groups.size, silos)
        )
        cipher = Paillier(self.modulus_bits) if self.cipher == "paillier" else Rlwe()
        return PrivateWeightingSpec(plan=plan, counts=counts, cipher=cipher, grid=grid)

    def sends(self, method: Any) -> Sends:
        model, task, *drawn = plain_round(method)
        setup = (
            Sent(Announcement, UP),
            Sent(Directory, DOWN),
            Sent(WeightingKey, DOWN),
            Sent(SealedSeed, UP | DOWN),
            Sent(BlindedHistogram, UP),
            Sent(Participants, DOWN),
        )
        if self.private_sampling:
            requests = Sent(TransferRequests, UP)
            weights: Sends = (Sent(TransferOffer, DOWN), requests, Sent(TransferAnswers, DOWN))
        else:
            weights = (*([Sent(SamplingCommitment, DOWN)] if drawn else []), Sent(EncryptedWeights, DOWN))
        reveal = (Sent(EncryptedSum, UP), Sent(RevealRequest, DOWN), Sent(OwnMask, UP))
        return (model, task, Sent(ProtocolMessage, UP | DOWN), *setup, *weights, *reveal)

    def uncovered_facts(self, method: Any) -> tuple[str, ...]:
        """Return the ciphers' assumptions and undetectable protocol departures, which no epsilon covers."""
        short = f"short discrete logarithms modulo primes of {self.modulus_bits // 2} bits"
        hard = short if self.cipher == "paillier" else "ring-LWE at 128 bits"
        transfer = (
            f"a break of the oblivious transfer, which relies on discrete logarithms of {EXPONENT_BITS} bits"
        )
        return (
            OF_KEYS,
            f"a break of the encryption that hides messages from the server; it relies on {hard}, and delta does not "
            "include the probability of a break",
            *([transfer] if self.private_sampling else ()),
            "departures from private weighting: a wrong weight from the server, or a false count from one silo, gives "
            "another silo's user more influence than epsilon assumes, and nobody can detect it",
        )

    def mechanisms(self, sensitivity: Sensitivity) -> tuple[str, ...]:
        cipher = f"Paillier, {self.modulus_bits} bits" if self.cipher == "paillier" else "ring-LWE, 128 bits"
        rounded = ", rounded to a power of ten" if self.counts == "powers-of-ten" else ""
        drawn = "; users are drawn by oblivious transfer" if self.private_sampling else ""
        most, distance = self.n_max // sensitivity.n_senders, self.distance(sensitivity)
        closeness = (
            f"statistical distance of {show_delta(distance)} for each charge, which delta counts 1 + e^epsilon "
            "times"
        )
        drawn += (
            f"; what the server decrypts follows from the noisy sum up to a {closeness}" if distance else ""
        )
        return (
            f"private weighting ({cipher}): the weights {sensitivity.weight} are computed under encryption; "
            "each silo counts "
            f"at most {most} records of a user{_scored(sensitivity)}{rounded}; the sum is rounded to a grid{drawn}",
        )

    def places(self, rate: float) -> tuple[int, int]:
        """Return (a, P) with a / P the sampling rate: a of P places of an oblivious transfer hold the weight.

        (0, 0) if the server samples the users, or nobody does. A method refuses other rates.
        """
        if not self.private_sampling:
            return 0, 0
        near = _nearest(rate)
        return near.numerator, near.denominator


def _scored(moves: Sensitivity) -> str:
    return "" if moves.weight in ("n_su/N_u", "1/(silos of the user)") else ", counted by that power of them"


def _nearest(rate: float) -> Fraction:
    """Return the nearest rate with at most ``_MOST_PLACES`` places."""
    return Fraction(rate).limit_denominator(_MOST_PLACES)
