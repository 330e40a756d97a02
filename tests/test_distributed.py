"""Several processes give the run of one process."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fedveil.engine.distributed import run_together
from fedveil.engine.experiment import Experiment, merge, parse
from fedveil.engine.folder import Row
from fedveil.engine.run import resume, run
from fedveil.engine.setup import prepare
from fedveil.errors import ConfigError
from tests.test_dp_fed_ls import Silent, experiment

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::ResourceWarning")


def model(folder: Path) -> torch.Tensor:
    return torch.cat([value.reshape(-1) for value in load_file(folder / "model.safetensors").values()])


def seeded(trainer: str, processes: int = 1) -> Experiment:
    options = {"name": trainer, "device": "cpu", "processes": processes}
    return experiment(trainer=options, privacy={"insecure_seed": 5})


@pytest.mark.parametrize(("trainer", "tolerance"), [("loop", 0.0), ("span", 1e-6)])
def test_three_processes_give_the_model_of_one(trainer: str, tolerance: float, tmp_path: Path) -> None:
    alone = run(prepare(seeded(trainer)), tmp_path, Silent())
    together = run(prepare(seeded(trainer, processes=3)), tmp_path, Silent())
    torch.testing.assert_close(model(together.folder), model(alone.folder), rtol=0, atol=tolerance)
    assert together.row["norms"] == pytest.approx(alone.row["norms"], rel=1e-4)
    assert together.row["contributions"] == alone.row["contributions"]
    assert not torch.distributed.is_initialized()


class Interrupted(Silent):
    def completed(self, row: Row) -> None:
        raise KeyboardInterrupt


def test_an_interrupted_run_leaves_no_process_behind_and_goes_on_over_several(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(prepare(seeded("loop", processes=2)), tmp_path, Interrupted())
    assert multiprocessing.active_children() == []
    resumed = resume(tmp_path / "clients", Silent())
    alone = run(prepare(seeded("loop")), tmp_path / "alone", Silent())
    assert torch.equal(model(resumed.folder), model(alone.folder))


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


def test_what_cannot_be_dealt_out_is_refused_before_any_training(tmp_path: Path) -> None:
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
    with pytest.raises(ConfigError, match=r"trainer\.processes: uldp-group"):
        prepare(parse(merge(document, {"trainer": {"processes": 2}}), "test"))
    with pytest.raises(ConfigError, match=r"trainer\.processes: must be >= 1, not 0"):
        parse(merge(document, {"trainer": {"processes": 0}}), "test")


def test_processes_under_torchrun_are_torchruns(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="torchrun starts the processes"):
        run_together(prepare(seeded("loop", processes=2)), tmp_path, Silent())
