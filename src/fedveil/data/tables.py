"""Population from CSV, Parquet or Excel tables, read by a public schema.

Either each silo has its own file, whose stem is the silo's name, or the files have a silo column. Errors count
records from 1, without the header, and repeat no value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import file_digest
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32, Int32, Int64, Shaped

from fedveil.arguments import explain_arguments
from fedveil.config_keys import plain, whole_argument
from fedveil.data.cell_values import without_fraction
from fedveil.data.column_files import (
    GrowingColumn,
    column_folder,
    folder_beside,
    select_records,
    take_values,
)
from fedveil.data.identities import AS_TEXT, Numbering, keys_of
from fedveil.data.memory_tables import MemoryTable, TableFile, declared_path
from fedveil.data.records import Population, Records, TableSource, Targets, Task
from fedveil.data.schema import (
    MISSING_VALUES,
    OF_PUBLIC_TESTS,
    Label,
    Schema,
    invalid_cells_notice,
    parse_schema,
)
from fedveil.data.splits import TEST_SHARE, check_share, holdout_by_user, refuse_training_records
from fedveil.data.table_file import open_table
from fedveil.data.table_reader import TableReader
from fedveil.errors import ConfigError, DataError, did_you_mean
from fedveil.files import as_path, read_content, reading
from fedveil.randomness import ExperimentRandomness
from fedveil.sanitize import sanitize

TASKS: dict[str, Task] = {
    "label": "classification",
    "labels": "multi-label",
    "number": "regression",
    "numbers": "multi-output",
    "survival": "survival",
}


@dataclass(frozen=True, kw_only=True, eq=False)
class _Rows:
    """Records of some files (n may be 0).

    Attributes:
        features: (n, d) encoded features.
        targets: labels, numbers, (event, time) or (event, time, entry).
        silos: distinct silo ids, sorted.
        silo: (n,) place of each record's silo id among them.
        users: distinct user ids, sorted.
        user: (n,) place of each record's user id among them.
        rows: (n,) rows of these records in the files, one after the other. Records with an invalid target are left out
            if the schema bins invalid cells.
    """

    features: Float32[np.ndarray, "n d"]
    targets: Targets
    silos: list[str]
    silo: Int32[np.ndarray, "n"]
    users: list[str]
    user: Int32[np.ndarray, "n"]
    rows: Int64[np.ndarray, "n"]


@explain_arguments
def tables(
    schema: str | Path,
    files: Any,
    *,
    test: Any = None,
    test_share: float = TEST_SHARE,
    seed: int = 0,
) -> Population:
    """Read CSV, Parquet or Excel tables by a public schema into a population; see :func:`read_tables`.

    Args:
        schema: the schema's TOML file (``fedveil schema`` drafts one).
        files: one file for each silo, named after it, or any files with a silo column. Or tables in memory by name,
            one for each silo or with a silo column: a frame (pandas, polars, Arrow), or a mapping from names of
            columns to arrays, as in ``{"north": {"patient": ids, "age": ages, "sick": sick}}``. A file in such a
            mapping has its own stem as key.
        test: a PUBLIC table to test on, a file or a table in memory; None holds out some of the records instead.
        test_share: probability with which each record is held out. With ``test``, only the default is accepted.
        seed: seed of the hold-out.

    Raises:
        ConfigError: ``files`` is one path instead of a list of paths, or a file has another key than its stem.
        DataError: a table does not fit the schema; the error names file, record and column.
    """
    if isinstance(files, str | Path):
        raise ConfigError(f"tables: files is a list, [{str(files)!r}], one a silo or with a silo column")
    if not isinstance(files, Sequence | Mapping):
        raise ConfigError(
            "tables: files is a list of files, or tables in memory by name, {'north': frame}, not "
            f"{type(files).__name__}"
        )
    test_share, seed = plain(test_share), whole_argument("tables: seed", seed)
    schema_file = as_path(schema, "tables: schema").absolute()
    content = read_content(schema_file, DataError)
    parsed = parse_schema(content, schema_file)
    named_files = files.items() if isinstance(files, Mapping) else [(None, file) for file in files]
    table_files = [_read_source(file, "tables: files", name, parsed) for name, file in named_files]
    test = None if test is None else _read_source(test, "tables: test", "test", parsed)
    source = TableSource(
        schema_file=schema_file,
        schema=content,
        files=tuple(table_files),
        test_file=test,
        test_share=test_share,
        seed=seed,
    )
    return read_source(source)


def _read_source(source: Any, where: str, name: str | None, schema: Schema) -> TableFile:
    """Return a table that was handed over: a file, or a table in memory, which has a name."""
    if name is None or isinstance(source, str | Path):
        path = as_path(source, where).absolute()
        if where == "tables: files" and name is not None and name != path.stem:
            raise ConfigError(
                f"tables: files: '{sanitize(str(name))}' is the name of {sanitize(path.name)}, but a file names its "
                f"silo itself: '{sanitize(path.stem)}'. Give the key '{sanitize(path.stem)}', rename the file, or "
                "hand over its columns (pandas.read_csv)"
            )
        return path
    from fedveil.data.record_columns import memory_table  # loads PyTorch

    return memory_table(name, source, schema.format_of(name))


def read_source(source: TableSource) -> Population:
    """Read the population of a source, by the schema whose content the source keeps.

    Raises:
        FedveilError: as :func:`read_tables`.
    """
    schema = parse_schema(source.schema, source.schema_file)
    read = read_tables(
        schema, source.files, test=source.test_file, test_share=source.test_share, seed=source.seed
    )
    return replace(read, source=source)


def files_of(population: Population, declared: Sequence[Path]) -> Sequence[TableFile]:
    """Return the tables of a population: those in memory, if it was read from such; else the declared files."""
    return declared if population.source is None else population.source.files


def read_tables(
    schema: Schema,
    files: Sequence[str] | Sequence[Path] | Sequence[TableFile],
    *,
    test: str | TableFile | None = None,
    test_share: float = TEST_SHARE,
    seed: int = 0,
) -> Population:
    """Read tables into a population.

    Args:
        schema: declaration of the columns.
        files: CSV, Parquet or Excel files. Without a silo column, each file is a silo, named by the file's stem.
        test: a PUBLIC table for testing; its user and silo columns are not read. None holds out records of the
            training tables.
        test_share: probability in (0, 1) with which each record is held out if ``test`` is None. With ``test``, only
            the default is accepted.
        seed: seed of the hold-out.

    Returns:
        The population. Users are numbered by the sorted union of their ids over all files. Silos are numbered in the
        order of the schema's ``silos``, else sorted by name. If the schema lists no silos, the silos are the files,
        or the names that occur in the silo column. A silo may hold no record.

    Raises:
        ConfigError: no file; a table that is named twice, or two files of one stem without a silo column; a share
            outside (0, 1), or another than the default with ``test``.
        DataError: a file cannot be read or lacks a column (the error lists the columns that it has); a value does not
            fit the schema (the error names file, record and column); more users have records than ``n_users``; the
            test table has no record, is one of the files, or shares more records with them than chance explains.

    Guarantees:
        The private records of one user do not affect another user's records: scaling and categories come from the
        schema. Whether a record is held out, and the seed of its user's batches, depend only on that user's id and
        records. The removal of a user's records is never refused, even if the tables are then a header alone.
    """
    files = [_as_table(file, "read_tables: files") for file in files]
    test = None if test is None else _as_table(test, "read_tables: test")
    check_files(schema, files)
    _check_formats(schema, [*files, *([] if test is None else [test])])
    check_share("tables", test_share, test)
    folder = column_folder()
    table = _read_rows(schema, files, folder)
    users, user = table.users, table.user
    key = take_values(keys_of(users), user, folder)
    if len(users) > schema.n_users:
        raise DataError(
            f"n_users is {schema.n_users} in the schema, but more users have records; it is the public number of "
            "all users and must not be below the number present"
        )
    silo_names, numbers = silo_numbers(
        schema,
        files,
        table.silos,
        lambda name: int(table.rows[np.argmax(table.silo == table.silos.index(name))]),
    )
    silo = take_values(numbers, table.silo, folder)
    notes = [
        "Features are scaled and encoded by the schema's bounds and categories: nothing else is fitted on records.",
        AS_TEXT,
        invalid_cells_notice(schema.bins_invalid),
    ]
    records = Records(features=table.features, targets=table.targets, silo=silo, user=user, key=key)
    if test is not None:
        (test_features, test_targets), test_rows = read_test(schema, test), None
        check_public(files, test)  # first, because its error names the file that was given twice
        refuse_training_records(
            records.features, user, test_features, lambda row: f"{test} (data.table.test_file) has"
        )
        declared = f"The test table is the declared file {test.name}; no guarantee covers its records."
        notes += [declared, OF_PUBLIC_TESTS]
    else:
        # `table.rows` counts all records of all files, also those that were left out for an invalid target.
        records, test_features, test_targets, test_rows = hold_out(records, table.rows, test_share, seed)
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
        train=records,
        test_features=test_features,
        test_targets=test_targets,
        test_rows=test_rows,
        public_test=test is not None,
        n_users=schema.n_users,
        schema=schema,
        target_range=schema.target_range,
        silo_names=silo_names,
        task=TASKS[schema.target.kind],
        n_classes=None if classes is None else len(classes),
        classes=classes or (),
        target_names=schema.target_names,
        notes=tuple(notes),
    )


def read_own(
    schema: Schema, path: Path, *, silo: int, name: str, users: Sequence[str] | None
) -> tuple[Records, Int64[np.ndarray, "n"]]:
    """Read the table of one silo of a federation; return its records and their rows in the file.

    Args:
        schema: declaration of the columns.
        path: the silo's file.
        silo: number of the silo.
        name: name of the silo. If the schema has a silo column, every record must carry this name.
        users: ids of all users in the order of their numbers, as agreed among the silos. None: the ids are the
            numbers, from 0.

    Raises:
        DataError: as :func:`read_tables`; a user has no number, or a record belongs to another silo. The error names
            the record.
    """
    table = _read_rows(schema, [path], column_folder())
    if schema.silo is not None:
        check_own(schema, path, table.rows, table.silos, table.silo, name)
    folder = folder_beside(table.features)
    records = Records(
        features=table.features,
        targets=table.targets,
        silo=take_values(np.full(len(table.silos), silo, dtype=np.int32), table.silo, folder),
        user=own_numbers(schema, path, table.rows, table.users, table.user, users),
        key=take_values(keys_of(table.users), table.user, folder),
    )
    return records, table.rows


def hold_out(
    records: Records, rows: Int64[np.ndarray, "n"], share: float, seed: int
) -> tuple[Records, Shaped[np.ndarray, "t d"], Shaped[np.ndarray, "t *target"], Int64[np.ndarray, "t"]]:
    """Divide the records of tables into those to train on and those to test on, by :func:`held_out`.

    Args:
        records: the n records of the tables, whose users have keys.
        rows: (n,) row of each record in its tables.
        share: probability with which each record is held out.
        seed: seed of the experiment.

    Returns:
        The records to train on; features and targets of the t records that are held out; and their rows.
    """
    assert records.key is not None, "tables name their users"
    folder = folder_beside(records.features)
    marked = held_out(records.user, records.silo, records.key, share, seed, folder)
    # Inverted through take_values, which handles some records at a time.
    unmarked = take_values(np.array([True, False]), marked.view(np.int8), folder)
    train = Records(
        features=select_records(records.features, unmarked, folder),
        targets=select_records(records.targets, unmarked, folder),
        silo=select_records(records.silo, unmarked, folder),
        user=select_records(records.user, unmarked, folder),
        key=select_records(records.key, unmarked, folder),
    )
    features, targets, chosen = (
        select_records(column, marked, folder) for column in (records.features, records.targets, rows)
    )
    return train, features, targets, chosen


def held_out(
    user: Int32[np.ndarray, "n"],
    silo: Int32[np.ndarray, "n"],
    key: Int64[np.ndarray, "n"],
    share: float,
    seed: int,
    folder: Path | None = None,
) -> Bool[np.ndarray, "n"]:
    """Mark the records that are held out for testing, within every (user, silo) pair.

    The rule is :func:`holdout_by_user`.

    The choice depends on a record's place among its user's records in its silo. So a silo of a federation computes
    the same choice from its own table as a program that reads all tables.

    Args:
        user: (n,) user number of each record.
        silo: (n,) silo number of each record.
        key: (n,) seed key of each record's user.
        share: probability with which each record is held out.
        seed: seed of the experiment.
        folder: folder of a file that keeps the marks; None keeps them in memory.

    Returns:
        (n,) True for a record that is held out.
    """
    drawn = ExperimentRandomness(seed).integer("tables", "test")
    return holdout_by_user(user, key, share, drawn, silo=silo, folder=folder)


def check_own(
    schema: Schema,
    path: Path,
    rows: Int64[np.ndarray, "n"],
    silos: Sequence[str],
    silo: Int32[np.ndarray, "n"],
    name: str,
) -> None:
    """Check that all records of a file belong to the silo ``name``.

    Args:
        schema: schema with a silo column.
        path: file that errors name.
        rows: (n,) rows of the records in the file.
        silos: distinct silo ids.
        silo: (n,) place of each record's silo id among them.
        name: expected silo.

    Raises:
        DataError: a record belongs to another silo; the error names the first one.
    """
    assert schema.silo is not None
    own = without_fraction(name, schema.format.marks)
    wrong = np.array([silo != own for silo in silos], dtype=np.bool_)
    if wrong.any():
        _refuse_first(path, schema.silo, rows[wrong[silo]], f"is not of silo '{name}'")


def own_numbers(
    schema: Schema,
    path: Path,
    rows: Int64[np.ndarray, "n"],
    ids: Sequence[str],
    user: Int32[np.ndarray, "n"],
    users: Sequence[str] | None,
) -> Int32[np.ndarray, "n"]:
    """Return the (n,) user numbers of the records of one silo.

    Args:
        schema: schema that declares |U|.
        path: the silo's file, which errors name.
        rows: (n,) rows of the records in the file.
        ids: distinct user ids of the records.
        user: (n,) place of each record's user id among them.
        users: ids of all users in the order of their numbers. None: the ids are the numbers, from 0.

    Raises:
        DataError: ``users`` repeats an id or has more than |U| entries, or a user has no number. The error names the
            record.
    """
    listed = range(schema.n_users) if users is None else users
    number = {
        without_fraction(str(user_id), schema.format.marks): index for index, user_id in enumerate(listed)
    }
    if len(number) != len(listed) or len(number) > schema.n_users:
        raise DataError(
            f"{len(listed)} users are listed, {len(number)} of them different; the schema has {schema.n_users}, "
            "and each is listed once"
        )
    numbers = np.array([number.get(user_id, -1) for user_id in ids], dtype=np.int32)
    user_numbers = take_values(numbers, user, folder_beside(user))
    problem = (
        f"the user is no whole number below {schema.n_users}, and the schema names no list of users' ids (users)"
        if users is None
        else "the user is not listed"
    )
    if (numbers < 0).any():
        _refuse_first(path, schema.user, rows[user_numbers < 0], problem)
    return user_numbers


def read_test(schema: Schema, path: TableFile) -> tuple[Float32[np.ndarray, "n d"], Targets]:
    """Read features and targets of a public test table, without its user and silo columns.

    Raises:
        DataError: as :func:`read_tables`.
    """
    table = _read_rows(schema, [path], None, tested=True)
    if not len(table.features):
        raise DataError(f"{path} has no record; a test table needs at least one")
    return table.features, table.targets


def read_features_by_schema(schema: Schema, path: Path) -> Float32[np.ndarray, "n width"]:
    """Read the feature columns of a table, encoded as for training.

    Raises:
        DataError: as :func:`read_tables`.
    """
    columns = tuple(schema.features)
    reader = TableReader.by_schema(
        schema, path, columns, tolerant=schema.bins_invalid, binned=schema.bins_invalid
    )
    return np.concatenate([reader.encode(name, feature) for name, feature in schema.features.items()], axis=1)


def read_number_columns(path: Path, columns: Sequence[str] | None) -> Float32[np.ndarray, "n width"]:
    """Read numeric columns without scaling, in the order of ``columns`` (None: all columns of the file).

    Raises:
        DataError: as :func:`read_tables`; a number is missing.
    """
    table = open_table(path, columns)
    reader = TableReader(path, table, MISSING_VALUES)
    return np.stack([reader.number(name) for name in columns or table.column_names], axis=1)


def _refuse_first(path: Path, column: str, wrong_rows: Int64[np.ndarray, "k"], problem: str) -> None:
    """Raise a DataError that names the first wrong record of a file, if any."""
    if len(wrong_rows):
        raise DataError(
            f"{path}, record {int(wrong_rows[0]) + 1} (the header not counted), column '{column}': {problem}"
        )


def _as_table(file: str | TableFile, where: str) -> TableFile:
    return file if isinstance(file, MemoryTable) else as_path(file, where)


def check_files(schema: Schema, files: Sequence[TableFile]) -> None:
    """Refuse an empty list of files, a file that is named twice, and two files that would be one silo.

    Raises:
        ConfigError: the list of files violates one of these rules.
    """
    if not files:
        raise ConfigError("no table is named; give one file per silo, or one with a silo column")
    stems = [path.stem for path in files]
    twice = [stem for stem in stems if stems.count(stem) > 1]
    if schema.silo is None and twice:
        raise ConfigError(
            f"two files would both be silo '{twice[0]}'; without a silo column each file names a silo"
        )
    # A symbolic link is the same table under another name.
    real = [declared_path(path).resolve() for path in files]
    again = [path for path, resolved in zip(files, real, strict=True) if real.count(resolved) > 1]
    if again:
        raise ConfigError(f"{again[0]}: the table is named twice, so that its records would count twice")


def _check_formats(schema: Schema, files: Sequence[TableFile]) -> None:
    """Refuse a declared format of a file that is not read: its name may be misspelt."""
    names = [path.name for path in files]
    for name in schema.formats or ():
        if name not in names:
            raise DataError(
                f"formats: '{sanitize(name)}' is none of the tables: {sanitize(', '.join(names))}"
                f"{sanitize(did_you_mean(name, names))}"
            )


def check_public(files: Sequence[TableFile], test: TableFile) -> None:
    """Refuse a public test table that is one of the training tables, or a byte-identical copy of one.

    Raises:
        DataError: the test table is a training table; the error names both.
    """
    for path in files:
        if _is_same(path, test):
            raise DataError(
                f"{test}: data.table.test_file (test, in Python) is also in data.table.files, as {path}; its records "
                "are protected, and a test table counts as public: name a table of other, public people, or leave it "
                "out for test_share"
            )


def _is_same(path: TableFile, test: TableFile) -> bool:
    """Return whether two tables are one file, or equal byte for byte; or one table in memory, or equal."""
    if isinstance(path, MemoryTable) or isinstance(test, MemoryTable):
        return (
            isinstance(path, MemoryTable) and isinstance(test, MemoryTable) and path.table.equals(test.table)
        )
    with reading(path, DataError):
        # Compare the sizes first: the digest reads both files.
        return path.samefile(test) or (
            path.stat().st_size == test.stat().st_size and _digest(path) == _digest(test)
        )


def _digest(path: Path) -> bytes:
    with path.open("rb") as stream:
        return file_digest(stream, "sha256").digest()


def _read_rows(
    schema: Schema, files: Sequence[TableFile], folder: Path | None, tested: bool = False
) -> _Rows:
    """Read files, some records at a time.

    Args:
        schema: declaration of the columns.
        files: the tables.
        folder: where features and targets are kept in files; None keeps them in memory.
        tested: whether this is a test table, whose user and silo columns are not read.
    """
    columns = (*schema.target_columns, *schema.features) if tested else schema.columns
    records = 0
    with (
        GrowingColumn(folder) as features,
        GrowingColumn(folder) as targets,
        GrowingColumn(folder) as rows,
        Numbering(folder) as users,
        Numbering(folder) as silos,
    ):
        for path in files:
            for reader in TableReader.pieces_by_schema(
                schema, path, columns, tolerant=schema.bins_invalid, binned=schema.bins_invalid
            ):
                n = reader.n_records
                encoded = [reader.encode(column, feature) for column, feature in schema.features.items()]
                user = [""] * n if tested else reader.identities(schema.user)
                silo = [path.stem] * n if tested or schema.silo is None else reader.identities(schema.silo)
                values = reader.targets(schema)
                # After `targets`, which marks the invalid cells. Without bins no cell is invalid here: it has raised
                # an error.
                valid = np.flatnonzero(~reader.invalid(*schema.target_columns))
                features.append(np.concatenate(encoded, axis=1)[valid])
                targets.append(values[valid])
                users.add(user[row] for row in valid)
                silos.add(silo[row] for row in valid)
                rows.append(records + valid)
                records += n
        return _Rows(
            features=features.array(),
            targets=targets.array(),
            silos=sorted(silos.places),
            silo=silos.sorted_places(),
            users=sorted(users.places),
            user=users.sorted_places(),
            rows=rows.array(),
        )


def silo_numbers(
    schema: Schema, files: Sequence[TableFile], names: list[str], first: Callable[[str], int]
) -> tuple[tuple[str, ...], Int32[np.ndarray, "k"]]:
    """Return the names of all silos, and the number of each of these silo ids.

    Args:
        schema: schema that may list the silos.
        files: the tables; without a silo column, each file is a silo even if it has no record.
        names: (k,) silo ids.
        first: returns the row of a record with this silo id, among all records of all files.

    Raises:
        DataError: the schema lists a silo twice, or does not list a silo that occurs. The error repeats no cell.
    """
    present = sorted({path.stem for path in files} if schema.silo is None else set(names))
    silos = tuple(present) if schema.silos is None else schema.silos
    # Ids in the silo column are read without a fraction of zeros, so declared names lose it as well.
    plain = silos if schema.silo is None else [without_fraction(silo, schema.format.marks) for silo in silos]
    number = {silo: index for index, silo in enumerate(plain)}
    if len(number) < len(silos):
        raise DataError("silos: the schema lists a silo twice")
    for silo in present:
        if silo not in number:
            # A name of a file is no secret; a cell of the column may be one, where the columns are not as declared.
            where = (
                f"silo '{silo}' (by its file)"
                if schema.silo is None
                else f"record {first(silo) + 1} of all files together (headers not counted), column '{schema.silo}': "
                "its silo"
            )
            raise DataError(f"{where} is not among the silos of the schema: {', '.join(silos)}")
    return silos, np.array([number[name] for name in names], dtype=np.int32)
