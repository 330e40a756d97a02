"""A run: what it leaves behind, that it stops at its budget, and that a kill at any moment loses nothing."""

from __future__ import annotations

import json
import re
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedveil.data.catalogue import digests
from fedveil.errors import CompositionError, DataError, FedveilError, PrivacyError, RunFolderError
from fedveil.privacy.claims import Role
from fedveil.privacy.ledger import read_entries
from fedveil.run.config.experiment import parse
from fedveil.run.environment import environment
from fedveil.run.executors import batching_caveats
from fedveil.run.folder.run_folder import RunFolder
from fedveil.run.setup import prepare
from fedveil.run.training_run import resume, run
from fedveil.training.steps import LocalSgd
from fedveil.training.vectorized import VmapTrainer
from tests.children import forking
from tests.full_disks import Disk, from_then_on
from tests.runs import Silent, experiment, files, same_model
from tests.training import task_of


@pytest.mark.parametrize(
    "method",
    [
        {"name": "fedavg"},
        {"name": "uldp-naive", "clip": 0.5, "noise_multiplier": 5.0},
        {"name": "uldp-group", "clip": 0.5, "noise_multiplier": 5.0, "group_size": 2},
        {"name": "uldp-group", "clip": 0.5, "noise_multiplier": 5.0, "group_size": "median"},
        {"name": "uldp-sgd", "clip": 0.5, "noise_multiplier": 5.0},
        {"name": "uldp-avg", "clip": 0.5, "noise_multiplier": 5.0},
        {"name": "uldp-avg-w", "clip": 0.5, "noise_multiplier": 5.0, "user_sampling_rate": 0.5},
    ],
    ids=lambda method: f"{method['name']}-{method.get('group_size', '')}",
)
def test_every_method_runs_end_to_end_and_states_its_privacy(method: dict[str, Any], tmp_path: Path) -> None:
    quick = experiment(local={"epochs": 1, "batch_size": 32}).model_dump(exclude_none=True)
    document = quick | {"method": method, "rounds": 2, "privacy": {}}
    if method["name"] == "uldp-sgd":
        del document["local"]
    outcome = run(prepare(parse(document, "test")), tmp_path, Silent())
    events, _, rows = files(outcome.folder)
    assert outcome.rounds == len(events) == 2
    assert [row["round"] for row in rows] == [0, 1, 2]
    statement = json.loads((outcome.folder / "privacy.json").read_text())
    assert statement["unit"] == "user"
    assert (statement["epsilon"] is None) == (method["name"] == "fedavg")
    assert rows[-1]["epsilon"] == statement["epsilon"]
    for name in ("experiment.toml", "diagnostics.json", "environment.json"):
        assert (outcome.folder / name).is_file()


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Dynamo detected:UserWarning")
@pytest.mark.parametrize(
    ("trainer", "compiled", "lines"),
    [
        ("loop", True, 0),
        ("vmap", False, 0),
        pytest.param(
            "vmap", True, 1, marks=pytest.mark.slow
        ),  # the choice of the trainer compiles a gradient
    ],
)
def test_a_statement_says_where_others_may_round_a_contribution(
    trainer: str, compiled: bool, lines: int
) -> None:
    section = {"name": trainer, "compile": compiled, "device": "cpu"}
    document = experiment().model_dump(exclude_none=True) | {"trainer": section}
    document["method"] = {"name": "uldp-avg", "clip": 0.5, "noise_multiplier": 5.0}
    assert sum("training in batches" in line for line in prepare(parse(document, "test")).uncovered) == lines


@pytest.mark.parametrize(("compiled", "lines"), [(False, 0), (True, 1)])
def test_a_statement_names_compiled_kernels(compiled: bool, lines: int) -> None:
    trainer = VmapTrainer(task=task_of("mlp"), local=LocalSgd(), compile=compiled)
    said = batching_caveats("vmap", "this", trainer, torch.device("cpu"))
    assert sum("by compiled kernels" in line for line in said) == len(said) == lines


