"""The ledger of privacy charges, each on disk before its release.

A charge is written, flushed and fsynced before the release it pays for; a crash can therefore waste budget, but never
hide it. The file is JSON lines. Each line carries the SHA-256 digest of the line before it and its own, so that an
edited, lost or reordered line is found when the ledger is opened. Only an incomplete LAST line is forgiven: it is a
charge whose write a crash interrupted, for which nothing can have been released.

The chain cannot show that whole lines are missing at the end (an old copy restored, for instance). Whoever keeps a
checkpoint keeps the ledger's :class:`Head` in it and calls :meth:`Ledger.require_extends` when resuming.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import portalocker
from portalocker import LockFlags

from fedveil.errors import BudgetError, IntegrityError, PrivacyError, RunFolderError
from fedveil.files import CLOSED_IN_CHILDREN, LARGEST_FILE, append, check_file, read_content, sync_folder
from fedveil.privacy.accountant import Accountant
from fedveil.privacy.events import Adjacency, Event, atoms, compose
from fedveil.privacy.ledger_lines import (
    GENESIS,
    Entry,
    Head,
    Line,
    Note,
    NoteKind,
    Origin,
    now,
    parse_lines,
    today,
    write_line,
)
from fedveil.privacy.loss_distributions import PldAccountant


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The most that may be spent: ``epsilon`` at ``delta``, as counted by ``accountant``."""

    epsilon: float
    delta: float
    accountant: Accountant = field(default_factory=PldAccountant)

    def __post_init__(self) -> None:
        """Refuse a budget that is no pair of a non-negative epsilon and a probability."""
        if not self.epsilon >= 0:
            raise PrivacyError(f"budget epsilon = {self.epsilon}: must not be negative")
        if not 0 < self.delta < 1:
            raise PrivacyError(f"budget delta = {self.delta}: must be above 0 and below 1")


class Ledger:
    """An append-only, checksummed, exclusively locked record of charges for one unit and adjacency.

    >>> import tempfile
    >>> from fedveil.privacy.events import GaussianEvent
    >>> release = GaussianEvent(noise_multiplier=5.0)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with Ledger(Path(folder) / "ledger.jsonl", unit="user") as ledger:
    ...         entry = ledger.charge(run="demo", round=1, attempt=0, event=release)
    ...         ledger.spent()
    GaussianEvent(noise_multiplier=5.0)

    Args:
        path: the file; made (and its folder fsynced) if it is missing. The folder must exist.
        unit: unit of privacy of every charge (``record``, ``client``, ``user``).
        adjacency: neighbours that every charge's event is about.

    Raises:
        RunFolderError: the file is damaged (the line is named), of another version, unit or adjacency,
            locked by another process, or cannot be opened.
    """

    def __init__(self, path: Path, *, unit: str, adjacency: Adjacency = Adjacency.ADD_OR_REMOVE_ONE) -> None:
        self.path = path
        self.unit = unit
        self.adjacency = adjacency
        self._file = _open_locked(path)
        try:
            content = _read_all(self._file)
            lines, digests, complete = parse_lines(path, content)
            entries = [line for line in lines if isinstance(line, Entry)]
            for entry in entries:
                if (entry.unit, entry.adjacency) != (unit, adjacency):
                    raise RunFolderError(
                        f"{path}, line {entry.index + 1}: charges one {entry.unit} under "
                        f"{entry.adjacency.value}, but this ledger was opened for one {unit} under {adjacency.value}"
                    )
            self.recovered = _repair(self._file, content, complete)
        except OSError as error:
            self.close()
            raise RunFolderError(f"{path}: cannot read or repair the ledger: {error.strerror}") from error
        except RunFolderError:
            self.close()
            raise
        self._entries = entries
        self._notes = [line for line in lines if isinstance(line, Note)]
        self._digests = [GENESIS, *digests]
        self._attempts = {(entry.run, entry.round, entry.attempt) for entry in entries}
        self._spent: Counter[Event] = Counter()
        for entry in entries:
            self._spent.update(atoms(entry.event))

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All charges, oldest first."""
        return tuple(self._entries)

    @property
    def head(self) -> Head:
        """The ledger's present end, for a checkpoint."""
        return Head(count=len(self._digests) - 1, digest=self._digests[-1])

    @property
    def notes(self) -> tuple[Note, ...]:
        """All lines that charge nothing, oldest first."""
        return tuple(self._notes)

    def contains(self, digest: str) -> bool:
        """Whether the ledger has ended with this digest at some time, or somebody answers for what it does not have."""
        return digest in self._digests or any(digest in note.missing for note in self._notes)

    def position(self, digest: str) -> int:
        """Return how many lines the ledger had when it ended with this digest; -1 if it never has."""
        return self._digests.index(digest) if digest in self._digests else -1

    def spent(self) -> Event:
        """Return the composition of everything charged so far."""
        return compose(self._spent)

    def would_exceed(self, event: Event, budget: Budget) -> bool:
        """Whether charging ``event`` now would spend more than ``budget``; what has no number does."""
        spent = budget.accountant.epsilon(compose(self._spent + atoms(event)), budget.delta)
        return not spent <= budget.epsilon

    def charge(
        self,
        *,
        run: str,
        round: int,
        attempt: int,
        event: Event,
        budget: Budget | None = None,
        origin: Origin | None = None,
    ) -> Entry:
        """Write one charge and return once it is on disk; only then may the paid-for result be used.

        Args:
            run: name of the run (a silo keeps one ledger over all its runs).
            round: round number within the run.
            attempt: 0 for the first try; a round tried again has the next number, and is charged again.
            event: what the round will release.
            budget: refuse the charge, before anything is written, if it would spend more than this.
            origin: who asked for it, between institutions.

        Raises:
            BudgetError: the charge would exceed the budget.
            PrivacyError: this (run, round, attempt) is charged already.
            RunFolderError: the disk is full or the write failed; nothing may be released, and the ledger is closed.
        """
        self._check_open()
        if (run, round, attempt) in self._attempts:
            raise PrivacyError(
                f"{self.path}: run {run!r}, round {round}, attempt {attempt} is charged already; what is "
                "tried again must carry a new attempt number"
            )
        if budget is not None and self.would_exceed(event, budget):
            raise BudgetError(
                f"round {round}: would spend more than epsilon {budget.epsilon:g} at delta {budget.delta:g} "
                f"(accountant {budget.accountant.name}); {len(self._entries)} charges so far"
            )
        entry = Entry(
            index=self.head.count,
            time=today() if origin is None else now(),
            run=run,
            round=round,
            attempt=attempt,
            unit=self.unit,
            adjacency=self.adjacency,
            event=event,
            origin=origin,
        )
        self._write(entry, f"round {round} could not be charged")
        self._entries.append(entry)
        self._attempts.add((run, round, attempt))
        self._spent.update(atoms(event))
        return entry

    def note(self, kind: NoteKind, text: str, missing: tuple[str, ...] = ()) -> Note:
        """Write a line that charges nothing, and return once it is on disk.

        Raises:
            RunFolderError: a text that no reader would accept, and nothing is written; or the disk is full or the write
                failed, and the ledger is closed.
        """
        self._check_open()
        note = Note(index=self.head.count, time=now(), kind=kind, text=text, missing=missing)
        self._write(note, "a note could not be written")
        self._notes.append(note)
        return note

    def _check_open(self) -> None:
        if self._file < 0:
            raise RunFolderError(f"{self.path}: the ledger is closed; open it again")

    def _write(self, line: Line, failed: str) -> None:
        data, digest = write_line(line, self._digests[-1])
        try:
            append(self._file, data)
        except OSError as error:
            self.close()
            raise RunFolderError(
                f"{self.path}: {failed} ({error.strerror}), so nothing of it "
                "may be released; make room on the disk and resume"
            ) from error
        self._digests.append(digest)

    def require_extends(self, head: Head) -> None:
        """Refuse a ledger that does not contain everything a checkpoint had seen."""
        if head.count >= len(self._digests) or self._digests[head.count] != head.digest:
            raise IntegrityError(
                f"{self.path}: has {self.head.count} lines and does not continue the ledger of the checkpoint, which "
                f"had {head.count}; charges were lost or replaced, so what was spent is unknown"
            )

    def close(self) -> None:
        """Give the lock back; closing twice is harmless."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Ledger:
        """Return the open ledger."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the ledger."""
        self.close()


