"""Secure aggregation that survives vanished silos (Bonawitz et al. 2017, semi-honest protocol).

For every attempt each silo makes two fresh agreement keys, one for its masks and one for sealing, and a fresh seed of
its own mask. It sends every other silo one Shamir share of the seed and one of the mask key, sealed under the sealing
keys of the two silos. After the vectors have arrived, each silo signs the first list of survivors that it receives,
and no other. Once it has ``threshold`` signatures over that list, it sends one share per silo: a share of the seed if
that silo survived, a share of the mask key if it vanished, and never both. From ``threshold`` answers the server
rebuilds the masks that it must remove. It checks a rebuilt mask key against the announced public key. It checks a
rebuilt seed against a key that is derived from the seed and arrives with the sealed shares.

    start -> fresh signed keys -> directory -> sealed shares -> relayed shares -> masked vectors ->
    survivors -> signatures -> all signatures -> shares

Claim: whatever messages the server sends to each silo, in one attempt it opens the sum over a single list of at least
``threshold`` silos, or nothing. Condition: silos follow the protocol. If c silos do not, 2 threshold > |S| + c is
needed (:func:`check_threshold`).

Argument: any two lists that both have ``threshold`` signatures share an honest silo, and an honest silo signs only
one list. Hence all silos send their shares for one list L, and of each silo only one kind of share. Every silo that
sends shares holds shares of all silos in L. Its vector is therefore masked with all of L, and a smaller sum that
includes this vector stays masked. The other silos of L, at most |L| - threshold, have vectors that are masked with at
least threshold - 1 silos. The removable masks are those with these other silos and with the |S| - |L| vanished silos,
which are fewer. (Bonawitz et al. 2017 also sign the list, against a server that does not follow the protocol.)

The server relays all sealed shares, so the private half of a sealing key is never shared. If one key served both
uses, the server could decrypt the shares of a vanished silo's seed with the mask key that it rebuilds (Bonawitz et
al. 2017, c_u and s_u).

The sum is over the survivors only. The noise must suffice with ``threshold`` shares, because the noise share of a
vanished silo is missing. A late vector of a silo that was declared vanished stays hidden by its own mask: no silo
sends a share of its seed, and the server cannot decrypt the shares that it relayed.
"""

from __future__ import annotations

from enum import Enum, auto

from fedveil.crypto.key_agreement import KEY_BYTES, RoundId, SignedKey
from fedveil.crypto.keys import SIGNATURE_BYTES
from fedveil.crypto.shamir import SHARE_BYTES
from fedveil.errors import ProtocolError
from fedveil.privacy.claims import Reveals
from fedveil.protocols.field_codecs import BLOCK, fixed_bytes, message_codec, wire_field
from fedveil.protocols.messages import SIGNED_KEY, SILOS, Message, by_silo, message

KEY_PURPOSE = "recoverable aggregation: mask key"
SEAL_PURPOSE = "recoverable aggregation: sealing key"
SHARE_PURPOSE = "recoverable aggregation: shares"
SEED_PURPOSE = "recoverable aggregation: what shows a seed"
SIGN_PURPOSE = "recoverable aggregation: survivors"


class Phase(Enum):
    """Step of an attempt: the message that a party awaits."""

    IDLE = auto()
    KEYS = auto()
    SHARES = auto()
    VECTORS = auto()
    SIGN = auto()
    REVEAL = auto()
    DONE = auto()


def check_threshold(threshold: int, silos: int, colluding: int = 0) -> None:
    """Check that any two groups of ``threshold`` silos share a silo that does not collude.

    Two groups of t among n silos share at least 2t - n silos, so 2t > n + c is needed.

    Args:
        threshold: t, number of silos in a group.
        silos: n, number of silos in the run.
        colluding: c, number of silos that may pool their knowledge.

    Raises:
        ProtocolError: the threshold is too low, or above the number of silos.
    """
    if not silos + colluding < 2 * threshold <= 2 * silos:
        besides = f", {colluding} of which may pool what they know" if colluding else ""
        raise ProtocolError(
            f"threshold {threshold} of {silos} silos{besides}; it must lie above half of {silos + colluding} and at "
            "most at all silos"
        )


def list_of(round_id: RoundId, survivors: tuple[int, ...]) -> bytes:
    """Return the bytes that silos sign for a list of survivors: purpose, attempt and list."""
    return SIGN_PURPOSE.encode() + round_id.encode() + Survivors(silos=survivors).encode()


# --- messages -----------------------------------------------------------------------------------------------
# Define the messages of secure aggregation with recovery.


@message(11, "two signed public keys")
class RecoveryKeys(Message):
    """Two signed agreement keys of a silo for one attempt: for masks, and for sealed shares."""

    mask: SignedKey = wire_field(SIGNED_KEY, Reveals.NOTHING)
    seal: SignedKey = wire_field(SIGNED_KEY, Reveals.NOTHING)


@message(12, "the silos' signed public keys, two each")
class RecoveryDirectory(Message):
    """Both signed agreement keys of all silos of a cohort, relayed by the server."""

    keys: tuple[tuple[int, RecoveryKeys], ...] = wire_field(
        by_silo(message_codec(RecoveryKeys)), Reveals.NOTHING
    )


@message(15, "sealed shares for the other silos")
class ShareBundle(Message):
    """Sealed shares of a silo's two secrets, one pair per other silo, with a check value of its seed.

    The server checks a rebuilt mask key against the public half that the silo announced. It checks a rebuilt seed of
    the silo's own mask against ``shown``, a key derived from the seed. The seed cannot be computed from ``shown``.
    """

    shares: tuple[tuple[int, bytes], ...] = wire_field(by_silo(BLOCK), Reveals.NOTHING)
    shown: bytes = wire_field(fixed_bytes(KEY_BYTES), Reveals.NOTHING)


@message(8, "the other silos' sealed shares")
class RelayedShares(Message):
    """Shares that the other silos sealed for the recipient, relayed by the server."""

    shares: tuple[tuple[int, bytes], ...] = wire_field(by_silo(BLOCK), Reveals.NOTHING)


@message(9, "the silos whose vectors arrived")
class Survivors(Message):
    """Numbers of the silos whose masked vectors arrived, ascending."""

    silos: tuple[int, ...] = wire_field(SILOS, Reveals.NOTHING)


@message(13, "a signature over the survivors")
class SignedSurvivors(Message):
    """Signature of a silo over the only list of survivors that it accepts in an attempt."""

    signature: bytes = wire_field(fixed_bytes(SIGNATURE_BYTES), Reveals.NOTHING)


@message(14, "the silos' signatures over the survivors")
class AgreedSurvivors(Message):
    """Survivors' signatures over the list of survivors; they show which silos received the same list."""

    signatures: tuple[tuple[int, bytes], ...] = wire_field(
        by_silo(fixed_bytes(SIGNATURE_BYTES)), Reveals.NOTHING
    )


@message(10, "one share per silo")
class RevealedShares(Message):
    """One share for each silo: of the seed of its own mask if it survived, of its mask key if it vanished."""

    shares: tuple[tuple[int, bytes], ...] = wire_field(by_silo(fixed_bytes(SHARE_BYTES)), Reveals.SUM)
