"""Every decoder meets 20,000 messages, cut, stretched, altered or random: a typed error or a message, no more."""

import hashlib
import os

import numpy as np
import pytest
from gmpy2 import mpz

from fedveil.crypto.key_agreement import RoundId, SignedKey
from fedveil.crypto.keys import IdentityKey
from fedveil.errors import ProtocolError
from fedveil.protocols.field_codecs import (
    BLOCK,
    REST,
    Reader,
    Writer,
    integers,
    message_codec,
    number,
    pair,
    repeated,
)
from fedveil.protocols.messages import (
    KINDS,
    SERVER,
    Announcement,
    Directory,
    Envelope,
    MaskedVector,
    OwnMask,
    RevealRequest,
    RoundStart,
)
from fedveil.protocols.partial_encryption.plan import (
    Ballot,
    PartialSum,
    PartialUpdate,
    Partition,
    SealedKeys,
)
from fedveil.protocols.plaintext_sums import PlaintextVector
from fedveil.protocols.protocol import ClientContext
from fedveil.protocols.recoverable_aggregation import (
    AgreedSurvivors,
    RecoveryDirectory,
    RecoveryKeys,
    RelayedShares,
    RevealedShares,
    ShareBundle,
    SignedSurvivors,
    Survivors,
)
from fedveil.protocols.sealed_sums import SealedMessage, SealingKey
from fedveil.protocols.secure_aggregation import AggregationPlan, AggregationServer, AggregationSilo
from fedveil.protocols.session_messages import PARTS
from fedveil.protocols.weighting.plan import (
    BlindedHistogram,
    EncryptedSum,
    EncryptedWeights,
    Participants,
    SealedSeed,
    TransferAnswers,
    TransferOffer,
    TransferRequests,
    WeightingKey,
)

CASES = 20_000
MOMENT = RoundId(run=bytes(range(16)), round=1, attempt=0)
KEY = SignedKey(public=bytes(32), signature=bytes(64))
OTHER_KEY = SignedKey(public=bytes(range(32)), signature=bytes(range(64)))
EXAMPLES = [
    Announcement(key=KEY),
    Directory(keys=((0, KEY), (3, KEY))),
    RoundStart(cohort=(0, 1, 5)),
    MaskedVector(words=np.arange(9, dtype="<u2"), word_bytes=2),
    MaskedVector(words=np.arange(9, dtype="<u4"), word_bytes=3),
    MaskedVector(words=np.arange(9, dtype="<u4"), word_bytes=4),
    MaskedVector(words=np.arange(9, dtype="<u8"), word_bytes=8),
    RevealRequest(),
    OwnMask(seed=bytes(32)),
    RecoveryKeys(mask=KEY, seal=OTHER_KEY),
    RecoveryDirectory(
        keys=((0, RecoveryKeys(mask=KEY, seal=OTHER_KEY)), (3, RecoveryKeys(mask=OTHER_KEY, seal=KEY)))
    ),
    ShareBundle(shares=((0, b"abc"), (2, b"")), shown=bytes(32)),
    RelayedShares(shares=((1, b"abc"),)),
    Survivors(silos=(0, 2)),
    SignedSurvivors(signature=bytes(64)),
    AgreedSurvivors(signatures=((0, bytes(64)), (2, bytes(64)))),
    RevealedShares(shares=((0, bytes(33)), (1, bytes(33)))),
    WeightingKey(key=b"key"),
    SealedSeed(sealed=bytes(60)),
    BlindedHistogram(blocks=(b"a", b"bc")),
    Participants(present=(True, False, True)),
    EncryptedWeights(blocks=()),
    EncryptedSum(blocks=(b"x" * 40,)),
    TransferOffer(public=mpz(4), constants=(mpz(9), mpz(16))),
    TransferRequests(points=(mpz(4),)),
    TransferAnswers(blocks=(b"1", b"2", b"3")),
    SealedKeys(sealed=b"sealed"),
    Ballot(bitmap=b"\x00\x81"),
    Partition(bitmap=b"\x01\x05"),
    PartialUpdate(tag=bytes(32), fingerprint=bytes(8), size=3, clear=np.arange(-1, 2), hidden=b"x" * 9),
    PartialSum(tag=bytes(32), fingerprint=bytes(8), size=8, clear=np.arange(-1, 2), hidden=b""),
    PlaintextVector(values=np.arange(3.0)),
    SealingKey(public=bytes(range(32))),
    SealedMessage(sealed=b"sealed"),
]


