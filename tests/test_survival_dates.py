"""Follow-up times from two columns of dates: the same targets as from numbers, drafted, and refused by their cause."""

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import fedveil as fv
from fedveil.data.columns import State, read_columns
from fedveil.data.data_report import read_whole
from fedveil.data.draft import draft_schema
from fedveil.data.schema import Schema, Survival, parse_schema
from fedveil.data.tables import read_tables
from fedveil.errors import DataError
from fedveil.run.config.release_document import InferenceDocument, ReleaseDocument, declared_tables
from fedveil.run.releases.requests import request_scope

DATED = """
n_users = 400
user = "p"
[target]
kind = "survival"
time = "followed"
start = "diagnosed"
end = "last_seen"
unit = "weeks"
format = "%d.%m.%Y"
event = "died"
entry = "registered"
[features.x]
kind = "number"
lower = -3
upper = 3
"""
NUMBERED = re.sub(r"(start|end|unit|format) = .*\n", "", DATED)
HEADER = "p,diagnosed,last_seen,registered,died,x"
GOOD = "a,01.03.2020,15.03.2020,08.03.2020,1,0.5"


def parsed(text: str) -> Schema:
    return parse_schema(text.encode(), "schema")


def written(folder: Path, *lines: str) -> Path:
    path = folder / "north.csv"
    path.write_text("\n".join((HEADER, *lines)) + "\n")
    return path


def drawn(n: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the same people with dates, and with weeks since the start."""
    rng = np.random.default_rng(7)
    start = pd.Timestamp("2015-01-30") + pd.to_timedelta(rng.integers(0, 1500, n), "D")
    days = rng.integers(2, 900, n)
    entry = rng.integers(0, days)
    both = pd.DataFrame({"p": np.arange(n), "died": rng.integers(0, 2, n), "x": rng.normal(size=n).round(3)})
    dates = {"diagnosed": start, "last_seen": start + pd.to_timedelta(days, "D")}
    dates |= {"registered": start + pd.to_timedelta(entry, "D")}
    return both.assign(**dates), both.assign(followed=days / 7, registered=entry / 7)


@pytest.mark.parametrize("kind", ["csv", "parquet", "frame"])
def test_times_between_dates_are_the_times_that_numbers_give(kind: str, tmp_path: Path) -> None:
    dates, numbers = drawn(300)
    (tmp_path / "dated.toml").write_text(DATED)
    (tmp_path / "numbered.toml").write_text(NUMBERED)
    found: object = {"north": dates}
    if kind == "csv":
        dates.to_csv(tmp_path / "north.csv", index=False, date_format="%d.%m.%Y")
        found = [tmp_path / "north.csv"]
    elif kind == "parquet":
        dates.to_parquet(tmp_path / "north.parquet")
        found = [tmp_path / "north.parquet"]
    read = fv.tables(tmp_path / "dated.toml", found).train
    wanted = fv.tables(tmp_path / "numbered.toml", {"north": numbers}).train
    np.testing.assert_array_equal(read.targets, wanted.targets)
    np.testing.assert_array_equal(read.features, wanted.features)
    assert read.targets.shape[1] == 3


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (GOOD.replace("15.03.2020", "15.02.2020"), r"record 2 .*'last_seen': the date is before 'diagnosed'"),
        (GOOD.replace("08.03.2020", "08.02.2020"), r"'registered': the date is before 'diagnosed'"),
        (GOOD.replace("08.03.2020", "15.03.2020"), r"'registered': the entry must be before the end"),
        (
            GOOD.replace("15.03.2020", "2020-03-15"),
            r"'followed': the start \('diagnosed'\) or the end .* no date as",
        ),
        (GOOD.replace("01.03.2020", ""), r"'followed': the target is missing"),
    ],
)
def test_dates_that_give_no_time_are_refused_or_left_out(line: str, problem: str, tmp_path: Path) -> None:
    path = written(tmp_path, GOOD, line, GOOD.replace("a,", "c,"))
    with pytest.raises(DataError, match=problem) as refused:
        read_tables(parsed(DATED), [path], test_share=0.01)
    assert "2020" not in str(refused.value)  # no cell is repeated
    binned = read_tables(parsed('invalid = "bin"' + DATED), [path], test_share=1e-9)
    np.testing.assert_array_equal(binned.train.targets, [[1, 2, 1], [1, 2, 1]])


def test_statistics_and_the_data_report_read_the_same_times(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD, GOOD.replace("15.03.2020", "?"), GOOD.replace("01.03.2020", ""))
    states = [State.VALID, State.INVALID, State.MISSING]
    for column in (
        read_columns(parsed(DATED), [path], ["followed"]).numbers("followed"),
        read_whole(parsed(DATED), [path]).columns["followed"],
    ):
        assert column.state.tolist() == states
        assert column.values.tolist() == [2.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('unit = "weeks"\n', "", "start, end and unit go together.*unit is not given"),
        ('start = "diagnosed"\n', "", "start is not given"),
        ('end = "last_seen"', 'end = "died"', "column 'died' has two roles"),
        ("[features.x]", "[features.last_seen]", "column 'last_seen' has two roles"),
        ("[features.x]", "[features.followed]", "column 'followed' has two roles"),
        ("%d.%m.%Y", "%d.%m", "format"),
    ],
)
def test_a_declaration_of_dates_is_whole(old: str, new: str, problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        parsed(DATED.replace(old, new))


@pytest.mark.parametrize("form", ["%Y-%m-%d", "%d.%m.%Y"])
def test_dates_of_start_and_end_are_drafted(form: str, tmp_path: Path) -> None:
    dates = drawn(60)[0].drop(columns="registered").rename(columns={"p": "patient"})
    dates.to_csv(tmp_path / "sample.csv", index=False, date_format=form)
    text = draft_schema(tmp_path / "sample.csv")
    dated = {"start": "diagnosed", "end": "last_seen", "unit": "days"}
    dated |= {} if form == "%Y-%m-%d" else {"format": form}
    assert parsed(text).target == Survival(kind="survival", time="follow_up", event="died", **dated)
    assert 'start = "diagnosed" # a guess' in text
    assert list(parsed(text).features) == ["x"]


def test_dates_that_are_no_follow_up_are_not_drafted_so(tmp_path: Path) -> None:
    dates = drawn(60)[0].rename(columns={"p": "patient", "last_seen": "birth", "registered": "visit"})
    dates.to_csv(tmp_path / "sample.csv", index=False)
    assert parsed(draft_schema(tmp_path / "sample.csv")).target.kind == "label"


def test_a_scope_names_the_dates_that_a_release_reads_and_not_the_time_between_them(tmp_path: Path) -> None:
    """A silo's policy lists columns: a schema must not read dates under the name of an allowed column."""
    dated = re.sub("entry = .*", "", DATED)
    (tmp_path / "schema.toml").write_text('silos = ["north"]' + dated)
    table = {"schema_file": str(tmp_path / "schema.toml"), "files": [str(written(tmp_path, GOOD))]}
    common = {"name": "a", "data": {"table": table}, "privacy": {"epsilon": 1.0}}
    curve = {"silos": "uniform", "release": {"s": {"kind": "survival", "grid": [0, 1, 2]}}}
    effects = {"family": "survival", "silos": "uniform", "features": ["x"], "grid": [0, 1, 2], "rate": 0.1}
    for document in (
        ReleaseDocument.model_validate(common | {"statistics": curve}),
        InferenceDocument.model_validate(common | {"inference": effects}),
    ):
        columns = request_scope(document, declared_tables(document.data.table)).columns
        assert columns - {"x"} == {"diagnosed", "last_seen", "died"}
