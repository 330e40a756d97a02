"""The parts of a letter: what coordinator and silos say to one another. Fixed layouts, no pickle."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Final, TypeVar

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int64

from fedveil.crypto.key_agreement import KEY_BYTES
from fedveil.crypto.keys import SIGNATURE_BYTES
from fedveil.privacy.claims import Key, Reveals, Role, Sent
from fedveil.protocols.errors import ProtocolError
from fedveil.protocols.field_codecs import (
    BLOCK,
    REST,
    FieldCodec,
    fixed_bytes,
    number,
    pair,
    repeated,
    wire_field,
)
from fedveil.protocols.messages import KINDS, Message, by_silo, message
from fedveil.protocols.refusals import REFUSAL, Refusal
from fedveil.protocols.wire import Reader, Writer

DIGEST_BYTES: Final = 32
NONCE_BYTES: Final = 16

Nonces = tuple[tuple[int, bytes], ...]
"""A nonce of each of some silos, by their numbers."""

SignedHead = tuple[bytes, bytes]
"""The head of a ledger, and a silo's signature of it."""

Signatures = tuple[tuple[int, SignedHead], ...]
"""What each of some silos signed, by their numbers."""


class SessionMessage(Message):
    """One thing that a letter says by itself, in no :class:`~fedveil.protocols.messages.Envelope`."""


_P = TypeVar("_P", bound=SessionMessage)


