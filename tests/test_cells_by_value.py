"""One person's cell changes how a program writes a whole column, and not how anybody else's cells are read."""

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pa_parquet
import pytest

from fedveil.data.cell_values import DeclaredValues, NumberMarks, day_of, without_fraction
from fedveil.data.columns import read_columns
from fedveil.data.data_report import data_report
from fedveil.data.schema import Schema
from fedveil.data.tables import read_own, read_tables
from fedveil.errors import DataError

PEOPLE = 12
FEATURES = {
    "smokes": {"kind": "category", "categories": ["0", "1"], "missing": "zero"},
    "grade": {
        "kind": "category",
        "categories": ["one", "two"],
        "also": {"1": "one", "2": "two"},
        "missing": "zero",
    },
    "code": {"kind": "category", "categories": ["0.5", "10", "1000"], "missing": "zero"},
    "born": {"kind": "date", "lower": "1900-01-01", "upper": "2100-01-01", "missing": "middle"},
    "seen": {
        "kind": "date",
        "lower": "1900-01-01",
        "upper": "2100-01-01",
        "format": "%Y%m%d",
        "missing": "middle",
    },
}


def schema(**changes: object) -> Schema:
    fields: dict[str, object] = {
        "n_users": 50,
        "user": "p",
        "missing_values": ["", "-9"],
        "target": {"kind": "label", "column": "y", "classes": ["0", "1"]},
        "features": FEATURES,
    }
    return Schema.model_validate(fields | changes)


def frame() -> pd.DataFrame:
    place = np.arange(PEOPLE)
    return pd.DataFrame(
        {
            "p": place + 100,
            "y": place % 2,
            "smokes": np.where(place == 5, -9, place % 3 % 2),
            "grade": place % 2 + 1,
            "code": np.where(place % 2, 10, 1000),
            "born": pd.to_datetime([f"19{50 + one}-03-0{one % 9 + 1}" for one in place]),
            "seen": 20200101 + place,
        }
    )


def with_another(column: str, cell: object) -> pd.DataFrame:
    """Return the frame with one more person, whose cell pandas cannot write without changing the whole column."""
    own = {
        "p": 7,
        "y": 1,
        "smokes": 0,
        "grade": 1,
        "code": 10,
        "born": pd.Timestamp("1990-01-01"),
        "seen": 20200101,
    }
    return pd.concat([frame(), pd.DataFrame([own | {column: cell}])], ignore_index=True)


@pytest.mark.parametrize("rule", ["error", "bin"])
@pytest.mark.parametrize(
    ("column", "cell"),
    [
        ("smokes", np.nan),
        ("grade", np.nan),
        ("code", 0.5),
        ("born", pd.Timestamp("1990-01-01 13:30:00.25")),
        ("born", pd.Timestamp("1990-01-01 13:30")),
        ("seen", np.nan),
    ],
)
def test_one_cell_changes_nobody_elses_features(rule: str, column: str, cell: object, tmp_path: Path) -> None:
    how, read = schema(invalid=rule), []
    for name, table in (("without", frame()), ("with", with_another(column, cell))):
        path = tmp_path / name / "north.csv"
        path.parent.mkdir()
        table.to_csv(path, index=False)
        read.append(
            read_own(how, path, silo=0, name="north", users=[str(one) for one in [*range(100, 112), 7]])[0]
        )
    without, beside = read
    assert len(beside) == PEOPLE + 1
    assert np.array_equal(beside.features[:PEOPLE], without.features)
    assert np.array_equal(beside.targets[:PEOPLE], without.targets)


def test_a_missing_target_is_its_own_records_alone(tmp_path: Path) -> None:
    path = tmp_path / "north.csv"
    with_another("y", np.nan).to_csv(path, index=False)
    users = [str(one) for one in [*range(100, 112), 7]]
    read, rows = read_own(schema(invalid="bin"), path, silo=0, name="north", users=users)
    assert rows.tolist() == list(range(PEOPLE))
    assert read.targets.tolist() == frame()["y"].tolist()
    with pytest.raises(DataError, match=r"record 13 .* column 'y': the label is missing"):
        read_own(schema(), path, silo=0, name="north", users=users)


def test_counts_are_those_of_the_values(tmp_path: Path) -> None:
    path = tmp_path / "north.csv"
    with_another("smokes", np.nan).to_csv(path, index=False)
    smokes = read_columns(schema(), [path], ["smokes"]).places("smokes")
    assert np.bincount(smokes.state, minlength=3).tolist() == [11, 2, 0]  # -9.0 stands for none, as -9 does
    assert np.bincount(smokes.values[smokes.state == 0]).tolist() == [7, 4]


