"""Define the public plan of private weighting, which is checked before any training starts, and its messages.

Let y_{s,u} be the contribution of user u at silo s and z_s the noise share of silo s, both in grid units. Let n_{s,u}
be the user's record count at the silo, N_u = sum_s n_{s,u} <= N_max, and C a common multiple of all possible N_u, so
that n_{s,u} C / N_u is an integer. C is lcm(1 .. N_max). If counts are rounded to powers of ten, C is the least common
multiple of all sums of up to |S| powers of ten, which is far smaller. The server decrypts for coordinate j the integer

    T_j = sum_u sum_s y_{s,u,j} n_{s,u} C / N_u  +  sum_s (C z_{s,j} + v_{s,j}),   v uniform on C values around 0,

and T_j / C is the weighted noisy sum. v hides the remainder of T_j modulo C (:func:`rounded_sensitivity`). One more
coordinate is a check: its contributions are 1 and it has no noise, so it must equal C times the number of users who
took part.

Phases of a sum with weights n_{s,u} / N_u (ULDP-FL, Protocol 1):

    setup   silos announce signed keys; the server relays them and sends its encryption key
            silo 0 seals a seed R for every other silo; all silos derive the same random factors r_u from it
            each silo sends r_u n_{s,u} + masks; the server adds these to r_u N_u, and B_u = 1 / (r_u N_u) modulo the
            plaintext modulus
    round   the server sends Enc(B_u), or Enc(0) for a user who is not sampled; a silo multiplies by r_u n_{s,u} C
            each silo sends Enc( sum_u y_{s,u} n_{s,u} C / N_u + C z_s + v_s + masks )
            once all sums have arrived, the server requests the silos' own masks, adds the sums and decrypts

The computations under a cipher are split into a :class:`KeyHolder` (server) and an :class:`Evaluator` (silo). Both
exist for Paillier (``paillier_weights``) and, for deep models, for ring-LWE (``rlwe_weights``). If a silo vanishes, the
attempt ends and reveals nothing. The weights n_{s,u} / N_u at the other silos depend on its records, so the run waits
for the silo, or repeats the setup without it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from typing import Final, Protocol

import numpy as np
from gmpy2 import mpz
from jaxtyping import Float64, Int32, Int64

from fedveil.crypto.key_agreement import OVERHEAD_BYTES, RoundId
from fedveil.crypto.oblivious_transfer import POINT_BYTES
from fedveil.errors import OwnRecordsError, ProtocolError
from fedveil.privacy.claims import Key, Reveals
from fedveil.protocols.field_codecs import (
    BLOCK,
    REST,
    Reader,
    Writer,
    custom_field,
    fixed_bytes,
    integers,
    number,
    repeated,
    wire_field,
)
from fedveil.protocols.messages import Message, message

# --- the plan ---

_LARGEST_COMMON_BITS = 8192  # limit of the length of C
_BLIND_BITS = 40
CHECK_DISTANCE = 2.0**-_BLIND_BITS
"""Upper bound of the statistical distance between blinded checks that differ by one sampled user.