def envelope(message):
    return Envelope(round_id=MOMENT, sender=SERVER, recipient=0, message=message).encode()


def equal(a, b):
    if isinstance(a, MaskedVector):
        return (a.word_bytes, a.words.dtype) == (b.word_bytes, b.words.dtype) and np.array_equal(
            a.words, b.words
        )
    if isinstance(a, PlaintextVector):
        return np.array_equal(a.values, b.values)
    if isinstance(a, PartialUpdate | PartialSum):
        same = (a.tag, a.fingerprint, a.size, a.hidden) == (b.tag, b.fingerprint, b.size, b.hidden)
        return same and np.array_equal(a.clear, b.clear)
    return a == b


def test_every_kind_has_an_example():
    others = set(
        PARTS.values()
    )  # tests/test_federation_silo.py has examples of what messages say by themselves
    assert {type(example) for example in EXAMPLES} == set(KINDS.values()) - others


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: type(example).__name__)
def test_messages_survive_their_bytes(example):
    decoded = Envelope.decode(envelope(example))
    assert (decoded.round_id, decoded.sender, decoded.recipient) == (MOMENT, SERVER, 0)
    assert equal(decoded.message, example)
    assert decoded.encode() == envelope(example)


def digest(example):
    return hashlib.sha256(envelope(example)).hexdigest()[:16]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: type(example).__name__)
def test_the_bytes_of_version_1_stay(example):
    """The order of a class's fields is the order of its bytes; another order needs another version."""
    name = type(example).__name__
    if isinstance(example, MaskedVector):
        name += str(example.word_bytes)
    assert digest(example) == BYTES[name]


BYTES = {
    "PlaintextVector": "355a604a8386e5ea",
    "SealingKey": "4184dedf6f320bec",
    "SealedMessage": "183fefe692d36474",
    "Announcement": "a6263196a0690f95",
    "Directory": "e4451928e5a8f2c1",
    "RoundStart": "11a5be15c8bf419c",
    "MaskedVector2": "d5db910e0b0b5116",
    "MaskedVector3": "65820e478fb6b627",
    "MaskedVector4": "ae6583f979429dee",
    "MaskedVector8": "d993a1ec5ab60b88",
    "RevealRequest": "ba509a6b2fc66bad",
    "OwnMask": "dbf33df342db9de2",
    "RecoveryKeys": "b3b5b208e438e0b9",
    "RecoveryDirectory": "d64401131c23d39b",
    "ShareBundle": "ab6b97aaabed5651",
    "RelayedShares": "00937770a8d3bf34",
    "Survivors": "b429c7759c373df5",
    "SignedSurvivors": "c9770951f7748f75",
    "AgreedSurvivors": "e01cbbed35477138",
    "RevealedShares": "3cf5e54b0c5bc903",
    "WeightingKey": "09dab17acff6135e",
    "SealedSeed": "679f3ca744dbb2b4",
    "BlindedHistogram": "80e08004d4808a9f",
    "Participants": "5e64fd173bf21893",
    "EncryptedWeights": "cfb29938d00a94d4",
    "EncryptedSum": "6aff286b1b1619ca",
    "TransferOffer": "47daa46f7c117a5e",
    "TransferRequests": "6969d687d39bcd7e",
    "TransferAnswers": "2617c0e394ab7955",
    "SealedKeys": "4b8162c6634c7655",
    "Ballot": "0a2f6bf7c2638070",
    "Partition": "65d6503f9dc4988f",
    "PartialUpdate": "ce2fd806263c024a",
    "PartialSum": "e7a3be1143e342a2",
}


def mutations(count, seed):
    """Yield altered messages: bytes changed, cut off, added, with right and wrong lengths, or random."""
    rng = np.random.default_rng(seed)
    originals = [envelope(example) for example in EXAMPLES]
    header = len(envelope(RevealRequest()))
    for _ in range(count):
        data = bytearray(originals[rng.integers(len(originals))])
        kind = rng.integers(6)
        if kind == 0:
            data[rng.integers(len(data))] ^= 1 << rng.integers(8)
        elif kind == 1:
            del data[rng.integers(len(data)) :]
        elif kind == 2:
            data += rng.bytes(int(rng.integers(1, 40)))
        elif kind == 3:
            data = bytearray(rng.bytes(int(rng.integers(0, 200))))
        else:
            body = bytearray(data[header:])
            for _ in range(int(rng.integers(1, 4))):
                if body:
                    body[rng.integers(len(body))] = int(rng.choice([0, 1, 127, 255, rng.integers(256)]))
            if kind == 5:
                body = body[: rng.integers(len(body) + 1)] + rng.bytes(int(rng.integers(0, 20)))
            data = data[:header] + body
            data[header - 8 : header] = len(body).to_bytes(8, "big")
        yield bytes(data)


