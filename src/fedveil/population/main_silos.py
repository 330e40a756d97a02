"""Which silo a user's whole weight is in, as a file says that all silos share.

The file has a line of 64 hexadecimal digits, drawn at random and as secret as the file, then a line a user: her id, a
comma, the name of a silo. Ids are those of the list of users, in its order, or 0, 1, 2, ... where there is no list.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from jaxtyping import Int32

from fedveil.errors import DataError
from fedveil.files import LARGEST_FILE, as_text, read_content

_SALT: Final = re.compile("[0-9a-f]{64}")


class MainSilosError(DataError):
    """A silo's file of main silos is not the one that a run names, or there is none."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MainSilos:
    """One silo for each user.

    Attributes:
        digest: SHA-256 of the file, in hexadecimal. Without its first line nobody can tell from it who is where.
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
        DataError: unreadable; no first line that hides who is where; other users, or one twice; a silo that does not
            exist. Lines are named, and no id.
    """
    content = read_content(path, DataError, largest=LARGEST_FILE)
    salt, *lines = as_text(content, path, DataError).splitlines() or [""]
    if not _SALT.fullmatch(salt):
        raise DataError(
            f"{path}: line 1 is not 64 hexadecimal digits; draw them at random (openssl rand -hex 32): without them "
            "the file's digest, which everybody reads, tells who is where"
        )
    if len(lines) != len(users):
        raise DataError(
            f"{path}: {len(lines)} users instead of {len(users)}: give one line to each of all silos' users"
        )
    numbers, found = {name: number for number, name in enumerate(silos)}, []
    for line, (text, user) in enumerate(zip(lines, users, strict=True), start=2):
        who, _, silo = text.rpartition(",")
        if who != user:
            raise DataError(
                f"{path}: line {line} is not of the user in line {line - 1} of the list of users, or of number "
                f"{line - 2} where there is none"
            )
        if silo not in numbers:
            raise DataError(f"{path}: line {line} names no silo of the federation ({', '.join(silos)})")
        found.append(numbers[silo])
    return MainSilos(digest=hashlib.sha256(content).hexdigest(), silo=np.array(found, dtype=np.int32))
