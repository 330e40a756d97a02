"""What one record holds decides how that record is read, and how no other one is: in every container, for every column.

The type of an array, a tensor or a column follows from all of its entries. One entry of another type may change only
itself, or is refused by its row.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset

import fedveil as fv
from fedveil.data import arrays
from fedveil.data.input_arrays import read_features, read_ids, read_labels, read_numbers
from fedveil.errors import ConfigError, DataError

VALUES = (3001, 2049, 16777215)
"""Whole numbers that float16 and bfloat16 do not hold, and that float32 does."""


class Items(Dataset):  # type: ignore[type-arg]
    def __init__(self, *columns: Any) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, row: int) -> Any:
        return tuple(column[row] for column in self.columns)


def of_people(features: Any, targets: Any = None, **changes: Any) -> fv.Population:
    """A population without the check of types that tests add: what a user runs."""
    given: dict[str, Any] = {"user": range(len(features)), "silo": ["n"] * len(features), "n_users": 9}
    given |= {"task": "regression", "silos": ["n"], "test": ([[9.75]], [0.0])} | changes
    made = inspect.unwrap(arrays.population)
    with np.errstate(all="ignore"):
        return made(features, targets, **given)  # type: ignore[no-any-return]


def read_items(records: list[Any]) -> np.ndarray:
    return np.asarray(of_people(Items(records, [0.0] * len(records))).train.features)


CONTAINERS: dict[str, tuple[Callable[[int], Any], Callable[[list[Any]], np.ndarray]]] = {
    "a data set of tensors": (lambda value: torch.tensor([value]), read_items),
    "a data set of arrays": (lambda value: np.array([value]), read_items),
    "a data set of float32": (lambda value: torch.tensor([value], dtype=torch.float32), read_items),
    "a list of tensors": (lambda value: torch.tensor([value]), lambda held: read_features(held).values),
    "a list of arrays": (lambda value: np.array([value]), lambda held: read_features(held).values),
    "a list of lists": (lambda value: [value], lambda held: read_features(held).values),
    "a tuple of lists": (lambda value: [value], lambda held: read_features(tuple(held)).values),
}
ODD: dict[str, tuple[Any, float | str]] = {
    "float16": (torch.tensor([1.5], dtype=torch.float16), 1.5),
    "bfloat16": (torch.tensor([1.5], dtype=torch.bfloat16), 1.5),
    "float64": (torch.tensor([0.1], dtype=torch.float64), 0.1),
    "a gradient": (torch.tensor([1.5], requires_grad=True), 1.5),
    "float16 of numpy": (np.array([1.5], dtype=np.float16), 1.5),
    "truth": (np.array([True]), 1),
    "int8": (np.array([-7], dtype=np.int8), -7),
    "objects": (np.array([Decimal("0.5")], dtype=object), 0.5),
    "a fraction": ([Fraction(1, 4)], 0.25),
    "bytes": (np.array([7], dtype=np.uint8), "uint8 here and not in row 0"),
    "text": (["1"], "not numbers"),
    "none": ([None], "not numbers: this one is missing"),
    "a day": (np.array(["2020-01-01"], dtype="M8[ns]"), "not numbers"),
    "complex": (torch.tensor([1j]), "not numbers"),
    "NaN": ([float("nan")], "NaN or infinite"),
    "too large": ([1 << 70], "a whole number above 16777216"),
    "whole": ([16777217], "a whole number above 16777216"),
    "another shape": ([1, 2], "another shape than the record of row 0"),
    "no axis": (3, "another shape than the record of row 0"),
    "ragged": ([1, [2, 3]], "rows of different lengths"),
    "masked": (np.ma.masked_array([5.0], mask=[True]), "the entry is masked"),
    "sparse": (torch.eye(1).to_sparse(), r"hand over .to_dense\(\)"),
    "without values": (torch.ones(1, device="meta"), "which numpy cannot hold"),
}


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("odd", ODD)
def test_a_record_of_another_type_changes_no_other_record(container: str, odd: str) -> None:
    make, read = CONTAINERS[container]
    record, expected = ODD[odd]
    records = [*(make(value) for value in VALUES), record]
    if isinstance(expected, str):
        with pytest.raises(DataError, match=rf"features, row 3(, feature 0)?: .*{expected}") as error:
            read(records)
        assert "row 3" in str(error.value)
        return
    alone = read(records[:3])
    both = read(records)
    assert both[:3].tobytes() == alone.tobytes() == np.float32(VALUES).tobytes()
    assert both[3] == np.float32(expected)


def test_what_others_add_to_a_sum_does_not_depend_on_one_records_type() -> None:
    """The fault as it was found: integers were rounded to 11 bits because one person's record was float16."""
    random = np.random.default_rng(0)
    items = list(torch.from_numpy(random.integers(-4000, 4000, (40, 5))))
    odd = torch.zeros(5, dtype=torch.float16)
    given: dict[str, Any] = {"test": (np.full((1, 5), 0.5), [0.0]), "n_users": 50}
    without = of_people(Items(items, [0.5] * 40), **given).train.features
    beside = of_people(Items([*items, odd], [0.5] * 41), **given).train.features
    assert beside[:40].tobytes() == without.tobytes()