def test_every_round_is_charged_before_it_is_played(tmp_path: Path) -> None:
    """The charge is on disk, as another process reads it, when the round begins: a crash loses budget, never a cost."""
    on_disk: dict[int, int] = {}

    class Watching(Silent):
        def training(self, round_number: int, done: int, total: int) -> None:
            on_disk.setdefault(round_number, len(read_entries(tmp_path / "try" / "ledger.jsonl")))

    run(prepare(experiment(rounds=3)), tmp_path, Watching())
    assert on_disk == {1: 1, 2: 2, 3: 3}


def test_learning_happens() -> None:
    prepared = prepare(experiment(method={"noise_multiplier": 0.5}, rounds=15, local={"epochs": 5}))
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        outcome = run(prepared, Path(folder), Silent())
        assert outcome.row["test"]["accuracy"] > 0.6


def test_the_same_seeds_give_the_same_run(tmp_path: Path) -> None:
    one = files(run(prepare(experiment()), tmp_path, Silent()).folder)
    two = files(run(prepare(experiment()), tmp_path, Silent()).folder)
    assert one[0] == two[0]
    assert same_model(one[1], two[1])


def test_secure_noise_is_never_repeated(tmp_path: Path) -> None:
    secure = experiment().model_dump(exclude_none=True) | {"privacy": {}}
    one = files(run(prepare(parse(secure, "test")), tmp_path, Silent()).folder)
    two = files(run(prepare(parse(secure, "test")), tmp_path, Silent()).folder)
    assert not same_model(one[1], two[1])


@pytest.mark.parametrize("after", [1, 2, 3])
def test_an_interrupted_run_resumes_to_the_same_ledger_and_model(after: int, tmp_path: Path) -> None:
    whole = files(run(prepare(experiment()), tmp_path, Silent()).folder)
    with pytest.raises(KeyboardInterrupt):
        run(prepare(experiment()), tmp_path / "cut", Silent(interrupt_after=after))
    outcome = resume(tmp_path / "cut" / "try", Silent())
    resumed = files(outcome.folder)
    assert resumed[0] == whole[0]
    assert same_model(resumed[1], whole[1])
    assert [row["test"] for row in resumed[2]] == [row["test"] for row in whole[2]]


@pytest.mark.parametrize("seed", [None, 11])
def test_fresh_noise_for_rounds_that_were_charged_is_charged_again(seed: int | None, tmp_path: Path) -> None:
    """A checkpoint that went back, or was lost: with fresh noise every round is another release of the same people."""
    privacy = {} if seed is None else {"insecure_seed": seed}
    document = experiment(rounds=3).model_dump(mode="json", exclude_none=True) | {"privacy": privacy}
    whole = run(prepare(parse(document, "test")), tmp_path, Silent())
    before = files(whole.folder)
    again = resume(whole.folder, Silent())
    assert files(whole.folder)[0] == before[0]  # complete: nothing is played, nothing is charged
    (whole.folder / "checkpoint" / "state.safetensors").unlink()
    again = resume(whole.folder, Silent())
    events, model, rows = files(whole.folder)
    assert same_model(model, before[1]) is (seed is not None)
    assert len(events) == (6 if seed is None else 3)
    assert (", and 3 charged attempts that were repeated" in " ".join(again.statement.mechanisms)) is (
        seed is None
    )
    if seed is None:
        assert again.statement.epsilon == pytest.approx(
            prepare(parse(document, "t")).epsilon_after(6), rel=1e-6
        )
        assert rows[-1]["epsilon"] == pytest.approx(again.statement.epsilon, rel=1e-6)


def test_a_budget_holds_for_what_is_charged_again(tmp_path: Path) -> None:
    document = experiment(rounds=3).model_dump(mode="json", exclude_none=True)
    budget = prepare(experiment()).epsilon_after(4)
    document["privacy"] = {"budget": budget * 1.001}
    whole = run(prepare(parse(document, "test")), tmp_path, Silent())
    (whole.folder / "checkpoint" / "state.safetensors").unlink()
    again = resume(whole.folder, Silent())
    assert (again.rounds, len(files(whole.folder)[0])) == (1, 4)
    assert again.stopped is not None
    assert again.statement.epsilon is not None
    assert again.statement.epsilon <= budget * 1.001


