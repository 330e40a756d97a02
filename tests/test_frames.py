"""Populations from frames by column names, loaders and data sets; what cannot be read is refused for its reason."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from scipy.sparse import csr_matrix
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, WeightedRandomSampler

import fedveil as fv
from fedveil.errors import ConfigError, DataError
from tests.test_python import DECLARED, PUBLIC, PUBLIC_Y, SILO, USER, X, Y, people

NAMED: dict[str, Any] = {
    "features": ["age", "pulse", "dose"],
    "targets": "sick",
    "user": "patient",
    "silo": "hospital",
}
ASKED = {key: DECLARED[key] for key in ("n_users", "task", "classes", "silos")}
FRAME = pd.DataFrame(X, columns=["age", "pulse", "dose"]).assign(
    sick=Y, patient=USER, hospital=SILO, other="text"
)


class Polars:
    """As a polars frame looks: columns, and an Arrow table of them."""

    def __init__(self, table: pa.Table) -> None:
        self.table, self.columns = table, table.column_names

    def to_arrow(self) -> pa.Table:
        return self.table


class Lazy:
    """As a lazy polars frame looks."""

    def collect(self) -> None: ...
    def collect_schema(self) -> None: ...


class ClassLabel:
    def __init__(self, names: list[str]) -> None:
        self.names = names

    def int2str(self, place: int) -> str:
        return self.names[place]


class Hub:
    """As a Hugging Face data set looks."""

    def __init__(self, table: pa.Table, **kinds: Any) -> None:
        self.table, self.column_names = table, table.column_names
        self.features = dict.fromkeys(table.column_names) | kinds

    def __len__(self) -> int:
        return len(self.table)

    def with_format(self, kind: str) -> Any:
        assert kind == "arrow"
        return self

    def __getitem__(self, rows: slice) -> pa.Table:
        return self.table


class Items(Dataset):  # type: ignore[type-arg]
    def __init__(self, *rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> Any:
        return self.rows[row]


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[Any]:
        yield X[0], Y[0]


TABLE = pa.Table.from_pandas(FRAME)
PAIRS = Items(*zip(torch.from_numpy(X), Y, strict=True))
ALL = Items(*({"x": x, "y": y, "user": u, "silo": s} for x, y, u, s in zip(X, Y, USER, SILO, strict=True)))


@pytest.mark.parametrize(
    "given",
    [
        {"data": FRAME, **NAMED},
        {"data": TABLE, **NAMED},
        {"data": Polars(TABLE), **NAMED},
        {"data": Hub(TABLE), **NAMED},
        {
            "data": Hub(pa.table({"v": list(X), "y": Y})),
            "features": ["v"],
            "targets": "y",
            "user": USER,
            "silo": SILO,
        },
        {"data": FRAME, **NAMED, "user": USER, "targets": Y},
        {"data": Polars(TABLE.select(NAMED["features"])), "targets": Y, "user": USER, "silo": SILO},
        {"data": DataLoader(PAIRS, batch_size=7), "user": USER, "silo": SILO},
        {"data": DataLoader(ALL, batch_size=7, shuffle=True)},
        {"data": ALL},
        {"data": X, "targets": Y, "user": USER.astype("S"), "silo": [one.encode() for one in SILO.tolist()]},
    ],
    ids=lambda given: type(given["data"]).__name__,
)
def test_every_form_of_records_gives_the_same_population(given: dict[str, Any]) -> None:
    assert fv.population(**given, **ASKED).train.sha256 == people(test=None).train.sha256


def test_classes_that_a_data_set_declares_are_its_labels() -> None:
    table = TABLE.set_column(3, "sick", pa.array(Y))
    given: dict[str, Any] = {key: ASKED[key] for key in ("n_users", "task", "silos")}
    found = fv.population(Hub(table, sick=ClassLabel(["no", "yes"])), **NAMED, **given)
    assert found.classes == ("no", "yes")
    assert np.array_equal(found.train.targets, people(test=None).train.targets)
    assert not any("Declare classes" in note for note in found.notes)
    lost = table.set_column(3, "sick", pa.array([-1, *Y[1:]]))
    with pytest.raises(
        DataError, match="targets, row 0: the label is missing, or the number of none of the 2"
    ):
        fv.population(Hub(lost, sick=ClassLabel(["no", "yes"])), **NAMED, **given)


def test_a_public_test_is_a_frame_of_the_same_columns() -> None:
    frame = pd.DataFrame(PUBLIC[:20], columns=NAMED["features"]).assign(sick=PUBLIC_Y[:20])
    found = fv.population(FRAME, **NAMED, **ASKED, test=frame)
    assert found.public_test
    assert np.array_equal(found.test_features, people().test_features)
    with pytest.raises(ConfigError, match="test: features: no column 'dose'"):
        fv.population(FRAME, **NAMED, **ASKED, test=frame.drop(columns="dose"))


def test_event_and_time_are_two_columns() -> None:
    frame = FRAME.assign(died=Y, days=1.0 + np.arange(len(Y)))
    given = NAMED | {"targets": ["died", "days"]}
    found = fv.population(frame, **given, n_users=20, task="survival", silos=["north", "south"], test_share=0)
    assert found.train.targets[:, 1].tolist() == (1.0 + np.arange(len(Y))).tolist()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"features": ["age", "age"]}, "column 'age' is named twice"),
        ({"features": ["age", "sick"]}, "column 'sick' is named twice"),
        ({"features": ["agee"]}, "features: no column 'agee'.*did you mean 'age'"),
        ({"features": "age"}, "features must be a list of columns"),
        ({"features": None}, "features must be a list of columns of the frame: age, pulse"),
        ({"features": []}, "features must be a list of columns"),
        ({"features": [3]}, "features: no column '?3"),
        ({"user": "person"}, "user: no column 'person'"),
        ({"user": None}, "user is required"),
        ({"targets": None}, "targets is required"),
        ({"data": X}, "the data are no frame with columns.*but ndarray"),
        ({"data": Lazy()}, r"a lazy frame has no rows yet; hand over \.collect\(\)"),
        (
            {"data": pd.concat([FRAME, FRAME[["age"]]], axis=1)},
            "two columns are called 'age'",
        ),
        ({"features": ["age", "other"]}, "features.*column 'other'.*not numbers"),
    ],
)
def test_wrong_columns_are_named(changes: dict[str, Any], told: str) -> None:
    with pytest.raises((ConfigError, DataError), match=f"(?s){told}"):
        fv.population(**{"data": FRAME, **NAMED, **ASKED} | changes)


def splits() -> Any:
    found = Hub(TABLE)
    found.column_names = {"train": ["age"], "test": ["age"]}  # type: ignore[assignment]
    return found


class HubStream:
    column_names = ("age",)

    def with_format(self, kind: str) -> None: ...


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (Stream(), "an iterable data set has no length and no items by number"),
        (DataLoader(Stream()), "an iterable data set has no length and no items by number"),
        (HubStream(), "load it without streaming=True"),
        (splits(), r"a dictionary of splits \(train, test\); hand over one of them"),
        (
            DataLoader(PAIRS, sampler=WeightedRandomSampler([1.0] * 60, 60)),
            "WeightedRandomSampler draws records unequally",
        ),
        (
            DataLoader(PAIRS, sampler=RandomSampler(PAIRS, replacement=True)),
            "RandomSampler draws records unequally",
        ),
        (
            DataLoader(PAIRS, sampler=RandomSampler(PAIRS, num_samples=5)),
            "RandomSampler draws records unequally",
        ),
        (DataLoader(PAIRS, batch_sampler=[[0, 1], [2]]), "batch sampler of one's own"),
        (DataLoader(PAIRS, batch_size=7, drop_last=True), "drop_last leaves records out"),
        (DataLoader(PAIRS, collate_fn=list), "collate_fn sees several records at a time"),
        (Items({"x": X[0], "z": 1}), "key 'z' of the data set's items"),
        (Items({"x": X[0], "features": X[0]}), "key 'features' of the data set's items"),
        (Items({"x": X[0], "y": 1}, {"x": X[0]}), "row 1: the item has other keys"),
    ],
)
def test_a_data_set_that_cannot_be_read_is_refused_for_its_reason(data: Any, told: str) -> None:
    with pytest.raises((ConfigError, DataError), match=told):
        fv.population(data, user=USER, silo=SILO, **ASKED)


def test_bytes_that_are_no_text_are_no_id() -> None:
    ids = [b"\xff", *map(str, USER[1:])]
    with pytest.raises(DataError, match="user, row 0: the id is missing, or neither text nor a whole number"):
        people(user=ids)


def test_a_model_predicts_the_frames_that_it_was_trained_on(tmp_path: Path) -> None:
    people = fv.population(FRAME, **NAMED, **ASKED)
    result = fv.train("linear", people, epsilon=2, rounds=1, folder=tmp_path)
    expected = result.predict(FRAME)
    other = TABLE.select(["dose", "other", "pulse", "age"])
    for one in (other, Polars(other), Hub(other)):
        assert (result.predict(one) == expected).all()
    with pytest.raises(
        ConfigError, match=r"^features: a lazy frame has no rows yet; hand over \.collect\(\)"
    ):
        result.predict(Lazy())
    for wrong, told in (
        ({"age": X[:, 0]}, "a mapping of columns"),
        (csr_matrix(X), r"hand over \.toarray\(\)"),
    ):
        with pytest.raises(DataError, match=f"^features: .*{told}"):
            result.predict(wrong)