The blind is uniform on |U| 2^40 + 1 values, so the distance is 1 / (|U| 2^40 + 1).
"""


@dataclass(frozen=True, kw_only=True)
class CipherSizes:
    """Sizes of the values that are sent under a cipher, in bytes.

    Attributes:
        key: bytes of the public key.
        number: bytes of a number modulo the plaintext modulus.
        weight: bytes of an encrypted weight.
        ciphertext: bytes of one ciphertext of a silo's sum.
        ciphertexts: number of ciphertexts of a silo's sum.
    """

    key: int
    number: int
    weight: int
    ciphertext: int
    ciphertexts: int


@dataclass(frozen=True, kw_only=True)
class WeightingPlan:
    """Public numbers of one run of private weighting (ULDP-FL, section 4, Protocol 1).

    Attributes:
        silos: |S|, number of silos.
        users: |U|, number of users.
        length: d, number of coordinates of a contribution.
        largest_count: N_max, most records of one user over all silos. Each silo checks n_{s,u} <= N_max / |S|, so
            that no party has to learn a total.
        norm_limit: largest l2 norm of one contribution, in grid units; it also bounds each coordinate.
        noise_limit: largest absolute value of a coordinate of one silo's noise share, in grid units.
        renewed: whether the encrypted weights change from round to round, because users are sub-sampled.
        places: P, number of messages in each 1-out-of-P oblivious transfer, which hides the sampled users from the
            server; 0 without oblivious transfer.
        chosen: a, number of these messages that are Enc(B_u); the others are Enc(0). So a user is sampled with
            probability a / P.
        rounds: number of planned rounds; it only decides which way to compute is the cheapest.
        powers_of_ten: whether a silo's counts are 0 and powers of ten alone, which makes C far smaller.

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
    powers_of_ten: bool = False

    def __post_init__(self) -> None:
        """Check the conditions that do not depend on a cipher."""
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
        # lcm(1..n) >= 2^n from n = 7 on, so N_max > 8192 is refused without computing the multiple.
        too_many = self.largest_count > _LARGEST_COMMON_BITS and not self.powers_of_ten
        if too_many or self.common.bit_length() > _LARGEST_COMMON_BITS:
            raise ProtocolError(
                f"protection.n_max = {self.largest_count} makes the least common multiple of a user's possible records "
                f"longer than {_LARGEST_COMMON_BITS} bits; take a lower n_max, or protection.counts = 'powers-of-ten'"
            )
        if self.norm_limit * self.count_limit >= 2**61:
            raise ProtocolError(
                f"contributions up to {self.norm_limit} grid units times {self.count_limit} records exceed 61 bits; "
                "take a lower protection.n_max"
            )

    @cached_property
    def common(self) -> int:
        """C, the least common multiple of all possible N_u; it makes every C / N_u an integer."""
        if not self.powers_of_ten:
            return math.lcm(*range(1, self.largest_count + 1))
        levels = _levels(self.count_limit)
        sums, multiple = {0}, 1
        for _ in range(self.silos):
            new = {total + level for total in sums for level in levels} - sums
            sums |= new
            # Sums of fewer silos are among these sums, because a silo may have no record of a user.
            multiple = math.lcm(multiple, *new)
            if multiple.bit_length() > _LARGEST_COMMON_BITS:
                break
        return multiple

    @property
    def count_limit(self) -> int:
        """Largest number of records of one user in one silo: floor(N_max / |S|)."""
        return self.largest_count // self.silos

    @property
    def coordinates(self) -> int:
        """Number of encrypted coordinates: d of the contribution, and the check."""
        return self.length + 1

    @property
    def check_blind(self) -> int:
        """Largest multiple of C that is added to hide the number of sampled users in the check; 0 if it is public."""
        return self.users << _BLIND_BITS if self.places else 0

    @property
    def value_limit(self) -> int:
        """Largest absolute value of T_j / C for the coordinates of a contribution, in grid units."""
        # For each silo |v| / C < 1, which gives noise_limit + 1.
        return self.users * self.norm_limit + self.silos * (self.noise_limit + 1)

    @cached_property
    def largest_sum(self) -> int:
        """Largest absolute value of T_j over all coordinates, the check included."""
        return max(self.value_limit, self.users + self.check_blind) * self.common

    @property
    def slot_bits(self) -> int:
        """Number of bits that one coordinate needs, with its sign."""
        return self.largest_sum.bit_length() + 1

    @property
    def exponent_bits(self) -> int:
        """Number of bits of n_{s,u} y_{s,u,j} without its sign."""
        return (self.norm_limit * self.count_limit).bit_length()

    def limit_counts(self, counts: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " n"]:
        """Return the counts that a silo uses: at most N_max / |S|, rounded to powers of ten if the plan says so."""
        limited: np.ndarray = np.minimum(counts, self.count_limit)
        if not self.powers_of_ten:
            return limited
        rounded = np.zeros_like(limited)
        for level in _levels(self.count_limit):
            # n >= level / sqrt(10), in integer arithmetic.
            rounded[10 * limited * limited >= level * level] = level
        return np.where(limited > 0, rounded, 0)

    def check_counts(self, counts: Int64[np.ndarray, " users"], silo: int) -> None:
        """Check that a silo's record counts are at most N_max / |S|, so that no total exceeds N_max.

        Each silo checks its own counts.

        Args:
            counts: (|U|,) int64, n_{s,u} of one silo.
            silo: number of the silo, for the error.

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
        if self.powers_of_ten and not np.isin(counts, (0, *_levels(self.count_limit))).all():
            raise OwnRecordsError("a user's records here are no power of ten", silo=silo)

    def require(self, modulus: int, setting: str) -> None:
        """Check that T_j is determined by its remainder modulo the plaintext modulus: 2 max |T_j| < modulus.

        Args:
            modulus: plaintext modulus of the cipher.
            setting: name of the cipher's parameter in the error message.

        Raises:
            ProtocolError: the modulus is too small; the message gives both sizes and the setting to change.
        """
        if 2 * self.largest_sum >= modulus:
            raise ProtocolError(
                f"the sum needs {self.slot_bits} bits (C alone, for N_max = {self.largest_count}, has "
                f"{self.common.bit_length()}) and {setting} offers {modulus.bit_length() - 1}; "
                "take a larger key, or cap the records per user"
            )


def _levels(most: int) -> tuple[int, ...]:
    """Return the powers of ten up to ``most``."""
    return tuple(10**digits for digits in range(len(str(most))))


def rounded_sensitivity(clip: float, length: int, grid: float = 1.0) -> float:
    """Return the l2 sensitivity of the weighted sum to one user, after rounding: clip + sqrt(d) g.

    T_j is not a multiple of C. Its remainder modulo C would disclose the fractions n_{s,u} / N_u, which noise on the
    grid does not cover. The uniform v make the remainder uniform and independent of the data. Given the remainder,
    T_j / C is the weighted sum rounded to the grid, with the same rounding for neighbouring data, plus noise on the
    grid. Rounding changes each coordinate of the difference by less than one grid step. The discrete Gaussian is
    therefore accounted with clip + sqrt(d) g instead of clip (docs/theory/private-weighting.md).

    Args:
        clip: l2 bound of one user's contribution.
        length: d, number of coordinates.
        grid: g, step of the grid, in the unit of ``clip``.
    """
    return clip + math.sqrt(length) * grid


# --- interfaces and phases ---

Contributions = Int64[np.ndarray, "m d"] | Int32[np.ndarray, "m d"]


class KeyHolder(Protocol):
    """Server's computations with the decryption key of a cipher."""

    @property
    def modulus(self) -> int:
        """Plaintext modulus of the cipher."""
        ...

    @property
    def public(self) -> bytes:
        """Public key for the silos."""
        ...

    def encrypt(self, weights: Sequence[int]) -> list[bytes]:
        """Return one fresh ciphertext for every number; the numbers are below the modulus."""
        ...

    def begin(self) -> None:
        """Begin the sum of an attempt, with no silo's ciphertexts in it."""
        ...

    def add(self, blocks: Sequence[bytes]) -> None:
        """Add one silo's ciphertexts to the sum.

        Raises:
            ProtocolError: a wrong number of ciphertexts, or an invalid ciphertext.
        """
        ...

    def open(self, own_masks: Sequence[bytes]) -> tuple[Float64[np.ndarray, " d"], int]:
        """Decrypt the sum and remove the silos' own masks.

        Args:
            own_masks: seeds of all silos' own masks.

        Returns:
            T_j / C for the d coordinates, in grid units, and the integer T of the check coordinate.

        Raises:
            ProtocolError: a decrypted value that no honest sum can have.
        """
        ...


