"""The library from Python: data and models of one's own in, a statement and a model out; nothing private on the way."""

from __future__ import annotations

import inspect
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import Dataset

import fedveil as fv
from fedveil.api.methods import method
from fedveil.api.objective import model_digest
from fedveil.data import arrays
from fedveil.errors import ConfigError, DataError, IntegrityError, PrivacyError, RunFolderError
from fedveil.methods.uldp import uldp_sgd
from fedveil.privacy.statement import Statement
from fedveil.registry import find, names
from fedveil.run.config.choice import own_keys
from fedveil.run.config.experiment import parse
from fedveil.run.loop import StopTraining
from fedveil.run.setup import prepare

N = 60
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(N, 3)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int64)
USER = RANDOM.integers(0, 12, N)
SILO = np.array(["north", "south"])[RANDOM.integers(0, 2, N)]
PUBLIC = RANDOM.permuted(X, axis=0)
"""Features of other people, to test on."""
PUBLIC_Y = (PUBLIC[:, 0] > 0).astype(np.int64)
OTHER_IDS = np.array([f"p{user:02}" for user in USER])
"""Of the same people, in the same order."""
DECLARED: dict[str, Any] = {
    "user": USER,
    "silo": SILO,
    "n_users": 20,
    "task": "classification",
    "classes": [0, 1],
    "silos": ["north", "south"],
}
METHOD: dict[str, Any] = {"clip": 0.5, "noise_multiplier": 1.0}


unchecked_population = inspect.unwrap(arrays.population)
"""Without the check of types that tests add between a caller and the library: what a user runs."""


