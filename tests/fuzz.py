"""Hostile bytes for every decoder: a typed error or a value, within 2 seconds and 64 MiB.

    python -m tests.fuzz 1000000            all of them, in this process
    python -m tests.fuzz 250000 500000      a slice: 250,000 from number 500,000

Input number i is a function of i alone, so slices add up. Files are written anew for every input: TMPDIR=/dev/shm
spares the disk, and an input takes half a millisecond of a processor. The last line tells how many were refused, the
slowest, and by how much the process grew.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import numpy as np

from fedveil.crypto.ckks import CkksKey, CkksParameters, CkksSum
from fedveil.crypto.keys import IdentityKey
from fedveil.crypto.rlwe import Ring
from fedveil.crypto.seal_format import (
    ciphertext_bytes,
    parse_ciphertext,
    parse_plaintext,
    parse_seeded_ciphertext,
    plaintext_bytes,
    seeded_ciphertext_bytes,
)
from fedveil.errors import FedveilError
from fedveil.federation.audit.run_record import TERMS, read_terms
from fedveil.federation.membership import Charter, Membership, open_delivery, pack_delivery
from fedveil.federation.signed_message import SignedMessage
from fedveil.federation.terms import canonical, read_canonical
from fedveil.federation.transport.https.endpoints import SiloEndpoint, by_silo_name
from fedveil.federation.transport.https.http_server import ClosedByPeerError, Connection, Limits
from fedveil.federation.transport.https.mailbox import Mailbox, Members
from fedveil.federation.transport.interface import pack_frames, unpack_frames
from fedveil.methods.message_encoding import CodedMessage
from fedveil.protocols.messages import SERVER, Envelope
from fedveil.protocols.partial_encryption.plan import PartialInputs
from fedveil.protocols.weighting.plan import WeightedInputs
from fedveil.quantization.streams import TAG_BYTES
from tests.federation_world import asked
from tests.test_coder_fuzz import LENGTH, STREAMS, decode_any
from tests.test_coder_fuzz import seeds as coded_messages
from tests.test_federation_silo import EXAMPLES as PART_EXAMPLES
from tests.test_files import FileKind, alone, federation, of_releases
from tests.test_protection_fuzz import EXAMPLES, envelope

SECONDS: Final = 2.0
GROWTH: Final = 64 << 10
"""KiB by which reading all inputs may let the process grow."""

_EDGES: Final = (b"\0", b"\1", b"\x7f", b"\x80", b"\xff")


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """What reads bytes from elsewhere.

    Attributes:
        name: of it.
        read: returns a value, or raises an error of this project.
        good: bytes that it reads.
        seal: makes altered bytes whole again, as somebody would who has the key or knows the format.
    """

    name: str
    read: Callable[[bytes], Any]
    good: tuple[bytes, ...]
    seal: Callable[[bytes], bytes] = bytes


def decoders(folder: Path) -> tuple[Decoder, ...]:
    """Every decoder of protocol messages, signed messages, ciphertexts and files; the files stand in a folder."""
    key = IdentityKey.generate()
    signed_message = SignedMessage(
        run=bytes(16),
        session=bytes(16),
        number=0,
        sender=SERVER,
        recipient=0,
        parts=tuple(PART_EXAMPLES),
    ).seal(key)

    def signed(content: bytes) -> bytes:
        return content[:-64] + key.sign(b"fedveil/1/letter" + content[:-64])

    def opened(data: bytes) -> SignedMessage:
        return SignedMessage.open(data, sender=SERVER, identity=key.public, recipient=0, largest=1 << 20)

    def tagged(content: bytes) -> bytes:
        return content[:-TAG_BYTES] + STREAMS.tag(content[:-TAG_BYTES])

    ring, words = Ring(degree=8192, primes=3), np.arange(2 * 3 * 8192, dtype=np.uint64).reshape(2, 3, 8192)
    ckks = CkksParameters(silos=3)
    hidden = CkksKey(ckks).encrypt(np.arange(5))
    weighted = WeightedInputs(contributions=np.arange(6).reshape(2, 3), noise=np.arange(3), dither=bytes(32))
    partial = PartialInputs(values=np.arange(9.0), message=np.arange(9.0))
    files = federation(folder / "run") | alone(folder / "alone") | of_releases(folder / "releases")
    (terms,) = (folder / "run").rglob(TERMS)
    return (
        Decoder(name="envelope", read=Envelope.decode, good=tuple(envelope(one) for one in EXAMPLES)),
        Decoder(name="message", read=opened, good=(signed_message,)),
        Decoder(name="message, signed", read=opened, good=(signed_message,), seal=signed),
        *(
            Decoder(name=f"part {type(one).__name__}", read=type(one).decode, good=(one.encode(),))
            for one in PART_EXAMPLES
        ),
        Decoder(name="codec", read=_decoded, good=tuple(coded_messages()), seal=tagged),
        Decoder(
            name="codec's frame",
            read=CodedMessage.from_bytes,
            good=(CodedMessage(key=bytes(32), message=b"m").to_bytes(),),
        ),
        Decoder(name="ring", read=ring.decode, good=(words.tobytes(),)),
        Decoder(name="ckks", read=lambda data: CkksSum(ckks, 5).add(data), good=(hidden,)),
        Decoder(name="seal", read=parse_ciphertext, good=(ciphertext_bytes((1, 2, 3, 4), words, ntt=False),)),
        Decoder(
            name="seal, seeded",
            read=parse_seeded_ciphertext,
            good=(seeded_ciphertext_bytes((1, 2, 3, 4), words[0, 0], bytes(64)),),
        ),
        Decoder(name="seal, plain", read=parse_plaintext, good=(plaintext_bytes(words[0, 0, :9]),)),
        Decoder(name="weighted input", read=WeightedInputs.decode, good=(weighted.encode(),)),
        Decoder(name="partial input", read=PartialInputs.decode, good=(partial.encode(),)),
        Decoder(
            name="experiment",
            read=lambda data: read_canonical(data.decode(errors="replace")),
            good=(canonical(asked()).encode(),),
        ),
        Decoder(name="requests to a mailbox", read=Requests(), good=Requests.good),
        Decoder(
            name="frames of a mailbox", read=_frames, good=(b"".join(pack_frames([(1, b"one"), (2, b"")])),)
        ),
        *_of_deliveries(),
        Decoder(name="terms of a run", read=read_terms, good=(terms.read_bytes(),)),
        *(_of_file(name, kind) for name, kind in files.items()),
    )


class _Answers:
    """Takes what a server writes."""

    def __init__(self) -> None:
        self.written = b""

    def write(self, data: bytes) -> None:
        self.written += data

    async def drain(self) -> None: ...


class Requests:
    """Reads bytes as a mailbox reads a connection: whatever they are, it answers in HTTP or closes."""

    good = tuple(
        (line + "\r\nHost: x\r\nSilo: b\r\n" + more).encode()
        for line, more in (
            (
                "GET /v1/message HTTP/1.1",
                "If-None-Match: x\r\nHave: y\r\n\r\nGET /v1/message HTTP/1.1\r\nHost: x\r\n\r\n",
            ),
            ("POST /v1/answer HTTP/1.1", "Answers: t\r\nContent-Length: 5\r\n\r\nhello"),
            ("POST /v1/answer HTTP/1.1", "Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"),
        )
    )

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._limits = Limits(poll_seconds=0.0)
        mailbox = self._runner.run(_mailbox())
        self._endpoint = SiloEndpoint(mailbox, by_silo_name(mailbox), self._limits)

    def close(self) -> None:
        self._runner.close()

    def __call__(self, data: bytes) -> bytes:
        return self._runner.run(self._serve(data))

    async def _serve(self, data: bytes) -> bytes:
        reader, answers = asyncio.StreamReader(), _Answers()
        reader.feed_data(data)
        reader.feed_eof()
        with contextlib.suppress(ClosedByPeerError):
            await Connection(reader, answers, self._limits, None).serve(self._endpoint)  # type: ignore[arg-type]
        assert not answers.written or answers.written.startswith(b"HTTP/1.1 ")
        return answers.written


async def _mailbox() -> Mailbox:
    mailbox = Mailbox()
    mailbox.introduce(Members(keys=("a", "b"), names=("a", "b")))
    mailbox.set_longest(1 << 20)
    mailbox.offer(1, b"a message")
    mailbox.slot(1).tag = "t"
    return mailbox


def _of_deliveries() -> tuple[Decoder, ...]:
    """Deliveries of a membership, without and with the founder's signature over what was altered."""
    key = IdentityKey.generate()
    charter = Charter(name="f", host="h", port=9443, founder=key.public, authority="", data_schema="s")
    member = Membership(
        silos=("a",),
        roster=(IdentityKey.generate().public,),
        coordinator=IdentityKey.generate().public,
        schema_digest=charter.schema_digest,
        serial=1,
        charter=charter.digest,
    ).with_signature(key)
    good = pack_delivery(member)
    start = good.index(member.seal)

    def seal(data: bytes) -> bytes:
        text = data[start + len(member.seal) :]
        return good[:start] + key.sign(b"fedveil/2/membership" + sha256(text).digest()) + text

    def read(data: bytes) -> Membership:
        return open_delivery(data, charter)

    return (
        Decoder(name="delivery", read=read, good=(good,)),
        Decoder(name="delivery, signed", read=read, good=(good,), seal=seal),
    )


