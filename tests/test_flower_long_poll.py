"""Who asks for messages is kept waiting until there are some, and nobody else is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from fedveil.flower.coordinator_host.long_poll import LongPollApp, Message, Notifier, Receive, Scope, Send

PULL, PUSH = "/pull", "/push"
SECONDS = 20.0
"""Longer than any test: what ends, ends by the bell."""


@dataclass
class Queue:
    """An app that answers a pull with what was pushed, and says how often it was asked."""

    status: int = 200
    waiting: list[bytes] = field(default_factory=list)
    asked: list[bytes] = field(default_factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"]["seen"] = None  # as Flower's does: an app may ask twice only with a state of its own
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        answer = b""
        if scope["path"] == PUSH:
            self.waiting.append(body)
        else:
            self.asked.append(body)
            answer = self.waiting.pop() if self.waiting else b""
        length = (b"content-length", str(len(answer)).encode())
        await send({"type": "http.response.start", "status": self.status, "headers": [length]})
        await send({"type": "http.response.body", "body": answer})


@dataclass
class Asker:
    """One request: its body in two pieces, and whether who sent it is still there."""

    path: str
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    heard: list[Message] = field(default_factory=list)
    sent: int = 0

    async def receive(self) -> Message:
        self.sent += 1
        if self.sent <= 2:
            return {"type": "http.request", "body": b"ab"[self.sent - 1 :][:1], "more_body": self.sent == 1}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.heard.append(message)

    @property
    def answer(self) -> tuple[int, bytes]:
        start, *bodies = self.heard
        return start["status"], b"".join(body["body"] for body in bodies)


def play(app: Queue, act: Callable[[Any], Any], seconds: float = SECONDS) -> None:
    async def played() -> None:
        bell, other = Notifier(), Notifier()
        silo = LongPollApp(app, pull=PULL, heard=bell, seconds=seconds, push="", rung=other)
        coordinator = LongPollApp(app, pull="", heard=other, seconds=seconds, push=PUSH, rung=bell)

        def ask(through: LongPollApp, asker: Asker) -> asyncio.Task[None]:
            scope = {"type": "http", "path": asker.path, "state": {}}
            return asyncio.ensure_future(through(scope, asker.receive, asker.send))

        await act(
            SimpleNamespace(
                pull=lambda asker: ask(silo, asker), push=lambda asker: ask(coordinator, asker), bell=bell
            )
        )

    asyncio.run(asyncio.wait_for(played(), SECONDS / 2))


async def until(reached: Callable[[], bool]) -> None:
    while not reached():
        await asyncio.sleep(0)


def test_a_question_waits_for_the_next_message() -> None:
    app, asker = Queue(), Asker(PULL)

    async def act(doors: Any) -> None:
        asked = doors.pull(asker)
        await until(lambda: len(app.asked) == 1)
        assert not asker.heard
        await doors.push(Asker(PUSH))
        await asked
        assert asker.answer == (200, b"ab")

    play(app, act)
    assert app.asked == [b"ab", b"ab"]


@pytest.mark.parametrize(("status", "waiting"), [(401, []), (500, []), (200, [b"there"])])
def test_a_refusal_and_a_message_that_is_there_wait_for_nothing(status: int, waiting: list[bytes]) -> None:
    asker = Asker(PULL)

    async def act(doors: Any) -> None:
        await doors.pull(asker)

    play(Queue(status=status, waiting=list(waiting)), act)
    assert asker.answer == (status, b"".join(waiting))


def test_for_who_has_gone_no_message_is_taken() -> None:
    """Flower gives each message once: a silo that comes back must find it."""
    app, asker = Queue(), Asker(PULL)

    async def act(doors: Any) -> None:
        asked = doors.pull(asker)
        await until(lambda: len(app.asked) == 1)
        asker.gone.set()
        await asked
        await doors.push(Asker(PUSH))

    play(app, act)
    assert app.waiting == [b"ab"]


@pytest.mark.parametrize("seconds", [0.0, SECONDS])
def test_an_empty_answer_is_given_at_the_end(seconds: float) -> None:
    """Of the time, or of the link."""
    asker = Asker(PULL)

    async def act(doors: Any) -> None:
        asked = doors.pull(asker)
        if seconds:
            await until(lambda: asker.sent == 3)
            doors.bell.close()
        await asked
        await doors.pull(Asker(PULL))

    play(Queue(), act, seconds)
    assert asker.answer == (200, b"")
