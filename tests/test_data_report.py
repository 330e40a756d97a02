"""A look at tables finds what changes a guarantee, a run or a model, and repeats no cell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sklearn.datasets
import tomlkit

from fedveil.data.data_report import DataReport, data_report
from fedveil.data.schema import Schema
from fedveil.data.tables import read_tables
from fedveil.data.target_leakage import determines_class, has_outcome_name, is_linear_copy, leakage_reason
from fedveil.errors import ConfigError, DataError
from fedveil.report.data import data_page
from tests.commands import as_json, output

COLUMNS = ("patient", "hospital", "age", "sex", "pulse", "score", "sick")
FEATURES: dict[str, Any] = {
    "age": {"kind": "number", "lower": 0, "upper": 120},
    "sex": {"kind": "category", "categories": ["f", "m"]},
    "pulse": {"kind": "number", "lower": 0, "upper": 300, "missing": "middle"},
    "score": {"kind": "number", "lower": 0, "upper": 1000},
}
SECRET = "s3cret"


def schema(**changes: Any) -> Schema:
    fields: dict[str, Any] = {
        "n_users": 100,
        "user": "patient",
        "silo": "hospital",
        "target": {"kind": "label", "column": "sick", "classes": ["no", "yes"]},
        "features": FEATURES,
    }
    return Schema.model_validate(fields | changes)


def rows() -> list[list[str]]:
    """Forty records about which there is nothing to say."""
    return [
        [
            f"p{i % 20}",
            ("north", "south")[i // 20],
            str(20 + i),
            "fm"[i % 2],
            str(60 + i % 7),
            str(i * 7 % 11),
            "nnyn"[i % 4],
        ]
        for i in range(40)
    ]


def look(folder: Path, table: list[list[str]], how: Schema | None = None) -> DataReport:
    path = folder / "t.csv"
    labels = {"n": "no", "y": "yes"}
    lines = [[*row[:-1], labels.get(row[-1], row[-1])] for row in table]
    path.write_text("\n".join(",".join(cells) for cells in [list(COLUMNS), *lines]) + "\n")
    return data_report(how or schema(), [path])


def test_ordinary_tables_have_no_finding(tmp_path: Path) -> None:
    report = look(tmp_path, rows())
    assert report.findings == ()
    assert (report.records, report.people, report.in_several_silos) == (40, 20, 20)
    assert [(one.name, one.records, one.people) for one in report.silos] == [
        ("north", 20, 20),
        ("south", 20, 20),
    ]
    assert report.classes == {"no": 30, "yes": 10}


def changed(cells: dict[tuple[int, str], str]) -> list[list[str]]:
    table = rows()
    for (row, column), cell in cells.items():
        table[row][COLUMNS.index(column)] = cell
    return table


EVERY = range(40)
CASES: dict[str, tuple[list[list[str]], str, str, str]] = {
    "zeros": (
        changed({(0, "patient"): "007", (1, "patient"): "7"}),
        "guarantee",
        "patient",
        "2 ids differ only in how they are written",
    ),
    "case and blanks": (
        changed({(0, "patient"): "A b", (1, "patient"): "ab"}),
        "guarantee",
        "patient",
        "may belong to 1",
    ),
    "width": (
        changed({(0, "patient"): "７１", (1, "patient"): "71"}),
        "guarantee",
        "patient",
        "2 ids differ",
    ),
    "two ids": (
        [*rows(), ["q", *rows()[0][1:]]],
        "guarantee",
        "patient",
        "records that agree with one of another id in every feature and the target: 1",
    ),
    "copies": (
        [*rows(), rows()[0], rows()[0]],
        "model",
        "records",
        "records that repeat another one, including its person and silo: 2",
    ),
    "no id": (changed({(0, "patient"): ""}), "run", "patient", "records without an id: 1"),
    "no silo": (changed({(0, "hospital"): "NA"}), "run", "hospital", "records that name no silo: 1"),
    "one for all": (
        changed({(i, "patient"): "unknown" for i in range(9)}),
        "model",
        "patient",
        "22% of the records",
    ),
    "missing": (changed({(3, "age"): ""}), "run", "age", "2.5% of the cells are missing"),
    "mostly missing": (
        changed({(i, "pulse"): "" for i in range(30)}),
        "model",
        "pulse",
        "75% of the cells are",
    ),
    "no number": (changed({(3, "age"): SECRET}), "run", "age", "2.5% of the cells do not fit"),
    "infinite": (changed({(3, "age"): "inf"}), "run", "age", "2.5% of the cells do not fit"),
    "no category": (changed({(3, "sex"): SECRET}), "run", "sex", "do not fit the declaration (category)"),
    "clipped": (
        changed({(i, "age"): "999" for i in range(4)}),
        "model",
        "age",
        "10% of the values lie outside",
    ),
    "constant": (
        changed({(i, "pulse"): "60" for i in EVERY}),
        "model",
        "pulse",
        "the same value in every record",
    ),
    "tells": (
        changed({(i, "score"): str(900 - i if i % 4 == 2 else i) for i in EVERY}),
        "model",
        "score",
        "it alone tells what is predicted",
    ),
    "nearly none": (
        changed({(i, "sick"): "n" for i in range(3, 40)}),
        "model",
        "sick",
        "rarest class has 2.5%",
    ),
    "a silo without": (
        changed(
            {(i, "sick"): "y" if i < 20 else "n" for i in EVERY}
            | {(i, "age"): str(20 + i * 7 % 40) for i in EVERY}
        ),
        "model",
        "sick",
        "without any record of some class: north, south",
    ),
    "an id": (
        changed({(i, "score"): str(900 - 17 * (i % 20)) for i in EVERY}),
        "model",
        "score",
        "one value in all records of a person, and another one for everybody else",
    ),
    "no label": (changed({(3, "sick"): ""}), "run", "sick", "2.5% of the cells are missing"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong_is_found_and_nothing_else(case: str, tmp_path: Path) -> None:
    table, bears_on, where, found = CASES[case]
    report = look(tmp_path, table)
    said = [one for one in report.findings if found in one.found]
    assert [(one.bears_on, one.where) for one in said] == [(bears_on, where)]
    assert len(report.findings) == 1
    assert SECRET not in json.dumps(report.to_json()) + data_page(report)


def test_a_feature_that_sounds_like_an_outcome_is_named(tmp_path: Path) -> None:
    how = schema(
        features={name: one for name, one in FEATURES.items() if name != "score"}
        | {"died": FEATURES["score"]}
    )
    path = tmp_path / "t.csv"
    head = ",".join(COLUMNS).replace("score", "died")
    path.write_text("\n".join([head, *(",".join([*row[:-1], "no"]) for row in rows())]))
    assert [one.where for one in data_report(how, [path]).findings if "outcome" in one.found] == ["died"]


def test_a_feature_that_is_a_number_or_one_of_many_classes_in_other_words_is_found(tmp_path: Path) -> None:
    path, said = tmp_path / "t.csv", []
    lines = [f"p{i % 20},north,{20 + i},{98.6 + i * i},{'abc'[i % 3]},{(7, 9, 4)[i % 3]}" for i in EVERY]
    path.write_text("\n".join(["patient,hospital,age,heat,grade,code", *lines]) + "\n")
    numbers = {name: {"kind": "number", "lower": 0, "upper": 9999} for name in ("age", "heat", "code")}
    grade = {"kind": "category", "categories": ["a", "b", "c"]}
    for target, features in (
        ({"kind": "number", "column": "warm"}, {**numbers, "grade": grade}),
        ({"kind": "label", "column": "grade", "classes": ["a", "b", "c"]}, numbers),
    ):
        text = path.read_text().splitlines()
        warm = [f"{line},{37 + float(line.split(',')[3]) / 9}" for line in text[1:]]
        path.with_name("u.csv").write_text("\n".join([f"{text[0]},warm", *warm]) + "\n")
        report = data_report(schema(target=target, features=features), [path.with_name("u.csv")])
        said += [(one.where, one.found) for one in report.findings]
    assert said == [
        ("heat", "it is a linear function of what is predicted"),
        ("code", "each of its values is found with one class alone"),
    ]


def test_a_target_of_one_class_says_so_twice(tmp_path: Path) -> None:
    report = look(tmp_path, changed({(i, "sick"): "n" for i in EVERY}))
    assert [one.found for one in report.findings] == [
        "the same value in every record",
        "1 of 2 declared classes have no record here",
    ]


def test_a_file_that_is_named_twice_is_refused_as_by_a_run(tmp_path: Path) -> None:
    look(tmp_path, rows())
    with pytest.raises(ConfigError, match="two files would both be silo 't'"):
        data_report(schema(silo=None), [tmp_path / "t.csv", tmp_path / "t.csv"])


def test_more_people_than_declared_are_found(tmp_path: Path) -> None:
    report = look(tmp_path, rows(), schema(n_users=3))
    assert [one.found for one in report.findings] == ["20 people have records, and 3 are declared"]


def test_a_header_alone_and_a_table_of_dates_are_looked_through(tmp_path: Path) -> None:
    assert [(one.records, one.people) for one in look(tmp_path, [], schema(silo=None)).silos] == [(0, 0)]
    born = {"kind": "date", "lower": "1900-01-01", "upper": "2000-01-01"}
    report = look(tmp_path, changed({(0, "age"): "1990-01-31"}), schema(features=FEATURES | {"age": born}))
    assert [one.found for one in report.findings] == ["97.5% of the cells do not fit the declaration (date)"]
    with pytest.raises(DataError, match="has no column"):
        look(tmp_path, [], schema(user="who"))


@pytest.mark.parametrize(
    ("outside", "found"),
    [
        ("error", ("run", "2.5% of the targets lie outside the declared bounds")),
        ("clip", None),
    ],
)
def test_targets_out_of_their_bounds_are_counted(
    outside: str, found: tuple[str, str] | None, tmp_path: Path
) -> None:
    target = {"kind": "number", "column": "age", "lower": 0, "upper": 150, "outside": outside}
    features = {name: one for name, one in FEATURES.items() if name != "age"}
    report = look(tmp_path, changed({(0, "age"): "900"}), schema(target=target, features=features))
    told = [(one.bears_on, one.found) for one in report.findings if "bounds" in one.found]
    assert told == ([] if found is None else [found])


def test_the_command_says_for_whom_it_is_and_writes_a_page(tmp_path: Path) -> None:
    look(tmp_path, [*rows(), rows()[0]])
    document = schema().model_dump(mode="json", exclude_none=True)
    (tmp_path / "schema.toml").write_text(tomlkit.dumps(document))
    page = tmp_path / "page.html"
    asked = ("check-data", tmp_path / "schema.toml", tmp_path / "t.csv")
    said = output(*asked, "--page", page)
    assert "as private as the records" in said
    assert "records (affects the model): records that repeat another one" in said
    assert "as private as the records" in page.read_text()
    assert as_json(*asked)["findings"][0]["where"] == "records"


def test_another_case_of_a_declared_value_is_counted(tmp_path: Path) -> None:
    table = [[*row[:3], row[3].upper(), *row[4:]] for row in rows()]
    (finding,) = look(tmp_path, table).findings
    assert (finding.where, finding.bears_on) == ("sex", "run")
    assert finding.found.endswith("; 40 differ from a declared value only in case")
    assert "(also)" in finding.effect
    (finding,) = look(tmp_path, table, schema(invalid="bin")).findings
    assert finding.bears_on == "model"
    assert finding.effect.startswith("a run counts them as invalid and goes on")


@pytest.mark.parametrize(("column", "cell"), [("died", "2"), ("days", "-1"), ("days", "inf")])
def test_survival_times_and_events_that_a_run_refuses_are_found(
    column: str, cell: str, tmp_path: Path
) -> None:
    head = ["patient", "hospital", "age", "days", "died"]
    table = [[f"p{i}", "north", str(20 + i * 7 % 13), str(90 + i % 9), str(i % 2)] for i in range(40)]
    target = {"kind": "survival", "time": "days", "event": "died"}
    how = schema(target=target, features={"age": FEATURES["age"]})

    def written() -> Path:
        path = tmp_path / "t.csv"
        path.write_text("\n".join(",".join(cells) for cells in [head, *table]) + "\n")
        return path

    assert data_report(how, [written()]).findings == ()
    table[3][head.index(column)] = cell
    path = written()
    (finding,) = data_report(how, [path]).findings
    assert (finding.where, finding.bears_on) == (column, "run")
    assert "2.5% of the cells do not fit the declaration (survival)" in finding.found
    with pytest.raises(DataError, match=f"record 4 .* column '{column}'"):
        read_tables(how, [path])


# --- tables without a leak ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["breast_cancer", "wine", "iris", "digits", "diabetes", "linnerud"])
def test_no_feature_of_a_good_table_is_suspected(name: str) -> None:
    """Data sets that scikit-learn ships; the petals of iris separate one species, and still not all of them."""
    data = getattr(sklearn.datasets, f"load_{name}")()
    targets = data.target.reshape(len(data.target), -1).T
    for column in data.data.T.astype(np.float64):
        for target in targets:
            if target.dtype.kind == "f":
                assert not is_linear_copy(column, target)
            elif len(np.unique(target)) == 2:
                assert not leakage_reason(column, target.astype(np.int64), category=False)
            else:
                assert not determines_class(column, target.astype(np.int64))
    assert not any(map(has_outcome_name, map(str, getattr(data, "feature_names", ()))))