def _frames(data: bytes) -> Any:
    try:
        return unpack_frames(data)
    except ValueError:  # of the coordinator's own mailbox
        return None


def _decoded(data: bytes) -> Any:
    return decode_any(data, STREAMS, LENGTH)


def _of_file(name: str, kind: FileKind) -> Decoder:
    good = kind.path.read_bytes()

    def read(data: bytes) -> Any:
        kind.path.write_bytes(data)
        try:
            return kind.read(kind.path)
        finally:
            kind.path.write_bytes(good)

    return Decoder(name=name, read=read, good=(good,), seal=kind.seal)


def altered(good: bytes, source: random.Random) -> bytes:
    """Bytes changed, cut out, put in, announced in other numbers, doubled, or random."""
    data = bytearray(good)
    for _ in range(source.randrange(1, 4)):
        at, some = source.randrange(len(data) + 1), source.randrange(1, 9)
        match source.randrange(8):
            case 0:
                data[at : at + 1] = bytes([source.randrange(256)])
            case 1:
                del data[at:]
            case 2:
                del data[at : at + some]
            case 3:
                data[at:at] = source.randbytes(some)
            case 4:
                data[at : at + some] = some * source.choice(_EDGES)
            case 5:
                data[at:] = good[source.randrange(len(good) + 1) :]
            case 6:
                data[at : at + 8] = source.randrange(1 << source.randrange(1, 64)).to_bytes(8, "big")
            case _:
                data = bytearray(source.randbytes(source.randrange(200)))
    return bytes(data)


