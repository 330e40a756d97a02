"""A silo's ledger over all runs, and the files next to it that detect missing lines.

Claim: a ledger that was deleted, truncated, or replaced by an earlier copy is refused when the silo starts, as long
as ``head`` or one answer of a later time exists. A ledger that was replaced together with both, or copied and used
twice, is refused in the next session in which the coordinator, or a peer that the round needs, knows a later head.

Conditions: some party keeps a later head. Replacing a ledger, ``head``, all answers, and the heads of the other
parties is not detected. Nor are charges unknown to every other silo detected if the coordinator goes back too, or
lies. Silos receive heads when a session begins, and under a protection in rounds before their sum can open (by then
the coordinator has the clear part under partial encryption). A membership with a smaller serial number than an
earlier one of the same federation is refused, as long as the ledger is the last one. A silo that leaves a federation
takes its ledger to another. A silo in two federations at once has two ledgers, and neither counts the other's
charges.

Enforced by: ``head``, the digest of the last line, replaced durably after every line; the head in every answer at the
time of its charge (:class:`~fedveil.federation.store.RoundRecord`); the heads known to the coordinator and the peers
(:mod:`~fedveil.federation.ledger_heads`). Every start writes a line ``opened`` with a random number, so that two
processes on copies of one ledger have heads that the other copy does not contain. A line ``membership`` holds the
charter's digest and the serial number whenever that increases. Tests: ``tests/test_federation_ledger.py`` deletes,
truncates, restores from every earlier moment, copies and uses both; ``tests/test_migration.py`` takes a ledger to
another federation.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Final

from fedveil.errors import IntegrityError, RunFolderError
from fedveil.federation.policy import Policy
from fedveil.federation.store import RecordStore
from fedveil.files import read_content, reading, replace_file, writing
from fedveil.privacy.ledger import Entry, Ledger
from fedveil.protocols.refusals import Code, RefusalError

LEDGER: Final = "ledger.jsonl"
"""File in the silo's state folder: the ledger over all runs."""

HEAD: Final = "head"
"""File in the silo's state folder: digest of the ledger's last line, in hexadecimal."""

UNIT: Final = "user"


class SiloLedger:
    """An open ledger of a silo; refused if another file of the silo knows a head that the ledger lacks.

    Args:
        state: the silo's state folder.
        policy: the silo's policy; written to the ledger if it has changed.
        answers: the silo's persisted answers.
        charter: SHA-256 of the charter of the silo's federation.
        serial: serial number of the membership; written to the ledger if it has increased in this federation.

    Raises:
        IntegrityError: the ledger is missing, truncated, or replaced by an older one; the state folder contains
            another state folder; or the membership is older than an earlier one.
        RunFolderError: the ledger is damaged, or another process serves this silo.
    """

    def __init__(
        self, state: Path, policy: Policy, answers: RecordStore, *, charter: bytes, serial: int
    ) -> None:
        self._state = state
        if (inner := next(state.glob(f"*/{LEDGER}"), None)) is not None:
            raise IntegrityError(
                f"{inner.parent}: another state folder of a silo is inside this one, and its charges do not count "
                f"here; move it to "
                "this one's place, or, if this one has charges too, remove it and lower the policy's epsilon by "
                "what it has spent"
            )
        self._ledger = _open(state)
        try:
            missing = _missing(state, self._ledger, answers)
            if missing:
                raise _refused(self._ledger, missing[0])
            last_serial = self._serial(charter)
            if serial < last_serial:
                raise IntegrityError(
                    f"the membership has serial {serial}, but this silo was served under {last_serial}: put the later "
                    "one back"
                )
            # Before the first note: _missing takes a ledger with notes and without a head file for one whose head was
            # deleted.
            if not (state / HEAD).exists():
                _write_head(state, self._ledger.head.digest)
            self._ledger.note("opened", os.urandom(16).hex())
            self._note_policy(policy)
            if serial > last_serial:
                self._ledger.note("membership", f"{charter.hex()} {serial}")
        except BaseException:
            self._ledger.close()
            raise

    @property
    def ledger(self) -> Ledger:
        """The ledger with all charges; a charge or note returns when the new head is on disk too."""
        return self._ledger

    @property
    def charges(self) -> int:
        """Number of charged rounds."""
        return len(self._ledger.entries)

    @property
    def head(self) -> bytes:
        """Digest of the last line: 32 bytes."""
        return bytes.fromhex(self._ledger.head.digest)

    def _serial(self, charter: bytes) -> int:
        """Return the largest serial number noted for the federation of a charter; 0 if none."""
        with reading(self._ledger.path, RunFolderError):
            served = (note.text.split() for note in self._ledger.notes if note.kind == "membership")
            return max(
                (int(serial) for noted_charter, serial in served if noted_charter == charter.hex()), default=0
            )

    def names(self, terms: str) -> bool:
        """Return whether a charge was made under some terms, given as SHA-256 in hexadecimal."""
        return any(entry.origin is not None and entry.origin.terms == terms for entry in self._ledger.entries)

    def charged_terms(self, run: str) -> set[str]:
        """Return the terms of all charges of a run, as SHA-256 in hexadecimal; "" for charges without terms."""
        return _terms(entry for entry in self._ledger.entries if entry.run.partition("/")[0] == run)

    def training_terms(self, run: str) -> set[str]:
        """Return the terms of the charges for training rounds of a run."""
        return _terms(entry for entry in self._ledger.entries if entry.run == run)

    def end_record(self, run: str) -> str | None:
        """Return the digest of the record's last line that the silo signed at a run's end; None if not signed.

        Args:
            run: 16 bytes of the run, in hexadecimal.

        Raises:
            IntegrityError: a note of an end has another format.
        """
        with reading(self._ledger.path, IntegrityError):
            ends = (note.text.split() for note in self._ledger.notes if note.kind == "ended")
            return next((line for ended, line in ends if ended == run), None)

    def end(self, run: str, line: str) -> None:
        """Note durably that the silo signs the end of a run: no round of the run is charged afterwards.

        Raises:
            RefusalError: the silo has signed another end.
        """
        signed_line = self.end_record(run)
        if signed_line not in (None, line):
            raise RefusalError(Code.RUN_OVER)
        if signed_line is None:
            self._ledger.note("ended", f"{run} {line}")

    def require(self, head: bytes) -> None:
        """Check that the ledger contains a head; all zeros are the head before the first line.

        Raises:
            IntegrityError: the head is missing: another party knows charges that this ledger lacks.
        """
        if not self._ledger.contains(head.hex()):
            raise _refused(self._ledger, head.hex())

    def reopen(self, policy: Policy) -> None:
        """Open the ledger again under the current policy; a failed charge has closed it.

        Raises:
            IntegrityError: the file was replaced: it lacks charges of this process.
        """
        self._ledger.close()
        # The file may have been replaced while it was closed: it must contain the last line that this process wrote.
        head, ledger = self._ledger.head.digest, _open(self._state)
        if not ledger.contains(head):
            ledger.close()
            raise _refused(ledger, head)
        self._ledger = ledger
        self._note_policy(policy)

    def close(self) -> None:
        """Close the ledger; closing twice is harmless."""
        self._ledger.close()

    def _note_policy(self, policy: Policy) -> None:
        """Write the current policy to the ledger if it differs from the last one."""
        text = policy.model_dump_json()
        self.policy_digest = hashlib.sha256(text.encode()).hexdigest()
        if text not in [note.text for note in self._ledger.notes if note.kind == "policy"][-1:]:
            self._ledger.note("policy", text)


