"""The command that serves a link; it imports neither PyTorch nor what reads tables."""

from __future__ import annotations

import signal
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from fedveil.errors import ConfigError


def link_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="the link's folder")],
) -> None:
    """Serve the coordinator's link under its own user account, which holds the TLS key and no other key."""
    from fedveil.federation.hosts.link_folder import LinkFolder

    found = LinkFolder(folder)
    serve_link = import_late("fedveil.federation.hosts.link").serve_link
    end_by_terminate()
    typer.echo(f"listening on {found.settings.address}; Ctrl-C ends it")
    serve_link(found, lambda: False)


def import_late(module: str) -> Any:
    """Return a module of a transport, which is imported when it serves.

    Raises:
        ConfigError: a package of the extra ``federation`` is not installed.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as missing:
        raise ConfigError(
            f"a federation needs {missing.name}, which is not installed: pip install 'fedveil[federation]'"
        ) from None


def end_by_terminate() -> None:
    """Let SIGTERM end a command as Ctrl-C does."""
    signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
