"""Commands of served processes: serve a link, ask for health. They import neither PyTorch nor what reads tables."""

from __future__ import annotations

import logging
import signal
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from fedveil.errors import ConfigError
from fedveil.sanitize import LogFormat, log_choice, one_line, sanitize


def link_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="the link's folder")],
) -> None:
    """Serve the coordinator's link under its own user account, which holds the TLS key and no other key."""
    from fedveil.federation.hosts.link_folder import LinkFolder

    found = LinkFolder(folder)
    serve_link = import_late("fedveil.federation.hosts.link").serve_link
    end_by_terminate()
    announce(f"listening on {found.settings.address}; Ctrl-C ends it")
    serve_link(found, lambda: False)


def announce(text: str) -> None:
    """Tell the operator of a served party something: on standard output, or with ``--log-format json`` in the log.

    A collector of logs reads both, and expects every line in that format.
    """
    if log_choice()[1] is LogFormat.TEXT:
        typer.echo(one_line(text))
    else:  # whatever level the log shows
        log = logging.getLogger("fedveil")
        log.handle(log.makeRecord(log.name, logging.INFO, __file__, 0, text, (), None))


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
    """Let SIGTERM end a served party with exit code 0, so that a service manager calls no stopped service failed."""
    signal.signal(signal.SIGTERM, _end)


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(0)


# --- health of a served party ---


def health_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="the folder of a coordinator or a silo")],
) -> None:
    """Exit with code 0 if the party serves, is connected and has valid certificates, otherwise 1 with the cause."""
    from fedveil.federation.hosts.metrics_server import ask_party

    found = ask_party(folder.absolute(), "/ready")
    if found is None:
        typer.echo(f"{folder}: no process serves it")
    elif found[0] != 200:
        typer.echo(sanitize(found[1]))
    else:
        return
    raise typer.Exit(1)