def adopt(state: Path, reason: str, more: tuple[str, ...] = ()) -> int:
    """Accept a ledger with missing lines: write a note with the reason and the missing heads.

    Not claimed: the cost of the missing charges. Epsilon over all runs is then larger than the ledger shows. The
    operator who adopts the ledger takes responsibility; every later export shows the note.

    Args:
        state: the silo's state folder; the silo must not be served.
        reason: explanation for an auditor.
        more: further missing heads, reported by other parties; 64 hexadecimal digits each.

    Returns:
        Number of missing heads that the note names.

    Raises:
        RunFolderError: the ledger is damaged or in use, or nothing is missing.
    """
    with _open(state) as ledger:
        answers = RecordStore(state / "answers")
        missing = tuple(dict.fromkeys((*_missing(state, ledger, answers), *more)))
        missing = tuple(head for head in missing if head != _UNKNOWN and not ledger.contains(head))
        if not missing and (state / HEAD).exists():
            raise RunFolderError(
                f"{ledger.path}: nothing is known to be missing, so there is nothing to adopt"
            )
        ledger.note("adopted", reason, missing)
        return len(missing)


def _missing(state: Path, ledger: Ledger, answers: RecordStore) -> list[str]:
    """Return the heads that other files remember and the ledger does not contain."""
    heads = list(answers.heads())
    if (state / HEAD).exists():
        text = read_content(state / HEAD, IntegrityError, largest=64).decode(errors="replace")
        if len(text) != 64 or set(text) - set("0123456789abcdef"):
            raise IntegrityError(f"{state / HEAD}: damaged; restore it, or adopt the ledger as it is")
        heads.append(text)
    elif ledger.notes:
        heads.append(_UNKNOWN)  # the head file is written before the first note, so it was deleted
    return [head for head in heads if not ledger.contains(head)]


def _terms(entries: Iterable[Entry]) -> set[str]:
    return {"" if entry.origin is None else entry.origin.terms for entry in entries}


_UNKNOWN: Final = "f" * 64
"""Placeholder for a head that was deleted."""


def _open(state: Path) -> Ledger:
    """Open the ledger of a state folder, which writes the head after every line.

    The line first, then the head: after a crash in between, the ledger still contains the older head. The reverse order
    would leave a head that the ledger lacks, and the silo would refuse its own state.
    """
    return Ledger(state / LEDGER, unit=UNIT, on_line=partial(_write_head, state))


def _write_head(state: Path, digest: str) -> None:
    with writing(state / HEAD, RunFolderError, "; nothing was sent"):
        replace_file(state / HEAD, digest.encode(), mode=0o600)


def _refused(ledger: Ledger, head: str) -> IntegrityError:
    if head == _UNKNOWN:
        detail = f"{HEAD}, which stood beside it, is gone"
    elif not ledger.entries:
        detail = f"it has no charges, but one that ended with {head} is remembered"
    else:
        detail = f"it has {len(ledger.entries)} charges, and does not contain the one that ended with {head}"
    return IntegrityError(
        f"{ledger.path}: lines are missing: {detail}. What was spent is unknown, so this silo takes part in nothing: "
        "put back the ledger as it was last, or answer for what is missing by `fedveil silo ledger adopt`"
    )
