"""Records with a silo and a user, their grouping into contributions, and populations.

A record is one training example. It is held by one silo and belongs to one user; a user may have records in several
silos. User-level methods train and bound one contribution per pair (silo, user). Federated averaging trains one
contribution per silo. A client of cross-device learning is a silo with one user. So one table serves all methods, and
a method only chooses the grouping.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Literal, TypeAlias

import numpy as np
from jaxtyping import Float32, Int32, Int64, UInt8

from fedveil.arguments import explain_arguments_as
from fedveil.data.column_checks import (
    CHUNK,
    SEVERAL_TARGETS,
    check_columns,
    check_task,
    describe_values,
)
from fedveil.data.column_files import Owners, empty_column, folder_beside
from fedveil.data.main_silos import MainSilos
from fedveil.data.memory_tables import TableFile
from fedveil.data.schema import Schema
from fedveil.errors import DataError

Features: TypeAlias = Float32[np.ndarray, "n *shape"] | UInt8[np.ndarray, "n *shape"]
Targets: TypeAlias = Int64[np.ndarray, "n"] | Float32[np.ndarray, "n"] | Float32[np.ndarray, "n k"]
Task: TypeAlias = Literal["classification", "multi-label", "regression", "multi-output", "survival"]
Label: TypeAlias = str | int


@dataclass(frozen=True, kw_only=True)
class Affine:
    """The map x -> x * factor + shift that turns stored values into the float32 features a model sees.

    Images stay uint8 in memory and are scaled one batch at a time; for float32 tables it is the identity.

    >>> Affine(factor=1 / 255).apply(np.array([0, 255], dtype=np.uint8)).tolist()
    [0.0, 1.0]
    """

    factor: float = 1.0
    shift: float = 0.0

    def apply(self, raw: Features) -> Float32[np.ndarray, "n *shape"]:
        """Return ``raw * factor + shift`` as float32, in the shape of ``raw``."""
        scaled: np.ndarray = raw.astype(np.float32)
        scaled *= np.float32(self.factor)
        scaled += np.float32(self.shift)
        return scaled


@dataclass(frozen=True, kw_only=True, eq=False)
class Groups:
    """Grouping of n records into m disjoint contributions.

    Contribution i holds the records ``order[start[i] : start[i] + size[i]]``. Contributions are sorted by
    (silo, user); within a contribution, records keep their order in the table.

    Attributes:
        order: (n,) int64 indices of the records, contribution by contribution.
        start: (m,) int64 position of the first record of each contribution in ``order``.
        size: (m,) int64 number of records of each contribution.
        silo: (m,) int32 silo of each contribution.
        user: (m,) int32 user of each contribution; -1 if the contribution is a whole silo.
        key: (m,) int64 key that seeds each user's randomness; None: the user number is the key.
    """

    order: Int64[np.ndarray, "n"]
    start: Int64[np.ndarray, "m"]
    size: Int64[np.ndarray, "m"]
    silo: Int32[np.ndarray, "m"]
    user: Int32[np.ndarray, "m"]
    key: Int64[np.ndarray, "m"] | None = None

    def __len__(self) -> int:
        """Return m, the number of contributions."""
        return len(self.size)

    def members(self, contribution: int) -> Int64[np.ndarray, "size"]:
        """Return the indices of the records that one contribution holds."""
        start = self.start[contribution]
        return self.order[start : start + self.size[contribution]]


def group_by_silo_user(
    silo: Int32[np.ndarray, "n"],
    user: Int32[np.ndarray, "n"],
    key: Int64[np.ndarray, "n"] | None = None,
    folder: Path | None = None,
) -> Groups:
    """Group records by (silo, user): one contribution per pair that has records.

    O(n log n) time; 24 bytes a record, of which 8 remain. With a folder, ``order`` is kept in a file of it, and memory
    grows with the pairs alone.
    """
    if folder is not None:
        return _group_in_file(silo, user, key, folder)
    owner = silo.astype(np.int64)
    owner <<= 32
    owner |= user  # both are non-negative int32, so the sorted key is (silo, user)
    order = np.argsort(owner, kind="stable").astype(np.int64, copy=False)
    owner = owner[order]
    start = np.flatnonzero(owner != np.append(-1, owner[:-1]))
    size, pairs = np.diff(start, append=len(owner)), owner[start]
    return Groups(
        order=order,
        start=start,
        size=size,
        silo=(pairs >> 32).astype(np.int32),
        user=(pairs & 0xFFFFFFFF).astype(np.int32),
        key=None if key is None else key[order[start]],
    )


def _group_in_file(
    silo: Int32[np.ndarray, "n"],
    user: Int32[np.ndarray, "n"],
    key: Int64[np.ndarray, "n"] | None,
    folder: Path,
) -> Groups:
    """Return the groups of :func:`group_by_silo_user` by counting, some records at a time."""
    pairs = Owners(user, silo)
    start, order = _starts(pairs.size), empty_column(len(user), folder)
    for rows, pair, position in pairs.places():
        order[start[pair] + position] = np.arange(rows.start, rows.start + len(pair))
    return Groups(
        order=order,
        start=start,
        size=pairs.size,
        silo=(pairs.owners >> 32).astype(np.int32),
        user=(pairs.owners & 0xFFFFFFFF).astype(np.int32),
        key=None if key is None else key[order[start]],
    )


def empty_groups() -> Groups:
    """Return the grouping without contributions, for a party without records."""
    no_indices, no_numbers = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int32)
    return Groups(order=no_indices, start=no_indices, size=no_indices, silo=no_numbers, user=no_numbers)


@dataclass(frozen=True, kw_only=True, eq=False)
class Records:
    """Table of n training records.

    n may be 0, because the removal of the last user's records must not fail.

    Args:
        features: (n, ...) float32, or uint8 that an :class:`Affine` makes float32; may be memory-mapped.
        targets: (n,) int64 labels; (n,) float32 numbers; (n, 2) float32 of (event, time) for survival, or (n, 3)
            with the entry; (n, k) float32 of k labels, each 0 or 1, or of k numbers.
        silo: (n,) int32, number of the silo that holds the record, from 0.
        user: (n,) int32, number of the user of the record, from 0; the same number is the same person in every silo.
        key: (n,) int64, seed key of the batches and dropout of the record's user: a function of the user's identity
            alone. None: the user number is the key, and must not depend on the presence of other users.

    Raises:
        DataError: columns have different lengths or another dtype; a feature or target is NaN or infinite (the error
            names row and column, not the value); a silo or user number is negative.
    """

    features: Features
    targets: Targets
    silo: Int32[np.ndarray, "n"]
    user: Int32[np.ndarray, "n"]
    key: Int64[np.ndarray, "n"] | None = None

    def __post_init__(self) -> None:
        check_columns("the training table", self.features, self.targets)
        for name, column in (("silo", self.silo), ("user", self.user)):
            if column.dtype != np.int32 or column.ndim != 1:
                raise DataError(
                    f"the {name} column must be one int32 per record, not {describe_values(column)}"
                )
            if len(column) != len(self.features):
                raise DataError(
                    f"{len(self.features)} records, but {len(column)} entries in the {name} column"
                )
            if column.min(initial=0) < 0:
                row = int(np.argmax(column < 0))
                raise DataError(f"row {row}: the {name} number is negative; {name}s are numbered from 0")

    def __len__(self) -> int:
        """Return n, the number of records."""
        return len(self.features)

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of types, shapes and contents of all columns, in hexadecimal; as private as the records.

        The digest covers the users' keys: a user's batches follow from the key, and so do the rounds in which the
        user takes part under a schedule. So the same records under other ids have another digest.
        """
        digest = hashlib.sha256()
        keys = () if self.key is None else (self.key,)
        for column in (self.features, self.targets, self.silo, self.user, *keys):
            # Type and shape first: otherwise two tables with the same bytes in another shape would be equal.
            digest.update(f"{column.dtype.str}{column.shape}".encode())
            rows = max(1, CHUNK // max(1, int(np.prod(column.shape[1:]))))
            for first in range(0, len(column), rows):
                digest.update(column[first : first + rows].tobytes())
        return digest.hexdigest()

    def select(self, rows: Int64[np.ndarray, "k"]) -> "Records":
        """Return a copy of the records at these rows, in this order."""
        return Records(
            features=self.features[rows],
            targets=self.targets[rows],
            silo=self.silo[rows],
            user=self.user[rows],
            key=None if self.key is None else self.key[rows],
        )

    def by_silo_user(self) -> Groups:
        """Group the records by (silo, user); see :func:`group_by_silo_user`."""
        return group_by_silo_user(self.silo, self.user, self.key, folder_beside(self.features))

    def by_silo(self, n_silos: int) -> Groups:
        """Group the records by silo: one contribution, perhaps of size 0, for each of ``n_silos`` silos.

        Raises:
            DataError: a record has a silo number of ``n_silos`` or above.
        """
        largest = int(self.silo.max(initial=-1))
        if largest >= n_silos:
            raise DataError(f"a record lies in silo {largest}, but there are {n_silos} silos (from 0)")
        size = _count_numbers(self.silo, n_silos)
        return Groups(
            order=self._order_by_silo(_starts(size)),
            start=_starts(size),
            size=size,
            silo=np.arange(n_silos, dtype=np.int32),
            user=np.full(n_silos, -1, dtype=np.int32),
        )

    def _order_by_silo(self, start: Int64[np.ndarray, "silos"]) -> Int64[np.ndarray, "n"]:
        folder = folder_beside(self.features)
        if folder is None:
            return np.argsort(self.silo, kind="stable").astype(np.int64)
        order, silos = empty_column(len(self.silo), folder), Owners(self.silo)
        for rows, silo, position in silos.places():
            order[start[silos.owners[silo]] + position] = np.arange(rows.start, rows.start + len(silo))
        return order


@dataclass(frozen=True, kw_only=True)
class TableSource:
    """Tables and schema that a population was read from, and the parameters of the hold-out.

    Attributes:
        schema_file: path of the schema.
        schema: content of the schema file.
        files: the training tables.
        test_file: the public test table; None: records are held out.
        test_share: probability with which each record is held out.
        seed: seed of the hold-out.
    """

    schema_file: Path
    schema: bytes = field(repr=False)
    files: tuple[TableFile, ...]
    test_file: TableFile | None
    test_share: float
    seed: int


@explain_arguments_as("Population", "fedveil.population and fedveil.tables make one")
@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Population:
    """Training records over silos and users, with a test table outside every guarantee.

    Silos and users are declared, like |U|. Silos and users without a record take part in every round like any other,
    with their noise. So participation does not reveal which of them have records.

    Args:
        name: name of the data set in reports.
        train: the training records of all silos.
        test_features: (t, ...) like ``train.features``.
        test_targets: (t,) or (t, k) like ``train.targets``.
        test_weights: (t,) weights of the test rows in every metric; None: equal weights.
        test_rows: (t,) rows of the silos' tables that were held out for testing, in the order of the tables; None if
            the test table has another source.
        public_test: whether the test table is public and not held out of private records: its exact metrics may be
            published.
        n_users: |U|, the PUBLIC number of users. It is declared, not counted: it includes users without a record,
            and the divisor of every user-level average uses it.
        silo_names: |S| names, in the order of the silo numbers.
        task: kind of the targets.
        n_classes: number of classes; None unless ``task`` is "classification".
        scale: the map from stored to float32 features, the same for train and test.
        notes: sentences that every report repeats: subsets, and quantities that were fitted on private records.
        main_silos: the silo of each user's whole weight, if a file assigns one.
        feature_names: names of the columns that new records must have, if features came as a table.
        classes: the labels in the order of their numbers; empty if unknown.
        target_names: names of k labels or numbers to predict, in the order of the outputs; empty for any other task.
        target_range: declared bounds of a number to predict; None without them.
        schema: the public schema by which the records were read; None without one.
        source: the tables that the population was read from; None if it was not read by :func:`fedveil.tables`.

    Raises:
        DataError: |U| is below the number of users present; targets do not fit the task; a label is outside
            0 .. n_classes - 1; a survival event is not 0 or 1; the test table does not fit the training table.
    """

    name: str
    train: Records
    test_features: Features
    test_targets: Targets
    test_weights: Float32[np.ndarray, "t"] | None = None
    test_rows: Int64[np.ndarray, "t"] | None = None
    public_test: bool = False
    n_users: int
    silo_names: tuple[str, ...]
    task: Task
    n_classes: int | None = None
    scale: Affine = field(default_factory=Affine)
    notes: tuple[str, ...] = ()
    main_silos: MainSilos | None = None
    feature_names: tuple[str, ...] | None = None
    classes: tuple[Label, ...] = ()
    target_names: tuple[str, ...] = ()
    target_range: tuple[float, float] | None = None
    schema: Schema | None = None
    source: TableSource | None = None
    complete: ClassVar[bool] = True
    """True if the population holds the records of all silos; False for one party of a federation."""

    def __repr__(self) -> str:
        """Return public facts only, so that a printed, logged or displayed population shows no record."""
        public = (
            f"n_users={self.n_users}, n_silos={self.n_silos}, task='{self.task}', n_classes={self.n_classes}"
        )
        return f"{type(self).__name__}(name='{self.name}', {public})"

    def __post_init__(self) -> None:
        self._check_users()
        self._check_silos()
        check_columns("the test table", self.test_features, self.test_targets)
        train, test = self.train.features, self.test_features
        if train.shape[1:] != test.shape[1:] or train.dtype != test.dtype:
            raise DataError(
                f"{self.name}: a test record has {test.shape[1:]} features of {test.dtype}, "
                f"a training record {train.shape[1:]} of {train.dtype}; they must agree"
            )
        check_task(f"{self.name}, training table", self.train.targets, self.task, self.n_classes)
        check_task(f"{self.name}, test table", self.test_targets, self.task, self.n_classes)
        expected = self.train.targets.shape[1] if self.task in SEVERAL_TARGETS else 0
        if len(self.target_names) != expected or self.test_targets.shape[1:] != self.train.targets.shape[1:]:
            raise DataError(
                f"{self.name}: {len(self.target_names)} names of targets, {expected} columns of targets to train on, "
                f"and {describe_values(self.test_targets)} to test on; they must agree"
            )
        self._check_weights()

    def _check_users(self) -> None:
        present = len(Owners(self.train.user).owners)
        largest = int(self.train.user.max(initial=-1))
        if self.n_users < present:
            raise DataError(
                f"{self.name}: n_users = {self.n_users}, but more users than that have records; n_users is the "
                "public number of all users and must not be below the number present"
            )
        if largest >= self.n_users:
            row = int(np.argmax(self.train.user))
            raise DataError(
                f"{self.name}: the user number of row {row} is not below n_users = {self.n_users}; users are "
                "numbered from 0"
            )

    def _check_silos(self) -> None:
        if len(set(self.silo_names)) != len(self.silo_names):
            raise DataError(f"{self.name}: two silos have the same name")
        largest = int(self.train.silo.max(initial=-1))
        if largest >= self.n_silos:
            raise DataError(
                f"{self.name}: a record lies in silo {largest}, but there are {self.n_silos} silo names"
            )

    def _check_weights(self) -> None:
        weights = self.test_weights
        if weights is None:
            return
        if (
            weights.shape != (len(self.test_features),)
            or not np.isfinite(weights).all()
            or (weights < 0).any()
        ):
            raise DataError(
                f"{self.name}: test weights must be one finite number, not negative, per test record"
            )
        if len(weights) and not weights.any():
            raise DataError(f"{self.name}: every test weight is 0; at least one must be positive")

    @property
    def n_silos(self) -> int:
        """|S|, the number of silos."""
        return len(self.silo_names)

    @property
    def n_outputs(self) -> int:
        """Number of outputs of a record: one per class or per target, otherwise one."""
        return self.n_classes or len(self.target_names) or 1

    @property
    def feature_shape(self) -> tuple[int, ...]:
        """Shape of one record's features."""
        return self.train.features.shape[1:]

    def records_per_user(self) -> Int64[np.ndarray, "users"]:
        """Return N_u, the number of training records of each user over all silos (0 if none)."""
        return _count_numbers(self.train.user, self.n_users)

    def records_per_silo(self) -> Int64[np.ndarray, "silos"]:
        """Return the number of training records of each silo."""
        return _count_numbers(self.train.silo, self.n_silos)


def _count_numbers(numbers: Int32[np.ndarray, "n"], count: int) -> Int64[np.ndarray, "count"]:
    """Return how often each of the numbers 0 .. count - 1 occurs."""
    counts = np.zeros(count, dtype=np.int64)
    for begin in range(0, len(numbers), CHUNK):  # bincount copies its numbers into int64
        counts += np.bincount(numbers[begin : begin + CHUNK], minlength=count)
    return counts


def _starts(size: np.ndarray) -> Int64[np.ndarray, "m"]:
    """Return the offsets of consecutive runs of these sizes."""
    start: Int64[np.ndarray, "m"] = (np.cumsum(size) - size).astype(np.int64)
    return start


# --- contribution limit --------------------------------------------------------------------------------------------
# Flags of ULDP-GROUP: the records that remain if a user keeps at most k records over all silos.


def limit_records_per_user(records: Records, per_user: int) -> Int64[np.ndarray, "kept"]:
    """Return the rows, in table order, of at most ``per_user`` records of each user over all silos.

    A user's records are taken in turn from the silos (the first of each silo, then the second of each, ...), as in
    the authors' program, so that the losses are spread evenly over the silos.

    >>> one = np.zeros(4, dtype=np.int32)
    >>> table = Records(features=np.zeros((4, 1), np.float32), targets=np.zeros(4, np.int64),
    ...                 silo=np.array([0, 0, 0, 1], np.int32), user=one)
    >>> limit_records_per_user(table, 2).tolist()
    [0, 3]
    """
    # `turn` is a record's place among the records of its (user, silo) pair; sorting a user's records by (turn, silo)
    # gives the round-robin order.
    by_pair = np.lexsort((records.silo, records.user))
    turn = np.empty(len(records), dtype=np.int64)
    turn[by_pair] = _position_in_run(records.user[by_pair].astype(np.int64) << 32 | records.silo[by_pair])
    by_user = np.lexsort((records.silo, turn, records.user))
    position = np.empty(len(records), dtype=np.int64)
    position[by_user] = _position_in_run(records.user[by_user])
    return np.flatnonzero(position < per_user)


def _position_in_run(keys: np.ndarray) -> np.ndarray:
    """Return 0, 1, 2, ... within every run of equal keys."""
    begins = np.flatnonzero(np.r_[True, keys[1:] != keys[:-1]])
    lengths = np.diff(np.r_[begins, len(keys)])
    return np.arange(len(keys)) - np.repeat(begins, lengths)