def test_bytes_are_kept_where_all_records_are_bytes() -> None:
    for records in (list(np.zeros((3, 2), np.uint8)), list(torch.zeros(3, 2, dtype=torch.uint8))):
        assert read_features(records).values.dtype == np.uint8
        assert read_numbers([*records[0], 2.5], "regression", "targets").tolist() == [0, 0, 2.5]
    with pytest.raises(DataError, match="row 1: uint8 here and not in row 0, or the reverse"):
        read_features([np.zeros(2, np.uint8), np.zeros(2)])


@pytest.mark.parametrize(
    "odd", [0.5, True, np.float16(0.5), np.float32(0.5), Decimal("0.5"), torch.tensor(0.5)]
)
def test_a_target_of_another_type_changes_no_other_target(odd: Any) -> None:
    others = [np.int64(2049), 3001, 16777215, torch.tensor(2051)]
    assert read_numbers([*others, odd], "regression", "targets")[:4].tolist() == [2049, 3001, 16777215, 2051]
    with pytest.raises(DataError, match="targets, row 0: a whole number above 16777216"):
        read_numbers(
            [16777217, odd], "regression", "targets"
        )  # refused beside integers and beside others alike
    survival = read_numbers([(True, 2049), (0, np.float16(1.5)), [1, odd]], "survival", "targets")
    assert survival[:2].tolist() == [[1, 2049], [0, 1.5]]


def test_labels_are_read_one_by_one() -> None:
    near = [2**53, 2**53 + 1, 7]
    for odd in (1.0, np.float32(1), np.int64(1), True, "1", torch.tensor(1), np.str_("1")):
        found, words = read_labels([*near, odd], [*near, 1], "targets")
        assert found.tolist() == [0, 1, 2, 3]
        assert words == (*near, 1)
        assert read_labels([odd, "a"], None, "targets")[0].tolist() == [0, 1]
        assert read_labels(np.array([odd, "a"], dtype=object), None, "targets")[0].tolist() == [0, 1]
    assert read_labels([1, "1", True, 1.0, 0], None, "targets")[1] == (0, 1)
    assert read_labels(["1", 1, "0"], None, "targets")[1] == (1, "0")


@pytest.mark.parametrize(
    ("labels", "told"),
    [
        (np.array([0, 2.0**53]), r"row 1: .*9007199254740992 or more written as a float"),
        (np.array([0, 1 << 24], np.float32), r"row 1: .*16777216 or more written as a float"),
        (np.array([0, 2048], np.float16), r"row 1: .*2048 or more written as a float"),
        ([0, 1e300], "row 1: .*written as a float"),
        ([0, "a", 0.5], "row 2: the label is a fraction"),
        ([0, "a", float("nan")], "row 2: the label is missing"),
        ([0, 1, None], "row 2: the label is missing"),
        ([0, 1, np.ma.masked], "row 2: the label is missing"),
        ([0, 1, b"a"], "row 2: the label is missing"),
        ([0, 1, torch.ones((), device="meta")], "row 2: the label is missing"),
        ([0, np.datetime64("2020-01-01", "ns")], "row 1: the label is missing"),
        (np.array(["2020-01-01", "2021-01-01"], "M8[ns]"), "class labels are text.*not datetime64"),
        (np.array([1, 2], "m8[ns]"), "class labels are text.*not timedelta64"),
        (pd.Series([0, None, 1], dtype="Int64"), "row 1: the label is missing"),
        (pa.array([0, None, 1]), "row 1: the entry is missing"),
    ],
)
def test_a_label_that_is_none_is_refused_by_its_row(labels: Any, told: str) -> None:
    with pytest.raises(DataError, match=f"targets.*{told}"):
        read_labels(labels, None, "targets")


@pytest.mark.parametrize("classes", [[0, 0.5], [0, None], [0, (1,)], ["a", float("nan")]])
def test_a_class_is_text_or_a_whole_number(classes: Any) -> None:
    with pytest.raises(ConfigError, match="classes are text or whole numbers"):
        read_labels([0, 1], classes, "targets")
    assert read_labels([0, 1], list(np.array([0.0, 1.0])), "targets")[1] == (0, 1)


