"""Tables handed over in memory are read, counted, refined and evaluated exactly as the same tables in files."""

import csv
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import fedveil as fv
from fedveil.data.columns import State, read_columns
from fedveil.data.memory_tables import MemoryTable
from fedveil.data.schema import parse_schema
from fedveil.data.tables import read_tables
from fedveil.errors import ConfigError, DataError, RunFolderError

SCHEMA = """
n_users = 400
user = "patient"

[target]
kind = "label"
column = "sick"
classes = ["no", "yes"]

[features.age]
kind = "number"
lower = 0
upper = 1000
missing = "middle"

[features.ward]
kind = "category"
categories = ["a", "b"]

[features.seen]
kind = "date"
lower = 2020-01-01
upper = 2021-01-01
"""
WARDS, MISSING_WARD = 'categories = ["a", "b"]', '\nmissing = "indicator"'
SILOS = ("north", "south")
STATISTICS = {"silos": "uniform", "by": ["ward"], "release": {"age": {"show": ["count", "mean"]}}}


def columns_of(silo: int, people: int = 300) -> dict[str, list[Any]]:
    """Return the columns of one silo: ages of 20 to 80, of which the first is missing."""
    draw = np.random.default_rng(silo)
    age = draw.integers(20, 80, people)
    return {
        "patient": [f"p{at}" for at in range(people)],
        "age": [None, *map(float, age[1:])],
        "ward": ["ab"[at % 2] for at in range(people)],
        "seen": [date(2020, 1 + at % 12, 3) for at in range(people)],
        "sick": ["no" if one < 50 else "yes" for one in age],
    }


def in_memory(kind: str) -> dict[str, Any]:
    """Return the tables of all silos as objects of a kind."""
    made = {}
    for at, silo in enumerate(SILOS):
        columns = columns_of(at)
        if kind == "arrow":
            made[silo] = pa.table(columns)
        elif kind == "arrays":
            ages = np.array([np.nan if one is None else one for one in columns["age"]])
            made[silo] = columns | {"age": ages, "ward": np.array(columns["ward"])}
        else:
            frame = pytest.importorskip("pandas").DataFrame(columns)
            made[silo] = (
                frame if kind == "pandas" else frame.astype({"ward": "category", "seen": "datetime64[ns]"})
            )
    return made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "schema.toml").write_text(SCHEMA)
    for at, silo in enumerate(SILOS):
        columns = columns_of(at)
        with (tmp_path / f"{silo}.csv").open("w", newline="") as stream:
            csv.writer(stream).writerows([columns, *zip(*columns.values(), strict=True)])
    return tmp_path


def from_files(folder: Path, **options: Any) -> fv.Population:
    return fv.tables(folder / "schema.toml", [folder / f"{silo}.csv" for silo in SILOS], **options)


@pytest.mark.parametrize("kind", ["arrow", "arrays", "pandas", "typed pandas"])
def test_a_table_in_memory_is_read_as_the_same_table_in_a_file(folder: Path, kind: str) -> None:
    theirs = fv.tables(folder / "schema.toml", in_memory(kind), seed=3)
    ours = from_files(folder, seed=3)
    for key in ("features", "targets", "silo", "user", "key"):
        assert np.array_equal(getattr(ours.train, key), getattr(theirs.train, key)), key
    assert np.array_equal(ours.test_features, theirs.test_features)
    assert ours.test_rows is not None
    assert theirs.test_rows is not None
    assert ours.test_rows.tolist() == theirs.test_rows.tolist()
    assert (theirs.silo_names, theirs.notes) == (SILOS, ours.notes)


def test_a_cell_of_objects_never_decides_how_another_is_read(folder: Path) -> None:
    schema = parse_schema((folder / "schema.toml").read_bytes(), "schema")
    columns = columns_of(0, 3)
    mixed = columns | {"age": [30, "31.5", 32.0], "patient": [7, "p1", "007"]}
    people = fv.tables(folder / "schema.toml", {"north": mixed}, test_share=1e-12)
    ages = schema.features["age"].bounds[1] / 2 * (people.train.features[:, 0].astype(float) + 1)
    assert ages.tolist() == pytest.approx([30, 31.5, 32], abs=1e-4)
    assert sorted(people.train.user.tolist()) == [0, 1, 2]
    with pytest.raises(
        DataError, match=r"table 'north', record 1 .*column 'patient': ids are text or whole numbers"
    ):
        fv.tables(folder / "schema.toml", {"north": columns | {"patient": [7.5, "p1", "p2"]}})


class _Odd:
    """An object that is no number, text or date."""

    def __str__(self) -> str:
        return "odd"


