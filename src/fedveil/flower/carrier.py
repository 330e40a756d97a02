"""Carries a coordinator's letters over Flower's Grid: pushes, pulls, and sends again what got no answer.

The Grid's own ``send_and_receive`` sleeps 3 seconds between looks; pushing and pulling is what it is made of, and
lets the coordinator look as often as it likes.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Final

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fedveil.engine.federation.coordinator import CoordinatorParty
from fedveil.flower.certificates import node_key_pem
from fedveil.flower.client_app import RECORD
from fedveil.flower.folders import CoordinatorFolder
from fedveil.protection.errors import ProtocolError

_LOOK_SECONDS: Final = 0.1
_NODES_SECONDS: Final = 2.0
_log = logging.getLogger("fedveil.coordinator")


@dataclass(frozen=True, kw_only=True)
class _Sent:
    """A letter under way."""

    silo: int
    letter: bytes
    at: float


def carry(grid: Grid, party: CoordinatorParty, home: CoordinatorFolder) -> None:
    """Carry letters until the run ends, or until nobody has answered for the coordinator's patience.

    Args:
        grid: Flower's.
        party: the coordinator, open.
        home: the coordinator's folder: which node key is which silo's, and how long to wait.
    """
    settings, silos = home.settings, home.membership.silos
    keys = {node_key_pem(home / "nodes" / f"{name}.pub"): number for number, name in enumerate(silos)}
    under_way: dict[str, _Sent] = {}
    nodes: dict[int, int] = {}
    looked = heard = time.monotonic()
    while not party.finished:
        now = time.monotonic()
        if len(nodes) < len(silos) or now - looked > settings.resend_after:
            nodes, looked = _online(grid, keys), now
        _push(grid, party, nodes, under_way, settings.resend_after)
        if _pull(grid, party, under_way):
            heard = time.monotonic()
        elif time.monotonic() - heard > settings.patience:
            missing = ", ".join(silos[silo] for silo, _ in party.letters())
            party.stop(f"silo {missing} has not answered for {settings.patience:g} s")
        else:
            time.sleep(_NODES_SECONDS if not under_way else _LOOK_SECONDS)


def _online(grid: Grid, keys: dict[bytes, int]) -> dict[int, int]:
    """Return the node of each silo that is online."""
    found = {keys[node.public_key]: node.node_id for node in grid.get_nodes() if node.public_key in keys}
    _log.info("%d of %d silos are online", len(found), len(keys))
    return found


def _push(
    grid: Grid,
    party: CoordinatorParty,
    nodes: dict[int, int],
    under_way: dict[str, _Sent],
    resend_after: float,
) -> None:
    """Send what waits for an answer and is not under way, or has been for too long."""
    now = time.monotonic()
    for key in [key for key, sent in under_way.items() if now - sent.at > resend_after]:
        del under_way[key]
    on_the_way = {sent.letter for sent in under_way.values()}
    due = [(silo, data) for silo, data in party.letters() if data not in on_the_way and silo in nodes]
    messages = [
        Message(
            RecordDict({RECORD: ConfigRecord({"letter": data})}),
            dst_node_id=nodes[silo],
            message_type=MessageType.QUERY,
        )
        for silo, data in due
    ]
    if not messages:
        return
    for (silo, data), key in zip(due, grid.push_messages(messages), strict=True):
        if key:
            under_way[key] = _Sent(silo=silo, letter=data, at=now)


def _pull(grid: Grid, party: CoordinatorParty, under_way: dict[str, _Sent]) -> bool:
    """Hand over the answers that have arrived; return whether there was one."""
    if not under_way:
        return False
    heard = False
    for reply in grid.pull_messages(list(under_way)):
        sent = under_way.pop(reply.metadata.reply_to_message_id, None)
        if sent is None:
            continue
        if reply.has_error():
            _log.warning("silo %d: no answer: %s", sent.silo, reply.error.reason)
            time.sleep(_NODES_SECONDS)
            continue
        letter = reply.content.config_records[RECORD]["letter"]
        try:
            if not isinstance(letter, bytes):
                raise ProtocolError("its answer holds no letter", silo=sent.silo)
            party.receive(sent.silo, letter)
            heard = True
        except ProtocolError as error:
            _log.warning("an answer was refused: %s", error)
    return heard
