"""Columns of records that are read piece by piece: kept in memory, or in a file for tables larger than memory."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Final

import numpy as np
from jaxtyping import Bool, Shaped

from fedveil.errors import ConfigError
from fedveil.files import writing

FOLDER_VARIABLE: Final = "FEDVEIL_TABLE_FOLDER"
"""Environment variable that names the folder of the files; without it columns are kept in memory."""

_BLOCK: Final = 1 << 16  # records that are copied at a time


def column_folder() -> Path | None:
    """Return the folder for columns that are kept in files, or None if columns are kept in memory.

    Raises:
        ConfigError: the folder does not exist.
    """
    given = os.environ.get(FOLDER_VARIABLE)
    if not given:
        return None
    if not Path(given).is_dir():
        raise ConfigError(
            f"{FOLDER_VARIABLE}: {given} is no folder; name one with room for the encoded tables"
        )
    return Path(given)


class GrowingColumn:
    """A column of n records that grows by pieces of one dtype and width.

    Its file has no name, so that nobody else opens it and nothing of it remains when the process ends. The column is a
    context manager, which closes the file; arrays of it stay valid.

    Args:
        folder: of the file; None keeps the column in memory.
    """

    def __init__(self, folder: Path | None) -> None:
        self._pieces: list[np.ndarray] = []  # of a file: an empty one, for dtype and width
        self._folder, self._records = folder, 0
        if folder is not None:
            with writing(f"{FOLDER_VARIABLE}: {folder}", ConfigError):
                self._file = TemporaryFile(dir=folder)  # noqa: SIM115 - closed by __exit__

    def __enter__(self) -> GrowingColumn:
        return self

    def __exit__(self, *_: object) -> None:
        if self._folder is not None:
            with suppress(OSError):  # what is still to be written is of no use, and a full disk was named
                self._file.close()

    def append(self, piece: Shaped[np.ndarray, "m *width"]) -> None:
        """Add the values of m records.

        Raises:
            ConfigError: the folder of the file is full.
        """
        if self._folder is None:
            self._pieces.append(piece)
            return
        self._pieces = [piece[:0]]
        self._records += len(piece)
        with writing(f"{FOLDER_VARIABLE}: {self._folder}", ConfigError):
            self._file.write(np.ascontiguousarray(piece).tobytes())

    def array(self) -> Shaped[np.ndarray, "n *width"]:
        """Return the column, after at least one piece; that of a file is a read-only map of the file."""
        if not self._records:  # in memory, or an empty file, which cannot be mapped
            return np.concatenate(self._pieces)
        with writing(f"{FOLDER_VARIABLE}: {self._folder}", ConfigError):
            self._file.flush()
        (kind,) = self._pieces
        return np.memmap(self._file, kind.dtype, "r", shape=(self._records, *kind.shape[1:]))


def select_records(
    column: Shaped[np.ndarray, "n *width"], kept: Bool[np.ndarray, " n"], folder: Path | None
) -> Shaped[np.ndarray, "k *width"]:
    """Return the values of the records that are kept, in a file if the folder of files is given."""
    if folder is None:
        return np.asarray(column[kept])
    if kept.all():
        return column
    with GrowingColumn(folder) as found:
        for begin in range(0, max(1, len(column)), _BLOCK):
            found.append(column[begin : begin + _BLOCK][kept[begin : begin + _BLOCK]])
        return found.array()
