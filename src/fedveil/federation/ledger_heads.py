"""Ledger heads known to other parties: they reveal a silo ledger that went back to an earlier state.

A head is the digest of a ledger's last line. Its 32 bytes look random, because the chain of digests includes a line
with a random number. A head reveals that a ledger has grown, but not by how much, for which run, or for which users.

Flow of heads:

1. Every silo signs its own head with each message. The coordinator notes the head on arrival, and returns the last
one
   to the silo with the next terms.
2. When silos join, each signs for this session the head of its own ledger, and the last known head of every peer. The
   coordinator relays to each silo the heads that concern it, ahead of the first round.
3. In every exchange of a round but the last, each silo signs its head with the request. All silos receive these heads
   ahead of the next exchange (:mod:`~fedveil.federation.transcript_binding`).

Claim: a silo whose ledger went back (restored, or a copy used elsewhere) takes part in no round of a session in which
a party with knowledge of a later head speaks, even if the coordinator forgets or hides its own knowledge. The peers'
heads are signed for the session, whose name covers all nonces. So they cannot be replayed or changed; they can be
left out only for silos that the protocol does not need. A restored coordinator causes no refusal: its own knowledge
of peers is never taken for theirs.

Conditions: as many silos as a round needs follow the protocol. One of these silos, or a coordinator that follows the
protocol, knows a later head. A round that needs a single silo checks no peer. Under every protection, silos receive
the heads after a round's charges before its sum can open: the heads of all silos whose vectors are summed. By then
the coordinator already has the clear part under partial encryption. Without a protection, silos receive heads only at
the start of a session. Only the coordinator knows of later charges; nobody notices if it goes back together with the
silo, or lies. Not claimed: evidence for an auditor, because known heads are stored without their signatures.

Enforced by :func:`check_heads` before a round is charged, and by :class:`SeenHeads` at every message. The coordinator
persists the heads of a message before it sends anything that follows from the message.
``tests/test_federation_ledger.py`` restores silos and coordinators, and lies.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from fedveil.crypto.keys import IdentityKey, PublicIdentity
from fedveil.errors import CryptoError, IntegrityError, RunFolderError
from fedveil.files import parse_json, reading, writing
from fedveil.line_log import LineLog
from fedveil.protocols.protocol import Roster
from fedveil.protocols.refusals import Code, RefusalError
from fedveil.protocols.session_messages import LedgerHeads, SignedHead

HEADS: Final = "heads.jsonl"
"""File of known heads: in the folder of a coordinator, and in the state folder of a silo."""

NONE: Final = bytes(32)
"""Head of a ledger without lines, or of a ledger whose head is unknown."""

_SIGNED_AS: Final = b"fedveil/3/head"
_KEPT: Final = 1000
"""Number of stored heads per silo."""


def sign_heads(identity: IdentityKey, session: bytes, heads: Sequence[bytes]) -> tuple[SignedHead, ...]:
    """Sign the ledger heads of all silos for one session, in the order of the silos.

    Args:
        identity: key of the silo that knows the heads.
        session: name of the session.
        heads: 32 bytes each; zeros if unknown.
    """
    return tuple((head, identity.sign(_statement(session, silo, head))) for silo, head in enumerate(heads))


def heads_for(reader: int, signed_heads: Mapping[int, Sequence[SignedHead]]) -> LedgerHeads:
    """Select the heads that one silo receives, from the heads that all silos signed when they joined.

    Args:
        reader: number of the receiving silo.
        signed_heads: signed heads of all ledgers, by the number of the signing silo.

    Returns:
        For each other silo: its signed head of the reader's ledger, and its signed head of its own ledger.
    """
    return LedgerHeads(
        silos=tuple(
            (silo, (heads[reader], heads[silo])) for silo, heads in signed_heads.items() if silo != reader
        )
    )


def check_heads(
    relayed: LedgerHeads, *, session: bytes, reader: int, roster: Roster, least: int
) -> tuple[dict[int, bytes], dict[int, bytes]]:
    """Verify relayed heads: what peers know of the reader's ledger, and the heads of their own ledgers.

    Args:
        relayed: the relayed heads.
        session: name of the session.
        reader: number of the reading silo.
        roster: identities of the silos.
        least: fewest other silos that must be present.

    Returns:
        Two mappings by silo number: known heads of the reader's ledger, and heads of the peers' ledgers.

    Raises:
        RefusalError: a signature does not hold, or too few silos are present.
    """
    for silo, (heard, own) in relayed.silos:
        is_peer = silo < len(roster) and silo != reader
        if not is_peer or not (
            _signed(roster[silo], session, reader, heard) and _signed(roster[silo], session, silo, own)
        ):
            raise RefusalError(Code.HEADS, silo)
    if len(relayed.silos) < least:
        raise RefusalError(Code.HEADS_FEW, len(relayed.silos), least)
    heads = {silo: (heard[0], own[0]) for silo, (heard, own) in relayed.silos}
    return {silo: head for silo, (head, _) in heads.items()}, {
        silo: head for silo, (_, head) in heads.items()
    }


def _statement(session: bytes, silo: int, head: bytes) -> bytes:
    return _SIGNED_AS + session + silo.to_bytes(2, "big") + head


def _signed(identity: PublicIdentity, session: bytes, silo: int, signed_head: SignedHead) -> bool:
    head, signature = signed_head
    try:
        identity.verify(_statement(session, silo, head), signature)
    except CryptoError:
        return False
    return True


class SeenHeads:
    """Persisted heads of every silo of a federation, in their order of arrival.

    Each head is one line, so that the cost of a new head does not depend on the history. The last 1000 of each silo
    are kept. When more than half of the lines are older, the file is rewritten without them.

    Args:
        path: the file, which may also hold heads of other federations.
        charter: SHA-256 of the federation's charter.
        n_kept: how many heads of each silo are kept.

    Raises:
        RunFolderError: the file is damaged, or of an earlier release.
    """

    def __init__(self, path: Path, charter: bytes, *, n_kept: int = _KEPT) -> None:
        self._path, self._charter, self._n_kept = path, charter.hex(), n_kept
        if (older := path.with_suffix(".json")).exists():
            raise RunFolderError(
                f"{older}: ledger heads stored by an earlier release, which this one does not read; if the file is "
                f"deleted, "
                "this party no longer notices ledgers that were restored to a state before it"
            )
        self._all: dict[tuple[str, str], list[str]] = {}
        self._durable = True
        self._log = LineLog(path, mode=0o600)
        lines = self._log.read().complete
        with reading(path, RunFolderError):
            for line in lines:
                federation, silo, head = parse_json(line, path, RunFolderError)
                if len(bytes.fromhex(head)) != len(NONE):
                    raise ValueError
                self._note(str(federation), str(silo), head)
        self._lines = len(lines)

    def last(self, silo: str) -> bytes:
        """Return the last known head of a silo; zeros if unknown."""
        heads = self._all.get((self._charter, silo))
        return bytes.fromhex(heads[-1]) if heads else NONE

    def hear(self, heads: dict[str, bytes]) -> None:
        """Note new heads, so that they survive a crash of the process; zeros are skipped.

        Raises:
            IntegrityError: a head equals one before the silo's last: its ledger went back. Nothing is noted.
            RunFolderError: the disk is full.
        """
        new = [(silo, head.hex()) for silo, head in heads.items() if head not in (NONE, self.last(silo))]
        for silo, head in new:
            if head in self._all.get((self._charter, silo), ()):
                raise IntegrityError(
                    f"silo {silo}: its ledger was restored to an earlier state: it ends with {head} again; "
                    "the silo must restore the ledger as it was last"
                )
        if new:
            self._write(new)
        for silo, head in new:  # after the write: an unwritten head must count as new next time
            self._note(self._charter, silo, head)

    def keep(self) -> None:
        """Fsync the noted heads, so that they survive a crash of the host.

        Raises:
            RunFolderError: the fsync fails.
        """
        if self._durable:
            return
        with writing(self._path, RunFolderError), self._path.open("rb") as stream:
            os.fsync(stream.fileno())
        self._durable = True

    def _note(self, charter: str, silo: str, head: str) -> None:
        heads = self._all.setdefault((charter, silo), [])
        heads.append(head)
        del heads[: -self._n_kept]

    def _write(self, new: Sequence[tuple[str, str]]) -> None:
        """Append lines; rewrite the file if most of its lines are too old."""
        lines = [_line(self._charter, *entry) for entry in new]
        with writing(self._path, RunFolderError):
            if self._lines <= 2 * sum(map(len, self._all.values())):
                self._durable = False
                self._log.append(*lines, flush=False)
                self._lines += len(lines)
            else:
                every = [*(_line(*key, head) for key, heads in self._all.items() for head in heads), *lines]
                self._log.replace(every)
                self._lines, self._durable = len(every), True


def _line(charter: str, silo: str, head: str) -> bytes:
    return json.dumps([charter, silo, head]).encode()