def _text(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise ProtocolError("a text is not UTF-8") from None


def _array(layout: FieldCodec[bytes], sent: str, kept: type[np.number[Any]]) -> FieldCodec[np.ndarray]:
    """Return the layout of an array with one type of numbers on the wire and one in memory.

    Whole numbers that the wire's type does not hold are refused: sent modulo its range they would be others.
    """
    size = np.dtype(sent).itemsize
    whole = np.iinfo(sent) if np.issubdtype(np.dtype(sent), np.integer) else None

    def to(values: np.ndarray) -> bytes:
        if whole is not None and len(values) and not whole.min <= values.min() <= values.max() <= whole.max:
            raise ProtocolError(f"an array has a number that is not between {whole.min} and {whole.max}")
        return values.astype(sent).tobytes()

    def back(raw: bytes) -> np.ndarray:
        if len(raw) % size:
            raise ProtocolError(f"an array of {size}-byte numbers has {len(raw)} bytes")
        return np.frombuffer(raw, dtype=sent).astype(kept)

    return layout.mapped(to, back)


def _bits(drawn: Bool[np.ndarray, " users"]) -> bytes:
    return Writer().number(len(drawn), 4).rest(np.packbits(drawn).tobytes()).bytes()


def _drawn(raw: bytes) -> Bool[np.ndarray, " users"]:
    reader = Reader(raw)
    users = reader.number(4)
    bits = np.frombuffer(reader.fixed_bytes(-(-users // 8)), dtype=np.uint8)
    reader.finish()
    return np.unpackbits(bits, count=users).view(np.bool_)


_TEXT: Final = REST.mapped(str.encode, _text)
_COUNTS: Final = _array(REST, "<u4", np.int64)
_HEAD: Final = pair(fixed_bytes(DIGEST_BYTES), fixed_bytes(SIGNATURE_BYTES))
LARGEST_SCORE: Final = 2**32 - 1
"""The largest score of a user, the number of records or a power of it, that counts and totals can tell of."""


@message(61, "the terms of a run")
class Terms(SessionMessage):
    """What the coordinator proposes: the experiment, to the members of one federation.

    Attributes:
        membership: SHA-256 of the federation's membership (silos, keys, schema).
        head: the last head of the reader's ledger that the coordinator has heard of; zeros if it has heard of none.
        opened: the nonce under which the coordinator asked for those of the silos.
        nonces: of the silos that are asked, by number.
        experiment: the complete document as canonical JSON.
    """

    membership: bytes = wire_field(fixed_bytes(DIGEST_BYTES), Reveals.NOTHING)
    head: bytes = wire_field(fixed_bytes(DIGEST_BYTES), Reveals.NOTHING)
    opened: bytes = wire_field(fixed_bytes(NONCE_BYTES), Reveals.NOTHING)
    nonces: Nonces = wire_field(by_silo(fixed_bytes(NONCE_BYTES)), Reveals.NOTHING)
    experiment: str = wire_field(_TEXT, Reveals.NOTHING)

    @property
    def digest(self) -> bytes:
        """SHA-256 of what is proposed: the same for every silo and session of a run."""
        return hashlib.sha256(self.membership + self.experiment.encode()).digest()


_NUMBERS: Final = _array(BLOCK, "<f8", np.float64)
_SHORT: Final = BLOCK.mapped(str.encode, _text)
_REAL: Final = _array(fixed_bytes(8), "<f8", np.float64).mapped(
    lambda value: np.array([value]), lambda read: float(read[0])
)


@message(86, "which part of a run a session plays", eq=False)
class RunPart(SessionMessage):
    """What a session plays of a run that is more than rounds of training, and what was released before it.

    Attributes:
        name: of the release, such as "eval/1"; empty for the rounds of training.
        released: the releases of the run that were made before, in their order: the standard deviation of the noise,
            and the numbers. What follows from them (bounds, edges, coefficients) every silo computes by itself.
    """

    name: str = wire_field(_SHORT, Reveals.NOTHING)
    released: tuple[tuple[float, Float64[np.ndarray, " d"]], ...] = wire_field(
        repeated(pair(_REAL, _NUMBERS), size=2), Reveals.MODEL
    )


@message(62, "consent")
class Join(SessionMessage):
    """A silo takes part.

    Attributes:
        heads: for every silo, in their order, the last head that the sender has heard of its ledger, zeros if none;
            for the sender itself the head of its own. Each is signed for this session.
    """

    heads: tuple[SignedHead, ...] = wire_field(repeated(_HEAD, size=2), Reveals.NOTHING)


@message(81, "what the other silos have heard of the reader's ledger, and the heads of theirs")
class LedgerHeads(SessionMessage):
    """The coordinator hands on what silos said of ledgers when they joined.

    Attributes:
        silos: of other silos, by number: the last head that it has heard of the reader's ledger, and that of its own.
    """

    silos: tuple[tuple[int, tuple[SignedHead, SignedHead]], ...] = wire_field(
        by_silo(pair(_HEAD, _HEAD)), Reveals.NOTHING
    )


@message(70, "record counts", eq=False)
class UserCounts(SessionMessage):
    """How many records a silo has of every user, for weights by records in the open.

    Attributes:
        counts: (|U|,) n_su.
    """

    counts: Int64[np.ndarray, " users"] = wire_field(_COUNTS, Reveals.COUNTS)


@message(63, "a refusal")
class Declined(SessionMessage):
    """A silo does not take part, or not any longer.

    Attributes:
        why: a code, and numbers of the request or of the silo's policy.
    """

    why: Refusal = wire_field(REFUSAL, Reveals.NOTHING)


@message(76, "the question whether a silo is there")
class Hello(SessionMessage):
    """The coordinator asks for a nonce: a session is about to begin."""


@message(64, "word that a silo is there, in no such session")
class Ready(SessionMessage):
    """A silo answers so to whatever is not of its session; nothing has changed.

    Attributes:
        nonce: 16 bytes that the terms of its next session must bring.
        busy: seconds for which another run has it at most; 0: it is free.
    """

    nonce: bytes = wire_field(fixed_bytes(NONCE_BYTES), Reveals.NOTHING)
    busy: int = wire_field(number(4), Reveals.NOTHING)


@message(80, "word that a silo is at work")
class InProgress(SessionMessage):
    """A sign of life: the answer to this letter, or to an earlier one, is not ready; nothing has changed."""


@message(77, "word that a session is over")
class Goodbye(SessionMessage):
    """The coordinator asks nothing more in this session: the silo is free for another run."""


@message(65, "all silos' record counts together", eq=False)
class UserTotals(SessionMessage):
    """What every user holds over all silos, for weights by records.

    Attributes:
        counts: (|U|,) N_u.
    """

    counts: Int64[np.ndarray, " users"] = wire_field(_COUNTS, Reveals.COUNTS)


@message(66, "the task of a round")
class RoundTask(SessionMessage):
    """The work of one round; what a silo needs for it stands before it in the same letter.

    Attributes:
        round: counts from 1.
    """

    round: int = wire_field(number(4), Reveals.NOTHING)


@message(71, "the model", eq=False)
class GlobalModel(SessionMessage):
    """The model to train from.

    Attributes:
        values: (d,) float32.
    """

    values: Float32[np.ndarray, " d"] = wire_field(_array(REST, "<f4", np.float32), Reveals.MODEL)


@message(87, "the clip of a round")
class RoundClip(SessionMessage):
    """How long an update may be in the round, where that follows what was released before.

    Attributes:
        length: C_t, in the unit of the updates; the silos' messages are in units of it.
    """

    length: float = wire_field(_REAL, Reveals.MODEL)


@message(72, "who takes part", eq=False)
class SampledUsers(SessionMessage):
    """Which users take part in the round, for silos that hold several.

    Attributes:
        users: (|U|,) one bit each, after their number.
    """

    users: Bool[np.ndarray, " users"] = wire_field(REST.mapped(_bits, _drawn), Reveals.DRAWN)


@message(73, "whether the reader takes part")
class SampledFlag(SessionMessage):
    """Whether a client takes part in the round: its own bit and nobody else's.

    Attributes:
        drawn: whether it does.
    """

    drawn: bool = wire_field(number(1).mapped(int, bool), Reveals.OWN_DRAW)


@message(69, "a commitment to who takes part")
class SamplingCommitment(SessionMessage):
    """Who takes part in the round whose task follows, where the silos are not told: the same users, the same bytes.

    Attributes:
        commitment: SHA-256 of the users and of a random number that the coordinator keeps with them.
    """

    commitment: bytes = wire_field(fixed_bytes(DIGEST_BYTES), Reveals.DRAWN, Key.SERVER)


@message(68, "a message of a protocol")
class ProtocolMessage(SessionMessage):
    """A message of a protection's protocol; :class:`~fedveil.protocols.messages.Envelope` reads it."""

    message: bytes = wire_field(REST, Reveals.NOTHING)


@message(78, "a signature of what was asked")
class RequestSignature(SessionMessage):
    """A silo signs what it was asked, in every exchange of a round but the last: ahead of anything that opens a sum.

    Attributes:
        signed: the head of its ledger, and a signature of it with a digest that whoever was asked the same can compute.
            The ledger has charged the round, unless what the silo gives follows in a later exchange.
    """

    signed: SignedHead = wire_field(_HEAD, Reveals.NOTHING)


@message(79, "all silos' signatures of what was asked")
class RequestSignatures(SessionMessage):
    """The coordinator shows every silo that all were asked the same, and where their ledgers end.

    Attributes:
        signatures: what the silos signed, by number.
    """

    signatures: Signatures = wire_field(by_silo(_HEAD), Reveals.NOTHING)


@message(84, "a silo's signature")
class Attestation(SessionMessage):
    """A silo signs the round that it has ended, or the statement of a run, for whoever checks the run later.

    Attributes:
        signature: of what it was asked and answered for (:mod:`fedveil.federation.audit.run_record`); of no record.
    """

    signature: bytes = wire_field(fixed_bytes(SIGNATURE_BYTES), Reveals.NOTHING)


@message(85, "the end of a run")
class Finalize(SessionMessage):
    """The coordinator shows what the run states, for the silos to compute again and sign.

    Attributes:
        round: complete rounds.
        charges: how often the run's ledger was charged for a round.
        line: SHA-256 of the last line of the run's record.
        statement: the privacy statement as its file has it.
    """

    round: int = wire_field(number(4), Reveals.NOTHING)
    charges: int = wire_field(number(4), Reveals.NOTHING)
    line: bytes = wire_field(fixed_bytes(DIGEST_BYTES), Reveals.NOTHING)
    statement: str = wire_field(_TEXT, Reveals.NOTHING)


@message(74, "word that the next model is there")
class ModelStored(SessionMessage):
    """A silo has the next model, on its disk; the coordinator has none.

    Attributes:
        tag: 32 bytes that silos with the same model have in common, and that tell nothing of it.
    """

    tag: bytes = wire_field(fixed_bytes(KEY_BYTES), Reveals.MODEL, Key.SILOS)


PARTS: Final = {number: kind for number, kind in KINDS.items() if issubclass(kind, SessionMessage)}
"""Every kind of part by its number."""

SETUP: Final = (
    *(Sent(kind, Role.SILO) for kind in (Hello, Terms, LedgerHeads, RequestSignatures, Finalize, Goodbye)),
    *(Sent(kind, Role.SERVER) for kind in (Ready, Join, Declined, InProgress, RequestSignature, Attestation)),
)
"""What every run sends, whatever its method: how a session begins and ends, and who is there."""


def single_message(parts: Sequence[SessionMessage], kind: type[_P], silo: int) -> _P:
    """Return the one part of a kind that an answer must have.

    Raises:
        ProtocolError: none, or several.
    """
    found = [part for part in parts if isinstance(part, kind)]
    if len(found) != 1:
        raise ProtocolError(f"sent {len(found)} parts of kind {kind.__name__} instead of 1", silo=silo)
    return found[0]
