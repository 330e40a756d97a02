"""Files in several formats are the same records, and each file's format is declared, detected and checked by itself."""

import hashlib
from datetime import date, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedveil as fv
from fedveil.data.cell_values import NumberMarks, number_of, without_fraction
from fedveil.data.columns import read_columns
from fedveil.data.draft import draft_schema, guess_format
from fedveil.data.schema import FileFormat, Format, Schema, parse_schema, read_schema
from fedveil.data.table_file import open_table
from fedveil.data.tables import read_features_by_schema, read_own, read_tables
from fedveil.errors import ConfigError, DataError
from fedveil.federation.hosts.folders import SiloSettings
from fedveil.federation.silo_data import PartyTable
from fedveil.run.config.release_document import DeclaredTables

SCHEMA = """
n_users = 60
user = "patient"

[target]
kind = "label"
column = "sick"
classes = ["no", "yes"]

[features.cost]
kind = "number"
lower = 0
upper = 5000
missing = "middle"

[features.ward]
kind = "category"
categories = ["Köln", "Süd"]
"""
FORMATS = """
[formats."south.csv"]
delimiter = ";"
decimal = ","
thousands = "."
encoding = "cp1252"

[formats."east.csv"]
delimiter = "\\t"
decimal = ","
thousands = " "
encoding = "utf-16"
quote = "'"
missing_values = ["-"]
"""
ROWS = tuple(
    (f"p{i}", None if i == 7 else 103.25 * i + 1, ("Köln", "Süd")[i % 2], ("no", "yes")[i // 2 % 2])
    for i in range(20)
)
WRITTEN = {  # delimiter, encoding, text of a number, text of a missing cell, a text cell
    "north": (",", "utf-8", "{:.2f}".format, "NA", "{}".format),
    "south": (";", "cp1252", lambda x: f"{x:,.2f}".translate(str.maketrans(",.", ".,")), "", '"{}"'.format),
    "east": (
        "\t",
        "utf-16",
        lambda x: f"{x:,.2f}".replace(",", "\u202f").replace(".", ","),
        "-",
        "'{}'".format,
    ),
}


def write(folder: Path, silo: str) -> Path:
    between, encoding, number, missing, text = WRITTEN[silo]
    lines = [between.join(("patient", "cost", "ward", "sick"))]
    lines += [
        between.join((who, missing if cost is None else number(cost), text(ward), text(sick)))
        for who, cost, ward, sick in ROWS
    ]
    path = folder / f"{silo}.csv"
    path.write_bytes("\n".join(lines).encode(encoding))
    return path


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    return [write(tmp_path, silo) for silo in WRITTEN]


def schema(more: str = FORMATS) -> Schema:
    return parse_schema((SCHEMA + more).encode(), "schema.toml")


def test_three_files_in_three_formats_hold_the_same_records(files: list[Path]) -> None:
    found = read_tables(schema(), files, test_share=1e-12).train
    cost = np.array([2500.0 if one is None else one for _, one, *_ in ROWS])
    expected = np.column_stack((cost / 2500 - 1, [i % 2 == 0 for i in range(20)], [i % 2 for i in range(20)]))
    for silo in range(3):
        mine = found.silo == silo
        assert found.features[mine].tolist() == expected.astype(np.float32).tolist()
        assert found.targets[mine].tolist() == [i // 2 % 2 for i in range(20)]
        assert found.user[mine].tolist() == found.user[found.silo == 0].tolist()
    columns = read_columns(schema(), files, ["cost"])
    assert (
        columns.columns["cost"].state.reshape(3, 20)[:, 7].tolist() == [columns.columns["cost"].state[7]] * 3
    )


def test_files_in_three_formats_train_without_conversion(files: list[Path], tmp_path: Path) -> None:
    (tmp_path / "schema.toml").write_text(SCHEMA + FORMATS, encoding="utf-8")
    people = fv.tables(tmp_path / "schema.toml", files, test_share=0.5)
    result = fv.train(torch.nn.Linear(3, 2), people, epsilon=5, rounds=2, folder=tmp_path / "runs")
    assert result.statement.epsilon <= 5.0
    assert len(result.predict(np.zeros((2, 3), dtype=np.float32))) == 2


def test_a_draft_of_several_samples_writes_the_formats_that_differ(files: list[Path], tmp_path: Path) -> None:
    assert guess_format(files[0]) == Format()
    assert guess_format(files[1]) == Format(delimiter=";", decimal=",", thousands=".", encoding="cp1252")
    assert guess_format(files[2]) == Format(
        delimiter="\t", decimal=",", thousands=" ", encoding="utf-16", quote="'"
    )
    drafted = tmp_path / "schema.toml"
    drafted.write_text(draft_schema(files), encoding="utf-8")
    found = read_schema(drafted)
    assert sorted(found.formats or ()) == ["east.csv", "south.csv"]
    assert found.format == Format()
    assert len(read_tables(found, files, test_share=1e-12).train) == 3 * len(ROWS)
    alike = [files[1], files[1].with_name("west.csv")]
    alike[1].write_bytes(files[1].read_bytes())
    found = parse_schema(draft_schema(alike).encode(), "alike")
    assert (found.formats, found.format.thousands) == (None, ".")


def test_a_draft_declares_a_column_that_a_sample_lacks_as_absent(tmp_path: Path) -> None:
    north, south = tmp_path / "north.csv", tmp_path / "south.csv"
    north.write_text("patient,age,crp,sick\n" + "".join(f"n{i},{i},{i}.5,{i % 2}\n" for i in range(9)))
    south.write_text("patient;age;sick\n" + "".join(f"s{i};{i};{i % 2}\n" for i in range(9)))
    found = parse_schema(draft_schema([north, south]).encode(), "drafted")
    assert found.may_lack == {"crp"}
    assert len(read_tables(found, [north, south], test_share=1e-12).train) == 18
    south.write_text("patient;age\n1;2\n")
    with pytest.raises(DataError, match="lacks column 'sick'"):
        draft_schema([north, south], label="sick")


@pytest.mark.parametrize(
    ("cell", "decimal", "thousands", "value"),
    [
        ("1.234,5", ",", ".", 1234.5),
        ("-1.234.567", ",", ".", -1234567),
        ("1.23", ",", ".", None),
        ("1.2345", ",", ".", None),
        ("0.123", ",", ".", None),
        ("1.234", ",", None, None),
        ("1,234.5", ".", ",", 1234.5),
        ("12,34", ".", ",", None),
        ("1,5", ".", ",", None),
        ("1'234", ".", "'", 1234),
        ("1\u00a0234\u202f567,8", ",", " ", 1234567.8),
        ("1 23", ",", " ", None),
        ("1234,5", ",", ".", 1234.5),
    ],
)
def test_thousands_marks_stand_between_groups_of_three(
    cell: str, decimal: str, thousands: str | None, value: float | None, tmp_path: Path
) -> None:
    assert number_of(NumberMarks(decimal, thousands).pointed(cell)) == value
    path = tmp_path / "north.csv"
    path.write_text(f"patient|cost|ward|sick\n1|{cell}|Süd|no\n", encoding="utf-8")
    how = schema("").model_copy(
        update={"format": Format(delimiter="|", decimal=decimal, thousands=thousands)}  # type: ignore[arg-type]
    )
    if value is None:
        with pytest.raises(
            DataError, match=r"north.csv, record 1 .*column 'cost': the value is no number \(decimal"
        ):
            read_tables(how, [path], test_share=1e-12)
    else:
        found = read_tables(how, [path], test_share=1e-12).train.features[0, 0]
        assert found == np.float32(min(max(value, 0), 5000) / 2500 - 1)


@given(st.integers(-(10**12), 10**12), st.sampled_from([".", "'", " "]))
def test_an_id_with_thousands_marks_is_the_number(number: int, between: str) -> None:
    written = f"{number:,}".replace(",", between)
    assert without_fraction(written, NumberMarks(",", between)) == str(number)
    assert without_fraction(f"0{abs(number)}", NumberMarks(",", between)) == f"0{abs(number)}"


def test_missing_numbers_are_missing_under_every_decimal_mark() -> None:
    declared = (
        'missing_values = ["-9.5", "x.y"]\n' + SCHEMA + '[formats."t.csv"]\ndelimiter = ";"\ndecimal = ","\n'
    )
    found = parse_schema(declared.encode(), "schema")
    assert found.missing_values_of("t.csv") == ("-9.5", "x.y", "-9,5")
    assert found.missing_values_of("other.csv") == ("-9.5", "x.y")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            '[formats."a/t.csv"]\ndecimal = "."',
            "formats: 'a/t.csv' is no name of a file; leave out its folder",
        ),
        (
            '[formats."t.csv"]\nmissing_values = ["Süd"]',
            "column 'ward': 'Süd' is declared, and is one of missing",
        ),
        ('[formats."t.csv"]\ndecimal = ","', "delimiter and decimal are the same character"),
        ('[formats."t.csv"]\nseparator = ","', "formats.t.csv.separator: no such key"),
    ],
)
def test_a_format_of_a_file_that_cannot_be_is_refused_by_key(more: str, message: str) -> None:
    with pytest.raises(DataError) as refused:
        schema(more)
    assert message in str(refused.value)