def play_on(folder: Path) -> None:
    """Play a run that is killed on its way."""
    run(prepare(experiment(rounds=14)), folder, Silent())


def test_a_process_killed_at_any_moment_resumes_to_the_same_run(tmp_path: Path) -> None:
    """Three processes, forked from one that has all imported, are killed at three moments after the fourth round."""
    whole = files(run(prepare(experiment(rounds=14)), tmp_path / "whole", Silent()).folder)
    context = forking()
    for delay in (0.0, 0.03, 0.1):
        process = context.Process(target=play_on, args=(tmp_path / str(delay),))
        process.start()
        metrics = tmp_path / str(delay) / "try" / "metrics.jsonl"
        deadline = time.monotonic() + 300
        while not (metrics.exists() and metrics.read_bytes().count(b"\n") > 3):
            assert time.monotonic() < deadline, "the run did not begin"
            assert process.is_alive(), "the run ended before it was killed"
            time.sleep(0.005)
        time.sleep(delay)
        process.kill()
        process.join()
        resumed = files(resume(tmp_path / str(delay) / "try", Silent()).folder)
        assert resumed[0] == whole[0]
        assert same_model(resumed[1], whole[1])
        assert len(resumed[2]) == 15


def test_resuming_a_complete_run_changes_nothing(tmp_path: Path) -> None:
    outcome = run(prepare(experiment()), tmp_path, Silent())
    before = files(outcome.folder)
    again = Silent()
    resume(outcome.folder, again)
    after = files(outcome.folder)
    assert again.rows == []
    assert before[0] == after[0]
    assert same_model(before[1], after[1])


def test_a_ledger_that_lost_charges_is_refused(tmp_path: Path) -> None:
    outcome = run(prepare(experiment()), tmp_path, Silent())
    ledger = outcome.folder / "ledger.jsonl"
    ledger.write_bytes(b"".join(ledger.read_bytes().splitlines(keepends=True)[:2]))
    with pytest.raises(RunFolderError, match="charges were lost"):
        resume(outcome.folder, Silent())
    (outcome.folder / "metrics.jsonl").unlink()  # the statement shows it
    with pytest.raises(RunFolderError, match=r"that privacy\.json counts; charges were lost"):
        resume(outcome.folder, Silent())
    (outcome.folder / "privacy.json").unlink()  # the head in the checkpoint alone shows it
    with pytest.raises(RunFolderError, match="the ledger of the checkpoint, which had 4; charges were lost"):
        resume(outcome.folder, Silent())


@pytest.mark.parametrize(("share", "rounds"), [(1.0, 2), (1 - 1e-9, 1)])
def test_a_runs_budget_is_spent_to_its_last_and_not_beyond(share: float, rounds: int, tmp_path: Path) -> None:
    document = experiment().model_dump(exclude_none=True) | {"privacy": {}}
    budget = share * prepare(parse(document, "test")).epsilon_after(2)
    outcome = run(prepare(parse(document | {"privacy": {"budget": budget}}, "test")), tmp_path, Silent())
    assert outcome.rounds == len(read_entries(outcome.folder / "ledger.jsonl")) == rounds


def test_whoever_is_sent_counts_before_the_first_round_is_promised_nothing_without_one(
    tmp_path: Path,
) -> None:
    """Weights by records: silos send counts when they join, and a budget may then leave no room for a round."""
    outcome = run(prepare(experiment(privacy={"insecure_seed": None, "budget": 1e-3})), tmp_path, Silent())
    assert outcome.rounds == 0
    assert outcome.statement.epsilon == 0
    assert [outcome.statement.line_for(role) for role in (Role.SERVER, Role.SILO)] == [None, None]


def test_a_run_stops_before_the_round_that_would_exceed_its_budget(tmp_path: Path) -> None:
    document = experiment().model_dump(exclude_none=True) | {"privacy": {"budget": 1.0}}
    prepared = prepare(parse(document, "test"))
    assert prepared.epsilon_after(2) > 1.0 >= prepared.epsilon_after(1)
    outcome = run(prepared, tmp_path, Silent())
    assert outcome.rounds == 1
    assert outcome.stopped is not None
    assert "above the budget of 1" in outcome.stopped
    assert (outcome.folder / "model.safetensors").is_file()
    assert outcome.statement.epsilon is not None
    assert outcome.statement.epsilon <= 1.0
    assert len(read_entries(outcome.folder / "ledger.jsonl")) == 1