class _Broken:
    """An object that neither compares nor has a text; what it raises quotes a record."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise KeyError("s3cret")

    def __str__(self) -> str:
        raise LookupError("s3cret")


ODD: list[Any] = [
    *(
        np.array([1, 2]),
        torch.ones(2),
        [1, 2],
        _Odd(),
        1j,
        b"30",
        "\ud800",
        "\U0001f600",
        date(2020, 1, 1),
    ),
    *(10**400, -(10**5000), Decimal("1e400"), float("inf"), np.float32("inf")),
]
MISSING: list[Any] = [
    None,
    "",
    float("nan"),
    np.float32("nan"),
    Decimal("NaN"),
    Decimal("sNaN"),
    np.datetime64("NaT"),
    _Broken(),
]


@pytest.mark.parametrize("place", range(len(ODD) + len(MISSING) + 2))
def test_no_object_in_a_cell_refuses_a_table_that_bins_invalid_cells(folder: Path, place: int) -> None:
    """Whatever stands in a cell, the other cells are read as they were, and a cell without a value is a missing one."""
    pandas = pytest.importorskip("pandas")
    missing = [*MISSING, pandas.NA, pandas.NaT]
    cell = [*ODD, *missing][place]
    ages = [np.float64(30), cell, np.float32(31.5), np.int8(32), Decimal("33.5")]
    columns = {
        "patient": np.array(["p0", "p1", np.str_("p2"), np.int64(3), 4.0], dtype=object),
        "age": pandas.Series(ages, dtype=object) if place % 2 else ages,
        "ward": ["a", "b", "a", "b", "a"],
        "seen": [date(2020, 1, 1)] * 5,
        "sick": ["no", "yes"] * 2 + ["no"],
    }
    (folder / "binned.toml").write_text(
        f'invalid = "bin"\n{SCHEMA}\n[format]\ndelimiter = ";"\ndecimal = ","\n'
    )
    found = fv.tables(folder / "binned.toml", {"north": columns}, test_share=1e-12).train.features
    assert len(found) == 5
    assert found[[0, 2, 3, 4], 0] == pytest.approx(np.array([30, 31.5, 32, 33.5]) / 500 - 1, abs=1e-6)
    is_invalid = place < len(ODD)
    assert found[1, 0] == 0
    assert found[:, 1].tolist() == [0, float(is_invalid), 0, 0, 0]


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.dictionary(pa.int32(), pa.binary())])
def test_bytes_that_are_no_text_make_their_own_cell_invalid(folder: Path, kind: pa.DataType) -> None:
    cells = [b"a", b"\xff", b" b", None]
    wards = pa.array(cells).dictionary_encode() if pa.types.is_dictionary(kind) else pa.array(cells, kind)
    columns = pa.table(columns_of(0, 4)).drop_columns("ward").append_column("ward", wards)
    for suffix in ("memory", "parquet"):
        given: Any = {"north": columns} if suffix == "memory" else [folder / "north.parquet"]
        pq.write_table(columns, folder / "north.parquet")
        (folder / "binned.toml").write_text(f'invalid = "bin"\n{SCHEMA.replace(WARDS, WARDS + MISSING_WARD)}')
        found = fv.tables(folder / "binned.toml", given, test_share=1e-12).train.features
        assert found[:, 2:6].tolist() == [[1, 0, 0, 0], [0, 0, 0, 1], [0, 1, 0, 0], [0, 0, 1, 0]]
        with pytest.raises(DataError, match=r"record 4 .*'ward': the value is missing"):
            fv.tables(folder / "schema.toml", given)
        schema = parse_schema((folder / "schema.toml").read_bytes(), "schema")
        read = [MemoryTable(name="north", table=columns)] if suffix == "memory" else given
        assert read_columns(schema, read, ["ward"]).places("ward").state.tolist() == [
            State.VALID,
            State.INVALID,
            State.VALID,
            State.MISSING,
        ]


def test_ids_are_the_same_people_whatever_type_of_text_their_column_has(folder: Path) -> None:
    people = pa.array(["7", "07", " 7", "p-1"])
    types = (pa.string(), pa.large_string(), pa.string_view())
    silos = {
        f"s{at}": pa.table(columns_of(at, 4)).set_column(0, "patient", people.cast(kind))
        for at, kind in enumerate(types)
    }
    found = fv.tables(folder / "schema.toml", silos, test_share=1e-12)
    assert sorted(found.train.user.tolist()) == [0] * 3 + [1] * 6 + [2] * 3


def test_statistics_of_a_table_in_memory_are_those_of_the_same_table_in_a_file(folder: Path) -> None:
    memory, files = fv.tables(folder / "schema.toml", in_memory("arrays")), from_files(folder)
    seeded = {"privacy": {"insecure_seed": 5}}
    ours, theirs = (
        fv.stats(people, STATISTICS, epsilon=50, folder=folder / name, settings=seeded).rows
        for name, people in (("memory", memory), ("files", files))
    )
    assert ours == theirs
    assert len(ours) > 2
    options: dict[str, Any] = {"family": "linear", "cut": 50, "silos": "uniform", "epsilon": 50}
    ours, theirs = (
        fv.infer(people, "age ~ ward", folder=folder / name, settings=seeded, **options).rows
        for name, people in (("memory", memory), ("files", files))
    )
    assert ours == theirs
    with pytest.raises(
        ConfigError, match=r"fedveil.stats: .*fedveil.tables\('schema.toml', \{'north': frame\}\)"
    ):
        fv.stats(
            fv.population(
                np.zeros((2, 1)), [0, 1], user=["a", "b"], silo=["n", "n"], n_users=9, task="regression"
            ),
            STATISTICS,
            epsilon=1,
        )


SETTINGS = {
    "preprocessing": {"bounds": ["age"], "impute": ["age"]},
    "evaluation": {},
    "privacy": {"insecure_seed": 5},
}


def trained(people: fv.Population, folder: Path) -> fv.Result:
    torch.manual_seed(0)
    return fv.train(
        torch.nn.Linear(4, 1),
        people,
        method=fv.uldp_avg_w(clip=0.5),
        epsilon=20,
        rounds=2,
        folder=folder,
        settings=SETTINGS,
    )


def test_preprocessing_and_evaluation_work_in_memory_as_with_files(folder: Path) -> None:
    ours = trained(from_files(folder), folder / "files")
    theirs = trained(fv.tables(folder / "schema.toml", in_memory("pandas")), folder / "memory")
    assert ours.evaluated is not None
    assert ours.metrics == theirs.metrics  # one insecure seed: the same noise
    refined = [(one.folder / "schema.toml").read_bytes() for one in (ours, theirs)]
    assert refined[0] == refined[1]
    schema = parse_schema(refined[0], "refined")
    lower, upper = schema.features["age"].bounds
    assert 0 < upper - lower < 500  # declared: 1,000
    features = read_tables(schema, [folder / "north.csv"], test_share=0.5).train.features[:3]
    assert np.array_equal(ours.predict(features), theirs.predict(features))
    for mine in ("model.safetensors", "preprocessing.json"):
        assert (ours.folder / mine).read_bytes() == (theirs.folder / mine).read_bytes()
    bundle = fv.load(theirs.save(folder / "bundle"))
    assert bundle.schema == schema  # the schema under which the model was trained, not the declared one


def test_a_run_in_memory_goes_on_with_the_same_tables_only(folder: Path) -> None:
    model = torch.nn.Linear(4, 1)
    people = fv.tables(folder / "schema.toml", in_memory("arrow"))
    result = fv.train(
        model,
        people,
        method=fv.uldp_avg_w(clip=0.5),
        epsilon=20,
        rounds=1,
        folder=folder / "runs",
        settings=SETTINGS,
    )
    again = fv.resume(result.folder, model, people)
    assert again.metrics == result.metrics
    other = folder / "other"
    other.mkdir()
    (other / "schema.toml").write_text(SCHEMA.replace("1000", "900"))
    with pytest.raises(RunFolderError, match="began with another schema"):
        fv.resume(result.folder, model, fv.tables(other / "schema.toml", in_memory("arrow")))


def test_a_file_in_a_mapping_has_its_stem_as_key(folder: Path) -> None:
    schema, files = folder / "schema.toml", {one.stem: one for one in sorted(folder.glob("*.csv"))}
    assert fv.tables(schema, files).silo_names == tuple(files)
    (name, other), path = list(files)[:2], next(iter(files.values()))
    # Exchanged keys would attribute each silo's records to the other one.
    for given in ({"ward": path}, {"ward": str(path)}, {other: path, name: files[other]}):
        with pytest.raises(ConfigError, match=rf"'{next(iter(given))}' is the name of {path.name}.*'{name}'"):
            fv.tables(schema, given)


def test_tables_in_memory_that_cannot_be_are_refused(folder: Path) -> None:
    schema, columns = folder / "schema.toml", columns_of(0, 4)
    wrong: list[tuple[Any, str]] = [
        ({"a/b": columns}, "'a/b' is no name of a table"),
        ({"north": [1, 2]}, "'north' is list; a frame is needed"),
        ({"north": columns | {"age": np.zeros((4, 2))}}, r"column 'age': ndarray is no column"),
        ({"north": columns | {"age": [1.0]}}, "its columns have different numbers of records"),
        (
            {"north": {key: one for key, one in columns.items() if key != "age"}},
            "table 'north' has no column 'age'",
        ),
        ({}, "no table is named"),
        (pa.table(columns), r"tables in memory by name, \{'north': frame\}, not Table"),
    ]
    for given, message in wrong:
        with pytest.raises((ConfigError, DataError), match=message):
            fv.tables(schema, given)
    with pytest.raises(DataError, match=r"is also in data\.table\.files"):
        fv.tables(schema, {"north": pa.table(columns)}, test=pa.table(columns))
    with pytest.raises(ConfigError, match=r"was handed over in memory, in Python; hand it over again"):
        read_columns(parse_schema(schema.read_bytes(), "schema"), [Path("session:/north.table")], ["age"])
    with pytest.raises(ConfigError, match=r"preprocessing\.pool changes the number of features"):
        fv.check(
            torch.nn.Linear(4, 1),
            from_files(folder),
            epsilon=1,
            settings={"preprocessing": {"pool": {"ward": 5}}},
        )
