"""The commands: each prints for a person, or one JSON object with ``--json``; a user's mistake is exit code 2."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fedveil import __version__
from fedveil.benches import run_benchmark
from fedveil.console import observer, outcome_table, print_json, rows_table, transposed_table
from fedveil.engine.audit import audit
from fedveil.engine.experiment import parse_assignment
from fedveil.engine.federation.coordinator import STATE
from fedveil.engine.planning import Plan, plan_rows, unsupported
from fedveil.engine.run import Outcome, resume, run
from fedveil.engine.setup import Populations, Prepared, prepare
from fedveil.engine.study import Selection, Study, load_study, preset_text, presets
from fedveil.engine.sweep import Axis, points, sweep
from fedveil.errors import ConfigError, FedveilError
from fedveil.federation_commands import coordinator_command, federation, silo_command
from fedveil.methods import METHODS
from fedveil.population.catalogue import catalogue
from fedveil.population.catalogue.files import store
from fedveil.population.draft import draft_schema
from fedveil.report.compare import compare
from fedveil.report.page import write_report
from fedveil.report.plan import write_plan
from fedveil.report.tradeoff import write_tradeoff

app = typer.Typer(
    name="fedveil",
    help="Federated learning over data that nobody may pool, with one honest privacy statement per run.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.add_typer(federation, name="federation")
app.command("coordinator")(coordinator_command)
app.command("silo")(silo_command)
_out = Console()

Json = Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")]
Source = Annotated[str, typer.Argument(metavar="PRESET_OR_TOML", help="a preset's name or a TOML file")]
Set = Annotated[
    list[str] | None, typer.Option("--set", help="KEY=VALUE laid over every experiment; KEY= takes KEY away")
]
Quick = Annotated[bool, typer.Option("--quick", help="the preset's small scale: about a minute")]
Scenario = Annotated[
    list[str] | None, typer.Option("--scenario", help="only this scenario (may be repeated)")
]
Variant = Annotated[list[str] | None, typer.Option("--variant", help="only this variant (may be repeated)")]
Seeds = Annotated[int, typer.Option("--seeds", min=1, help="runs per variant, with consecutive seeds")]
Listed = Annotated[bool, typer.Option("--transcript", help="list every message of a protocol")]
Runs = Annotated[Path, typer.Option("--runs", help="folder that run folders are made in")]


def _study(
    source: str,
    assignments: list[str] | None,
    quick: bool,
    scenario: list[str] | None,
    variant: list[str] | None,
    seeds: int,
) -> Study:
    return load_study(source, _selection(assignments, quick, scenario, variant, seeds))


def _selection(
    assignments: list[str] | None,
    quick: bool,
    scenario: list[str] | None,
    variant: list[str] | None,
    seeds: int,
) -> Selection:
    return Selection(
        scenarios=None if scenario is None else tuple(scenario),
        variants=None if variant is None else tuple(variant),
        seeds=seeds,
        quick=quick,
        overrides=tuple(parse_assignment(text) for text in assignments or ()),
    )


@app.command("run")
def run_command(
    source: Source,
    assignments: Set = None,
    quick: Quick = False,
    scenario: Scenario = None,
    variant: Variant = None,
    seeds: Seeds = 1,
    runs: Runs = Path("runs"),
    transcript: Listed = False,
    as_json: Json = False,
) -> None:
    """Train: one experiment, or every experiment of a preset, and end with a table and a report."""
    study = _study(source, assignments, quick, scenario, variant, seeds)
    if transcript and all(one.protection.name == "none" for one in study.experiments):
        raise ConfigError(
            "--transcript: no protocol runs here, so there is no message to list; "
            "--set protection.name=secure-aggregation adds one"
        )
    single = len(study.experiments) == 1
    prepared = _prepared(study)
    parent = runs if single else _fresh(runs / study.name)
    if not as_json and not single:
        _out.print(study.title)
    outcomes, report = [], None
    with observer(_out, quiet=as_json) as watching:
        for one in prepared:
            outcome = run(one, parent, watching, transcript=transcript)
            report = write_report(outcome.folder)
            outcomes.append(outcome)
    if not single:
        report = compare([one.folder for one in outcomes]).write(parent / "comparison.html")
    _end(outcomes, report, as_json)


def _prepared(study: Study) -> Iterator[Prepared]:
    """Check every experiment before the first one trains; return them prepared, one at a time to save memory."""
    populations = Populations()
    if len(study.experiments) > 1:
        for experiment in study.experiments:
            prepare(experiment, populations)
    return (prepare(experiment, populations) for experiment in study.experiments)


@app.command("resume")
def resume_command(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="a run folder")], as_json: Json = False
) -> None:
    """Go on with an interrupted run from its last complete round."""
    if (folder / STATE).exists():
        raise ConfigError(f"{folder}: a run between institutions: `fedveil federation run --resume {folder}`")
    with observer(_out, quiet=as_json) as watching:
        outcome = resume(folder, watching)
    _end([outcome], write_report(outcome.folder), as_json)


@app.command("check")
def check_command(
    source: Source,
    assignments: Set = None,
    quick: Quick = False,
    scenario: Scenario = None,
    variant: Variant = None,
    seeds: Seeds = 1,
    as_json: Json = False,
) -> None:
    """Check data, model, configuration and budget, before any training."""
    study = _study(source, assignments, quick, scenario, variant, seeds)
    populations = Populations()
    rows = [_checked(prepare(experiment, populations)) for experiment in study.experiments]
    if as_json:
        print_json({"study": study.name, "experiments": rows})
    else:
        _out.print(transposed_table(rows) if len(rows) == 1 else rows_table(rows, title=study.title))


def _checked(prepared: Prepared) -> dict[str, Any]:
    experiment = prepared.experiment
    epsilon = prepared.epsilon_after(experiment.rounds)
    budget = experiment.privacy.budget
    return {
        "experiment": experiment.name,
        "silos": prepared.population.n_silos,
        "users": prepared.population.n_users,
        "records": len(prepared.population.train),
        "parameters": prepared.task.dimension,
        "contributions": len(prepared.seat.cohort.groups),
        "trainer": type(prepared.seat.trainer).__name__,
        "rounds": experiment.rounds,
        "epsilon": epsilon if epsilon < float("inf") else None,
        "within budget": None if budget is None else epsilon <= budget,
    }


@app.command("plan")
def plan_command(
    users: Annotated[int, typer.Option(min=1, help="|U|, the public number of users")] = 100,
    silos: Annotated[int, typer.Option(min=1, help="|S|")] = 5,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="T; 50 unless --epsilon and --sigma are given")
    ] = None,
    noise_multiplier: Annotated[
        list[float] | None,
        typer.Option("--sigma", help="noise multiplier; may be repeated; 5 without --epsilon"),
    ] = None,
    sampling_rate: Annotated[
        list[float] | None, typer.Option("--rate", help="user sampling rate q; may be repeated")
    ] = None,
    delta: Annotated[float, typer.Option(min=0, max=1)] = 1e-5,
    epsilon: Annotated[
        float | None,
        typer.Option(help="target: find the least sigma for the rounds, or the most rounds for --sigma"),
    ] = None,
    group_size: Annotated[
        list[int] | None, typer.Option("--group", help="k of uldp-group; may be repeated")
    ] = None,
    records: Annotated[int, typer.Option(min=1, help="records per silo (uldp-group)")] = 1000,
    batch_size: Annotated[int, typer.Option(min=1, help="batch size (uldp-group)")] = 64,
    epochs: Annotated[int, typer.Option(min=1, help="local epochs (uldp-group)")] = 1,
    colluding_silos: Annotated[int, typer.Option(min=0)] = 0,
    client_rate: Annotated[
        list[float] | None,
        typer.Option("--client-rate", help="dp-fed: share of the clients; may be repeated"),
    ] = None,
    accountant: Annotated[str, typer.Option(help="pld or rdp")] = "pld",
    page: Annotated[Path, typer.Option(help="where the table and plot are written")] = Path("plan.html"),
    as_json: Json = False,
) -> None:
    """Say what a federation would guarantee before any data exists: sigma, epsilon, rounds, per method."""
    sigmas = tuple(noise_multiplier or (() if epsilon else (5.0,)))
    planned = Plan(
        n_users=users,
        n_silos=silos,
        rounds=50 if rounds is None and not (epsilon and sigmas) else rounds,
        noise_multipliers=sigmas,
        sampling_rates=tuple(sampling_rate or (1.0,)),
        delta=delta,
        epsilon=epsilon,
        group_sizes=tuple(group_size or (2, 8)),
        records_per_silo=records,
        batch_size=batch_size,
        epochs=epochs,
        colluding_silos=colluding_silos,
        accountant=accountant,
        client_sampling_rates=tuple(client_rate or ()),
    )
    rows = plan_rows(planned)
    if as_json:
        print_json({"rows": rows, "left_out": unsupported(planned)})
        return
    for label in unsupported(planned):
        _out.print(f"left out: {label}, for which accountant {accountant} has no bound")
    keys = ("method", "noise_multiplier", "sampling_rate", "accountant")
    last = {tuple(row[key] for key in keys): row for row in rows}  # rows of more rounds come later
    _out.print(rows_table(last.values(), title=f"{users} users, {silos} silos, delta {delta:g}"))
    _out.print(f"table and plot over the rounds: {write_plan(rows, page)}")


@app.command("report")
def report_command(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="a run folder")], as_json: Json = False
) -> None:
    """Write the self-contained report of a run again."""
    path = write_report(folder)
    if as_json:
        print_json({"report": path})
    else:
        _out.print(f"report: {path}")


@app.command("audit")
def audit_command(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="the folder of a run that ended")],
    canaries: Annotated[
        int, typer.Option(min=0, help="units of the one-run audit, which trains once more; 0 leaves it out")
    ] = 200,
    as_json: Json = False,
) -> None:
    """Attack a run: membership inference, and a lower bound on epsilon that may refute its claim."""
    found = audit(folder, canaries=canaries)
    report = write_report(folder)
    if as_json:
        print_json({**asdict(found), "refuted": found.refuted, "report": report})
        return
    inference = found.inference
    _out.print(f"membership inference: AUC {inference.auc:.4f} ({inference.low:.4f} to {inference.high:.4f})")
    if found.bound is not None:
        claimed = "nothing" if found.claimed is None else f"epsilon {found.claimed:.4g}"
        _out.print(
            f"epsilon for one {found.unit} is at least {found.bound.epsilon:.4g}; the run claims {claimed}"
        )
    if found.refuted:
        _out.print("ERROR: the claim is below what an attack shows", style="bold red")
    _out.print(f"report: {report}", soft_wrap=True)


@app.command("compare")
def compare_command(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN...", help="run folders, or folders of them")],
    page: Annotated[Path, typer.Option(help="where the page is written")] = Path("comparison.html"),
    against: Annotated[
        str | None, typer.Option(help="a key: draw results and costs against it, with the Pareto front")
    ] = None,
    as_json: Json = False,
) -> None:
    """Draw privacy-utility curves of several runs, with the standard deviation over seeds."""
    if against is not None:
        written = write_tradeoff(_run_folders(folders), against, page)
        print_json({"page": written}) if as_json else _out.print(f"comparison: {written}")
        return
    comparison = compare(_run_folders(folders))
    if as_json:
        print_json(comparison.to_json())
        return
    _out.print(f"comparison: {comparison.write(page)}")


@app.command("sweep")
def sweep_command(
    source: Source,
    over: Annotated[
        list[str], typer.Option("--over", help="KEY=VALUE,VALUE,... one axis of the grid (may be repeated)")
    ],
    assignments: Set = None,
    quick: Quick = False,
    scenario: Scenario = None,
    variant: Variant = None,
    seeds: Seeds = 1,
    runs: Runs = Path("runs/sweep"),
    processes: Annotated[int, typer.Option(min=1, help="runs at a time, a process each")] = 1,
    as_json: Json = False,
) -> None:
    """Run a grid over any keys; the same command again goes on where it was interrupted."""
    axes = [Axis.read(text) for text in over]
    chosen = points(source, _selection(assignments, quick, scenario, variant, seeds), axes)
    rows = []
    for row in sweep(chosen, runs, processes=processes):
        rows.append(row)
        if not as_json:
            _out.print(f"{row['run']}: {row['test']}, {row['seconds']:.1f} s")
    folders = [runs / point.experiment.name for point in chosen]
    pages = [write_tradeoff(folders, axis.key, runs / f"{axis.key}.html") for axis in axes]
    print_json({"rows": rows, "pages": pages}) if as_json else _out.print(*pages, sep="\n", soft_wrap=True)


@app.command("presets")
def presets_command(
    name: Annotated[str | None, typer.Argument(help="print this preset's TOML")] = None, as_json: Json = False
) -> None:
    """List the presets, or print one."""
    if name is not None:
        text = preset_text(name)
        print_json({"name": name, "toml": text}) if as_json else _out.print(
            text, markup=False, highlight=False
        )
        return
    rows = [{"preset": key, "what it shows": title} for key, title in presets().items()]
    print_json({"presets": rows}) if as_json else _out.print(rows_table(rows))


@app.command("methods")
def methods_command(as_json: Json = False) -> None:
    """List the methods, and the keys that each takes in the experiment's table of that name."""
    rows = [
        {"method": name, "keys": ", ".join(r.keys), "what it does": r.summary} for name, r in METHODS.items()
    ]
    print_json({"methods": rows}) if as_json else _out.print(rows_table(rows))