class Evaluator(Protocol):
    """Silo's computations with the server's public key."""

    @property
    def modulus(self) -> int:
        """Plaintext modulus of the cipher."""
        ...

    def load(self, weights: Sequence[bytes], multipliers: Sequence[int]) -> None:
        """Load the encrypted weights of this silo's users; they serve until the next call.

        Args:
            weights: Enc(B_u) for each of the silo's users.
            multipliers: r_u C modulo the plaintext modulus, for the same users.

        Raises:
            ProtocolError: an invalid ciphertext.
        """
        ...

    def encrypt_sum(
        self,
        contributions: Contributions,
        counts: Int64[np.ndarray, " m"],
        noise: Int64[np.ndarray, " c"],
        mask_keys: Sequence[tuple[bytes, bool]],
        own_mask: bytes,
        dither: bytes,
    ) -> list[bytes]:
        """Return the ciphertexts of the silo's masked weighted sum.

        The plaintext of coordinate j is sum_u y_{s,u,j} n_{s,u} C / N_u + C z_{s,j} + v_{s,j} + masks.

        Args:
            contributions: (m, d) y_{s,u,j} of the users whose weights were loaded, in grid units.
            counts: (m,) n_{s,u} of the same users.
            noise: (d+1,) integers that are multiplied by C and added: the noise share z_s, then the blind of the
                check.
            mask_keys: keys of the pairwise masks, each with whether this silo adds the mask.
            own_mask: seed of the silo's own mask.
            dither: 32-byte key from which the v_{s,j} are derived deterministically.
        """
        ...


