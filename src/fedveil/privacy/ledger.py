"""Record privacy charges in an append-only ledger; every charge is on disk before its release.

A charge is written, flushed and fsynced before the release that it pays for. A crash can therefore waste budget, but
never hide a charge. The file is JSON lines. Each line carries the SHA-256 digest of the line before it and its own
digest, so opening the ledger detects an edited, lost or reordered line. Only an incomplete LAST line is accepted and
cut off: a crash interrupted the write of that charge, so nothing can have been released for it.

Not claimed: the chain alone cannot show that whole lines are missing at the end (an old copy was restored, for
instance). A checkpoint therefore stores the ledger's :class:`Head`, and :meth:`Ledger.require_extends` compares it
with the ledger when a run resumes.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Final, Literal

from pydantic import Field, Strict, TypeAdapter, ValidationError, with_config

from fedveil.errors import BudgetError, IntegrityError, PrivacyError, RunFolderError
from fedveil.files import (
    LARGEST_FILE,
    parse_json,
    read_content,
    with_host_code,
)
from fedveil.line_log import LineLog, split_lines
from fedveil.privacy.accountant import Accountant, load_event_types
from fedveil.privacy.accounting import PldAccountant
from fedveil.privacy.events import Adjacency, AnEvent, Event, atoms, compose
from fedveil.validation import explain_errors

# --- ledger lines --------------------------------------------------------------------------------------------------
# A line is JSON: its index, the digest of the line before it, the content, and the digest of all bytes before it.
# The digest is the last key, so that a reader finds it at a fixed distance from the end of the line (_SEAL), before
# it parses any JSON.

SCHEMA_VERSION: Final = 2
GENESIS: Final = "0" * 64
"""Digest field of the first line, which has no line before it."""

_SEAL: Final = len(', "digest": ""}') + 64

_Count = Annotated[int, Strict(), Field(ge=0)]
_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_Time = Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$")]

NoteKind = Literal["opened", "policy", "membership", "adopted", "ended"]
"""Kinds of notes; the kind defines the content of ``text``, given in brackets.

opened: a process begins to use the ledger (its random number). policy: later charges are made under another policy
(the policy). membership: later charges are made under a later membership (the charter's digest and the serial
number). adopted: a person answers for missing charges (the reason). ended: a silo signs the end of a run (the run's
16 bytes, and the digest of the record's last line).
"""


@with_config(extra="forbid")
@dataclass(frozen=True, kw_only=True)
class Origin:
    """Signed terms and parties of a charge, if several institutions work together.

    Attributes:
        terms: SHA-256 of the terms that the coordinator proposed and signed.
        coordinator: SHA-256 of the coordinator's public identity key.
        membership: serial number of the sealed membership; 0: a membership without a seal.
        policy: SHA-256 of the silo's own policy.
    """

    terms: _Digest
    coordinator: _Digest
    membership: _Count
    policy: _Digest


@with_config(extra="forbid")
@dataclass(frozen=True, kw_only=True)
class Entry:
    """Charge: the event of one attempt at one round of one run.

    Attributes:
        index: index of the line, from 0.
        time: time of the charge by this machine's clock, in UTC: to the second if the charge has an origin, else the
            day alone. A silo's ledger stays with the silo. A run's ledger is published with its model, and the duration
            of a round is private.
        run: name of the run.
        round: number within the run.
        attempt: number of the attempt at the round, from 0.
        unit: unit of privacy.
        adjacency: adjacency of the event.
        event: the released event.
        origin: terms and parties of the charge, between institutions.
    """

    index: _Count
    time: _Time
    run: str
    round: _Count
    attempt: _Count
    unit: str
    adjacency: Adjacency
    event: AnEvent
    origin: Origin | None = None


@with_config(extra="forbid")
@dataclass(frozen=True, kw_only=True)
class Note:
    """Line that charges nothing.

    Attributes:
        index: index of the line, from 0.
        time: by this machine's clock, in UTC.
        kind: see :data:`NoteKind`.
        text: see :data:`NoteKind`.
        missing: digests of lines that are known to have been in this ledger and are missing; an adoption names them.
    """

    index: _Count
    time: _Time
    kind: NoteKind
    text: Annotated[str, Field(max_length=1 << 16)]
    missing: tuple[_Digest, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Head:
    """End of a ledger at some moment: the number of lines, and the digest of the last line."""

    count: int
    digest: str


Line = Entry | Note
_ENTRY: Final = TypeAdapter(Entry)
_NOTE: Final = TypeAdapter(Note)
_CHARGE: Final = "charge"


def now() -> str:
    """Return the time by this machine's clock, in UTC to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def today() -> str:
    """Return the last midnight in UTC: the only time in a ledger that is published (:class:`Entry`)."""
    return datetime.now(UTC).strftime("%Y-%m-%dT00:00:00Z")


def write_line(line: Line, previous: str) -> tuple[bytes, str]:
    """Return a line's bytes, sealed with the digest of everything before the seal, and that digest.

    Args:
        line: charge or note.
        previous: digest of the line before it, in hexadecimal.

    Raises:
        RunFolderError: a note that no reader would accept: its text is too long, or not Unicode.
    """
    header: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "index": line.index, "previous": previous}
    if isinstance(line, Entry):
        header["kind"] = _CHARGE
        dumped = _ENTRY.dump_python(line, mode="json")
        # An absent key stands for None.
        content = {key: value for key, value in dumped.items() if value is not None}
    else:
        content = _NOTE.dump_python(line, mode="json")
        try:
            _NOTE.validate_python(content)
        except ValidationError as error:
            raise RunFolderError(f"a ledger cannot have this note: {explain_errors(error, Note)}") from None
    body = json.dumps(header | content, allow_nan=False).encode()
    digest = hashlib.sha256(body).hexdigest()
    return body[:-1] + f', "digest": "{digest}"}}'.encode(), digest


