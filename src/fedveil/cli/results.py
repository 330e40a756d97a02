"""Commands that read run folders."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from fedveil.cli.options import OUT, Json, print_result
from fedveil.console import epsilon_text, print_json, rows_table
from fedveil.privacy.joint_cost import joint_cost
from fedveil.report.compare import compare
from fedveil.report.page import write_report
from fedveil.report.tradeoff import write_tradeoff


def report_command(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="a run folder")], as_json: Json = False
) -> None:
    """Write a run's self-contained report again."""
    path = write_report(folder)
    print_result(as_json, {"report": path}, f"report: {path}")


def compare_command(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN...", help="run folders, or folders of them")],
    page: Annotated[Path, typer.Option(help="where the page is written")] = Path("comparison.html"),
    against: Annotated[
        str | None, typer.Option(help="a key: draw results and costs against it, with the Pareto front")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare runs: a table with the standard deviation over seeds, and a page of privacy-utility curves."""
    if against is not None:
        written = write_tradeoff(_run_folders(folders), against, page)
        print_result(as_json, {"page": written}, f"comparison: {written}")
        return
    comparison = compare(_run_folders(folders))
    if as_json:
        print_json(comparison.to_json())
        return
    for warning in comparison.warnings:
        OUT.print(warning)
    metrics = dict.fromkeys(name for row in comparison.rows for name in row.metrics)
    OUT.print(
        rows_table(
            {"variant": row.variant, "seeds": row.seeds}
            | {f"test {name}": str(row.metrics.get(name, "-")) for name in metrics}
            | {"epsilon": _epsilon(row.epsilon), "to server": _epsilon(row.to_server), "delta": row.delta}
            | {"unit": row.unit, "rounds": row.round}
            for row in comparison.rows
        )
    )
    OUT.print(f"comparison: {comparison.write(page)}")


def spent_command(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN...", help="run folders over the same people")],
    delta: Annotated[
        float | None, typer.Option(help="delta of the sum; default: that of the runs, if it is the same")
    ] = None,
    accountant: Annotated[str, typer.Option(help="pld, rdp or rdp-2017")] = "pld",
    as_json: Json = False,
) -> None:
    """Calculate what several runs over the same people cost together."""
    found = joint_cost(folders, delta, accountant)
    rows = [
        {"run": path.name, "charges": charges, "epsilon": epsilon} for path, charges, epsilon in found.runs
    ]
    told = "one of these runs guarantees nothing, so all together guarantee nothing"
    if found.promise is not None:
        told = f"together: {found.promise}, against whoever reads all that these runs released"
    print_result(as_json, asdict(found) | {"runs": rows}, rows_table(rows), told)


def _epsilon(value: float) -> str:
    return epsilon_text(value if math.isfinite(value) else None)


def _run_folders(folders: list[Path]) -> list[Path]:
    found = []
    for folder in folders:
        inner = sorted(path.parent for path in folder.glob("*/experiment.toml"))
        found.extend([folder] if (folder / "experiment.toml").exists() or not inner else inner)
    return found
