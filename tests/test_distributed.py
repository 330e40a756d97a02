"""Several processes give the run of one process."""

from __future__ import annotations

import math
import multiprocessing
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

import fedveil as fv
from fedveil.data.records import Affine, Records
from fedveil.errors import ConfigError
from fedveil.methods.method import training_bound
from fedveil.privacy.bounds import Bound, Clip, Unbounded
from fedveil.randomness import ExperimentRandomness
from fedveil.run import process_group
from fedveil.run.config.experiment import Experiment, merge, parse
from fedveil.run.folder.run_folder import STARTED_BY, Row
from fedveil.run.loop import NullObserver
from fedveil.run.setup import prepare
from fedveil.run.steps.experiment import Outcome
from fedveil.run.training_run import resume, run
from fedveil.training import distributed
from fedveil.training.gram.trainer import GramTrainer
from fedveil.training.loop import LoopTrainer
from fedveil.training.losses import load_loss
from fedveil.training.steps import LocalSgd
from fedveil.training.task import Task
from fedveil.training.trainer import Cohort, TrainJob, partition_by_key
from tests.children import forked, forking, tell_modules  # noqa: F401
from tests.test_dp_fed_ls import experiment
from tests.test_preprocessing import prepared_in, tables

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::ResourceWarning")


def model(folder: Path) -> torch.Tensor:
    return torch.cat([value.reshape(-1) for value in load_file(folder / "model.safetensors").values()])


def seeded(trainer: str, processes: int = 1) -> Experiment:
    options = {"name": trainer, "device": "cpu", "processes": processes}
    return experiment(trainer=options, privacy={"insecure_seed": 5})


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Outcome]:
    """The run of one process, by trainer."""
    return cache(
        lambda trainer: run(prepare(seeded(trainer)), tmp_path_factory.mktemp("alone"), NullObserver())
    )


@pytest.mark.slow
def test_processes_that_are_started_give_the_model_of_one(
    alone: Callable[[str], Outcome], tmp_path: Path
) -> None:
    several_give_the_model_of_one("loop", 2, 0.0, alone("loop"), tmp_path)


@pytest.mark.usefixtures("forked")
def test_processes_that_are_forked_give_the_model_of_one(
    alone: Callable[[str], Outcome], tmp_path: Path
) -> None:
    several_give_the_model_of_one("gram", 3, 1e-6, alone("gram"), tmp_path)


def several_give_the_model_of_one(
    trainer: str, processes: int, tolerance: float, alone: Outcome, tmp_path: Path
) -> None:
    together = run(prepare(seeded(trainer, processes=processes)), tmp_path, NullObserver())
    torch.testing.assert_close(model(together.folder), model(alone.folder), rtol=0, atol=tolerance)
    assert together.row["norms"] == pytest.approx(alone.row["norms"], rel=1e-4)
    assert together.row["contributions"] == alone.row["contributions"]
    assert not torch.distributed.is_initialized()


@pytest.mark.usefixtures("forked")
def test_messages_of_clients_come_from_several_processes_too(tmp_path: Path) -> None:
    """Every client's update goes through the channel by itself, so it is a row of the sums of its own."""
    models = []
    for processes in (1, 2):
        document = {
            "name": f"on-{processes}",
            "rounds": 2,
            "data": {"name": "digits", "n_users": 6, "allocation": {"law": "clients"}},
            "model": {"name": "linear"},
            "local": {"learning_rate": 0.1, "epochs": 1},
            "trainer": {"name": "loop", "device": "cpu", "processes": processes},
            "method": {"name": "cepam-gaussian", "clip": 0.5, "noise_multiplier": 0.3},
            "privacy": {"insecure_seed": 5},
        }
        models.append(model(run(prepare(parse(document, "test")), tmp_path, NullObserver()).folder))
    assert torch.equal(models[0], models[1])


@pytest.mark.usefixtures("forked")
def test_what_is_bounded_by_parts_is_bounded_once_in_every_process() -> None:
    """Clients are dealt out by their work: were some clipped as a whole first, one's leaving would change all."""
    prepared = prepare(
        parse(
            {
                "name": "parts",
                "rounds": 1,
                "data": {"name": "digits", "n_users": 4, "allocation": {"law": "clients"}},
                "model": {"name": "linear"},
                "local": {"learning_rate": 1.0, "epochs": 1},
                "trainer": {"name": "loop", "device": "cpu", "processes": 2},
                "method": {"name": "paraaegis", "clip": 0.05, "noise_multiplier": 1.0},
                "protection": {"name": "partial-encryption", "ratio": 0.1, "partition": "released"},
            },
            "test",
        )
    )
    setting = prepared.setting
    members = torch.arange(len(setting.cohort.groups))
    job = TrainJob(
        prepared.task.initial(),
        setting.cohort,
        members,
        setting.weights[members],
        training_bound(setting.method),
        ExperimentRandomness(prepared.experiment.seed),
        ("round", 1),
    )
    with process_group.share_training(prepared) as shared:
        together = shared.setting.trainer.sums(job)
    assert torch.equal(together.total, setting.trainer.sums(job).total)


