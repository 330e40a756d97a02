"""Which messages pass between server and client, kind by kind: the words in which a protocol says what it exchanges.

A shape is the exact sequence of what travels together; a message that a :class:`ProtocolMessage` carries stands for
its part. A letter fits a shape whole or not at all, so no part can ride along in a letter that has no use for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fedveil.protocols.errors import ProtocolError
from fedveil.protocols.messages import Envelope, Message
from fedveil.protocols.session_messages import ProtocolMessage, SessionMessage

Kind = type[Message]
Shape = tuple[Kind, ...]
"""The kinds of a letter's parts, in their order."""


@dataclass(frozen=True)
class ExchangeStep:
    """One exchange with a client.

    Attributes:
        asked: what the server's letter is made of.
        answered: what the client's is.
    """

    requests: Shape
    replies: Shape


@dataclass(frozen=True, kw_only=True)
class Exchanges:
    """The messages of a protocol between the server and one client, for one session.

    Attributes:
        joined: what the client says first.
        setup: the exchanges before the first round.
        first: what the client reads ahead of the first round of the session, in the letter that begins it.
        begin: what it reads at the beginning of every round, ahead of its task.
        played: by the number of a round, the answer to its task, and the exchanges that follow.
    """

    joined: Shape = ()
    setup: tuple[ExchangeStep, ...] = ()
    first: Shape = ()
    begin: Shape = ()
    played: Callable[[int], tuple[Shape, tuple[ExchangeStep, ...]]]


def message_shape(parts: Sequence[SessionMessage]) -> Shape:
    """Return what a letter is made of.

    Raises:
        ProtocolError: a relay without a message of this version, or with one that travels by itself.
    """
    return tuple(
        _relayed(part.message) if isinstance(part, ProtocolMessage) else type(part) for part in parts
    )


def _relayed(data: bytes) -> Kind:
    kind = Envelope.kind_of(data)
    if issubclass(kind, SessionMessage):
        raise ProtocolError(f"a message with {kind.purpose} is no message of a protocol")
    return kind
