"""Secure aggregation of long vectors: masking, whole rounds, and the noise that is added before.

The peer of masking is numpy's own generator, seeded per peer as Flower's SecAgg+ does it (fast for a simulation, but
whoever guesses the 32-bit seed removes the mask).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

from benchmarks.harness import Row, at_most, cpu_seconds
from fedveil.crypto.key_agreement import RoundId
from fedveil.crypto.keys import IdentityKey
from fedveil.crypto.masks import apply_masks_
from fedveil.privacy.noise import DiscreteGaussian
from fedveil.protocols.protocol import ClientContext
from fedveil.protocols.secure_aggregation import AggregationPlan, AggregationServer, AggregationSilo
from fedveil.randomness import PrivacyRandomness

_T = TypeVar("_T")
_SILOS = 20
_LIMIT = 2**40  # needs 64-bit words


def rows(quick: bool) -> Iterator[Row]:
    """Aggregate 10^6 (and 10^7) coordinates of 20 silos, on one core."""
    yield _keystream()
    sizes = [10**6] if quick else [10**6, 10**7]
    for length in sizes:
        yield from _round(length)
    yield _noise(10**6)


def smallest() -> Iterator[Row]:
    """Aggregate a thousand coordinates."""
    yield _keystream(2**17 // 8, repeats=1)
    yield from _round(1_000)
    yield _noise(1_000)


def _keystream(count: int = 10**6, repeats: int = 9) -> Row:
    """Masks of 20 keys; what bounds them is OpenSSL's ChaCha20 on this core, into a buffer that is never read."""
    words, keys = np.zeros(count, dtype="<u8"), [os.urandom(32) for _ in range(_SILOS)]
    length = 2**17
    zeros, buffer = bytes(length), bytearray(length)

    def cipher_alone() -> None:
        for key in keys:
            stream = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
            for _ in range(words.nbytes // length):
                stream.update_into(zeros, buffer)

    masks = [(key, True) for key in keys]
    seconds, alone = cpu_seconds(lambda: apply_masks_(words, masks), cipher_alone, repeats=repeats)
    rate = _SILOS * words.nbytes / seconds / 1e9
    ceiling = _SILOS * (words.nbytes // length * length) / alone / 1e9
    words_of = "10^6" if count == 10**6 else f"{count:,}"
    return Row(
        case=f"keystream and addition per peer, {words_of} words of 64 bits; peer: ChaCha20 alone, the ceiling",
        unit="GB/s",
        ours=rate,
        peer=ceiling,
        ratio=rate / ceiling,
        target=3.0,
        met=rate >= 3.0,
    )


def _round(length: int) -> Iterator[Row]:
    run = os.urandom(16)
    plan = AggregationPlan(clients=_SILOS, length=length, limit=_LIMIT)
    identities = [IdentityKey.generate() for _ in range(_SILOS)]
    roster = tuple(identity.public for identity in identities)
    silos = [
        AggregationSilo(plan, ClientContext(run=run, number=i, identity=identity, roster=roster))
        for i, identity in enumerate(identities)
    ]
    server = AggregationServer(plan, run)
    for silo in silos:
        for recipient, data in server.receive(silo.index, silo.announce()):
            silos[recipient].receive(data)
    units = np.random.default_rng(0).integers(-_LIMIT, _LIMIT, length)
    masking, per_silo, at_server = [], [], []
    for attempt in range(3):
        round_id = RoundId(run=run, round=1, attempt=attempt)
        spent = [0.0] * _SILOS
        serving = 0.0
        messages, seconds = _timed(lambda round_id=round_id: server.begin(round_id, tuple(range(_SILOS))))  # type: ignore[misc]
        serving += seconds
        for recipient, data in messages:
            _, seconds = _timed(lambda r=recipient, d=data: silos[r].receive(d))  # type: ignore[misc]
            spent[recipient] += seconds
        for silo in silos:
            data, seconds = _timed(lambda silo=silo: silo.mask_vector(units))  # type: ignore[misc]
            masking.append(seconds)
            spent[silo.index] += seconds
            messages, seconds = _timed(lambda s=silo.index, d=data: server.receive(s, d))  # type: ignore[misc]
            serving += seconds
        for recipient, data in messages:
            (own,), seconds = _timed(lambda r=recipient, d=data: silos[r].receive(d))  # type: ignore[misc]
            spent[recipient] += seconds
            _, seconds = _timed(lambda r=recipient, d=own: server.receive(r, d))  # type: ignore[misc]
            serving += seconds
        result, seconds = _timed(server.result)
        at_server.append(serving + seconds)
        per_silo += spent
    if not np.array_equal(result, _SILOS * units):
        raise AssertionError("the sum is wrong")
    scale = length / 10**6
    peer = _numpy_masks(min(length, 10**6)) * max(1.0, scale)
    masked = float(np.median(masking))
    name = f"{length:,} coordinates, {_SILOS} silos"
    yield Row(
        case=f"{name}: masking per silo; peer: numpy's generator, as in SecAgg+",
        unit="CPU s",
        ours=masked,
        peer=peer,
        ratio=peer / masked,
        target=0.1 * scale,
        met=masked <= 0.1 * scale,
    )
    yield at_most(f"{name}: whole round, a silo", "CPU s", float(np.median(per_silo)), 1.0 * scale)
    yield at_most(f"{name}: whole round, the server", "CPU s", float(np.median(at_server)), 1.0 * scale)


def _timed(call: Callable[[], _T]) -> tuple[_T, float]:
    before = time.process_time()
    result = call()
    return result, time.process_time() - before


def _numpy_masks(length: int) -> float:
    def masks() -> None:
        total = np.zeros(length, dtype=np.int64)
        for peer in range(_SILOS):
            total += np.random.RandomState(peer).randint(0, 2**62, length, dtype=np.int64)

    (seconds,) = cpu_seconds(masks, repeats=1)
    return seconds


def _noise(length: int) -> Row:
    law = DiscreteGaussian(std=1.0, grid=2.0**-18)
    source = PrivacyRandomness.system().stream("noise")
    (seconds,) = cpu_seconds(lambda: law.sample_units((length,), source), repeats=3)
    return Row(
        case=f"exact discrete Gaussian noise, {length:,} values, before masking", unit="CPU s", ours=seconds
    )
