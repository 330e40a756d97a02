"""Settings files of the parties: TOML, no key that is not known, and errors that name file and key."""

from __future__ import annotations

from pathlib import Path
from typing import Self

import tomlkit

from fedveil.errors import ConfigError
from fedveil.files import read_toml, replace_file, writing
from fedveil.validation import DocumentTable, validate_document


class Settings(DocumentTable):
    """The keys of one file."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a settings file; what is wrong is named by file and key."""
        return validate_document(cls, read_toml(path), path)

    def write(self, path: Path) -> None:
        """Write a settings file, whole or not at all; what the disk refuses is a :class:`ConfigError` that names it."""
        with writing(path, ConfigError):
            replace_file(path, tomlkit.dumps(self.model_dump(mode="json", exclude_none=True)).encode())
