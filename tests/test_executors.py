"""Sweeps on the engines of clusters, with real schedulers and workers on this machine."""

from __future__ import annotations

import json
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
from fedveil.run.executors import check_threads, local_workers, open_workers, play_tasks, task_of_checkout
from fedveil.run.observer import NullObserver
from fedveil.run.populations import PopulationCache
from tests.runs import experiment

pytestmark = pytest.mark.slow

ROUNDS = 400


@contextmanager
def started(*command: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process of this Python in a group of its own, and end the group."""
    process = subprocess.Popen([sys.executable, "-m", *command], start_new_session=True)
    try:
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def sweep(
    folder: Path, executor: str, over: str = "method.clip=0.5,1.0", rounds: int = ROUNDS
) -> subprocess.Popen[str]:
    """Sweep with noise of the system, so that the runs have an epsilon."""
    (folder / "try.toml").write_text(experiment(rounds=rounds).to_toml())
    options = ["--set", "privacy.insecure_seed=", "--over", over, "--runs", str(folder / "runs"), "--json"]
    command = [sys.executable, "-m", "fedveil", "sweep", str(folder / "try.toml"), *options]
    return subprocess.Popen(
        [*command, "--executor", executor], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def charges(folder: Path) -> list[int]:
    """Return the number of charges of every run."""
    return [len(path.read_bytes().splitlines()) for path in sorted(folder.rglob("ledger.jsonl"))]


def wait_for_charges(folder: Path) -> None:
    for _ in range(600):
        if (there := charges(folder)) and max(there) > 5:
            return
        time.sleep(0.1)
    raise AssertionError("no run began")


def test_dask_gives_the_run_of_a_killed_worker_to_another_that_resumes_it(tmp_path: Path) -> None:
    pytest.importorskip("distributed")
    address, local = "tcp://127.0.0.1:18786", ("--host", "127.0.0.1")
    worker = ("distributed.cli.dask_worker", "--nthreads", "1", "--no-dashboard", "--no-nanny", address)
    scheduler = ("distributed.cli.dask_scheduler", *local, "--port", "18786", "--no-dashboard")
    with started(*scheduler), started(*worker) as killed:
        sweeping = sweep(tmp_path, f"dask:{address}")
        wait_for_charges(tmp_path)
        os.killpg(killed.pid, signal.SIGKILL)
        before = max(charges(tmp_path))
        with started(*worker):
            found = json.loads(sweeping.communicate(timeout=300)[0])
    assert sweeping.returncode == 0
    assert before < ROUNDS
    # One more charge if the worker died within a round, none if between two.
    assert sorted(charges(tmp_path)) in ([ROUNDS, ROUNDS], [ROUNDS, ROUNDS + 1])
    assert found["together"]["runs"] == 2
    alone = max(row["epsilon"] for row in found["rows"])
    assert found["together"]["epsilon"] > alone


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
def dask_cluster(port: int) -> Iterator[tuple[str, Callable[[], int]]]:
    """Start a scheduler; yield its address, and a function that starts a worker and returns its process id."""
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

    with started(*scheduler):
        wait_for_port(port)
        try:
            yield address, start_worker
        finally:
            for process in opened:
                process.kill()
                process.wait()


def test_dask_gives_the_run_of_a_table_to_another_worker(tmp_path: Path) -> None:
    pytest.importorskip("distributed")
    before = []

    def replace_worker() -> None:
        wait_for_charges(tmp_path)
        os.kill(first, signal.SIGKILL)
        before.extend(charges(tmp_path))
        start_worker()

    results = ResultFolder(tmp_path / "results")
    with dask_cluster(18787) as (address, start_worker):
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

    with dask_cluster(18788) as (address, start_worker):
        first = start_worker()
        killing = Thread(target=replace_worker)
        killing.start()
        ((number, run),) = play_tasks([task], open_workers(f"dask:{address}"))
        killing.join()
    assert (number, run.cell, run.seed) == (0, cell.name, 0)


def test_parsl_plays_a_sweep(tmp_path: Path) -> None:
    pytest.importorskip("parsl")
    config = tmp_path / "workers.py"
    config.write_text(
        "from parsl import Config\nfrom parsl.executors import HighThroughputExecutor\n"
        "config = Config(executors=[HighThroughputExecutor(label='w', address='127.0.0.1', max_workers_per_node=2)],"
        f" retries=2, run_dir={str(tmp_path / 'parsl')!r})\n"
    )
    found = json.loads(sweep(tmp_path, f"parsl:{config}").communicate(timeout=300)[0])
    assert (len(found["rows"]), charges(tmp_path)) == (2, [ROUNDS, ROUNDS])


def test_ray_plays_a_sweep(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    found = json.loads(sweep(tmp_path, "ray:local").communicate(timeout=300)[0])
    assert (len(found["rows"]), charges(tmp_path)) == (2, [ROUNDS, ROUNDS])


def test_a_scheduler_that_does_not_answer_is_named() -> None:
    pytest.importorskip("distributed")
    with (
        pytest.raises(ConfigError, match=r"tcp://127\.0\.0\.1:9: no scheduler answers there"),
        open_workers("dask:tcp://127.0.0.1:9"),
    ):
        pass


@pytest.mark.parametrize(
    ("threads", "words"), [({}, "has no workers"), ({"tcp://a:1": 4}, r"worker tcp://a:1 has 4 threads")]
)
def test_workers_that_would_share_a_process_are_refused(threads: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_threads(threads)


def test_an_error_of_a_run_is_not_taken_for_one_of_a_worker(tmp_path: Path) -> None:
    """Ray wraps what a task raises in an error of its own, as it does for a worker that died."""
    pytest.importorskip("ray")
    sweeping = sweep(tmp_path, "ray:local", "model.name=linear,no_such:model", rounds=1)
    assert (
        "fedveil: try-name_no_such_model: model no_such:model: module no_such cannot"
        in sweeping.communicate(timeout=300)[1]
    )
    assert sweeping.returncode == 2
