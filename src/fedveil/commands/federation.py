"""The commands of a federation between institutions: found, check, serve, run."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedveil.commands.link import imported
from fedveil.commands.options import OUT, Json, end_by_terminate
from fedveil.console import observer, print_json, transposed_table
from fedveil.engine.folder import RunFolder
from fedveil.errors import BudgetError, ConfigError
from fedveil.flower.demonstration import write_demonstration
from fedveil.flower.folders import CoordinatorFolder, SiloFolder
from fedveil.flower.inspection import inspect_silo
from fedveil.flower.provisioning import DraftedPolicy, provision
from fedveil.flower.silo import ServedSilo
from fedveil.flower.submission import END, Submission, read_experiment, watch
from fedveil.report.page import write_report

if TYPE_CHECKING:  # it needs the extra, which not every command does
    from fedveil.flower.party import Party

federation = typer.Typer(
    help="Found a federation between institutions, check a silo, run an experiment.",
    no_args_is_help=True,
    add_completion=False,
)


def _party(folder: CoordinatorFolder) -> Party:
    """Return the coordinator of a folder."""
    party: Party = imported("fedveil.flower.party").Party(folder)
    return party


@federation.command("init")
def init_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="made here, with one folder per party")],
    silos: Annotated[list[str], typer.Option("--silos", help="the silos' names: --silos north south coast")],
    more: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
    schema: Annotated[Path, typer.Option(help="the public schema of all tables")] = Path("schema.toml"),
    host: Annotated[str, typer.Option(help="the coordinator, as silos reach it")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="its one port")] = 9443,
    epsilon: Annotated[float, typer.Option(help="of the drafted policies")] = 1.0,
    delta: Annotated[float, typer.Option(help="of the drafted policies")] = 1e-5,
    clip: Annotated[float, typer.Option(help="of the drafted policies")] = 1.0,
    as_json: Json = False,
) -> None:
    """Write CA, certificates, keys, membership and policies: one folder per party to hand over."""
    provisioned = provision(
        folder,
        (*silos, *(more or ())),
        schema=schema,
        host=host,
        port=port,
        policy=DraftedPolicy(epsilon=epsilon, delta=delta, clip=clip),
    )
    if as_json:
        print_json(
            {
                "authority": provisioned.authority,
                "coordinator": provisioned.coordinator,
                "silos": provisioned.silos,
            }
        )
        return
    OUT.print(f"coordinator: {provisioned.coordinator}")
    for path in provisioned.silos:
        OUT.print(f"hand over:   {path}")
    OUT.print(f"keep offline: {provisioned.authority}")


@federation.command("demo")
def demo_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="made here")],
    rounds: Annotated[int, typer.Option(min=1, help="of the experiment")] = 10,
    port: Annotated[int, typer.Option(min=1, max=65535, help="of the coordinator; silos have none")] = 9443,
) -> None:
    """Found four made-up hospitals in the shape of Heart Disease, play all parties here, and run an experiment."""
    made = write_demonstration(folder, rounds=rounds, port=port)
    home = CoordinatorFolder(made.provisioned.coordinator)
    end_by_terminate()
    served: list[Party | ServedSilo] = [_party(home)]
    try:
        served += [ServedSilo(SiloFolder(path)) for path in made.provisioned.silos]
        _run(home, RunFolder.create(home / "runs", read_experiment(made.experiment, home)), as_json=False)
    finally:
        for one in reversed(served):
            one.stop()


@federation.command("check")
def check_command(
    silo: Annotated[Path, typer.Argument(metavar="SILO", help="the silo's folder")], as_json: Json = False
) -> None:
    """Check a silo on its own host: certificates, keys, clock, table against schema, what its users have spent."""
    found_ = inspect_silo(SiloFolder(silo))
    print_json(found_) if as_json else OUT.print(transposed_table([found_]))


@federation.command("run")
def run_command(
    experiment: Annotated[Path | None, typer.Argument(metavar="EXPERIMENT", help="a TOML file")] = None,
    home: Annotated[Path, typer.Option("--home", help="the coordinator's folder")] = Path("."),
    resume: Annotated[Path | None, typer.Option("--resume", help="go on with this run folder")] = None,
    as_json: Json = False,
) -> None:
    """Submit a run to the coordinator, watch it, and end with its run folder and report."""
    coordinator = CoordinatorFolder(home)
    if (experiment is None) == (resume is None):
        raise ConfigError("give an experiment to run, or --resume and the folder of a run")
    if resume is not None:
        folder, _ = RunFolder.open(resume)
    else:
        assert experiment is not None
        folder = RunFolder.create(coordinator / "runs", read_experiment(experiment, coordinator))
    _run(coordinator, folder, as_json)


def _run(home: CoordinatorFolder, folder: RunFolder, as_json: bool) -> None:
    _, experiment = RunFolder.open(folder.path)
    (folder / END).unlink(missing_ok=True)
    again = f"fedveil federation run --home {shlex.quote(str(home.path))} --resume"
    with Submission(home, folder.path) as submission:
        if submission.before and not as_json:
            OUT.print(f"runs that are played before it: {submission.before}")
        with observer(OUT, quiet=as_json, resume=again) as watching:
            stopped = watch(folder, watching, experiment, submission.lasts)
    report = write_report(folder.path)
    if as_json:
        print_json({"folder": folder.path, "stopped": stopped, "report": report})
    else:
        if stopped is not None:
            OUT.print(f"stopped: {stopped}")
        OUT.print(f"run folder: {folder.path}")
        OUT.print(f"report: {report}")
    checkpoint = folder.read_checkpoint()
    if stopped is not None and (checkpoint is None or not checkpoint.round):
        raise BudgetError(f"{folder.path}: refused before the first round: {stopped}")


def coordinator_command(
    home: Annotated[Path, typer.Argument(metavar="DIR", help="the coordinator's folder")],
) -> None:
    """Serve as the coordinator: a TLS port for registered silos alone, and runs submitted on this host."""
    folder = CoordinatorFolder(home)
    end_by_terminate()
    party = _party(folder)
    try:
        OUT.print(f"listening on {folder.link.settings.address}; Ctrl-C ends it")
        raise party.link.wait()
    finally:
        party.stop()
