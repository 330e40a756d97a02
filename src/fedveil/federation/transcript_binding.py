"""Hash contexts that bind a session's keys and signatures to the requests that its silos received.

    T = H(membership | experiment)                          the same in every session of a run (Terms.digest);
        H(T | which part of the run, what was released)     if a session plays a part (RunPart)
    S = H("fedveil/3/bound session" | session | T)          the setup: run, both sides' nonces, the silos asked
    A = H("fedveil/3/asked" | T' | model, clip, users, round)  T' = T, or H(T | totals) if silos received totals
    X = H("fedveil/3/bound round" | S | A)                  a round
    E = H("fedveil/3/bound exchange" | X | place)           an exchange of the round, from 0

H is SHA-256. The kind and the length precede every part of a message in A. A excludes data sent to one silo only. A
protocol adds the cohort that begins a round (:meth:`fedveil.protocols.parties.Party._bound`).

Claim: suppose the coordinator sends some silos another experiment, membership, model, clip, sample, commitment, round
or totals than the others. Then no sum of their vectors can be opened, whether it is protected by masks, masks with
recovery, private weighting or encryption. If the round has a second exchange, no self-mask, share or opened sum leaves
a silo, and the error names a silo that received another request. Charges that were made stay. If the round has a second
exchange, all silos whose vectors are summed have shown the others, before the last exchange, the heads of their ledgers
after their contribution. Conditions: at least two silos follow the protocol. Enforced by :meth:`ClientProtocol.bind`
before a message of the round is read, by :func:`check_request_signatures`, and by :meth:`ClientProtocol.survivors`.
Attacked in ``tests/test_federation_transcript_binding.py``. Not claimed: binding of the blocks of encrypted weights, in
which a coordinator of private weighting can lie (docs/deployment.md says so).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from fedveil.crypto.keys import IdentityKey
from fedveil.errors import CryptoError
from fedveil.protocols.field_codecs import Writer
from fedveil.protocols.protocol import Roster
from fedveil.protocols.refusals import Code, RefusalError
from fedveil.protocols.session_messages import (
    GlobalModel,
    RequestSignature,
    RoundClip,
    RoundTask,
    RunPart,
    SampledUsers,
    SamplingCommitment,
    SessionMessage,
    Signatures,
    SignedHead,
    Terms,
    UserTotals,
)

# The parts that all silos receive alike; SampledFlag is for one silo only.
_OF_ALL: Final = (SamplingCommitment, SampledUsers, RoundClip, GlobalModel, RoundTask)
_SIGNED_AS: Final = b"fedveil/3/asked of all"


def terms_context(terms: Terms, phase: RunPart | None) -> bytes:
    """Return T of the terms, or of the terms and the part of the run."""
    return terms.digest if phase is None else hashlib.sha256(terms.digest + phase.encode()).digest()


def session_context(session: bytes, terms_digest: bytes) -> bytes:
    """Return S, the context of a session.

    Args:
        session: name of the session.
        terms_digest: T.
    """
    return hashlib.sha256(b"fedveil/3/bound session" + session + terms_digest).digest()


def with_totals(terms_digest: bytes, parts: Iterable[SessionMessage]) -> bytes:
    """Return T' after a message: T bound to the totals in the message, or T unchanged without totals."""
    for part in parts:
        if isinstance(part, UserTotals):
            terms_digest = hashlib.sha256(terms_digest + part.encode()).digest()
    return terms_digest


def round_context(session: bytes, terms_digest: bytes, parts: Iterable[SessionMessage]) -> bytes:
    """Return X, the context of a round.

    Args:
        session: S.
        terms_digest: T'.
        parts: parts of the message that begins the round.
    """
    writer = Writer()
    # Sorted by kind, so that X does not depend on the order of the parts in the message.
    for part in sorted((part for part in parts if isinstance(part, _OF_ALL)), key=lambda part: part.kind):
        writer.number(part.kind, 1).block(part.encode())
    request_digest = hashlib.sha256(b"fedveil/3/asked" + terms_digest + writer.bytes()).digest()
    return hashlib.sha256(b"fedveil/3/bound round" + session + request_digest).digest()


def exchange_context(round_digest: bytes, position: int) -> bytes:
    """Return E, the context of one exchange of a round.

    E differs between exchanges, so a head signed in an earlier exchange cannot be replayed in this one.

    Args:
        round_digest: X.
        position: position of the exchange in the round, from 0.
    """
    return hashlib.sha256(b"fedveil/3/bound exchange" + round_digest + position.to_bytes(2, "big")).digest()


def sign_request(identity: IdentityKey, context: bytes, head: bytes) -> SignedHead:
    """Return the head of a silo's ledger, signed together with E."""
    return head, identity.sign(_SIGNED_AS + context + head)


def request_signatures(answers: Mapping[int, Iterable[SessionMessage]]) -> Signatures:
    """Collect the signatures of the requests from the silos' answers."""
    return tuple(
        (silo, part.signed)
        for silo, parts in answers.items()
        for part in parts
        if isinstance(part, RequestSignature)
    )


def inconsistent_silos(roster: Roster, context: bytes, signatures: Signatures) -> Sequence[int]:
    """Return the silos without a valid signature over this E."""
    silos = []
    for silo, (head, signature) in signatures:
        try:
            roster[silo].verify(_SIGNED_AS + context + head, signature)
        except (CryptoError, IndexError):
            silos.append(silo)
    return silos


def check_request_signatures(roster: Roster, context: bytes, signatures: Signatures, least: int) -> None:
    """Check that enough silos received the same request as this silo.

    Args:
        roster: identities of the silos.
        context: E of the previous exchange, as this silo computes it.
        signatures: signatures of the silos, relayed by the coordinator.
        least: fewest signatures.

    Raises:
        RefusalError: a silo received another request (names the first), or signatures are missing (gives the count).
    """
    inconsistent = inconsistent_silos(roster, context, signatures)
    if inconsistent:
        raise RefusalError(Code.ASKED_APART, inconsistent[0])
    if len(signatures) < least:
        raise RefusalError(Code.ASKED_FEW, len(signatures), least)
