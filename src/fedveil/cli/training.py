"""Commands that train, check what would be trained, or plan a federation before there are data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from fedveil.cli.options import (
    MOST_SEEDS,
    OUT,
    Code,
    Json,
    Runs,
    Source,
    TranscriptOption,
    WorkerOptions,
    expand_option_groups,
    print_frame,
)
from fedveil.console import (
    observer,
    outcome_table,
    print_json,
    rows_table,
    transposed_table,
)
from fedveil.errors import BudgetError, ConfigError

if TYPE_CHECKING:
    from fedveil.run.config.experiment import Experiment
    from fedveil.run.config.study import Selection, Study
    from fedveil.run.populations import PopulationCache
    from fedveil.run.setup import Prepared
    from fedveil.run.steps.experiment import Outcome


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options by which a command picks experiments of a preset, and changes them."""

    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", help="KEY=VALUE overrides a key of every experiment; KEY= removes it"),
    ] = None
    quick: Annotated[bool, typer.Option("--quick", help="the preset's small version: about a minute")] = False
    scenario: Annotated[
        list[str] | None, typer.Option("--scenario", help="only this scenario (may be repeated)")
    ] = None
    variant: Annotated[
        list[str] | None, typer.Option("--variant", help="only this variant (may be repeated)")
    ] = None
    seeds: Annotated[
        int, typer.Option("--seeds", min=1, max=MOST_SEEDS, help="runs per variant, with consecutive seeds")
    ] = 1

    @property
    def selection(self) -> Selection:
        """The same as a study takes it."""
        from fedveil.run.config.experiment import parse_assignment
        from fedveil.run.config.study import Selection

        return Selection(
            scenarios=None if self.scenario is None else tuple(self.scenario),
            variants=None if self.variant is None else tuple(self.variant),
            seeds=self.seeds,
            quick=self.quick,
            overrides=tuple(parse_assignment(text) for text in self.assignments or ()),
        )


@expand_option_groups
def run_command(
    source: Source,
    chosen: RunOptions,
    runs: Runs = Path("runs"),
    transcript: TranscriptOption = False,
    as_json: Json = False,
) -> None:
    """Train one experiment, or every experiment of a preset; print a table and write a report."""
    from fedveil.report.compare import compare
    from fedveil.report.page import write_report
    from fedveil.run.config.study import load_study
    from fedveil.run.loop import NullObserver
    from fedveil.run.process_group import rank
    from fedveil.run.remarks import people_warnings
    from fedveil.run.training_run import run

    study = load_study(source, chosen.selection)
    if transcript and all(experiment.protection.name == "none" for experiment in study.experiments):
        raise ConfigError(
            "--transcript: no protocol runs here, so there is no message to list; "
            "--set protection.name=secure-aggregation adds one"
        )
    single = len(study.experiments) == 1
    prepared = _prepared(study)
    parent = runs if single else _fresh(runs / study.name)
    if rank() > 0:  # under torchrun, rank 0 prints and writes for all
        for ready in prepared:
            run(ready, parent, NullObserver())
        return
    if not as_json:
        for line in (*study.choices, *(() if single else (study.title,))):
            OUT.print(line)
    outcomes, report = [], None
    with observer(OUT, quiet=as_json) as watching:
        for ready in prepared:
            if not as_json:
                for warning in people_warnings(ready):
                    OUT.print(f"{ready.experiment.name}: {warning}")
            outcome = run(ready, parent, watching, transcript=transcript)
            report = write_report(outcome.folder)
            outcomes.append(outcome)
    if not single:
        report = compare([ended.folder for ended in outcomes]).write(parent / "comparison.html")
    _end(outcomes, report, as_json)


def resume_command(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="a run folder")],
    code: Code = None,
    as_json: Json = False,
) -> None:
    """Continue an interrupted run from its last complete round, or an interrupted release."""
    from fedveil.cli.results import kind_of, resume_release
    from fedveil.federation.audit.run_record import STATE
    from fedveil.report.page import write_report
    from fedveil.run.process_group import rank
    from fedveil.run.training_run import resume

    if (folder / STATE).exists():
        raise ConfigError(f"{folder}: a run between institutions: `fedveil federation run --resume {folder}`")
    kind = kind_of(folder)
    if kind is not None:
        resume_release(folder, kind, as_json)
        return
    with observer(OUT, quiet=as_json or rank() > 0) as watching:
        outcome = resume(folder, watching, code or ())
    if rank() > 0:
        return
    _end([outcome], write_report(outcome.folder), as_json)


