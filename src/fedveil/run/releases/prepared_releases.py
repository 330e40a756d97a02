"""Make the releases of one document one after another: charge, make and store each before the next.

    charge on disk ─► sum of all silos ─► released sums on disk ─► next release, whose step follows from them
                                                               ─► statement, after the last release

A crash between any two of these steps loses no release: :func:`resume_releases` makes the missing ones. A release
that was charged but not stored is charged again, because nothing shows that nobody saw it. Only noise from a known
seed makes the same release again and needs no second charge.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

from fedveil.checks import equal_up_to_rounding
from fedveil.data.columns import ColumnTable, read_columns
from fedveil.errors import RunFolderError
from fedveil.files import read_json
from fedveil.privacy.ledger import Ledger
from fedveil.run.config.declared_tables import DeclaredTables
from fedveil.run.config.release_document import TableDocument
from fedveil.run.folder.run_folder import RunFolder
from fedveil.run.releases.release import Release, noisy_sum
from fedveil.run.releases.series import Series
from fedveil.statistics.stored import NoisySums

STATEMENT: Final = "privacy.json"


@dataclass(frozen=True, kw_only=True, eq=False)
class PreparedReleases(ABC):
    """The releases of a document, ready to be made; public numbers only.

    Attributes:
        file: name of the releases' file in the run folder.
        document: the request.
        declared: declared facts about the tables.
        series: the joint guarantee of the releases.
        notes: further sentences for the reader of the statement.
    """

    file: ClassVar[str]

    document: TableDocument
    declared: DeclaredTables
    series: Series
    notes: tuple[str, ...]

    @abstractmethod
    def release(self, before: NoisySums) -> Release:
        """Return the release after ``before``; its length and norm do not depend on ``before``."""

    @abstractmethod
    def read(self, folder: RunFolder) -> NoisySums:
        """Return the released sums that a folder holds.

        Raises:
            RunFolderError: the file is damaged or belongs to another document.
        """

    @abstractmethod
    def to_json(self, made: NoisySums) -> dict[str, Any]:
        """Return the content of :attr:`file` with these releases."""

    def write(self, folder: RunFolder, made: NoisySums) -> None:
        """Write the released sums to disk; from then on, and not before, they count as released."""
        folder.write_json(self.file, self.to_json(made))

    def part(self, made: int) -> str:
        """Return the name of the release after ``made`` others."""
        return str(made + 1)

    @property
    def count(self) -> int:
        """Number of releases."""
        return len(self.series.releases)


def read_records(prepared: PreparedReleases) -> ColumnTable:
    """Return the records of all silos, in the columns that the releases read.

    Raises:
        DataError: the tables are missing or do not fit the schema.
    """
    table = prepared.document.data.table
    assert table is not None, "TableDocument asks for it"
    return read_columns(prepared.declared.schema, table.files, prepared.release(()).step.columns)


def make_releases(prepared: PreparedReleases, parent: Path) -> Path:
    """Make all releases in a new folder under ``parent``, and return the folder.

    Raises:
        FedveilError: the tables are wrong, or the ledger cannot be written. Nothing more is released then.
    """
    records = read_records(prepared)
    folder = RunFolder.create(parent, prepared.document)
    _release(prepared, folder, records)
    return folder.path


def resume_releases(prepared: PreparedReleases, path: Path) -> None:
    """Make the releases that a folder lacks; if it lacks none, only write the statement again.

    Raises:
        FedveilError: as :func:`make_releases`, or a damaged folder.
    """
    folder = RunFolder(path)
    lacking = len(prepared.read(folder)) < prepared.count
    _release(prepared, folder, read_records(prepared) if lacking else None)


def _release(prepared: PreparedReleases, folder: RunFolder, records: ColumnTable | None) -> None:
    """Make the releases that a folder lacks.

    Args:
        prepared: the releases of the document.
        folder: the run folder.
        records: the records of all silos; None if no release is missing.
    """
    series, made = prepared.series, prepared.read(folder)
    whole = len(made) == prepared.count
    with series.ledger(folder) as ledger:
        _check_charged(prepared, folder, ledger)
        charged = Counter(entry.round for entry in ledger.entries)
        while len(made) < prepared.count:
            release = prepared.release(made)
            times = charged[release.number]
            # For a charge without a stored release: repeatable noise makes the same release, fresh noise another.
            if not times or series.secure:
                event = series.releases[len(made)].guarantee.event
                ledger.charge(run=prepared.document.name, round=release.number, attempt=times, event=event)
            assert records is not None
            # The charge is on disk here, so no crash can leave a release uncharged.
            made = (*made, noisy_sum(release, records, series.privacy.randomness()))
            prepared.write(folder, made)
        conclude(prepared, folder, ledger, again=whole)


def conclude(prepared: PreparedReleases, folder: RunFolder, ledger: Ledger, *, again: bool) -> None:
    """Write the statement of the charges in a ledger.

    Args:
        prepared: the releases of the document.
        folder: the run folder.
        ledger: the ledger of the folder.
        again: whether nothing was released since the folder's statement, if it has one.

    Raises:
        RunFolderError: the document or the declared facts differ from those that were charged and stated. Released
            numbers have one statement.
    """
    _check_charged(prepared, folder, ledger)
    times = Counter(entry.round for entry in ledger.entries)
    charged = [times[number] for number in range(1, prepared.count + 1)]
    statement = prepared.series.statement(prepared.document.name, charged, prepared.notes)
    found = statement.to_json()
    # Compare before writing: released numbers must not get another statement from a changed document.
    if again and (folder / STATEMENT).exists() and read_json(folder / STATEMENT, RunFolderError) != found:
        raise _changed(prepared, folder, f"another statement would follow than {STATEMENT} has")
    folder.write_json(STATEMENT, found)


def _check_charged(prepared: PreparedReleases, folder: RunFolder, ledger: Ledger) -> None:
    """Check that every charge is of one of these releases, with exactly its event.

    Raises:
        RunFolderError: a charge is of another release, or differs by the rounding of another machine.
    """
    events = {one.number: one.guarantee.event for one in prepared.series.releases}
    others = [entry for entry in ledger.entries if entry.event != events.get(entry.round)]
    if not others:
        return
    if all(
        entry.round in events and equal_up_to_rounding(entry.event.to_json(), events[entry.round].to_json())
        for entry in others
    ):
        raise RunFolderError(
            f"{folder.path}: the ledger was charged for these releases with noise whose last digits differ from those "
            "computed here: another machine, or another version of NumPy or SciPy, calibrated it; go on where they "
            "were begun"
        )
    raise _changed(prepared, folder, "the ledger was charged for other releases")


def _changed(prepared: PreparedReleases, folder: RunFolder, found: str) -> RunFolderError:
    """Return the error of a folder whose releases do not follow from the document any more."""
    return RunFolderError(
        f"{folder.path}: {found}: {prepared.document.file} or the schema was changed since, or fedveil is of another "
        "version; put back what the releases were made with, or ask for others in a document of its own"
    )
