"""The command that checks what others made: a run, a bundle, or a ledger that a silo exported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from fedveil.checks import Verification
from fedveil.cli.options import OUT, Code, Json, print_result
from fedveil.console import print_json, rows_table
from fedveil.errors import ConfigError, IntegrityError


def verify_command(
    made: Annotated[
        Path,
        typer.Argument(
            metavar="PATH",
            help="folder of a run or release, a bundle (folder or .zip), or an exported ledger (.json)",
        ),
    ],
    trust: Annotated[
        list[str] | None,
        typer.Option(help="public key that must have signed a bundle or an export (may be repeated)"),
    ] = None,
    charter: Annotated[
        Path | None, typer.Option(help="to verify a run: the federation's charter, as it was handed to you")
    ] = None,
    membership: Annotated[
        Path | None, typer.Option(help="to verify an export: the sealed membership of silo and coordinator")
    ] = None,
    ledger: Annotated[
        list[Path] | None, typer.Option(help="ledger that a silo of the run exported (may be repeated)")
    ] = None,
    as_json: Json = False,
) -> None:
    """Verify a run, bundle or exported ledger (bytes, signatures, chains, epsilon); list what cannot be checked."""
    found = _verified(made, trust or [], (charter, membership), ledger or [])
    rows = [{"check": one.name, "outcome": one.outcome, "": one.detail} for one in found.checks]
    checks = [asdict(one) for one in found.checks]
    failed = [one for one in found.checks if one.outcome == "fails"]
    held = sum(one.outcome == "holds" for one in found.checks)
    closing = (
        f"{len(failed)} of {held + len(failed)} checks fail."
        if failed
        else f"All {held} checks hold. What is unchecked cannot be shown by these files."
    )
    print_result(as_json, {"path": made, "holds": found.holds, "checks": checks}, rows_table(rows), closing)
    if failed:
        raise IntegrityError(f"{found.path}: {failed[0].name}: {failed[0].detail}")


def _verified(
    made: Path, trust: list[str], known: tuple[Path | None, Path | None], ledgers: list[Path]
) -> Verification:
    from fedveil.bundle.verification import verify_bundle
    from fedveil.federation.audit.ledger_audit import verify_ledger
    from fedveil.federation.audit.recorded_run import verify_run
    from fedveil.federation.canonical_document import DOCUMENTS

    if not made.exists():
        raise ConfigError(f"{made}: there is no such folder or file")
    charter, membership = known
    for option, path in (
        ("--charter", charter),
        ("--membership", membership),
        *(("--ledger", one) for one in ledgers),
    ):
        if path is not None and not path.is_file():
            raise ConfigError(f"{option} {path}: there is no such file")
    given = {"--trust": trust, "--charter": charter, "--membership": membership, "--ledger": ledgers}
    if any((made / name).is_file() for name in DOCUMENTS):
        _refuse(given, "a run folder", {"--charter", "--ledger"})
        return verify_run(made, charter, ledgers)
    if made.suffix == ".json":
        _refuse(given, "an exported ledger", {"--trust", "--membership"})
        return verify_ledger(made, trust, membership)
    _refuse(given, "a bundle", {"--trust", "--charter"})
    return verify_bundle(made, trust, charter)


def _refuse(given: Mapping[str, object], what: str, taken: set[str]) -> None:
    for name, value in given.items():
        if value and name not in taken:
            takes = " and ".join(sorted(taken)) or "none of these options"
            raise ConfigError(f"{name}: {what} is checked without it; it takes {takes}")


# --- attacks ------------------------------------------------------------------------------------------------
# The command that attacks a run.


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
