"""The coordinator's end of the HTTPS transport: offers messages to its mailbox and collects the answers."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict
from http import HTTPStatus
from pathlib import Path
from typing import Final

from fedveil.federation.transport.bridge.relay import MailboxConnection
from fedveil.federation.transport.https.mailbox import Members
from fedveil.federation.transport.interface import (
    ANSWERS_PATH,
    MAILBOX_HEADER,
    MEMBERS_PATH,
    MESSAGES_PATH,
    Received,
    frames_length,
    pack_frames,
    unpack_frames,
)

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
        known = isinstance(contacts, list) and len(contacts) == len(self._members.names)
        right = known and all(one is None or type(one) in (int, float) for one in contacts)
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
        status, found, content = self._connection.request_whole(method, path, dict(headers), body, longest)
        if status not in (HTTPStatus.OK, HTTPStatus.NO_CONTENT):
            raise OSError(f"the mailbox answered with status {status}")
        return found.get(MAILBOX_HEADER, ""), content