def _sealed(line: bytes) -> bool:
    """Return whether a line (without its newline) is complete and carries its own digest."""
    body, seal = line[:-_SEAL] + b"}", line[-_SEAL:]
    return seal == f', "digest": "{hashlib.sha256(body).hexdigest()}"}}'.encode()


def parse_lines(
    path: Path, content: bytes, *, is_own: bool = False
) -> tuple[tuple[Line, ...], list[str], int]:
    """Return the lines, their digests, and the number of bytes that are complete lines.

    A last line without its newline counts if its digest is right. If its digest is wrong, the line is a torn write
    and is left out, except if the digest is right without the last byte: then the newline was replaced.

    Args:
        path: name of the file in errors.
        content: content of the file.
        is_own: whether this party wrote the lines: then the packages of their events are loaded.

    Raises:
        RunFolderError: a line is damaged, lost, doubled, or of another version; names it.
    """
    lines, tail = split_lines(content)
    complete = len(content) - len(tail)
    if _sealed(tail):
        lines.append(tail)
        complete = len(content)
    # A torn write is a prefix of a line. A complete sealed line with a wrong last byte is no prefix: it was edited.
    elif _sealed(tail[:-1]):
        raise _damaged(path, len(lines), "its newline was replaced")
    entries: list[Line] = []
    digests: list[str] = []
    for index, line in enumerate(lines):
        if not _sealed(line):
            raise _damaged(path, index, "its content does not match its digest")
        entry, previous = _read_line(path, index, line, is_own)
        if entry.index != index or previous != (digests[-1] if digests else GENESIS):
            raise _damaged(path, index, "it does not continue the line before it")
        entries.append(entry)
        digests.append(hashlib.sha256(line[:-_SEAL] + b"}").hexdigest())
    return tuple(entries), digests, complete


def _read_line(path: Path, index: int, line: bytes, is_own: bool) -> tuple[Line, str]:
    """Read a line whose digest is right; any error in it was therefore written by another version."""
    location = f"{path}, line {index + 1}:"
    data = parse_json(line, location, RunFolderError)
    version = data.get("schema_version") if isinstance(data, dict) else type(data).__name__
    if type(version) is not int or version != SCHEMA_VERSION:
        raise RunFolderError(
            f"{location} schema version {version!r}; this fedveil reads version {SCHEMA_VERSION}"
        )
    previous, charge = data.get("previous"), data.get("kind") == _CHARGE
    aside = {"schema_version", "previous", "digest"} | ({"kind"} if charge else set())
    try:
        values = {key: data[key] for key in data if key not in aside}
        if is_own:
            load_event_types(values.get("event"))
        return (_ENTRY if charge else _NOTE).validate_python(values), str(previous)
    except ValidationError as error:
        explanation = explain_errors(error, Entry if charge else Note)
        raise _damaged(path, index, f"it is no ledger line ({explanation})") from None
    except PrivacyError as error:
        raise _damaged(path, index, f"it is no ledger line ({error})") from error


