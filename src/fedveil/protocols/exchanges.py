"""Describe the kinds and the order of the messages between the server and one client.

A shape is the exact sequence of message kinds in one transmission. A :class:`ProtocolMessage` counts as the kind of
the message that it carries. A transmission is accepted only if it matches the expected shape completely, so a sender
cannot add a message that the recipient does not expect.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fedveil.protocols.errors import ProtocolError
from fedveil.protocols.messages import Envelope, Message
from fedveil.protocols.session_messages import ProtocolMessage, SessionMessage

Kind = type[Message]
Shape = tuple[Kind, ...]
"""Kinds of the messages of one transmission, in their order."""


@dataclass(frozen=True)
class ExchangeStep:
    """One exchange with a client.

    Attributes:
        requests: kinds of the messages that the server sends.
        replies: kinds of the messages that the client answers.
    """

    requests: Shape
    replies: Shape


@dataclass(frozen=True, kw_only=True)
class Exchanges:
    """Messages of a protocol between the server and one client in one session.

    Attributes:
        joined: kinds that the client sends when it joins.
        setup: exchanges before the first round.
        first: kinds that the server sends ahead of the session's first round, in the transmission that begins it.
        begin: kinds that the server sends at the beginning of every round, ahead of the client's task.
        played: maps the number of a round to the shape of the client's answer to its task, and the exchanges after
            it.
    """

    joined: Shape = ()
    setup: tuple[ExchangeStep, ...] = ()
    first: Shape = ()
    begin: Shape = ()
    played: Callable[[int], tuple[Shape, tuple[ExchangeStep, ...]]]


def message_shape(parts: Sequence[SessionMessage]) -> Shape:
    """Return the kinds of the messages of one transmission.

    Raises:
        ProtocolError: a :class:`ProtocolMessage` that carries no message of this version, or a session message.
    """
    return tuple(
        _relayed(part.message) if isinstance(part, ProtocolMessage) else type(part) for part in parts
    )


def _relayed(data: bytes) -> Kind:
    kind = Envelope.kind_of(data)
    # A session message inside a ProtocolMessage would pass for a session message in the shape.
    if issubclass(kind, SessionMessage):
        raise ProtocolError(f"a message with {kind.purpose} is no message of a protocol")
    return kind
