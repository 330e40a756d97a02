"""Who learns what of a round, and what protects it: the statement is a fold over messages and claims.

Every field of every message declares what it *tells* of private records, and under which key. Every stage that draws
noise *claims* an event for what may be known besides. With M the messages that are sent to a party::

    knowledge(party) = what the fields of M tell in the open, and what the party's keys open of the rest
    event(party)     = that of the least claim that covers all of knowledge(party)

No claim covers it: nothing is guaranteed (:class:`~fedveil.privacy.events.NoGuarantee`). So what a stage or a message
does not say can only make a line of the statement weaker, never stronger. docs/theory/claims.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, Flag, auto
from functools import cache
from typing import Any, Final, TypeVar

from fedveil.privacy.events import Event, NoGuarantee, at_distance

_T = TypeVar("_T")


class Role(Flag):
    """Who may learn something of a round; a union of roles is a coalition that pools what it knows.

    READER: whoever reads the models. SERVER: who adds the messages up, and its host. SILO: one who sends messages: a
        silo, or a client where clients contribute; as many of them as the shares of the noise are sized for.
    """

    READER = auto()
    SERVER = auto()
    SILO = auto()


class Reveals(Enum):
    """What a field tells of private records; the value is how statements say it."""

    NOTHING = "nothing about any record"
    MODEL = "the models"
    SUM = "the noisy sum over all senders"
    CONTENT = "what the channel makes of a sum"  # stands for the channel's own content
    MESSAGE = "each sender's own noisy message"
    EXACT = "each sender's own sum, without noise"
    KEYED = "each message and its key, which determines the quantiser's latent variables and dither"
    OWN = "its own records and its own share of the noise"
    DRAWN = "who was sampled in each round"
    OWN_DRAW = "in which rounds it was sampled itself"
    COUNTS = "how many records each user has"
    PRESENCE = "which users have a record anywhere"
    BALLOT = "votes for coordinates, in a secret order of the coordinates"
    VOTES = "which coordinates the votes select"
    CLEAR = "the unencrypted part of each message"
    HIDDEN = "the encrypted part of each message, decrypted"
    CIPHERTEXTS = "each sender's ciphertexts, with the key to decrypt them"
    LENGTH = "the length of each message"
    UNDECLARED = "the content of a field whose meaning is not declared"


class Key(Enum):
    """What hides a field, by who can open it."""

    SERVER = Role.SERVER
    SILOS = Role.SILO
    NOBODY = Role(0)  # pairwise masks: what they leave of a sum, the message that removes them tells


_MADE: Final = {Reveals.MODEL: Reveals.MODEL, Reveals.DRAWN: Reveals.DRAWN, Reveals.OWN_DRAW: Reveals.DRAWN}
"""What the server knows because it makes what it sends: a model, and who was drawn."""


def reveals(what: Reveals, under: Key | None = None, besides: Reveals | None = None) -> Mapping[str, object]:
    """Return the metadata of a field that tells something.

    Args:
        what: what it tells whoever opens it.
        under: who can open it; None: everybody to whom it is sent.
        besides: what it tells everybody to whom it is sent, opened or not.
    """
    return {"tells": what, "under": under, "besides": besides}


def check_reveals(kind: type[_T]) -> type[_T]:
    """Return a message's class, every field of which says what it tells.

    Raises:
        TypeError: one does not.
    """
    fields: Any = kind
    for one in dataclasses.fields(fields):
        if "tells" not in one.metadata:
            raise TypeError(
                f"{kind.__name__}.{one.name} does not say what it tells: declare it with its layout"
            )
    return kind


@dataclass(frozen=True)
class Sent:
    """A message of a method: its class and who reads it.

    Attributes:
        kind: a dataclass whose fields declare what they tell; another class tells UNDECLARED.
        to: its readers.
        instead: what a protocol uses a common message for, such as masks that sum ballots and not updates.
    """

    kind: type[Any]
    to: Role
    instead: Mapping[Reveals, Reveals] = field(default_factory=dict)

    def revealed_to(self, party: Role) -> frozenset[Reveals]:
        """Return what the message tells a party with its keys."""
        opened = _opened(self.kind, party)  # type: ignore[arg-type]  # a class is hashable
        return frozenset(self.instead.get(what, what) for what in opened) if self.instead else opened


@cache
def _opened(kind: type[Any], party: Role) -> frozenset[Reveals]:
    """Return what the fields of a class tell a party with its keys."""
    if not dataclasses.is_dataclass(kind):
        return frozenset({Reveals.UNDECLARED})
    found = set()
    for one in dataclasses.fields(kind):
        under, besides = one.metadata.get("under"), one.metadata.get("besides")
        if under is None or party & under.value:
            found.add(one.metadata.get("tells", Reveals.UNDECLARED))
        if besides is not None:
            found.add(besides)
    return frozenset(found)


@dataclass(frozen=True)
class Claim:
    """What one round does to one unit, against whoever knows no more than this; valid under adaptive composition.

    Attributes:
        covers: what may be known.
        event: of one round.
        but: what is known besides and no epsilon covers, in words.
        amplified: whether neighbours differ by a unit that is there or is not, which is what sampling amplifies; a
            unit that stays and sends something else is not there in either case when it is not drawn.
        distance: the statistical distance between all that one charge shows and something computed from the event's
            release; 0 where a proof says that there is none. Sampling makes it no smaller.
    """

    covers: frozenset[Reveals]
    event: Event
    but: tuple[str, ...] = ()
    amplified: bool = True
    distance: float = 0.0

    @property
    def charged_event(self) -> Event:
        """What accountants are asked about: the event, and the distance at which it is seen."""
        return at_distance(self.event, self.distance)


def covered_knowledge(*known: Reveals) -> frozenset[Reveals]:
    """Return what a claim covers; the models are post-processing of every release."""
    return frozenset((Reveals.MODEL, *known))


def no_guarantee(reason: str, *, unless: Reveals = Reveals.UNDECLARED) -> Claim:
    """Return the claim that nothing is guaranteed, whatever declared knowledge a party has.

    Args:
        reason: why.
        unless: what has a reason of its own for those who know it.
    """
    return Claim(frozenset(Reveals) - {Reveals.UNDECLARED, unless}, NoGuarantee(reason=reason))


def knowledge(party: Role, sent: Iterable[Sent], content: Reveals) -> frozenset[Reveals]:
    """Return what a party or coalition knows of a round.

    Args:
        party: one role or several.
        sent: every message of a round and of its setup.
        content: what the channel's payload tells whoever opens it.
    """
    known = {Reveals.OWN} if party & Role.SILO else set[Reveals]()
    if party & Role.READER:
        known.add(Reveals.MODEL)
    serves = bool(party & Role.SERVER)
    for one in sent:
        opened = one.revealed_to(party)
        if party.value & one.to.value:
            known |= opened
        elif serves and one.to.value & Role.SILO.value:
            known |= {_MADE[what] for what in opened if what in _MADE}
    if serves and Reveals.OWN_DRAW in known:  # what each was told of itself is together all draws
        known.add(Reveals.DRAWN)
    if Reveals.CONTENT in known:
        known = (known - {Reveals.CONTENT}) | {content}
    return frozenset(known - {Reveals.NOTHING})


def least_covering_claim(known: frozenset[Reveals], claims: Iterable[Claim]) -> Claim:
    """Return the least claim that covers all that is known; one of no guarantee, with the reason, if none does."""
    claims = tuple(claims)
    fitting = [claim for claim in claims if known <= claim.covers]
    if fitting:
        return min(fitting, key=lambda claim: len(claim.covers))
    nearest = max((claim.covers & known for claim in claims), key=len, default=frozenset())
    left = ", ".join(what.value for what in Reveals if what in known - nearest)
    return Claim(known, NoGuarantee(reason=f"no noise covers what is sent: {left}"))


def with_side_knowledge(claims: Iterable[Claim], known: Reveals, but: str) -> tuple[Claim, ...]:
    """Return claims, and each of them again for whoever learns one thing more that no epsilon covers."""
    claims = tuple(claims)
    more = (replace(claim, covers=claim.covers | {known}, but=(*claim.but, but)) for claim in claims)
    return (*claims, *more)