def _damaged(path: Path, index: int, problem: str) -> IntegrityError:
    return IntegrityError(
        f"{path}, line {index + 1}: the ledger is damaged: {problem}. What was spent is unknown, so nothing "
        "may be released from this run; restore the file from a copy"
    )


# --- ledger ------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Privacy budget: ``epsilon`` at ``delta``, as counted by ``accountant``."""

    epsilon: float
    delta: float
    accountant: Accountant = field(default_factory=PldAccountant)

    def __post_init__(self) -> None:
        """Refuse a negative epsilon, and a delta outside (0, 1)."""
        if not self.epsilon >= 0:
            raise PrivacyError(f"budget epsilon = {self.epsilon}: must not be negative")
        if not 0 < self.delta < 1:
            raise PrivacyError(f"budget delta = {self.delta}: must be above 0 and below 1")


class Ledger:
    """Append-only, checksummed, exclusively locked record of charges for one unit and adjacency.

    >>> import tempfile
    >>> from fedveil.privacy.events import GaussianEvent
    >>> release = GaussianEvent(noise_multiplier=5.0)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with Ledger(Path(folder) / "ledger.jsonl", unit="user") as ledger:
    ...         entry = ledger.charge(run="demo", round=1, attempt=0, event=release)
    ...         ledger.spent_event()
    GaussianEvent(noise_multiplier=5.0)

    Args:
        path: the file; it is created (and its folder fsynced) if it is missing. The folder must exist.
        unit: unit of privacy of every charge (``record``, ``client``, ``user``).
        adjacency: neighbours of every charge's event.
        on_line: called with the digest of every new line when the line is on disk; a charge or note returns after it.

    Raises:
        RunFolderError: the file is damaged (the line is named), of another version, unit or adjacency,
            locked by another process, or cannot be opened.
    """

    def __init__(
        self,
        path: Path,
        *,
        unit: str,
        adjacency: Adjacency = Adjacency.ADD_OR_REMOVE_ONE,
        on_line: Callable[[str], None] = lambda digest: None,
    ) -> None:
        self.path = path
        self._on_line = on_line
        self.unit = unit
        self.adjacency = adjacency
        self._log = LineLog(path)
        try:
            self._log.lock()
        except OSError as error:
            failed = RunFolderError(f"{path}: cannot open the ledger: {error.strerror}")
            raise with_host_code(error, failed) from error
        try:
            content = self._log.content()
            lines, digests, complete = parse_lines(path, content, is_own=True)
            entries = [line for line in lines if isinstance(line, Entry)]
            for entry in entries:
                if (entry.unit, entry.adjacency) != (unit, adjacency):
                    raise RunFolderError(
                        f"{path}, line {entry.index + 1}: charges one {entry.unit} under "
                        f"{entry.adjacency.value}, but this ledger was opened for one {unit} under {adjacency.value}"
                    )
            # The repair comes after all checks: a damaged ledger, or that of another unit, is left unchanged.
            self.recovered = self._log.mend(keep=complete == len(content))
        except OSError as error:
            self.close()
            failed = RunFolderError(f"{path}: cannot read or repair the ledger: {error.strerror}")
            raise with_host_code(error, failed) from error
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
        """Present end of the ledger, for a checkpoint."""
        return Head(count=len(self._digests) - 1, digest=self._digests[-1])

    @property
    def notes(self) -> tuple[Note, ...]:
        """All lines that charge nothing, oldest first."""
        return tuple(self._notes)

    def contains(self, digest: str) -> bool:
        """Return whether the ledger once ended with this digest, or an adoption lists the digest as missing."""
        return digest in self._digests or any(digest in note.missing for note in self._notes)

    def position(self, digest: str) -> int:
        """Return the number of lines that the ledger had when it ended with this digest; -1 if it never did."""
        return self._digests.index(digest) if digest in self._digests else -1

    def spent_event(self) -> Event:
        """Return the composition of everything charged so far."""
        return compose(self._spent)

    def would_exceed(self, event: Event, budget: Budget) -> bool:
        """Return whether charging ``event`` now would exceed ``budget``; an epsilon of NaN exceeds it."""
        spent = budget.accountant.epsilon(compose(self._spent + atoms(event)), budget.delta)
        # Not `spent > budget.epsilon`: a NaN must count as exceeding the budget.
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
        """Write one charge and return when it is on disk; the release may be made only after that.

        Args:
            run: name of the run (a silo keeps one ledger over all its runs).
            round: round number within the run.
            attempt: 0 for the first attempt; a repeated round has the next number, and is charged again.
            event: the event that the round will release.
            budget: if given, the charge is refused before anything is written if it would exceed this budget.
            origin: terms and parties of the charge, between institutions.

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
        # Checked before anything is written: a refused charge leaves no line in the ledger.
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
        # Disk first, memory second: a charge counts in memory only when it is durable.
        self._write(entry, f"round {round} could not be charged")
        self._entries.append(entry)
        self._attempts.add((run, round, attempt))
        self._spent.update(atoms(event))
        self._on_line(self.head.digest)
        return entry

    def note(self, kind: NoteKind, text: str, missing: tuple[str, ...] = ()) -> Note:
        """Write a line that charges nothing, and return when it is on disk.

        Raises:
            RunFolderError: no reader would accept the text, and nothing is written; or the disk is full or the write
                failed, and the ledger is closed.
        """
        self._check_open()
        note = Note(index=self.head.count, time=now(), kind=kind, text=text, missing=missing)
        self._write(note, "a note could not be written")
        self._notes.append(note)
        self._on_line(self.head.digest)
        return note

    def _check_open(self) -> None:
        if not self._log.is_locked:
            raise RunFolderError(f"{self.path}: the ledger is closed; open it again")

    def _write(self, line: Line, failed: str) -> None:
        data, digest = write_line(line, self._digests[-1])
        try:
            self._log.append(data)
        except OSError as error:
            self.close()
            raise RunFolderError(
                f"{self.path}: {failed} ({error.strerror}), so nothing of it "
                "may be released; make room on the disk and resume"
            ) from error
        self._digests.append(digest)

    def require_extends(self, head: Head) -> None:
        """Check that the ledger contains everything that a checkpoint had recorded.

        Raises:
            IntegrityError: lines before the checkpoint's head are missing or differ.
        """
        if head.count >= len(self._digests) or self._digests[head.count] != head.digest:
            raise IntegrityError(
                f"{self.path}: has {self.head.count} lines and does not continue the ledger of the checkpoint, which "
                f"had {head.count}; charges were lost or replaced, so what was spent is unknown"
            )

    def require_stated(self, event: Event, statement: Path) -> None:
        """Check that the ledger contains every charge that a statement counts; a reader may hold the statement.

        Args:
            event: everything that was released, by the statement.
            statement: its file, beside the ledger.

        Raises:
            IntegrityError: charges are missing.
        """
        if atoms(event) - self._spent:
            raise IntegrityError(
                f"{self.path} lacks charges that {statement.name} counts; charges were lost or replaced, so what was "
                "spent is unknown: put back the ledger as it was last"
            )

    def close(self) -> None:
        """Release the lock; closing twice is harmless."""
        self._log.close()

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
    """Return a ledger's verified lines, charges and notes, without locking or repairing it (for reports).

    Raises:
        RunFolderError: the file is missing, damaged or of another version.
    """
    return parse_lines(path, read_content(path, RunFolderError, largest=LARGEST_FILE), is_own=True)[0]


def read_head(path: Path) -> Head:
    """Return the verified end of a ledger, without locking or repairing it.

    Raises:
        RunFolderError: the file is missing, damaged or of another version.
    """
    _, digests, _ = parse_lines(path, read_content(path, RunFolderError, largest=LARGEST_FILE), is_own=True)
    return Head(count=len(digests), digest=[GENESIS, *digests][-1])
