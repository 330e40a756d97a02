"""Settings files of the parties: TOML, no key that is not known, and errors that name file and key."""

from __future__ import annotations

from pathlib import Path
from typing import Self

import tomlkit
from pydantic import BaseModel, ConfigDict, ValidationError

from fedveil.errors import ConfigError
from fedveil.files import parse_toml, read_text
from fedveil.validation import explained


class Settings(BaseModel):
    """The keys of one file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a settings file; what is wrong is named by file and key."""
        try:
            return cls.model_validate(parse_toml(read_text(path, ConfigError), str(path), ConfigError))
        except ValidationError as error:
            raise ConfigError(f"{path}: {explained(error, cls)}") from None

    def write(self, path: Path) -> None:
        """Write a settings file."""
        path.write_text(tomlkit.dumps(self.model_dump(mode="json", exclude_none=True)), encoding="utf-8")
