"""A silo's ledger over all runs, and what beside it shows that nothing of it is missing.

Claim: a ledger that was deleted, cut, or replaced by an earlier copy of itself is refused when the silo starts, as long
as ``head`` or one answer of a later time is there; and one that was replaced together with both, or copied and used
twice, is refused in the next session in which the coordinator, or a peer that the round needs, has heard a later head.

Conditions: somebody keeps a later head. Who replaces a ledger, ``head``, all answers, and what the others keep, is not
noticed; nor are charges of which no other silo has heard yet, where the coordinator goes back with it, or lies: silos
hear heads when a session begins, and in rounds under a protection before their sum can open (by then the coordinator
has what partial encryption leaves in clear). A membership with a smaller serial number than one under which the silo
was served in the same federation is refused, as long as the ledger is the last one. A silo that leaves a federation
takes its ledger to another; who is in two at once has two ledgers, and neither counts the other's charges.

Enforced by: ``head``, the digest of the last line, replaced durably after every line; the head at its charge in every
answer (:class:`~fedveil.federation.store.RoundRecord`); the coordinator's and the peers' words
(:mod:`~fedveil.federation.ledger_heads`). A line ``opened`` with a random number is written at every start, so that two
processes on copies make heads that do not contain one another; a line ``membership`` has the charter's digest and the
serial number, where that is larger than before. Tests: ``tests/test_federation_ledger.py`` deletes, cuts, restores from
every earlier moment, copies and uses both; ``tests/test_migration.py`` takes a ledger to another federation.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from fedveil.errors import IntegrityError, RunFolderError
from fedveil.federation.errors import RefusalError
from fedveil.federation.policy import Policy
from fedveil.federation.store import RecordStore
from fedveil.files import read_content, reading, replace_file, writing
from fedveil.privacy.events import Event
from fedveil.privacy.ledger import Budget, Entry, Ledger, NoteKind, Origin
from fedveil.protocols.refusals import Code

LEDGER: Final = "ledger.jsonl"
"""A silo's ledger over all runs, in its state folder."""

HEAD: Final = "head"
"""In its state folder: the digest of the ledger's last line, in hexadecimal."""

UNIT: Final = "user"


class SiloLedger:
    """A silo's ledger, open; it is refused where anything beside it remembers more than it has.

    Args:
        state: the silo's state folder.
        policy: what the silo takes part in; the ledger gets it, where it is another than before.
        answers: what the silo gave to its runs.
        charter: SHA-256 of the charter of the federation in which the silo is served.
        serial: of its membership; the ledger gets it, where it is larger than before in this federation.

    Raises:
        IntegrityError: the ledger is missing, was cut, or was replaced by an older one; another lies within; or the
            membership is older than one under which the silo was served.
        RunFolderError: it is damaged, or another process serves this silo.
    """

    def __init__(
        self, state: Path, policy: Policy, answers: RecordStore, *, charter: bytes, serial: int
    ) -> None:
        self._state = state
        if (inner := next(state.glob(f"*/{LEDGER}"), None)) is not None:
            raise IntegrityError(
                f"{inner.parent}: another state of a silo lies in this one, and its charges do not count here; put it "
                "in this one's place, or, if this one has charges too, take it away and lower the policy's epsilon by "
                "what it has spent"
            )
        self._ledger = Ledger(state / LEDGER, unit=UNIT)
        try:
            missing = _missing(state, self._ledger, answers)
            if missing:
                raise _refused(self._ledger, missing[0])
            known = self._serial(charter)
            if serial < known:
                raise IntegrityError(
                    f"the membership has serial {serial}, but this silo was served under {known}: put the later one "
                    "back"
                )
            if not (state / HEAD).exists():
                self._write_head()
            self._note("opened", os.urandom(16).hex())
            self._note_policy(policy)
            if serial > known:
                self._note("membership", f"{charter.hex()} {serial}")
        except BaseException:
            self._ledger.close()
            raise

    @property
    def ledger(self) -> Ledger:
        """All charges, to be read."""
        return self._ledger

    @property
    def charges(self) -> int:
        """How many rounds were charged."""
        return len(self._ledger.entries)

    @property
    def head(self) -> bytes:
        """Digest of the last line: 32 bytes."""
        return bytes.fromhex(self._ledger.head.digest)

    def _serial(self, charter: bytes) -> int:
        """Return the largest serial number under which the silo was served in the federation of a charter."""
        with reading(self._ledger.path, RunFolderError):
            served = (note.text.split() for note in self._ledger.notes if note.kind == "membership")
            return max((int(serial) for known, serial in served if known == charter.hex()), default=0)

    def names(self, terms: str) -> bool:
        """Return whether a charge was made under some terms, SHA-256 in hexadecimal."""
        return any(one.origin is not None and one.origin.terms == terms for one in self._ledger.entries)

    def charged_terms(self, run: str) -> set[str]:
        """Return the terms, SHA-256 in hexadecimal, under which parts of a run were charged; "" where none is told."""
        return _terms(one for one in self._ledger.entries if one.run.partition("/")[0] == run)

    def training_terms(self, run: str) -> set[str]:
        """Return those of them under which rounds of training were charged."""
        return _terms(one for one in self._ledger.entries if one.run == run)

    def charge(
        self, *, run: str, round: int, attempt: int, event: Event, budget: Budget | None, origin: Origin
    ) -> None:
        """Charge as :meth:`Ledger.charge`, and return once the new head is on disk too."""
        self._ledger.charge(run=run, round=round, attempt=attempt, event=event, budget=budget, origin=origin)
        self._write_head()

    def end_record(self, run: str) -> str | None:
        """Return the last line of the record, its digest in hexadecimal, with which the silo has signed a run's end.

        Args:
            run: its 16 bytes in hexadecimal.

        Raises:
            IntegrityError: a note of an end is none of this version's.
        """
        with reading(self._ledger.path, IntegrityError):
            ends = (note.text.split() for note in self._ledger.notes if note.kind == "ended")
            return next((line for ended, line in ends if ended == run), None)

    def end(self, run: str, line: str) -> None:
        """Note that the silo signs the end of a run, durably: no round of it is charged from here on.

        Raises:
            RefusalError: it has signed another end.
        """
        known = self.end_record(run)
        if known not in (None, line):
            raise RefusalError(Code.RUN_OVER)
        if known is None:
            self._note("ended", f"{run} {line}")

    def require(self, head: bytes) -> None:
        """Return if the ledger has ended with this head at some time; all zeros are the head before the first line.

        Raises:
            IntegrityError: it has not: somebody has heard of charges that are missing here.
        """
        if not self._ledger.contains(head.hex()):
            raise _refused(self._ledger, head.hex())

    def reopen(self, policy: Policy) -> None:
        """Open the ledger again, for a charge that failed closed it, under a policy that may be another than before.

        Raises:
            IntegrityError: another file was put in its place: it lacks what this process has charged.
        """
        self._ledger.close()
        known, found = self._ledger.head.digest, Ledger(self._state / LEDGER, unit=UNIT)
        if not found.contains(known):
            found.close()
            raise _refused(found, known)
        self._ledger = found
        self._note_policy(policy)

    def close(self) -> None:
        """Give the ledger back; closing twice is harmless."""
        self._ledger.close()

    def _note_policy(self, policy: Policy) -> None:
        """Write the policy down that holds from now on, where it is another than the last."""
        text = policy.model_dump_json()
        self.policy_digest = hashlib.sha256(text.encode()).hexdigest()
        if text not in [note.text for note in self._ledger.notes if note.kind == "policy"][-1:]:
            self._note("policy", text)

    def _note(self, kind: NoteKind, text: str) -> None:
        self._ledger.note(kind, text)
        self._write_head()

    def _write_head(self) -> None:
        _write_head(self._state, self._ledger)


