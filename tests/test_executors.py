"""Sweeps on the engines of clusters, with real schedulers and workers on this machine.

Whichever process is killed, no charge is lost: the same command ends the sweep, and its joint epsilon is that of all
charges of its ledgers.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from multiprocessing import active_children
from pathlib import Path
from threading import Thread

import pytest
from benchmarks.price import played, settings_of
from benchmarks.price_cases import DATA, PriceCell
from reproduction.play import reproduce
from reproduction.results import ResultFolder
from reproduction.table import Table

from fedveil.errors import ConfigError, HostError
from fedveil.privacy.accountant import gaussian_epsilon
from fedveil.run.executors import check_threads, local_workers, open_workers, play_tasks, task_of_checkout
from fedveil.run.loop import NullObserver
from fedveil.run.populations import PopulationCache
from tests.runs import experiment

pytestmark = pytest.mark.slow

ROUNDS = 400
_SECONDS = 400  # to wait for what a busy machine does in a minute


@contextmanager
def started(*command: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process of this Python in a group of its own, and end the group."""
    process = subprocess.Popen([sys.executable, "-m", *command], start_new_session=True)
    try:
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def sweep(
    folder: Path, executor: str, over: str = "method.clip=0.5,1.0", rounds: int = ROUNDS, **environment: str
) -> Iterator[subprocess.Popen[str]]:
    """Sweep with noise of the system, so that the runs have an epsilon; kill the command at the end."""
    (folder / "try.toml").write_text(experiment(rounds=rounds).to_toml())
    options = ["--set", "privacy.insecure_seed=", "--over", over, "--runs", str(folder / "runs"), "--json"]
    command = [sys.executable, "-m", "fedveil", "sweep", str(folder / "try.toml"), *options]
    ray = {"RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    with subprocess.Popen(
        [*command, "--executor", executor],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | ray | environment,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def check_ended(sweeping: subprocess.Popen[str], folder: Path, killed: int = 0) -> None:
    """Wait for the end of a sweep, and check that every charge of its ledgers is in its joint epsilon.

    Args:
        sweeping: the command.
        folder: where it is played.
        killed: number of kills. Each costs one more charge if it lies within a round, none if between two.
    """
    out, err = sweeping.communicate(timeout=_SECONDS)
    assert sweeping.returncode == 0, err
    found, charged = json.loads(out), charges(folder)
    assert len(found["rows"]) == found["together"]["runs"] == 2
    assert all(row["rounds"] == ROUNDS for row in found["rows"])
    assert min(charged) >= ROUNDS
    assert sum(charged) <= 2 * ROUNDS + killed
    # Every user takes part in every round, under noise of 5 times the clip.
    together = gaussian_epsilon(math.sqrt(sum(charged)) / 5, 1e-5)
    assert found["together"]["epsilon"] == pytest.approx(together, rel=1e-6)


def players(folder: Path) -> set[int]:
    """Return the processes that play a run: each holds a file of a run's folder open."""
    return {
        int(path.parts[2]) for path in Path("/proc").glob("[0-9]*/fd/*") if _is_within(path, folder / "runs")
    }


def _is_within(link: Path, folder: Path) -> bool:
    with suppress(OSError):
        return link.readlink().is_relative_to(folder)
    return False


def kill_player(folder: Path) -> None:
    """Kill a process that plays a run."""
    os.kill(max(players(folder)), signal.SIGKILL)


def wait_for_players(folder: Path) -> None:
    """Wait until no process plays a run."""
    for _ in range(10 * _SECONDS):
        if not players(folder):
            return
        time.sleep(0.1)
    raise AssertionError("a worker still plays a run")


def charges(folder: Path) -> list[int]:
    """Return the number of charges of every run."""
    return [len(path.read_bytes().splitlines()) for path in sorted(folder.rglob("ledger.jsonl"))]


def wait_for_charges(folder: Path) -> None:
    for _ in range(10 * _SECONDS):
        if (there := charges(folder)) and max(there) > 5:
            return
        time.sleep(0.1)
    raise AssertionError("no run began")


TABLE = Table(
    name="digits",
    title="Digits",
    items=("none/digits",),
    parts=(
        {"preset": "digits", "variants": ["uldp-naive"], "settings": [f"rounds={ROUNDS}", "local.epochs=1"]},
    ),
    value="accuracy",
    last=2,
    rounds=(1,),
    chosen="Nothing.",
)


def wait_for_port(port: int) -> None:
    for _ in range(1200):
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.1)
    raise AssertionError("the scheduler did not start")