@expand_option_groups
def check_command(
    source: Source,
    chosen: RunOptions,
    as_json: Json = False,
) -> None:
    """Check data, model, configuration and budget without training."""
    from fedveil.api.planning import CheckFrame, check_row
    from fedveil.cli.lists import print_report
    from fedveil.data.data_report import data_report
    from fedveil.data.schema import read_schema
    from fedveil.run.config.study import load_study
    from fedveil.run.populations import PopulationCache

    study = load_study(source, chosen.selection)
    populations = PopulationCache()
    tables = dict.fromkeys(
        experiment.data.table for experiment in study.experiments if experiment.data.table is not None
    )
    reports = [data_report(read_schema(table.schema_file), table.files) for table in tables]
    if not as_json:
        for report in reports:
            print_report(report)
        for line in study.choices:
            OUT.print(line)
    # One experiment is ready at a time, to save memory.
    frame = CheckFrame(
        rows=tuple(check_row(_ready(study, experiment, populations)) for experiment in study.experiments),
        budgets=tuple(experiment.privacy.budget for experiment in study.experiments),
    )
    if as_json:
        looked = {"data": [report.to_json() for report in reports]}
        print_json({"study": study.name, "experiments": list(frame.rows)} | looked)
    else:
        shown = frame.shown
        OUT.print(transposed_table(shown) if len(shown) == 1 else rows_table(shown, title=study.title))
        for line in frame.lines:
            OUT.print(line)
        for row in frame.rows:
            for remark in (*row["warnings"], *row["not read"]):
                OUT.print(f"{row['experiment']}: {remark}")


@expand_option_groups
def sweep_command(
    source: Source,
    over: Annotated[
        list[str], typer.Option("--over", help="KEY=VALUE,VALUE,... one axis of the grid (may be repeated)")
    ],
    chosen: RunOptions,
    on: WorkerOptions,
    runs: Runs = Path("runs/sweep"),
    as_json: Json = False,
) -> None:
    """Run a grid over any keys; repeat the command to continue an interrupted sweep."""
    from fedveil.api.model_selection import sweep_frame
    from fedveil.report.tradeoff import write_tradeoff
    from fedveil.run.sweep import Axis, joint_cost_of_points, points, sweep

    axes = [Axis.read(text) for text in over]
    grid = points(source, chosen.selection, axes)
    rows = []
    try:
        for row in sweep(grid, runs, workers=on.open()):
            rows.append(row)
            if not as_json:
                OUT.print(f"{row['run']}: ended after {row['seconds']:.1f} s")
    except KeyboardInterrupt as stop:
        stop.add_note("the same command goes on where it was")
        raise
    folders = [runs / point.experiment.name for point in grid]
    spent = joint_cost_of_points(grid, runs)
    frame = sweep_frame(rows, spent, runs)
    pages = [
        write_tradeoff(folders, axis.key, runs / f"{axis.key}.html", spent=spent["told"]) for axis in axes
    ]
    if as_json:
        print_json({"rows": rows, "pages": pages, "together": spent})
        return
    print_frame(frame, as_json=False)
    OUT.print(*pages, sep="\n")


def _prepared(study: Study) -> Iterator[Prepared]:
    """Check every experiment before the first one trains; return them prepared, one at a time to save memory."""
    from fedveil.run.populations import PopulationCache

    populations = PopulationCache()
    if len(study.experiments) > 1:
        for experiment in study.experiments:
            # Trials of kernels refuse nothing where the trainer is chosen by them: before the training they suffice.
            trainer = experiment.trainer
            _ready(study, experiment, populations, trains=trainer.name != "auto" or trainer.compile)
    return (_ready(study, experiment, populations) for experiment in study.experiments)


def _ready(
    study: Study, experiment: Experiment, populations: PopulationCache, *, trains: bool = True
) -> Prepared:
    from fedveil.run.setup import prepare

    with study.naming(experiment):
        return prepare(experiment, populations, trains=trains)


def _fresh(path: Path) -> Path:
    """Return a folder name that is not taken yet."""
    candidate, count = path, 1
    while candidate.exists():
        count += 1
        candidate = path.with_name(f"{path.name}-{count}")
    return candidate


def _end(outcomes: list[Outcome], report: Path | None, as_json: bool) -> None:
    if as_json:
        runs = [
            {
                "folder": outcome.folder,
                "rounds": outcome.rounds,
                "stopped": outcome.stopped,
                "test": outcome.row["test"],
                "evaluation": None if outcome.evaluated is None else outcome.evaluated.to_json(),
                "seconds": outcome.seconds,
                "statement": outcome.statement.to_json(),
            }
            for outcome in outcomes
        ]
        print_json({"runs": runs, "report": report})
    else:
        _print_end(outcomes, report)
    refused = [
        f"{outcome.folder}: {outcome.stopped}"
        for outcome in outcomes
        if outcome.stopped and not outcome.rounds
    ]
    if refused:
        raise BudgetError(f"refused before the first round: {'; '.join(refused)}")


