"""Which protocol carries the sums of a run, by what its parties agree on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from fedveil.crypto.keys import IdentityKey
from fedveil.engine.aggregation import MaskedRange
from fedveil.engine.federation.encrypted_sums import EncryptedShare, EncryptedSum
from fedveil.engine.federation.hidden_sums import HiddenShare, HiddenSum
from fedveil.engine.federation.masked_sums import MaskedShare, MaskedSum
from fedveil.engine.federation.recovered_sums import RecoveredShare, RecoveredSum
from fedveil.engine.federation.store import Answered
from fedveil.engine.federation.weighted_sums import BlindShare, BlindSum
from fedveil.engine.partial import PartialRange
from fedveil.engine.setup import Prepared
from fedveil.engine.weighting import WeightingRange
from fedveil.protection.peers import Roster


def hidden_sum(prepared: Prepared, *, run: bytes, session: int) -> HiddenSum | None:
    """Return the coordinator's side of a run's protocol for a session, None where sums travel in the open.

    Raises:
        ProtocolError: a letter of the protocol would be longer than any party reads.
    """
    agreed = prepared.agreed
    if isinstance(agreed, MaskedRange):
        kind = MaskedSum if agreed.threshold is None else RecoveredSum
        return kind(agreed, run=run, session=session)
    if isinstance(agreed, WeightingRange):
        return BlindSum(agreed, run=run, session=session)
    if isinstance(agreed, PartialRange):
        return EncryptedSum(agreed, run=run, session=session)
    return None


@dataclass(frozen=True, kw_only=True)
class SiloPlace:
    """What a silo's side of a protocol needs of the silo.

    Attributes:
        number: the silo's own.
        identity: its long-term key.
        roster: all silos' public identities.
        secret: returns 32 bytes of its own that stay the same for the run.
        keep: puts an answer on the disk, durably.
        publish: puts a released model on the disk.
    """

    number: int
    identity: IdentityKey
    roster: Roster
    secret: Callable[[], bytes]
    keep: Callable[[Answered], None]
    publish: Callable[[dict[str, Tensor]], None]


def hidden_share(prepared: Prepared, place: SiloPlace, *, run: bytes, session: int) -> HiddenShare | None:
    """Return a silo's side of a run's protocol for a session, None where sums travel in the open.

    Raises:
        ProtocolError: the silo's records do not fit what the parties agree on.
    """
    agreed, number, identity, roster = prepared.agreed, place.number, place.identity, place.roster
    if isinstance(agreed, MaskedRange):
        kind = MaskedShare if agreed.threshold is None else RecoveredShare
        return kind(agreed, run=run, session=session, number=number, identity=identity, roster=roster)
    if isinstance(agreed, WeightingRange):
        return BlindShare(agreed, run=run, session=session, number=number, identity=identity, roster=roster)
    if isinstance(agreed, PartialRange):
        return EncryptedShare(
            prepared,
            run=run,
            session=session,
            number=number,
            identity=identity,
            roster=roster,
            orders=None if number else place.secret(),
            keep=place.keep,
            publish=place.publish,
        )
    return None