@pytest.mark.usefixtures("forked")
def test_a_clip_that_moves_is_the_same_in_every_process(tmp_path: Path) -> None:
    """Every job says where the clip stands: shares that were clipped elsewhere would not add up to the same bits."""
    found = []
    for processes in (1, 2):
        document = {
            "name": f"on-{processes}",
            "rounds": 3,
            "data": {"name": "digits", "n_users": 12, "n_silos": 2},
            "model": {"name": "linear"},
            "local": {"learning_rate": 0.1, "epochs": 1},
            "trainer": {"name": "loop", "device": "cpu", "processes": processes},
            "method": {"name": "uldp-avg-w", "clip": {"start": 1.0}, "noise_multiplier": 1.0},
            "privacy": {"insecure_seed": 5},
        }
        done = run(prepare(parse(document, "test")), tmp_path, NullObserver())
        found.append((model(done.folder), done.row["clip"]))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1] != 1.0


class Network(nn.Module):
    """A model of one's own, whose first layer is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)
        for place, parameter in enumerate(self.parameters()):
            nn.init.constant_(parameter, 0.1 * (place - 2))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.last(torch.tanh(self.first(torch.tanh(self.first(features)))))
        return hidden


def distance(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - nn.functional.one_hot(targets, 2)).square().sum(-1)


def train_own(folder: Path, model: nn.Module, processes: int, **changes: Any) -> fv.Result:
    user = np.arange(60) % 12
    people = fv.population(
        np.eye(4).repeat(15, 0), np.arange(60) % 2, user=user, silo=user % 2, n_users=12, silos=[0, 1],
        task="classification", classes=[0, 1],
    )  # fmt: skip
    settings = {"trainer": {"name": "loop"}, "privacy": {"insecure_seed": 3}}
    given = {
        "method": fv.uldp_avg(clip=0.5, noise_multiplier=1.0, epochs=2, local_learning_rate=0.3),
        "rounds": 2,
    }
    given |= {"loss": distance, "settings": settings, "folder": folder, "name": f"on-{processes}"}
    return fv.train(model, people, processes=processes, **given | changes)


@pytest.mark.usefixtures("forked")
def test_objects_of_ones_own_train_in_several_processes_bit_for_bit(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        one, two = (train_own(tmp_path, Network(), processes) for processes in (1, 2))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(model(one.folder), model(two.folder))
    assert one.statement.epsilon == two.statement.epsilon
    assert "processes = 2" in two.settings
    assert multiprocessing.active_children() == []


def local_class() -> nn.Module:
    class Inside(Network):
        pass

    return Inside()


def of_a_session(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    session = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", session)
    session.Net = type("Net", (Network,), {"__module__": "__main__"})  # type: ignore[attr-defined]
    found: nn.Module = session.Net()  # type: ignore[attr-defined]
    return found


def test_what_no_other_process_can_import_is_refused_before_a_folder_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for network, loss, said in (
        (Network(), lambda outputs, targets: outputs[:, 0] - targets, "cannot be carried .*lambda"),
        (local_class(), distance, "cannot be carried .*Inside"),
        (of_a_session(monkeypatch), distance, "Net is defined in this session"),
    ):
        with pytest.raises(ConfigError, match=f"trainer.processes: .*{said}.* leave processes at 1"):
            train_own(tmp_path / "runs", network, 2, loss=loss)
    assert not (tmp_path / "runs").exists()


@pytest.mark.usefixtures("forked")
def test_a_worker_that_cannot_import_the_model_ends_the_run_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = ModuleType("nowhere")
    monkeypatch.setitem(sys.modules, "nowhere", nowhere)
    nowhere.Net = type("Net", (Network,), {"__module__": "nowhere"})  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"a worker process cannot read .*No module named 'nowhere'"):
        train_own(tmp_path, nowhere.Net(), 2)  # type: ignore[attr-defined]
    assert multiprocessing.active_children() == []
    assert not torch.distributed.is_initialized()


SCRIPT = """
import sys
from pathlib import Path
import torch
from tests import test_distributed

