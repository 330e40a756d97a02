"""Which protocol carries the sums of a run, by what its parties agree on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from fedveil.engine.aggregation import MaskedRange
from fedveil.engine.partial import PartialRange
from fedveil.engine.setup import Prepared
from fedveil.engine.weighting import WeightingRange
from fedveil.federation.encrypted_sums import EncryptedShare, EncryptedSum, encrypted_exchanges
from fedveil.federation.hidden_sums import HiddenShare, HiddenSum, Place
from fedveil.federation.masked_sums import MASKED, MaskedShare, MaskedSum
from fedveil.federation.recovered_sums import RECOVERED, RecoveredShare, RecoveredSum
from fedveil.federation.shapes import Exchanges
from fedveil.federation.store import Answered
from fedveil.federation.weighted_sums import BlindShare, BlindSum, weighted_exchanges


def hidden_sum(prepared: Prepared, run: bytes) -> HiddenSum | None:
    """Return the coordinator's side of a protocol for a session, None where sums travel in the open.

    Args:
        prepared: the experiment.
        run: 16 bytes that name the session.

    Raises:
        ProtocolError: a letter of the protocol would be longer than any party reads.
    """
    agreed = prepared.agreed
    if isinstance(agreed, MaskedRange):
        return MaskedSum(agreed, run) if agreed.threshold is None else RecoveredSum(agreed, run)
    if isinstance(agreed, WeightingRange):
        return BlindSum(agreed, run)
    return EncryptedSum(agreed, run) if isinstance(agreed, PartialRange) else None


@dataclass(frozen=True, kw_only=True)
class SiloDisk:
    """What a protocol keeps of a run on a silo's disk.

    Attributes:
        secret: returns 32 bytes of its own that stay the same for the run.
        keep: puts an answer on the disk, durably.
        publish: puts a released model on the disk.
    """

    secret: Callable[[], bytes]
    keep: Callable[[Answered], None]
    publish: Callable[[dict[str, Tensor]], None]


def hidden_share(prepared: Prepared, place: Place, disk: SiloDisk) -> HiddenShare | None:
    """Return a silo's side of a protocol for a session, None where sums travel in the open.

    Raises:
        ProtocolError: the silo's records do not fit what the parties agree on.
    """
    agreed = prepared.agreed
    if isinstance(agreed, MaskedRange):
        return MaskedShare(agreed, place) if agreed.threshold is None else RecoveredShare(agreed, place)
    if isinstance(agreed, WeightingRange):
        return BlindShare(agreed, place)
    if isinstance(agreed, PartialRange):
        orders = None if place.number else disk.secret()
        return EncryptedShare(prepared, place, orders=orders, keep=disk.keep, publish=disk.publish)
    return None


def exchanges(prepared: Prepared, silo: int) -> Exchanges | None:
    """Return the letters of a protocol with a silo, None where sums travel in the open."""
    agreed = prepared.agreed
    if isinstance(agreed, MaskedRange):
        return MASKED if agreed.threshold is None else RECOVERED
    if isinstance(agreed, WeightingRange):
        return weighted_exchanges(agreed, silo)
    return encrypted_exchanges(agreed, silo) if isinstance(agreed, PartialRange) else None
