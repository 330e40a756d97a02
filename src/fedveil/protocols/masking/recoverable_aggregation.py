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

from fedveil.crypto.key_agreement import RoundId
from fedveil.protocols.errors import ProtocolError
from fedveil.protocols.masking.recovery_messages import Survivors

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