def test_a_format_of_a_file_that_is_not_read_is_refused(files: list[Path]) -> None:
    with pytest.raises(
        DataError, match=r"formats: 'nroth.csv' is none of the tables: .*did you mean 'north.csv'\?"
    ):
        read_tables(schema('[formats."nroth.csv"]\ndelimiter = ";"'), files)


def test_a_file_without_quotation_marks_keeps_them_in_its_cells(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text('a,b\n5" pipe,"x\ny",1\n')
    assert open_table(path, None, Format(quote=""))["a"].to_pylist() == ['5" pipe', 'y"']
    with pytest.raises(DataError, match=r"line 2: .*quotation mark"):
        open_table(path, None)


def test_the_format_of_a_silo_is_its_own_affair(files: list[Path], tmp_path: Path) -> None:
    agreed = tmp_path / "schema.toml"
    agreed.write_text(SCHEMA.replace("user =", f'users = "{"0" * 64}"\nuser ='), encoding="utf-8")
    digest, declared = hashlib.sha256(agreed.read_bytes()).digest(), read_schema(agreed)
    table = DeclaredTables(schema=declared, silos=("north", "south", "east"))
    listed = tuple(who for who, *_ in ROWS)
    own = schema().formats or {}
    held = [
        PartyTable(declared=table, silo=at, path=path, file_format=own.get(path.name), users=listed)
        for at, path in enumerate(files)
    ]
    shares = [one.load_population() for one in held]
    for one in shares:
        assert one.train.features.tolist() == shares[0].train.features.tolist()
        assert one.schema == declared  # nothing of the format reaches what is agreed
    assert [one.columns(["cost"]).columns["cost"].values.tolist() for one in held[1:]] == [
        held[0].columns(["cost"]).columns["cost"].values.tolist()
    ] * 2
    assert hashlib.sha256(agreed.read_bytes()).digest() == digest
    with pytest.raises(
        DataError, match=r"format of .*south.csv: .*'Süd' is declared, and is one of missing_values"
    ):
        PartyTable(
            declared=table,
            silo=1,
            path=files[1],
            file_format=FileFormat(missing_values=("Süd",)),
            users=listed,
        ).load_population()
    with pytest.raises(DataError):
        read_own(declared, files[1], silo=1, name="south", users=listed)


def test_a_silo_declares_its_format_in_its_settings(tmp_path: Path) -> None:
    path = tmp_path / "silo.toml"
    path.write_text(
        'name = "south"\ncoordinator = "c:1"\n[format]\ndelimiter = ";"\nmissing_values = ["-"]\n'
    )
    settings = SiloSettings.read(path)
    assert settings.format == FileFormat(delimiter=";", missing_values=("-",))
    settings.write(path)
    assert SiloSettings.read(path) == settings
    path.write_text('name = "south"\ncoordinator = "c:1"\n[format]\ndelimiter = "."\n')
    with pytest.raises(ConfigError, match="delimiter and decimal are the same"):
        SiloSettings.read(path)


DATED = """
n_users = 5
user = "patient"
features.born = { kind = "date", lower = 1900-01-01, upper = 2030-01-01, format = "%Y-%m-%d" }

[target]
kind = "survival"
time = "follow_up"
start = "diagnosed"
end = "last_seen"
unit = "days"
event = "died"

[formats."south.csv"]
delimiter = ";"
date = "%d.%m.%Y"

[formats."east.csv"]
date = "%d/%m/%Y"
"""


def dated(folder: Path, east: str = "%d/%m/%Y") -> list[Path]:
    """Write the same two records, with dates in another format in every file."""
    days = [
        (datetime(1960, 2, 3), datetime(2020, 1, 31), datetime(2021, 1, 2)),
        (datetime(1910, 1, 1), datetime(2020, 5, 6), datetime(2020, 6, 7)),
    ]
    paths = []
    for name, between, written in (
        ("north", ",", "%Y-%m-%d"),
        ("south", ";", "%d.%m.%Y"),
        ("east", ",", east),
    ):
        lines = [between.join(("patient", "born", "diagnosed", "last_seen", "died"))]
        for number, row in enumerate(days):
            cells = [one.strftime(written) for one in row]
            lines.append(between.join((f"p{number}", *cells, str(number))))
        paths.append(folder / f"{name}.csv")
        paths[-1].write_text("\n".join(lines), encoding="utf-8")
    return paths


def test_dates_in_another_format_in_every_file_are_the_same_days(tmp_path: Path) -> None:
    declared = parse_schema(DATED.encode(), "schema.toml")
    found = read_tables(declared, dated(tmp_path), test_share=1e-12).train
    for silo in (1, 2):
        assert found.features[found.silo == silo].tolist() == found.features[found.silo == 0].tolist()
        assert found.targets[found.silo == silo].tolist() == found.targets[found.silo == 0].tolist()
    assert sorted(found.targets[found.silo == 0][:, 1].tolist()) == [32.0, 337.0]


def test_a_date_in_another_format_than_its_file_has_is_refused_with_that_format(tmp_path: Path) -> None:
    declared = parse_schema(DATED.encode(), "schema.toml")
    with pytest.raises(DataError, match=r"east\.csv.*no date as %d/%m/%Y"):
        read_tables(declared, dated(tmp_path, east="%Y-%m-%d"), test_share=1e-12)
    with pytest.raises(
        DataError, match=r"formats\.east\.csv.*format must have a day %d, a month %m and a year %Y"
    ):
        parse_schema(DATED.replace("%d/%m/%Y", "%d/%m").encode(), "schema.toml")


def test_dates_that_every_file_writes_in_its_own_way_are_drafted_by_file(tmp_path: Path) -> None:
    """Before, the column was left out as neither a number, a date, nor one of few categories."""
    written = {"north": "{:%Y-%m-%d}", "south": "{:%d.%m.%Y}", "west": "{:%m/%d/%Y}"}
    days = [date(2019, 1, 1) + timedelta(days=9 * row) for row in range(60)]
    for name, form in written.items():
        rows = [f"{row % 20};{form.format(day)};{row % 2}" for row, day in enumerate(days)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["patient;admitted;sick", *rows]) + "\n")
    paths = [tmp_path / f"{name}.csv" for name in written]
    (tmp_path / "schema.toml").write_text(draft_schema(paths))
    schema = read_schema(tmp_path / "schema.toml")
    formats = [schema.format_of(path).date for path in paths]
    assert formats == [None, "%d.%m.%Y", "%m/%d/%Y"]
    assert schema.features["admitted"].kind == "date"
    encoded = [read_features_by_schema(schema, path) for path in paths]
    assert all(np.array_equal(values, encoded[0]) for values in encoded)
