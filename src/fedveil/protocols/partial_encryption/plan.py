"""Define the public plan of partial encryption, on which all parties of a run agree beforehand."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from jaxtyping import Int64, UInt32

from fedveil.crypto.ckks import CkksParameters
from fedveil.crypto.errors import CryptoError
from fedveil.protocols.errors import ProtocolError
from fedveil.protocols.partial_encryption.ballots import LARGEST_LENGTH


@dataclass(frozen=True, kw_only=True)
class PartialPlan:
    """Public sizes, limits and partition rule of a run under partial encryption.

    Attributes:
        silos: number of silos.
        length: d, number of coordinates of a vector.
        ratio: r_0, fraction of the coordinates that the first round encrypts.
        decay: lambda, factor by which the fraction decreases from round to round.
        ballots: "plain" shows the server the ballot of each silo, "secagg" only the sum of all ballots. With "none"
            no silo votes, and every silo computes the partition from values that all silos have.
        pick: whether a silo votes for its coordinates of largest or of smallest absolute value.
        clear_limit: largest absolute value of one silo's coordinate in the clear, noise included, in grid units.
        hidden_limit: largest absolute value of one silo's encrypted coordinate, noise included, in grid units.
        ballot_limit: largest absolute value of one silo's noise on one count of votes; 0 if votes have no noise.

    Raises:
        ProtocolError: fewer than two silos, a fraction or limit out of range, or sums that do not fit.
    """

    silos: int
    length: int
    ratio: float
    decay: float = 1.0
    ballots: Literal["plain", "secagg", "none"] = "plain"
    pick: Literal["largest", "smallest"] = "largest"
    clear_limit: int
    hidden_limit: int
    ballot_limit: int = 0

    def __post_init__(self) -> None:
        """Check, before any training, the conditions that would end a round."""
        if self.silos < 2 or not 1 <= self.length <= LARGEST_LENGTH:
            raise ProtocolError(
                f"partial encryption needs at least 2 silos and 1 to 2^28 coordinates, not {self.silos} silos and "
                f"{self.length} coordinates: one silo's decrypted sum would be its own update"
            )
        if not 0 <= self.ratio <= 1 or not 0 < self.decay <= 1:
            raise ProtocolError(
                f"the encrypted share is r = {self.ratio} and its decay lambda = {self.decay}; "
                "0 <= r <= 1 and 0 < lambda <= 1 are possible"
            )
        exact = self.clear_limit <= 2**53 and self.silos * self.clear_limit < 2**63
        if min(self.clear_limit, self.hidden_limit) < 1 or not exact:
            raise ProtocolError(
                f"{self.silos} silos with values up to {self.clear_limit} grid units in clear: a limit of 1 at least "
                "and of 2^53 at most, beyond which float64 rounds a sum with its noise, and sums below 2^63 are needed"
            )
        if self.ballot_limit and self.ballots != "secagg":
            raise ProtocolError(f"noise on ballots = {self.ballots!r} protects nobody; take 'secagg'")
        if self.silos * (self.ballot_limit + 1) >= 2**31:
            raise ProtocolError(f"counts with noise up to {self.ballot_limit} do not fit 32 bits")
        try:
            room = self.ckks.limit
        except CryptoError as error:
            raise ProtocolError(str(error)) from error
        if self.hidden_limit > room:
            raise ProtocolError(
                f"encrypted sums hold values of up to {self.hidden_limit} grid units from at most "
                f"{self.silos * room // self.hidden_limit} silos, not from {self.silos}; take fewer silos, a "
                "smaller bound of what a silo sends (with weights by records all users may be in one), or secure "
                "aggregation"
            )

    @cached_property
    def ckks(self) -> CkksParameters:
        """Parameters of the CKKS encryption, which follow from the number of silos."""
        return CkksParameters(silos=self.silos)

    @property
    def clear_bytes(self) -> int:
        """Bytes of one silo's number in the clear."""
        return _signed_bytes(self.clear_limit)

    @property
    def sum_bytes(self) -> int:
        """Bytes of one coordinate of the sum in the clear."""
        return _signed_bytes(self.silos * self.clear_limit)

    def n_encrypted(self, round_number: int) -> int:
        """Return the number of encrypted coordinates of round t: floor(r_0 lambda^(t-1) d).

        The number is at least 1 if r_0 > 0, and 0 if r_0 = 0.
        """
        share = self.ratio * self.decay ** (round_number - 1)
        if share == 0 and self.ratio == 0:
            return 0
        # The factor 1 + 2^-40 undoes rounding of float64: 0.29 * 100 is below 29.
        return max(1, math.floor(share * self.length * (1 + 2.0**-40)))

    def votes(self, round_number: int) -> bool:
        """Return whether silos vote in a round; they do not if the partition is everything, nothing or public."""
        return self.ballots != "none" and 0 < self.n_encrypted(round_number) < self.length

    @property
    def count_type(self) -> np.dtype[np.integer]:
        """Dtype of a masked count of votes, wide enough that no count overflows into its neighbour."""
        if self.ballot_limit:
            return np.dtype("<i4")
        return np.dtype("u1") if self.silos < 2**8 else np.dtype("<u2")

    @property
    def count_words(self) -> int:
        """Number of 32-bit words that hold the counts of all coordinates."""
        return -(-self.length * self.count_type.itemsize // 4)

    def pack_counts(self, counts: Int64[np.ndarray, " d"]) -> UInt32[np.ndarray, " w"]:
        """Pack (d,) votes with their noise into 32-bit words, which are then masked."""
        fields = np.zeros(4 * self.count_words // self.count_type.itemsize, dtype=self.count_type)
        fields[: self.length] = counts
        return fields.view("<u4")

    def unpack_counts(self, words: UInt32[np.ndarray, " w"]) -> Int64[np.ndarray, " d"]:
        """Unpack the (d,) counts from the sum of all silos' words."""
        return words.view(self.count_type)[: self.length].astype(np.int64)


def _signed_bytes(limit: int) -> int:
    return (limit.bit_length() + 8) // 8