def ids_by_row(given: Any) -> list[str]:
    names, place = read_ids(given, "user")
    assert names == sorted(set(names))
    assert set(place.tolist()) == set(range(len(names)))
    return [names[number] for number in place]


@given(
    ids=st.lists(
        st.one_of(st.integers(-9, 9), st.integers(-9, 9).map(str), st.sampled_from(["a", "A", "é"]))
    ),
    whole=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1),
)
def test_ids_read_once_for_each_distinct_one_are_those_of_each_row(ids: list[Any], whole: list[int]) -> None:
    assert ids_by_row(ids) == [str(one) for one in ids]
    assert ids_by_row(np.array(whole)) == [str(one) for one in whole]
    texts = [str(one) for one in whole]
    assert ids_by_row(np.array(texts)) == ids_by_row(pd.Series(texts)) == texts


@given(
    labels=st.lists(st.one_of(st.integers(0, 3), st.booleans(), st.sampled_from([0.0, 1.0, 2.0, "1", "b"])))
)
def test_labels_read_once_for_each_distinct_one_are_those_of_each_row(labels: list[Any]) -> None:
    classes = [0, 1, 2, 3, "b"]
    texts = [one if isinstance(one, str) else str(int(one)) for one in labels]
    found, _ = read_labels(labels, classes, "targets")
    assert found.tolist() == [list(map(str, classes)).index(text) for text in texts]
    numbers = [int(one) for one in labels if not isinstance(one, str)]
    for kind in (np.int64, np.float64, np.uint8):
        assert read_labels(np.array(numbers, kind), classes, "targets")[0].tolist() == numbers


def test_ids_are_read_one_by_one() -> None:
    assert ids_by_row([2**63, -5, "a", np.int64(7), torch.tensor(8)]) == [
        str(2**63),
        "-5",
        "a",
        "7",
        "8",
    ]
    assert ids_by_row([b"b", "b"]) == ["b", "b"]  # bytes are text in UTF-8
    assert ids_by_row(pd.Series([np.int64(7), "a"], dtype=object)) == ["7", "a"]
    assert ids_by_row(np.array([np.int64(7), "a"], dtype=object)) == ["7", "a"]
    assert ids_by_row(pa.array(["a", "b", "a"]).dictionary_encode()) == ["a", "b", "a"]
    day = np.datetime64("2020-01-01", "ns")
    for odd in (
        8.0,
        np.float32(8),
        day,
        True,
        np.bool_(True),
        b"\xff",
        None,
        pd.NA,
        pd.NaT,
        np.ma.masked,
        [7],
        "",
    ):
        for ids in (["a", odd], [7, odd]):
            with pytest.raises(DataError, match=r"user, row 1: the id is (missing|empty)"):
                read_ids(ids, "user")
    with pytest.raises(DataError, match="user, row 1: the entry is missing"):
        read_ids(pa.array([7, None]), "user")


def test_a_data_sets_users_and_targets_are_read_one_by_one() -> None:
    features = [np.array([value]) for value in VALUES]
    held = of_people(
        Items(features, [1, torch.tensor([2.5]), np.float16(0.5)], [7, torch.tensor(8), "a"], list("nnn")),
        user=None,
        silo=None,
    )
    assert held.train.targets.tolist() == [1, 2.5, 0.5]
    assert held.train.user.tolist() == [0, 1, 2]
    for user in (8.0, torch.tensor(8.0), None, np.ma.masked):
        with pytest.raises(DataError, match="user, row 1: the id is missing"):
            of_people(Items(features, [1, 2, 3], [7, user, 8], list("nnn")), user=None, silo=None)
    with pytest.raises(DataError, match="targets, row 1: the entry is masked"):
        of_people(Items(features, [1.0, np.ma.masked_array([2.0], mask=[True]), 3.0]))
    for label in (np.ma.masked_array([1], mask=[True]), np.array(["2020-01-01"], "M8[ns]")):
        with pytest.raises(DataError, match="targets, row 1: the label is missing"):
            of_people(Items(features, [0, label, 1]), task="classification", classes=[0, 1], test=None)


FRAMES: dict[str, Any] = {
    "objects": pd.Series([3001, Decimal("0.5"), np.float16(1.5)], dtype=object),
    "decimals": pa.array([Decimal("3001"), Decimal("0.5"), Decimal("1.5")]),
    "float64": pd.Series([3001, 0.5, 1.5]),
    "nullable": pd.Series([3001, 0.5, 1.5], dtype="Float64"),
    "arrow": pd.Series([3001, 0.5, 1.5], dtype="float64[pyarrow]"),
    "sparse": pd.arrays.SparseArray([3001, 0.5, 1.5]),
    "a category": pd.Series([3001, 0.5, 1.5], dtype="category"),
    "a dictionary": pa.array([3001, 0.5, 1.5]).dictionary_encode(),
}