def _print_end(outcomes: list[Outcome], report: Path | None) -> None:
    from fedveil.cli.options import print_rows, print_statement
    from fedveil.privacy.claims import Role
    from fedveil.run.advice import advice_of
    from fedveil.run.folder.run_folder import RunFolder
    from fedveil.run.remarks import explain_open_server

    OUT.print(outcome_table(outcomes))
    for outcome in outcomes:
        if outcome.was_complete:
            OUT.print(
                f"{outcome.folder.name}: all {outcome.rounds} rounds were made before; nothing was trained or charged "
                f"(`fedveil verify {outcome.folder}` prints the statement)",
                highlight=False,
            )
            continue
        if outcome.evaluated is not None:
            print_rows(outcome.evaluated.rows)
        if outcome.stopped and outcome.rounds:
            OUT.print(f"{outcome.folder.name}: stopped: {outcome.stopped}")
        to_server = outcome.statement.line_for(Role.SERVER)
        for remark in (
            advice_of(outcome.folder),
            explain_open_server(RunFolder.open(outcome.folder)[1], outcome.statement.epsilon, to_server),
        ):
            if remark is not None:
                OUT.print(f"{outcome.folder.name}: {remark}", highlight=False)
    if len(outcomes) == 1 and not outcomes[0].was_complete:
        print_statement(outcomes[0].statement)
    OUT.print(f"report: {report}")


# --- plan ---


_MOST: Final = 10**9
"""Of users, silos, rounds, records and parameters: as many as an experiment may have rounds."""


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The options that describe what is planned."""

    n_users: Annotated[
        int, typer.Option("--users", min=1, max=_MOST, help="|U|, the public number of users")
    ] = 100
    n_silos: Annotated[int, typer.Option("--silos", min=1, max=_MOST, help="|S|")] = 5
    rounds: Annotated[
        int | None, typer.Option(min=1, max=_MOST, help="T; 50 unless --epsilon and --sigma are given")
    ] = None
    noise_multipliers: Annotated[
        list[float] | None,
        typer.Option("--sigma", help="noise multiplier; may be repeated; 5 without --epsilon"),
    ] = None
    sampling_rates: Annotated[
        list[float] | None, typer.Option("--rate", help="user sampling rate q; may be repeated")
    ] = None
    delta: Annotated[float, typer.Option(min=0, max=1)] = 1e-5
    allow_large_delta: Annotated[
        bool,
        typer.Option(
            "--allow-large-delta", help="plan a delta of 1 / |U| or more, which protects nobody in particular"
        ),
    ] = False
    epsilon: Annotated[
        float | None,
        typer.Option(help="target: find the least sigma for the rounds, or the most rounds for --sigma"),
    ] = None
    group_sizes: Annotated[
        list[int] | None, typer.Option("--group", min=1, max=_MOST, help="k of uldp-group; may be repeated")
    ] = None
    records_per_silo: Annotated[
        int, typer.Option("--records", min=1, max=_MOST, help="records per silo (uldp-group)")
    ] = 1000
    batch_size: Annotated[int, typer.Option(min=1, max=_MOST, help="batch size (uldp-group)")] = 64
    epochs: Annotated[int, typer.Option(min=1, max=_MOST, help="local epochs (uldp-group)")] = 1
    colluding_silos: Annotated[int, typer.Option(min=0, max=_MOST)] = 0
    client_sampling_rates: Annotated[
        list[float] | None,
        typer.Option("--client-rate", help="dp-fed: share of the clients; may be repeated"),
    ] = None
    accountant: Annotated[str, typer.Option(help="pld, rdp or rdp-2017")] = "pld"

    @property
    def numbers(self) -> dict[str, Any]:
        """The options that are given, as arguments of :func:`fedveil.plan`."""
        return {name: value for name, value in vars(self).items() if value is not None}


@expand_option_groups
def plan_command(
    asked: PlanOptions,
    over: Annotated[
        str | None,
        typer.Option(
            "--over",
            help="rounds=T,T,...: noise-to-travel ratio for each, at --epsilon (pairs' methods); ratio=r,r,...: what "
            "each share under encryption leaves and sends",
        ),
    ] = None,
    parameters: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=_MOST,
            help="d, the number of model parameters: adds rho, noise over movement (1000 for --over)",
        ),
    ] = None,
    page: Annotated[Path, typer.Option(help="where the table and plot are written")] = Path("plan.html"),
    as_json: Json = False,
) -> None:
    """Calculate what each method would guarantee, from public numbers alone: sigma, epsilon, rounds."""
    from fedveil.api.planning import plan
    from fedveil.run.planning import read_over

    frame = plan(
        **asked.numbers, parameters=parameters, over=None if over is None else dict([read_over(over)])
    )
    print_frame(frame, as_json)
    if over is None and not as_json:
        OUT.print(f"table and plot over the rounds: {frame.write(page)}")
