"""What the keys and signatures of a session are bound to: all that its silos were told, so that a lie opens no sum.

    T = H(membership | experiment)                          the same in every session of a run (Terms.digest);
        H(T | which part of the run, what was released)     where a session plays a part (Phase)
    S = H("fedveil/3/bound session" | session | T)          the setup: run, both sides' nonces, the silos asked
    A = H("fedveil/3/asked" | T' | model, clip, users, round)  T' = T, or H(T | totals) where silos were sent them
    X = H("fedveil/3/bound round" | S | A)                  a round
    E = H("fedveil/3/bound exchange" | X | place)           an exchange of the round, from 0

H is SHA-256 and every part is preceded by its kind and length. What a client is told of itself alone is no part of A.
A protocol adds the cohort that begins a round (:meth:`fedveil.protocols.parties.Party._bound`).

Claim: if the coordinator tells one silo, or some, another experiment, membership, model, clip, draw, commitment,
round or totals than others, no sum of their vectors opens: under masks, with recovery, private weighting, encryption;
where the round has a second exchange, no own mask, share or opened sum leaves a silo, and a silo that was told
something else is named. What was charged stays charged. And where it has one, all whose vectors are summed have shown
the others, before the last exchange, where their ledgers ended once they had given them. Conditions: at least two silos
follow the protocol. Enforced by :meth:`ClientProtocol.bind` before a message of the round is read, by
:func:`check_request_signatures`, and by :meth:`ClientProtocol.survivors`. Broken in
``tests/test_federation_transcript_binding.py``. Not bound: the blocks of encrypted weights, in which a coordinator of
private weighting can lie (docs/deployment.md says so).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from fedveil.crypto.errors import CryptoError
from fedveil.crypto.keys import IdentityKey
from fedveil.federation.errors import RefusalError
from fedveil.protocols.protocol import Roster
from fedveil.protocols.refusals import Code
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
from fedveil.protocols.wire import Writer

_OF_ALL: Final = (SamplingCommitment, SampledUsers, RoundClip, GlobalModel, RoundTask)
_SIGNED_AS: Final = b"fedveil/3/asked of all"


def terms_context(terms: Terms, phase: RunPart | None) -> bytes:
    """Return T of a letter that proposes a run, or a part of one."""
    return terms.digest if phase is None else hashlib.sha256(terms.digest + phase.encode()).digest()


def session_context(session: bytes, agreed: bytes) -> bytes:
    """Return S.

    Args:
        session: its name.
        agreed: T.
    """
    return hashlib.sha256(b"fedveil/3/bound session" + session + agreed).digest()


def with_totals(agreed: bytes, parts: Iterable[SessionMessage]) -> bytes:
    """Return T' after a letter: T bound to the totals in it, if there are any."""
    for part in parts:
        if isinstance(part, UserTotals):
            agreed = hashlib.sha256(agreed + part.encode()).digest()
    return agreed


def round_context(session: bytes, agreed: bytes, parts: Iterable[SessionMessage]) -> bytes:
    """Return X.

    Args:
        session: S.
        agreed: T'.
        parts: of the letter that begins the round.
    """
    writer = Writer()
    for part in sorted((part for part in parts if isinstance(part, _OF_ALL)), key=lambda part: part.kind):
        writer.number(part.kind, 1).block(part.encode())
    asked = hashlib.sha256(b"fedveil/3/asked" + agreed + writer.bytes()).digest()
    return hashlib.sha256(b"fedveil/3/bound round" + session + asked).digest()


def exchange_context(asked: bytes, place: int) -> bytes:
    """Return E, which no other exchange has: where a ledger ended in an earlier one is not shown again for this one.

    Args:
        asked: X.
        place: of the exchange in the round, from 0.
    """
    return hashlib.sha256(b"fedveil/3/bound exchange" + asked + place.to_bytes(2, "big")).digest()


def sign_request(identity: IdentityKey, context: bytes, head: bytes) -> SignedHead:
    """Return the head of a silo's ledger, signed with what it was asked: E."""
    return head, identity.sign(_SIGNED_AS + context + head)


def request_signatures(answers: Mapping[int, Iterable[SessionMessage]]) -> Signatures:
    """Return what the silos signed, of their answers."""
    return tuple(
        (silo, part.signed)
        for silo, parts in answers.items()
        for part in parts
        if isinstance(part, RequestSignature)
    )


def inconsistent_silos(roster: Roster, context: bytes, signatures: Signatures) -> Sequence[int]:
    """Return the silos that signed another E than this one, or nothing."""
    found = []
    for silo, (head, signature) in signatures:
        try:
            roster[silo].verify(_SIGNED_AS + context + head, signature)
        except (CryptoError, IndexError):
            found.append(silo)
    return found


def check_request_signatures(roster: Roster, context: bytes, signatures: Signatures, least: int) -> None:
    """Return if so many silos were asked the same as this one.

    Args:
        roster: identities of the silos.
        context: E of this silo, of the exchange before.
        signatures: of the silos, as the coordinator relays them.
        least: how many there must be.

    Raises:
        RefusalError: names the first silo that was asked something else, or says how many are missing.
    """
    others = inconsistent_silos(roster, context, signatures)
    if others:
        raise RefusalError(Code.ASKED_APART, others[0])
    if len(signatures) < least:
        raise RefusalError(Code.ASKED_FEW, len(signatures), least)
