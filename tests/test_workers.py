"""Worker processes: no more than a machine can run, and records on their way to them.

Records arrive with the same values, and without a copy of them in the process that sends.
"""

import os
import subprocess
import sys
import threading
import time
import tracemalloc
from multiprocessing import Pipe, active_children
from pathlib import Path

import numpy as np
import pytest
import torch

from fedveil.errors import ConfigError
from fedveil.run.config.experiment import parse
from fedveil.run.executors import check_processes, local_workers
from fedveil.run.loop import NullObserver
from fedveil.run.process_group import pickle_for_workers, receive_parts, send_parts
from fedveil.run.setup import prepare
from fedveil.run.training_run import run

MEGABYTES = 24


def test_records_are_sent_from_where_they_lie_and_held_once() -> None:
    features = torch.arange(MEGABYTES << 18, dtype=torch.float32).reshape(-1, 64)
    sent = {
        "features": features,
        "targets": np.arange(5),
        "empty": torch.zeros(0, 3),
        "half": torch.ones(3).half(),
    }
    mine, theirs = Pipe()
    tracemalloc.start()
    try:
        parts = pickle_for_workers(sent)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
        sender = threading.Thread(target=send_parts, args=(mine, parts))
        sender.start()
        found = receive_parts(theirs)
        sender.join()
        # A message of 16 MiB may be held twice beside the records while it arrives.
        assert tracemalloc.get_traced_memory()[1] < (MEGABYTES + 40) << 20
    finally:
        tracemalloc.stop()
        mine.close()
        theirs.close()
    for name, value in sent.items():
        assert type(found[name]) is type(value)
        assert found[name].dtype == value.dtype
        np.testing.assert_array_equal(found[name], value)
    found["features"][0, 0] = 7.0  # a copy of the worker's own, which may be written
    assert features[0, 0] == 0.0


def test_more_processes_than_a_machine_can_run_are_refused_before_one_starts(tmp_path: Path) -> None:
    most = 4 * len(os.sched_getaffinity(0))
    check_processes("--processes", most)
    with pytest.raises(ConfigError, match=rf"--processes = {most + 1}: .* at most {most} processes"):
        local_workers(most + 1).__enter__()
    document = {
        "name": "many",
        "rounds": 1,
        "data": {"name": "digits", "n_users": 6, "n_silos": 2},
        "model": {"name": "linear"},
        "local": {"learning_rate": 0.1, "epochs": 1},
        "trainer": {"processes": most + 1},
        "method": {"name": "uldp-avg", "clip": 1.0, "noise_multiplier": 1.0},
    }
    with pytest.raises(ConfigError, match=rf"trainer.processes = {most + 1}: .* at most {most} processes"):
        run(prepare(parse(document, "test")), tmp_path, NullObserver())
    assert not active_children()
    assert not list(tmp_path.rglob("ledger.jsonl"))


_STARTS_A_WORKER = """
import os, time
from fedveil.run.executors import local_workers
if __name__ == "__main__":
    with local_workers(1) as workers:
        print(workers.executor.submit(os.getpid).result(), flush=True)
        workers.executor.submit(time.sleep, 600).result()
"""


def runs(process: int) -> bool:
    try:
        return "(zombie)" not in Path(f"/proc/{process}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_worker_ends_with_the_command_that_started_it_also_in_the_middle_of_a_run(tmp_path: Path) -> None:
    """Otherwise it trains on, and charges, while the same command resumes the sweep."""
    (tmp_path / "starts.py").write_text(_STARTS_A_WORKER)
    command = [sys.executable, str(tmp_path / "starts.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        worker = int(starter.stdout.readline())
        assert runs(worker)
        starter.kill()
    end = time.monotonic() + 30
    while runs(worker):
        assert time.monotonic() < end, "the worker outlives its command"
        time.sleep(0.05)
