"""What the public door gives whom: lengths and deadlines, for a body and for a connection that says nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

pytest.importorskip("flwr")

import uvicorn
from flwr.app import ConfigRecord, RecordDict
from flwr.common.serde import recorddict_to_proto
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import Message as PushedMessage
from flwr.proto.message_pb2 import Metadata, ObjectTree, PushObjectRequest
from flwr.proto.node_pb2 import Node
from uvicorn.server import ServerState

from fedveil.flower.coordinator_host import gateway
from fedveil.flower.coordinator_host.gateway import SMALL_BODY, DeadlineProtocol, Gateway
from fedveil.flower.envelope import letter_end, object_end, object_of, pack_message

ROUTE = "/a"
SCOPE = {"type": "http", "method": "POST", "raw_path": b"/a", "query_string": b"", "headers": []}


def asked(
    receive: Callable[[], Any], largest: int = 1000, ends: Callable[[bytes], int] = letter_end
) -> tuple[int, int]:
    """Ask through a door; return the status, and how much of the body the app behind it has read."""
    taken: list[int] = []
    said: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        more = True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                await send({"type": "http.response.start", "status": 500, "headers": []})
                raise RuntimeError("half a body")
            taken.append(len(message["body"]))
            more = message["more_body"]
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: Any) -> None:
        said.append(message)

    asyncio.run(Gateway(app, frozenset({ROUTE}), lambda _: largest, {ROUTE: ends})(SCOPE, receive, send))
    return said[0]["status"], sum(taken)


def coming(pieces: int, seconds: float = 0.0) -> Callable[[], Any]:
    """A body in pieces of 100 bytes, each after so many seconds."""
    left = iter(range(pieces, 0, -1))

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(seconds)
        return {"type": "http.request", "body": bytes(100), "more_body": next(left) > 1}

    return receive


@pytest.mark.parametrize(("pieces", "status"), [(10, 200), (11, 413)])
def test_a_body_is_cut_off_where_it_becomes_too_long(pieces: int, status: int) -> None:
    """Told no length, the door counts; what the app makes of half a body is not sent."""
    assert asked(coming(pieces)) == (status, 1000)


@pytest.mark.parametrize(("rate", "status"), [(1e5, 408), (1.0, 200)])
def test_a_body_that_comes_too_slowly_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, rate: float, status: int
) -> None:
    """Ten pieces of 100 bytes in .2 s, where .1 s are given, and the time that they take at the least rate."""
    monkeypatch.setattr(gateway, "LAG_SECONDS", 0.1)
    monkeypatch.setattr(gateway, "LEAST_RATE", rate)
    found, taken = asked(coming(10, 0.02))
    assert found == status
    assert (taken == 1000) == (status == 200)


def test_only_the_senders_time_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has come waits for a reader that is busy."""
    monkeypatch.setattr(gateway, "LAG_SECONDS", 0.1)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for _ in range(3):
            await asyncio.sleep(0.06)
            await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})

    said: list[Any] = []

    async def send(message: Any) -> None:
        said.append(message)

    asyncio.run(Gateway(app, frozenset({ROUTE}), lambda _: 1000, {})(SCOPE, coming(3), send))
    assert said[0]["status"] == 200


@pytest.mark.parametrize("words", [b"", b"POST /a HTTP/1.1\r\nhost: x\r\n", b"p"])
def test_a_connection_without_a_whole_header_is_closed(monkeypatch: pytest.MonkeyPatch, words: bytes) -> None:
    """It says nothing, or something now and then; whoever asks is answered, and may ask again."""
    monkeypatch.setattr(gateway, "HEADER_SECONDS", 0.6)
    whole = b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(0.8)  # longer than a header may take
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    async def tried() -> None:
        config = uvicorn.Config(app, http=DeadlineProtocol, ws="none", lifespan="off", log_level="error")
        loop, state = asyncio.get_running_loop(), ServerState()
        server = await loop.create_server(lambda: DeadlineProtocol(config, state, {}), "127.0.0.1", 0)
        address = server.sockets[0].getsockname()[:2]
        reader, writer = await asyncio.open_connection(*address)
        for _ in range(2):
            writer.write(whole)
            assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)).startswith(b"HTTP/1.1 200")
        slow, drip = await asyncio.open_connection(*address)
        begun = loop.time()
        for byte in words:
            drip.write(bytes([byte]))
            await asyncio.sleep(0.04 if len(words) > 1 else 0)
            if drip.is_closing() or slow.at_eof():
                break
        with suppress(ConnectionResetError):  # closed before all bytes were read
            assert await asyncio.wait_for(slow.read(), 20) == b""
        assert loop.time() - begun > 0.5
        assert len(state.connections) == 1
        writer.close()
        drip.close()
        server.close()

    asyncio.run(tried())


