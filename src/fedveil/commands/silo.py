"""The commands of a silo: serve it, and its ledger."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedveil.commands.options import OUT, Json, end_by_terminate
from fedveil.console import print_json
from fedveil.federation.ledger_audit import export_ledger
from fedveil.federation.silo_ledger import adopt
from fedveil.flower.folders import SiloFolder
from fedveil.flower.silo import ServedSilo

silo = typer.Typer(
    help="Serve a silo; export its ledger, or answer for one that lost lines.",
    no_args_is_help=True,
    add_completion=False,
)
ledger = typer.Typer(help="What the silo's users have spent over all runs.", no_args_is_help=True)
silo.add_typer(ledger, name="ledger")

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="the silo's folder")]


@silo.command("serve")
def serve_command(folder: Folder) -> None:
    """Serve as a silo: the guard with table and keys, and the carrier that brings it letters; no port is opened."""
    home = SiloFolder(folder)
    end_by_terminate()
    served = ServedSilo(home)
    try:
        OUT.print(f"silo {home.settings.name} answers {home.settings.coordinator}; Ctrl-C ends it")
        served.wait()
    finally:
        served.stop()


@ledger.command("export")
def export_command(
    folder: Folder,
    output: Annotated[Path, typer.Option("--output", "-o", help="the file to write")] = Path("ledger.json"),
    as_json: Json = False,
) -> None:
    """Write the ledger as one signed file for an auditor, who checks it by `fedveil verify`."""
    home = SiloFolder(folder)
    membership = home.membership
    made = export_ledger(
        home / "state",
        output,
        identity=home.identity,
        membership=membership,
        number=membership.number(home.settings.name),
        delta=home.policy.delta,
    )
    print_json({"export": made}) if as_json else OUT.print(f"ledger: {made}")


@ledger.command("adopt")
def adopt_command(
    folder: Folder,
    reason: Annotated[str, typer.Option(help="what happened, for an auditor; it stays in the ledger")],
    head: Annotated[
        list[str] | None, typer.Option(help="a missing head that the silo's log names (may be repeated)")
    ] = None,
    as_json: Json = False,
) -> None:
    """Go on with a ledger that lost lines, and answer for them: what they charged is not counted any more."""
    missing = adopt(SiloFolder(folder) / "state", reason, tuple(head or ()))
    if as_json:
        print_json({"missing": missing})
    else:
        OUT.print(
            f"adopted; {missing} missing heads are answered for. More was spent than this ledger tells."
        )
