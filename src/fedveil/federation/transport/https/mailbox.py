"""The mailbox of a federation: the current message to each silo and its answer, in memory.

Claim: a member holds at most one message and one answer here; an answer counts only under the tag of the silo's current
message, which only a silo that was given the message knows. What is here is lost with the process: the coordinator
offers everything again to the next one, which it recognises by a new :attr:`Mailbox.name`.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Final

from fedveil.federation.transport.interface import LARGEST_MESSAGE

_COLLECTED_BYTES: Final = 1 << 20
"""Bytes of answers that are handed over at once, beyond the first."""

_TAG_BYTES: Final = 16
CONTACT_SECONDS: Final = 60.0
"""Seconds without a request after which a silo counts as gone; a silo asks again after a poll of 25 seconds."""


@dataclass(frozen=True, kw_only=True)
class Members:
    """Parties that may fetch messages, each identified by the digest of its public key.

    Attributes:
        keys: SHA-256 (hex) of the SubjectPublicKeyInfo of each silo's key, by silo number.
        names: of the silos, for the log.
        revoked: digests of keys that were removed from the federation.
    """

    keys: tuple[str, ...]
    names: tuple[str, ...]
    revoked: tuple[str, ...] = ()


@dataclass
class Slot:
    """The mailbox of one silo.

    Attributes:
        message: the current message; empty if there is none.
        tag: random name of this offer; empty if there is none.
        digest: SHA-256 (hex) of the message.
        answer: the answer, until the coordinator collects it.
        requests: number of requests of this silo that are being answered.
        newest: marks the newest request for a message; an older one waits no longer.
        seen: time of the last request; None: never.
    """

    message: bytes = b""
    tag: str = ""
    digest: str = ""
    answer: bytes | None = None
    requests: int = 0
    newest: object = None
    seen: float | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def wake(self) -> None:
        """Wake the requests that wait for a change."""
        self.changed.set()
        self.changed = asyncio.Event()


class Mailbox:
    """All slots; used by one event loop.

    Attributes:
        name: random name of this mailbox.
        members: None until the coordinator has introduced them.
        longest: bytes of the longest answer.
        arrived: set when an answer has arrived.
    """

    def __init__(self) -> None:
        self.name = secrets.token_hex(8)
        self.members: Members | None = None
        self.longest = 0
        self.arrived = asyncio.Event()
        self._slots: dict[str, Slot] = {}

    def introduce(self, members: Members) -> None:
        """Set who may fetch messages; the slots of members that stay are kept, and requests of others end."""
        self.members, before = members, self._slots
        self._slots = {key: before.get(key) or Slot() for key in members.keys}
        for key in before.keys() - self._slots.keys():
            before[key].wake()

    def number(self, key: str) -> int | None:
        """Return the number of the silo with a key, or None."""
        keys = () if self.members is None else self.members.keys
        return keys.index(key) if key in self._slots else None

    def slot(self, silo: int) -> Slot:
        """Return the slot of a silo.

        Raises:
            LookupError: there is no such silo.
        """
        return list(self._slots.values())[silo]

    def offer(self, silo: int, message: bytes) -> None:
        """Set the current message of a silo; an empty one withdraws it."""
        slot = self.slot(silo)
        slot.message, slot.answer = message, None
        slot.tag = secrets.token_hex(_TAG_BYTES) if message else ""
        slot.digest = sha256(message).hexdigest()
        slot.wake()

    def set_longest(self, longest: int) -> None:
        """Set the length of the longest answer."""
        self.longest = min(longest, LARGEST_MESSAGE)

    def store(self, slot: Slot, answer: bytes) -> None:
        """Keep an answer until it is collected."""
        slot.answer = answer
        self.arrived.set()

    def collect(self) -> list[tuple[int, bytes]]:
        """Take answers: at least one if there is any, and about 1 MiB of them."""
        taken, size = list[tuple[int, bytes]](), 0
        for silo, slot in enumerate(self._slots.values()):
            if slot.answer is not None and (not taken or size + len(slot.answer) <= _COLLECTED_BYTES):
                taken.append((silo, slot.answer))
                size += len(slot.answer)
                slot.answer = None
        return taken

    def last_contacts(self) -> list[float | None]:
        """Return the seconds since each silo's last request; 0 while one waits, None if there was none."""
        now = time.monotonic()
        return [_seconds_since(slot, now) for slot in self._slots.values()]

    def slots(self) -> Iterable[Slot]:
        """Return the slots in the order of the silos' numbers."""
        return self._slots.values()


def _seconds_since(slot: Slot, now: float) -> float | None:
    if slot.requests:
        return 0.0
    return None if slot.seen is None else now - slot.seen
