"""Private weighting (ULDP-FL, Protocol 1): interfaces and phases of a sum with weights n_{s,u} / N_u.

    setup   silos announce signed keys; the server relays them and sends its encryption key
            silo 0 seals a seed R for every other silo; all silos derive the same blinds r_u from it
            each silo sends r_u n_{s,u} + masks; the server adds them to r_u N_u and inverts it to B_u
    round   the server sends Enc(B_u), or Enc(0) for a user who is not sampled
            each silo sends Enc( sum_u y_{s,u} n_{s,u} C / N_u + C z_s + v_s + masks )
            once all sums have arrived, the server requests the silos' own masks, adds the sums and decrypts

The computations under a cipher are split into a :class:`KeyHolder` (server) and an :class:`Evaluator` (silo). They
exist for Paillier (``paillier_weights``) and, for deep models, for ring-LWE (``rlwe_weights``). A silo that vanishes
ends the attempt, and nothing is revealed. The weights of the other silos depend on its records, so the run waits for
the silo, or repeats the setup without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, Protocol

import numpy as np
from jaxtyping import Float64, Int32, Int64

from fedveil.crypto.key_agreement import RoundId
from fedveil.protocols.errors import ProtocolError
from fedveil.protocols.wire import Reader, Writer

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
# Inputs that a silo contributes to a round of private weighting, and persists on its own disk.


SEED_BYTES: Final = 32
"""Bytes of every seed of the protocol."""


@dataclass(frozen=True, kw_only=True, eq=False)
class WeightedInputs:
    """Input of a client to a round.

    Attributes:
        contributions: (m, d) int32 or int64, clipped contributions of weight 1 of the m users with records at this
            client, ascending by user, in grid units.
        noise: (d,) int64, the client's exact share of the noise, in grid units.
        dither: 32-byte key of the client's share v of the remainders modulo C; None draws a fresh key.
    """

    contributions: Contributions
    noise: Int64[np.ndarray, " d"]
    dither: bytes | None = None

    def encode(self) -> bytes:
        """Return the input as bytes, for the client's own disk; a repeated round sends all three values again."""
        users, length = self.contributions.shape
        size = self.contributions.dtype.itemsize
        # A fresh key in a repeated round would show two remainders of one sum: more than the noise covers.
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
