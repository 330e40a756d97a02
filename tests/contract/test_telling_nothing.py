"""A field that tells nothing has the same bytes for neighbours, and no message tells them apart by its length.

Every protocol is played twice under the same seeds and keys: once with a user's records, once without. Who is told a
field's meaning is the statement's business (``privacy/claims.py``); here what was declared is held against the bytes
that leave. A new protocol joins with one line in PROTOCOLS.
Lengths may tell only which users have a record anywhere, where a message says so (``besides``).
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedveil.crypto.key_agreement import AgreementKey
from fedveil.crypto.keys import IdentityKey
from fedveil.crypto.paillier import PaillierPrivateKey
from fedveil.privacy.claims import Reveals
from fedveil.protocols.driver import LocalDriver, Transcript
from fedveil.protocols.masked_sums import MaskedSumSpec
from fedveil.protocols.messages import Envelope, Message, RoundStart
from fedveil.protocols.partial_encryption import silo as partial_encryption
from fedveil.protocols.partial_encryption.plan import PartialInputs, PartialPlan
from fedveil.protocols.partial_encryption.protocol_spec import PartialEncryptionSpec
from fedveil.protocols.plaintext_sums import PlaintextSums
from fedveil.protocols.sealed_sums import SealedSums
from fedveil.protocols.weighting.paillier_weights import PaillierEvaluator, PaillierKeyHolder
from fedveil.protocols.weighting.plan import CipherSizes, WeightedInputs, WeightingPlan
from fedveil.protocols.weighting.protocol_spec import PrivateWeightingSpec
from fedveil.protocols.weighting.rlwe_weights import RlweEvaluator, RlweKeyHolder

SILOS, LENGTH, LIMIT = 3, 5, 1000
EVERYBODY = tuple(range(SILOS))
MINE = np.array([[3, 0, 1], [1, 2, 0], [0, 1, 2]])
"""Records of three users at three silos; the neighbour has none of the last user's."""


@dataclass(frozen=True)
class Data:
    """What the silos hold: updates (|S|, d), and how many records of whom."""

    vectors: np.ndarray
    counts: np.ndarray


def neighbours() -> tuple[Data, Data]:
    """Two populations that differ by a user: by what that user holds, and by the sums of the silos."""
    vectors = np.random.default_rng(3).integers(-LIMIT, LIMIT + 1, (SILOS, LENGTH))
    without, moved = MINE.copy(), vectors.copy()
    without[:, 2] = 0
    moved[[0, 2]] = np.random.default_rng(4).integers(-LIMIT, LIMIT + 1, (2, LENGTH))
    return Data(vectors, MINE), Data(moved, without)


class Drawn:
    """Bytes from a count in the place of the system's: every message that is delivered begins another stretch."""

    count = 0

    @classmethod
    def bytes(cls, size: int) -> bytes:
        cls.count += 1
        return hashlib.shake_256(cls.count.to_bytes(16, "big")).digest(size)


class Kept(Transcript):
    """A transcript that keeps the messages, and lets none of a party's draws move another's."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[Envelope] = []
        Drawn.count = 0

    def record(self, data: bytes) -> None:
        super().record(data)
        self.messages.append(Envelope.decode(data))
        Drawn.count = len(self.messages) << 32


@pytest.fixture(autouse=True)
def seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every play of a test draws the same bytes and has the same keys."""
    monkeypatch.setattr(os, "urandom", Drawn.bytes)
    monkeypatch.setattr(random, "_urandom", Drawn.bytes)  # behind `secrets`
    monkeypatch.setattr(AgreementKey, "generate", lambda: AgreementKey.from_bytes(Drawn.bytes(32)))
    monkeypatch.setattr(
        IdentityKey, "generate", lambda: IdentityKey(Ed25519PrivateKey.from_private_bytes(Drawn.bytes(32)))
    )
    made, kept = partial_encryption.CkksKey, list[bytes]()

    def key(settings: Any, private: bytes | None = None) -> Any:
        """The same key of a library that takes no seed, in every play."""
        if not kept:
            kept.append(made(settings).private_bytes())
        return made(settings, private or kept[0])

    monkeypatch.setattr(partial_encryption, "CkksKey", key)


def play(agreement: Any, give: Callable[[int], Any]) -> list[Envelope]:
    """All messages of the setup and of two rounds."""
    kept = Kept()
    driver: LocalDriver[Any, Any] = LocalDriver(agreement, kept)
    for number in (1, 2):
        driver.play((number, 0), EVERYBODY, None, give)
    return kept.messages


def in_the_open(data: Data) -> list[Envelope]:
    return play(
        PlaintextSums(clients=SILOS, length=LENGTH), lambda silo: data.vectors[silo].astype(np.float64)
    )


def sealed(data: Data) -> list[Envelope]:
    agreement = SealedSums(
        clients=SILOS, length=LENGTH, decode=lambda given, _: np.frombuffer(given, dtype=np.float64)
    )
    return play(agreement, lambda silo: data.vectors[silo].astype(np.float64).tobytes())


