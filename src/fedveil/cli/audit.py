"""The command that attacks a run."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from fedveil.cli.options import OUT, Code, Json
from fedveil.console import print_json
from fedveil.privacy.audit import unlike_records
from fedveil.privacy.statement import show_epsilon, show_lower_bound
from fedveil.report.page import write_report
from fedveil.run.audit import audit


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
    found = audit(folder, canaries=canaries, code=code or ())
    report = write_report(folder)
    unlike = unlike_records(found.inference.high)
    if as_json:
        print_json({**asdict(found), "refuted": found.is_refuted, "unlike_records": unlike, "report": report})
        return
    inference = found.inference
    OUT.print(f"membership inference: AUC {inference.auc:.4f} ({inference.low:.4f} to {inference.high:.4f})")
    if unlike is not None:
        OUT.print(f"WARNING: {unlike}", style="bold yellow")
    if found.bound is not None:
        least = show_lower_bound(found.bound.epsilon)
        claimed = "nothing" if found.claimed is None else f"epsilon {show_epsilon(found.claimed)}"
        sure = f"{found.bound.confidence:.0%} confidence"
        OUT.print(f"epsilon for one {found.unit} is at least {least} ({sure}); the run claims {claimed}")
    if found.is_refuted:
        OUT.print(
            "ERROR: the claim is below what an attack shows; of a true claim as few audits say so as the confidence "
            "leaves: repeat it",
            style="bold red",
        )
    OUT.print(f"report: {report}")
