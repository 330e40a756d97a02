"""Whole rounds in one process: carries bytes between the state machines and records every message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from fedveil.protection.messages import SERVER
from fedveil.protection.transcript import Transcript


class SiloParty(Protocol):
    """A silo's state machine."""

    def receive(self, data: bytes) -> list[bytes]:
        """Read a message of the server; return the answers."""
        ...


class ServerParty(Protocol):
    """A server's state machine."""

    def receive(self, sender: int, data: bytes) -> list[tuple[int, bytes]]:
        """Read a message of a silo; return pairs of recipient and bytes."""
        ...


class Post:
    """Carries messages until nobody has anything more to say.

    Attributes:
        gone: silos that have vanished: what is sent to them is not answered.

    Args:
        server: the server's state machine.
        silos: the silos', by number.
        transcript: where every message is recorded.
    """

    def __init__(self, server: ServerParty, silos: Sequence[SiloParty], transcript: Transcript) -> None:
        self._server, self._silos, self._transcript = server, silos, transcript
        self.gone: set[int] = set()

    def to_server(self, sender: int, data: bytes) -> None:
        """Deliver a silo's message, and whatever follows from it."""
        waiting = [(sender, SERVER, data)]
        while waiting:
            source, target, content = waiting.pop(0)
            self._transcript.record(content)
            if target == SERVER:
                waiting += [(SERVER, silo, reply) for silo, reply in self._server.receive(source, content)]
            else:
                waiting += [(target, SERVER, reply) for reply in self._answers(target, content)]

    def to_silos(self, messages: list[tuple[int, bytes]]) -> None:
        """Deliver the server's messages, and whatever follows from them."""
        for silo, data in messages:
            self._transcript.record(data)
            for reply in self._answers(silo, data):
                self.to_server(silo, reply)

    def _answers(self, silo: int, data: bytes) -> list[bytes]:
        return [] if silo in self.gone else self._silos[silo].receive(data)
