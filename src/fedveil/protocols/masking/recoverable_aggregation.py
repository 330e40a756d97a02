"""Secure aggregation that survives vanished silos (Bonawitz et al. 2017, the protocol for parties that follow it).

For every attempt each silo makes two fresh agreement keys, one for its masks and one for sealing, and a fresh seed of
its own mask. It gives each other silo one Shamir share of the seed and of the mask key, sealed under the sealing keys
of the two. When the vectors are in, each silo signs the one list of survivors that it is told of. With ``threshold``
signatures over that list it answers with one share per silo: of the seed if that silo survived, of the mask key if
it vanished, never both. From ``threshold`` answers the server rebuilds what it has to take off. A key shows by its
public half that it is the silo's own, and a seed by a key that is derived from it and comes with the sealed shares.

    start -> fresh signed keys -> directory -> sealed shares -> relayed shares -> masked vectors ->
    survivors -> signatures -> all signatures -> shares

Claim: whatever the server says to whom, of an attempt it opens the sum over one list of at least ``threshold`` silos,
or nothing; silos follow the protocol. With c silos that do not, 2 threshold > |S| + c is needed (``check_threshold``).
Why: two lists that both have ``threshold`` signatures share an honest silo, which signs once. So all shares are given
for one list L, and of each silo only one kind. Every silo that gives shares holds shares of all of L, so it is masked
with all of L, and a smaller sum that has its vector stays masked. A vector of the others, at most |L| - threshold, is
masked with at least threshold - 1 silos; masks come off with those others and with the |S| - |L| that vanished, which
are fewer. (Bonawitz et al. 2017 sign the list too, against a server that does not follow the protocol.)

The server relays all sealed shares, so the private half of a sealing key is never shared: with one key for both uses it
could open the shares of a vanished silo's seed with the key that it rebuilds (Bonawitz et al. 2017, c_u and s_u).

The sum is then over the survivors alone. Noise must be enough with ``threshold`` shares of it: a vanished silo's
share is missing. A late vector of a silo that was declared vanished stays hidden by its own mask: no silo gives its
share of the seed, and the server cannot open those that it relayed.
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
    """What a party waits for."""

    IDLE = auto()
    KEYS = auto()
    SHARES = auto()
    VECTORS = auto()
    SIGN = auto()
    REVEAL = auto()
    DONE = auto()


def check_threshold(threshold: int, silos: int, colluding: int = 0) -> None:
    """Return if any two groups of so many silos have one in common that does not pool what it knows.

    Raises:
        ProtocolError: the threshold is too low or above the number of silos.
    """
    if not silos + colluding < 2 * threshold <= 2 * silos:
        besides = f", {colluding} of which may pool what they know" if colluding else ""
        raise ProtocolError(
            f"threshold {threshold} of {silos} silos{besides}; it must lie above half of {silos + colluding} and at "
            "most at all silos"
        )


def list_of(round_id: RoundId, survivors: tuple[int, ...]) -> bytes:
    """Return what silos sign of a list of survivors."""
    return SIGN_PURPOSE.encode() + round_id.encode() + Survivors(silos=survivors).encode()
