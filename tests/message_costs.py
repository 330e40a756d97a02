"""What it costs a party to take or refuse the most expensive message of each kind: seconds of a processor, and memory.

    python -m tests.message_costs            what the most expensive messages cost

Honest runs are played under every protection. Each message of them, and each that a liar with the sender's key could
send in its place, is read by a copy of the party (a fork), which is measured and thrown away; then the honest one is
carried. What a liar sends: parts and messages stretched to all the bytes that the reader lets in, by zeros, ones, empty
items and doubled content, with counts that announce as many.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from fedveil.errors import FedveilError
from fedveil.federation.signed_message import SignedMessage
from fedveil.federation.transport.interface import LARGEST_OPENING
from fedveil.protocols.messages import SERVER, Envelope
from fedveil.protocols.session_messages import ProtocolMessage, SessionMessage
from tests.federation_world import World, asked, population
from tests.test_federation_grammar import ALL, CASES, Exchange, exchanges
from tests.test_federation_silo import EXAMPLES

SECONDS: Final = 1.0
MIB: Final = 64.0
COPIES: Final = 5
"""Of the longest message of a session, where they are more than that."""
USERS: Final = 20
FEATURES: Final = 16
NAMES: Final = (
    *(
        "open, by records",
        "bytes",
        "masked",
        "recovering",
        "blind, sampled",
        "blind, ring",
        "blind, by transfer",
    ),
    "encrypted",
)
_RING: Final = {
    "blind, ring": {"method": {"name": "uldp-avg-w"}, "protection": {"name": "private-weighting"}}
}
_ENVELOPE_BYTES: Final = 38


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What reading one message has cost.

    Attributes:
        kind: of the part or message that is measured.
        reader: "silo" or "coordinator".
        lie: how it was made; empty of an honest one.
        seconds: of a processor, all threads.
        mib: above what the party had, the message itself among it.
        message: MiB of the message.
    """

    kind: str
    reader: str
    lie: str
    seconds: float
    mib: float
    message: float


def measured(read: Callable[[bytes], Any], data: bytes) -> tuple[float, float]:
    """Return the seconds of a processor and the MiB that reading takes, in a copy of this process."""
    receiver, sender = os.pipe()
    child = os.fork()
    if not child:
        try:
            say = os.write
            _forget_to_write()
            say(sender, json.dumps(_reading(read, data)).encode())
        finally:
            os._exit(0)
    os.close(sender)
    with os.fdopen(receiver) as answer:
        said = answer.read()
    os.waitpid(child, 0)
    seconds, mib = json.loads(said)
    return seconds, mib


def _forget_to_write() -> None:
    """Have a copy of the parties leave their files as they are."""
    for name, instead in (
        ("write", lambda _, data: len(data)),
        ("replace", lambda temporary, _: os.unlink(temporary)),
        ("fsync", lambda _: None),
    ):
        setattr(os, name, instead)
    fcntl.flock = lambda *_: None  # type: ignore[assignment]
    logging.disable()


