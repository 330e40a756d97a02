"""Carries a coordinator's letters as messages of Flower's: pushes, pulls, and sends again what got no answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from flwr.app import Message, MessageType

from fedveil.federation.coordinator import CoordinatorParty
from fedveil.federation.exchange import ReplyKind
from fedveil.flower.child_process import ProcessError
from fedveil.flower.coordinator_host.tasks import MessageQueue
from fedveil.flower.enrollment.certificates import node_key_pem
from fedveil.flower.envelope import pack_message, pack_reminder, unpack_message
from fedveil.flower.folders import CoordinatorFolder
from fedveil.flower.metrics import Meter
from fedveil.protocols.errors import ProtocolError
from fedveil.sanitize import quiet_log, sanitize

_LOOK_SECONDS: Final = 0.1
_NODES_SECONDS: Final = 0.5
_FAREWELL_SECONDS: Final = 5.0
_BUSY_SECONDS: Final = 5.0
_AT_WORK_SECONDS: Final = 1.0
_LONGEST_WAIT: Final = 3600.0
_MOST_LETTERS: Final = 20_000
_PULLED_BYTES: Final = 1 << 30
_log = quiet_log("fedveil.coordinator")


_Nodes = dict[int, tuple[int, str]]
"""Of every silo that is online, its node, and when its carrier began."""


@dataclass(kw_only=True)
class _UnderWay:
    """A letter under way.

    Attributes:
        silo: to whom.
        keys: Flower's numbers of the messages that carry it, and whether each only reminds of it; an answer to any will
            do.
        first: when it was sent first.
        again: when it is sent again; the intervals double up to an hour, and are short again once something is heard,
            or the silo's carrier has begun anew.
        wait: seconds between the last two sendings.
        sent: whether it is under way or there, so that a reminder does instead; not if the silo does not have it.
    """

    silo: int
    keys: dict[str, bool]
    first: float
    again: float
    wait: float
    sent: bool = False


class SilenceTimer:
    """For how long the silos that are waited for have given no sign of life.

    Args:
        max_work_seconds: seconds after which signs of life do not count any more: the letter is to be answered by then.
    """

    def __init__(self, max_work_seconds: float) -> None:
        self._longest_work = max_work_seconds
        self._asked: dict[int, tuple[bytes, float]] = {}
        self._heard: dict[int, float] = {}

    def wait(self, letters: Mapping[int, bytes]) -> None:
        """Note which letter each silo is to answer; the silence begins with each new one."""
        now = time.monotonic()
        for silo in self._asked.keys() - letters.keys():
            del self._asked[silo]
        for silo, letter in letters.items():
            if silo not in self._asked or self._asked[silo][0] != letter:
                self._asked[silo], self._heard[silo] = (letter, now), now

    def note_alive(self, silo: int) -> None:
        """Note that a silo is at work, unless it has been for too long."""
        now = time.monotonic()
        if silo in self._asked and now - self._asked[silo][1] < self._longest_work:
            self._heard[silo] = now

    def silent_for(self, seconds: float) -> tuple[int, ...]:
        """Return the silos that have been silent for longer."""
        now = time.monotonic()
        return tuple(silo for silo in sorted(self._asked) if now - self._heard[silo] > seconds)


def carry_messages(
    post: MessageQueue,
    party: CoordinatorParty[Any],
    home: CoordinatorFolder,
    meter: Meter,
    ended: Callable[[], bool] = lambda: False,
) -> tuple[str, ...]:
    """Carry letters until the run ends, or until a silo has given no sign of life for the coordinator's patience.

    Where the run's protocol recovers, it goes on without silent silos before that. A silo that is at work says so.
    After some ten thousand letters it returns early: the link forgets them with a run of Flower's, and another goes on.

    Args:
        post: Flower's.
        party: the coordinator, open.
        home: the coordinator's folder: which node key is which silo's, and how long to wait.
        meter: counts what passes.
        ended: whether this process is to end.

    Returns:
        The silos whose silence has ended the run; none where it ended otherwise.

    Raises:
        ProcessError: this process is to end; the run goes on when its folder is opened again.
    """
    missing: tuple[str, ...] = ()
    settings, silos = home.settings, home.membership.silos
    keys = {node_key_pem(public): number for number, public in enumerate(home.membership.nodes)}
    enough = min(settings.drop_after_seconds, settings.patience)
    under_way: dict[bytes, _UnderWay] = {}
    nodes: _Nodes = {}
    silence, look_again, pushed = SilenceTimer(settings.max_work_seconds), 0.0, 0
    while not party.is_finished:
        if pushed > _MOST_LETTERS:
            return ()
        if ended():
            raise ProcessError("the coordinator's process was stopped")
        now = time.monotonic()
        if now >= look_again:
            before, nodes = nodes, _online(post, keys)
            for sent in under_way.values():
                if nodes.get(sent.silo) != before.get(
                    sent.silo
                ):  # what its last carrier was asked may be lost
                    sent.again = now
            look_again = now + (_NODES_SECONDS if len(nodes) < len(silos) else settings.resend_after_seconds)
        pushed += _push(post, party, nodes, under_way, settings.resend_after_seconds)
        heard = _pull(post, party, under_way, (silence, meter), settings.resend_after_seconds)
        silence.wait({silo: letter for silo, letter in party.messages() if silo in party.awaited_silos})
        if left := party.drop_missing(silence.silent_for(enough)):
            _log.warning("silo %s: silent for %g s; the others go on", ", ".join(left), enough)
        elif silent := silence.silent_for(settings.patience):
            missing = tuple(silos[silo] for silo in silent)
            party.stop(f"silo {', '.join(missing)} has not answered for {settings.patience:g} s")
        if not heard:
            time.sleep(_LOOK_SECONDS)
    _bid_farewell(post, party, nodes)
    return missing


def _bid_farewell(post: MessageQueue, party: CoordinatorParty[Any], nodes: _Nodes) -> None:
    """Push the last letters, and wait a little for the answers: silos sign the statement with them.

    What is lost of them costs others a wait, and the run a signature.
    """
    letters = [(silo, letter) for silo, letter in party.farewells if silo in nodes]
    messages = [
        Message(pack_message(letter), dst_node_id=nodes[silo][0], message_type=MessageType.QUERY)
        for silo, letter in letters
    ]
    pushed = post.push_messages(messages) if messages else []
    silos = {key: silo for key, (silo, _) in zip(pushed, letters, strict=True) if key}
    until = time.monotonic() + _FAREWELL_SECONDS
    while silos and time.monotonic() < until:
        for reply in post.pull_messages(list(silos)):
            silo = silos.pop(reply.metadata.reply_to_message_id, None)
            if silo is None or reply.has_error():
                continue
            try:
                party.receive(silo, unpack_message(reply))
            except ProtocolError as error:
                _log.warning("an answer was refused: %s", error)
        time.sleep(_LOOK_SECONDS if silos else 0.0)


def _online(post: MessageQueue, keys: dict[bytes, int]) -> _Nodes:
    """Return the node of each silo that is online."""
    found = {
        keys[node.public_key]: (node.node_id, node.last_activated_at)
        for node in post.get_nodes()
        if node.public_key in keys
    }
    _log.info("%d of %d silos are online", len(found), len(keys))
    return found


def _push(
    post: MessageQueue,
    party: CoordinatorParty[Any],
    nodes: _Nodes,
    under_way: dict[bytes, _UnderWay],
    resend_after_seconds: float,
) -> int:
    """Send what waits for an answer and is not under way, or a reminder of what has been for too long.

    A letter may have been handed to a connection that is dead: a silo that is reminded of it says that it does not have
    it, and is sent it again at once.

    Returns:
        How many messages were sent.
    """
    now, waiting = time.monotonic(), party.messages()
    for letter in under_way.keys() - {letter for _, letter in waiting}:
        del under_way[letter]
    due = [
        (silo, letter)
        for silo, letter in waiting
        if silo in nodes and (letter not in under_way or now >= under_way[letter].again)
    ]
    if not due:
        return 0
    reminded = [letter in under_way and under_way[letter].sent for _, letter in due]
    messages = [
        Message(
            pack_reminder(letter) if reminds else pack_message(letter),
            dst_node_id=nodes[silo][0],
            message_type=MessageType.QUERY,
        )
        for (silo, letter), reminds in zip(due, reminded, strict=True)
    ]
    pushed = post.push_messages(messages)
    for (silo, letter), reminds, key in zip(due, reminded, pushed, strict=True):
        if not key:
            continue
        sent = under_way.get(letter) or _UnderWay(
            silo=silo, keys={}, first=now, again=0.0, wait=resend_after_seconds / 2
        )
        sent.keys[key], sent.sent = reminds, True
        sent.wait = min(2 * sent.wait, max(_LONGEST_WAIT, resend_after_seconds))
        sent.again = now + sent.wait
        under_way[letter] = sent
    return len(due)


def _pull(
    post: MessageQueue,
    party: CoordinatorParty[Any],
    under_way: dict[bytes, _UnderWay],
    noted: tuple[SilenceTimer, Meter],
    resend_after_seconds: float,
) -> bool:
    """Hand over the answers that have arrived, and note the signs of life among them; return whether any has."""
    silence, meter = noted
    by_key = {key: sent for sent in under_way.values() for key in sent.keys}
    asked, most = list(by_key), max(1, _PULLED_BYTES // party.longest_answer)
    replies = [
        reply
        for first in range(0, len(asked), most)
        for reply in post.pull_messages(asked[first : first + most])
    ]
    for reply in replies:
        key = reply.metadata.reply_to_message_id
        sent = by_key.get(key)
        if sent is None:
            continue
        reminded = sent.keys.pop(key)
        wait = _BUSY_SECONDS  # should it wait for another answer
        if reply.has_error():
            _log.warning("silo %d: no answer: %s", sent.silo, sanitize(str(reply.error.reason)))
            meter.count_message("lost")
            sent.sent = False
            if reminded:  # the letter was lost, or its carrier has begun anew
                wait = 0.0
        else:
            try:
                heard = party.receive(sent.silo, unpack_message(reply))
            except ProtocolError as error:
                _log.warning("an answer was refused: %s", error)
                meter.count_message("refused")
            else:
                meter.count_message(heard.value)
                meter.note_alive(sent.silo)
                if heard is ReplyKind.SIGN:
                    silence.note_alive(sent.silo)
                    wait = _AT_WORK_SECONDS
                elif heard is ReplyKind.ANSWER:
                    meter.observe_latency(time.monotonic() - sent.first)
        sent.again, sent.wait = min(sent.again, time.monotonic() + wait), resend_after_seconds / 2
    return bool(replies)
