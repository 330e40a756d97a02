"""Define the session messages between coordinator and silos, in fixed byte layouts without pickle."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Final, TypeVar

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int64

from fedveil.crypto.key_agreement import KEY_BYTES
from fedveil.crypto.keys import SIGNATURE_BYTES
from fedveil.errors import ProtocolError
from fedveil.privacy.claims import Key, Reveals, Role, Sent
from fedveil.protocols.field_codecs import (
    BLOCK,
    REST,
    FieldCodec,
    Reader,
    Writer,
    fixed_bytes,
    number,
    pair,
    repeated,
    wire_field,
)
from fedveil.protocols.messages import KINDS, Message, by_silo, message
from fedveil.protocols.refusals import REFUSAL, Refusal

DIGEST_BYTES: Final = 32
NONCE_BYTES: Final = 16

Nonces = tuple[tuple[int, bytes], ...]
"""Pairs of a silo's number and its nonce."""

SignedHead = tuple[bytes, bytes]
"""Ledger head (32 bytes) and a silo's signature over it (64 bytes)."""

Signatures = tuple[tuple[int, SignedHead], ...]
"""Pairs of a silo's number and the ledger head that it signed, with the signature."""


class SessionMessage(Message):
    """Base of the messages that are sent without an :class:`~fedveil.protocols.messages.Envelope`."""


_P = TypeVar("_P", bound=SessionMessage)