def test_noise_from_a_seed_is_stated_as_no_guarantee(tmp_path: Path) -> None:
    outcome = run(prepare(experiment(rounds=1)), tmp_path, Silent())
    assert outcome.statement.epsilon is None
    assert "known seed" in outcome.statement.reasons[0]
    assert outcome.row["epsilon"] is None


def test_calibrated_noise_spends_the_target_and_no_more(tmp_path: Path) -> None:
    prepared = prepare(experiment(method={"noise_multiplier": "calibrated"}, privacy={"epsilon": 2.0}))
    assert 1.99 < prepared.epsilon_after(4) <= 2.0


def test_what_no_accountant_can_count_is_refused_before_it_trains_and_not_by_the_statement(
    tmp_path: Path,
) -> None:
    """At this delta 'pld' has no number: a run that 'rdp' counts ended without a statement, after all its rounds."""
    method = {"name": "uldp-avg", "clip": 0.5, "noise_multiplier": 2.0, "user_sampling_rate": 0.5}
    document = experiment(rounds=2).model_dump(exclude_none=True) | {"method": method}
    judged = document | {"privacy": {"accountant": "rdp", "delta": 1e-13}}
    outcome = run(prepare(parse(judged, "test")), tmp_path, Silent())
    statement = json.loads((outcome.folder / "privacy.json").read_text())
    assert statement["epsilon"] == statement["epsilons"]["rdp"] > 1
    assert "pld" not in statement["epsilons"]
    late = document | {"privacy": {"delta": 1.0015e-12}, "rounds": 3}
    with pytest.raises(PrivacyError, match="error of 3 composed releases"):
        prepare(parse(late, "test"))
    none = document | {"method": method | {"noise_multiplier": 1e-160}, "privacy": {"accountant": "rdp"}}
    with pytest.raises(PrivacyError, match="must lie between"):
        prepare(parse(none, "test"))


def test_nan_updates_become_zero_are_counted_and_reach_nothing(tmp_path: Path) -> None:
    prepared = prepare(experiment(local={"learning_rate": 1e38}, method={"noise_multiplier": 0.0}, rounds=1))
    outcome = run(prepared, tmp_path, Silent())
    assert outcome.row["nonfinite"] > 0
    _, model, _ = files(outcome.folder)
    assert all(np.isfinite(value).all() for value in model.values())


def test_another_versions_folder_is_refused(tmp_path: Path) -> None:
    outcome = run(prepare(experiment(rounds=1)), tmp_path, Silent())
    path = outcome.folder / "experiment.toml"
    path.write_text(path.read_text().replace("schema_version = 2", "schema_version = 3"))
    with pytest.raises(RunFolderError, match="schema_version 3"):
        resume(outcome.folder, Silent())
    with pytest.raises(RunFolderError, match="not a run folder"):
        resume(tmp_path, Silent())


def test_a_changed_experiment_does_not_resume(tmp_path: Path) -> None:
    outcome = run(prepare(experiment(rounds=1)), tmp_path, Silent())
    path = outcome.folder / "experiment.toml"
    path.write_text(path.read_text().replace("rounds = 1", "rounds = 2"))
    with pytest.raises(RunFolderError, match="was changed since the run began"):
        resume(outcome.folder, Silent())


