"""Columns of tables larger than memory: kept in files, and ordered some records at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Final, Literal

import numpy as np
from jaxtyping import Bool, Int32, Int64, Integer, Shaped

from fedveil.errors import ConfigError
from fedveil.files import writing

# --- columns ---

FOLDER_VARIABLE: Final = "FEDVEIL_TABLE_FOLDER"
"""Environment variable that names the folder of the files; without it columns are kept in memory."""

_BLOCK: Final = 1 << 16  # records that are copied at a time


def column_folder() -> Path | None:
    """Return the folder for columns that are kept in files, or None if columns are kept in memory.

    Raises:
        ConfigError: the folder does not exist.
    """
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        return None
    if not Path(folder).is_dir():
        raise ConfigError(
            f"{FOLDER_VARIABLE}: {folder} is no folder; name one with room for the encoded tables"
        )
    return Path(folder)


def folder_beside(column: np.ndarray) -> Path | None:
    """Return the folder for columns with an entry for each of a column's records: None unless it is kept in a file."""
    return column_folder() if isinstance(column, np.memmap) else None


class GrowingColumn:
    """A column of n records that grows by pieces of one dtype and width.

    Its file has no name, so that nobody else opens it and nothing of it remains when the process ends. The column is a
    context manager, which closes the file; arrays of it stay valid.

    Args:
        folder: folder of the file; None keeps the column in memory.
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
        """Return the column, after at least one piece; that of a file is a map of it, copied on write.

        PyTorch warns of arrays that cannot be written.
        """
        if not self._records:  # in memory, or an empty file, which cannot be mapped
            return np.concatenate(self._pieces)
        with writing(f"{FOLDER_VARIABLE}: {self._folder}", ConfigError):
            self._file.flush()
        return self._map("c")

    def sorted_array(self) -> Shaped[np.ndarray, " n"]:
        """Return the values of a column in ascending order, NaN last; that of a file is sorted in the file."""
        if not self._records:
            return np.sort(np.concatenate(self._pieces))
        with writing(f"{FOLDER_VARIABLE}: {self._folder}", ConfigError):
            self._file.flush()
        values = self._map("r+")
        values.sort()
        return values

    def _map(self, mode: Literal["c", "r+"]) -> Shaped[np.ndarray, "n *width"]:
        (kind,) = self._pieces
        return np.memmap(self._file, kind.dtype, mode, shape=(self._records, *kind.shape[1:]))


def select_records(
    column: Shaped[np.ndarray, "n *width"], is_kept: Bool[np.ndarray, " n"], folder: Path | None
) -> Shaped[np.ndarray, "k *width"]:
    """Return the values of the records that are kept, in a file if the folder of files is given."""
    if folder is None:
        return np.asarray(column[is_kept])
    if is_kept.all() and isinstance(column, np.memmap):
        return column
    with GrowingColumn(folder) as selected:
        for begin in range(0, max(1, len(column)), _BLOCK):
            selected.append(column[begin : begin + _BLOCK][is_kept[begin : begin + _BLOCK]])
        return selected.array()


def take_values(
    values: Shaped[np.ndarray, " m"], places: Integer[np.ndarray, " n"], folder: Path | None
) -> Shaped[np.ndarray, " n"]:
    """Return the values at these places, in a file if the folder of files is given."""
    if folder is None:
        return np.asarray(values[places])
    with GrowingColumn(folder) as selected:
        for begin in range(0, max(1, len(places)), _BLOCK):
            selected.append(values[places[begin : begin + _BLOCK]])
        return selected.array()


def empty_column(records: int, folder: Path) -> Int64[np.ndarray, " n"]:
    """Return a column of whole numbers in a file, to be written in any order.

    Raises:
        ConfigError: the folder of the file is full.
    """
    if not records:  # an empty file cannot be mapped
        return np.zeros(0, dtype=np.int64)
    with writing(f"{FOLDER_VARIABLE}: {folder}", ConfigError), TemporaryFile(dir=folder) as file:
        # A full disk is an error here. Later, when a page of the map is written, it would end the process.
        os.posix_fallocate(file.fileno(), 0, 8 * records)
        return np.memmap(file, np.int64, "r+", shape=(records,))


# --- owners ---

_OWNER_BLOCK: Final = 1 << 17  # records whose owners are sorted at a time


class Owners:
    """The distinct owners of n records: users, or pairs (silo, user). Memory grows with the owners, not the records.

    Args:
        user: (n,) number of each record's user.
        silo: (n,) number of each record's silo, for pairs; None: the owner is the user.

    Attributes:
        owners: (m,) the distinct owners, ascending; a pair is silo * 2^32 + user, so that pairs are sorted by both.
        size: (m,) number of records of each.

    >>> found = Owners(np.array([7, 3, 7], dtype=np.int32))
    >>> found.owners.tolist(), found.size.tolist()
    ([3, 7], [1, 2])
    >>> [(owner.tolist(), place.tolist()) for _, owner, place in found.places()]
    [([1, 0, 1], [0, 0, 1])]
    """

    def __init__(self, user: Integer[np.ndarray, " n"], silo: Int32[np.ndarray, " n"] | None = None) -> None:
        self._user, self._silo = user, silo
        self.owners: Int64[np.ndarray, " m"] = np.zeros(0, dtype=np.int64)
        self.size: Int64[np.ndarray, " m"] = np.zeros(0, dtype=np.int64)
        for _, block in self._blocks():
            present, count = np.unique(block, return_counts=True)
            index = np.searchsorted(self.owners, present)
            is_known = np.zeros(len(present), dtype=np.bool_)
            inside = index < len(self.owners)
            is_known[inside] = self.owners[index[inside]] == present[inside]
            self.size[index[is_known]] += count[is_known]
            self.owners = np.insert(self.owners, index[~is_known], present[~is_known])
            self.size = np.insert(self.size, index[~is_known], count[~is_known])

    def places(self) -> Iterator[tuple[slice, Int64[np.ndarray, " b"], Int64[np.ndarray, " b"]]]:
        """Yield some rows, the position of each one's owner in ``owners``, and the number of its records before."""
        previous = np.zeros_like(self.size)
        for rows, block in self._blocks():
            order = np.argsort(block, kind="stable")
            ordered = block[order]
            first = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))
            count = np.diff(first, append=len(ordered))
            index = np.searchsorted(self.owners, ordered[first])
            owner, position = np.empty_like(order), np.empty_like(order)
            owner[order] = np.repeat(index, count)
            position[order] = np.arange(len(order)) - np.repeat(first - previous[index], count)
            previous[index] += count
            yield rows, owner, position

    def _blocks(self) -> Iterator[tuple[slice, Int64[np.ndarray, " b"]]]:
        for begin in range(0, len(self._user), _OWNER_BLOCK):
            rows = slice(begin, begin + _OWNER_BLOCK)
            block = self._user[rows].astype(np.int64)
            # Both numbers are non-negative int32, so the pair is unique.
            yield rows, block if self._silo is None else block | (self._silo[rows].astype(np.int64) << 32)