@pytest.mark.parametrize("target", ["label", "survival"])
@pytest.mark.parametrize("written", ["0 1", "0.0 1.0", "False True", "FALSE TRUE", "0e0 1E+00", "-0.0 1."])
def test_targets_are_matched_by_value(target: str, written: str, tmp_path: Path) -> None:
    declared = {"kind": "label", "column": "y", "classes": ["0", "1"]}
    if target == "survival":
        declared = {"kind": "survival", "time": "t", "event": "y"}
    how = schema(target=declared, features={"x": {"kind": "number", "lower": 0, "upper": 40}})
    path = tmp_path / "north.csv"
    no, yes = written.split()
    path.write_text("p,t,x,y\n" + "".join(f"{i},{i},{i},{yes if i % 4 == 0 else no}\n" for i in range(40)))
    found, _ = read_own(how, path, silo=0, name="north", users=None)
    events = found.targets[:, 0] if target == "survival" else found.targets
    assert events.tolist() == [float(i % 4 == 0) for i in range(40)]
    assert not [one for one in data_report(how, [path]).findings if one.bears_on == "run"]
    if target == "survival":
        counted = read_columns(how, [path], ["y"]).places("y")
        assert counted.values.tolist() == events.tolist()
        assert not counted.state.any()


@pytest.mark.parametrize("kind", [pa.float64(), pa.float32(), pa.decimal128(21, 2), pa.int64()])
def test_numbers_of_parquet_are_matched_by_value(kind: pa.DataType, tmp_path: Path) -> None:
    large = 1 << 23 if kind == pa.float32() else 123456789012
    how = schema(features={"x": {"kind": "category", "categories": ["1", str(large)]}})
    cells = pa.array([1, large]).cast(kind)
    pa_parquet.write_table(pa.table({"p": [0, 1], "y": [0, 1], "x": cells}), tmp_path / "north.parquet")
    found, _ = read_own(how, tmp_path / "north.parquet", silo=0, name="north", users=None)
    assert found.features.tolist() == [[1, 0], [0, 1]]


@pytest.mark.parametrize(
    ("declared", "cell", "place"),
    [
        (["0", "1"], "1.0", 1),
        (["0", "1"], "+1", 1),
        (["0", "1"], "True", 1),
        (["1", "2"], "True", None),  # 1 and 2 are no truth values
        (["0", "1"], "1.5", None),
        (["0", "1"], "01", None),  # a code
        (["01", "10"], "1.0", None),
        (["01", "10"], "10.0", 1),
        (["1", "2"], "1,0", None),
        (["1", "1.0"], "1.00", None),  # nothing says which
        (["1.0", "2.0"], "1", 0),
        (["1.1", "2.0"], "1.10", None),  # of whole numbers alone: 1.10 may be another version
        (["False", "True"], "1", 1),
        (["False", "True"], "FALSE", 0),
        (["no", "yes"], "True", None),
        (["0", "1", "True", "False"], "TRUE", None),
        (["100000"], "1e+05", 0),
        (["9007199254740992"], "9007199254740992.0", None),  # 9007199254740993 may be meant
        (["9007199254740991"], "9007199254740991.0", 0),
        (["1"], "1e999", None),
        (["1"], "1e99999999999999999999", None),
        (["1"], "0x1", None),
        (["1"], "1_0", None),
        (["1"], "\u0661", None),
        (["0"], "", None),
        (["0"], "1e-400", None),
    ],
)
def test_the_rule_of_declared_values(declared: list[str], cell: str, place: int | None) -> None:
    assert DeclaredValues({one: at for at, one in enumerate(declared)}).place(cell) == place


def test_a_decimal_comma_is_the_mark_here_too() -> None:
    find = DeclaredValues({"0": 0, "1": 1}, NumberMarks(",")).place
    assert (find("1,0"), find("1.0"), find("1")) == (1, None, 1)
    assert without_fraction("7,0", NumberMarks(",")) == "7"
    assert without_fraction("7.0", NumberMarks(",")) == "7.0"


def test_a_declared_text_is_read_as_itself_before_any_value(tmp_path: Path) -> None:
    how = schema(features={"x": {"kind": "category", "categories": ["1", "1.0", "2"], "unknown": "zero"}})
    path = tmp_path / "north.csv"
    path.write_text("p,y,x\n0,0,1\n1,0,1.0\n2,0,1.00\n3,1,2.0\n")
    found, _ = read_own(how, path, silo=0, name="north", users=None)
    assert found.features.tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 0], [0, 0, 1]]


def test_a_declared_number_that_stands_for_none_is_refused_in_any_writing() -> None:
    with pytest.raises(ValueError, match=r"'-9\.0' is declared, and is one of missing_values"):
        schema(features={"x": {"kind": "category", "categories": ["-9.0", "1"]}})


# --- ids -----------------------------------------------------------------------------------------------------------