class Mine(test_distributed.Network):
    pass

def main():
    torch.set_num_threads(1)
    found = [test_distributed.train_own(Path(sys.argv[1]), Mine(), n) for n in (1, 2)]
    assert torch.equal(*(test_distributed.model(one.folder) for one in found))
    print("the same")

GUARD
    main()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("guard", "said"),
    [
        ('if __name__ == "__main__":', "the same"),
        ("if True:", "a worker process ended .exit code 1. before it began"),
    ],
)
def test_a_script_trains_its_own_model_in_processes_that_import_it(
    guard: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.replace("GUARD", guard))
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "runs")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=environment, timeout=300, capture_output=True, text=True, check=False)
    assert re.search(said, ended.stdout + ended.stderr), ended.stderr
    assert len(list((tmp_path / "runs").iterdir())) == 2  # a worker that imports the script trains nothing


def test_a_process_that_imports_the_script_of_its_run_begins_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an unguarded script each worker would train, and charge, what stands before the call with processes."""
    monkeypatch.setenv(STARTED_BY, str(os.getppid()))
    with pytest.raises(ConfigError, match='call fedveil under `if __name__ == "__main__":`'):
        train_own(tmp_path, Network(), 1)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv(STARTED_BY, str(os.getpid()))  # the process that starts workers goes on
    assert train_own(tmp_path, Network(), 1).rounds > 0


class Interrupted(NullObserver):
    def on_round_end(self, row: Row) -> None:
        raise KeyboardInterrupt


@pytest.mark.usefixtures("forked")
def test_an_interrupted_run_leaves_no_process_behind_and_goes_on_over_several(
    alone: Callable[[str], Outcome], tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(prepare(seeded("loop", processes=2)), tmp_path, Interrupted())
    assert multiprocessing.active_children() == []
    resumed = resume(tmp_path / "clients", NullObserver())
    assert torch.equal(model(resumed.folder), model(alone("loop").folder))


def torchrun(*arguments: str, ranks: int = 2, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run ``python ARGUMENTS`` in several ranks, one thread each."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | variables
    return subprocess.run(
        [*command, *arguments], env=environment, timeout=300, capture_output=True, text=True
    )


def same_under_torchrun(arguments: list[str], ranks: int, runs: int, folder: Path) -> None:
    """Play a command in several ranks and in one process, and hold their models together bit for bit."""
    done = torchrun("-m", "fedveil", *arguments, "--runs", str(folder / "several"), ranks=ranks)
    assert done.returncode == 0, done.stderr
    alone = [sys.executable, "-m", "fedveil", *arguments, "--runs", str(folder / "one")]
    subprocess.run(alone, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True, timeout=300)
    models = sorted((folder / "one").rglob("model.safetensors"))
    assert len(models) == runs
    for one in models:
        several = folder / "several" / one.relative_to(folder / "one")
        assert torch.equal(model(several.parent), model(one.parent))


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["loop", "vmap"])
def test_fedveil_run_under_torchrun_gives_the_models_of_one_process(trainer: str, tmp_path: Path) -> None:
    (tmp_path / "one.toml").write_text(seeded(trainer).to_toml())
    arguments = ["run", str(tmp_path / "one.toml"), "--seeds", "2", "--set", "rounds=2"]
    same_under_torchrun(arguments, 2, 2, tmp_path)


@pytest.mark.slow
def test_three_ranks_play_a_variant_of_a_preset(tmp_path: Path) -> None:
    keys = ("rounds=2", "privacy.insecure_seed=5", "trainer.name=loop", "trainer.device=cpu")
    options = [word for key in keys for word in ("--set", key)]
    arguments = ["run", "digits", "--variant", "uldp-naive", "--seeds", "2", *options]
    same_under_torchrun(arguments, 3, 2, tmp_path)


@pytest.mark.slow
def test_three_ranks_take_the_schema_that_a_run_refines(tmp_path: Path) -> None:
    tables(tmp_path)
    prepared = prepared_in(tmp_path, privacy={"epsilon": 20.0, "insecure_seed": 2})
    (tmp_path / "one.toml").write_text(prepared.experiment.to_toml())
    same_under_torchrun(["run", str(tmp_path / "one.toml")], 3, 1, tmp_path)


@pytest.mark.slow
def test_an_interrupted_run_goes_on_under_torchrun(alone: Callable[[str], Outcome], tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(prepare(seeded("loop")), tmp_path, Interrupted())
    done = torchrun("-m", "fedveil", "resume", str(tmp_path / "clients"))
    assert done.returncode == 0, done.stderr
    assert torch.equal(model(tmp_path / "clients"), model(alone("loop").folder))


SCRIPT_OF_RANKS = """
import os, signal, sys
import numpy as np, torch, fedveil

