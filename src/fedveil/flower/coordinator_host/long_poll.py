"""Keeps whoever asks for messages waiting until there are some, so that a letter need not wait for the next look.

Flower answers a question for messages at once, with none if there are none. Here such an answer is held back: for some
seconds, or until the other side has sent something, and then Flower is asked again. What has a message in it, or is
refused, passes as it is; so nobody is kept waiting who has not proved to Flower who they are.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Notifier:
    """Rings when messages were sent; all of one event loop."""

    def __init__(self) -> None:
        self._next = asyncio.Event()
        self.closed = False

    def notify(self) -> None:
        """Wake all who wait."""
        rung, self._next = self._next, asyncio.Event()
        rung.set()

    def close(self) -> None:
        """Ring, and let nobody wait any more."""
        self.closed = True
        self.notify()

    @property
    def next(self) -> asyncio.Event:
        """What is set when it rings next."""
        return self._next


class LongPollApp:
    """An app whose empty answers to one path are held back, and which rings for those who ask through another door.

    Args:
        app: what is behind it.
        pull: the path that asks for messages; an empty answer to it has no bytes.
        heard: rings when there may be some.
        seconds: for how long an empty answer is held back.
        push: the path that sends messages.
        rung: is rung once they are there.
    """

    def __init__(
        self, app: App, *, pull: str, heard: Notifier, seconds: float, push: str, rung: Notifier
    ) -> None:
        self._app, self._seconds = app, seconds
        self._pull, self._heard = pull, heard
        self._push, self._rung = push, rung

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        path = scope.get("path")
        if path == self._pull:
            await self._ask(scope, receive, send)
            return
        await self._app(scope, receive, send)
        if path == self._push:
            self._rung.notify()

    async def _ask(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Ask until the answer is not empty, or the time is over; who has gone is not answered."""
        until = time.monotonic() + self._seconds
        question = [await receive()]
        while question[-1].get("more_body"):
            question.append(await receive())
        while True:
            bell, held = self._heard.next, await self._asked(scope, question, receive, send)
            if not held:
                return
            left = until - time.monotonic()
            if left <= 0 or self._heard.closed or not await _rings(bell, left, receive):
                break
        for message in held:
            await send(message)

    async def _asked(
        self, scope: Scope, question: list[Message], receive: Receive, send: Send
    ) -> list[Message]:
        """Ask once; return the answer if it is empty, and send it otherwise."""
        given, held = iter(question), list[Message]()

        async def again() -> Message:
            return next(given, None) or await receive()

        async def answer(message: Message) -> None:
            if held or _empty(message):
                held.append(message)
            else:
                await send(message)

        await self._app({**scope, "state": dict(scope.get("state", {}))}, again, answer)
        return held


def _empty(message: Message) -> bool:
    """Whether a message begins an answer without content."""
    begins = message["type"] == "http.response.start" and message["status"] == 200
    return begins and (b"content-length", b"0") in message["headers"]


async def _rings(bell: asyncio.Event, seconds: float, receive: Receive) -> bool:
    """Wait for the bell; return whether it has rung before the time was over and the asker went."""
    rung, gone = asyncio.ensure_future(bell.wait()), asyncio.ensure_future(receive())
    await asyncio.wait((rung, gone), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    heard = rung.done() and not gone.done()
    for one in (rung, gone):
        one.cancel()
    return heard