def test_a_person_with_a_fraction_of_zeros_in_one_silo_is_one_person(tmp_path: Path) -> None:
    """An id is matched by one rule, which looks at that id alone: everybody else is told apart as before."""
    how = schema(features={"x": {"kind": "number", "lower": 0, "upper": 9}})
    ids = {"north": ["7", "07", "8", "1E+03", "9.5"], "south": ["7.0", "07.0", "8.00", "1000", "9"]}
    for silo, those in ids.items():
        (tmp_path / f"{silo}.csv").write_text("p,y,x\n" + "".join(f"{one},0,1\n" for one in those))
    files = [tmp_path / "north.csv", tmp_path / "south.csv"]
    read = read_tables(how, files, test_share=1e-9).train
    assert len(np.unique(read.user)) == 8
    assert read.user[0] == read.user[5]
    assert read.user[2] == read.user[7]
    assert np.array_equal(read_columns(how, files, ["x"]).user, read.user)
    report = data_report(how, files)
    assert (report.people, report.in_several_silos) == (8, 2)
    assert [one.found for one in report.findings if "written" in one.found]  # 07, and 1E+03


@pytest.mark.parametrize("users", [None, [str(i) for i in range(5)], [f"{i}.0" for i in range(5)]])
def test_declared_ids_are_matched_by_value(users: list[str] | None, tmp_path: Path) -> None:
    how = schema(
        n_users=5, silo="h", silos=["1", "2"], features={"x": {"kind": "number", "lower": 0, "upper": 9}}
    )
    path = tmp_path / "a.csv"
    path.write_text("p,h,y,x\n" + "".join(f"{i}.0,2.0,1.0,3\n" for i in (4, 0, 2)))
    found, _ = read_own(how, path, silo=1, name="2", users=users)
    assert found.user.tolist() == [4, 0, 2]
    assert read_tables(how, [path], test_share=1e-9).train.silo.tolist() == [1, 1, 1]
    path.write_text("p,h,y,x\n04.0,2,1,3\n")
    with pytest.raises(DataError, match="the user is"):
        read_own(how, path, silo=1, name="2", users=users)
    with pytest.raises(DataError, match="the schema lists a silo twice"):
        read_tables(how.model_copy(update={"silos": ("2", "2.0")}), [path])


def test_an_id_that_stands_for_none_is_missing_in_any_writing(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("p,y,x\n1.0,0,1\n-9.0,0,1\n")
    how = schema(features={"x": {"kind": "number", "lower": 0, "upper": 9}})
    with pytest.raises(DataError, match=r"record 2 .* column 'p': the id is missing"):
        read_tables(how, [path])
    assert "records without an id: 1" in [one.found for one in data_report(how, [path]).findings]


# --- dates ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cell", "written", "day"),
    [
        ("01012020", "%d%m%Y", "2020-01-01"),
        ("1012020", "%d%m%Y", None),
        ("10012020", "%d%m%Y", "2020-01-10"),
        ("202011", "%Y%m%d", None),
        ("2020111", "%Y%m%d", None),
        ("20200111", "%Y%m%d", "2020-01-11"),
        ("1.112020", "%d.%m%Y", "2020-11-01"),
        ("1.12020", "%d.%m%Y", None),
        ("11 1.2020", "%d %m.%Y", "2020-01-11"),
        ("1.1.2020", "%d.%m.%Y", "2020-01-01"),
        ("1/1/2020", "%m/%d/%Y", "2020-01-01"),
        ("202001011", "%Y%m%d%H", None),
        ("2020010101", "%Y%m%d%H", "2020-01-01"),
        ("2020-1-1 1:2", "%Y-%m-%d %H:%M", "2020-01-01"),
        ("101.2020", "%d0%m.%Y", None),
        ("01001.2020", "%d0%m.%Y", "2020-01-01"),
        ("2020-01-31 00:00:00", "%Y-%m-%d", "2020-01-31"),
        ("2020-01-31T23:59", "%Y-%m-%d", "2020-01-31"),
        ("2020-01-31 24:00", "%Y-%m-%d", None),
        ("2020-01-31", "%Y-%m-%d %H:%M:%S", "2020-01-31"),
        ("2020-01-31 07:08:09.123", "%Y-%m-%d %H:%M:%S", "2020-01-31"),
        ("31.01.2020 07:08", "%d.%m.%Y", "2020-01-31"),
        ("2020-01-31 x", "%Y-%m-%d", None),
        ("2020-02-30", "%Y-%m-%d", None),
    ],
)
def test_a_text_is_of_the_one_day_that_it_fits(cell: str, written: str, day: str | None) -> None:
    found = day_of(cell, written)
    assert (None if found is None else str(np.datetime64(found, "D"))) == day


def test_every_day_is_read_back_in_every_format() -> None:
    days = [pd.Timestamp("1900-01-01") + pd.Timedelta(days=17 * i) for i in range(200)]
    for written in (
        "%d%m%Y",
        "%Y%m%d",
        "%m%d%Y",
        "%Y-%m-%d",
        "%d.%m.%Y",
        "%Y%d%m%H%M%S",
        "%A, %d %m %Y",
        "%d%%%m%%%Y",
    ):
        for one in days:
            assert day_of(one.strftime(written), written) == (one - pd.Timestamp("1970-01-01")).days
