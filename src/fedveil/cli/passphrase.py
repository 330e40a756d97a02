"""Read the passphrase of a key file: from a descriptor, a credential of the service manager, or the terminal.

Never an argument or an environment variable: other users of a host can read those. ``CREDENTIALS_DIRECTORY`` is the
folder that systemd's ``LoadCredential=`` or a container's secrets give to a service; the file ``passphrase`` in it.
"""

from __future__ import annotations

import getpass
import os
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Final

import typer

from fedveil.errors import ConfigError
from fedveil.files import read_content

Descriptor = Annotated[
    int | None,
    typer.Option("--passphrase-fd", min=0, help="read the passphrase from this open file descriptor"),
]
_LONGEST: Final = 4096
_SHORTEST: Final = 12


class PromptedPassphrase:
    """Gives a passphrase, asked for once, and not before it is needed.

    Args:
        descriptor: to read it from.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self._descriptor = descriptor

    def __call__(self) -> bytes:
        """Return it.

        Raises:
            ConfigError: there is nowhere to ask.
        """
        return self._found

    @cached_property
    def _found(self) -> bytes:
        credentials = os.environ.get("CREDENTIALS_DIRECTORY")
        if self._descriptor is not None:
            try:
                with os.fdopen(
                    self._descriptor, "rb", closefd=False
                ) as stream:  # to its end: a pipe gives pieces
                    found = stream.read(_LONGEST + 1)
            except OSError as error:
                raise ConfigError(
                    f"--passphrase-fd {self._descriptor}: cannot be read: {error.strerror}"
                ) from None
        elif credentials is not None and (Path(credentials) / "passphrase").exists():
            found = read_content(Path(credentials) / "passphrase", ConfigError, largest=_LONGEST)
        elif sys.stdin.isatty():
            found = getpass.getpass("passphrase: ").encode()
        else:
            raise ConfigError("a passphrase is needed: give --passphrase-fd, a credential, or a terminal")
        if len(found) > _LONGEST:
            raise ConfigError(f"a passphrase has at most {_LONGEST} bytes")
        return found.rstrip(b"\r\n")

    def choose_new(self) -> bytes:
        """Return the passphrase for a new key's file.

        Raises:
            ConfigError: too short, or typed in differently twice.
        """
        found = self()
        if len(found) < _SHORTEST:
            raise ConfigError(f"a passphrase has at least {_SHORTEST} characters; take five random words")
        if self._descriptor is None and sys.stdin.isatty() and getpass.getpass("again: ").encode() != found:
            raise ConfigError("the two passphrases differ")
        return found


@dataclass(frozen=True, kw_only=True)
class NewKey:
    """The options by which the file of a new key is protected."""

    descriptor: Descriptor = None
    unprotected: Annotated[
        bool, typer.Option("--no-passphrase", help="protect the key's file by its mode alone")
    ] = False

    def passphrase(self) -> bytes | None:
        """Return the passphrase of the file; None where its mode alone shall protect it.

        Raises:
            ConfigError: too short, or typed in differently twice.
        """
        return None if self.unprotected else PromptedPassphrase(self.descriptor).choose_new()
