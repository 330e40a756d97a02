"""What observers keep elsewhere: public numbers, and neither private ones nor when a round was over, unless asked."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import fedveil as fv
from fedveil.api.callbacks import Tracker, scalars
from fedveil.errors import ConfigError, FedveilError
from tests.test_python import METHOD, people, train

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
PUBLIC = {"epsilon", "test/accuracy", "test/loss", "test/auc"}
PRIVATE = re.compile("private|seconds|participants|norm")


def board(folder: Path) -> EventAccumulator:
    read = EventAccumulator(str(folder / "run"))
    read.Reload()
    return read


def test_tensorboard_is_told_public_numbers(tmp_path: Path) -> None:
    result = train(tmp_path, callbacks=[fv.TensorBoard(tmp_path / "board")], rounds=3)
    read = board(tmp_path / "board")
    assert set(read.Tags()["scalars"]) == PUBLIC
    spent = read.Scalars("epsilon")
    assert [one.step for one in spent] == [1, 2, 3]
    assert spent[-1].value == pytest.approx(result.statement.epsilon, rel=1e-6)
    assert [one.wall_time - spent[0].wall_time for one in spent] == pytest.approx([0, 1, 2], abs=1e-3)
    texts = [
        read.Tensors(f"{name}/text_summary")[0].tensor_proto.string_val[0].decode()
        for name in ("experiment", "statement")
    ]
    assert "method.clip = 0.5" in texts[0]
    assert "data" not in texts[0]
    assert texts[1] == "\n".join(result.statement.sentences())


def test_private_numbers_are_kept_where_they_are_asked_for(tmp_path: Path) -> None:
    held = people(test=None)
    train(tmp_path, held=held, callbacks=[fv.TensorBoard(tmp_path / "public")])
    assert set(board(tmp_path / "public").Tags()["scalars"]) == {"epsilon"}
    train(tmp_path / "more", held=held, callbacks=[fv.TensorBoard(tmp_path / "private", private=True)])
    found = set(board(tmp_path / "private").Tags()["scalars"])
    assert found > PUBLIC | {"private/participants", "private/norm_0.5", "private/seconds"}


def test_mlflow_keeps_public_numbers_in_a_file(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    store = f"sqlite:///{tmp_path / 'mlflow.db'}"
    result = train(tmp_path, callbacks=[fv.MLflow("ward", uri=store)], rounds=3)
    client = MlflowClient(tracking_uri=store)
    experiment = client.get_experiment_by_name("ward")
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id])
    assert set(found.data.metrics) == PUBLIC
    assert found.data.params["method.clip"] == "0.5"
    assert not [key for key in found.data.params if key.startswith(("data", "model"))]
    assert found.data.tags["fedveil.statement"] == "\n".join(result.statement.sentences())
    history = client.get_metric_history(found.info.run_id, "epsilon")
    assert [one.step for one in history] == [1, 2, 3]
    assert [one.timestamp - history[0].timestamp for one in history] == [0, 1000, 2000]
    assert (found.info.status, found.info.end_time - history[0].timestamp) == ("FINISHED", 2000)


def test_weights_and_biases_keeps_public_numbers_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    given: list[dict[str, Any]] = []
    begin = wandb.init

    def init(**options: Any) -> Any:
        assert (tmp_path / "run" / "privacy.json").exists(), "the run is over"
        given.append(options)
        return begin(**options)

    monkeypatch.setattr(wandb, "init", init)
    train(tmp_path, callbacks=[fv.WandB("ward", folder=tmp_path / "kept")], rounds=3)
    wandb.teardown()  # its own process has written everything then
    (file,) = (tmp_path / "kept").rglob("*.wandb")
    kept = file.read_bytes()
    assert all(name.encode() in kept for name in PUBLIC)
    assert b"private/" not in kept
    assert b"Adding or removing one user" in kept
    assert given[0]["mode"] == "offline"
    assert given[0]["config"]["method.clip"] == 0.5
    assert not PRIVATE.search(" ".join(given[0]["config"]))


class Kept(Tracker):
    """A tracker that notes what it is asked to do."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Any] = []

    def _begin(self, folder: Path, done: int, settings: Any) -> None:
        self.told.append(("begin", folder.name, done))

    def _keep(self, number: int, values: Any) -> None:
        self.told.append(("keep", number, sorted(values)))
        if number == 2:
            raise FedveilError("the store is full")

    def _end(self, statement: str, *, broken: bool) -> None:
        self.told.append(("end", statement, broken))


def test_a_run_that_breaks_off_lets_go_of_what_it_began(tmp_path: Path) -> None:
    kept = Kept()
    with pytest.raises(FedveilError, match="the store is full"):
        train(tmp_path, callbacks=[kept], rounds=3)
    assert [one[0] for one in kept.told] == ["begin", "keep", "keep", "end"]
    assert kept.told[-1][1:] == ("The run broke off: there is no statement.", True)


def test_a_run_that_is_refused_begins_nothing(tmp_path: Path) -> None:
    kept = Kept()
    with pytest.raises(FedveilError):
        train(tmp_path, callbacks=[kept], method=fv.uldp_avg_w(**METHOD), rounds=-1)
    assert kept.told == []


def test_what_is_not_finite_or_not_known_is_left_out() -> None:
    summary = fv.RoundSummary(
        number=1,
        rounds=2,
        epsilon=None,
        test={"auc": float("nan"), "accuracy": 0.5, "r2": None},
        private={"norms": None, "clipped": 0.25, "communication_cost": {"a": 1}},
        folder=Path(),
        _prepared=None,  # type: ignore[arg-type]
    )
    assert scalars(summary) == {"test/accuracy": 0.5, "private/clipped": 0.25}


@pytest.mark.parametrize(
    ("make", "package"),
    [(lambda: fv.TensorBoard("a"), "tensorboard"), (fv.MLflow, "mlflow.tracking"), (fv.WandB, "wandb")],
)
def test_a_library_that_is_missing_is_named(
    make: Callable[[], object], package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, package, None)
    monkeypatch.setitem(__import__("sys").modules, package.partition(".")[0], None)
    with pytest.raises(ConfigError, match=r"pip install 'fedveil\[observers\]'"):
        make()