@contextmanager
def dask_cluster(port: int) -> Iterator[tuple[str, Callable[[], int], int]]:
    """Start a scheduler; yield its address, a function that starts a worker and returns its process id, and its own."""
    address, opened = f"tcp://127.0.0.1:{port}", []
    scheduler = (
        "distributed.cli.dask_scheduler",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--no-dashboard",
    )

    def start_worker() -> int:
        worker = ("distributed.cli.dask_worker", "--nthreads", "1", "--no-dashboard", "--no-nanny", address)
        command = [sys.executable, "-m", *worker]
        opened.append(subprocess.Popen(command, start_new_session=True))
        with pytest.importorskip("distributed").Client(address, set_as_default=False) as client:
            client.wait_for_workers(1, timeout=120)
        return opened[-1].pid

    with started(*scheduler) as process:
        wait_for_port(port)
        try:
            yield address, start_worker, process.pid
        finally:
            for process in opened:
                process.kill()
                process.wait()


def test_dask_gives_the_run_of_a_killed_worker_to_another_that_resumes_it(tmp_path: Path) -> None:
    pytest.importorskip("distributed")
    with dask_cluster(18786) as (address, start_worker, _):
        killed = start_worker()
        with sweep(tmp_path, f"dask:{address}") as sweeping:
            wait_for_charges(tmp_path)
            os.kill(killed, signal.SIGKILL)
            assert max(charges(tmp_path)) < ROUNDS
            start_worker()
            check_ended(sweeping, tmp_path, killed=1)


def test_a_sweep_whose_dask_scheduler_is_killed_is_ended_by_the_same_command(tmp_path: Path) -> None:
    pytest.importorskip("distributed")
    with dask_cluster(18789) as (address, start_worker, scheduler):
        start_worker()
        with sweep(tmp_path, f"dask:{address}") as sweeping:
            wait_for_charges(tmp_path)
            os.kill(scheduler, signal.SIGKILL)
            err = sweeping.communicate(timeout=_SECONDS)[1]
        assert sweeping.returncode == HostError.exit_code, err
        assert "the same command resumes it, and what it was charged is counted" in err
    with dask_cluster(18790) as (address, start_worker, _):
        start_worker()
        with sweep(tmp_path, f"dask:{address}") as sweeping:
            check_ended(sweeping, tmp_path, killed=1)


def test_a_sweep_that_is_killed_is_ended_by_the_same_command_on_the_same_dask_cluster(tmp_path: Path) -> None:
    """The worker goes on with the run that it has begun, and then takes the tasks of the second command."""
    pytest.importorskip("distributed")
    with dask_cluster(18791) as (address, start_worker, _):
        start_worker()
        with sweep(tmp_path, f"dask:{address}") as killed:
            wait_for_charges(tmp_path)
            killed.kill()
        assert max(charges(tmp_path)) < ROUNDS
        with sweep(tmp_path, f"dask:{address}") as sweeping:
            check_ended(sweeping, tmp_path)


def test_dask_gives_the_run_of_a_table_to_another_worker(tmp_path: Path) -> None:
    pytest.importorskip("distributed")
    before = []

    def replace_worker() -> None:
        wait_for_charges(tmp_path)
        os.kill(first, signal.SIGKILL)
        before.extend(charges(tmp_path))
        start_worker()

    results = ResultFolder(tmp_path / "results")
    with dask_cluster(18787) as (address, start_worker, _):
        first = start_worker()
        killing = Thread(target=replace_worker)
        killing.start()
        workers = partial(open_workers, f"dask:{address}")
        found = list(reproduce(TABLE, results, tmp_path / "runs", NullObserver(), seeds=1, workers=workers))
        killing.join()
    assert [run.seed for run in found] == [0]
    assert before[0] < ROUNDS
    assert charges(tmp_path) in ([ROUNDS], [ROUNDS + 1])
    assert found[0].cpu_seconds is None, "the time of a run that was resumed says nothing"


def test_a_table_whose_local_worker_is_killed_ends_and_the_same_call_resumes_it(tmp_path: Path) -> None:
    """A pool of this machine ends with any of its processes, so the command says how to go on."""

    def kill_worker() -> None:
        wait_for_charges(tmp_path)
        for process in active_children():
            process.kill()

    results, workers = ResultFolder(tmp_path / "results"), partial(local_workers, 1)
    play = partial(reproduce, TABLE, results, tmp_path / "runs", NullObserver(), seeds=1, workers=workers)
    killing = Thread(target=kill_worker)
    killing.start()
    with pytest.raises(HostError, match=r"^uldp-naive: its worker ended before it did \(BrokenProcessPool\)"):
        list(play())
    killing.join()
    (before,) = charges(tmp_path)
    assert before < ROUNDS
    assert [run.seed for run in play()] == [0]
    assert charges(tmp_path) in ([ROUNDS], [ROUNDS + 1])


