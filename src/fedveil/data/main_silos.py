"""Which silo a user's whole weight is in, as a file says that all silos share.

The file (:mod:`fedveil.data.salted_file`) has a line a user: the id, a comma, the name of a silo. Ids are those
of the list of users, in its order, or 0, 1, 2, ... where there is no list.
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
    """A silo's file of main silos is not the one that a run names, or there is none."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MainSilos:
    """One silo for each user.

    Attributes:
        digest: SHA-256 of the file, in hexadecimal.
        silo: (|U|,) number of the silo.
    """

    digest: str
    silo: Int32[np.ndarray, " users"]


def read_main_silos(path: Path, users: Sequence[str], silos: Sequence[str]) -> MainSilos:
    """Read the file.

    Args:
        path: of it.
        users: all users' ids, in the order of their numbers.
        silos: names of all silos, in the order of theirs.

    Raises:
        DataError: as :func:`read_salted`; other users, or one twice; a silo that does not exist. Lines are named, and
            no id.
    """
    file = read_salted(path)
    if len(file.lines) != len(users):
        raise DataError(
            f"{path}: {len(file.lines)} users instead of {len(users)}: give one line to each of all silos' users"
        )
    numbers, found = {name: number for number, name in enumerate(silos)}, []
    for line, (text, user) in enumerate(zip(file.lines, users, strict=True), start=2):
        who, _, silo = text.rpartition(",")
        if who != user:
            raise DataError(
                f"{path}: line {line} is not of the user in line {line - 1} of the list of users, or of number "
                f"{line - 2} where there is none"
            )
        if silo not in numbers:
            raise DataError(f"{path}: line {line} names no silo of the federation ({', '.join(silos)})")
        found.append(numbers[silo])
    return MainSilos(digest=file.digest, silo=np.array(found, dtype=np.int32))