@dataclass
class Found:
    """What reading hostile bytes has come to.

    Attributes:
        inputs: how many were read.
        refused: how many of them with a typed error.
        slowest: seconds of the slowest, and what read it.
        grown: KiB by which the process grew.
    """

    inputs: int = 0
    refused: int = 0
    slowest: tuple[float, str] = (0.0, "")
    grown: int = 0


def play(known: tuple[Decoder, ...], count: int, first: int = 0) -> Found:
    """Have the decoders read so many inputs; anything but a value or a typed error is raised, with its number."""
    for one in known:
        for good in one.good:
            one.read(good)
    found, before = Found(), _largest()
    for number in range(first, first + count):
        source = random.Random(number)
        one = source.choice(known)
        data = altered(source.choice(one.good), source)
        data = one.seal(data) if len(data) > 100 else data
        began = time.process_time()
        try:
            one.read(data)
        except FedveilError:
            found.refused += 1
        except Exception as error:
            raise AssertionError(f"input {number} of '{one.name}': {type(error).__name__}") from error
        found.slowest = max(found.slowest, (time.process_time() - began, f"{one.name}, input {number}"))
        found.inputs += 1
    found.grown = _largest() - before
    return found


def _largest() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main(arguments: list[str]) -> None:
    """Play a slice and say what came of it."""
    count, first = (int(one) for one in (*arguments, "0")[:2])
    with tempfile.TemporaryDirectory() as folder:
        print(play(decoders(Path(folder)), count, first))


if __name__ == "__main__":
    main(sys.argv[1:])