def test_dask_gives_a_run_of_the_price_to_another_worker() -> None:
    """Such a run has no folder and charges no ledger: another worker plays it whole."""
    distributed = pytest.importorskip("distributed")
    cell = PriceCell(case=replace(DATA[0], rounds=60), column="recipe U")
    root = Path(__file__).parents[1]
    task = task_of_checkout(root, played, cell, 0, settings_of(cell), PopulationCache())

    def replace_worker() -> None:
        with distributed.Client(address, set_as_default=False) as client:
            while not any(client.processing().values()):
                time.sleep(0.1)
        time.sleep(1)
        os.kill(first, signal.SIGKILL)
        start_worker()

    with dask_cluster(18788) as (address, start_worker, _):
        first = start_worker()
        killing = Thread(target=replace_worker)
        killing.start()
        ((number, run),) = play_tasks([task], open_workers(f"dask:{address}"))
        killing.join()
    assert (number, run.cell, run.seed) == (0, cell.name, 0)


def parsl_workers(folder: Path) -> str:
    """Write a configuration with two workers on this machine; return the executor's name."""
    config = folder / "workers.py"
    config.write_text(
        "from parsl import Config\nfrom parsl.executors import HighThroughputExecutor\n"
        "config = Config(executors=[HighThroughputExecutor(label='w', address='127.0.0.1', max_workers_per_node=2)],"
        f" retries=2, run_dir={str(folder / 'parsl')!r})\n"
    )
    return f"parsl:{config}"


@pytest.mark.parametrize("killed", [False, True], ids=["", "worker killed"])
@pytest.mark.parametrize("engine", ["parsl", "ray"])
def test_an_engine_plays_a_sweep_and_gives_the_run_of_a_killed_worker_to_another(
    engine: str, killed: bool, tmp_path: Path
) -> None:
    pytest.importorskip(engine)
    with sweep(tmp_path, parsl_workers(tmp_path) if engine == "parsl" else "ray:local") as sweeping:
        if killed:
            wait_for_charges(tmp_path)
            kill_player(tmp_path)
            assert min(charges(tmp_path)) < ROUNDS
        check_ended(sweeping, tmp_path, killed=killed)


@pytest.mark.parametrize("engine", ["parsl", "ray"])
def test_a_sweep_that_is_killed_with_its_engine_is_ended_by_the_same_command(
    engine: str, tmp_path: Path
) -> None:
    """These engines belong to the command: their workers end when it does."""
    pytest.importorskip(engine)
    executor = parsl_workers(tmp_path) if engine == "parsl" else "ray:local"
    with sweep(tmp_path, executor) as killed:
        wait_for_charges(tmp_path)
    assert killed.returncode == -signal.SIGKILL
    wait_for_players(tmp_path)
    with sweep(tmp_path, executor) as sweeping:
        check_ended(sweeping, tmp_path, killed=2)


def test_programs_of_parsl_that_are_not_on_the_path_are_named(tmp_path: Path) -> None:
    pytest.importorskip("parsl")
    with sweep(tmp_path, parsl_workers(tmp_path), PATH="/nowhere") as sweeping:
        err = sweeping.communicate(timeout=_SECONDS)[1]
    assert "interchange.py, a program of Parsl, is not on the PATH" in " ".join(err.split())
    assert sweeping.returncode == 2


@pytest.mark.parametrize(
    ("package", "executor", "words"),
    [
        ("distributed", "dask:tcp://127.0.0.1:9", "no scheduler answers there"),
        ("ray", "ray:127.0.0.1:9", "no cluster answers there"),
        ("ray", "ray:127.0.0.1:99999", "no cluster answers there"),
        ("ray", "ray:auto", "no cluster answers there"),
    ],
)
def test_a_scheduler_that_does_not_answer_is_named_within_a_minute(
    package: str, executor: str, words: str
) -> None:
    pytest.importorskip(package)
    begun = time.monotonic()
    with pytest.raises(ConfigError, match=rf"--executor {executor}: {words}"), open_workers(executor):
        pass
    assert time.monotonic() - begun < 60


@pytest.mark.parametrize(
    ("threads", "words"), [({}, "has no workers"), ({"tcp://a:1": 4}, r"worker tcp://a:1 has 4 threads")]
)
def test_workers_that_would_share_a_process_are_refused(threads: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_threads(threads)


def test_an_error_of_a_run_is_not_taken_for_one_of_a_worker(tmp_path: Path) -> None:
    """Ray wraps what a task raises in an error of its own, as it does for a worker that died."""
    pytest.importorskip("ray")
    with sweep(tmp_path, "ray:local", "model.name=linear,no_such:model", rounds=1) as sweeping:
        err = sweeping.communicate(timeout=_SECONDS)[1]
    assert "fedveil: try-name_no_such_model: model no_such:model: module no_such cannot" in err
    assert sweeping.returncode == 2
