"""The protection stage: what hides a single silo's message from the server.

The protocols themselves are in ``fedveil.protection``; these values say which one a method runs under.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Final, Literal

from fedveil.errors import CompositionError

_MOST_PLACES: Final = 64


@dataclass(frozen=True)
class NoProtection:
    """The server receives every silo's message as it is."""


@dataclass(frozen=True, kw_only=True)
class SecureAggregation:
    """The server receives masked messages and learns their sum alone (Bonawitz et al. 2017).

    Masks live in whole numbers modulo a power of two, so it needs messages on a grid, in a range known beforehand, that
    are useful when only their sum is seen: bounded sums that carry their silo's share of the noise.

    Attributes:
        on_missing: what happens when a silo vanishes in a round: "end" ends the run; "retry" repeats the round with
            the rest under fresh keys (or with all, where the weights depend on the silo that is missing); "recover"
            has the others open the masks it left behind, so that the round survives (Shamir shares).
        missing_silos: how many silos may be missing from a sum; the shares of the noise are sized for that.
    """

    on_missing: Literal["end", "retry", "recover"] = "end"
    missing_silos: int = 0


@dataclass(frozen=True, kw_only=True)
class PrivateWeighting:
    """The server learns the sum weighted by n_su / N_u, and nobody a count that is not its own (ULDP-FL, Protocol 1).

    Attributes:
        largest_count: N_max, the largest number of records that a user may have in all; a silo may hold N_max / |S|.
        cipher: "paillier", or "rlwe" (ring-LWE) for models of many parameters and a small N_max.
        key_bits: size of a Paillier modulus.
        private_sampling: users are sampled by oblivious transfer, so that the server does not learn who was drawn.
        on_missing: what happens when a silo vanishes in a round: "end" ends the run; "retry" repeats the round under
            fresh keys once all silos are back, because the weights of the others depend on its records.
    """

    largest_count: int = 2000
    cipher: Literal["paillier", "rlwe"] = "paillier"
    key_bits: Literal[2048, 3072, 4096] = 3072
    private_sampling: bool = False
    on_missing: Literal["end", "retry"] = "end"

    def places(self, rate: float) -> tuple[int, int]:
        """Return (a, P) with a / P the sampling rate: of P places of an oblivious transfer a hold the weight.

        (0, 0) where the server draws the users, or nobody is sampled.

        Raises:
            CompositionError: private sampling at a rate that is no fraction of at most 64 places.
        """
        if not self.private_sampling:
            return 0, 0
        near = Fraction(rate).limit_denominator(_MOST_PLACES)
        if abs(float(near) - rate) > 1e-12 or not 0 < near < 1:
            raise CompositionError(
                f"private sampling draws a user with probability a / P, P at most {_MOST_PLACES} places; "
                f"user_sampling_rate = {rate:g} is not such a number between 0 and 1 (the nearest is {near})"
            )
        return near.numerator, near.denominator


@dataclass(frozen=True, kw_only=True)
class PartialEncryption:
    """The coordinates that matter travel encrypted under a key that the silos share; the others in clear (ParaAegis).

    In round t the partition has r_t d coordinates, r_t = ratio decay^(t-1). docs/theory/partial-encryption.md.

    Attributes:
        ratio: r_0, the encrypted share in the first round.
        decay: lambda.
        strategy: silos vote for their values of largest ("max") or smallest ("min") size; "random" asks nobody.
        partition: where the partition comes from: "votes", which are private and not paid for; "noisy-votes";
            "released", the coordinates in which the models released so far have moved most, which costs nothing.
        votes: "plain" shows the server each ballot in a secret order, "secagg" only the sum of all.
        vote_noise: noise on the counts of "noisy-votes", in units of one ballot's l2 norm.
        he_noise: noise of the encrypted part over that of the clear part, each in units of its own bound; 0: none.
        clip: "whole" bounds a contribution before the partition is known; "parts" bounds each part of a client's update
            by itself: the clear part by the method's bound, the encrypted one by ``he_clip``.
        he_clip: l2 bound of the encrypted part under clip = "parts"; None: not bounded.
        processes: worker processes in which silos encrypt; 1: in the process itself. It changes no result.
    """

    ratio: float = 0.1
    decay: float = 1.0
    strategy: Literal["max", "min", "random"] = "max"
    partition: Literal["votes", "noisy-votes", "released"] = "votes"
    votes: Literal["plain", "secagg"] = "plain"
    vote_noise: float = 0.0
    he_noise: float = 0.0
    clip: Literal["whole", "parts"] = "whole"
    he_clip: float | None = None
    processes: int = 1

    def __post_init__(self) -> None:
        if self.processes < 1:
            raise CompositionError(f"processes = {self.processes}: at least 1 encrypts")
        if not 0 <= self.ratio <= 1:
            raise CompositionError(f"ratio = {self.ratio}: the encrypted share r is between 0 and 1")
        if not 0 < self.decay <= 1:
            raise CompositionError(f"decay = {self.decay}: lambda is above 0 and at most 1")
        for name, noise in (("he_noise", self.he_noise), ("vote_noise", self.vote_noise)):
            if not (noise >= 0 and math.isfinite(noise)):
                raise CompositionError(f"{name} = {noise}: a finite number >= 0 is needed")
        if (self.vote_noise > 0) != (self.partition == "noisy-votes"):
            raise CompositionError(
                f"vote_noise = {self.vote_noise:g} with partition = {self.partition!r}: noise on votes and "
                "partition = 'noisy-votes' belong together"
            )
        if self.vote_noise and self.votes != "secagg":
            raise CompositionError(
                "votes = 'plain' shows every ballot without its noise; noisy votes need votes = 'secagg'"
            )
        if self.strategy == "random" and self.partition != "votes":
            raise CompositionError(f"strategy = 'random' takes no partition from {self.partition}; remove it")
        if self.strategy == "min" and self.partition == "released":
            raise CompositionError(
                "strategy = 'min' belongs to votes; what was released is taken by size, 'max'"
            )
        if self.he_noise and self.unpaid:
            raise CompositionError(
                "he_noise buys no guarantee while the partition shows votes that are not paid for; take partition = "
                "'released' or 'noisy-votes', strategy = 'random' or ratio = 1"
            )
        if self.he_clip is not None and self.clip != "parts":
            raise CompositionError(
                "he_clip bounds the encrypted part of a method that bounds its parts by themselves"
            )
        if self.he_noise and self.clip == "parts" and self.he_clip is None and self.ratio > 0:
            raise CompositionError("he_noise needs he_clip: noise on an unbounded part guarantees nothing")

    @property
    def whole(self) -> bool:
        """Whether everything is encrypted in every round."""
        return self.ratio == 1 and self.decay == 1

    @property
    def asks(self) -> bool:
        """Whether silos vote."""
        return (
            self.strategy != "random" and self.partition != "released" and self.ratio > 0 and not self.whole
        )

    @property
    def unpaid(self) -> bool:
        """Whether the partition tells of votes that no noise hides."""
        return self.asks and self.partition == "votes"


Protection = NoProtection | SecureAggregation | PrivateWeighting | PartialEncryption

NO_PROTECTION: Final = NoProtection()
"""The default of a method."""
