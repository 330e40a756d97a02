"""The releases of one document, made one after another: each charged, made and written before the next.

    charge on disk ─► sum of all silos ─► released sums on disk ─► the next, whose step follows from them ─► statement

A kill between any two of them loses no release: :func:`resume_releases` makes what is missing. What was charged and not
written is charged again, since nothing shows that nobody saw it; only noise from a seed makes the same release again.
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
    """The releases of a document, ready to be made; public numbers alone.

    Attributes:
        file: what the releases are in, in the run folder.
        document: what was asked for.
        declared: of the tables.
        series: what they guarantee together.
        notes: what else a reader of the statement should know.
    """

    file: ClassVar[str]

    document: TableDocument
    declared: DeclaredTables
    series: Series
    notes: tuple[str, ...]

    @abstractmethod
    def release(self, before: NoisySums) -> Release:
        """Return the release after these; its length and its norm do not depend on them."""

    @abstractmethod
    def read(self, folder: RunFolder) -> NoisySums:
        """Return what a folder has of the releases.

        Raises:
            RunFolderError: a damaged one, or another document's.
        """

    @abstractmethod
    def to_json(self, made: NoisySums) -> dict[str, Any]:
        """Return what :attr:`file` says of these releases."""

    def write(self, folder: RunFolder, made: NoisySums) -> None:
        """Put what was released on the disk: then, and not before, it counts as released."""
        folder.write_json(self.file, self.to_json(made))

    def part(self, made: int) -> str:
        """Return the name of the release after so many."""
        return str(made + 1)

    @property
    def count(self) -> int:
        """How many releases there are."""
        return len(self.series.releases)


def read_records(prepared: PreparedReleases) -> ColumnTable:
    """Return the records of all silos, in the columns that the releases read.

    Raises:
        DataError: what is wrong with the tables.
    """
    table = prepared.document.data.table
    assert table is not None, "TableDocument asks for it"
    return read_columns(prepared.declared.schema, table.files, prepared.release(()).step.columns)


def make_releases(prepared: PreparedReleases, parent: Path) -> Path:
    """Make all releases in a new folder under ``parent``, and return it.

    Raises:
        FedveilError: what is wrong with the tables; a ledger that cannot be written. Nothing more is released then.
    """
    records = read_records(prepared)
    folder = RunFolder.create(parent, prepared.document)
    _release(prepared, folder, records)
    return folder.path


def resume_releases(prepared: PreparedReleases, path: Path) -> None:
    """Make the releases that a folder lacks; one that is made is stated again, nothing else.

    Raises:
        FedveilError: as :func:`make_releases`; a damaged folder.
    """
    folder = RunFolder(path)
    lacking = len(prepared.read(folder)) < prepared.count
    _release(prepared, folder, read_records(prepared) if lacking else None)


def _release(prepared: PreparedReleases, folder: RunFolder, records: ColumnTable | None) -> None:
    """Make the releases that a folder lacks, of these records; none are needed where it lacks none."""
    series, made = prepared.series, prepared.read(folder)
    whole = len(made) == prepared.count
    with series.ledger(folder) as ledger:
        _check_charged(prepared, folder, ledger)
        charged = Counter(entry.round for entry in ledger.entries)
        while len(made) < prepared.count:
            release = prepared.release(made)
            times = charged[release.number]
            if not times or series.secure:
                event = series.releases[len(made)].guarantee.event
                ledger.charge(run=prepared.document.name, round=release.number, attempt=times, event=event)
            assert records is not None
            made = (*made, noisy_sum(release, records, series.privacy.randomness()))
            prepared.write(folder, made)
        conclude(prepared, folder, ledger, again=whole)


def conclude(prepared: PreparedReleases, folder: RunFolder, ledger: Ledger, *, again: bool) -> None:
    """Write the statement of what a ledger has.

    Args:
        prepared: what was asked for.
        folder: the run folder.
        ledger: its ledger.
        again: whether nothing was released since the statement that is there, if there is one.

    Raises:
        RunFolderError: the document, or what is declared of the tables, is not what was charged and stated: numbers
            that were released once have one statement.
    """
    _check_charged(prepared, folder, ledger)
    times = Counter(entry.round for entry in ledger.entries)
    charged = [times[number] for number in range(1, prepared.count + 1)]
    statement = prepared.series.statement(prepared.document.name, charged, prepared.notes)
    found = statement.to_json()
    if again and (folder / STATEMENT).exists() and read_json(folder / STATEMENT, RunFolderError) != found:
        raise _changed(prepared, folder, f"another statement would follow than {STATEMENT} has")
    folder.write_json(STATEMENT, found)


def _check_charged(prepared: PreparedReleases, folder: RunFolder, ledger: Ledger) -> None:
    """Return if every charge is of one of these releases, and pays for it to the last digit.

    Raises:
        RunFolderError: one is of another, or is the same but for the rounding of another machine.
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
    return RunFolderError(
        f"{folder.path}: {found}: {prepared.document.file} or the schema was changed since, or fedveil is of another "
        "version; put back what the releases were made with, or ask for others in a document of its own"
    )
