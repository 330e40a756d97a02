"""The commands of a federation between institutions: found, check, serve, run."""

from __future__ import annotations

import shlex
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Annotated, Final

import typer

from fedveil.commands.options import OUT, Json
from fedveil.console import observer, print_json, transposed_table
from fedveil.engine.folder import RunFolder
from fedveil.errors import BudgetError, ConfigError
from fedveil.flower.demonstration import write_demonstration
from fedveil.flower.folders import CoordinatorFolder, SiloFolder
from fedveil.flower.founding import found
from fedveil.flower.guard import Guard, open_silo
from fedveil.flower.inspection import inspect_silo
from fedveil.flower.processes import (
    FlowerError,
    register_nodes,
    run_is_alive,
    start_superlink,
    start_supernode,
    submit,
)
from fedveil.flower.submission import END, read_experiment, watch
from fedveil.report.page import write_report

federation = typer.Typer(
    help="Found a federation between institutions, check a silo, run an experiment.",
    no_args_is_help=True,
    add_completion=False,
)
_AGAIN_SECONDS: Final = 5.0


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
    founded = found(
        folder,
        (*silos, *(more or ())),
        schema=schema,
        host=host,
        port=port,
        epsilon=epsilon,
        delta=delta,
        clip=clip,
    )
    if as_json:
        print_json(
            {"authority": founded.authority, "coordinator": founded.coordinator, "silos": founded.silos}
        )
        return
    OUT.print(f"coordinator: {founded.coordinator}")
    for path in founded.silos:
        OUT.print(f"hand over:   {path}")
    OUT.print(f"keep offline: {founded.authority}")


@federation.command("demo")
def demo_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="made here")],
    rounds: Annotated[int, typer.Option(min=1, help="of the experiment")] = 10,
    port: Annotated[
        int, typer.Option(min=1024, max=65530, help="of the coordinator; silos take the next")
    ] = 9443,
) -> None:
    """Found four made-up hospitals in the shape of Heart Disease, play all parties here, and run an experiment."""
    made = write_demonstration(folder, rounds=rounds, port=port)
    home = CoordinatorFolder(made.founded.coordinator)
    served = [_Served.coordinator(home)]
    try:
        register_nodes(home)
        served += [_Served.silo(SiloFolder(path)) for path in made.founded.silos]
        _run(home, RunFolder.create(home / "runs", read_experiment(made.experiment, home)), as_json=False)
    finally:
        for one in served:
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
    number = submit(home, folder.path)
    again = f"fedveil federation run --home {shlex.quote(str(home.path))} --resume"
    with observer(OUT, quiet=as_json, resume=again) as watching:
        stopped = watch(folder, watching, experiment, lambda: run_is_alive(home, number))
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
    """Serve as the coordinator: Flower's SuperLink under TLS, for registered nodes only."""
    folder = CoordinatorFolder(home)
    served = _Served.coordinator(folder)
    try:
        register_nodes(folder)
        OUT.print(f"listening on {folder.settings.host}:{folder.settings.port}; Ctrl-C ends it")
        served.wait()
    finally:
        served.stop()


def silo_command(silo: Annotated[Path, typer.Argument(metavar="DIR", help="the silo's folder")]) -> None:
    """Serve as a silo: the guard with table and keys, and Flower's SuperNode that carries letters to it."""
    folder = SiloFolder(silo)
    served = _Served.silo(folder)
    try:
        OUT.print(f"silo {folder.settings.name} answers {folder.settings.coordinator}; Ctrl-C ends it")
        served.wait()
    finally:
        served.stop()


class _Served:
    """A process of Flower's, and at a silo the guard beside it.

    Args:
        start: starts the process.
        guard: of the silo; None at the coordinator.
    """

    def __init__(self, start: Callable[[], subprocess.Popen[bytes]], guard: Guard | None = None) -> None:
        self._start, self._guard = start, guard
        self._process = start()
        signal.signal(signal.SIGTERM, _interrupt)

    @classmethod
    def coordinator(cls, home: CoordinatorFolder) -> _Served:
        """Start the SuperLink."""
        return cls(lambda: start_superlink(home))

    @classmethod
    def silo(cls, folder: SiloFolder) -> _Served:
        """Start guard and SuperNode."""
        path = Path(tempfile.mkdtemp(prefix="fedveil-")) / "guard"
        guard = Guard(open_silo(folder), path)
        threading.Thread(target=guard.serve, daemon=True).start()
        return cls(lambda: start_supernode(folder, path), guard)

    def wait(self) -> None:
        """Wait for the process, which does not end by itself; a SuperNode is started again when it gives up.

        It gives up where the coordinator does not listen yet, or does not know its key yet.

        Raises:
            FlowerError: the SuperLink ended.
        """
        while True:
            code = self._process.wait()
            if self._guard is None:
                raise FlowerError(f"the SuperLink ended with exit code {code}; its messages are above")
            OUT.print(f"the SuperNode ended with exit code {code}; it is started again", highlight=False)
            time.sleep(_AGAIN_SECONDS)
            self._process = self._start()

    def stop(self) -> None:
        """End the process and the guard."""
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._guard is not None:
            self._guard.close()


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
