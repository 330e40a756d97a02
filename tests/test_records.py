"""Records group as a dict of lists would, and refuse what is not a table."""

import hashlib
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedveil.data.column_checks import CHUNK, check_columns
from fedveil.data.records import Affine, Groups, Population, Records
from fedveil.errors import DataError

PLACES = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 2**31 - 1) | st.integers(0, 3)), min_size=1, max_size=60
)


def records(places: list[tuple[int, int]]) -> Records:
    n = len(places)
    return Records(
        features=np.arange(2 * n, dtype=np.float32).reshape(n, 2),
        targets=np.arange(n, dtype=np.int64) % 3,
        silo=np.array([silo for silo, _ in places], dtype=np.int32),
        user=np.array([user for _, user in places], dtype=np.int32),
    )


def population(**changes: object) -> Population:
    train = records([(0, 0), (0, 1), (1, 1), (1, 3)])
    whole = Population(
        name="toy",
        train=train,
        test_features=train.features,
        test_targets=train.targets,
        n_users=5,
        silo_names=("east", "west"),
        task="classification",
        n_classes=3,
    )
    return replace(whole, **changes)


def as_dict(groups: Groups) -> dict[tuple[int, int], list[int]]:
    return {
        (int(groups.silo[i]), int(groups.user[i])): groups.members(i).tolist() for i in range(len(groups))
    }


@given(PLACES)
def test_groups_by_silo_and_user_are_those_of_a_dict_of_lists(places: list[tuple[int, int]]) -> None:
    expected: dict[tuple[int, int], list[int]] = defaultdict(list)
    for row, place in enumerate(places):
        expected[place].append(row)
    groups = records(places).by_silo_user()
    assert as_dict(groups) == expected
    assert list(as_dict(groups)) == sorted(expected)
    assert sorted(groups.order.tolist()) == list(range(len(places)))


@given(PLACES, st.integers(0, 3))
def test_groups_by_silo_hold_every_silo(places: list[tuple[int, int]], empty: int) -> None:
    n_silos = 5 + empty
    groups = records(places).by_silo(n_silos)
    expected = {(s, -1): [row for row, (silo, _) in enumerate(places) if silo == s] for s in range(n_silos)}
    assert as_dict(groups) == expected


def test_by_silo_refuses_a_silo_outside() -> None:
    with pytest.raises(DataError, match="silo 4, but there are 3"):
        records([(4, 0)]).by_silo(3)


def test_selected_records_keep_their_columns() -> None:
    whole = records([(0, 5), (1, 6), (2, 7)])
    chosen = whole.select(np.array([2, 0]))
    assert chosen.user.tolist() == [7, 5]
    assert chosen.silo.tolist() == [2, 0]
    assert chosen.features.tolist() == whole.features[[2, 0]].tolist()