def people(*, features: Any = X, targets: Any = Y, **changes: Any) -> fv.Population:
    return fv.population(features, targets, **DECLARED | {"test": (PUBLIC[:20], PUBLIC_Y[:20])} | changes)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def train(folder: Path, model: Any = None, held: Any = None, **changes: Any) -> fv.Result:
    given = {"method": fv.uldp_avg_w(**METHOD), "rounds": 2, "server": fv.Sgd(2.5), "delta": 1e-3}
    return fv.train(
        network() if model is None else model,
        people() if held is None else held,
        folder=folder,
        **given | changes,
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> fv.Result:
    return train(tmp_path_factory.mktemp("runs"))


# --- the surface ----------------------------------------------------------------------------------------------------


def test_importing_the_library_loads_no_framework() -> None:
    """Fast because of what is not loaded; the time itself is measured by a benchmark, not here."""
    seen = subprocess.run(
        [
            sys.executable,
            "-c",
            "import fedveil, sys; print(sorted({'torch', 'numpy', 'pydantic'} & set(sys.modules)))",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert seen.stdout == "[]\n"


def test_every_public_name_is_there_and_documented() -> None:
    page = (Path(__file__).parents[1] / "docs/reference/python.md").read_text(encoding="utf-8")
    for name in fv.__all__:
        found = getattr(fv, name)
        assert found.__doc__, name
        assert f"`{name}" in page, f"docs/reference/python.md does not name {name}"
    assert callable(fv.population)
    with pytest.raises(AttributeError, match="public names"):
        fv.nothing  # noqa: B018


def test_a_chooser_takes_what_its_method_and_local_training_take() -> None:
    listed = [name for name in fv.__all__ if name.replace("_", "-") in names("methods")]
    assert len(listed) == 14
    for name in listed:
        shown = set(fv.__getattr__(name).__signature__.parameters)
        own = {key.name for key in own_keys(find("methods", name.replace("_", "-")).load())}
        assert own <= shown
        assert (name in ("uldp_sgd", "uldp_sgd_w", "newton", "boosted_trees")) == ("epochs" not in shown)
    chosen = fv.uldp_avg_w(clip=0.5, local_learning_rate=0.3, epochs=2)
    assert (chosen.parameters, chosen.local) == ({"clip": 0.5}, {"learning_rate": 0.3, "epochs": 2})
    assert method("uldp-sgd", clip=1.0).local is None


# --- populations ----------------------------------------------------------------------------------------------------


class Pairs(Dataset):  # type: ignore[type-arg]
    def __init__(self, *columns: Any) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return N

    def __getitem__(self, row: int) -> Any:
        return tuple(column[row] for column in self.columns)


FRAME, PUBLIC_FRAME = (pd.DataFrame(one, columns=["age", "pulse", "dose"]) for one in (X, PUBLIC))
SOURCES: dict[str, Any] = {
    "lists": (X.tolist(), Y.tolist(), {"user": USER.tolist(), "silo": SILO.tolist()}),
    "float64": (X.astype(np.float64), Y.astype(np.float64), {}),
    "tensors": (torch.from_numpy(X), torch.from_numpy(Y), {"user": torch.from_numpy(USER)}),
    "pandas": (FRAME, pd.Series(Y), {"user": pd.Series(USER), "silo": pd.Series(SILO, dtype="category")}),
    "pyarrow": (
        pa.Table.from_pandas(FRAME),
        pa.array(Y),
        {"user": pa.array(USER), "silo": pa.chunked_array([SILO])},
    ),
    "a data set of pairs": (Pairs(torch.from_numpy(X), Y), None, {}),
    "a data set of all": (Pairs(X, Y, USER, SILO), None, {"user": None, "silo": None}),
    "ids as text": (X, Y.astype(bool), {"user": [str(one) for one in USER], "classes": ["0", "1"]}),
}


@pytest.mark.parametrize("source", SOURCES)
def test_every_source_gives_the_same_population(source: str) -> None:
    features, targets, changes = SOURCES[source]
    same = people(test=None)
    tested = people(features=features, targets=targets, **{"test": None} | changes)
    assert tested.train.sha256 == same.train.sha256
    assert np.array_equal(tested.train.key, same.train.key)
    assert np.array_equal(tested.test_features, same.test_features)
    assert tested.feature_names == (("age", "pulse", "dose") if source in ("pandas", "pyarrow") else None)


def test_nobodys_seed_or_side_depends_on_who_else_is_there() -> None:
    """Without one user the others keep their keys and the side of every record; counting users or silos does not."""
    rest = USER[0] != USER
    whole = people(test=None)
    less = people(features=X[rest], targets=Y[rest], user=USER[rest], silo=SILO[rest], test=None)

    def held(one: fv.Population) -> set[tuple[int, bytes]]:
        assert one.train.key is not None
        return {(int(k), f.tobytes()) for k, f in zip(one.train.key, one.train.features, strict=True)}

    gone = {k for k, _ in held(whole)} - {k for k, _ in held(less)}
    assert len(gone) == 1
    assert {pair for pair in held(whole) if pair[0] not in gone} == held(less)
    assert (less.n_users, less.silo_names) == (whole.n_users, whole.silo_names)


def test_what_is_counted_is_said() -> None:
    counted = people(n_users="counted", silos=None, classes=None)
    assert (counted.n_users, counted.silo_names) == (len(set(USER)), ("north", "south"))
    said = " ".join(counted.notes)
    assert all(f"Declare {what}." in said for what in ("n_users", "silos", "classes"))
    assert "Declare" not in " ".join(people().notes)


def test_what_one_record_refuses_all_for_is_said_as_not_covered() -> None:
    missing = X.astype(np.float64)
    missing[3, 0] = np.nan
    with pytest.raises(DataError, match="row 3"):
        people(features=missing)
    assert any("missing, infinite" in note and "no guarantee covers this" in note for note in people().notes)


def test_labels_come_back_as_they_went_in() -> None:
    for classes, given in ((["no", "yes"], np.array(["no", "yes"])[Y]), ([1, 0], Y)):
        held = people(targets=given, classes=classes, test=None)
        assert held.classes == tuple(classes)
        assert set(held.train.targets) == {0, 1}


# --- training -------------------------------------------------------------------------------------------------------


def test_a_run_states_its_privacy_and_gives_a_model(trained: fv.Result, tmp_path: Path) -> None:
    assert (trained.rounds, trained.stopped) == (2, None)
    assert trained.statement.unit == "user"
    assert trained.statement.epsilon is not None
    assert set(trained.metrics) == {"accuracy", "auc", "loss"}
    assert any("was handed over" in line for line in trained.statement.uncovered)
    labels, chances = trained.predict(X), trained.predict_proba(X)
    assert set(labels) <= {0, 1}
    assert np.allclose(chances.sum(axis=1), 1)
    assert np.mean(trained.predict(PUBLIC[:20]) == PUBLIC_Y[:20]) == pytest.approx(
        trained.metrics["accuracy"]
    )
    with torch.no_grad():
        own = trained.model(torch.from_numpy(X)).argmax(1).numpy()
    assert np.array_equal(own, labels)
    assert (
        trained.report(tmp_path / "report.html").read_text() == (trained.folder / "report.html").read_text()
    )


def test_a_server_optimiser_with_a_state_is_used_and_recorded(tmp_path: Path) -> None:
    plain, adam = train(tmp_path, server=None), train(tmp_path, server=fv.Adam(0.05))
    assert plain.folder != adam.folder
    text = (adam.folder / "experiment.toml").read_text()
    assert 'name = "fedadam"' in text
    assert "learning_rate = 0.05" in text
    moved = [(result.model[0].weight - network()[0].weight).abs().max().item() for result in (plain, adam)]
    assert 0 < moved[1] < 3 * 0.05 * 2
    ended = fv.resume(adam.folder, network(), people())
    assert (ended.rounds, ended.statement) == (2, adam.statement)


def test_noise_is_found_for_a_target(tmp_path: Path) -> None:
    spent = train(tmp_path, method=fv.uldp_avg(clip=0.5), epsilon=3.0, rounds=1).statement.epsilon
    assert spent is not None
    assert 2.97 < spent <= 3.0


def test_the_run_folder_says_what_was_handed_over(trained: fv.Result) -> None:
    text = (trained.folder / "experiment.toml").read_text()
    assert 'name = "session:people"' in text
    assert 'name = "session:Sequential"' in text
    experiment = parse(__import__("tomllib").loads(text), "test")
    with pytest.raises(ConfigError, match=r"data.name: 'session:people' was handed over.*fedveil.resume"):
        prepare(experiment)
    named = experiment.model_copy(update={"data": experiment.data.model_copy(update={"name": "digits"})})
    with pytest.raises(ConfigError, match=r"model.name: 'session:Sequential' was handed over"):
        prepare(named)


class Coded(nn.Module):
    """A model as Hugging Face has them: whole numbers in, an object out; here with a low-rank adapter to train."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(5, 4)
        self.head = nn.Linear(12, 2)
        self.down, self.up = nn.Linear(12, 1, bias=False), nn.Linear(1, 2, bias=False)
        for part in (self.embedding, self.head):
            part.requires_grad_(False)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(features.long().clamp(0, 4)).flatten(1)
        return self.head(hidden) + self.up(self.down(hidden))


def test_an_adapter_is_trained_and_what_is_frozen_stays(tmp_path: Path) -> None:
    codes = (np.abs(X) * 2).astype(np.int64).clip(0, 4)
    model = Coded()
    held = people(features=codes, test=(codes[:5], Y[:5]))
    result = train(tmp_path, model, held, loss=nn.CrossEntropyLoss(), metrics=[share_of_ones, "accuracy"])
    assert set(load_file(result.folder / "model.safetensors")) == {"down.weight", "up.weight"}
    assert torch.equal(result.model.head.weight, model.head.weight)
    assert not torch.equal(result.model.down.weight, model.down.weight)
    text = (result.folder / "experiment.toml").read_text()
    assert 'loss = "session:CrossEntropyLoss"' in text
    assert f'"{__name__}:share_of_ones"' in text


def share_of_ones(outputs: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None) -> float:
    return float((outputs.argmax(1) == 1).float().mean())


def absolute(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs[:, 0] - targets).abs()


def test_a_constant_answer_is_what_a_model_must_beat(tmp_path: Path) -> None:
    """With one positive among twenty the most frequent class is right 19 times: accuracy 0.95, and AUC one half."""
    rare = (PUBLIC[:20], np.eye(20, dtype=np.int64)[7])
    result = train(
        tmp_path, held=people(test=rare), metrics=["accuracy", "balanced_accuracy", "auc", "loss"], rounds=1
    )
    log = np.log(0.95)
    entropy = -(0.95 * log + 0.05 * np.log(0.05))
    assert result.baseline == pytest.approx(
        {"accuracy": 0.95, "balanced_accuracy": 0.5, "auc": 0.5, "loss": entropy}
    )
    page = result.report().read_text()
    shown = [page.index(f">Test {name}<") for name in ("AUC", "accuracy", "balanced accuracy")]
    assert shown == sorted(shown)
    one_logit = train(tmp_path, nn.Linear(3, 1), people(test=rare), rounds=1)
    assert list(one_logit.metrics) == ["auc", "accuracy", "loss"]
    assert one_logit.baseline == pytest.approx({"accuracy": 0.95, "auc": 0.5, "loss": entropy}, rel=1e-5)
    held = people(targets=X[:, 1] + 1, task="regression", classes=None, test=(PUBLIC[:9], X[:9, 1] + 1))
    number = train(tmp_path, nn.Linear(3, 1), held, rounds=1)
    assert number.baseline["r2"] == pytest.approx(0, abs=1e-6)
    assert number.baseline["mae"] == pytest.approx(np.abs(X[:9, 1] - X[:9, 1].mean()).mean(), rel=1e-5)


@pytest.mark.filterwarnings("ignore:the loss cox compares records")
def test_regression_survival_and_clients_run(tmp_path: Path) -> None:
    held = people(targets=X[:, 1] + 1, task="regression", classes=None, test=(PUBLIC[:9], X[:9, 1] + 1))
    result = train(tmp_path, nn.Linear(3, 1), held, loss=absolute)
    assert result.predict(X).shape == (N,)
    times = np.stack((Y, np.abs(X[:, 1])), axis=1)
    held = people(targets=times, task="survival", classes=None, test=(PUBLIC[:20], times[:20]))
    assert set(train(tmp_path, "linear", held).metrics) == {"c_index", "loss"}
    names = [str(one) for one in range(12)]
    held = people(silo=USER, silos=names, n_users=12)
    done = train(tmp_path, "linear", held, method=fv.dp_fed(clip=1.0, noise_multiplier=1.0))
    assert done.statement.unit == "client"
    assert set(done.predict(X)) <= {0, 1}


# --- callbacks ------------------------------------------------------------------------------------------------------


class Keep(fv.Callback):
    def __init__(self, after: int | None = None) -> None:
        self.rounds: list[fv.RoundSummary] = []
        self.after = after

    def on_round_end(self, round: fv.RoundSummary) -> str | None:
        self.rounds.append(round)
        return "enough" if round.number == self.after else None


class KeepAll(Keep):
    sees_private = True


class LooksAndForgets(KeepAll):
    """Sees private numbers in the first round, and says in the second that it does not."""

    def on_round_end(self, round: fv.RoundSummary) -> str | None:
        self.sees_private = False  # type: ignore[misc]
        return super().on_round_end(round)


class EndsByRaising(KeepAll):
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def on_round_end(self, round: fv.RoundSummary) -> str | None:
        super().on_round_end(round)
        raise self.error


@pytest.mark.parametrize(
    "raised", [StopTraining("few took part"), ValueError("few"), SystemExit(3), GeneratorExit("few")]
)
def test_a_callback_that_sees_private_numbers_ends_no_run_by_raising_either(
    raised: BaseException, tmp_path: Path
) -> None:
    """The round at which a run ends is public: the error waits until the run has ended as if nobody had looked."""
    others, ends = Keep(), EndsByRaising(raised)
    asked = isinstance(raised, StopTraining)
    words = "sees private numbers, so it cannot end the run" if asked else "few|3"
    with pytest.raises(ConfigError if asked else type(raised), match=words):
        train(tmp_path, callbacks=[ends, others], rounds=3)
    assert ([one.number for one in ends.rounds], [one.number for one in others.rounds]) == ([1], [1, 2, 3])
    (folder,) = (path.parent for path in tmp_path.rglob("privacy.json"))
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 4
    assert not (folder / "stopped.json").exists()


WHO = np.arange(60)


OF_ONE = USER[5] == USER
COPIES: dict[str, Any] = {
    "all": (X, Y),
    "reversed": (X[::-1], Y[::-1]),
    "some": (X[7:27], Y[7:27]),
    "one user's": (X[OF_ONE], Y[OF_ONE]),
    "one": (X[5:6], Y[5:6]),
    "repeated": (np.repeat(X, 2, axis=0), np.repeat(Y, 2)),
    "among others": (np.concatenate((PUBLIC, X[5:6])), np.concatenate((PUBLIC_Y, Y[5:6]))),
    "other targets": (X, 1 - Y),
    "lists": (X.tolist(), Y.tolist()),
    "float64": (X.astype(np.float64), Y.astype(np.float64)),
    "tensors": (torch.from_numpy(X), torch.from_numpy(Y)),
    "pandas": (FRAME, pd.Series(Y)),
    "pyarrow": (pa.Table.from_pandas(FRAME), pa.array(Y)),
}


@pytest.mark.parametrize("copy", COPIES)
def test_records_that_are_trained_on_are_no_public_test_table(copy: str) -> None:
    trained = FRAME if copy in ("pandas", "pyarrow") else X
    with pytest.raises(DataError, match=r"test, row \d+: the features of a record that is trained on"):
        people(features=trained, test=COPIES[copy])


def test_coincidences_of_coarse_features_are_no_copy_and_a_copy_of_them_is() -> None:
    random = np.random.default_rng(3)
    coarse, others = (random.integers(0, 4, size=(200, 2)).astype(np.float32) for _ in range(2))
    given: dict[str, Any] = {"user": range(200), "silo": ["n"] * 200, "n_users": 200, "silos": ["n"]}
    given |= {"task": "regression", "targets": np.zeros(200)}
    assert fv.population(coarse, test=(others, np.zeros(200)), **given).public_test
    with pytest.raises(DataError, match="test, row 0"):
        fv.population(coarse, test=(random.permutation(coarse), np.zeros(200)), **given)
    finer, unseen = (np.round(random.normal(size=(200, 1)), 2) for _ in range(2))
    assert fv.population(finer, test=(unseen, np.zeros(200)), **given).public_test
    with pytest.raises(DataError, match="test, row 0"):
        fv.population(finer, test=(finer[::2], np.zeros(100)), **given)


def test_that_test_records_are_none_of_those_trained_on_is_said_as_not_covered() -> None:
    assert any("more of the test records" in note for note in people().notes)
    assert not any("more of the test records" in note for note in people(test=None).notes)


@pytest.mark.parametrize(
    ("task", "targets", "column", "told"),
    [
        ("classification", WHO % 3, WHO % 3, "column 1 is what is predicted"),
        ("regression", WHO / 7, WHO / 7, "column 1 is what is predicted"),
        ("survival", np.stack((WHO % 2, 3 + WHO), axis=1), 3 + WHO, "column 1 is what is predicted"),
        (
            "regression",
            WHO / 7,
            4000 - 3 * (WHO % 20),
            "column 1 has one whole number in all records of a person",
        ),
    ],
    ids=["class", "number", "time", "id"],
)
def test_a_feature_that_is_the_target_or_an_id_is_warned_of(
    task: Any, targets: np.ndarray, column: np.ndarray, told: str
) -> None:
    """And no other: not one that is the same for a person, or whole, or never the same, but not all of it."""
    given = {"silo": ["n"] * 60, "n_users": 60, "task": task, "user": [f"p{who}" for who in WHO % 20]}
    harmless = np.stack(((WHO % 20) / 3, WHO, WHO % 20 // 2, np.zeros(60)), axis=1)
    made = fv.population(harmless, targets, **given)  # warnings are errors here
    assert made.feature_shape == (4,)
    with pytest.warns(UserWarning, match=told) as said:
        unchecked_population(np.insert(harmless, 1, column, axis=1), targets, **given)
    assert len(said) == 1
    assert {one.filename for one in said} == {__file__}  # the caller's line, not one of fedveil
    frame = pa.table({"age": WHO % 7, "number": WHO + 100})
    with pytest.warns(UserWarning, match="column 'number' has one whole number"):
        fv.population(frame, targets, **given | {"user": WHO + 100})


def test_ids_that_differ_in_their_form_alone_are_warned_of_and_stay_apart() -> None:
    given = {"silo": ["n"] * 4, "n_users": 9, "task": "classification", "test": (PUBLIC, PUBLIC_Y)}
    for ids in (["a", "A", "b", "c"], ["7", "007", "8", "9"], ["x 1", "x-1", "y", "z"]):
        with pytest.warns(UserWarning, match="user: some ids differ in their form alone") as told:
            made = fv.population(X[:4], [0, 1, 1, 0], user=ids, **given)
        assert len(np.unique(made.train.user)) == 4
        assert all(one not in str(told[0].message) for one in ("007", "x 1"))
    fv.population(X[:4], [0, 1, 1, 0], user=["1", "10", "1a", "11"], **given)  # warnings are errors here


@pytest.mark.parametrize(
    ("column", "values", "told"),
    [
        (
            "user",
            np.ma.masked_array(["a", "b", "zz", "zz"], mask=[0, 0, 1, 1]),
            "user, row 2: the entry is masked",
        ),
        ("user", np.ma.masked_array([1, 2, 9, 9], mask=[0, 1, 0, 0]), "user, row 1: the entry is masked"),
        (
            "silo",
            np.ma.masked_array(["n", "s", "s", "n"], mask=[1, 0, 0, 0]),
            "silo, row 0: the entry is masked",
        ),
        (
            "targets",
            np.ma.masked_array([0, 1, 1, 0], mask=[0, 0, 0, 1]),
            "targets, row 3: the entry is masked",
        ),
        ("features", np.ma.masked_array(X[:4], mask=X[:4] > 2), "features, row .*: the entry is masked"),
        ("features", torch.eye(4).to_sparse(), r"features: a tensor of layout .*\.to_dense\(\)"),
    ],
)
def test_what_hides_its_values_is_refused(column: str, values: Any, told: str) -> None:
    """An array whose mask nobody reads has fillers in it, and all that are masked would be one user."""
    if column == "features" and np.ma.isMaskedArray(values):
        values.mask[3, 1] = True
    given = {
        "features": X[:4],
        "targets": [0, 1, 1, 0],
        "user": [1, 2, 3, 4],
        "silo": ["n"] * 4,
        column: values,
    }
    with pytest.raises(DataError, match=told):
        fv.population(**given, n_users=10, task="classification", test=(PUBLIC, PUBLIC_Y))


def test_masks_that_hide_nothing_and_half_precision_are_read() -> None:
    given = {
        "user": np.ma.masked_array([1, 2, 2, 4]),
        "silo": ["n"] * 4,
        "n_users": 10,
        "task": "classification",
    }
    half = torch.tensor(X[:4]).bfloat16()
    made = fv.population(half, [0, 1, 1, 0], **given, test=(PUBLIC, PUBLIC_Y))
    assert made.train.user.tolist() == [0, 1, 1, 2]
    assert np.array_equal(made.train.features, half.float().numpy())


@pytest.mark.parametrize("missing", [float("nan"), None, "", 1.0, True])
def test_a_missing_id_in_a_list_is_refused_beside_text(missing: Any) -> None:
    """numpy would make the text nan of all that have none, and one user of them."""
    for column in ("user", "silo"):
        given = {"user": ["a", "b", "c", "d"], "silo": ["n", "n", "s", "s"]}
        given[column][1] = missing
        with pytest.raises(DataError, match=rf"{column}, row 1: the id is (missing|empty)"):
            fv.population(
                X[:4], [0, 1, 1, 0], n_users=10, task="classification", test=(PUBLIC, PUBLIC_Y), **given
            )
    with pytest.raises(DataError, match="targets, row 2: the label is missing"):
        fv.population(
            X[:4],
            ["a", "b", float("nan"), "a"],
            user=[1, 2, 3, 4],
            silo=["n", "n", "s", "s"],
            n_users=10,
            task="classification",
        )


@pytest.mark.parametrize("empty", [[], np.zeros(0, np.int64)], ids=["lists", "arrays"])
def test_taking_the_last_user_away_is_not_refused(empty: Any, tmp_path: Path) -> None:
    """Who is refused is told that nobody is left; the run is noise, and its statement that of any other."""
    nobody = people(features=X[:0], targets=empty, user=empty, silo=empty)
    assert train(tmp_path / "0", held=nobody).statement == train(tmp_path / "1").statement


def test_callbacks_see_public_numbers_unless_they_ask(tmp_path: Path) -> None:
    public, private = Keep(), KeepAll()
    train(tmp_path, callbacks=[public, private])
    assert [one.number for one in public.rounds] == [1, 2]
    assert all(one.private is None and one.test is not None for one in public.rounds)
    seen = private.rounds[0].private
    assert seen is not None
    assert {"participants", "norms", "seconds"} <= set(seen)
    held_out = Keep()
    train(tmp_path, held=people(test=None), callbacks=[held_out], rounds=1)
    assert held_out.rounds[0].test is None


def test_a_run_ends_by_a_public_reason_alone(tmp_path: Path) -> None:
    result = train(tmp_path, callbacks=[Keep(after=1)], rounds=3)
    assert (result.rounds, result.stopped) == (1, "enough")
    assert (result.folder / "privacy.json").exists()
    assert (
        sum("what the callback looked at is not covered" in line for line in result.statement.uncovered) == 1
    )
    for private in (KeepAll(after=1), LooksAndForgets(after=2)):
        with pytest.raises(ConfigError, match="cannot end the run"):
            train(tmp_path, callbacks=[private])


def test_code_that_fails_at_a_record_ends_the_run_and_every_statement_says_so(tmp_path: Path) -> None:
    """Made-up records do not show it; whoever has such a record ends everybody's run."""

    class Limited(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if float(x.max()) > 100:
                raise ValueError("too far")
            return torch.as_tensor(self.inner(x))

    alone, far = {"trainer": {"name": "loop"}}, X.copy()
    far[0, 0] = 1e3
    with pytest.raises(ValueError, match="too far"):
        train(tmp_path, Limited(), people(features=far), settings=alone)
    said = train(tmp_path, Limited(), settings=alone, rounds=1).statement.uncovered
    assert any("fails at a record" in line for line in said)
    assert not any(
        "fails at a record" in line for line in train(tmp_path, "linear", rounds=1).statement.uncovered
    )


def test_what_is_handed_over_beside_the_records_is_named_and_not_covered(tmp_path: Path) -> None:
    """A loss may hold the labels' counts, which move everybody's update; fedveil cannot see where they come from."""
    counted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 9.0]))
    for given, named in (({"loss": counted}, True), ({"loss": "cross_entropy"}, False), ({}, False)):
        statement = train(tmp_path, rounds=1, **given).statement
        lines = statement.uncovered
        assert (
            "Anything else that is released from the same data, by this run or another, adds to"
            in " ".join(statement.sentences())
        )
        assert any("the loss session:CrossEntropyLoss was handed over" in line for line in lines) == named
    assert not any("when the run ended" in line for line in lines)


def summary(value: float | None, number: int = 1) -> Any:
    test = {"loss": value, "accuracy": value}
    return fv.RoundSummary(
        number=number,
        rounds=9,
        epsilon=1.0,
        test=test,
        private=None,
        folder=Path(),
        _prepared=None,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("metric", "values", "ends"),
    [
        ("accuracy", [0.5, 0.6, 0.6, 0.5], 4),
        ("accuracy", [0.5, 0.6, 0.6, 0.7], None),
        ("loss", [2.0, 1.0, 1.5, 1.0], 4),
        ("loss", [0.5, 0.6, None], 3),
    ],
)
def test_early_stopping_waits_as_long_as_it_says(
    metric: str, values: list[float | None], ends: int | None
) -> None:
    stop = fv.EarlyStop(metric, patience=2)
    said = [stop.on_round_end(summary(value)) is not None for value in values]
    assert said == [number == ends for number in range(1, len(values) + 1)]
    stop.on_run_start(Path(), 9, 0)
    assert stop.on_round_end(summary(0.1)) is None


def test_checkpoints_are_the_models_of_their_rounds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = train(tmp_path, callbacks=[fv.Checkpoints(tmp_path / "kept", every=2), fv.Progress()], rounds=3)
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["round-00002.safetensors"]
    train(tmp_path, callbacks=[fv.Checkpoints(tmp_path / "all")], rounds=1)
    last = load_file(tmp_path / "all" / "round-00001.safetensors")
    mine = load_file(tmp_path / "run-2" / "model.safetensors")
    assert all(torch.equal(last[name], mine[name]) for name in mine)
    assert result.rounds == capsys.readouterr().out.count("/3  epsilon")


# --- going on -------------------------------------------------------------------------------------------------------


def test_a_run_goes_on_with_the_same_objects_alone(tmp_path: Path) -> None:
    started = train(tmp_path, callbacks=[Keep(after=1)], rounds=3)
    other = network()
    with torch.no_grad():
        other[0].bias[0] += 1
    changed = X.copy()
    changed[0, 0] += 1
    cases: list[tuple[Any, Any, dict[str, Any], str]] = [
        (other, people(), {}, "another model.sha256"),
        (nn.Sequential(nn.Linear(3, 2)), people(), {}, "another model.sha256"),
        (nn.Linear(3, 2), people(), {}, "another model.name"),
        (network(), people(n_users=21), {}, "another data.n_users: 20, and now it is 21"),
        (network(), people(features=changed), {}, "records are not those"),
        (
            network(),
            people(user=OTHER_IDS),
            {},
            "records are not those",
        ),  # of the same people under other ids
        (network(), people(), {"loss": nn.CrossEntropyLoss()}, "another model.loss"),
        (network(), people(), {"metrics": ["accuracy"]}, "another model.metrics"),
    ]
    for model, held, given, problem in cases:
        with pytest.raises(RunFolderError, match=problem):
            fv.resume(started.folder, model, held, **given)
    ended = fv.resume(started.folder, network(), people())
    assert ended.rounds == 3
    assert ended.statement.epsilon is not None
    assert started.statement.epsilon is not None
    assert ended.statement.epsilon > started.statement.epsilon


def test_a_run_goes_on_with_a_loss_of_the_same_settings_alone(tmp_path: Path) -> None:
    def weighted(rare: float, smoothing: float = 0.0) -> nn.Module:
        return nn.CrossEntropyLoss(weight=torch.tensor([1.0, rare]), label_smoothing=smoothing)

    started = train(tmp_path, loss=weighted(2.0), callbacks=[Keep(after=1)], rounds=2)
    assert math.isfinite(started.metrics["loss"])
    for other in (weighted(3.0), weighted(2.0, 0.3)):
        with pytest.raises(RunFolderError, match=r"another model\.loss_sha256"):
            fv.resume(started.folder, network(), people(), loss=other)
    assert fv.resume(started.folder, network(), people(), loss=weighted(2.0)).rounds == 2


def test_a_models_digest_has_its_settings() -> None:
    one, other, same = (Scaled(scale) for scale in (1.0, 2.0, 1.0))
    assert model_digest(one) != model_digest(other)
    assert model_digest(one) == model_digest(same)


class Scaled(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale, self.activation = [scale], nn.functional.relu


# --- wrong input ----------------------------------------------------------------------------------------------------


def with_nan(column: Any) -> Any:
    changed = np.asarray(column, dtype=np.float64).copy()
    changed[3] = np.nan
    return changed


def frozen() -> nn.Module:
    return network().requires_grad_(False)


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.layer(features - features.mean(0))


def bad_people(**changes: Any) -> Any:
    given = {"features": X, "targets": Y, **DECLARED, "test": (PUBLIC[:20], PUBLIC_Y[:20])} | changes
    return lambda folder: unchecked_population(**given)


def bad_train(**changes: Any) -> Any:
    return lambda folder: train(folder, **changes)


NUMBERS: dict[str, Any] = {"task": "regression", "classes": None}
WRONG: dict[str, tuple[Any, str]] = {
    "features of text": (bad_people(features=np.full((N, 2), "a")), "features.*not numbers; encode them"),
    "features of objects": (bad_people(features=[[1, None]] * N), "features.*not numbers"),
    "a column of text": (bad_people(features=pd.DataFrame({"ward": ["x"] * N})), "column 'ward'.*encode"),
    "two columns alike": (
        bad_people(features=pd.DataFrame(X[:, :2], columns=["a", "a"])),
        "two columns are called 'a'",
    ),
    "a missing cell": (
        bad_people(features=pd.DataFrame({"age": with_nan(X[:, 0])})),
        "column 'age', row 3: .*missing",
    ),
    "features with NaN": (
        bad_people(features=with_nan(X)),
        r"features, row 3, feature 0: the value is NaN.*leave",
    ),
    "a single axis": (bad_people(features=X[:, 0]), r"features:.*values\[:, None\]"),
    "ragged rows": (bad_people(features=[[1.0], [1.0, 2.0]]), "rows of different lengths"),
    "no feature": (bad_people(features=np.zeros((N, 0))), "a record has no feature"),
    "too large for float32": (
        bad_people(features=np.full((N, 1), 1e300)),
        "row 0, feature 0: .*too large for float32",
    ),
    "whole numbers beyond float32": (bad_people(features=np.full((N, 1), 1 << 30)), "16777216.*scale it"),
    "too few targets": (bad_people(targets=Y[:5]), "targets: 5 entries, but the features have 60 rows"),
    "targets missing": (bad_people(targets=None), "targets is required: .*what is predicted"),
    "a target out of range": (bad_people(targets=np.full(N, 2)), "targets, row 0: .*not among the 2 classes"),
    "a label missing": (bad_people(targets=with_nan(Y)), "targets, row 3: the label is missing"),
    "labels that are fractions": (bad_people(targets=X[:, 0]), "targets, row 0: .*task='regression'"),
    "one class": (bad_people(classes=[0]), "classes must list two labels or more"),
    "a class twice": (bad_people(classes=[0, 1, "1"]), "a class is declared twice"),
    "classes of a regression": (bad_people(task="regression"), "classes belong to classification"),
    "a column for regression": (
        bad_people(task="regression", classes=None, targets=X[:, :1]),
        r"one number a record.*reshape\(-1\)",
    ),
    "survival of one number": (
        bad_people(task="survival", classes=None, targets=X[:, 0]),
        r"\(records, 2\) of \(event",
    ),
    "an event of two": (
        bad_people(task="survival", classes=None, targets=np.full((N, 2), 2.0)),
        "the event must be 0 or 1",
    ),
    "users missing": (bad_people(user=None), "user is required: .*whose record"),
    "users NaN": (bad_people(user=with_nan(USER)), "user: ids are text or whole numbers.*missing id"),
    "a user None": (bad_people(user=[None, *USER[1:].tolist()]), "user, row 0: the id is missing"),
    "half a character": (bad_people(user=["p\ud800", *map(str, USER[1:])]), "user, row 0: the id has half a"),
    "users of two axes": (bad_people(user=USER[:, None]), "user: one id a record"),
    "silo missing": (bad_people(silo=None), "silo is required: .*who holds it"),
    "a silo that is not declared": (
        bad_people(silos=["north"]),
        r"silo, row \d+: .*not among those declared: north",
    ),
    "a silo twice": (bad_people(silos=["north", "north"]), "silos must list one name or more, each once"),
    "no number of users": (bad_people(n_users=None), 'n_users is required: the public number.*"counted"'),
    "a number of users that is none": (bad_people(n_users=0), "n_users must be a whole number >= 1"),
    "a number of users that nobody has": (
        bad_people(n_users=10**8 + 1),
        r"population: n_users must be <= 1e\+08, not 100000001",
    ),
    "more users than there are": (bad_people(n_users=3), "n_users is 3, but more users"),
    "a task that is none": (
        bad_people(task="ranking"),
        "task must be one of classification, multi-label, regression, multi-output, survival",
    ),
    "a test share beside a test table": (
        bad_people(test_share=0.3),
        "population: test_share is of the records that are held out, and beside test= none are",
    ),
    "a test share of one": (bad_people(test=None, test_share=1.0), "test_share must be between 0 and 1"),
    "a test table of other columns": (
        bad_people(features=FRAME, test=(FRAME[["age"]], Y)),
        "test features: the columns",
    ),
    "a test table that is none": (bad_people(test=X), r"test must be a pair \(features, targets\)"),
    "a data set with targets": (bad_people(features=Pairs(X, Y)), "brings its own targets"),
    "a data set of three": (
        bad_people(features=Pairs(X, Y, USER), targets=None),
        "an item of the data set must be",
    ),
    "a batch norm": (
        bad_train(model=nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))),
        r"layer 1 is BatchNorm1d.*torch.nn.GroupNorm\(4, 4\)",
    ),
    "everything frozen": (bad_train(model=frozen()), r"all are frozen; call requires_grad_\(True\)"),
    "no parameter": (bad_train(model=nn.Sequential(nn.Flatten(), nn.Identity())), "the model"),
    "a model of float64": (bad_train(model=network().double()), "the model fails on made-up records|float32"),
    "a model that mixes records": (bad_train(model=Mixing()), "changes with the other records.*LayerNorm"),
    "another number of features": (
        bad_train(model=nn.Linear(4, 2)),
        r"the model fails on made-up records of shape \(3,\)",
    ),
    "another number of outputs": (
        bad_train(model=nn.Linear(3, 5)),
        "5 outputs a record, but there are 2 classes",
    ),
    "a class and no model": (bad_train(model=nn.Linear), "Linear is a class"),
    "no model at all": (bad_train(model=3), "a torch.nn.Module or a name is needed, not int"),
    "a name that is no model": (bad_train(model="mlpp"), "no model named 'mlpp'"),
    "arrays and no population": (bad_train(held=X), "people: a population is needed .*not ndarray"),
    "a callback that is in no list": (bad_train(callbacks=fv.Progress()), r"a list is needed, \[Progress"),
    "settings that are no tables": (bad_train(settings=3), "settings: tables by name are needed"),
    "a composition": (
        bad_train(method=uldp_sgd(clip=0.5, noise_multiplier=1.0)),
        "server: a composed method has its own noise, local steps and server",
    ),
    "a builder": (bad_train(method=uldp_sgd), "not a builder: call it"),
    "no method": (bad_train(method=None, epsilon=None), r"epsilon: needed; there is no default"),
    "a method that was not called": (bad_train(method=fv.uldp_avg), r"call it: fedveil.uldp_avg\(...\)"),
    "a key that a method lacks": (
        lambda folder: fv.uldp_avg(clipp=1.0),
        "no parameter 'clipp'; known here: .*clip",
    ),
    "the server's rate with the method": (
        lambda folder: fv.uldp_sgd(learning_rate=1.0),
        r"the server's rate is server_learning_rate of fedveil.train",
    ),
    "a method that is none": (lambda folder: method("uldp"), "no method 'uldp'; there are: fedavg"),
    "a clip of zero": (
        lambda folder: fv.uldp_avg(clip=0.0, noise_multiplier=1.0),
        "method uldp-avg: clip: must be > 0",
    ),
    "no noise and no target": (
        bad_train(method=fv.uldp_avg(clip=1.0)),
        "needs epsilon=.*or noise_multiplier=",
    ),
    "noise and a target": (bad_train(epsilon=1.0), "noise_multiplier is given too; leave one"),
    "a target without noise": (bad_train(method=fv.fedavg(), epsilon=1.0), "fedavg adds no noise"),
    "no round": (bad_train(rounds=0), "rounds: must be >= 1, not 0"),
    "a delta of one": (bad_train(delta=1.0), "privacy.delta: must be < 1"),
    "a loss that averages": (
        bad_train(loss=lambda o, t: (o[:, 0] - t).mean()),
        "loss .*one term a record: no mean",
    ),
    "a loss that returns a matrix": (bad_train(loss=lambda o, t: o), "loss .*no second axis"),
    "a loss that fails": (
        bad_train(loss=lambda o, t: o[:, 7]),
        r"fails on outputs \(40, 2\) and targets \(40,\)",
    ),
    "a loss class": (bad_train(loss=nn.CrossEntropyLoss), r"hand over CrossEntropyLoss\(\)"),
    "a loss of another task": (bad_train(loss="cox"), "loss cox is not for a classification task"),
    "a metric that is none": (bad_train(metrics=["f2"]), "no metric named 'f2'"),
    "two metrics of one name": (
        bad_train(metrics=[share_of_ones, share_of_ones]),
        "metrics: two are called tests.test_python:share_of_ones",
    ),
    "a metric and no list": (bad_train(metrics="auc"), "metrics: a list of names"),
    "a callback that is none": (bad_train(callbacks=[print]), "a fedveil.Callback is needed"),
    "a callback's class": (bad_train(callbacks=[fv.Progress]), r"hand over Progress\(\)"),
    "stopping by private records": (
        bad_train(held=people(test=None), callbacks=[fv.EarlyStop("accuracy")]),
        r"EarlyStop ends the run by test metrics.*test=\(features, targets\)",
    ),
    "stopping by no metric": (
        bad_train(callbacks=[fv.EarlyStop("f1")]),
        "no metric 'f1'; there are: auc",
    ),
    "a server that is none": (bad_train(server="adam"), "server: a server optimiser is needed"),
    "settings of no table": (bad_train(settings={"chanel": {}}), "no table or key 'chanel'.*channel"),
    "preprocessing of what was handed over": (
        bad_train(settings={"preprocessing": {"bounds": ["x"]}}, method=fv.uldp_avg(clip=0.5), epsilon=4.0),
        "preprocessing: is of your own tables",
    ),
    "an evaluation of arrays": (
        bad_train(settings={"evaluation": {}}, method=fv.uldp_avg(clip=0.5), epsilon=4.0),
        "evaluation: is of records that are held out .*fedveil.tables",
    ),
    "a range of classes": (bad_people(target_range=(0, 1)), "target_range belongs to regression"),
    "a range upside down": (
        bad_people(**NUMBERS, target_range=(1, 0)),
        "two finite numbers, lower below upper",
    ),
    "a range that is none": (bad_people(**NUMBERS, target_range=3), "target_range must be .lower, upper."),
    "a target out of its range": (
        bad_people(**NUMBERS, targets=np.arange(N) / N, target_range=(0, 0.5)),
        "targets, row 31: the target is outside of target_range, 0 to 0.5; numpy.clip",
    ),
    "a public target out of its range": (
        bad_people(**NUMBERS, test=(X[:2], [0.5, 7.0]), target_range=(0, 1)),
        "test targets, row 1: the target is outside",
    ),
    "settings of no key": (bad_train(settings={"trainer": {"nam": "x"}}), "trainer.nam: no such key"),
    "several processes": (
        bad_train(processes=2, loss=lambda outputs, targets: (outputs[:, 0] - targets) ** 2),
        "trainer.processes: .*cannot be carried .*lambda.*leave processes at 1",
    ),
    "a folder that is none": (lambda folder: fv.resume(folder, network(), people()), "not a run folder"),
    "a client method over shared silos": (
        bad_train(method=fv.dp_fed(clip=1.0, noise_multiplier=1.0)),
        "a client is a silo that holds one user",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_named_with_its_mend(case: str, tmp_path: Path) -> None:
    attempt, said = WRONG[case]
    with pytest.raises(fv.FedveilError, match=f"(?s){said}") as error:
        attempt(tmp_path)
    assert "\n" not in str(error.value)
    assert not list(tmp_path.glob("*/privacy.json"))


def test_no_error_repeats_a_private_value() -> None:
    secret = X.copy().astype(object)
    secret[4, 1] = "SECRET"
    for changes in ({"features": secret}, {"targets": ["SECRET"] * N}, {"silo": ["SECRET"] * N}):
        with pytest.raises(fv.FedveilError) as error:
            people(**changes)
        assert "SECRET" not in str(error.value)


def test_predicting_other_columns_is_refused(tmp_path: Path) -> None:
    held = people(features=FRAME, test=(PUBLIC_FRAME[:9], PUBLIC_Y[:9]))
    result = train(tmp_path, "linear", held, rounds=1)
    assert len(result.predict(FRAME)) == N
    with pytest.warns(UserWarning, match="columns are taken, in this order, for: age, pulse, dose"):
        assert np.array_equal(result.predict(X), result.predict(FRAME))
    assert np.array_equal(
        result.predict(FRAME[["pulse", "age", "dose"]].assign(name="x")), result.predict(FRAME)
    )
    with pytest.raises(fv.FedveilError, match="'pulse' is missing, on which the model was trained"):
        result.predict(FRAME[["age"]].assign(pulses=1.0))
    with pytest.raises(fv.FedveilError, match=r"shape \(2,\), the model was trained on \(3,\)"):
        result.predict(X[:, :2])
    with pytest.raises(ConfigError, match="belong to classification"):
        replace(result.predictor, task="regression").probabilities(FRAME)


def test_what_is_printed_of_people_and_of_a_result_is_a_line_of_public_numbers(trained: fv.Result) -> None:
    held = "task='classification', n_classes=2)"
    assert (
        repr(people()) == f"Population(name='{people().name}', n_users={people().n_users}, n_silos=2, {held}"
    )
    assert repr(trained).startswith("Result(epsilon=")
    assert "\n" not in repr(trained)
    assert len(repr(trained)) < 300


def test_what_is_handed_over_as_something_else_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="population: features is required: for every record"):
        people(features=None)
    with pytest.raises(ConfigError, match="tables: files is a list"):
        fv.tables("schema.toml", "north.csv")
    result = train(tmp_path, "linear", method=fv.fedavg(), rounds=1)
    table = tmp_path / "north.csv"
    table.write_text("patient")
    with pytest.raises(ConfigError, match=r"a page is written as \.html"):
        result.report(table)
    assert table.read_text() == "patient"
    with pytest.raises(RunFolderError, match=r"absent/r.html cannot be written"):
        result.report(tmp_path / "absent" / "r.html")
    assert result.report(tmp_path / "r.html").read_text() == result.report().read_text()
    with pytest.raises(PrivacyError, match=r"no line of 'server'; there are .*Role.READER"):
        inspect.unwrap(Statement.line_for)(result.statement, "server")  # as a caller without checks of types


def test_a_summed_loss_and_an_unregistered_optimiser_are_refused_for_what_they_are(
    tmp_path: Path,
) -> None:
    class Own(fv.Sgd):
        def step(self, *given: Any) -> Any:
            return super().step(*given)

    with pytest.raises(ConfigError, match=r"CrossEntropyLoss has reduction = 'sum'.*takes the mean"):
        train(tmp_path, loss=nn.CrossEntropyLoss(reduction="sum"))
    with pytest.raises(
        ConfigError,
        match=r"registers, such as fedveil\.Sgd\(0\.5\), not Own.*entry points fedveil\.optimizers",
    ):
        train(tmp_path, server=Own(1.0))


@pytest.mark.parametrize("left", [None, b""])
def test_a_run_that_lost_ledger_and_checkpoint_is_not_begun_again(tmp_path: Path, left: bytes | None) -> None:
    """Its metrics show that rounds were released, which a new ledger would not count."""

    class Interrupt(fv.Callback):
        def on_round_end(self, round: fv.RoundSummary) -> None:
            if round.number == 1:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run", callbacks=[Interrupt()])
    (folder,) = (path.parent for path in (tmp_path / "run").rglob("experiment.toml"))
    (folder / "ledger.jsonl").unlink()
    if left is not None:
        (folder / "ledger.jsonl").write_bytes(left)
    (folder / "checkpoint" / "state.safetensors").unlink()
    with pytest.raises(
        IntegrityError, match=r"metrics\.jsonl has round 1, and ledger\.jsonl has no charge for it"
    ):
        fv.resume(folder, network(), people())
