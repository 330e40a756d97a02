"""Derive each party's knowledge of a round, and the event that bounds it, from messages and claims.

Every field of every message declares its content about private records, and the key that opens it. Every stage that
samples noise claims an event for a set of knowledge. With M the messages that are sent to a party::

    knowledge(party) = the contents of the open fields of M, and of the fields that the party's keys open
    event(party)     = the event of the least claim that covers all of knowledge(party)

If no claim covers the knowledge, nothing is guaranteed (:class:`~fedveil.privacy.events.NoGuarantee`). A declaration
that a stage or a message omits can therefore make a line of the statement weaker, never stronger.
docs/theory/claims.md.
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
    """Parties of a round; a union of roles is a coalition that pools its knowledge.

    READER: a reader of the models.
    SERVER: the party that adds up the messages, and its host.
    SILO: a sender of messages: a silo, or a client if clients contribute. The role stands for as many colluding
        senders as the shares of the noise are sized for.
    """

    READER = auto()
    SERVER = auto()
    SILO = auto()


class Reveals(Enum):
    """Content of a field about private records; the value is its wording in statements."""

    NOTHING = "nothing about any record"
    MODEL = "the models"
    SUM = "the noisy sum over all senders"
    CONTENT = "what the channel makes of a sum"  # placeholder for the content that the channel declares
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
    """Encryption of a field, named by the roles that can open it."""

    SERVER = Role.SERVER
    SILOS = Role.SILO
    NOBODY = Role(0)  # pairwise masks: the message that removes them declares the sum


_MADE: Final = {Reveals.MODEL: Reveals.MODEL, Reveals.DRAWN: Reveals.DRAWN, Reveals.OWN_DRAW: Reveals.DRAWN}
"""Knowledge of the server from the messages that it makes itself: the models and the sampled users."""


def reveals(
    content: Reveals, under: Key | None = None, besides: Reveals | None = None
) -> Mapping[str, object]:
    """Return the metadata that declares the content of a field.

    Args:
        content: content for a party that can open the field.
        under: key of the field; None: every receiver can read it.
        besides: content that every receiver learns even without the key, such as the length of a ciphertext.
    """
    return {"tells": content, "under": under, "besides": besides}


def check_reveals(kind: type[_T]) -> type[_T]:
    """Check that every field of a message class declares its content; return the class.

    Raises:
        TypeError: a field without a declaration.
    """
    fields: Any = kind
    for field_info in dataclasses.fields(fields):
        if "tells" not in field_info.metadata:
            raise TypeError(
                f"{kind.__name__}.{field_info.name} does not declare what it reveals: declare it with its encoding"
            )
    return kind


@dataclass(frozen=True)
class Sent:
    """Message of a method: its class and its readers.

    Attributes:
        kind: a dataclass whose fields declare their content; any other class reveals UNDECLARED.
        to: its readers.
        instead: replaced contents, if a protocol uses a common message for other data (masks that sum ballots instead
            of updates, for example).
    """

    kind: type[Any]
    to: Role
    instead: Mapping[Reveals, Reveals] = field(default_factory=dict)

    def revealed_to(self, party: Role) -> frozenset[Reveals]:
        """Return the contents that the message reveals to a party with the party's keys."""
        opened = _opened(self.kind, party)  # type: ignore[arg-type]  # a class is hashable
        return frozenset(self.instead.get(content, content) for content in opened) if self.instead else opened


@cache
def _opened(kind: type[Any], party: Role) -> frozenset[Reveals]:
    """Return the contents that the fields of a class reveal to a party with the party's keys."""
    if not dataclasses.is_dataclass(kind):
        return frozenset({Reveals.UNDECLARED})
    contents = set()
    for field_info in dataclasses.fields(kind):
        under, besides = field_info.metadata.get("under"), field_info.metadata.get("besides")
        if under is None or party & under.value:
            contents.add(field_info.metadata.get("tells", Reveals.UNDECLARED))
        if besides is not None:
            contents.add(besides)
    return frozenset(contents)


