"""Population from objects in memory: arrays, data frames, Arrow tables, tensors, PyTorch data sets."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

import numpy as np
from jaxtyping import Bool, Int32, Int64, Shaped

from fedveil.arguments import explain_arguments, list_argument, stacklevel_of_caller, text_argument
from fedveil.config_keys import is_number, plain, whole, whole_argument
from fedveil.data.cells import refuse_rows
from fedveil.data.column_checks import SEVERAL_TARGETS, check_bounds, check_task
from fedveil.data.identities import AS_TEXT, MOST_USERS, identifies_user, keys_of, near_duplicate_ids
from fedveil.data.input_arrays import (
    FeatureTable,
    check_alike,
    names_of,
    read_features,
    read_ids,
    read_labels,
    read_numbers,
    refuse_outside,
)
from fedveil.data.record_columns import record_columns
from fedveil.data.records import Features, Label, Population, Records, Targets, Task
from fedveil.data.schema import OF_ARRAYS, OF_PUBLIC_TESTS
from fedveil.data.splits import TEST_SHARE, check_share, holdout_by_user, refuse_training_records
from fedveil.errors import ConfigError, DataError, show_argument
from fedveil.randomness import ExperimentRandomness
from fedveil.sanitize import sanitize

# --- features that leak the target or the user: a model that uses one does not generalise to new people ---

_N_COMPARED_FIRST: Final = 1000
"""Number of first records on which most columns are excluded cheaply, before all records are compared."""


def find_leaking_features(
    table: FeatureTable, targets: Targets, users: tuple[list[str], Int32[np.ndarray, "n"]]
) -> Iterator[str]:
    """Yield a sentence for each feature that is an id or a copy of the target.

    A sentence names the column and no value.

    Args:
        table: the features; features that are not (n, d) are not checked.
        targets: targets of the records; a class is given by its number.
        users: the sorted ids, and the (n,) index of each record's user among them.
    """
    if table.values.ndim != 2 or not len(targets):  # without records, every column would equal the target
        return
    (ids, user_index), target_columns = users, targets.reshape(len(targets), -1).T
    for column_number in range(table.values.shape[1]):
        column = table.values[:, column_number]
        label = (
            f"column {column_number}"
            if table.names is None
            else f"column '{sanitize(table.names[column_number])}'"
        )
        # A constant column equals a constant target without a leak: np.ptp excludes it.
        if len(column) and np.ptp(column) and any(_equal(column, target) for target in target_columns):
            yield (
                f"features: {label} is what is predicted, in every record: "
                "it is unknown when a prediction is needed; remove it"
            )
        if _may_be_an_id(column[:_N_COMPARED_FIRST], user_index[:_N_COMPARED_FIRST]) and identifies_user(
            column.astype(np.float64), user_index, ids
        ):
            yield (
                f"features: {label} has one whole number in all records of a person, "
                "and a different one for every other person: if it is an id, a model identifies people by it; remove it"
            )


def exchanged_times_warnings(task: Task, targets: Targets) -> list[str]:
    """Return a warning if all survival times are 0 or 1, so that times and events may be exchanged; else nothing."""
    if task != "survival" or not len(targets) or not np.isin(targets[:, 1], (0, 1)).all():
        return []
    return ["targets: every time is 0 or 1, as events are; survival targets are (event, time), in this order"]


def _equal(column: Shaped[np.ndarray, "n"], target: Shaped[np.ndarray, "n"]) -> bool:
    return np.array_equal(column[:_N_COMPARED_FIRST], target[:_N_COMPARED_FIRST]) and np.array_equal(
        column, target
    )


def _may_be_an_id(column: Shaped[np.ndarray, "n"], user_index: Int32[np.ndarray, "n"]) -> bool:
    """Return whether all values of the column are whole numbers, and none belongs to two people."""
    return np.array_equal(column, np.rint(column)) and len(
        set(zip(column.tolist(), user_index.tolist(), strict=True))
    ) == len(np.unique(column))


# --- populations of arrays ---

Counted = Literal["counted"]
_PREPARED_NOTE: Final = (
    "The features were handed over as numbers: no guarantee covers anything that was fitted on records to make them (a "
    "scaling, a vocabulary, a choice of columns)."
)
_USERS_COUNTED: Final = (
    "The number of users is counted from the records and treated as public: no guarantee covers it. Declare "
    "n_users."
)
_SILOS_COUNTED: Final = (
    "The silos are those that have records: no guarantee covers their names and number. Declare silos."
)
_CLASSES_COUNTED: Final = (
    "The classes are those that occur in the records, and fewer than two are refused: no guarantee covers that. "
    "Declare classes."
)
_NEAR_DUPLICATES: Final = (
    "user: some ids differ in their form alone (case, blanks, marks, leading zeros), and each form counts as a person "
    "of its own, protected alone; write every id in one way"
)
_PUBLIC_TEST: Final = "The test table was handed over as public; no guarantee covers its records."


@explain_arguments
def population(
    data: Any = None,
    targets: Any = None,
    *,
    features: Any = None,
    user: Any = None,
    silo: Any = None,
    n_users: int | Counted | None = None,
    task: Task | None = None,
    classes: Sequence[Any] | set[Any] | frozenset[Any] | None = None,
    target_range: tuple[float, float] | None = None,
    silos: Sequence[str | int] | None = None,
    test: Any = None,
    test_share: int | float = TEST_SHARE,
    seed: int = 0,
    name: str = "people",
) -> Population:
    """Make a population from records in memory: features, targets, and the user and silo of each record.

    Args:
        data: (n, ...) numbers: a numpy array, a tensor, a frame (pandas, polars, Arrow); or a PyTorch data set, or its
            loader, of (features, target), of (features, target, user, silo), or of mappings with the keys x, y, user
            and silo, which is read into memory; or a frame or a Hugging Face data set whose columns the other
            arguments name. uint8 is kept, every other type is converted to float32, and nothing is scaled.
        targets: (n,) labels or numbers; (n, 2) of (event, time) for survival, or (n, 3) with
            the time of late entry; (n, k) of k labels, each 0 or 1, or of k numbers; or the name of a column, or a list
            of names. None for a PyTorch data set.
        features: names of the columns of a frame: ``population(frame, features=["age", "dose"], targets="sick",
            user="patient", silo="hospital")``; or the features, instead of ``data``.
        user: (n,) the person to whom each record belongs: text or whole numbers. Ids are compared as text: equal text
            is the same person in all silos, and any difference (case, blanks, leading zeros) makes another person.
            Columns are matched by position; pandas tables and series whose indexes differ are refused.
        silo: (n,) the silo that holds each record.
        n_users: |U|, the PUBLIC number of users, with or without records, at most 10^8. ``"counted"`` counts the
            users that have records; the statement then says that no guarantee covers this number.
        task: ``"classification"``, ``"regression"``, ``"survival"``, ``"multi-label"`` (k labels, none or several of
            which a record has) or ``"multi-output"`` (k numbers).
        classes: the labels in the order of the model's outputs. None takes the labels that occur, and the statement
            says that no guarantee covers this choice.
        target_range: (lower, upper), for one or k numbers: DECLARED bounds of the targets. A target outside is refused.
            To clip targets to the bounds instead, call ``numpy.clip`` first.
        silos: names of the silos; a silo without records takes part like any other. None takes the silos that have
            records, and the statement says that no guarantee covers this choice.
        test: PUBLIC (features, targets) to test on, or a frame of the same columns. None holds out some of the records
            instead.
        test_share: probability with which each record is held out; 0 holds none out. With a public ``test``, only the
            default is accepted, because no record is held out.
        seed: seed of the hold-out.
        name: name of these data in reports.

    Returns:
        The population. Users are numbered by the sorted union of their ids, silos by ``silos``.

    Raises:
        ConfigError: an argument is missing or invalid.
        DataError: a value is invalid; the error names the column and the row, never the value. Or more test records
            are also training records than chance explains.

    Warns:
        UserWarning: ids that differ only in their spelling; a feature that is an id, or the target; survival times
            that are all 0 or 1, which suggests that events and times are exchanged.

    Guarantees:
        As :func:`fedveil.data.tables.read_tables`: whether a record is held out, and the seed of its user's batches,
        depend only on that user's id and records. Nothing is fitted on the records, except for the quantities that
        the caller asked to count.

    >>> X, y = np.zeros((4, 2)), [0, 1, 1, 0]
    >>> people = population(X, y, user=["a", "b", "a", "c"], silo=["n", "n", "s", "s"], n_users=10,
    ...                     task="classification", classes=[0, 1], silos=["n", "s"])
    >>> people.n_users, people.n_silos, people.feature_shape
    (10, 2, (2,))
    """
    n_users, test_share, seed = whole(n_users), plain(test_share), whole_argument("population: seed", seed)
    columns = record_columns(data, features, targets, user, silo)
    if test is not None and not isinstance(test, tuple) and columns.reader is not None:
        test = columns.reader(test)
    _check_arguments(task, n_users, test_share, test)
    if isinstance(classes, set | frozenset):
        raise ConfigError(
            "population: classes is a set, which has no order; list them in that of the model's outputs"
        )
    test_share, classes = float(test_share), columns.classes if classes is None else classes
    assert task is not None
    text_argument("population: name", name)
    declared_range = _read_range(task, target_range)
    assert n_users is not None
    check_alike(columns.by_name)
    table = read_features(columns.features)
    labels, class_labels = _read_targets(columns.targets, task, classes, "targets")
    refuse_outside(labels, declared_range, "targets")
    users, user_index = read_ids(columns.user, "user")
    names, silo_numbers = _number_silos(*read_ids(columns.silo, "silo"), silos)
    _check_lengths({"features": table.values, "targets": labels, "user": user_index, "silo": silo_numbers})
    # Seeds follow the id, not `place`: the place changes for later ids when an earlier user's records are removed.
    # A counted |U| is at least 1, because |U| divides every user-level mean.
    key, declared = keys_of(users)[user_index], max(1, len(users)) if n_users == "counted" else n_users
    if len(users) > declared:
        raise DataError(
            f"n_users is {n_users}, but more users have records; it is the public number of all users and must not be "
            "below the number present"
        )
    if test is None:
        holdout_seed = ExperimentRandomness(seed).integer("arrays", "test")
        split = _hold_out(
            table, labels, holdout_by_user(user_index, key, test_share, holdout_seed), test_share
        )
    else:
        split = _public_test(test, table, task, class_labels, declared_range)
        refuse_training_records(table.values, user_index, split.features, "test, row {}".format)
    # Warnings go to the owner of the data only. The statement is public, so it must not depend on such a check of the
    # records (`AS_TEXT` is always in it).
    warning_texts = [_NEAR_DUPLICATES] if near_duplicate_ids(users) else []
    warning_texts += find_leaking_features(table, labels, (users, user_index))
    warning_texts += exchanged_times_warnings(task, labels)
    for warning_text in warning_texts:
        warnings.warn(warning_text, stacklevel=stacklevel_of_caller())
    return Population(
        name=name,
        train=Records(
            features=table.values[split.is_training],
            targets=labels[split.is_training],
            silo=silo_numbers[split.is_training],
            user=user_index[split.is_training],
            key=key[split.is_training],
        ),
        test_features=split.features,
        test_targets=split.targets,
        n_users=declared,
        silo_names=names,
        task=task,
        n_classes=len(class_labels) if task == "classification" else None,
        target_names=_target_names(columns.targets, labels, task),
        target_range=declared_range,
        notes=(
            *(_PREPARED_NOTE, AS_TEXT, OF_ARRAYS),
            *((_USERS_COUNTED,) if n_users == "counted" else ()),
            *((_SILOS_COUNTED,) if silos is None else ()),
            *((_CLASSES_COUNTED,) if task == "classification" and classes is None else ()),
            split.note,
        ),
        feature_names=table.names,
        classes=class_labels,
        public_test=test is not None,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Split:
    """Mask of the training records, the test table, and the sentence about it for the statement."""

    is_training: Bool[np.ndarray, "all"]
    features: Features
    targets: Targets
    note: str


def _public_test(
    test: tuple[Any, Any],
    table: FeatureTable,
    task: Task,
    class_labels: tuple[Label, ...],
    declared_range: tuple[float, float] | None,
) -> _Split:
    """Train on all records, and test on the table that the caller declares public."""
    check_alike({"test features": test[0], "test targets": test[1]})
    test_table = read_features(test[0], "test features")
    if test_table.names != table.names:
        raise DataError("test features: the columns are not those of the features, in the same order")
    targets, _ = _read_targets(test[1], task, class_labels or None, "test targets")
    refuse_outside(targets, declared_range, "test targets")
    return _Split(
        is_training=np.ones(len(table.values), dtype=np.bool_),
        features=test_table.values,
        targets=targets,
        note=f"{_PUBLIC_TEST} {OF_PUBLIC_TESTS}",
    )


def _hold_out(
    table: FeatureTable, labels: Targets, is_held_out: Bool[np.ndarray, "n"], share: float
) -> _Split:
    """Train on the unmarked records, and test on the marked ones."""
    return _Split(
        is_training=~is_held_out,
        features=table.values[is_held_out],
        targets=labels[is_held_out],
        note=f"A share of {share} of the records, drawn at random, is held out for testing: a user may have "
        "records on both sides, and no guarantee covers the held-out ones."
        if share
        else "No record is held out for testing.",
    )


def _check_arguments(task: Any, n_users: Any, test_share: Any, test: Any) -> None:
    if not isinstance(task, str) or task not in get_args(Task):
        raise ConfigError(
            f"population: task must be one of {', '.join(get_args(Task))}, not {show_argument(task)}"
        )
    if n_users is None:
        raise ConfigError(
            "population: n_users is required: the public number of all users, with or without records. It scales every "
            'mean, so it must not depend on the records; n_users="counted" counts them all the same, and the statement '
            "says that no guarantee covers it"
        )
    counted = isinstance(n_users, str) and n_users == "counted"
    if not counted and not (is_number(n_users) and isinstance(n_users, int) and n_users >= 1):
        raise ConfigError(
            f'population: n_users must be a whole number >= 1 or "counted", not {show_argument(n_users)}'
        )
    if not counted and n_users > MOST_USERS:
        raise ConfigError(f"population: n_users must be <= {MOST_USERS:g}, not {show_argument(n_users)}")
    if test is not None and (not isinstance(test, tuple) or len(test) != 2):
        raise ConfigError("population: test must be a pair (features, targets) of public records")
    check_share("population", test_share, test, least=0.0)


def _read_range(task: Task, target_range: Any) -> tuple[float, float] | None:
    """Return the declared bounds of regression targets as floats, None if none are given."""
    if target_range is None:
        return None
    if task not in ("regression", "multi-output"):
        raise ConfigError(f"population: target_range belongs to regression and multi-output, not to {task}")
    try:
        lower, upper = (plain(bound) for bound in target_range)
    except (TypeError, ValueError):
        lower = upper = math.nan
    if not (is_number(lower) and is_number(upper)) or not -math.inf < lower < upper < math.inf:
        raise ConfigError(
            "population: target_range must be (lower, upper), two finite numbers, lower below upper"
        )
    try:
        check_bounds(lower, upper)
    except ValueError as error:
        raise ConfigError(f"population: target_range: {error}") from None
    return float(lower), float(upper)


def _read_targets(
    source: Any, task: Task, classes: Sequence[Any] | None, where: str
) -> tuple[Targets, tuple[Label, ...]]:
    """Return the targets, and the class labels by number (empty unless the task is classification)."""
    if task != "classification":
        if classes is not None and len(classes):
            raise ConfigError(f"population: classes belong to classification, not to {task}")
        numbers = read_numbers(source, task, where)
        check_task(where, numbers, task, None)
        return numbers, ()
    if classes is not None and len(list_argument("population: classes", classes)) < 2:
        raise ConfigError(
            "population: classes must list two labels or more, in the order of the model's outputs"
        )
    class_numbers, class_labels = read_labels(source, classes, where)
    if len(class_labels) < 2:
        raise DataError(f"{where}: fewer than two classes occur; declare classes")
    return class_numbers, class_labels


def _target_names(source: Any, targets: Targets, task: Task) -> tuple[str, ...]:
    """Return the names of k targets: of the columns of a table, else "0", "1", ...; empty for a task of one target."""
    if task not in SEVERAL_TARGETS:
        return ()
    return names_of(source, "targets") or tuple(map(str, range(targets.shape[1])))


def _number_silos(
    present: list[str], silo_index: Int32[np.ndarray, "n"], declared: Sequence[str | int] | None
) -> tuple[tuple[str, ...], Int32[np.ndarray, "n"]]:
    """Return the names of all silos, and the silo number of every record.

    Args:
        present: the sorted names of the silos with records.
        silo_index: (n,) index among them of each record's silo.
        declared: the declared names; None takes those with records.
    """
    if declared is None:
        if not present:
            raise ConfigError("population: without a record the silos must be declared: silos=[...]")
        return tuple(present), silo_index
    names = tuple(str(name) for name in list_argument("population: silos", declared))
    if not names or len(set(names)) != len(names):
        raise ConfigError("population: silos must list one name or more, each once")
    number_of = {
        name: number for number, name in enumerate(names)
    }  # the declared order, not that of the records
    silo_numbers = np.array([number_of.get(name, -1) for name in present], dtype=np.int32)[silo_index]
    refuse_rows(silo_numbers < 0, "silo", f"the silo is not among those declared: {', '.join(names)}")
    return names, silo_numbers


def _check_lengths(
    columns: dict[str, Features | Targets | Int32[np.ndarray, "n"] | Int64[np.ndarray, "n"]],
) -> None:
    length = len(columns["features"])
    for name, column in columns.items():
        if len(column) != length:
            raise DataError(
                f"{name}: {len(column)} entries, but the features have {length} rows; they must agree"
            )
