"""The command that attacks a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedveil.cli.options import OUT, Code, Json
from fedveil.console import print_json


def audit_command(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="folder of a run that has ended")],
    canaries: Annotated[
        int,
        typer.Option(min=0, help="units inserted in the one-run audit, which trains once more; 0 skips it"),
    ] = 200,
    code: Code = None,
    as_json: Json = False,
) -> None:
    """Attack a run: membership inference, and a lower bound on epsilon that may refute the stated one."""
    from fedveil.api.run_folders import audit

    found = audit(folder, canaries=canaries, code=code or ())
    if as_json:
        print_json(found.to_json())
        return
    for line in found.lines:
        style = {found.refutation: "bold red", f"WARNING: {found.unlike}": "bold yellow"}.get(line)
        OUT.print(line, style=style)
    OUT.print(f"report: {found.report}")