def test_decoders_raise_typed_errors_alone():
    decoded = 0
    for data in mutations(CASES, seed=0):
        try:
            message = Envelope.decode(data)
        except ProtocolError:
            continue
        decoded += 1
        assert len(message.encode()) == len(data)
    assert CASES // 20 < decoded < CASES


def test_state_machines_raise_typed_errors_alone_and_reveal_nothing():
    identities = [IdentityKey.generate() for _ in range(2)]
    roster = tuple(identity.public for identity in identities)
    plan = AggregationPlan(clients=2, length=9, limit=5)
    silos = [
        AggregationSilo(plan, ClientContext(run=MOMENT.run, number=i, identity=key, roster=roster))
        for i, key in enumerate(identities)
    ]
    server = AggregationServer(plan, MOMENT.run)
    for silo in silos:
        for recipient, data in server.receive(silo.index, silo.announce()):
            silos[recipient].receive(data)
    for recipient, data in server.begin(MOMENT, (0, 1)):
        silos[recipient].receive(data)
    for data in mutations(3000, seed=1):
        for party in (silos[0].receive, lambda content: server.receive(0, content)):
            try:
                answers = party(data)
            except ProtocolError:
                continue
            assert not any(
                isinstance(Envelope.decode(a).message, OwnMask) for a in answers if isinstance(a, bytes)
            )


def test_announced_sizes_do_not_allocate_memory():
    for content in (b"\xff\xff\xff\xff", b"\x0f\xff\xff\xff" + bytes(8)):
        with pytest.raises(ProtocolError, match="announces"):
            BlindedHistogram.decode(content)
    with pytest.raises(ProtocolError, match="ends"):
        Reader(b"\x00" * 7 + b"\xff").block()


def test_a_count_is_bounded_by_the_least_bytes_of_its_items():
    layout = repeated(pair(number(2), repeated(pair(BLOCK, message_codec(RecoveryKeys)), size=1)), size=2)
    assert layout.least == 2
    item = pair(BLOCK, message_codec(RecoveryKeys))
    assert item.least == 8 + 2 * (32 + 64)
    for count, left in ((1, item.least - 1), (3, 3 * item.least - 1), (255, 0)):
        with pytest.raises(ProtocolError, match=f"announces {count} items and has {left} bytes"):
            repeated(item, size=1).read(Reader(bytes([count]) + bytes(left)))
    with pytest.raises(ProtocolError, match="announces 2 items"):
        layout.read(Reader(b"\x00\x02\x00\x00\x00"))


def test_a_layout_refuses_what_does_not_fit_it_and_reads_what_does():
    even = repeated(number(1), size=1).with_check(lambda values: sum(values) % 2 == 0, "the sum is odd")
    text = BLOCK.mapped(str.encode, bytes.decode)
    for layout, value, written in (
        (even, (3, 5), b"\x02\x03\x05"),
        (pair(text, REST), ("ab", b"rest"), bytes(7) + b"\x02abrest"),
        (integers(2), (mpz(1), mpz(256)), b"\x00\x00\x00\x02\x00\x00\x00\x02\x00\x01\x01\x00"),
    ):
        writer = Writer()
        layout.write(writer, value)
        assert writer.bytes() == written
        assert layout.read(Reader(written)) == value
    with pytest.raises(ProtocolError, match="the sum is odd"):
        even.read(Reader(b"\x01\x03"))


def test_fields_are_checked_when_written_too():
    with pytest.raises(ProtocolError, match="4 bytes was given 3"):
        Writer().fixed_bytes(b"abc", 4)
    with pytest.raises(ProtocolError, match="numbers of 3 bytes"):
        Reader(Writer().integers([mpz(1)], 4).bytes()).integers(3)
    with pytest.raises(ProtocolError, match="too many"):
        Reader(os.urandom(3)).finish()
    with pytest.raises(ProtocolError, match="ascend"):
        RoundStart.decode(RoundStart(cohort=(2, 1)).encode())