@pytest.mark.parametrize("kind", FRAMES)
def test_the_columns_of_a_table_are_read_each_by_its_own_type(kind: str) -> None:
    column, truth = FRAMES[kind], [True, False, True]
    table = (
        pa.table({"a": column, "b": truth})
        if isinstance(column, pa.Array)
        else pd.DataFrame({"a": column, "b": pd.array(truth, dtype="boolean")})
    )
    assert read_features(table).values.tolist() == [[3001, 1], [0.5, 0], [1.5, 1]]


@pytest.mark.parametrize("column", [[1, "2"], [1, None], [1, pd.NA], [1, [2]], [1, pd.Timestamp(0)]])
def test_a_cell_of_a_column_of_objects_that_is_no_number_is_refused_by_its_row(column: Any) -> None:
    with pytest.raises(DataError, match="features, column 'a', row 1: the values are not numbers"):
        read_features(pd.DataFrame({"a": pd.Series(column, dtype=object)}))
    with pytest.raises(DataError, match="test targets, column 'a', row 1"):
        read_numbers(pd.DataFrame({"a": pd.Series(column, dtype=object)}), "survival", "test targets")


def test_a_table_without_records_is_read_whatever_types_its_columns_have() -> None:
    assert read_features(pd.DataFrame({"a": [], "b": pd.Series([], dtype=object)})).values.shape == (0, 2)
    assert read_numbers([], "survival", "targets").shape == (0, 2)
    assert read_numbers([], "regression", "targets").shape == (0,)


# --- survival -------------------------------------------------------------------------------------------------------

SURVIVAL: dict[str, Any] = {
    "truth and float": pd.DataFrame({"event": [True, False], "time": [2.5, 3.0]}),
    "nullable": pd.DataFrame({"event": [1, 0], "time": [2.5, 3.0]}).convert_dtypes(),
    "nullable truth": pd.DataFrame({"died": pd.array([True, False], dtype="boolean"), "days": [2.5, 3.0]}),
    "objects": pd.DataFrame({"e": [True, 0], "t": [Decimal("2.5"), 3]}, dtype=object),
    "to_numpy": pd.DataFrame({"event": [True, False], "time": [2.5, 3.0]}).to_numpy(),
    "arrow": pa.table({"event": [True, False], "time": [2.5, 3.0]}),
    "without names": pd.DataFrame([[1, 2.5], [0, 3.0]]),
    "a list": [(True, 2.5), (np.bool_(False), 3)],
}


@pytest.mark.parametrize("kind", SURVIVAL)
def test_survival_targets_of_mixed_types_are_read(kind: str) -> None:
    assert read_numbers(SURVIVAL[kind], "survival", "targets").tolist() == [[1, 2.5], [0, 3]]


@pytest.mark.parametrize("missing", [None, pd.NA, float("nan")])
def test_a_survival_target_with_a_missing_cell_is_refused_by_its_row(missing: Any) -> None:
    for kind in ("Int64", object):
        table = pd.DataFrame({"event": [1, 0], "time": pd.Series([2, missing], dtype=kind)})  # type: ignore[call-overload]
        with pytest.raises(DataError, match="targets, column 'time', row 1: the value"):
            read_numbers(table, "survival", "targets")


@pytest.mark.parametrize(
    "names",
    [
        ("time", "event"),
        ("T", "E"),
        ("t", "x"),
        ("followup_days", "cens"),
        ("OS_MONTHS", "OS_STATUS"),
        ("survivalTime", "died"),
        ("x", "status"),
        ("time_to_death", "death"),
    ],
)
def test_a_survival_table_whose_names_say_that_the_time_is_first_is_refused(names: tuple[str, str]) -> None:
    """Times of 0 and 1 would be taken for events without a word."""
    columns = dict(zip(names, ([0, 1], [1, 0]), strict=True))
    for table in (pd.DataFrame(columns), pa.table(columns)):
        with pytest.raises(
            DataError, match=rf"\(event, time\).*'{names[0]}' and '{names[1]}'; put the event"
        ):
            read_numbers(table, "survival", "targets")
    turned = pd.DataFrame(columns)[list(reversed(names))]
    assert read_numbers(turned, "survival", "targets").tolist() == [[1, 0], [0, 1]]


def test_times_that_look_like_events_are_warned_of() -> None:
    features, given = np.arange(4.0)[:, None] / 3, {"task": "survival", "test": ([[9.0]], [(1, 2.0)])}
    with pytest.warns(UserWarning, match="every time is 0 or 1, as events are"):
        of_people(features, [(0, 1), (1, 1), (1, 0), (0, 0)], **given)
    of_people(features, [(0, 1), (1, 2), (1, 0), (0, 0)], **given)  # warnings are errors here
