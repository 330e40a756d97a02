"""Commands for statistics that count people over silos, and for reading what was released."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedveil.cli.options import (
    OUT,
    Csv,
    Json,
    Runs,
    check_writable,
    expand_option_groups,
    print_frame,
    print_result,
    print_tables,
)
from fedveil.console import print_json, rows_table, spinner
from fedveil.errors import ConfigError

if TYPE_CHECKING:  # what is only named here takes seconds to import
    from fedveil.api.frame import Frame
    from fedveil.run.config.release_document import TableDocument
    from fedveil.statistics.evaluation.result import ReleasedEvaluation
    from fedveil.statistics.figures import Row
    from fedveil.statistics.inference.result import FittedRegression


Here = Annotated[
    bool,
    typer.Option("--these-people", help="intervals for these very people, without sampling variation"),
]


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """Folders of runs, CSV file and output format of a statistics command."""

    runs: Runs = Path("runs")
    csv: Csv = None
    as_json: Json = False


@expand_option_groups
def stats_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="a TOML file with a table `statistics`")],
    output: OutputOptions,
    plan: Annotated[
        bool, typer.Option("--plan", help="predict every error bar; no record is read, nothing is charged")
    ] = False,
    again: Annotated[
        bool, typer.Option("--repeat", help="pay again for cells that a stored release already has")
    ] = False,
    here: Here = False,
) -> None:
    """Count people across silos: one release of tables with intervals, within one budget."""
    from fedveil.api.releases import plan_statistics, release_statistics
    from fedveil.run.config.release_document import ReleaseDocument, read_releases

    check_writable("--csv", output.csv)
    document = read_releases(file, ReleaseDocument)
    if plan:
        planned = plan_statistics(document)
        _write_rows(planned, output.csv)
        print_frame(planned, output.as_json)
        return
    with spinner(_releasing(document)):
        release = release_statistics(document, output.runs, repeat=again)
    print_release(release.folder, output.as_json, here, csv=output.csv)


def _releasing(document: TableDocument) -> str:
    """Return what a terminal shows meanwhile: private weighting takes minutes for thousands of people."""
    return f"{document.name}: making the releases, protection {document.protection.name}"


def _write_rows(frame: Frame, csv: Path | None) -> None:
    """Write the rows of a result into a CSV file, if one is asked for."""
    if csv is not None:
        frame.write_csv(csv)


def print_release(folder: Path, as_json: bool, here: bool = False, *, csv: Path | None = None) -> None:
    """Write the page of a release and the CSV file, if one is asked for, and print what the release shows."""
    from fedveil.api.releases import read_statistics
    from fedveil.cli.options import print_statement

    release = read_statistics(folder, these_people=here)
    _write_rows(release, csv)
    report = release.report()
    if as_json:
        print_json(release.to_json() | {"report": report})
        return
    print_tables(release)
    print_statement(release.statement)
    OUT.print(f"report: {report}")


def show_command(
    folder: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="the run folder of a release, a regression or an evaluated run"),
    ],
    crossed: Annotated[
        list[str] | None, typer.Option("--cross", help="A,B: a cross table that the release contains")
    ] = None,
    levels: Annotated[
        list[str] | None, typer.Option("--quantile", help="COLUMN=Q,Q,...: quantiles of a number with bins")
    ] = None,
    here: Here = False,
    csv: Csv = None,
    as_json: Json = False,
) -> None:
    """Print released figures again, or figures that follow from them: free of charge, and no record is read."""
    from fedveil.api.releases import figure_frame
    from fedveil.cli.options import print_rows
    from fedveil.statistics.evaluation.result import read_evaluated
    from fedveil.statistics.figures import cross, quantiles, rows
    from fedveil.statistics.inference.result import FILE
    from fedveil.statistics.result import read_released

    check_writable("--csv", csv)
    evaluated = read_evaluated(folder)
    if evaluated is not None:
        _show_evaluated(evaluated, bool(crossed or levels), here, csv, as_json)
        return
    if (folder / FILE).exists() and not crossed and not levels:
        _show_fitted(folder, csv, as_json)
        return
    released = read_released(folder)
    shown: list[Row] = []
    for text in crossed or ():
        shown += cross(released, tuple(part.strip() for part in text.split(",")))
    for text in levels or ():
        column, equals, numbers = text.partition("=")
        try:
            orders = tuple(float(part) for part in numbers.split(","))
        except ValueError:
            orders = ()
        if not equals or not orders:
            raise ConfigError(f"--quantile {text}: expected COLUMN=Q,Q,..., for instance age=.1,.9")
        shown += quantiles(released, column.strip(), orders)
    if not crossed and not levels:
        shown = list(rows(released))
    _write_rows(figure_frame(shown), csv)
    if as_json:
        print_json({"counted": released.counted_unit, "rows": [row.to_json() for row in shown]})
        return
    print_rows(shown, here)


def _show_evaluated(
    evaluated: ReleasedEvaluation, has_options: bool, here: bool, csv: Path | None, as_json: bool
) -> None:
    """Print the test metrics of a run again."""
    from fedveil.api.releases import figure_frame
    from fedveil.cli.options import print_rows

    if has_options:
        raise ConfigError(
            "--cross and --quantile are of releases of `fedveil stats`; this run released test metrics"
        )
    _write_rows(figure_frame(evaluated.rows), csv)
    if as_json:
        print_json(evaluated.to_json())
        return
    OUT.print(f"test metrics of the model after round {evaluated.round}")
    print_rows(evaluated.rows, here)


def _show_fitted(folder: Path, csv: Path | None, as_json: bool) -> None:
    """Read a regression again."""
    from fedveil.api.releases import effects_json, read_regression

    regression = read_regression(folder)
    _write_rows(regression, csv)
    fitted = regression.fitted
    if as_json:
        print_json(effects_json(fitted))
    else:
        print_effects(fitted)


# --- regressions --------------------------------------------------------------------------------------------
# The command for regression with intervals that count the noise.


@expand_option_groups
def infer_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="a TOML file with a table `inference`")],
    output: OutputOptions,
    plan: Annotated[
        bool, typer.Option("--plan", help="predict every interval; no record is read, nothing is charged")
    ] = False,
    again: Annotated[
        bool, typer.Option("--repeat", help="pay again for a regression that was begun or released already")
    ] = False,
) -> None:
    """Estimate effects across silos: one regression with intervals, within one budget."""
    from fedveil.api.releases import plan_regression, release_regression
    from fedveil.run.config.release_document import InferenceDocument, read_releases

    check_writable("--csv", output.csv)
    document = read_releases(file, InferenceDocument)
    if plan:
        planned = plan_regression(document)
        _write_rows(planned, output.csv)
        tables = (rows_table(planned.releases), rows_table(planned.shown))
        print_result(output.as_json, planned.to_json(), *tables, *planned.lines)
        return
    with spinner(_releasing(document)):
        regression = release_regression(document, output.runs, repeat=again)
    print_inference(regression.folder, output.as_json, csv=output.csv)


def print_inference(folder: Path, as_json: bool, *, csv: Path | None = None) -> None:
    """Write the page of a regression and the CSV file, if one is asked for, and print the regression."""
    from fedveil.api.releases import read_regression
    from fedveil.cli.options import print_statement

    regression = read_regression(folder)
    _write_rows(regression, csv)
    report = regression.report()
    if as_json:
        print_json(regression.to_json() | {"report": report})
        return
    print_effects(regression.fitted)
    print_statement(regression.statement)
    OUT.print(f"report: {report}")


def print_effects(fitted: FittedRegression) -> None:
    """Print all coefficients, or why there are none, and n."""
    from fedveil.api.releases import effects_in_words, n_in_words

    OUT.print(n_in_words(fitted), highlight=False)
    if fitted.hidden_reason is not None:
        OUT.print(f"no coefficient has an interval that holds: {fitted.hidden_reason}")
        return
    OUT.print(rows_table(effects_in_words(fitted)))
