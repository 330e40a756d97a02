"""Tables handed over in memory: a name, columns, and what stands for them in documents."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias

import pyarrow as pa

from fedveil.errors import ConfigError
from fedveil.sanitize import sanitize

_IN_MEMORY: Final = Path("session:")
"""Folder of the names that stand in documents in place of paths; no file can be there."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MemoryTable:
    """A table handed over in memory.

    Attributes:
        name: its name: that of a silo, if the schema has no silo column.
        table: its columns.
    """

    name: str
    table: pa.Table = field(repr=False)

    def __str__(self) -> str:
        """Return the name of the table in errors."""
        return f"table '{sanitize(self.name)}'"

    @property
    def stem(self) -> str:
        """Name of the silo, as the stem of a file's name."""
        return self.name

    @property
    def path(self) -> Path:
        """The table's placeholder in a document."""
        return _IN_MEMORY / f"{self.name}.table"


TableFile: TypeAlias = Path | MemoryTable
"""A table: a file, or columns in memory."""


def declared_path(file: TableFile) -> Path:
    """Return a table's placeholder in a document."""
    return file.path if isinstance(file, MemoryTable) else file


def refuse_memory_path(path: Path) -> None:
    """Refuse a path that stands for a table in memory: this process does not hold it.

    Raises:
        ConfigError: the path is such a name.
    """
    if path.parts[:1] == _IN_MEMORY.parts:
        raise ConfigError(
            f"{path}: the table was handed over in memory, in Python; hand it over again (fedveil.tables, and "
            "fedveil.resume to go on with a run)"
        )
