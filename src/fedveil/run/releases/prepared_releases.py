"""The releases of one document, ready to be made, and the sums that a run folder has of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from fedveil.data.columns import ColumnTable, read_columns
from fedveil.data.memory_tables import TableFile
from fedveil.run.config.release_document import DeclaredTables, TableDocument
from fedveil.run.folder.run_folder import RunFolder
from fedveil.run.releases.release import Release
from fedveil.run.releases.series import Series
from fedveil.statistics.result import NoisySums


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


def read_records(prepared: PreparedReleases, files: Sequence[TableFile] | None = None) -> ColumnTable:
    """Return the records of all silos, in the columns that the releases read.

    Args:
        prepared: the releases.
        files: the tables; None: the files that the document names.

    Raises:
        DataError: the tables are missing or do not fit the schema.
    """
    table = prepared.document.data.table
    assert table is not None, "TableDocument asks for it"
    return read_columns(prepared.declared.schema, files or table.files, prepared.release(()).step.columns)
