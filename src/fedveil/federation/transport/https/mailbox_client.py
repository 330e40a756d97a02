"""The coordinator's end of the HTTPS transport: offers messages to its mailbox and collects the answers."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import httpx

from fedveil.federation.hosts.sockets import address
from fedveil.federation.transport.frames import (
    ANSWERS_PATH,
    MAILBOX_HEADER,
    MEMBERS_PATH,
    MESSAGES_PATH,
    frames_length,
    pack_frames,
    unpack_frames,
)
from fedveil.federation.transport.https.mailbox import Members
from fedveil.federation.transport.interface import Received

_SECONDS: Final = 90.0
_PAUSE_SECONDS: Final = 0.2


class MailboxClient:
    """A transport over a mailbox of this host. It goes on where the mailbox was started again.

    Args:
        socket: the mailbox's Unix socket for the coordinator.
        members: who may fetch messages.
        longest: bytes of the longest answer.
    """

    def __init__(self, socket: Path, members: Members, longest: int = 0) -> None:
        transport = httpx.HTTPTransport(uds=address(socket))
        self._client = httpx.Client(
            base_url="http://mailbox",
            transport=transport,
            timeout=_SECONDS,
            headers={"Accept-Encoding": "identity"},
        )
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
        response = self._request("GET", f"{ANSWERS_PATH}?{seconds:.3f}")
        if response is None:
            return []
        return [Received(silo, message) for silo, message in unpack_frames(response.content)]

    def last_contacts(self) -> list[float | None] | None:
        """Return the seconds since each silo asked last (None: never), or None without a mailbox."""
        if not self._mailbox and not self.introduce():
            return None
        response = self._request("GET", MEMBERS_PATH)
        return None if response is None else json.loads(response.content)

    def set_members(self, members: Members) -> None:
        """Set who may fetch messages; the next request passes it to the mailbox."""
        self._members, self._mailbox = members, ""

    def introduce(self) -> bool:
        """Introduce the members to the mailbox and offer all current messages; return whether it is there."""
        try:
            response = self._client.put(MEMBERS_PATH, json=asdict(self._members))
            response.raise_for_status()
        except httpx.HTTPError:
            self._mailbox = ""
            return False
        self._mailbox = response.headers[MAILBOX_HEADER]
        if self._current:
            self._put(self._current)
        return bool(self._mailbox)

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def _put(self, messages: Mapping[int, bytes]) -> None:
        headers = {
            "Content-Length": str(frames_length(messages.items())),
            "Longest-Answer": str(self._longest),
        }
        self._request("PUT", MESSAGES_PATH, content=pack_frames(messages.items()), headers=headers)

    def _request(self, method: str, path: str, **body: Any) -> httpx.Response | None:
        """Return the answer of the mailbox that was introduced to the members; None if that one is gone."""
        try:
            response = self._client.request(method, path, **body)
            response.raise_for_status()
        except httpx.HTTPError:
            self._mailbox = ""
            return None
        if response.headers[MAILBOX_HEADER] != self._mailbox:
            self._mailbox = ""
            return None
        return response
