"""The command that checks what others made: a bundle, or a ledger that a silo exported."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from fedveil.bundle.verification import verify_bundle
from fedveil.commands.options import OUT, Json
from fedveil.console import print_json, rows_table
from fedveil.errors import IntegrityError
from fedveil.federation.ledger_audit import verify_ledger


def verify_command(
    made: Annotated[
        Path, typer.Argument(metavar="PATH", help="a bundle (folder or .zip), or an exported ledger (.json)")
    ],
    trust: Annotated[
        list[str] | None,
        typer.Option(help="public key that must have signed (may be repeated)"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check a bundle or an exported ledger: bytes, signatures, chain, epsilon; and list what cannot be checked."""
    check = verify_ledger if made.suffix == ".json" else verify_bundle
    found = check(made, trust or ())
    if as_json:
        print_json({"path": made, "holds": found.holds, "checks": [asdict(one) for one in found.checks]})
    else:
        OUT.print(
            rows_table([{"check": one.name, "outcome": one.outcome, "": one.detail} for one in found.checks])
        )
    failed = [one for one in found.checks if one.outcome == "fails"]
    if failed:
        raise IntegrityError(f"{found.path}: {failed[0].name}: {failed[0].detail}")
