"""Assignment of each user's whole weight to one silo, from a file that all silos share.

The file (:mod:`fedveil.data.salted_file`) has one line per user: the id, a comma, and the name of a silo. The ids are
those of the list of users, in its order, or 0, 1, 2, ... without a list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int32

from fedveil.data.salted_file import read_salted
from fedveil.errors import DataError


class MainSilosError(DataError):
    """Error of a silo whose file of main silos is missing, or is not the file that the run names."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MainSilos:
    """Main silo of each user.

    Attributes:
        digest: SHA-256 of the file, in hexadecimal.
        silo: (|U|,) number of each user's main silo.
    """

    digest: str
    silo: Int32[np.ndarray, " users"]


def read_main_silos(path: Path, users: Sequence[str], silos: Sequence[str]) -> MainSilos:
    """Read a file of main silos.

    Args:
        path: the file.
        users: ids of all users, in the order of their numbers.
        silos: names of all silos, in the order of their numbers.

    Raises:
        DataError: as :func:`read_salted`; the users are not those of ``users`` in this order; a silo does not exist.
            The error names the line, and no id.
    """
    file = read_salted(path)
    if len(file.lines) != len(users):
        raise DataError(
            f"{path}: {len(file.lines)} users instead of {len(users)}: give one line to each of all silos' users"
        )
    numbers, found = {name: number for number, name in enumerate(silos)}, []
    for line, (text, user) in enumerate(zip(file.lines, users, strict=True), start=2):
        who, _, silo = text.rpartition(",")  # the last comma: an id may contain commas
        if who != user:
            raise DataError(
                f"{path}: line {line} is not of the user in line {line - 1} of the list of users, or of number "
                f"{line - 2} where there is none"
            )
        if silo not in numbers:
            raise DataError(f"{path}: line {line} names no silo of the federation ({', '.join(silos)})")
        found.append(numbers[silo])
    return MainSilos(digest=file.digest, silo=np.array(found, dtype=np.int32))