def _reading(read: Callable[[bytes], Any], data: bytes) -> tuple[float, float]:
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that of what follows
    before, began = _status("VmRSS"), time.process_time()
    with contextlib.suppress(FedveilError):
        read(data)
    return time.process_time() - began, (_status("VmHWM") - before) / 1024 + len(data) / 2**20


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def stretched(body: bytes, room: int) -> Iterator[tuple[str, bytes]]:
    """Bodies of the greatest length, in the ways that decoders may find expensive."""
    yield "zeros", body + bytes(max(0, room - len(body)))
    yield "ones", body + b"\xff" * max(0, room - len(body))
    yield "doubled", (body * (room // max(1, len(body)) + 1))[: max(room, len(body))]
    bits = 8 * max(0, room - 4)
    yield f"{bits} bits", min(bits, 2**32 - 1).to_bytes(4, "big") + b"\xff" * (bits // 8)
    for size in (2, 4):
        for item in (1, 8, 10):
            count = min((room - size) // item, 2 ** (8 * size) - 1)
            block = (item - 8).to_bytes(8, "big") + bytes(item - 8) if item >= 8 else b"\1"
            yield f"{count} items of {item} bytes", count.to_bytes(size, "big") + count * block


def lies(part: SessionMessage, room: int) -> Iterator[tuple[str, str, Any]]:
    """What a liar sends in place of a part: the kind, how it was made, and what has the bytes."""
    if isinstance(part, ProtocolMessage):
        envelope = Envelope.decode(part.message)
        head, body = part.message[:_ENVELOPE_BYTES], envelope.message.encode()
        for how, made in stretched(body, room - _ENVELOPE_BYTES):
            content = head[:-8] + len(made).to_bytes(8, "big") + made
            yield type(envelope.message).__name__, how, ProtocolMessage(message=content)
    else:
        for how, made in stretched(part.encode(), room):
            yield type(part).__name__, how, _Raw(part.kind, made)


@dataclass(frozen=True)
class _Raw:
    """A part of a kind with any bytes."""

    kind: int
    body: bytes

    def encode(self) -> bytes:
        return self.body


def kind_of(part: SessionMessage) -> str:
    """The name of a part, or of the message that it relays."""
    return type(
        part if not isinstance(part, ProtocolMessage) else Envelope.decode(part.message).message
    ).__name__


def in_exchange(exchange: Exchange) -> Iterator[Cost]:
    """What the message of an exchange costs its silo, and what lies in its place do; then the same of the answer."""
    world, silo = exchange.world, exchange.silo
    party, coordinator = world.silos[silo], world.coordinator
    assert party is not None
    assert coordinator is not None
    honest, room = exchange.message, party.longest(exchange.data)
    yield from _costs(honest, exchange.data, room, world.key, "silo", party.receive)
    reply = exchange.deliver()
    assert exchange.answered is not None

    def receive(data: bytes) -> None:
        coordinator.receive(silo, data)

    room = coordinator.longest_answer
    yield from _costs(exchange.answered, reply, room, world.keys[silo], "coordinator", receive)


def _costs(
    honest: SignedMessage, data: bytes, room: int, key: Any, reader: str, read: Callable[[bytes], Any]
) -> Iterator[Cost]:
    kinds = " ".join(dict.fromkeys(kind_of(part) for part in honest.parts)) or "nothing"
    yield _cost(kinds, reader, "", read, data)
    for place, part in enumerate(honest.parts):
        left = room - len(data) - 64
        for kind, how, lie in lies(part, max(0, left)):
            parts: Any = (*honest.parts[:place], lie, *honest.parts[place + 1 :])
            yield _cost(kind, reader, how, read, replace(honest, parts=parts).seal(key))


def _cost(kind: str, reader: str, lie: str, read: Callable[[bytes], Any], data: bytes) -> Cost:
    seconds, mib = measured(read, data)
    return Cost(kind=kind, reader=reader, lie=lie, seconds=seconds, mib=mib, message=len(data) / 2**20)


def of_no_session(world: World) -> Iterator[Cost]:
    """What parts of every kind cost a silo in a message that is of no session under way."""
    party = world.party()
    signed_message = SignedMessage(
        run=bytes(16), session=bytes(16), number=0, sender=SERVER, recipient=0, parts=()
    )
    for part in EXAMPLES:
        for kind, how, lie in (
            lies(part, LARGEST_OPENING - 200) if not isinstance(part, ProtocolMessage) else ()
        ):
            yield _cost(
                f"{kind}, of no session",
                "silo",
                how,
                party.receive,
                replace(signed_message, parts=(lie,)).seal(world.key),
            )


def world_of(name: str, folder: Path) -> World:
    """The parties of a case, with tables of the size that is measured."""
    changes = _RING.get(name) or CASES[name]
    if "blind" in name:
        rest = {"n_max": 64, "cipher": "rlwe" if "ring" in name else "paillier"}
        changes = changes | {"protection": changes["protection"] | rest}
    data = {"n_users": USERS, "n_silos": 3}
    held = population(users=USERS, records=200, features=FEATURES)
    return World(folder, asked(rounds=1, data=data, **changes), held, ALL)


def costs(names: tuple[str, ...], folder: Path) -> Iterator[Cost]:
    """Every cost of the honest runs of some cases, and of the lies in them; of silos 0 and 1."""
    for number, name in enumerate(names):
        (folder / str(number)).mkdir()
        world = world_of(name, folder / str(number))
        if name == NAMES[0]:
            yield from of_no_session(world)
        for exchange in exchanges(world):
            if exchange.silo < 2:
                yield from in_exchange(exchange)
        world.close()


def most_expensive(found: Iterator[Cost]) -> dict[tuple[str, str, bool], Cost]:
    """The most expensive in seconds and in memory, by reader, kind, and whether it is honest."""
    best: dict[tuple[str, str, bool], Cost] = {}
    for cost in found:
        place = cost.reader, cost.kind, not cost.lie
        known = best.get(place, cost)
        slower = max(known, cost, key=lambda one: one.seconds)
        best[place] = replace(slower, mib=max(known.mib, cost.mib), message=max(known.message, cost.message))
    return best


def main() -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as folder:
        best = most_expensive(costs(tuple(sys.argv[1:]) or NAMES, Path(folder)))
    print("| reader | message | most expensive | CPU s | MiB |\n| --- | --- | --- | --- | --- |")
    for (reader, kind, _), cost in sorted(best.items(), key=lambda one: -one[1].seconds):
        print(f"| {reader} | `{kind}` | {cost.lie or 'honest'} | {cost.seconds:.2f} | {cost.mib:.0f} |")


if __name__ == "__main__":
    main()