@app.command("data")
def data_command(
    name: Annotated[str | None, typer.Argument(help="fetch and check this data set")] = None,
    folder: Annotated[Path | None, typer.Option(help="folder of the files; default: FEDVEIL_DATA")] = None,
    as_json: Json = False,
) -> None:
    """List the data sets with their terms; with a name, download what is missing and check it."""
    entries = [entry for entry in catalogue(folder) if name in (None, entry.name)]
    if not entries:
        raise ConfigError(
            f"no data set '{name}'; there are: {', '.join(entry.name for entry in catalogue(folder))}"
        )
    if name is not None:
        for file in entries[0].files:
            store(folder).path(file)
        entries = [entry for entry in catalogue(folder) if entry.name == name]
    rows = [
        {"name": e.name, "title": e.title, "records": e.records, "terms": e.terms, "present": e.present}
        for e in entries
    ]
    print_json({"folder": entries[0].folder, "data": rows}) if as_json else _out.print(rows_table(rows))


@app.command("schema")
def schema_command(
    sample: Annotated[
        Path, typer.Argument(help="a PUBLIC sample table, CSV or Parquet: never private records")
    ],
    user: Annotated[str | None, typer.Option(help="column of the user; default: guessed by name")] = None,
    silo: Annotated[str | None, typer.Option(help="column of the silo; default: guessed by name")] = None,
    label: Annotated[str | None, typer.Option(help="column of the class label; default: guessed")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="file to write; default: print")
    ] = None,
    as_json: Json = False,
) -> None:
    """Draft the public schema of your tables from a public sample, for you to read and correct."""
    text = draft_schema(sample, user=user, silo=silo, label=label)
    if output is not None:
        if output.exists():
            raise ConfigError(f"{output}: exists already; choose another name")
        output.write_text(text, encoding="utf-8")
    if as_json:
        print_json({"toml": text, "output": output})
    elif output is None:
        _out.print(text, markup=False, highlight=False, soft_wrap=True)
    else:
        _out.print(f"drafted {output}: read it, correct the bounds and categories, and keep it public")