def _text(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise ProtocolError("a text is not UTF-8") from None


def _array(
    layout: FieldCodec[bytes], sent: str, memory_dtype: type[np.number[Any]]
) -> FieldCodec[np.ndarray]:
    """Return the codec of an array with one dtype on the wire (``sent``) and one in memory (``memory_dtype``).

    Integers outside the range of the wire's dtype raise a ProtocolError, because a cast would wrap them around.
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
        return np.frombuffer(raw, dtype=sent).astype(memory_dtype)

    return layout.mapped(to, back)


def _bits(mask: Bool[np.ndarray, " users"]) -> bytes:
    return Writer().number(len(mask), 4).rest(np.packbits(mask).tobytes()).bytes()


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
"""Largest score of a user (the number of records, or a power of it) that fits ``UserCounts`` and ``UserTotals``."""


@message(61, "the terms of a run")
class Terms(SessionMessage):
    """Experiment that the coordinator proposes to the members of one federation.

    Attributes:
        membership: SHA-256 of the federation's membership (silos, keys, schema).
        head: last ledger head of the recipient that the coordinator has received; zeros if it has received none.
        opened: nonce under which the coordinator requested the nonces of the silos.
        nonces: nonces of the silos that the coordinator invites, by number.
        experiment: the complete experiment document as canonical JSON.
    """

    membership: bytes = wire_field(fixed_bytes(DIGEST_BYTES), Reveals.NOTHING)
    head: bytes = wire_field(fixed_bytes(DIGEST_BYTES), Reveals.NOTHING)
    opened: bytes = wire_field(fixed_bytes(NONCE_BYTES), Reveals.NOTHING)
    nonces: Nonces = wire_field(by_silo(fixed_bytes(NONCE_BYTES)), Reveals.NOTHING)
    experiment: str = wire_field(_TEXT, Reveals.NOTHING)

    @property
    def digest(self) -> bytes:
        """SHA-256 of membership and experiment: the same for every silo and session of a run."""
        return hashlib.sha256(self.membership + self.experiment.encode()).digest()


_NUMBERS: Final = _array(BLOCK, "<f8", np.float64)
_SHORT: Final = BLOCK.mapped(str.encode, _text)
_REAL: Final = _array(fixed_bytes(8), "<f8", np.float64).mapped(
    lambda value: np.array([value]), lambda read: float(read[0])
)


@message(86, "which part of a run a session plays", eq=False)
class RunPart(SessionMessage):
    """Part of a run that the session plays (a release or the training rounds), with all earlier releases.

    Attributes:
        name: name of the release, such as "eval/1"; empty for the training rounds.
        released: earlier releases of the run, in their order: the standard deviation of the noise, and the (d,)
            released numbers. Every silo computes the values that follow from them (bounds, edges, coefficients).
    """

    name: str = wire_field(_SHORT, Reveals.NOTHING)
    released: tuple[tuple[float, Float64[np.ndarray, " d"]], ...] = wire_field(
        repeated(pair(_REAL, _NUMBERS), size=2), Reveals.MODEL
    )


@message(62, "consent")
class Join(SessionMessage):
    """Consent of a silo to take part.

    Attributes:
        heads: for every silo, in the order of their numbers, the last ledger head of that silo that the sender has
            received (zeros if none). For the sender itself: the current head of its ledger. The sender signs each
            head for this session.
    """

    heads: tuple[SignedHead, ...] = wire_field(repeated(_HEAD, size=2), Reveals.NOTHING)


@message(81, "what the other silos have heard of the reader's ledger, and the heads of theirs")
class LedgerHeads(SessionMessage):
    """Ledger heads from the ``Join`` messages of the other silos, relayed by the coordinator.

    Attributes:
        silos: for each other silo, by number: the last ledger head of the recipient that this silo has received, and
            this silo's own ledger head.
    """

    silos: tuple[tuple[int, tuple[SignedHead, SignedHead]], ...] = wire_field(
        by_silo(pair(_HEAD, _HEAD)), Reveals.NOTHING
    )


@message(70, "record counts", eq=False)
class UserCounts(SessionMessage):
    """Number of records of every user in one silo, for weights by records in the clear.

    Attributes:
        counts: (|U|,) int64, n_{s,u}.
    """

    counts: Int64[np.ndarray, " users"] = wire_field(_COUNTS, Reveals.COUNTS)


@message(63, "a refusal")
class Declined(SessionMessage):
    """Refusal of a silo to take part, or to continue.

    Attributes:
        why: code of the reason, with numbers from the request or from the silo's policy.
    """

    why: Refusal = wire_field(REFUSAL, Reveals.NOTHING)


@message(76, "the question whether a silo is there")
class Hello(SessionMessage):
    """Request of the coordinator for a silo's nonce, before a session begins."""


@message(64, "word that a silo is there, in no such session")
class Ready(SessionMessage):
    """Reply to a message outside the current session; the silo's state does not change.

    Attributes:
        nonce: 16 bytes that the ``Terms`` of the silo's next session must contain.
        busy: most seconds for which another run occupies the silo; 0 if the silo is free.
    """

    nonce: bytes = wire_field(fixed_bytes(NONCE_BYTES), Reveals.NOTHING)
    busy: int = wire_field(number(4), Reveals.NOTHING)


@message(80, "word that a silo is at work")
class InProgress(SessionMessage):
    """Keep-alive of a silo whose answer to an earlier message is not ready; no state changes."""


@message(77, "word that a session is over")
class Goodbye(SessionMessage):
    """End of the session: the coordinator sends no further request, and the silo is free for another run."""


@message(65, "all silos' record counts together", eq=False)
class UserTotals(SessionMessage):
    """Number of records of every user over all silos, for weights by records.

    Attributes:
        counts: (|U|,) int64, N_u.
    """

    counts: Int64[np.ndarray, " users"] = wire_field(_COUNTS, Reveals.COUNTS)


@message(66, "the task of a round")
class RoundTask(SessionMessage):
    """Task of one round; the same transmission carries the task's inputs ahead of it.

    Attributes:
        round: number of the round, from 1.
    """

    round: int = wire_field(number(4), Reveals.NOTHING)


@message(71, "the model", eq=False)
class GlobalModel(SessionMessage):
    """Model from which the round trains.

    Attributes:
        values: (d,) float32 parameters.
    """

    values: Float32[np.ndarray, " d"] = wire_field(_array(REST, "<f4", np.float32), Reveals.MODEL)


@message(87, "the clip of a round")
class RoundClip(SessionMessage):
    """Clip of a round, sent if it follows from earlier releases.

    Attributes:
        length: C_t, the largest l2 norm of an update, in the unit of the updates; the silos' messages are in units of
            C_t.
    """

    length: float = wire_field(_REAL, Reveals.MODEL)


@message(72, "who takes part", eq=False)
class SampledUsers(SessionMessage):
    """Sampled users of the round, for silos that hold several users.

    Attributes:
        users: (|U|,) bool; on the wire |U| in 4 bytes, then one bit per user.
    """

    users: Bool[np.ndarray, " users"] = wire_field(REST.mapped(_bits, _drawn), Reveals.DRAWN)


@message(73, "whether the reader takes part")
class SampledFlag(SessionMessage):
    """Sampling bit of the recipient in the round; it carries no other client's bit.

    Attributes:
        drawn: True if the recipient takes part.
    """

    drawn: bool = wire_field(number(1).mapped(int, bool), Reveals.OWN_DRAW)


@message(69, "a commitment to who takes part")
class SamplingCommitment(SessionMessage):
    """Commitment to the sampled users of the next task, for silos that do not receive the sample itself.

    The coordinator sends the same bytes for the same users.

    Attributes:
        commitment: SHA-256 of the sampled users and of a random number that the coordinator stores with them.
    """

    commitment: bytes = wire_field(fixed_bytes(DIGEST_BYTES), Reveals.DRAWN, Key.SERVER)


@message(68, "a message of a protocol")
class ProtocolMessage(SessionMessage):
    """Carrier of one protocol message, as an :class:`~fedveil.protocols.messages.Envelope`."""

    message: bytes = wire_field(REST, Reveals.NOTHING)


@message(78, "a signature of what was asked")
class RequestSignature(SessionMessage):
    """Signature of a silo over the request that it received.

    The silo sends it in every exchange of a round except the last, so before any message that opens a sum.

    Attributes:
        signed: the silo's ledger head, and a signature over the head and a digest of the request. Every silo that
            received the same request can compute the digest. The ledger has charged the round already, unless the
            silo sends its input in a later exchange.
    """

    signed: SignedHead = wire_field(_HEAD, Reveals.NOTHING)


@message(79, "all silos' signatures of what was asked")
class RequestSignatures(SessionMessage):
    """Request signatures of all silos, relayed by the coordinator.

    They show every silo that all silos received the same request, and they carry the silos' ledger heads.

    Attributes:
        signatures: signed ledger heads by the number of the silo.
    """

    signatures: Signatures = wire_field(by_silo(_HEAD), Reveals.NOTHING)


@message(84, "a silo's signature")
class Attestation(SessionMessage):
    """Signature of a silo over a finished round or the statement of a run, for a later audit.

    Attributes:
        signature: signature over the request and the answered round (:mod:`fedveil.federation.audit.run_record`); it
            covers no private record.
    """

    signature: bytes = wire_field(fixed_bytes(SIGNATURE_BYTES), Reveals.NOTHING)


@message(85, "the end of a run")
class Finalize(SessionMessage):
    """Privacy statement of the run, which the silos recompute and sign.

    Attributes:
        round: number of complete rounds.
        charges: number of charges for rounds in the run's ledger.
        line: SHA-256 of the last line of the run's record.
        statement: text of the privacy statement, exactly as in its file.
    """

    round: int = wire_field(number(4), Reveals.NOTHING)
    charges: int = wire_field(number(4), Reveals.NOTHING)
    line: bytes = wire_field(fixed_bytes(DIGEST_BYTES), Reveals.NOTHING)
    statement: str = wire_field(_TEXT, Reveals.NOTHING)


@message(74, "word that the next model is there")
class ModelStored(SessionMessage):
    """Notice that a silo has persisted the next model, in a protocol whose coordinator learns no model.

    Attributes:
        tag: 32 bytes, equal for silos with the same model; they disclose nothing else about the model.
    """

    tag: bytes = wire_field(fixed_bytes(KEY_BYTES), Reveals.MODEL, Key.SILOS)


# At the end of the module, where all session messages are registered in KINDS.
PARTS: Final = {number: kind for number, kind in KINDS.items() if issubclass(kind, SessionMessage)}
"""Every kind of session message by its number."""

SETUP: Final = (
    *(Sent(kind, Role.SILO) for kind in (Hello, Terms, LedgerHeads, RequestSignatures, Finalize, Goodbye)),
    *(Sent(kind, Role.SERVER) for kind in (Ready, Join, Declined, InProgress, RequestSignature, Attestation)),
)
"""Messages that every run sends, whatever its method: begin and end of a session, and the silos' state."""


def single_message(parts: Sequence[SessionMessage], kind: type[_P], silo: int) -> _P:
    """Return the single message of a kind that an answer must contain.

    Raises:
        ProtocolError: the answer contains no message of the kind, or several.
    """
    messages = [part for part in parts if isinstance(part, kind)]
    if len(messages) != 1:
        raise ProtocolError(f"sent {len(messages)} parts of kind {kind.__name__} instead of 1", silo=silo)
    return messages[0]