@pytest.mark.parametrize("began", [None, {"name": "ema", "beta": 0.8}, {"name": "tail"}])
@pytest.mark.parametrize("wanted", [{"name": "ema", "beta": 0.5}, {"name": "tail", "share": 0.9}])
def test_an_average_is_not_chosen_after_a_look_at_the_metrics(
    began: dict[str, Any] | None, wanted: dict[str, Any], tmp_path: Path
) -> None:
    """The run has shown its metrics; neither is one added, nor another one taken, and nothing is written or charged."""
    outcome = run(prepare(experiment(rounds=1, server={"average": began})), tmp_path, Silent())
    kept = {name: (outcome.folder / name).read_bytes() for name in ("ledger.jsonl", "privacy.json")}
    path = outcome.folder / "experiment.toml"
    path.write_text(experiment(rounds=1, server={"average": wanted}).to_toml())
    reason, instead = "metrics have shown may have chosen the change .another average", "a folder of its own"
    with pytest.raises(RunFolderError, match=f"{reason}.*{instead}, with a ledger and an epsilon of its own"):
        resume(outcome.folder, Silent())
    assert kept == {name: (outcome.folder / name).read_bytes() for name in kept}


def test_a_checkpoint_of_another_run_of_the_experiment_is_refused(tmp_path: Path) -> None:
    """Both ledgers are equal, and the rounds of the other run are charged in the other folder alone."""
    wanted = parse(experiment(rounds=3).model_dump(mode="json", exclude_none=True) | {"privacy": {}}, "test")
    folders = []
    for place in ("one", "other"):
        with pytest.raises(KeyboardInterrupt):
            run(prepare(wanted), tmp_path / place, Silent(interrupt_after=2))
        folders.append(tmp_path / place / "try")
    one, other = folders
    assert (one / "ledger.jsonl").read_bytes() == (other / "ledger.jsonl").read_bytes()
    charged = (one / "ledger.jsonl").read_bytes()
    own = (one / "checkpoint" / "state.safetensors").read_bytes()
    shutil.copy(other / "checkpoint" / "state.safetensors", one / "checkpoint" / "state.safetensors")
    with pytest.raises(RunFolderError, match=r"written in another run folder.*another line for round 2"):
        resume(one, Silent())
    assert (one / "ledger.jsonl").read_bytes() == charged
    (one / "checkpoint" / "state.safetensors").write_bytes(own)
    assert resume(one, Silent()).rounds == 3


def test_a_checkpoint_of_another_run_is_refused_before_its_round_has_a_line(tmp_path: Path) -> None:
    """A run that ended in the middle of a round has charged it, and metrics.jsonl has no line for it yet."""
    wanted = parse(experiment(rounds=3).model_dump(mode="json", exclude_none=True) | {"privacy": {}}, "test")
    folders = []
    for place in ("one", "other"):
        with pytest.raises(KeyboardInterrupt):
            run(prepare(wanted), tmp_path / place, Silent(interrupt_after=2))
        folders.append(tmp_path / place / "try")
    one, other = folders
    metrics, checkpoint = one / "metrics.jsonl", one / "checkpoint" / "state.safetensors"
    charged, own = (one / "ledger.jsonl").read_bytes(), checkpoint.read_bytes()
    first, second, third = metrics.read_bytes().splitlines(keepends=True)
    metrics.write_bytes(first + second + third[:40])
    shutil.copy(other / "checkpoint" / "state.safetensors", checkpoint)
    with pytest.raises(
        RunFolderError, match=r"another run folder.*round 1 that .* round 2 does not continue"
    ):
        resume(one, Silent())
    metrics.write_bytes(first)
    for kept in (own, checkpoint.read_bytes()):
        checkpoint.write_bytes(kept)
        with pytest.raises(RunFolderError, match=r"metrics\.jsonl: has no complete line for round 1"):
            resume(one, Silent())
    assert (one / "ledger.jsonl").read_bytes() == charged
    checkpoint.write_bytes(own)
    metrics.write_bytes(first + second + third[:40])
    assert resume(one, Silent()).rounds == 3


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    outcome = run(prepare(experiment(rounds=1)), tmp_path, Silent())
    path = outcome.folder / "checkpoint" / "state.safetensors"
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(RunFolderError, match="is damaged"):
        resume(outcome.folder, Silent())


def test_a_full_disk_leaves_the_old_file_and_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder.create(tmp_path, experiment())
    folder.write("note.json", b"old")

    disk = Disk(monkeypatch)
    disk.fill(from_then_on(0))
    with (
        disk.acting(True),
        pytest.raises(RunFolderError, match=r"note\.json cannot be written: No space left"),
    ):
        folder.write("note.json", b"new content")
    assert (folder / "note.json").read_bytes() == b"old"
    assert not list(folder.path.glob(".*tmp"))


