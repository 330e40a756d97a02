"""A draft finds a survival target, says of every column what it is, and what helps where it is nothing."""

from pathlib import Path

import pandas as pd
import pytest

from fedveil.data.draft import draft_schema
from fedveil.data.schema import Amount, Category, Label, Schema, Survival, read_schema
from fedveil.data.tables import read_own


def drafted(folder: Path, header: str, line: str, **how: str) -> tuple[str, Schema]:
    """Draft from 40 records, whose cells are expressions of the record's number i."""
    cells = line.split("|")
    lines = [",".join(str(eval(cell, {"i": i})) for cell in cells) for i in range(40)]
    path = folder / "sample.csv"
    path.write_text("\n".join([header, *lines]) + "\n")
    text = draft_schema(path, **how)
    (folder / "schema.toml").write_text(text)
    return text, read_schema(folder / "schema.toml")


@pytest.mark.parametrize(
    ("time", "event", "cell"),
    [
        ("time", "cens", "i % 2"),
        ("time", "event", "i % 3 % 2"),
        ("T", "E", "i % 2"),
        ("futime", "fustat", "i % 2"),
        ("OS_MONTHS", "OS_STATUS", "i % 2"),
        ("survival_days", "death", "i % 2 == 1"),
        ("FollowUpDays", "censored", "float(i % 2)"),
        ("duration", "Died", "str(i % 2 == 1).upper()"),
        ("weeks", "arrest", "i % 2 if i else ''"),
    ],
)
def test_a_time_and_its_event_are_a_survival_target(time: str, event: str, cell: str, tmp_path: Path) -> None:
    text, schema = drafted(
        tmp_path, f"patient,age,{time},{event},sex", f"'p%d' % i|20 + i|i * 7 % 40 + .5|{cell}|'fm'[i % 2]"
    )
    assert schema.target == Survival(kind="survival", time=time, event=event)
    assert "age" in schema.features
    assert time not in schema.features
    assert event not in schema.features
    assert f'event = "{event}" # a guess: 1 must be the event and 0 a censored record' in text
    assert ("the other way round" in text) == event.startswith("cens")
    if "''" not in cell:
        path = tmp_path / "sample.csv"
        ids = [f"p{i}" for i in range(40)]
        read, _ = read_own(schema, path, silo=0, name="sample", users=ids)
        assert set(read.targets[:, 0].tolist()) == {0.0, 1.0}


@pytest.mark.parametrize(
    ("header", "line", "column"),
    [
        ("user,time,event,label", "i|i|i % 2|i % 3 % 2", "label"),  # a label that is named so comes first
        ("user,age_years,died", "i|20 + i|i % 2", "died"),
        ("user,day,died", "i|i % 2|i % 2", "died"),  # two values are no time
        ("user,time,died", "i|i - 5|i % 2", "died"),  # a time is not below 0
        ("user,time,alive", "i|i|i % 2", "alive"),  # 1 is not the event
        ("user,sex,died", "i|'fm'[i % 2]|i % 3 % 2", "died"),
    ],
)
def test_other_columns_are_none(header: str, line: str, column: str, tmp_path: Path) -> None:
    _, schema = drafted(tmp_path, header + ",x", line + "|i * 3 % 11")
    assert schema.target.kind == "label"
    assert schema.target_columns == (column,)


def test_a_label_that_is_asked_for_is_the_target(tmp_path: Path) -> None:
    _, schema = drafted(tmp_path, "user,time,event,x", "i|i|i % 2|i * 3 % 11", label="event")
    assert schema.target_columns == ("event",)
    assert "time" not in schema.features


@pytest.mark.parametrize("cell", ["i % 2 + 1", "('dead', 'alive')[i % 2]"])
def test_an_event_that_no_schema_can_declare_is_said_so(cell: str, tmp_path: Path) -> None:
    text, schema = drafted(tmp_path, "user,x,time,status", f"i|i * 3 % 11|i|{cell}")
    assert schema.target_columns == ("status",)
    assert "# survival, with time and status? Write the event as 0 and 1 in the tables first" in text