def adopt(state: Path, reason: str, more: tuple[str, ...] = ()) -> int:
    """Have a silo go on with a ledger that misses lines: an answer for them is written to it, with the reason.

    What the missing charges cost is not in the ledger any more, and nothing puts it back: epsilon over all runs is
    then more than what the ledger says. Who adopts answers for that; every later export shows it.

    Args:
        state: the silo's state folder; the silo must not be served.
        reason: what happened, for an auditor.
        more: heads that others have told of and that are missing here, 64 hexadecimal digits each.

    Returns:
        How many missing heads are answered for.

    Raises:
        RunFolderError: the ledger is damaged, or in use; or nothing is missing.
    """
    with Ledger(state / LEDGER, unit=UNIT) as ledger:
        answers = RecordStore(state / "answers")
        missing = tuple(dict.fromkeys((*_missing(state, ledger, answers), *more)))
        missing = tuple(head for head in missing if head != _UNKNOWN and not ledger.contains(head))
        if not missing and (state / HEAD).exists():
            raise RunFolderError(
                f"{ledger.path}: nothing is known to be missing, so there is nothing to adopt"
            )
        ledger.note("adopted", reason, missing)
        _write_head(state, ledger)
        return len(missing)


def _missing(state: Path, ledger: Ledger, answers: RecordStore) -> list[str]:
    """Return the heads that something beside a ledger remembers and that it does not contain."""
    known = list(answers.heads())
    if (state / HEAD).exists():
        text = read_content(state / HEAD, IntegrityError, largest=64).decode(errors="replace")
        if len(text) != 64 or set(text) - set("0123456789abcdef"):
            raise IntegrityError(f"{state / HEAD}: damaged; restore it, or adopt the ledger as it is")
        known.append(text)
    elif ledger.notes:
        known.append(_UNKNOWN)  # it was there before the first note was written
    return [head for head in known if not ledger.contains(head)]


def _terms(entries: Iterable[Entry]) -> set[str]:
    return {"" if one.origin is None else one.origin.terms for one in entries}


_UNKNOWN: Final = "f" * 64
"""Stands for a head that was deleted."""


def _write_head(state: Path, ledger: Ledger) -> None:
    with writing(state / HEAD, RunFolderError, "; nothing was sent"):
        replace_file(state / HEAD, ledger.head.digest.encode(), mode=0o600)


def _refused(ledger: Ledger, head: str) -> IntegrityError:
    if head == _UNKNOWN:
        what = f"{HEAD}, which stood beside it, is gone"
    elif not ledger.entries:
        what = f"it has no charges, but one that ended with {head} is remembered"
    else:
        what = f"it has {len(ledger.entries)} charges, and does not contain the one that ended with {head}"
    return IntegrityError(
        f"{ledger.path}: lines are missing: {what}. What was spent is unknown, so this silo takes part in nothing: "
        "put back the ledger as it was last, or answer for what is missing by `fedveil silo ledger adopt`"
    )
