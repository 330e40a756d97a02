"""Assignment of each user's whole weight to one silo, from a salted file that all silos share.

The file has one line per user: the id, a comma, and the name of a silo. The ids are
those of the list of users, in its order, or 0, 1, 2, ... without a list.
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

# --- files with a secret salt ---

_SALT: Final = re.compile("[0-9a-f]{64}")
_CONTROL: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")


@dataclass(frozen=True, kw_only=True)
class SaltedFile:
    """Content of a salted file.

    Attributes:
        digest: SHA-256 of all bytes of the file, in hexadecimal, as ``sha256sum`` prints it.
        lines: the lines after the salt.
    """

    digest: str
    lines: tuple[str, ...]


def read_salted(path: Path) -> SaltedFile:
    """Read a salted file.

    Raises:
        DataError: the file is unreadable, has no salt in its first line, or a control character in a line. The error
            names the line number and repeats no text of the line.
    """
    content = read_content(path, DataError, largest=LARGEST_FILE)
    salt, *lines = as_text(content, path, DataError).removesuffix("\n").split("\n")
    if not _SALT.fullmatch(salt):
        raise DataError(
            f"{path}: line 1 is not 64 hexadecimal digits; draw them at random (openssl rand -hex 32): "
            "without them the file's public digest reveals its content"
        )
    for number, line in enumerate(lines, start=2):
        if _CONTROL.search(line):
            raise DataError(
                f"{path}: line {number} has a control character; lines end with a line feed alone, not with a carriage "
                "return before it"
            )
    return SaltedFile(digest=hashlib.sha256(content).hexdigest(), lines=tuple(lines))


# --- main silos ---


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
    numbers, silo_numbers = {name: number for number, name in enumerate(silos)}, []
    for line, (text, user) in enumerate(zip(file.lines, users, strict=True), start=2):
        user_id, _, silo = text.rpartition(",")  # the last comma: an id may contain commas
        if user_id != user:
            raise DataError(
                f"{path}: line {line} is not of the user in line {line - 1} of the list of users, or of number "
                f"{line - 2} where there is none"
            )
        if silo not in numbers:
            raise DataError(f"{path}: line {line} names no silo of the federation ({', '.join(silos)})")
        silo_numbers.append(numbers[silo])
    return MainSilos(digest=file.digest, silo=np.array(silo_numbers, dtype=np.int32))
