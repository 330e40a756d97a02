"""Settings files of the parties: TOML, no key that is not known, and errors that name file and key."""

from __future__ import annotations

import grp
from pathlib import Path
from typing import Self

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
        import tomlkit  # a served link reads settings and writes none

        with writing(path, ConfigError):
            replace_file(path, tomlkit.dumps(self.model_dump(mode="json", exclude_none=True)).encode())


def group_number(name: str | None, path: Path) -> int | None:
    """Return the number of a group of this host; None if a settings file names none.

    Raises:
        ConfigError: this host has no such group.
    """
    try:
        return None if name is None else grp.getgrnam(name).gr_gid
    except KeyError:
        raise ConfigError(f"{path}: group: this host has no group '{name}'") from None
