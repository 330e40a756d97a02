"""Exchanges a coordinator's messages over any transport until a part of a run ends."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from fedveil.errors import ProtocolError
from fedveil.federation.coordinator import CoordinatorParty
from fedveil.federation.exchange import ReplyKind
from fedveil.federation.transport.interface import Received, Transport

ASK_AGAIN_SECONDS: Final = 5.0
"""Wait before a silo is asked the same again after an answer that did not count."""

_AT_WORK_SECONDS: Final = 1.0
_COLLECT_SECONDS: Final = 1.0
_FAREWELL_SECONDS: Final = 5.0
_log = logging.getLogger("fedveil.coordinator")


@dataclass(frozen=True, kw_only=True)
class Patience:
    """Times that a coordinator waits for silent silos, in seconds.

    Attributes:
        drop_after: a round goes on without a silo after this silence, if its protocol recovers.
        give_up_after: the run ends after this silence.
        max_work: signs of life count for this long after a message was offered.
        clock: seconds; never goes back.
    """

    drop_after: float = 120.0
    give_up_after: float = 900.0
    max_work: float = 7200.0
    clock: Callable[[], float] = time.monotonic


class ExchangeObserver(Protocol):
    """Counts what passes; see :class:`~fedveil.federation.hosts.metrics_server.Meter`."""

    def count_message(self, outcome: str) -> None:
        """Count a silo's message by its kind, or ``refused``."""

    def note_alive(self, silo: int) -> None:
        """Note that a silo has sent a message that is its own."""

    def observe_latency(self, seconds: float) -> None:
        """Note the time from an offer to its answer."""


class SilenceTimer:
    """For how long the awaited silos have given no sign of life.

    Args:
        patience: how long signs of life count, and the clock.
    """

    def __init__(self, patience: Patience) -> None:
        self._max_work, self._clock = patience.max_work, patience.clock
        self._asked: dict[int, tuple[bytes, float]] = {}
        self._heard: dict[int, float] = {}

    def wait(self, messages: Mapping[int, bytes]) -> None:
        """Note which message each silo is to answer; the silence starts anew with each new message."""
        now = self._clock()
        for silo in self._asked.keys() - messages.keys():
            del self._asked[silo]
        for silo, message in messages.items():
            if silo not in self._asked or self._asked[silo][0] != message:
                self._asked[silo], self._heard[silo] = (message, now), now

    def note_alive(self, silo: int) -> None:
        """Note that a silo is at work, unless it has been for longer than ``max_work``."""
        now = self._clock()
        if silo in self._asked and now - self._asked[silo][1] < self._max_work:
            self._heard[silo] = now

    def silent_for(self, seconds: float) -> tuple[int, ...]:
        """Return the silos that have been silent for longer."""
        now = self._clock()
        return tuple(silo for silo in sorted(self._asked) if now - self._heard[silo] > seconds)


class _Offers:
    """The current messages of a transport, and when a silo is asked the same again."""

    def __init__(self, transport: Transport, clock: Callable[[], float]) -> None:
        self._transport, self._clock = transport, clock
        self._current: dict[int, bytes] = {}
        self._again: dict[int, float] = {}
        self._since: dict[int, float] = {}

    def update(self, messages: Mapping[int, bytes]) -> None:
        """Offer what is new, or is due to be asked again; withdraw what is answered."""
        now = self._clock()
        due = {
            silo: message
            for silo, message in messages.items()
            if self._current.get(silo) != message or self._again.get(silo, now + 1) <= now
        }
        withdrawn = self._current.keys() - messages.keys()
        for silo in due:
            self._again.pop(silo, None)
            self._since[silo] = now
        for silo in withdrawn:
            self._again.pop(silo, None)
        if due or withdrawn:
            self._transport.offer(due, withdrawn)
        self._current = dict(messages)

    def seconds_to_wait(self) -> float:
        """Return for how long the next answers may be awaited."""
        now = self._clock()
        return min([_COLLECT_SECONDS, *(max(0.0, due - now) for due in self._again.values())])

    def ask_again(self, silo: int, seconds: float) -> None:
        """Have a silo asked the same again, if its message is still current then."""
        if silo in self._current:
            self._again[silo] = self._clock() + seconds

    def seconds_since(self, silo: int) -> float:
        """Return for how long the silo's current message has been offered."""
        now = self._clock()
        return now - self._since.get(silo, now)


def exchange_messages(
    transport: Transport,
    party: CoordinatorParty[Any],
    silos: tuple[str, ...],
    patience: Patience,
    observer: ExchangeObserver,
    is_stopping: Callable[[], bool] = lambda: False,
) -> tuple[str, ...]:
    """Exchange messages until the part of the run ends, or until silos are silent for too long.

    Args:
        transport: carries the messages.
        party: the coordinator, open.
        silos: names, by number.
        patience: how long silos may be silent.
        observer: counts what passes.
        is_stopping: whether this process is to end; asked at least once a second.

    Returns:
        The silos whose silence has ended the run, and none where it ended otherwise. Where the process is to end, the
        party is not finished: the run goes on when its folder is opened again.
    """
    missing: tuple[str, ...] = ()
    silence, offers = SilenceTimer(patience), _Offers(transport, patience.clock)
    drop_after = min(patience.drop_after, patience.give_up_after)
    while not party.is_finished:
        if is_stopping():
            return ()
        messages = dict(party.messages())
        offers.update(messages)
        silence.wait({silo: messages[silo] for silo in party.awaited_silos if silo in messages})
        for received in transport.collect(offers.seconds_to_wait()):
            kind = _receive(party, received, observer)
            if kind is ReplyKind.SIGN:
                silence.note_alive(received.silo)
                offers.ask_again(received.silo, _AT_WORK_SECONDS)
            elif kind is ReplyKind.ANSWER:
                observer.observe_latency(offers.seconds_since(received.silo))
            else:
                offers.ask_again(received.silo, ASK_AGAIN_SECONDS)
        if dropped := party.drop_missing(silence.silent_for(drop_after)):
            _log.warning(
                "silo %s: silent for %g s; the round continues without it", ", ".join(dropped), drop_after
            )
        elif silent := silence.silent_for(patience.give_up_after):
            missing = tuple(silos[silo] for silo in silent)
            party.stop(f"silo {', '.join(missing)} has not answered for {patience.give_up_after:g} s")
    _send_farewells(transport, party, patience.clock)
    return missing


def _receive(party: CoordinatorParty[Any], received: Received, observer: ExchangeObserver) -> ReplyKind:
    """Hand a message to the coordinator; return its kind, NOTHING if it was refused."""
    try:
        kind = party.receive(received.silo, received.message)
    except ProtocolError as error:
        _log.warning("an answer was refused: %s", error)
        observer.count_message("refused")
        return ReplyKind.NOTHING
    observer.count_message(kind.value)
    observer.note_alive(received.silo)
    return kind


def _send_farewells(transport: Transport, party: CoordinatorParty[Any], clock: Callable[[], float]) -> None:
    """Offer the last messages, and wait a little for the answers: silos sign the statement with them.

    A lost farewell costs the silo a wait, and the run that silo's signature.
    """
    waiting = dict(party.farewells)
    transport.offer(waiting)
    until = clock() + _FAREWELL_SECONDS
    while waiting and (seconds_left := until - clock()) > 0:
        for received in transport.collect(min(0.5, seconds_left)):
            try:
                party.receive(received.silo, received.message)
            except ProtocolError as error:
                _log.warning("an answer was refused: %s", error)
            else:
                waiting.pop(received.silo, None)
