"""What all parties of the private weighting protocol agree on, checked before any training starts.

In grid units, with contributions y, counts n, noise shares z and the common multiple C = lcm(1 .. N_max),
the integer of coordinate j that the server decrypts is

    T_j = sum_u sum_s y_{s,u,j} n_{s,u} C / N_u  +  sum_s (C z_{s,j} + v_{s,j}),   v uniform on C centred
    values

and T_j / C is the weighted noisy sum. One more coordinate carries the check: contributions of 1 and no
noise, so it must come out as C times the number of users who took part.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Int64

from fedveil.protocols.errors import OwnRecordsError, ProtocolError

_LARGEST_COMMON_BITS = 8192
_BLIND_BITS = 40
CHECK_DISTANCE = 2.0**-_BLIND_BITS
"""At least the distance between blinded checks with one user drawn more or less, 1 / (|U| 2^40 + 1)."""


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


@dataclass(frozen=True, kw_only=True)
class WeightingPlan:
    """Public numbers of one run of Protocol 1 (ULDP-FL, section 4).

    Attributes:
        silos: |S|.
        users: |U|.
        length: d, coordinates of a contribution.
        largest_count: N_max: no user has more records in all. Each silo checks n_{s,u} <= N_max / |S|, so that
            nobody has to learn a total.
        norm_limit: the largest l2 norm of one contribution, in grid units (so also of a coordinate).
        noise_limit: the largest absolute value of one silo's noise share, in grid units.
        renewed: whether the encrypted weights change from round to round (sub-sampling).
        places: P of the oblivious transfer that hides from the server who was drawn; 0 without it.
        chosen: a: a user is drawn with probability a / P.
        rounds: how many rounds are planned; only for the choice of the cheapest way to compute.

    Raises:
        ProtocolError: a number outside its domain.
    """

    silos: int
    users: int
    length: int
    largest_count: int
    norm_limit: int
    noise_limit: int
    renewed: bool = False
    places: int = 0
    chosen: int = 0
    rounds: int = 1

    def __post_init__(self) -> None:
        """Check what does not depend on a cipher."""
        if (
            self.silos < 2
            or min(self.users, self.length, self.norm_limit, self.rounds) < 1
            or self.noise_limit < 0
        ):
            raise ProtocolError("private weighting needs at least 2 silos, 1 user, 1 coordinate and 1 round")
        if self.count_limit < 1:
            raise ProtocolError(
                f"protection.n_max = {self.largest_count} leaves less than one record per user to each of {self.silos} "
                f"silos; n_max must be at least {self.silos}"
            )
        if self.places and not (self.renewed and 1 <= self.chosen < self.places):
            raise ProtocolError(
                f"{self.chosen} of {self.places} places: oblivious transfer draws users anew each round with a "
                "probability strictly between 0 and 1"
            )
        # lcm(1..n) >= 2^n from n = 7 on: a larger N_max is refused before the multiple is computed.
        if self.largest_count > _LARGEST_COMMON_BITS or self.common.bit_length() > _LARGEST_COMMON_BITS:
            raise ProtocolError(
                f"protection.n_max = {self.largest_count} makes lcm(1..n_max) longer than {_LARGEST_COMMON_BITS} bits; "
                "cap the records per user"
            )
        if self.norm_limit * self.count_limit >= 2**61:
            raise ProtocolError(
                f"contributions up to {self.norm_limit} grid units times {self.count_limit} records exceed 61 bits; "
                "take a lower protection.n_max"
            )

    @cached_property
    def common(self) -> int:
        """C, the least common multiple of 1 .. N_max."""
        return math.lcm(*range(1, self.largest_count + 1))

    @property
    def count_limit(self) -> int:
        """Largest number of records of one user in one silo."""
        return self.largest_count // self.silos

    @property
    def coordinates(self) -> int:
        """Coordinates that are encrypted: the contribution's, and the check."""
        return self.length + 1

    @property
    def check_blind(self) -> int:
        """How many multiples of C hide the number of drawn users in the check; 0 where the server knows it."""
        return self.users << _BLIND_BITS if self.places else 0

    @property
    def value_limit(self) -> int:
        """Largest absolute value of T_j / C for the coordinates of a contribution."""
        return self.users * self.norm_limit + self.silos * (self.noise_limit + 1)

    @cached_property
    def largest_sum(self) -> int:
        """Largest absolute value of T_j, the check included."""
        return max(self.value_limit, self.users + self.check_blind) * self.common

    @property
    def slot_bits(self) -> int:
        """Bits that one coordinate needs, with its sign."""
        return self.largest_sum.bit_length() + 1

    @property
    def exponent_bits(self) -> int:
        """Bits of n_{s,u} y_{s,u,j} without its sign."""
        return (self.norm_limit * self.count_limit).bit_length()

    def check_counts(self, counts: Int64[np.ndarray, " users"], silo: int) -> None:
        """Return if a silo's record counts are such that no total exceeds N_max; the silo itself checks this.

        Raises:
            OwnRecordsError: a count above N_max / |S| or below zero.
            ProtocolError: another number of users.
        """
        if counts.shape != (self.users,):
            raise ProtocolError(
                f"the plan has {self.users} users, this silo has counts of {counts.size}", silo=silo
            )
        if counts.max() > self.count_limit or counts.min() < 0:
            raise OwnRecordsError(
                f"a user has more records here than N_max / |S| = {self.count_limit}; "
                "raise N_max or cap the records per user",
                silo=silo,
            )

    def require(self, modulus: int, setting: str) -> None:
        """Return if T_j is determined by its remainder modulo the plaintext modulus.

        Raises:
            ProtocolError: the modulus is too small, with both sizes and what to change.
        """
        if 2 * self.largest_sum >= modulus:
            raise ProtocolError(
                f"the sum needs {self.slot_bits} bits (lcm(1..{self.largest_count}) alone has "
                f"{self.common.bit_length()}) and {setting} offers {modulus.bit_length() - 1}; "
                "take a larger key, or cap the records per user"
            )


def rounded_sensitivity(clip: float, length: int, grid: float = 1.0) -> float:
    """Return by how much one user moves the sum of d coordinates in l2, rounded to a grid g: C + sqrt(d) g.

    T_j is no multiple of C: its remainder would show the fractions n_{s,u}/N_u that no noise on the grid covers. The
    uniform v make the remainder uniform and independent of the data. Given the remainder, T_j / C is the weighted sum
    rounded to the grid, with the same rounding for neighbouring data, plus noise on the grid; rounding moves each
    coordinate of the difference by less than 1. So the discrete Gaussian is accounted with clip + sqrt(d) g instead of
    clip (docs/theory/private-weighting.md).
    """
    return clip + math.sqrt(length) * grid
