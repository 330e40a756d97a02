"""The command for regression with intervals that count the noise."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from fedveil.cli.figures import print_statement
from fedveil.cli.options import OUT, Json, Runs, print_result
from fedveil.console import ends, epsilon_text, number, print_json, rows_table
from fedveil.errors import ConfigError
from fedveil.privacy.statement import show_at_least
from fedveil.report.inference import p_text, write_inference
from fedveil.run.config.release_document import InferenceDocument, read_releases
from fedveil.run.document_run import make_releases
from fedveil.run.folder.documents import read_statement
from fedveil.run.folder.run_folder import finite
from fedveil.run.releases.inference import PreparedInference, find_inference_folder, prepare_inference
from fedveil.statistics.inference.result import TOO_FEW_HERE, FittedRegression, read_fitted


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
    document = read_releases(file, InferenceDocument)
    prepared = prepare_inference(document)
    if plan:
        _print_plan(prepared, as_json)
        return
    stored = None if again else find_inference_folder(document, runs)
    if stored is not None:
        raise ConfigError(
            f"{file}: {stored} is this regression of the same tables; `fedveil show {stored}` reads it again for "
            f"nothing, `fedveil resume {stored}` ends it if it was interrupted, --repeat pays for another"
        )
    print_inference(make_releases(prepared, runs), as_json)


def print_inference(folder: Path, as_json: bool) -> None:
    """Write the page of a regression, and print it."""
    report, fitted, statement = (
        write_inference(folder),
        read_fitted(folder),
        read_statement(folder / "privacy.json"),
    )
    if as_json:
        found = inference_json(fitted)
        print_json({"folder": folder, **found, "statement": statement.to_json(), "report": report})
        return
    print_effects(fitted)
    print_statement(statement)
    OUT.print(f"report: {report}")


def inference_json(fitted: FittedRegression) -> dict[str, Any]:
    """Return what a regression found, as JSON."""
    return {
        "family": fitted.family.name,
        "target": list(fitted.family.columns),
        "shown": fitted.has_intervals,
        "reason": fitted.hidden_reason,
        "effects": [asdict(one) for one in fitted.effects],
        "without_interval": list(fitted.lost),
    }


def print_effects(fitted: FittedRegression) -> None:
    """Print all coefficients, or why there are none."""
    if fitted.hidden_reason is not None:
        OUT.print(f"no coefficient has an interval that holds: {fitted.hidden_reason}")
        return
    OUT.print(rows_table(_rows(fitted)))


def _rows(fitted: FittedRegression) -> list[dict[str, str]]:
    found = []
    for one in fitted.effects:
        cells = {
            "coefficient": one.name,
            "estimate": number(one.estimate),
            "95 % interval": ends(one.low, one.high),
        }
        if one.ratio is not None:
            value, low, high = one.ratio
            cells |= {"e^coefficient": number(value), "its 95 % interval": ends(low, high)}
        found.append(cells | {"z": f"{one.z:.2f}", "p": p_text(one.p), "width": f"privacy {one.privacy:.0%}"})
    empty = dict.fromkeys(found[0], "")
    return [*found, *(empty | {"coefficient": name, "estimate": TOO_FEW_HERE} for name in fitted.lost)]


def _print_plan(prepared: PreparedInference, as_json: bool) -> None:
    """Print what is predicted of every coefficient, and what the releases cost."""
    series = prepared.series
    epsilon = finite(series.epsilon_of(series.event)) if series.secure else None
    releases = [
        {
            "release": place,
            "numbers": one.step.length,
            "share": part.share,
            "multiplier": part.multiplier(prepared.multiplier),
        }
        for place, (part, one) in enumerate(zip(prepared.fitted.parts, series.releases, strict=True), start=1)
    ]
    effects = [
        {
            "coefficient": one.name,
            "95 % half width": one.error,
            "width from privacy": one.privacy,
            "curvature over noise": one.margin,
        }
        for one in prepared.plan
    ]
    print_result(
        as_json,
        {"epsilon": epsilon, "releases": releases, "effects": effects},
        rows_table(releases),
        rows_table(effects),
        f"noise multiplier {show_at_least(prepared.multiplier)}, epsilon {epsilon_text(epsilon)} at delta "
        f"{prepared.document.privacy.delta:g}; no record was read and nothing was charged",
    )
