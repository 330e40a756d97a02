"""The command that serves a link; it imports neither PyTorch nor what reads tables."""

from __future__ import annotations

import os
import signal
import time
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from fedveil.errors import ConfigError
from fedveil.flower.coordinator_host.link_folder import LinkFolder
from fedveil.flower.flower_version import check_flower_version


def link_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="the link's folder")],
) -> None:
    """Serve the coordinator's link under its own user account, which holds the TLS key and no other key."""
    found = LinkFolder(folder)
    end_by_terminate()
    os.environ.update({"FLWR_TELEMETRY_ENABLED": "0", "FLWR_HOME": str(found / "flower")})
    serve = import_late("fedveil.flower.coordinator_host.link").serve
    typer.echo(f"listening on {found.settings.address}; Ctrl-C ends it")
    serve(found, _slept)


def import_late(module: str) -> Any:
    """Return a module that carries letters, which is imported when it serves.

    Raises:
        ConfigError: what it needs is not installed, or another release of Flower than it was made for.
    """
    check_flower_version()
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


def _slept(seconds: float) -> bool:
    time.sleep(seconds)
    return False
