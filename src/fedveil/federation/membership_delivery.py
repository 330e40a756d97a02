"""Delivery of a sealed membership to silos that are served, as a message before the coordinator's own.

    delivery   magic (15) | signature of the founder (64) | membership without its signature, UTF-8 TOML
    answer     magic (15) | outcome (1)

Claim: a delivered text is parsed only if the founder of the silo's own charter signed it. A carrier that forges,
replays or withholds a delivery or its answer changes no membership: at worst a silo refuses the next run, as without
a delivery. Enforced by :func:`open_delivery` and
:meth:`~fedveil.federation.hosts.served_silo.ServedSilo.receive`; ``tests/test_membership_delivery.py`` tries each.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import replace
from enum import IntEnum
from typing import Final

from fedveil.crypto.keys import SIGNATURE_BYTES
from fedveil.errors import IntegrityError
from fedveil.federation.charter import Charter
from fedveil.federation.membership import Membership
from fedveil.federation.transport.interface import LARGEST_OPENING, Received, Transport
from fedveil.files import as_text

_MAGIC: Final = b"FVL-MEMBERSHIP\1"
_TEXT_STARTS: Final = len(_MAGIC) + SIGNATURE_BYTES
_PLACE: Final = "the delivered membership"
_log = logging.getLogger("fedveil.coordinator")


class Outcome(IntEnum):
    """Outcome of a delivered membership at a silo."""

    ACCEPTED = 0
    PRESENT = 1
    BY_HAND = 2
    REFUSED = 3


def pack_delivery(membership: Membership) -> bytes:
    """Return the message that delivers a sealed membership."""
    return _MAGIC + membership.seal + replace(membership, seal=b"").to_toml().encode()


def is_delivery(message: bytes) -> bool:
    """Return whether a message, or its beginning, delivers a membership or answers a delivery."""
    return message.startswith(_MAGIC)


def open_delivery(message: bytes, charter: Charter) -> Membership:
    """Return the membership of a delivery; its text is not parsed before the founder's signature is verified.

    Args:
        message: the delivery.
        charter: of the reader's federation.

    Raises:
        IntegrityError: it is too long, or not sealed by the charter's founder, or of another charter.
        ConfigError: its text is not a membership, or is not valid today.
    """
    if len(message) > LARGEST_OPENING:
        raise IntegrityError(f"{_PLACE}: {len(message)} bytes are above the limit of {LARGEST_OPENING}")
    seal, content = message[len(_MAGIC) : _TEXT_STARTS], message[_TEXT_STARTS:]
    Membership.check_signature(content, seal, charter)
    membership = replace(Membership.parse(as_text(content, _PLACE, IntegrityError), _PLACE), seal=seal)
    membership.check(charter)
    return membership


def pack_answer(outcome: Outcome) -> bytes:
    """Return the answer to a delivery."""
    return _MAGIC + bytes([outcome])


def _outcome_of(answer: bytes) -> Outcome:
    code = answer[len(_MAGIC) :]
    known = len(code) == 1 and code[0] in set(Outcome)
    return Outcome(code[0]) if known else Outcome.REFUSED


class MembershipDelivery:
    """A transport that delivers the coordinator's membership to each silo before the silo's first message.

    Args:
        transport: carries the messages.
        membership: sealed by the founder.
        delivered: numbers of the silos that have the membership already; silos that turn out to have it are added.
    """

    def __init__(self, transport: Transport, membership: Membership, delivered: set[int]) -> None:
        self._transport, self._membership, self._delivered = transport, membership, delivered
        self._message, self._answered = pack_delivery(membership), set(delivered)
        self._held: dict[int, bytes] = {}
        if len(self._message) > LARGEST_OPENING:  # operators accept so long a membership by hand
            self._answered |= set(range(len(membership.silos)))

    def offer(self, messages: Mapping[int, bytes], withdrawn: Collection[int] = ()) -> None:
        """Set the current messages; those of silos without an answer to the delivery are held back until then."""
        for silo in withdrawn:
            self._held.pop(silo, None)
        held = {silo: message for silo, message in messages.items() if silo not in self._answered}
        self._held |= held
        self._transport.offer({**messages, **dict.fromkeys(held, self._message)}, withdrawn)

    def collect(self, seconds: float) -> list[Received]:
        """Return the answers that have arrived, without those to the delivery."""
        received = self._transport.collect(seconds)
        for one in received:
            if is_delivery(one.message):
                self._note(one.silo, _outcome_of(one.message))
        return [one for one in received if not is_delivery(one.message)]

    def close(self) -> None:
        """Release the transport's connections."""
        self._transport.close()

    def _note(self, silo: int, outcome: Outcome) -> None:
        """Offer a silo's own message once it has answered the delivery, whatever the answer is."""
        if silo in self._answered or silo >= len(self._membership.silos):
            return
        self._answered.add(silo)
        if outcome in (Outcome.ACCEPTED, Outcome.PRESENT):
            self._delivered.add(silo)
        name, serial = self._membership.silos[silo], self._membership.serial
        match outcome:
            case Outcome.ACCEPTED:
                _log.info("silo %s has accepted membership %d, which was delivered to it", name, serial)
            case Outcome.BY_HAND:
                _log.warning("silo %s has not accepted membership %d: its operator accepts it", name, serial)
            case Outcome.REFUSED:
                _log.warning("silo %s refuses membership %d; its own log says why", name, serial)
        if (message := self._held.pop(silo, None)) is not None:
            self._transport.offer({silo: message})
