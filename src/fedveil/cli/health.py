"""The command that says whether a served party does its work; it imports no more than it needs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedveil.federation.hosts.metrics_server import ask_party
from fedveil.sanitize import sanitize


def health_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="the folder of a coordinator or a silo")],
) -> None:
    """Exit with code 0 if the party serves, is connected and has valid certificates, otherwise 1 with the cause."""
    found = ask_party(folder.absolute(), "/ready")
    if found is None:
        typer.echo(f"{folder}: no process serves it")
    elif found[0] != 200:
        typer.echo(sanitize(found[1]))
    else:
        return
    raise typer.Exit(1)