def read_entries(path: Path) -> tuple[Entry, ...]:
    """Return a ledger's verified charges without locking or repairing it (for reports).

    Raises:
        RunFolderError: the file is missing, damaged or of another version.
    """
    return tuple(line for line in read_lines(path) if isinstance(line, Entry))


def read_lines(path: Path) -> tuple[Line, ...]:
    """Return a ledger's verified lines, charges and notes, without locking or repairing it.

    Raises:
        RunFolderError: the file is missing, damaged or of another version.
    """
    return parse_lines(path, read_content(path, RunFolderError, largest=LARGEST_FILE))[0]


def read_head(path: Path) -> Head:
    """Return where a ledger ends, verified, without locking or repairing it.

    Raises:
        RunFolderError: the file is missing, damaged or of another version.
    """
    _, digests, _ = parse_lines(path, read_content(path, RunFolderError, largest=LARGEST_FILE))
    return Head(count=len(digests), digest=[GENESIS, *digests][-1])


# --- the file -----------------------------------------------------------------------------------------------


def _open_locked(path: Path) -> int:
    """Open (or make) the file for appending and lock it against every other process."""
    if path.exists():
        check_file(path, RunFolderError)
    try:
        existed = path.exists()
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | CLOSED_IN_CHILDREN, 0o644)
        if not existed:
            sync_folder(path.parent)
    except OSError as error:
        raise RunFolderError(f"{path}: cannot open the ledger: {error.strerror}") from error
    try:
        portalocker.lock(descriptor, LockFlags.EXCLUSIVE | LockFlags.NON_BLOCKING)
    except (OSError, portalocker.LockException) as error:
        os.close(descriptor)
        raise RunFolderError(
            f"{path}: another process is writing this ledger; wait for it, or stop it, before running again"
        ) from error
    return descriptor


def _read_all(descriptor: int) -> bytes:
    with os.fdopen(os.dup(descriptor), "rb") as stream:
        stream.seek(0)
        return stream.read()


def _repair(descriptor: int, content: bytes, complete: int) -> bool:
    """Cut a torn last line off, or give the last line its newline; return whether anything was repaired."""
    if complete < len(content):
        os.ftruncate(descriptor, complete)
        os.fsync(descriptor)
        return True
    if content and not content.endswith(b"\n"):
        append(descriptor, b"\n")
        return True
    return False