# --- what a member sends --------------------------------------------------------------------------------------


def pushed(content: RecordDict, more: RecordDict | None = None) -> bytes:
    """What a silo's carrier sends with such a message, and another behind it."""
    name = "f" * 64
    given = [recorddict_to_proto(one) for one in (content, more) if one is not None]
    messages = [
        PushedMessage(metadata=Metadata(message_id=name, reply_to_message_id=name), content=one)
        for one in given
    ]
    tree = ObjectTree(object_id=name)
    return PushMessagesRequest(
        messages_list=messages, message_object_trees=[tree], clientapp_runtime_list=[1.0]
    ).SerializeToString()


def through(body: bytes, ends: Callable[[bytes], int] = letter_end) -> int:
    """Send a body in pieces; return the status."""
    pieces = [body[at : at + 10_000] for at in range(0, len(body), 10_000)]

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

    return asked(receive, 1 << 24, ends)[0]


@pytest.mark.parametrize(
    "length", [10, SMALL_BODY - 300, SMALL_BODY - 100, SMALL_BODY, SMALL_BODY + 1, 300_000]
)
def test_a_letter_of_any_length_passes(length: int) -> None:
    body = pushed(pack_message(bytes(length)))
    assert through(body) == 200
    if len(body) > SMALL_BODY:
        assert body[letter_end(body[:SMALL_BODY]) - length :].startswith(bytes(length))


def texts(number: int) -> RecordDict:
    """A record of so many empty texts: two bytes each, and some forty in memory."""
    return RecordDict({"fedveil": ConfigRecord({"letter": [""] * number})})


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (pushed(texts(40_000)), 400),
        (pushed(RecordDict({"fedveil": ConfigRecord({"letter": "x" * 100_000})})), 400),
        (pushed(texts(30_000), pack_message(bytes(100_000))), 200),  # 60 kB are not yet much
        (pushed(texts(40_000), pack_message(bytes(100_000))), 400),
        (pushed(pack_message(bytes(100_000)), texts(30_000)), 200),
        (pushed(pack_message(bytes(100_000)), texts(40_000)), 413),
        (bytes(100_000), 400),
        (b"\xff" * 100_000, 400),
        (b"\x12\xff\xff\xff\xff\x0f" * 20_000, 400),
    ],
)
def test_of_a_long_push_all_but_a_little_is_one_letter(body: bytes, status: int) -> None:
    """What else a message holds costs twenty times its bytes when it is parsed."""
    assert through(body) == status


@pytest.mark.parametrize("length", [10, SMALL_BODY - 100, SMALL_BODY, 300_000])
def test_an_object_of_any_length_passes_and_nothing_long_beside_it(length: int) -> None:
    content = object_of(bytes(32), bytes(length))
    known = {"node": Node(node_id=1 << 60), "run_id": 1 << 60, "object_id": "a" * 64, "session_id": "b" * 36}
    sent = PushObjectRequest(object_content=content, **known)
    body = sent.SerializeToString()
    assert through(body, object_end) == 200
    if len(body) > SMALL_BODY:
        assert object_end(body[:SMALL_BODY]) == body.index(content) + len(content)
    stuffed = PushObjectRequest(session_id="b" * 200_000, object_content=content).SerializeToString()
    many = sent.SerializeToString() + b"".join(
        b"\x98\x06\x01" for _ in range(60_000)
    )  # fields that nobody knows
    assert through(stuffed, object_end) in (400, 413)
    assert through(many, object_end) in (400, 413)


def test_a_long_body_to_another_path_is_none_that_is_asked_for() -> None:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": bytes(SMALL_BODY + 1), "more_body": False}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["type"] == "http.disconnect"

    said: list[Any] = []

    async def send(message: Any) -> None:
        said.append(message)

    asyncio.run(Gateway(app, frozenset({ROUTE}), lambda _: 1 << 24, {})(SCOPE, receive, send))
    assert said[0]["status"] == 400