@pytest.mark.parametrize("mark", ["inf", "-inf", "Infinity", "1e999"])
def test_an_infinity_is_named_as_a_mark(mark: str, tmp_path: Path) -> None:
    cell = f"'{mark}' if i == 3 else i / 7"
    text, _ = drafted(tmp_path, "user,ratio,x,sick", f"i|{cell}|i % 9|i % 2")
    assert f"# ratio: left out, a number but for '{mark}': name these in missing_values" in text
    text, _ = drafted(tmp_path, "user,x,ratio", f"i|i % 9|{cell}", label="ratio")
    assert f"kind = \"number\" # a number but for '{mark}'" in text


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_an_infinity_that_is_named_is_missing(suffix: str, tmp_path: Path) -> None:
    frame = pd.DataFrame({"user": [0, 1, 2], "ratio": [0.5, float("inf"), 1.0], "sick": [0, 1, 1]})
    path = tmp_path / f"north.{suffix}"
    frame.to_csv(path, index=False) if suffix == "csv" else frame.to_parquet(path)
    schema = Schema.model_validate(
        {
            "n_users": 3,
            "user": "user",
            "missing_values": ["", "inf"],
            "target": {"kind": "label", "column": "sick", "classes": ["0", "1"]},
            "features": {"ratio": {"kind": "number", "lower": 0, "upper": 1, "missing": "indicator"}},
        }
    )
    read, _ = read_own(schema, path, silo=0, name="north", users=None)
    assert read.features.tolist() == [[0, 0], [0, 1], [1, 0]]


def test_whole_numbers_are_drafted_as_such(tmp_path: Path) -> None:
    _, schema = drafted(
        tmp_path, "user,smokes,sick,x", "i|float(i % 2) if i % 5 else ''|float(i % 3 % 2)|i % 9", label="sick"
    )
    assert schema.features["smokes"] == Category(kind="category", categories=("0", "1"), missing="zero")
    assert schema.target.classes == ("0", "1")  # type: ignore[union-attr]


def test_a_draft_says_where_two_formats_of_dates_fit(tmp_path: Path) -> None:
    text, _ = drafted(
        tmp_path,
        "user,seen,born,sick",
        "i|'0%d/0%d/2020' % (i % 9 + 1, i % 7 + 1)|'%02d/03/1980' % (i % 28 + 1)|i % 2",
    )
    assert text.count("a guess: all cells of the sample are dates as %m/%d/%Y too") == 1
    assert "seen = {" in text


def test_few_numbers_may_be_counts(tmp_path: Path) -> None:
    text, schema = drafted(tmp_path, "user,age,visits", "i|20 + i|i % 12", label="visits")
    assert schema.target == Label(
        kind="label", column="visits", classes=tuple(map(str, range(12)))
    )  # in the order of numbers, not of texts
    assert "may be amounts" in text
    assert "# If visits is an amount and no class" in text
    assert "kind = 'number', count = true, lower = 0," in text
    text, _ = drafted(tmp_path, "user,age,sick", "i|20 + i|i % 2", label="sick")
    assert "amount" not in text


def test_no_bound_of_a_target_is_taken_from_the_sample(tmp_path: Path) -> None:
    text, schema = drafted(tmp_path, "user,age,cost", "i|20 + i|i * 7 + .5", label="cost")
    assert schema.target == Amount(kind="number", column="cost")
    assert "# newton and [evaluation] need the least and the largest value that the domain allows" in text
    assert "\n# lower = ...\n# upper = ...\n" in text
    assert "count" not in text
    text, _ = drafted(tmp_path, "user,age,visits", "i|20 + i|i", label="visits")
    assert "# count = true, for a count 0, 1, 2, ..." in text