@app.command("bench")
def bench_command(
    name: Annotated[str, typer.Argument(help="a module of benchmarks/")],
    quick: Annotated[bool, typer.Option("--quick", help="at most a minute")] = False,
    page: Annotated[
        Path | None, typer.Option("--page", help="draw the measured curves to this HTML file")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure, against peers, in one run (from a checkout: benchmarks/ is not installed)."""
    document = run_benchmark(name, quick=quick, page=page)
    if as_json:
        print_json(document)
        return
    rows = [{key: value for key, value in row.items() if key != "place"} for row in document["rows"]]
    _out.print(rows_table(rows, title=f"{name}: {document['machine']['processor']}"))


def _fresh(path: Path) -> Path:
    """Return a folder name that is not taken yet."""
    candidate, count = path, 1
    while candidate.exists():
        count += 1
        candidate = path.with_name(f"{path.name}-{count}")
    return candidate


def _run_folders(folders: list[Path]) -> list[Path]:
    found = []
    for folder in folders:
        inner = sorted(path.parent for path in folder.glob("*/experiment.toml"))
        found.extend([folder] if (folder / "experiment.toml").exists() or not inner else inner)
    return found


def _end(outcomes: list[Outcome], report: Path | None, as_json: bool) -> None:
    if as_json:
        runs = [
            {
                "folder": one.folder,
                "rounds": one.rounds,
                "stopped": one.stopped,
                "test": one.row["test"],
                "seconds": one.seconds,
                "statement": one.statement.to_json(),
            }
            for one in outcomes
        ]
        print_json({"runs": runs, "report": report})
        return
    _out.print(outcome_table(outcomes))
    for one in outcomes:
        if one.stopped:
            _out.print(f"{one.folder.name}: stopped: {one.stopped}")
    if len(outcomes) == 1:
        for sentence in outcomes[0].statement.sentences():
            _out.print(sentence, highlight=False)
    _out.print(f"report: {report}", soft_wrap=True)


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="print the version")] = False) -> None:
    if version:
        _out.print(__version__)
        raise typer.Exit


def main() -> None:
    """Run the command line; a user's mistake is one paragraph on standard error and exit code 2."""
    try:
        app()
    except FedveilError as error:
        Console(stderr=True).print(f"fedveil: {error}", style="bold red", highlight=False, markup=False)
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted; nothing is lost: `fedveil resume RUN` goes on")
        raise SystemExit(130) from None
