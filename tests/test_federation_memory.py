"""What a party of a federation holds for a large model: 50 MB of parameters, 4 silos, each party below 2 GB."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.silo_threads import served, wait_for

from fedveil.federation.enrollment.demonstration import write_demonstration
from fedveil.federation.hosts.folders import CoordinatorFolder
from fedveil.federation.hosts.sockets import END, KEY_PROCESS, free_port
from fedveil.federation.hosts.submission import Submission, create_run, read_document
from fedveil.run.folder.documents import read_statement
from tests.processes import tree

WIDTH = 3530
"""Of two layers: 12.5 million parameters."""

MODEL = """
import torch


def make(shape, outputs):
    sizes = (shape[0], WIDTH, WIDTH)
    layers = [torch.nn.Linear(*pair) for pair in zip(sizes, sizes[1:])]
    return torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[1], torch.nn.ReLU(), torch.nn.Linear(WIDTH, outputs))
"""


def peak_mb(process: int) -> int:
    """Return the largest resident memory that a process had so far, in MB."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())
    assert found is not None
    return int(found[1]) // 1000


@pytest.mark.slow
def test_a_large_model_takes_less_than_two_gigabytes_a_party(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "large.py").write_text(MODEL.replace("WIDTH", str(WIDTH)))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((os.environ.get("PYTHONPATH", ""), str(tmp_path))))
    made = write_demonstration(tmp_path / "demo", rounds=1, port=free_port())
    text = made.experiment.read_text().replace('"linear"', '"large:make"').replace("epochs = 5", "epochs = 1")
    made.experiment.write_text(text)
    for silo in made.provisioned.silos:
        policy = (silo / "policy.toml").read_text()
        (silo / "policy.toml").write_text(
            re.sub(r"^models = .*$", 'models = ["large:make"]', policy, flags=re.M)
        )
    home = CoordinatorFolder(made.provisioned.coordinator)
    with contextlib.ExitStack() as ending:
        coordinator = ending.enter_context(served(made))
        ending.callback(coordinator.terminate)
        parties = [coordinator.pid]
        for silo in made.provisioned.silos:
            command = [sys.executable, "-m", "fedveil", "silo", "serve", str(silo)]
            process = ending.enter_context(subprocess.Popen(command, stdout=subprocess.DEVNULL))
            ending.callback(process.terminate)
            parties.append(process.pid)
        for silo in made.provisioned.silos:
            wait_for(silo / "run" / KEY_PROCESS)
        run = create_run(home, read_document(made.experiment, home))
        with Submission(home, run.path):
            wait_for(run / END, seconds=1800.0)
        peaks = [sum(map(peak_mb, tree(party))) for party in parties]
    assert read_statement(run / "privacy.json").epsilon is not None
    print(peaks)
    assert max(peaks) < 2000
