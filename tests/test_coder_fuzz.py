"""Hostile bytes: a typed error or a decoded update of the expected length, never anything else.

Half of the mutated messages keep a valid tag, as one from a malicious holder of the key would, so the parser and the
range decoder behind the tag are reached too.
"""

import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fedveil.quantization import (
    Codec,
    GaussianLaw,
    InsecureSimulationStreams,
    LaplaceLaw,
    LayeredQuantizer,
    MessageError,
    lattice,
)
from fedveil.quantization.codec import unseal
from fedveil.quantization.streams import TAG_BYTES, SharedStreams

LENGTH = 70
ROUNDS = (2_000, 20_000)
STREAMS = InsecureSimulationStreams(0, "fuzz")


def seeds() -> list[bytes]:
    """Valid messages of every kind: lattice, dense lattice, scalar law, rejection, selection, escapes."""
    rng = np.random.default_rng(0)
    gaussian = GaussianLaw(std=1.0)
    messages = []
    for law, name, adaptive, size in (
        (gaussian, "Z1", False, 1.0),
        (gaussian, "Z1", False, 1e6),
        (gaussian, "E8", False, 3.0),
        (gaussian, "Z3", False, 0.1),
        (gaussian, "A2", True, 0.3),
        (gaussian, "E8", True, 0.05),
        (LaplaceLaw(b=1.0), "Z1", True, 1e3),
    ):
        channel = Codec(quantizer=LayeredQuantizer(law=law, lattice=lattice(name)), adaptive=adaptive)
        x = rng.normal(size=LENGTH) * size
        x[::23] *= 100
        messages.append(channel.encode(x, InsecureSimulationStreams(0, "fuzz")))
    return messages


def mutate(message: bytes, rng: np.random.Generator, others: list[bytes]) -> bytes:
    """Flip, cut, insert, repeat, overwrite or splice."""
    data = bytearray(message)
    for _ in range(int(rng.integers(1, 4))):
        at = int(rng.integers(0, len(data))) if data else 0
        match int(rng.integers(0, 7)):
            case 0 if data:
                data[at] ^= 1 << int(rng.integers(0, 8))
            case 1:
                del data[at:]
            case 2:
                data[at:at] = rng.bytes(int(rng.integers(1, 9)))
            case 3 if data:
                data[at] = int(rng.choice([0, 1, 0x7F, 0x80, 0xFF]))
            case 4:
                del data[at : at + int(rng.integers(1, 6))]
            case 5:
                other = others[int(rng.integers(0, len(others)))]
                data[at:] = other[at:]
            case _:
                data[at : at + 8] = rng.bytes(8)
    return bytes(data)


def decode_any(message: bytes, streams: SharedStreams, length: int) -> np.ndarray:
    """Decode a message of whatever law and lattice its header names."""
    return Codec(quantizer=unseal(message, streams).header.quantizer).decode(message, streams, length=length)


def attempt(message: bytes) -> bool:
    """Decode as a server would; tell whether it was accepted."""
    try:
        received = decode_any(message, STREAMS, LENGTH)
    except MessageError:
        return False
    assert received.shape == (LENGTH,)
    return True


def fuzz(rounds: int) -> None:
    """Decode mutated messages; fails on any other error than ours, on growth of memory, on accepted damage."""
    rng = np.random.default_rng(1)
    messages = seeds()
    assert all(attempt(message) for message in messages)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    accepted = 0
    for i in range(rounds):
        original = messages[i % len(messages)]
        mutated = mutate(original, rng, messages)
        if i % 2:
            body = mutate(original[:-TAG_BYTES], rng, messages)
            mutated = body + STREAMS.tag(body)
        accepted += attempt(mutated) and mutated not in messages
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 64 * 1024, f"memory grew by {grown} KiB"
    assert accepted < rounds // 100, f"the checksum of the symbols let {accepted} damaged messages through"


@pytest.mark.parametrize("rounds", [ROUNDS[0], pytest.param(ROUNDS[1], marks=pytest.mark.slow)])
def test_mutated_messages_never_crash_the_decoder(rounds: int) -> None:
    """In an interpreter of its own, with warnings as errors: a crash would be an exit status, not a lost test run."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"from tests.test_coder_fuzz import fuzz; fuzz({rounds})"],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_every_truncation_and_every_flipped_bit_is_refused() -> None:
    message = seeds()[0]
    for end in range(len(message)):
        assert not attempt(message[:end])
    for bit in range(8 * len(message)):
        flipped = bytearray(message)
        flipped[bit // 8] ^= 1 << (bit % 8)
        assert not attempt(bytes(flipped))


@pytest.mark.parametrize("claimed", [0, 69, 71, 2**31, 2**36, 2**41])
def test_length_that_was_not_agreed_allocates_nothing(claimed: int) -> None:
    message = seeds()[0]
    encoded = bytearray()
    while claimed >= 0x80:
        encoded.append(claimed & 0x7F | 0x80)
        claimed >>= 7
    encoded.append(claimed)
    body = message[:16] + bytes(encoded) + message[17:-TAG_BYTES]
    with pytest.raises(MessageError, match="are expected"):
        decode_any(body + STREAMS.tag(body), STREAMS, LENGTH)


@pytest.mark.parametrize(
    ("at", "value", "match"),
    [
        (0, 0x00, "do not begin as one"),
        (3, 1, "format version 1"),
        (4, 9, "code 9"),
        (5, 1, "gives a shape"),
        (6, 0, "names no possible channel"),
        (6, 12, "almost every dither"),
        (7, 0x82, "unknown flags"),
        (15, 0xFF, "finite number above 0"),
    ],
)
def test_damaged_header_is_named(at: int, value: int, match: str) -> None:
    body = bytearray(seeds()[0][:-TAG_BYTES])
    body[at] = value
    with pytest.raises(MessageError, match=match):
        decode_any(bytes(body) + STREAMS.tag(bytes(body)), STREAMS, LENGTH)
