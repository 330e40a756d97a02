"""Several processes give the run of one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fedveil.engine.distributed import run_together, workers
from fedveil.engine.experiment import Experiment, merge, parse
from fedveil.engine.run import run
from fedveil.engine.setup import prepare
from fedveil.errors import ConfigError
from tests.test_dp_fed_ls import Silent, experiment

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::ResourceWarning")


def model(folder: Path) -> torch.Tensor:
    return torch.cat([value.reshape(-1) for value in load_file(folder / "model.safetensors").values()])


def seeded(trainer: str) -> Experiment:
    return experiment(trainer={"name": trainer, "device": "cpu"}, privacy={"insecure_seed": 5})


@pytest.mark.parametrize("trainer", ["loop", "span"])
def test_three_processes_give_the_model_of_one(trainer: str, tmp_path: Path) -> None:
    alone = run(prepare(seeded(trainer)), tmp_path, Silent())
    with workers(seeded(trainer), 3):
        together = run_together(prepare(seeded(trainer)), tmp_path, Silent())
    assert together is not None
    torch.testing.assert_close(model(together.folder), model(alone.folder), rtol=0, atol=1e-6)
    assert together.row["norms"] == pytest.approx(alone.row["norms"], rel=1e-4)
    assert together.row["contributions"] == alone.row["contributions"]


@pytest.mark.slow
def test_torchrun_gives_the_model_of_one_process(tmp_path: Path) -> None:
    (tmp_path / "one.toml").write_text(seeded("loop").to_toml())
    alone = run(prepare(seeded("loop")), tmp_path / "alone", Silent())
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command += [
        "-m",
        "fedveil.torchrun",
        str(tmp_path / "one.toml"),
        "--runs",
        str(tmp_path / "runs"),
    ]
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=300)
    torch.testing.assert_close(model(tmp_path / "runs" / "clients"), model(alone.folder), rtol=0, atol=1e-6)


def test_what_cannot_be_dealt_out_is_refused(tmp_path: Path) -> None:
    group = {
        "data": {"n_silos": 2, "allocation": {"law": "zipf"}},
        "method": {"name": "uldp-group", "clip": 1.0, "noise_multiplier": 1.0, "group_size": 2},
    }
    document = merge(seeded("loop").model_dump(mode="json", exclude_none=True), group)
    for key in ("client_sampling", "client_sampling_rate", "smoothing"):
        document["method"].pop(key, None)
    document["local"].pop("decay", None)
    with pytest.raises(ConfigError, match="one process"):
        run_together(prepare(parse(document, "test")), tmp_path, Silent())
    with pytest.raises(ConfigError, match="at least one"), workers(seeded("loop"), 0):
        pass