def masked(data: Data, threshold: int | None = None) -> list[Envelope]:
    agreement = MaskedSumSpec(clients=SILOS, length=LENGTH, limit=LIMIT, threshold=threshold)
    return play(agreement, data.vectors.__getitem__)


@cache
def _holder(cipher: str, places: int) -> tuple[Any, Any]:
    """One key for both plays: that of ring-LWE is drawn by a library that takes no seed."""
    plan = _weighting_plan(places)
    if cipher == "rlwe":
        return RlweKeyHolder(plan), RlweEvaluator
    key = PaillierPrivateKey.generate_insecure(512)
    return PaillierKeyHolder(plan, key=key), partial(PaillierEvaluator, bits=512)


def _weighting_plan(places: int) -> WeightingPlan:
    plan = WeightingPlan(
        silos=SILOS,
        users=MINE.shape[1],
        length=LENGTH,
        largest_count=9,
        norm_limit=3 * LIMIT,
        noise_limit=LIMIT,
    )
    return replace(plan, renewed=True, places=places, chosen=1) if places else plan


def weighted(data: Data, cipher: str = "paillier", places: int = 0) -> list[Envelope]:
    plan, (holder, evaluator) = _weighting_plan(places), _holder(cipher, places)
    sizes = CipherSizes(key=1, number=1, weight=1, ciphertext=1, ciphertexts=1)
    cipher = SimpleNamespace(holder=lambda _: holder, evaluator=evaluator, sizes=lambda _: sizes)
    agreement = PrivateWeightingSpec(plan=plan, counts=data.counts, cipher=cipher)

    def give(silo: int) -> WeightedInputs:
        rows = np.tile(data.vectors[silo], (int((data.counts[silo] > 0).sum()), 1))
        return WeightedInputs(contributions=rows, noise=data.vectors[0] // 2)

    return play(agreement, give)


def partly_encrypted(data: Data) -> list[Envelope]:
    plan = PartialPlan(silos=SILOS, length=LENGTH, ratio=0.4, clear_limit=LIMIT, hidden_limit=LIMIT)

    def give(silo: int) -> PartialInputs:
        vector = data.vectors[silo].astype(np.float64)
        return PartialInputs(values=vector, message=vector)

    return play(PartialEncryptionSpec(plan=plan), give)


PROTOCOLS: dict[str, Callable[[Data], list[Envelope]]] = {
    "open": in_the_open,
    "sealed": sealed,
    "secure aggregation": masked,
    "recoverable aggregation": partial(masked, threshold=2),
    "private weighting": weighted,
    "private weighting, oblivious": partial(weighted, places=2),
}
if find_spec("tenseal"):
    PROTOCOLS["private weighting, ring-LWE"] = partial(weighted, cipher="rlwe")
    PROTOCOLS["partial encryption"] = partly_encrypted


def _named(message: Message, *, nothing: bool) -> dict[str, Any]:
    return {
        one.name: getattr(message, one.name)
        for one in fields(message)
        if (one.metadata["tells"] is Reveals.NOTHING and one.metadata["besides"] is None) == nothing
    }


def told_apart(one: list[Envelope], other: list[Envelope]) -> list[str]:
    """Where two plays differ although nothing that is declared tells them apart."""
    addresses = [
        [(type(e.message), e.round_id, e.sender, e.recipient) for e in play] for play in (one, other)
    ]
    if addresses[0] != addresses[1]:
        return ["order"]
    found = []
    for a, b in zip(one, other, strict=True):
        name = type(a.message).__name__
        mine, yours = (_named(e.message, nothing=True) for e in (a, b))
        found += [f"{name}.{key}" for key in mine if mine[key] != yours[key]]
        tells = {one.metadata[key] for one in fields(a.message) for key in ("tells", "besides")}
        if not tells & {Reveals.LENGTH, Reveals.PRESENCE} and len(a.encode()) != len(b.encode()):
            found.append(f"length of {name}")
    return found


@pytest.mark.parametrize("play", PROTOCOLS.values(), ids=PROTOCOLS)
def test_what_tells_nothing_is_the_same_for_neighbours(play: Callable[[Data], list[Envelope]]) -> None:
    one, other = (play(data) for data in neighbours())
    assert told_apart(one, other) == []
    differs = [a.encode() != b.encode() for a, b in zip(one, other, strict=True)]
    assert any(differs), "the neighbours gave the same messages: this has looked at nothing"


def test_a_private_number_in_a_field_that_tells_nothing_is_noticed() -> None:
    one, other = (masked(data) for data in neighbours())
    place = next(i for i, e in enumerate(other) if isinstance(e.message, RoundStart))
    spoilt = replace(other[place], message=RoundStart(cohort=(int(MINE[0, 2]),)))
    noticed = ["RoundStart.cohort", "length of RoundStart"]
    assert told_apart(one, [*other[:place], spoilt, *other[place + 1 :]]) == noticed