class Phase(Enum):
    """Step of the protocol that a party has reached."""

    SETUP = auto()
    HISTOGRAM = auto()
    IDLE = auto()
    TRANSFER = auto()
    INPUTS = auto()
    REVEAL = auto()
    DONE = auto()


def transfer_context(round_id: RoundId, silo: int, user: int) -> bytes:
    """Return the context of one oblivious transfer, unique for every round, attempt, silo and user."""
    return round_id.encode() + silo.to_bytes(2, "big") + user.to_bytes(4, "big")


# --- inputs -------------------------------------------------------------------------------------------------
# Inputs that a silo contributes to a round of private weighting, and persists.


SEED_BYTES: Final = 32
"""Bytes of every seed of the protocol."""


@dataclass(frozen=True, kw_only=True, eq=False)
class WeightedInputs:
    """Input of a client to a round.

    Attributes:
        contributions: (m, d) int32 or int64, clipped contributions of weight 1 of the m users with records at this
            client, ascending by user, in grid units.
        noise: (d,) int64, the client's exact share of the noise, in grid units.
        dither: 32-byte key from which the client's v_{s,j} are derived; None draws a fresh key.
    """

    contributions: Contributions
    noise: Int64[np.ndarray, " d"]
    dither: bytes | None = None

    def encode(self) -> bytes:
        """Return the input as bytes, to be persisted: a repeated round must send the same three values again."""
        users, length = self.contributions.shape
        size = self.contributions.dtype.itemsize
        # A fresh key in a repeated round would show two roundings of one sum, which the noise does not cover.
        assert self.dither is not None
        head = Writer().number(users, 4).number(length, 4).number(size, 1)
        numbers = self.contributions.astype(f"<i{size}").tobytes() + self.noise.astype("<i8").tobytes()
        return head.bytes() + numbers + self.dither

    @classmethod
    def decode(cls, data: bytes) -> WeightedInputs:
        """Return the input that :meth:`encode` encoded.

        Raises:
            ProtocolError: :meth:`encode` cannot have made these bytes.
        """
        reader = Reader(data)
        users, length, size = reader.number(4), reader.number(4), reader.number(1)
        if size not in (4, 8):
            raise ProtocolError(f"contributions are numbers of 4 or 8 bytes, not of {size}")
        rows = np.frombuffer(reader.fixed_bytes(users * length * size), dtype=f"<i{size}").reshape(
            users, length
        )
        noise = np.frombuffer(reader.fixed_bytes(8 * length), dtype="<i8")
        dither = reader.fixed_bytes(SEED_BYTES)
        reader.finish()
        return cls(contributions=rows, noise=noise, dither=dither)


