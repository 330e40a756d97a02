"""The private weighting protocol (ULDP-FL, Protocol 1): weights n_{s,u} / N_u that no party learns.

    setup   silos announce signed keys; the server relays them and sends its encryption key
            silo 0 seals a seed R for every other silo; all draw the same blinds r_u from it
            each silo sends r_u n_{s,u} + masks; the server adds up r_u N_u and inverts it to B_u
    round   the server sends Enc(B_u), or Enc(0) for a user who is not drawn
            each silo sends Enc( sum_u y_{s,u} n_{s,u} C / N_u + C z_s + v_s + masks )
            when all have arrived, the server asks for the silos' own masks, adds up and decrypts

What a party computes under which cipher is in a key holder and an evaluator (Paillier: ``paillier_weights``; ring-LWE
for deep models: ``rlwe_weights``). A silo that vanishes ends the attempt, and nothing is revealed; the weights of the
others depend on its records, so the run waits for it, or sets up anew without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import Protocol

import numpy as np
from jaxtyping import Float64, Int32, Int64

from fedveil.crypto.key_agreement import RoundId

Contributions = Int64[np.ndarray, "m d"] | Int32[np.ndarray, "m d"]


class KeyHolder(Protocol):
    """What the server computes with its decryption key; a cipher's documentation says the rest."""

    @property
    def modulus(self) -> int:
        """The plaintext modulus."""
        ...

    @property
    def public(self) -> bytes:
        """The public key for the silos."""
        ...

    def encrypt(self, weights: Sequence[int]) -> list[bytes]:
        """Return a fresh ciphertext of every number below the modulus."""
        ...

    def begin(self) -> None:
        """Begin the sum of an attempt."""
        ...

    def add(self, blocks: Sequence[bytes]) -> None:
        """Add a silo's ciphertexts."""
        ...

    def open(self, own_masks: Sequence[bytes]) -> tuple[Float64[np.ndarray, " d"], int]:
        """Return the sum in grid units and the integer of the check."""
        ...


class Evaluator(Protocol):
    """What a silo computes with the server's public key."""

    @property
    def modulus(self) -> int:
        """The plaintext modulus."""
        ...

    def load(self, weights: Sequence[bytes], multipliers: Sequence[int]) -> None:
        """Take Enc(B_u) and r_u C of this silo's users."""
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
        """Return the ciphertexts of the masked weighted sum.

        Args:
            contributions: (m, d) y_{s,u,j} of the users whose weights were loaded, in grid units.
            counts: (m,) n_{s,u} of the same users.
            noise: (d+1,) whole numbers to be added C-fold: the noise share, and the blind of the check.
            mask_keys: keys of the pairwise masks, each with whether this silo adds the mask.
            own_mask: seed of the silo's own mask.
            dither: 32-byte key of the v_{s,j}; the same key gives the same.
        """
        ...


class Phase(Enum):
    """Where a party stands in the protocol."""

    SETUP = auto()
    HISTOGRAM = auto()
    IDLE = auto()
    TRANSFER = auto()
    INPUTS = auto()
    REVEAL = auto()
    DONE = auto()


def transfer_context(round_id: RoundId, silo: int, user: int) -> bytes:
    """Return the name of one oblivious transfer, different for every round, attempt, silo and user."""
    return round_id.encode() + silo.to_bytes(2, "big") + user.to_bytes(4, "big")