def test_folders_are_numbered_never_overwritten(tmp_path: Path) -> None:
    names = [RunFolder.create(tmp_path, experiment()).path.name for _ in range(3)]
    assert names == ["try", "try-2", "try-3"]


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"model": {"loss": "cox"}}, "cox"),
        ({"model": {"metrics": ["nonsense"]}}, "nonsense"),
        ({"model": {"name": "nonsense"}}, "nonsense"),
        ({"data": {"name": "nonsense"}}, "nonsense"),
        ({"privacy": {"colluding_silos": 3}}, "at least one silo must be honest"),
        ({"trainer": {"device": "cuda"}}, "no CUDA device"),
    ],
)
def test_what_is_wrong_is_found_before_training(changes: dict[str, Any], error: str) -> None:
    if "trainer" in changes:
        import torch

        if torch.cuda.is_available():
            pytest.skip("a CUDA device is available here")
    with pytest.raises(FedveilError, match=error):
        prepare(experiment(**changes))


@pytest.mark.parametrize("name", ["cepam-gaussian", "fl-gaussian", "dp-fedavg", "varying-dp", "stevens"])
def test_noise_that_is_not_sized_for_clients_who_pool_is_not_said_to_be(name: str) -> None:
    """The key promises the stated noise against so many; each client's own is sized for one that knows its share."""
    clients = {"data": {"n_users": 6, "n_silos": 6, "allocation": {"law": "clients"}}}
    method = {"method": {"name": name}}
    assert prepare(experiment(**clients, **method)).method.channel.message_std(6) > 0
    with pytest.raises(CompositionError, match=f"colluding_silos = 2: the noise of {name} is not sized for"):
        prepare(experiment(**clients, **method, privacy={"colluding_silos": 2}))


@pytest.mark.parametrize("name", ["fl-laplace", "dp-fed"])
def test_noise_that_no_client_knows_of_may_be_asked_to_hold_against_several(name: str) -> None:
    """Of Laplace noise one message's alone counts, and a trusted server adds its own: any number may pool."""
    clients = {"data": {"n_users": 6, "n_silos": 6, "allocation": {"law": "clients"}}}
    method = {"method": {"name": name}}
    several = prepare(experiment(**clients, **method, privacy={"colluding_silos": 2}))
    assert several.guarantee.views == prepare(experiment(**clients, **method)).guarantee.views


def test_fewer_users_than_records_show_is_refused(tmp_path: Path) -> None:
    assert issubclass(DataError, FedveilError)
    (tmp_path / "schema.toml").write_text(
        'n_users = 1\nuser = "patient"\n[target]\nkind = "label"\ncolumn = "y"\nclasses = ["0", "1"]\n'
        '[features.x]\nkind = "number"\nlower = 0.0\nupper = 1.0\n'
    )
    (tmp_path / "a.csv").write_text(
        "patient,x,y\np1,0.1,0\np2,0.9,1\np1,0.3,0\np2,0.8,1\np1,0.2,0\np2,0.5,1\n"
    )
    document = experiment().model_dump(exclude_none=True)
    document["data"] = {"table": {"schema_file": tmp_path / "schema.toml", "files": [tmp_path / "a.csv"]}}
    with pytest.raises(DataError, match="n_users"):
        prepare(parse(document, "test"))


def test_a_run_notes_the_files_of_a_catalogue_that_it_read_and_nothing_of_other_tables(
    data_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDVEIL_DATA", str(data_folder))
    asked = {
        "name": "one",
        "rounds": 1,
        "data": {"name": "heart_disease", "n_users": 50},
        "method": {"name": "uldp-avg", "clip": 1.0, "noise_multiplier": 1.0},
        "local": {"learning_rate": 0.1},
    }
    noted = environment(prepare(parse(asked, "here")))["data_files"]
    assert noted == digests("heart_disease")
    assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", one) for one in noted.values())


def test_a_folder_that_is_not_there_is_called_so(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="absent: not a run folder: there is no such folder"):
        resume(tmp_path / "absent", Silent())
