"""A user's own tables, CSV, Parquet or Excel, read by a public schema into a population.

Either each silo has its own file, named after it, or one or more files have a silo column. Records are
counted from 1, without the header, in every error. No error repeats a value.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import file_digest
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float32, Int32, Int64

from fedveil.config_keys import plain, whole_argument
from fedveil.data.cell_values import without_fraction
from fedveil.data.identities import AS_TEXT, index_names, keys_of
from fedveil.data.public_test import refuse_training_records
from fedveil.data.records import Population, Records, TableSource, Targets, Task
from fedveil.data.schema import (
    MISSING_VALUES,
    OF_PUBLIC_TESTS,
    Label,
    Schema,
    invalid_cells_notice,
    read_schema,
)
from fedveil.data.splits import TEST_SHARE, check_share, holdout_by_user
from fedveil.data.table_file import open_table
from fedveil.data.table_reader import TableReader
from fedveil.errors import ConfigError, DataError
from fedveil.files import as_path, read_content, reading
from fedveil.randomness import ExperimentRandomness

TASKS: dict[str, Task] = {"label": "classification", "number": "regression", "survival": "survival"}


@dataclass(frozen=True, kw_only=True, eq=False)
class _Part:
    """What one file holds, before users and silos of all files are numbered together; it may be no record at all.

    Attributes:
        rows: which of the file's records these are: all, but those whose target is invalid, where that is no error.
        records: how many the file has.
    """

    features: Float32[np.ndarray, "n d"]
    targets: Targets
    silo: list[str]
    user: list[str]
    rows: Int64[np.ndarray, "n"]
    records: int


def tables(
    schema: str | Path,
    files: Sequence[str | Path],
    *,
    test: str | Path | None = None,
    test_share: float = TEST_SHARE,
    seed: int = 0,
) -> Population:
    """Read tables by a public schema, CSV, Parquet or Excel: see :func:`read_tables`.

    Args:
        schema: the schema's TOML file (``fedveil schema`` drafts one).
        files: one file for each silo, named after it, or any files with a silo column.
        test: a PUBLIC table to test on; None holds out some of the records instead.
        test_share: the probability with which each record is held out; another than the usual one is refused beside
            ``test``.
        seed: for the hold-out.

    Raises:
        ConfigError: one file where a list of them is needed.
        DataError: a table that does not fit the schema; names file, record and column.
    """
    if isinstance(files, str | Path):
        raise ConfigError(f"tables: files is a list, [{str(files)!r}], one a silo or with a silo column")
    test_share, seed = plain(test_share), whole_argument("tables: seed", seed)
    schema_file = as_path(schema, "tables: schema").absolute()
    source = TableSource(
        schema_file=schema_file,
        schema=read_content(schema_file, DataError),
        files=tuple(as_path(one, "tables: files").absolute() for one in files),
        test_file=None if test is None else as_path(test, "tables: test").absolute(),
        test_share=test_share,
        seed=seed,
    )
    read = read_tables(
        read_schema(schema_file), source.files, test=source.test_file, test_share=test_share, seed=seed
    )
    return replace(read, source=source)


def read_tables(
    schema: Schema,
    files: Sequence[str] | Sequence[Path],
    *,
    test: str | Path | None = None,
    test_share: float = TEST_SHARE,
    seed: int = 0,
) -> Population:
    """Read tables into a population.

    Args:
        schema: what the columns are.
        files: CSV, Parquet or Excel files; without a silo column each is a silo, named by the file's stem.
        test: a table for testing; its user and silo columns are not read. None holds records out of the
            training tables.
        test_share: probability with which each record is held out where there is no test table, between 0 and 1.
        seed: of the hold-out.

    Returns:
        The population. Users are numbered by the sorted union of their ids over all files, silos by name in
        the order of the schema's ``silos``, else sorted. A silo is one that is declared, or has a file, or, where
        there is a silo column and nothing is declared, has a record; it may hold none.

    Raises:
        ConfigError: no file, two files of one name, a share outside (0, 1), or beside a test table.
        DataError: a file that cannot be read or lacks a column (named, with those it has); a value that does not fit
            the schema, by file, record and column; more users than ``n_users``; a test table without a record, or that
            is one of the files.

    Guarantees:
        Nothing about the private records enters another user's: scaling and categories are the schema's, and whether
        a record is held out, and what its user's batches are seeded by, depends on that user's id and records alone.
        Taking a user's records away is never refused, down to tables that are a header alone.
    """
    files = [as_path(one, "read_tables: files") for one in files]
    test = None if test is None else as_path(test, "read_tables: test")
    check_files(schema, files)
    check_share("tables", test_share, test)
    parts = [_read_part(schema, path) for path in files]
    features = np.concatenate([part.features for part in parts])
    targets = np.concatenate([part.targets for part in parts])
    users, user = index_names([who for part in parts for who in part.user])
    key = keys_of(users)[user]
    if len(users) > schema.n_users:
        raise DataError(
            f"n_users is {schema.n_users} in the schema, but more users have records; it is the public number of "
            "all users and must not be below the number present"
        )
    silo_names, silo = silo_numbers(schema, files, [where for part in parts for where in part.silo])
    notes = [
        "Features are scaled and encoded by the schema's bounds and categories: nothing else is fitted on records.",
        AS_TEXT,
        invalid_cells_notice(schema.bins_invalid),
    ]
    if test is not None:
        kept, tested, test_rows = np.ones(len(features), dtype=np.bool_), read_test(schema, test), None
        check_public(files, test)
        refuse_training_records(features, user, tested[0], lambda row: f"{test} (data.table.test_file) has")
        declared = f"The test table is the declared file {test.name}; no guarantee covers its records."
        notes += [declared, OF_PUBLIC_TESTS]
    else:
        marked = held_out(user, silo, key, test_share, seed)
        starts = np.cumsum([0, *(part.records for part in parts)])
        rows = np.concatenate([start + part.rows for start, part in zip(starts, parts, strict=False)])
        kept, tested, test_rows = ~marked, (features[marked], targets[marked]), rows[marked]
        notes.append(
            f"A share of {test_share} of the records, drawn at random, is held out for testing: a user may have "
            "records on both sides."
        )
    if schema.silo is not None and schema.silos is None:
        notes.append(
            "The silos are those that have records: their names and their number are taken from the tables, and no "
            "guarantee covers that. Declare silos in the schema."
        )
    classes = schema.target.classes if isinstance(schema.target, Label) else None
    return Population(
        name="tables",
        train=Records(
            features=features[kept], targets=targets[kept], silo=silo[kept], user=user[kept], key=key[kept]
        ),
        test_features=tested[0],
        test_targets=tested[1],
        test_rows=test_rows,
        public_test=test is not None,
        n_users=schema.n_users,
        silo_names=silo_names,
        task=TASKS[schema.target.kind],
        n_classes=None if classes is None else len(classes),
        classes=classes or (),
        notes=tuple(notes),
    )


def read_own(
    schema: Schema, path: Path, *, silo: int, name: str, users: Sequence[str] | None
) -> tuple[Records, Int64[np.ndarray, "n"]]:
    """Read the table of one silo of a federation, where nobody sees the tables of all; return also the records' rows.

    Args:
        schema: what the columns are.
        path: the silo's own file.
        silo: the silo's number.
        name: the silo's name; where the schema has a silo column, every record must carry it.
        users: all users' ids, in the order of their numbers, as the silos agreed on it among themselves. None: the
            ids are the numbers, from 0.

    Raises:
        DataError: as :func:`read_tables`; a user without a number, or a record of another silo, named by record.
    """
    part = _read_part(schema, path)
    if schema.silo is not None:
        check_own(schema, path, part.rows, part.silo, name)
    place = own_numbers(schema, path, part.rows, part.user, users)
    present, at = index_names(part.user)
    records = Records(
        features=part.features,
        targets=part.targets,
        silo=np.full(len(place), silo, dtype=np.int32),
        user=place,
        key=keys_of(present)[at],
    )
    return records, part.rows


def held_out(
    user: Int32[np.ndarray, "n"],
    silo: Int32[np.ndarray, "n"],
    key: Int64[np.ndarray, "n"],
    share: float,
    seed: int,
) -> Bool[np.ndarray, "n"]:
    """Mark the records of tables that are held out for testing, as :func:`holdout_by_user` does in every silo.

    A record's place is that among its user's records in its silo, so that the silo finds it in its own table.

    Args:
        user: (n,) whose record it is.
        silo: (n,) who holds it.
        key: (n,) a word that names the user.
        share: probability of each record.
        seed: of the experiment.
    """
    owner = (user.astype(np.int64) << 32) | silo
    return holdout_by_user(owner, key, share, ExperimentRandomness(seed).integer("tables", "test"))


def check_own(
    schema: Schema, path: Path, rows: Int64[np.ndarray, "n"], silos: Sequence[str], name: str
) -> None:
    """Return if all records of a file are of one silo.

    Raises:
        DataError: names the first record that is not.
    """
    assert schema.silo is not None
    own = without_fraction(name, schema.format.decimal)
    _refuse_first(path, schema.silo, rows[[where != own for where in silos]], f"is not of silo '{name}'")


def own_numbers(
    schema: Schema,
    path: Path,
    rows: Int64[np.ndarray, "n"],
    ids: Sequence[str],
    users: Sequence[str] | None,
) -> Int32[np.ndarray, "n"]:
    """Return the numbers of the users of a silo's records.

    Args:
        schema: how many there are.
        path: the silo's own file.
        rows: (n,) which of the file's records these are.
        ids: of their users.
        users: all users' ids, in the order of their numbers; None: the ids are the numbers, from 0.

    Raises:
        DataError: a list that is none of n_users, or a user without a number, named by record.
    """
    known = range(schema.n_users) if users is None else users
    number = {without_fraction(str(who), schema.format.decimal): place for place, who in enumerate(known)}
    if len(number) != len(known) or len(number) > schema.n_users:
        raise DataError(
            f"{len(known)} users are listed, {len(number)} of them different; the schema has {schema.n_users}, "
            "and each is listed once"
        )
    place = np.array([number.get(who, -1) for who in ids], dtype=np.int32)
    problem = (
        f"the user is no whole number below {schema.n_users}, and the schema names no list of users' ids (users)"
        if users is None
        else "the user is not listed"
    )
    _refuse_first(path, schema.user, rows[place < 0], problem)
    return place


def read_test(schema: Schema, path: Path) -> tuple[Float32[np.ndarray, "n d"], Targets]:
    """Read features and targets of a public test table; its user and silo columns are not read.

    Raises:
        DataError: as :func:`read_tables`.
    """
    part = _read_part(schema, path, tested=True)
    return part.features, part.targets


def read_features_by_schema(schema: Schema, path: Path) -> Float32[np.ndarray, "n width"]:
    """Read the features of a table alone, encoded as for training; no other column is read.

    Raises:
        DataError: as :func:`read_tables`.
    """
    columns = tuple(schema.features)
    reader = TableReader.by_schema(
        schema, path, columns, tolerant=schema.bins_invalid, binned=schema.bins_invalid
    )
    return np.concatenate([reader.encode(name, feature) for name, feature in schema.features.items()], axis=1)


def read_number_columns(path: Path, columns: Sequence[str] | None) -> Float32[np.ndarray, "n width"]:
    """Read columns of numbers as they are, in this order (None: all, in theirs).

    Raises:
        DataError: as :func:`read_tables`; a number that is missing.
    """
    table = open_table(path, columns)
    reader = TableReader(path, table, MISSING_VALUES)
    return np.stack([reader.number(name) for name in columns or table.column_names], axis=1)


def _refuse_first(path: Path, column: str, wrong: Int64[np.ndarray, "k"], problem: str) -> None:
    """Raise the error of the first wrong record of a file, if any."""
    if len(wrong):
        raise DataError(
            f"{path}, record {int(wrong[0]) + 1} (the header not counted), column '{column}': {problem}"
        )


def check_files(schema: Schema, files: Sequence[Path]) -> None:
    """Refuse no files at all, one that is named twice, and two that would be one silo.

    Raises:
        ConfigError: says what would be right.
    """
    if not files:
        raise ConfigError("no table is named; give one file per silo, or one with a silo column")
    stems = [path.stem for path in files]
    twice = [stem for stem in stems if stems.count(stem) > 1]
    if schema.silo is None and twice:
        raise ConfigError(
            f"two files would both be silo '{twice[0]}'; without a silo column each file names a silo"
        )
    real = [path.resolve() for path in files]
    again = [path for path, at in zip(files, real, strict=True) if real.count(at) > 1]
    if again:
        raise ConfigError(f"{again[0]}: the table is named twice, so that its records would count twice")


def check_public(files: Sequence[Path], test: Path) -> None:
    """Refuse a public test table that is one of the training tables, by another name or as a copy too.

    Raises:
        DataError: names both, and says what would be right.
    """
    for path in files:
        with reading(path, DataError):
            same = path.samefile(test) or (
                path.stat().st_size == test.stat().st_size and _digest(path) == _digest(test)
            )
        if same:
            raise DataError(
                f"{test}: data.table.test_file (test, in Python) is also in data.table.files, as {path}; its records "
                "are protected, and a test table counts as public: name a table of other, public people, or leave it "
                "out for test_share"
            )


def _digest(path: Path) -> bytes:
    with path.open("rb") as stream:
        return file_digest(stream, "sha256").digest()


def _read_part(schema: Schema, path: Path, tested: bool = False) -> _Part:
    """Read one file; ``tested`` leaves user and silo out."""
    columns = (*schema.target_columns, *schema.features) if tested else schema.columns
    reader = TableReader.by_schema(
        schema, path, columns, tolerant=schema.bins_invalid, binned=schema.bins_invalid
    )
    if tested and reader.n_records == 0:
        raise DataError(f"{path} has no record; a test table needs at least one")
    features = [reader.encode(column, feature) for column, feature in schema.features.items()]
    if tested:
        silo, user = [""] * reader.n_records, [""] * reader.n_records
    else:
        user = reader.identities(schema.user)
        silo = reader.identities(schema.silo) if schema.silo is not None else [path.stem] * reader.n_records
    targets = reader.targets(schema)
    rows = np.flatnonzero(~reader.invalid(*schema.target_columns))
    return _Part(
        features=np.concatenate(features, axis=1)[rows],
        targets=targets[rows],
        silo=[silo[row] for row in rows],
        user=[user[row] for row in rows],
        rows=rows,
        records=reader.n_records,
    )


def silo_numbers(
    schema: Schema, files: Sequence[Path], names: list[str]
) -> tuple[tuple[str, ...], Int32[np.ndarray, "n"]]:
    """Silo names and the silo number of every record; a file that is a silo's is one without a record too."""
    known = sorted({path.stem for path in files} if schema.silo is None else set(names))
    silos = tuple(known) if schema.silos is None else schema.silos
    decimal = schema.format.decimal
    plain = silos if schema.silo is None else [without_fraction(silo, decimal) for silo in silos]
    number = {silo: place for place, silo in enumerate(plain)}
    if len(number) < len(silos):
        raise DataError("silos: the schema lists a silo twice")
    for silo in known:
        if silo not in number:
            raise DataError(f"silo '{silo}' is not among the silos of the schema: {', '.join(silos)}")
    return silos, np.array([number[name] for name in names], dtype=np.int32)