# --- messages, in addition to those that all protocols share ---

_MAX_CIPHERTEXTS: Final = 1 << 19
"""Largest number of ciphertexts of one message: a ciphertext has at least 512 bytes. Weights have one per user."""
_BLOCKS: Final = repeated(BLOCK, size=4, most=_MAX_CIPHERTEXTS)


@message(20, "the server's public encryption key")
class WeightingKey(Message):
    """Public encryption key of the server."""

    key: bytes = wire_field(REST, Reveals.NOTHING)


@message(21, "the blinding seed, sealed for one silo")
class SealedSeed(Message):
    """Seed of the multiplicative blinds r_u, sealed by silo 0 under its pairwise key with a silo."""

    sealed: bytes = wire_field(fixed_bytes(SEED_BYTES + OVERHEAD_BYTES), Reveals.NOTHING)


@message(22, "doubly blinded record counts")
class BlindedHistogram(Message):
    """Record counts of a silo, blinded by r_u and by pairwise masks: uniform numbers to the server."""

    blocks: tuple[bytes, ...] = wire_field(_BLOCKS, Reveals.COUNTS, Key.SILOS, besides=Reveals.PRESENCE)


@message(23, "the users who take part")
class Participants(Message):
    """Users with a record in any silo, as one byte per user."""

    present: tuple[bool, ...] = wire_field(
        repeated(number(1).mapped(int, bool), size=4, most=_MAX_CIPHERTEXTS), Reveals.PRESENCE
    )


@message(24, "the round's encrypted weights")
class EncryptedWeights(Message):
    """Start of a round with the participants' encrypted weights; empty if the last weights still hold."""

    blocks: tuple[bytes, ...] = wire_field(_BLOCKS, Reveals.DRAWN, Key.SERVER, besides=Reveals.PRESENCE)


@message(25, "an encrypted masked sum")
class EncryptedSum(Message):
    """Encrypted, masked, re-randomised weighted sum of a silo; the server sees the ciphertexts."""

    blocks: tuple[bytes, ...] = wire_field(_BLOCKS, Reveals.SUM, Key.SERVER, besides=Reveals.CIPHERTEXTS)


@message(26, "points for oblivious transfer")
class TransferOffer(Message):
    """Start of a round with private sub-sampling, with the server's points for the oblivious transfers."""

    public: mpz = custom_field(Reveals.NOTHING)
    constants: tuple[mpz, ...] = custom_field(Reveals.NOTHING)

    def encode(self) -> bytes:
        """Return all points as one list, the public point first."""
        return Writer().integers([self.public, *self.constants], POINT_BYTES).bytes()

    @classmethod
    def decode(cls, data: bytes) -> TransferOffer:
        """Return the offer that a body encodes; raise a ProtocolError if it has fewer than two points."""
        reader = Reader(data)
        points = reader.integers(POINT_BYTES)
        reader.finish()
        if len(points) < 2:
            raise ProtocolError("an offer of oblivious transfer has at least 2 points")
        return cls(public=points[0], constants=tuple(points[1:]))


@message(27, "hidden choices of oblivious transfers")
class TransferRequests(Message):
    """Oblivious-transfer requests of a silo, one per participant; each hides which of the P messages it requests."""

    points: tuple[mpz, ...] = wire_field(
        integers(POINT_BYTES), Reveals.DRAWN, Key.NOBODY, besides=Reveals.PRESENCE
    )


@message(28, "sealed places of oblivious transfers")
class TransferAnswers(Message):
    """All P messages of every oblivious transfer, sealed so that the silo can open one of each transfer."""

    blocks: tuple[bytes, ...] = wire_field(_BLOCKS, Reveals.DRAWN, Key.NOBODY, besides=Reveals.PRESENCE)
