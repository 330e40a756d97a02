"""The command for regression with intervals that count the noise."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedveil.cli.options import OUT, Json, Runs, print_result
from fedveil.console import print_json, rows_table

if TYPE_CHECKING:  # what is only named here takes seconds to import
    from fedveil.statistics.inference.result import FittedRegression


def infer_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="a TOML file with a table `inference`")],
    plan: Annotated[
        bool, typer.Option("--plan", help="predict every interval; no record is read, nothing is charged")
    ] = False,
    again: Annotated[
        bool, typer.Option("--repeat", help="pay again for a regression that was begun or released already")
    ] = False,
    runs: Runs = Path("runs"),
    as_json: Json = False,
) -> None:
    """Estimate effects across silos: one regression with intervals, within one budget."""
    from fedveil.api.releases import plan_regression, release_regression
    from fedveil.run.config.release_document import InferenceDocument, read_releases

    document = read_releases(file, InferenceDocument)
    if plan:
        found = plan_regression(document)
        tables = (rows_table(found.releases), rows_table(found.shown))
        print_result(as_json, found.to_json(), *tables, *found.lines)
        return
    print_inference(release_regression(document, runs, repeat=again).folder, as_json)


def print_inference(folder: Path, as_json: bool) -> None:
    """Write the page of a regression, and print it."""
    from fedveil.api.releases import read_regression
    from fedveil.cli.figures import print_statement

    found = read_regression(folder)
    report = found.report()
    if as_json:
        print_json(found.to_json() | {"report": report})
        return
    print_effects(found.fitted)
    print_statement(found.statement)
    OUT.print(f"report: {report}")


def print_effects(fitted: FittedRegression) -> None:
    """Print all coefficients, or why there are none."""
    from fedveil.api.releases import effects_in_words

    if fitted.hidden_reason is not None:
        OUT.print(f"no coefficient has an interval that holds: {fitted.hidden_reason}")
        return
    OUT.print(rows_table(effects_in_words(fitted)))