rank, how, folder = int(os.environ["RANK"]), sys.argv[1], sys.argv[2]
random = np.random.default_rng(rank if how == "other-data" else 0)
features = random.normal(size=(240, 3)).astype(np.float32)
people = fedveil.population(
    features, (features[:, 0] > 0).astype(np.int64), user=np.arange(240) // 4, silo=np.arange(240) % 2,
    task="classification", n_users=60,
)

class Fail(fedveil.Callback):
    def on_round_end(self, summary):
        if how == "dead" and summary.number == 2:
            os.kill(int(open(folder + "/pid-1").read()), signal.SIGKILL)
        if how == "silent" and summary.number == 2:
            os.kill(int(open(folder + "/pid-1").read()), signal.SIGSTOP)

open(f"{folder}/pid-{rank}", "w").write(str(os.getpid()))
model = torch.nn.Sequential(torch.nn.Linear(3, 2))
with torch.no_grad():
    for parameter in model.parameters():
        parameter.zero_()
method = fedveil.uldp_avg(clip=0.5, noise_multiplier=5.0)
settings = {"privacy": {"insecure_seed": 3}, "trainer": {"device": "cpu"}}
name = f"rank-{rank}" if how == "other-document" else "run"
for name in (name, "again"):
    result = fedveil.train(
        model, people, method=method, rounds=4, name=name, folder=folder, callbacks=[Fail()], settings=settings
    )
print(rank, result.folder.name, result.rounds, result.statement.epsilon, flush=True)
"""


def scripted(how: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(SCRIPT_OF_RANKS)
    return torchrun(str(folder / "script.py"), how, str(folder), **variables)


@pytest.mark.slow
def test_every_rank_of_a_script_gets_the_result_of_fedveil_train(tmp_path: Path) -> None:
    done = scripted("well", tmp_path)
    assert done.returncode == 0, done.stderr
    said = sorted(line for line in done.stdout.splitlines() if "again 4" in line)
    assert [line.split()[0] for line in said] == ["0", "1"]
    assert len({line[1:] for line in said}) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("how", "what"), [("other-data", "records"), ("other-document", "experiment")])
def test_a_rank_that_differs_is_refused_before_the_run_folder_exists(
    how: str, what: str, tmp_path: Path
) -> None:
    done = scripted(how, tmp_path)
    assert done.returncode != 0
    assert f"rank 1 differs from rank 0 in: {what}" in done.stderr
    assert not list(tmp_path.rglob("*.toml"))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["dead", "silent"])
def test_a_rank_that_fails_ends_the_run_in_the_others(how: str, tmp_path: Path) -> None:
    done = scripted(how, tmp_path, FEDVEIL_RANK_TIMEOUT="5")
    assert done.returncode != 0
    assert re.search("another process of this run|because another process", done.stderr)
    charged = (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()
    assert 2 <= len(charged) <= 3


def test_ranks_that_differ_are_named_without_what_they_hold() -> None:
    facts = {"experiment": "a", "records": "b"}
    process_group.check_same([facts, dict(facts)])
    with pytest.raises(ConfigError, match=r"rank 2 differs from rank 0 in: records;") as refused:
        process_group.check_same([facts, facts, facts | {"records": "secret"}])
    assert "secret" not in str(refused.value)


@given(seed=st.integers(0, 2**32 - 1), world=st.integers(1, 4))
@settings(max_examples=25)
def test_a_rank_keeps_the_records_of_its_share_and_no_others(seed: int, world: int) -> None:
    rng = np.random.default_rng(seed)
    contributions = int(rng.integers(1, 13))
    user = np.repeat(np.arange(contributions), rng.integers(1, 6, contributions))
    mixed = rng.permutation(len(user))
    features, silo = rng.normal(size=(len(user), 3)), rng.integers(0, 3, contributions)[user]
    cohort = table(features, features[:, 0], silo[mixed].tolist(), user[mixed].tolist())
    trainer = LoopTrainer(task=regression(3), local=LocalSgd(learning_rate=0.1))
    everybody, held = torch.arange(len(cohort.groups)), 0

    def job(of: Cohort) -> TrainJob:
        ones = torch.ones(len(everybody), dtype=torch.float64)
        return TrainJob(
            torch.zeros(3), of, everybody, ones, Clip(norm=1.0), ExperimentRandomness(0), ("round", 1)
        )

    for number in range(world):
        kept = process_group.keep_share(cohort, ExperimentRandomness(0), number, world)
        own = partition_by_key(job(cohort), number, world)
        assert torch.equal(partition_by_key(job(kept), number, world), own)
        assert torch.equal(
            trainer.sums(job(kept).subset(own)).total, trainer.sums(job(cohort).subset(own)).total
        )
        held += len(kept.groups.order)
        assert len(kept.features) == max(1, len(kept.groups.order))
    assert held == len(user)


def test_what_cannot_be_shared_is_refused_before_any_training(tmp_path: Path) -> None:
    group = {
        "data": {"n_silos": 2, "allocation": {"law": "zipf"}},
        "method": {"name": "uldp-group", "clip": 1.0, "noise_multiplier": 1.0, "group_size": 2},
    }
    document = merge(seeded("loop").model_dump(mode="json", exclude_none=True), group)
    for key in ("client_sampling", "client_sampling_rate", "smoothing", "denominator"):
        document["method"].pop(key, None)
    document["local"].pop("decay", None)
    with pytest.raises(ConfigError, match="one process"):
        process_group.split_trainer(prepare(parse(document, "test")))
    with pytest.raises(ConfigError, match=r"trainer\.processes: uldp-group"):
        prepare(parse(merge(document, {"trainer": {"processes": 2}}), "test"))
    with pytest.raises(ConfigError, match=r"trainer\.processes: must be >= 1, not 0"):
        parse(merge(document, {"trainer": {"processes": 0}}), "test")


@pytest.mark.slow
def test_processes_under_torchrun_are_torchruns(tmp_path: Path) -> None:
    (tmp_path / "one.toml").write_text(seeded("loop", processes=2).to_toml())
    done = torchrun("-m", "fedveil", "run", str(tmp_path / "one.toml"), "--runs", str(tmp_path / "runs"))
    assert done.returncode != 0
    assert "torchrun starts the processes" in done.stderr
    assert not (tmp_path / "runs").exists()


class Emulated:
    """Stands for ``torch.distributed`` in one process: every rank computes its share, and the shares are kept."""

    def __init__(self, world: int) -> None:
        self.world, self.rank = world, 0

    def get_rank(self) -> int:
        return self.rank

    def get_world_size(self) -> int:
        return self.world

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Leave the share as it is; the caller adds them up."""


