"""The ends of the silos' ledgers as others have heard of them, so that no ledger goes back unnoticed.

A head is the digest of a ledger's last line: 32 random-looking bytes, for every line holds the digest of a line with a
random number. It tells that a ledger has grown, and nothing of how much, for what, or for whom. Every silo signs its
own with each letter; the coordinator notes it when the letter arrives, and tells the last to the silo with the next
terms. When silos join, each signs for this session the head of its own ledger, and for every peer the last head that it
has heard of it; the coordinator hands on to each what concerns it, ahead of the first round. In every exchange of a
round but the last each silo signs its head with what it was asked, and all hear it ahead of the next
(:mod:`~fedveil.federation.transcript_binding`).

Claim: a silo whose ledger went back (restored, or a copy of it used elsewhere) takes part in no round of a session in
which somebody who heard a later head speaks, though the coordinator forgets or hides what it knows: peers' words are
signed for the session, which the nonces of all name, so none can be replayed, changed or, but for those that the
protocol can do without, left out. A coordinator that was itself restored is no reason to refuse: what it says of peers
is never taken for theirs.

Conditions: as many silos as a round needs follow the protocol, and the coordinator, if it follows it, or one of those
silos, has heard a later head; a round that needs one silo alone hears no peer. Under every protection silos hear of a
round's charges before its sum can open: of all whose vectors it is over. What partial encryption leaves in clear the
coordinator has by then. In the open they hear heads only when a session begins. Of what was charged since then the
coordinator alone can tell, and nobody notices if it goes back together with the silo, or lies. What silos have heard is
kept without its signatures: it is no evidence for an auditor.

Enforced by :func:`check_heads` before a round is charged, and by :class:`SeenHeads` at every letter; what the
coordinator heard is on its disk before it sends anything that follows from a letter.
``tests/test_federation_ledger.py`` restores silos and coordinators, and lies.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from fedveil.crypto.errors import CryptoError
from fedveil.crypto.keys import IdentityKey, PublicIdentity
from fedveil.errors import IntegrityError, RunFolderError
from fedveil.federation.errors import RefusalError
from fedveil.files import LARGEST_FILE, append_file, parse_json, read_content, reading, replace_file, writing
from fedveil.protocols.protocol import Roster
from fedveil.protocols.refusals import Code
from fedveil.protocols.session_messages import LedgerHeads, SignedHead

HEADS: Final = "heads.jsonl"
"""The file: of a coordinator in its folder, of a silo in its state folder."""

NONE: Final = bytes(32)
"""The head of a ledger without lines, or of one that nobody has heard of."""

_SIGNED_AS: Final = b"fedveil/3/head"
_KEPT: Final = 1000
"""How many heads of one silo are remembered."""


def sign_heads(identity: IdentityKey, session: bytes, heads: Sequence[bytes]) -> tuple[SignedHead, ...]:
    """Return heads of all silos' ledgers, in the silos' order, each signed for one session.

    Args:
        identity: of who has heard them.
        session: its name.
        heads: zeros where none was heard.
    """
    return tuple((head, identity.sign(_statement(session, silo, head))) for silo, head in enumerate(heads))


def heads_for(reader: int, said: Mapping[int, Sequence[SignedHead]]) -> LedgerHeads:
    """Return what a silo is told, of what all silos said when they joined."""
    return LedgerHeads(
        silos=tuple((silo, (heads[reader], heads[silo])) for silo, heads in said.items() if silo != reader)
    )


def check_heads(
    told: LedgerHeads, *, session: bytes, reader: int, roster: Roster, least: int
) -> tuple[dict[int, bytes], dict[int, bytes]]:
    """Return the heads that others have heard of the reader's ledger, and those of their own, by their numbers.

    Args:
        told: to the reader.
        session: its name.
        reader: a silo's number.
        roster: identities of the silos.
        least: how many others must speak.

    Raises:
        RefusalError: one did not sign what is said, or too few speak.
    """
    for silo, (heard, own) in told.silos:
        known = silo < len(roster) and silo != reader
        if not known or not (
            _signed(roster[silo], session, reader, heard) and _signed(roster[silo], session, silo, own)
        ):
            raise RefusalError(Code.HEADS, silo)
    if len(told.silos) < least:
        raise RefusalError(Code.HEADS_FEW, len(told.silos), least)
    found = {silo: (heard[0], own[0]) for silo, (heard, own) in told.silos}
    return {silo: one for silo, (one, _) in found.items()}, {silo: one for silo, (_, one) in found.items()}


def _statement(session: bytes, silo: int, head: bytes) -> bytes:
    return _SIGNED_AS + session + silo.to_bytes(2, "big") + head


def _signed(by: PublicIdentity, session: bytes, silo: int, said: SignedHead) -> bool:
    head, signature = said
    try:
        by.verify(_statement(session, silo, head), signature)
    except CryptoError:
        return False
    return True


class SeenHeads:
    """The heads that were heard of every silo of a federation, in the order in which they were heard, on disk.

    Each is a line of its own, so that to note one costs the same whatever was noted before. Of every silo the last 1000
    are held; once more than half of the lines are older, the file is written anew without them.

    Args:
        path: the file, which may have those of other federations too.
        charter: SHA-256 of the federation's charter.

    Raises:
        RunFolderError: it is damaged, or of an earlier release.
    """

    def __init__(self, path: Path, charter: bytes) -> None:
        self._path, self._charter = path, charter.hex()
        if (older := path.with_suffix(".json")).exists():
            raise RunFolderError(
                f"{older}: heads that an earlier release has heard, which this one does not read; once the file is "
                "deleted, ledgers that go back to before it are not noticed by this party"
            )
        self._all: dict[tuple[str, str], list[str]] = {}
        self._durable = True
        content = read_content(path, RunFolderError, largest=LARGEST_FILE) if path.exists() else b""
        *lines, torn = content.split(b"\n")
        with reading(path, RunFolderError):
            for line in lines:
                of, silo, head = parse_json(line, path, RunFolderError)
                if len(bytes.fromhex(head)) != len(NONE):
                    raise ValueError
                self._note(str(of), str(silo), head)
        self._lines, self._whole = len(lines), not torn

    def last(self, silo: str) -> bytes:
        """Return the last head that was heard of a silo; zeros if none was."""
        seen = self._all.get((self._charter, silo))
        return bytes.fromhex(seen[-1]) if seen else NONE

    def hear(self, heads: dict[str, bytes]) -> None:
        """Note heads, so that the end of this process forgets none; zeros are passed over.

        Raises:
            IntegrityError: one was heard before another of the same silo: its ledger has gone back. Nothing is noted.
            RunFolderError: the disk is full.
        """
        new = [(silo, head.hex()) for silo, head in heads.items() if head not in (NONE, self.last(silo))]
        for silo, head in new:
            if head in self._all.get((self._charter, silo), ()):
                raise IntegrityError(
                    f"silo {silo}: its ledger has gone back to where it was before: it ends with {head} again; "
                    "the silo must put back the ledger as it was last"
                )
        if new:
            self._write(new)
        for silo, head in new:  # only now: what could not be written is heard again
            self._note(self._charter, silo, head)

    def keep(self) -> None:
        """Have all that was heard on the disk, whatever becomes of this host.

        Raises:
            RunFolderError: it cannot be.
        """
        if self._durable:
            return
        with writing(self._path, RunFolderError), self._path.open("rb") as stream:
            os.fsync(stream.fileno())
        self._durable = True

    def _note(self, charter: str, silo: str, head: str) -> None:
        seen = self._all.setdefault((charter, silo), [])
        seen.append(head)
        del seen[:-_KEPT]

    def _write(self, new: Sequence[tuple[str, str]]) -> None:
        """Add lines; or write all anew, the first time, after a write that failed, and when most are too old."""
        held = sum(map(len, self._all.values()))
        with writing(self._path, RunFolderError):
            if self._whole and self._lines <= 2 * held and self._path.exists():
                self._whole = self._durable = False  # until all is written
                append_file(self._path, b"".join(_line(self._charter, *one) for one in new), flush=False)
                self._lines += len(new)
            else:
                every = [_line(*key, head) for key, seen in self._all.items() for head in seen]
                every += [_line(self._charter, *one) for one in new]
                replace_file(self._path, b"".join(every), mode=0o600)
                self._lines, self._durable = len(every), True
            self._whole = True


def _line(charter: str, silo: str, head: str) -> bytes:
    return json.dumps([charter, silo, head]).encode() + b"\n"
