"""What has been spent, on disk before it is released.

A charge is written, flushed and fsynced before the release it pays for; a crash can therefore waste budget,
but never hide it. The file is JSON lines. Each line carries the SHA-256 digest of the line before it and
its own, so that an edited, lost or reordered line is found when the ledger is opened. Only an incomplete
LAST line is forgiven: it is a charge whose write a crash interrupted, for which nothing can have been
released.

The chain cannot show that whole lines are missing at the end (an old copy restored, for instance). Whoever
keeps a checkpoint keeps the ledger's :class:`Head` in it and calls :meth:`Ledger.require_extends` when
resuming.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections import Counter
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import TracebackType
from typing import Annotated, Final

from pydantic import Field, Strict, TypeAdapter, ValidationError, with_config

from fedveil.errors import BudgetError, PrivacyError, RunFolderError
from fedveil.files import LARGEST_FILE, check_file, parse_json, read_content
from fedveil.privacy.accountant import Accountant
from fedveil.privacy.events import Adjacency, AnEvent, Event, atoms, compose
from fedveil.privacy.loss_distributions import PldAccountant
from fedveil.validation import problems

SCHEMA_VERSION = 1
_GENESIS = "0" * 64
_SEAL = len(', "digest": ""}') + 64


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


_Count = Annotated[int, Strict(), Field(ge=0)]


@with_config(extra="forbid")
@dataclass(frozen=True, kw_only=True)
class Entry:
    """One charge: the event of one attempt at one round of one run."""

    index: _Count
    run: str
    round: _Count
    attempt: _Count
    unit: str
    adjacency: Adjacency
    event: AnEvent


_ENTRY: Final = TypeAdapter(Entry)


@dataclass(frozen=True, kw_only=True)
class Head:
    """Where a ledger ended at some moment: number of entries, and the last one's digest."""

    count: int
    digest: str


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
            entries, digests, complete = _parse(path, content)
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
        self._entries = list(entries)
        self._digests = [_GENESIS, *digests]
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
        return Head(count=len(self._entries), digest=self._digests[-1])

    def spent(self) -> Event:
        """Return the composition of everything charged so far."""
        return compose(self._spent)

    def would_exceed(self, event: Event, budget: Budget) -> bool:
        """Whether charging ``event`` now would spend more than ``budget``."""
        return budget.accountant.epsilon(compose(self._spent + atoms(event)), budget.delta) > budget.epsilon

    def charge(
        self, *, run: str, round: int, attempt: int, event: Event, budget: Budget | None = None
    ) -> Entry:
        """Write one charge and return once it is on disk; only then may the paid-for result be used.

        Args:
            run: name of the run (a silo keeps one ledger over all its runs).
            round: round number within the run.
            attempt: 0 for the first try; a round tried again has the next number, and is charged again.
            event: what the round will release.
            budget: refuse the charge, before anything is written, if it would spend more than this.

        Raises:
            BudgetError: the charge would exceed the budget.
            PrivacyError: this (run, round, attempt) is charged already.
            RunFolderError: the disk is full or the write failed; nothing may be released, and the ledger is
                closed.
        """
        if self._file < 0:
            raise RunFolderError(f"{self.path}: the ledger is closed; open it again")
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
            index=len(self._entries),
            run=run,
            round=round,
            attempt=attempt,
            unit=self.unit,
            adjacency=self.adjacency,
            event=event,
        )
        line, digest = _line(entry, self._digests[-1])
        try:
            _write_all(self._file, line)
            os.fsync(self._file)
        except OSError as error:
            self.close()
            raise RunFolderError(
                f"{self.path}: round {round} could not be charged ({error.strerror}), so nothing of it "
                "may be released; make room on the disk and resume"
            ) from error
        self._entries.append(entry)
        self._digests.append(digest)
        self._attempts.add((run, round, attempt))
        self._spent.update(atoms(event))
        return entry

    def require_extends(self, head: Head) -> None:
        """Refuse a ledger that does not contain everything a checkpoint had seen."""
        if head.count >= len(self._digests) or self._digests[head.count] != head.digest:
            raise RunFolderError(
                f"{self.path}: has {len(self._entries)} charges and does not continue the ledger of the "
                f"checkpoint, which had {head.count}; charges were lost or replaced, so what was spent is "
                "unknown"
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
    return _parse(path, read_content(path, RunFolderError, largest=LARGEST_FILE))[0]


def read_head(path: Path) -> Head:
    """Return where a ledger ends, verified, without locking or repairing it.

    Raises:
        RunFolderError: the file is missing, damaged or of another version.
    """
    _, digests, _ = _parse(path, read_content(path, RunFolderError, largest=LARGEST_FILE))
    return Head(count=len(digests), digest=[_GENESIS, *digests][-1])


# --- one line -----------------------------------------------------------------------------------------------


def _line(entry: Entry, previous: str) -> tuple[bytes, str]:
    """Return an entry's line, sealed with the digest of everything before the seal, and that digest."""
    place = {"schema_version": SCHEMA_VERSION, "index": entry.index, "previous": previous}
    body = json.dumps(place | _ENTRY.dump_python(entry, mode="json"), allow_nan=False).encode()
    digest = hashlib.sha256(body).hexdigest()
    return body[:-1] + f', "digest": "{digest}"}}\n'.encode(), digest


def _sealed(line: bytes) -> bool:
    """Whether a line (without its newline) is complete and carries its own digest."""
    body, seal = line[:-_SEAL] + b"}", line[-_SEAL:]
    return seal == f', "digest": "{hashlib.sha256(body).hexdigest()}"}}'.encode()


def _parse(path: Path, content: bytes) -> tuple[tuple[Entry, ...], list[str], int]:
    """Return the entries, their digests, and how many bytes of the content are complete lines.

    Without its last newline the last line still counts if it is sealed. If it is not, and one byte less is
    not sealed either, it is a torn write and is left out.
    """
    *lines, tail = content.split(b"\n")
    complete = len(content) - len(tail)
    if _sealed(tail):
        lines.append(tail)
        complete = len(content)
    elif _sealed(tail[:-1]):
        raise _damaged(path, len(lines), "its newline was replaced")
    entries: list[Entry] = []
    digests: list[str] = []
    for index, line in enumerate(lines):
        if not _sealed(line):
            raise _damaged(path, index, "its content does not match its digest")
        entry, previous = _read_line(path, index, line)
        if entry.index != index or previous != (digests[-1] if digests else _GENESIS):
            raise _damaged(path, index, "it does not continue the line before it")
        entries.append(entry)
        digests.append(hashlib.sha256(line[:-_SEAL] + b"}").hexdigest())
    return tuple(entries), digests, complete


def _read_line(path: Path, index: int, line: bytes) -> tuple[Entry, str]:
    """Read a line whose digest is right, so that what is wrong in it was written by another version."""
    place = f"{path}, line {index + 1}:"
    data = parse_json(line, place, RunFolderError)
    if not isinstance(data, dict) or data.get("schema_version") != SCHEMA_VERSION:
        found = data.get("schema_version") if isinstance(data, dict) else type(data).__name__
        raise RunFolderError(f"{place} schema version {found!r}; this fedveil reads version {SCHEMA_VERSION}")
    previous = data.get("previous")
    try:
        values = {key: data[key] for key in data if key not in ("schema_version", "previous", "digest")}
        return _ENTRY.validate_python(values), str(previous)
    except ValidationError as error:
        known = [one.name for one in fields(Entry)]
        raise _damaged(path, index, f"it is no ledger line ({problems(error, known)})") from None
    except PrivacyError as error:
        raise _damaged(path, index, f"it is no ledger line ({error})") from error


def _damaged(path: Path, index: int, what: str) -> RunFolderError:
    return RunFolderError(
        f"{path}, line {index + 1}: the ledger is damaged: {what}. What was spent is unknown, so nothing "
        "may be released from this run; restore the file from a copy"
    )


# --- the file -----------------------------------------------------------------------------------------------


def _open_locked(path: Path) -> int:
    """Open (or make) the file for appending and lock it against every other process."""
    if path.exists():
        check_file(path, RunFolderError)
    try:
        existed = path.exists()
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        if not existed:
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
    except OSError as error:
        raise RunFolderError(f"{path}: cannot open the ledger: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise RunFolderError(
            f"{path}: another process is writing this ledger; wait for it, or stop it, before running again"
        ) from error
    return descriptor


def _read_all(descriptor: int) -> bytes:
    with os.fdopen(os.dup(descriptor), "rb") as stream:
        stream.seek(0)
        return stream.read()


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _repair(descriptor: int, content: bytes, complete: int) -> bool:
    """Cut a torn last line off, or give the last line its newline; return whether anything was repaired."""
    if complete < len(content):
        os.ftruncate(descriptor, complete)
    elif content and not content.endswith(b"\n"):
        _write_all(descriptor, b"\n")
    else:
        return False
    os.fsync(descriptor)
    return True
