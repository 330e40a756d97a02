"""What letters are made of, kind by kind: the words in which a protocol says which letters it exchanges.

A shape is the exact sequence of a letter's parts; a message that a :class:`Relay` carries stands for its part. A letter
fits a shape whole or not at all, so no part can ride along in a letter that has no use for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fedveil.protection.messages import Envelope, Message
from fedveil.protection.parts import Part, Relay

Kind = type[Part] | type[Message]
Shape = tuple[Kind, ...]
"""The kinds of a letter's parts, in their order."""


@dataclass(frozen=True)
class Step:
    """One exchange with a silo.

    Attributes:
        asked: what the coordinator's letter is made of.
        answered: what the silo's is.
    """

    asked: Shape
    answered: Shape


@dataclass(frozen=True, kw_only=True)
class Exchanges:
    """The letters of a protocol between the coordinator and one silo, for one session.

    Attributes:
        joined: what the silo says first, in the letter in which it joins.
        setup: the exchanges before the first round.
        first: what the silo reads ahead of the first round of the session, in the letter that begins it.
        begin: what it reads at the beginning of every round, ahead of its task.
        played: by the number of a round, the answer to its task, and the exchanges that follow.
    """

    joined: Shape = ()
    setup: tuple[Step, ...] = ()
    first: Shape = ()
    begin: Shape = ()
    played: Callable[[int], tuple[Shape, tuple[Step, ...]]]


def shape_of(parts: Sequence[Part]) -> Shape:
    """Return what a letter is made of.

    Raises:
        ProtocolError: a relay without a message of this version.
    """
    return tuple(Envelope.kind_of(part.message) if isinstance(part, Relay) else type(part) for part in parts)