def shares(
    trainer: GramTrainer | LoopTrainer, cohort: Cohort, members: torch.Tensor, bound: Bound, world: int
) -> list[torch.Tensor]:
    """Return what each of ``world`` processes adds to the sums of all silos, weight 1."""
    emulated, found = Emulated(world), []
    weights = torch.ones(len(members), dtype=torch.float64)
    start = torch.zeros(trainer.task.dimension)
    job = TrainJob(start, cohort, members, weights, bound, ExperimentRandomness(0), ("round", 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "distributed", emulated)
        for emulated.rank in range(world):
            found.append(distributed._train_share(trainer, job, True).total)
    return found


def table(features: np.ndarray, targets: np.ndarray, silo: list[int], user: list[int]) -> Cohort:
    records = Records(
        features=features.astype(np.float32),
        targets=targets.astype(np.float32),
        silo=np.array(silo, dtype=np.int32),
        user=np.array(user, dtype=np.int32),
    )
    groups = records.by_silo_user()
    return Cohort.from_records(
        records, groups=groups, n_silos=max(silo) + 1, scale=Affine(), device=torch.device("cpu")
    )


def regression(features: int) -> Task:
    model = nn.Sequential(nn.Flatten(), nn.Linear(features, 1, bias=False))
    nn.init.zeros_(model[1].weight)
    return Task(model=model, loss=load_loss("squared_error"))


def test_who_leaves_has_nobody_trained_on_another_machine() -> None:
    """Machines may round unlike; the most work came first, so that who had most of it decided where all others were."""
    sizes, width = [9, 5, 5, 4, 3, 3, 2, 1], 3
    user = np.repeat(np.arange(len(sizes)), sizes).tolist()
    cohort = table(np.ones((len(user), width)), np.ones(len(user)), [0] * len(user), user)
    trainer = LoopTrainer(task=regression(width), local=LocalSgd(learning_rate=0.1, batch_size=2))

    def trained(members: list[int], rank: int) -> set[int]:
        emulated, ones = Emulated(2), torch.ones(len(members), dtype=torch.float64)
        emulated.rank = rank
        chosen, path = torch.tensor(members), ("round", 1)
        job = TrainJob(torch.zeros(width), cohort, chosen, ones, Unbounded(), ExperimentRandomness(0), path)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(distributed, "distributed", emulated)
            norms = distributed._train_share(trainer, job, False).norms
        return set(chosen[norms > 0].tolist())

    everybody = list(range(len(sizes)))
    for gone in everybody:
        left = [one for one in everybody if one != gone]
        for rank in (0, 1):
            assert trained(left, rank) == trained(everybody, rank) - {gone}


@pytest.mark.parametrize("world", [1, 2, 3])
def test_removing_a_user_moves_rounded_sums_of_several_processes_by_at_most_the_bound(world: int) -> None:
    """Built against rounding: the others' shares are 0.26 grid units in every coordinate, two users a silo.

    Together they round to 1 unit, alone to 0. If removing one user dealt the others out anew, every silo would
    change by a unit in every coordinate, beyond the margin that one contribution pays for.
    """
    silos, width, bound = 150, 1000, Clip(norm=1.0)
    task = regression(width)
    rate = 1e-12  # so small that a user's steps do not see one another
    probe = GramTrainer(task=task, local=LocalSgd(learning_rate=rate, epochs=1, batch_size=1))
    one = table(np.ones((1, width)), np.ones(1), [0], [0])
    step = float(shares(probe, one, torch.arange(1), Unbounded(), 1)[0][0, 0])
    small = 0.26 * bound.grid / step
    sizes, targets, silo, user = [], [], [], []
    for s in range(silos):
        sizes += [10, 2]
        targets += [small / 10, small / 2]
        silo += [s, s]
        user += [2 * s, 2 * s + 1]
    sizes, silo, user = [*sizes, 5], [*silo, 0], [*user, 2 * silos]
    targets.append(4 * bound.norm / math.sqrt(width) / step / 5)
    cohort = table(
        np.ones((sum(sizes), width)),
        np.repeat(targets, sizes),
        np.repeat(silo, sizes).tolist(),
        np.repeat(user, sizes).tolist(),
    )
    everybody = torch.arange(len(cohort.groups))
    others = torch.from_numpy(np.flatnonzero(cohort.groups.user != 2 * silos))
    full, less = (sum(shares(probe, cohort, members, bound, world)) for members in (everybody, others))
    assert float(less.sum(0).abs().max()) > 0  # pairs that round together are there to be undone
    moved = float((full - less).sum(0).norm())
    assert 0.99 * bound.norm - (math.sqrt(width) + 1) * bound.grid < moved <= bound.norm


@given(seed=st.integers(0, 2**32 - 1), world=st.integers(1, 4), scale=st.sampled_from([1e-3, 1.0, 1e3]))
@settings(max_examples=25)
def test_only_the_process_of_a_removed_contribution_sees_a_change(
    seed: int, world: int, scale: float
) -> None:
    rng = np.random.default_rng(seed)
    bound, width, contributions = Clip(norm=1.0), 8, int(rng.integers(2, 13))  # a process may have nobody
    sizes = rng.integers(1, 6, contributions)
    silo = np.repeat(rng.integers(0, 3, contributions), sizes).tolist()
    user = np.repeat(np.arange(contributions), sizes).tolist()
    features = scale * rng.normal(size=(int(sizes.sum()), width))
    cohort = table(features, rng.normal(size=len(features)), silo, user)
    trainer = GramTrainer(task=regression(width), local=LocalSgd(learning_rate=0.1, epochs=2, batch_size=2))
    everybody = torch.arange(len(cohort.groups))
    full = shares(trainer, cohort, everybody, bound, world)
    left_out = int(rng.integers(contributions))
    less = shares(trainer, cohort, everybody[everybody != left_out], bound, world)
    moved = [float((a - b).norm()) for a, b in zip(full, less, strict=True)]
    assert sum(step > 0 for step in moved) <= 1
    assert sum(moved) <= bound.norm


def test_commands_that_train_load_no_library_that_few_of_them_need() -> None:
    context = forking()
    told, telling = context.Pipe(duplex=False)
    process = context.Process(target=tell_modules, args=(telling,))
    process.start()
    telling.close()
    loaded = set(told.recv())
    process.join()
    assert "fedveil.cli.training" in loaded
    assert loaded & {"sklearn", "flwr", "tenseal", "opacus"} == set()