def test_the_digest_of_a_table_is_that_of_all_its_bytes() -> None:
    """Also where a column is longer than what is hashed at once."""
    table = records([(0, 0), (0, 1), (2, 1)])
    table = replace(table, features=np.arange(3 * (CHUNK // 2), dtype=np.float32).reshape(3, -1))
    whole = hashlib.sha256()
    for column in (table.features, table.targets, table.silo, table.user):
        whole.update(f"{column.dtype.str}{column.shape}".encode() + column.tobytes())
    assert table.sha256 == whole.hexdigest()


def test_the_digest_tells_every_change_of_a_table_and_nothing_else() -> None:
    table = records([(0, 0), (0, 1), (2, 1)])
    whole = table.sha256
    assert records([(0, 0), (0, 1), (2, 1)]).sha256 == whole
    changed = [
        replace(table, features=table.features + np.eye(3, table.features.shape[1], dtype=np.float32)),
        replace(table, targets=table.targets[::-1].copy()),
        records([(0, 0), (0, 1), (1, 1)]),
        records([(0, 0), (0, 0), (2, 1)]),
        table.select(np.array([0, 1])),
        table.select(np.array([1, 0, 2])),
        replace(table, key=np.array([7, 8, 8])),  # the same users by number, and others by their ids
        replace(table, key=np.array([7, 9, 9])),
    ]
    assert len({whole, *(one.sha256 for one in changed)}) == 1 + len(changed)


def test_memory_mapped_features_are_taken_as_they_are(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((3, 4, 4), dtype=np.uint8))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    assert replace(records([(0, 0)] * 3), features=mapped).features is mapped


def test_affine_maps_bytes_to_float32() -> None:
    scaled = Affine(factor=1 / 51, shift=-1.0).apply(np.array([[0, 51, 255]], dtype=np.uint8))
    assert scaled.dtype == np.float32
    np.testing.assert_allclose(scaled, [[-1, 0, 4]], atol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_named_by_row_and_column(bad: float) -> None:
    features = np.zeros((4, 3), dtype=np.float32)
    features[2, 1] = bad
    with pytest.raises(DataError, match="row 2: feature 1 is NaN or infinite"):
        check_columns("the table", features, np.zeros(4, dtype=np.int64))
    images = np.zeros((4, 2, 2), dtype=np.float32)
    images[3, 0, 1] = bad
    with pytest.raises(DataError, match=r"row 3: feature \(0, 1\)"):
        check_columns("the table", images, np.zeros(4, dtype=np.int64))
    with pytest.raises(DataError, match="row 0: target is NaN"):
        check_columns("the table", np.zeros((1, 3), dtype=np.float32), np.array([bad], dtype=np.float32))


def test_a_bad_value_is_found_beyond_the_first_chunk() -> None:
    features = np.zeros((3, CHUNK // 2), dtype=np.float32)
    features[2, 7] = np.nan
    with pytest.raises(DataError, match="row 2: feature 7"):
        check_columns("the table", features, np.zeros(3, dtype=np.int64))


@pytest.mark.parametrize(
    ("features", "targets", "message"),
    [
        (np.zeros((3, 2), np.float32), np.zeros(2, np.int64), "3 rows of features and 2 targets"),
        (np.zeros((3, 2), np.float64), np.zeros(3, np.int64), "not float64 of shape"),
        (np.zeros(3, np.float32), np.zeros(3, np.int64), r"not float32 of shape \(3,\)"),
        (np.zeros((3, 2), np.float32), np.zeros(3, np.int32), "not int32"),
        (np.zeros((3, 2), np.float32), np.zeros((3, 3, 3), np.float32), r"\(event, time\)"),
    ],
)
def test_columns_that_are_no_table_are_refused(
    features: np.ndarray, targets: np.ndarray, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        check_columns("the table", features, targets)


def test_negative_silos_and_users_are_refused() -> None:
    with pytest.raises(DataError, match="row 1: the user number is negative"):
        records([(0, 0), (0, -1)])
    with pytest.raises(DataError, match="row 0: the silo number is negative"):
        records([(-1, 0)])


def test_the_public_number_of_users_may_exceed_those_present_but_not_fall_below() -> None:
    assert population(n_users=5).records_per_user().tolist() == [1, 2, 0, 1, 0]
    with pytest.raises(DataError, match="n_users = 2, but more users than that have records"):
        population(n_users=2)
    with pytest.raises(DataError, match="user number of row 3 is not below n_users = 3"):
        population(n_users=3)


def test_a_declared_silo_may_be_without_records_and_no_record_in_another() -> None:
    held = population(silo_names=("east", "west", "north"))
    assert held.records_per_silo()[2] == 0
    nobody = replace(held, train=held.train.select(np.zeros(0, dtype=np.int64)))
    assert nobody.records_per_silo().tolist() == [0, 0, 0]
    assert nobody.records_per_user().sum() == 0
    assert nobody.train.by_silo(3).size.tolist() == [0, 0, 0]
    groups = nobody.train.by_silo_user()
    assert len(groups) == len(groups.start) == 0
    with pytest.raises(DataError, match="silo 1, but there are 1 silo names"):
        population(silo_names=("east",))
    with pytest.raises(DataError, match="same name"):
        population(silo_names=("east", "east"))


def test_labels_outside_the_classes_are_refused_without_the_label() -> None:
    with pytest.raises(DataError, match=r"training table, row 2: the label is outside the classes 0 \.\. 1$"):
        population(n_classes=2)
    with pytest.raises(DataError, match="n_classes"):
        population(n_classes=None)


def test_survival_targets_are_an_event_and_a_time() -> None:
    train = records([(0, 0), (1, 1)])
    good = np.array([[1, 3.5], [0, 0]], dtype=np.float32)

    def of(targets: np.ndarray) -> Population:
        return population(
            train=replace(train, targets=targets),
            test_features=train.features,
            test_targets=good,
            task="survival",
            n_classes=None,
        )

    assert of(good).task == "survival"
    for wrong in ([[2, 1], [0, 1]], [[1, -1], [0, 1]]):
        with pytest.raises(DataError, match="row 0: the event must be 0 or 1"):
            of(np.array(wrong, dtype=np.float32))
    with pytest.raises(DataError, match="survival needs"):
        of(np.zeros(2, dtype=np.float32))


def test_regression_targets_are_numbers() -> None:
    numbers = np.zeros(4, dtype=np.float32)
    train = replace(records([(0, 0), (0, 1), (1, 1), (1, 3)]), targets=numbers)
    assert (
        population(train=train, test_targets=numbers, task="regression", n_classes=None).task == "regression"
    )
    with pytest.raises(DataError, match="regression needs"):
        population(task="regression", n_classes=None)


def test_the_test_table_must_fit_the_training_table() -> None:
    with pytest.raises(DataError, match="a test record has"):
        population(test_features=np.zeros((4, 3), dtype=np.float32))
    with pytest.raises(DataError, match="a test record has"):
        population(test_features=np.zeros((4, 2), dtype=np.uint8))


@pytest.mark.parametrize("weights", [[1, 1, 1], [1, 1, 1, np.nan], [1, 1, 1, -1], [0, 0, 0, 0]])
def test_test_weights_are_finite_not_negative_and_not_all_zero(weights: list[float]) -> None:
    with pytest.raises(DataError, match="test weight"):
        population(test_weights=np.array(weights, dtype=np.float32))
