"""The public door: which requests reach Flower, how long they may be, and how slowly they may come.

Claim: who is no member gets an answer from :class:`Gateway` alone, has 64 KiB of a body read at most, and keeps a
connection for no longer than the deadlines below, unless it keeps sending: a connection that brings no whole header
within :data:`HEADER_SECONDS` is closed, and a body that lags :data:`LAG_SECONDS` behind :data:`LEAST_RATE` is cut off.
Of what a member sends, all but 128 KiB is one letter: reading the rest of a message costs many times its bytes.
Not claimed: that many strangers, or one with many connections, who come again and again leave a place for silos.
``tests/test_flower_gateway.py`` tries each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, MutableMapping
from contextvars import ContextVar
from typing import Any, Final

from uvicorn.protocols.http.h11_impl import H11Protocol

from fedveil.flower.coordinator_host.long_poll import App, Receive, Scope, Send

SMALL_BODY: Final = 1 << 16
"""Bytes of whatever is no letter of a member."""
HEADER_SECONDS: Final = 10.0
LAG_SECONDS: Final = 30.0
LEAST_RATE: Final = float(1 << 14)
"""Bytes a second."""
CAME_BY_DOOR: Final = ContextVar("came_by_door", default=False)
"""Whether what is under way was asked for through a public door; Flower's threads see it too."""


class Gateway:
    """Lets through the requests that are listed, up to a length, and answers everything else itself.

    404 for another method or path than the listed ones, compared byte by byte as they were sent; 413 for a longer body,
    by its header or once so much has come; 408 for one that comes too slowly; 400 for a long one that is no letter.

    Args:
        app: what is behind it.
        routes: the paths that POST may ask for.
        largest: bytes that the body of a request may have, by what stands before the body.
        ends: by path, where the one letter of a long body ends, by the :data:`SMALL_BODY` bytes that it begins with;
            raises ValueError where there is none. To other paths no long body is let through.
    """

    def __init__(
        self,
        app: App,
        routes: frozenset[str],
        largest: Callable[[Scope], int],
        ends: Mapping[str, Callable[[bytes], int]],
    ) -> None:
        self._app, self._largest = app, largest
        self._ends = {path.encode(): end for path, end in ends.items()}
        self._routes = frozenset(route.encode() for route in routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            raise RuntimeError(f"nothing here speaks {scope['type']}")
        if scope["method"] != "POST" or scope["raw_path"] not in self._routes or scope["query_string"]:
            await _say(send, 404)
            return
        largest = self._largest(scope)
        lengths = [value for name, value in scope["headers"] if name == b"content-length"]
        if any(not value.isdigit() or int(value) > largest for value in lengths):
            await _say(send, 413)
            return
        ends = self._ends.get(scope["raw_path"], _no_letter)
        await self._let_through(scope, _Body(receive, largest, ends), send)

    async def _let_through(self, scope: Scope, body: _Body, send: Send) -> None:
        answered = False

        async def answer(message: MutableMapping[str, Any]) -> None:
            nonlocal answered
            if not body.refused:  # what the app says of half a body is of no use
                answered = True
                await send(message)

        CAME_BY_DOOR.set(True)
        try:
            await self._app(scope, body.receive, answer)
        except Exception:
            if not body.refused:
                raise
        if body.refused and not answered:
            await _say(send, body.refused)


class _Body:
    """The body of a request as it comes, and the status for what is wrong with it; 0 for nothing.

    Only the time that the sender takes counts, not the reader's.
    """

    def __init__(self, receive: Receive, largest: int, ends: Callable[[bytes], int]) -> None:
        self._receive, self._largest, self._ends = receive, largest, ends
        self._head = bytearray()
        self._come, self._waited, self._whole = 0, 0.0, False
        self.refused = 0

    async def receive(self) -> MutableMapping[str, Any]:
        """Return what has come next; that the sender is gone, once something is wrong."""
        if self._whole:
            return await self._receive()
        begun, left = asyncio.get_running_loop().time(), LAG_SECONDS + self._come / LEAST_RATE - self._waited
        try:
            message = await asyncio.wait_for(self._receive(), left)
        except TimeoutError:
            return self._refuse(408)
        self._waited += asyncio.get_running_loop().time() - begun
        piece = message.get("body", b"")
        self._come += len(piece)
        self._whole = not message.get("more_body", False)
        if len(self._head) < SMALL_BODY < self._come:
            self._head += piece[: SMALL_BODY - len(self._head)]
            try:
                self._largest = min(self._largest, self._ends(bytes(self._head)) + SMALL_BODY)
            except ValueError:
                return self._refuse(400)
        elif self._come <= SMALL_BODY:
            self._head += piece
        return self._refuse(413) if self._come > self._largest else message

    def _refuse(self, status: int) -> MutableMapping[str, Any]:
        self.refused = self.refused or status
        return {"type": "http.disconnect"}


def _no_letter(head: bytes) -> int:
    raise ValueError("nothing long is asked for")


async def _say(send: Send, status: int) -> None:
    headers = [(b"content-length", b"0"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


class DeadlineProtocol(H11Protocol):
    """A connection that is closed where no whole header comes in time, at its beginning or later."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin."""
        super().connection_made(transport)
        self._wait_until(self.loop.time() + HEADER_SECONDS)

    def data_received(self, data: bytes) -> None:
        """Read; half a header does not move the deadline."""
        waiting, begun = self.timeout_keep_alive_task, self.cycle
        until = None if waiting is None else waiting.when()
        super().data_received(data)
        if until is not None and self.cycle is begun and not self.transport.is_closing():
            self._wait_until(until)

    def _wait_until(self, until: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_at(until, self.timeout_keep_alive_handler)