@dataclass(frozen=True)
class Claim:
    """Event that bounds one unit's effect on one round, against a party with the covered knowledge.

    The claim is valid under adaptive composition.

    Attributes:
        covers: the knowledge that the claim allows.
        event: event of one round.
        but: additional knowledge that no epsilon covers, in words.
        amplified: whether sampling amplifies the claim. True if neighbours differ by the presence of a unit: a round
            without the unit in its sample equals a round of the neighbour. False if the unit is present in both
            neighbours with different data: a round without the unit in its sample equals neither of the two releases.
        distance: the statistical distance between everything that one charge shows and a function of the event's
            release; 0 if a proof shows that they are equal. Sampling does not reduce it.
    """

    covers: frozenset[Reveals]
    event: Event
    but: tuple[str, ...] = ()
    amplified: bool = True
    distance: float = 0.0

    @property
    def charged_event(self) -> Event:
        """Event that accountants evaluate: the claim's event together with its statistical distance."""
        return at_distance(self.event, self.distance)


def covered_knowledge(*contents: Reveals) -> frozenset[Reveals]:
    """Return the knowledge that a claim covers: the given contents and the models.

    The models are post-processing of every release, so every claim covers them.
    """
    return frozenset((Reveals.MODEL, *contents))


def no_guarantee(reason: str, *, unless: Reveals = Reveals.UNDECLARED) -> Claim:
    """Return the claim that nothing is guaranteed, for every declared knowledge.

    Args:
        reason: one sentence for the statement.
        unless: content that the claim leaves out, because another claim gives its own reason for it.
    """
    return Claim(frozenset(Reveals) - {Reveals.UNDECLARED, unless}, NoGuarantee(reason=reason))


def knowledge(party: Role, sent: Iterable[Sent], content: Reveals) -> frozenset[Reveals]:
    """Return the knowledge of a party or coalition after a round.

    Args:
        party: one role or several.
        sent: every message of a round and of its setup.
        content: content of the channel's payload, for a party that opens it.
    """
    contents = {Reveals.OWN} if party & Role.SILO else set[Reveals]()
    if party & Role.READER:
        contents.add(Reveals.MODEL)
    serves = bool(party & Role.SERVER)
    for message in sent:
        opened = message.revealed_to(party)
        if party.value & message.to.value:
            contents |= opened
        elif serves and message.to.value & Role.SILO.value:
            # The server made these messages itself, so it knows these contents although it does not receive them.
            contents |= {_MADE[kind] for kind in opened if kind in _MADE}
    if (
        serves and Reveals.OWN_DRAW in contents
    ):  # the flags of all silos or users together are the whole sample
        contents.add(Reveals.DRAWN)
    if Reveals.CONTENT in contents:
        contents = (contents - {Reveals.CONTENT}) | {content}
    return frozenset(contents - {Reveals.NOTHING})


def least_covering_claim(known: frozenset[Reveals], claims: Iterable[Claim]) -> Claim:
    """Return the least claim that covers the knowledge, or a claim of no guarantee with its reason."""
    claims = tuple(claims)
    fitting = [claim for claim in claims if known <= claim.covers]
    if fitting:
        # The claim with the least knowledge is the strongest: sampling, for example, amplifies it only for parties
        # that do not know the sample.
        return min(fitting, key=lambda claim: len(claim.covers))
    nearest = max((claim.covers & known for claim in claims), key=len, default=frozenset())
    uncovered = ", ".join(content.value for content in Reveals if content in known - nearest)
    return Claim(known, NoGuarantee(reason=f"no noise covers what is sent: {uncovered}"))


def with_side_knowledge(claims: Iterable[Claim], content: Reveals, but: str) -> tuple[Claim, ...]:
    """Return the claims, and a copy of each that also covers one more content, which no epsilon covers.

    Args:
        claims: to extend.
        content: the additional content.
        but: the sentence about it that the copies carry.
    """
    claims = tuple(claims)
    more = (replace(claim, covers=claim.covers | {content}, but=(*claim.but, but)) for claim in claims)
    return (*claims, *more)
