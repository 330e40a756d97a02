"""The mailbox of a federation: the current message to each silo and its answer, in memory.

Claim: a member holds at most one message and one answer here; an answer counts only under the tag of the silo's current
message, which only a silo that was given the message knows. What is here is lost with the process: the coordinator
offers everything again to the next one, which it recognises by a new :attr:`Mailbox.name`.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from http import HTTPStatus
from pathlib import Path
from typing import Final

from fedveil.federation.transport.bridge import MailboxConnection
from fedveil.federation.transport.interface import (
    ANSWERS_PATH,
    LARGEST_MESSAGE,
    MAILBOX_HEADER,
    MEMBERS_PATH,
    MESSAGES_PATH,
    Received,
    frames_length,
    pack_frames,
    unpack_frames,
)

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
        names: names of the silos, for the log.
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
        last_request: time of the last request; None: never.
    """

    message: bytes = b""
    tag: str = ""
    digest: str = ""
    answer: bytes | None = None
    requests: int = 0
    newest: object = None
    last_request: float | None = None
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
        answers, size = list[tuple[int, bytes]](), 0
        for silo, slot in enumerate(self._slots.values()):
            if slot.answer is not None and (not answers or size + len(slot.answer) <= _COLLECTED_BYTES):
                answers.append((silo, slot.answer))
                size += len(slot.answer)
                slot.answer = None
        return answers

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
    return None if slot.last_request is None else now - slot.last_request


# --- the coordinator's end: it offers messages to its mailbox and collects the answers ---


_SECONDS: Final = 90.0
_BEYOND_BYTES: Final = 2 << 20
"""Of an answer of the mailbox, beyond the longest message in it: further short messages, and the frames."""

_PAUSE_SECONDS: Final = 0.2


class MailboxClient:
    """A transport over a mailbox of this host. It goes on where the mailbox was started again.

    The mailbox's process faces the network. What it sends is bounded in length, and what no mailbox sends counts as
    the end of that mailbox.

    Args:
        socket: the mailbox's Unix socket for the coordinator.
        members: who may fetch messages.
        longest: bytes of the longest answer.
    """

    def __init__(self, socket: Path, members: Members, longest: int = 0) -> None:
        self._connection = MailboxConnection(str(socket), _SECONDS)
        self._members, self._longest = members, longest
        self._current: dict[int, bytes] = {}
        self._mailbox = ""

    def offer(self, messages: Mapping[int, bytes], withdrawn: Collection[int] = ()) -> None:
        """Set the current message of some silos; where no mailbox is there now, :meth:`collect` offers them later."""
        for silo in withdrawn:
            self._current.pop(silo, None)
        self._current.update(messages)
        if self._mailbox:
            self._put({**dict.fromkeys(withdrawn, b""), **messages})
        else:
            self.introduce()

    def collect(self, seconds: float) -> list[Received]:
        """Return the answers that have arrived; wait for the first of them at most this long."""
        if not self._mailbox and not self.introduce():
            time.sleep(min(_PAUSE_SECONDS, seconds))
            return []
        try:
            frames = unpack_frames(self._request("GET", f"{ANSWERS_PATH}?{seconds:.3f}"))
        except (OSError, ValueError):
            self._mailbox = ""
            return []
        return [Received(silo, message) for silo, message in frames]

    def last_contacts(self) -> list[float | None] | None:
        """Return the seconds since each silo asked last (None: never), or None without a mailbox."""
        if not self._mailbox and not self.introduce():
            return None
        try:
            contacts = json.loads(self._request("GET", MEMBERS_PATH))
        except (OSError, ValueError, RecursionError):
            self._mailbox = ""
            return None
        is_complete = isinstance(contacts, list) and len(contacts) == len(self._members.names)
        right = is_complete and all(contact is None or type(contact) in (int, float) for contact in contacts)
        return contacts if right else None

    def set_members(self, members: Members) -> None:
        """Set who may fetch messages; the next request passes it to the mailbox."""
        self._members, self._mailbox = members, ""

    def introduce(self) -> bool:
        """Introduce the members to the mailbox and offer all current messages; return whether it is there."""
        try:
            self._mailbox = self._ask("PUT", MEMBERS_PATH, {}, json.dumps(asdict(self._members)).encode())[0]
        except OSError:
            self._mailbox = ""
        if self._mailbox and self._current:
            self._put(self._current)
        return bool(self._mailbox)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _put(self, messages: Mapping[int, bytes]) -> None:
        headers = {
            "Content-Length": str(frames_length(messages.items())),
            "Longest-Answer": str(self._longest),
        }
        try:
            self._request("PUT", MESSAGES_PATH, headers, pack_frames(messages.items()))
        except OSError:
            self._mailbox = ""

    def _request(
        self, method: str, path: str, headers: Mapping[str, str] = {}, body: bytes | Iterable[bytes] = b""
    ) -> bytes:
        """Return the answer of the mailbox that was introduced to the members.

        Raises:
            OSError: that one is gone.
        """
        mailbox, content = self._ask(method, path, headers, body)
        if mailbox != self._mailbox:
            raise OSError("another mailbox answers")
        return content

    def _ask(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | Iterable[bytes]
    ) -> tuple[str, bytes]:
        """Return the name of the mailbox, and the body of its answer."""
        longest = self._longest + _BEYOND_BYTES
        status, reply_headers, content = self._connection.request_whole(
            method, path, dict(headers), body, longest
        )
        if status not in (HTTPStatus.OK, HTTPStatus.NO_CONTENT):
            raise OSError(f"the mailbox answered with status {status}")
        return reply_headers.get(MAILBOX_HEADER, ""), content
