"""A file that silos share among themselves, and that everybody else may know by its digest.

Its first line is 64 hexadecimal digits, drawn at random and as secret as the file: without it, whoever can guess the
lines would find them by the digest. Then come lines that end at a line feed and nowhere else; with a control character
in it a line is refused, because programs differ on whether it ends there.
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
    """What such a file says.

    Attributes:
        digest: SHA-256 of all its bytes, in hexadecimal, as ``sha256sum`` prints it.
        lines: without the first.
    """

    digest: str
    lines: tuple[str, ...]


def read_salted(path: Path) -> SaltedFile:
    """Read the file.

    Raises:
        DataError: unreadable, without such a first line, or with a control character in a line; names the line, and
            nothing of it.
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
