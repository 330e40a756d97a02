"""Salted file: shared secretly among the silos, and known to all others by its SHA-256.

The first line is a salt of 64 random hexadecimal digits, as secret as the file. Without the salt, an attacker could
guess the lines and confirm the guess by the public digest. The other lines end with a line feed only. A line with
another control character is refused, because programs differ on whether a line ends at that character.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fedveil.errors import DataError
from fedveil.files import LARGEST_FILE, as_text, read_content

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
            f"{path}: line 1 is not 64 hexadecimal digits; draw them at random (openssl rand -hex 32): without them "
            "the file's digest, which everybody reads, tells what is in it"
        )
    for number, line in enumerate(lines, start=2):
        if _CONTROL.search(line):
            raise DataError(
                f"{path}: line {number} has a control character; lines end with a line feed alone, not with a carriage "
                "return before it"
            )
    return SaltedFile(digest=hashlib.sha256(content).hexdigest(), lines=tuple(lines))
