"""What a hospital writes otherwise, or does not record at all, is declared; nothing is guessed from its table."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pa_parquet
import pytest

from fedveil.data.columns import State, read_columns
from fedveil.data.data_report import data_report
from fedveil.data.schema import Schema
from fedveil.data.tables import read_features_by_schema, read_tables
from fedveil.errors import ConfigError, DataError
from fedveil.statistics.preprocessing import _kept
from fedveil.validation import validate_document

LAB = {"kind": "number", "lower": 0, "upper": 10, "missing": "indicator", "absent": "missing"}
SEX = {"kind": "category", "categories": ["f", "m"], "also": {"F": "f", "woman": "f", "M": "m"}}
SEEN = {
    "kind": "date",
    "lower": "2020-01-01",
    "upper": "2021-01-01",
    "missing": "middle",
    "absent": "missing",
}


def schema(**features: object) -> Schema:
    document = {
        "n_users": 9,
        "user": "patient",
        "target": {
            "kind": "label",
            "column": "sick",
            "classes": ["no", "yes"],
            "also": {"0": "no", "1": "yes"},
        },
        "features": {"sex": SEX, "lab": LAB, "seen": SEEN} | features,
    }
    return validate_document(Schema, document, "schema")


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def tables(folder: Path) -> list[Path]:
    north = write(folder / "north.csv", "patient,sex,lab,seen,sick\n1,woman,5,2020-01-01,1\n2,m,,,no\n")
    return [north, write(folder / "south.csv", "patient,sex,sick\n3,F,yes\n4,M,0\n")]


def public(folder: Path) -> Path:
    return write(folder / "public.csv", "sex,lab,seen,sick\nF,5,2020-01-01,1\n")


def test_another_spelling_is_the_value_that_it_is_declared_for(tmp_path: Path) -> None:
    read = read_tables(schema(), tables(tmp_path), test=public(tmp_path))
    assert read.train.features[:, :2].tolist() == [[1, 0], [0, 1], [1, 0], [0, 1]]
    assert read.train.targets.tolist() == [1, 0, 1, 0]
    counted = read_columns(schema(), tables(tmp_path), ["sex", "sick"])
    assert counted.places("sex").values.tolist() == [0, 1, 0, 1]
    assert counted.places("sick").values.tolist() == [1, 0, 1, 0]


def test_a_column_that_a_table_may_lack_is_missing_there_and_in_no_other_place(tmp_path: Path) -> None:
    features = read_tables(schema(), tables(tmp_path), test=public(tmp_path)).train.features
    assert features[:, 2:4].tolist() == [[0, 0], [0, 1], [0, 1], [0, 1]]  # the value 5 is the middle
    assert features[:, 4].tolist() == [-1, 0, 0, 0]
    state = read_columns(schema(), tables(tmp_path), ["lab"]).numbers("lab").state
    assert state.tolist() == [State.VALID, State.MISSING, State.MISSING, State.MISSING]
    facts = {one.name: one.missing for one in data_report(schema(), tables(tmp_path)).columns}
    assert facts == {"sick": 0, "sex": 0, "lab": 0.75, "seen": 0.75}
    south = pa_parquet.ParquetFile(_parquet(tmp_path / "south.parquet")).read()
    assert south.num_rows == len(read_features_by_schema(schema(), tmp_path / "south.parquet"))


def _parquet(path: Path) -> Path:
    pa_parquet.write_table(pa.table({"patient": [3, 4], "sex": ["F", "M"], "sick": ["no", "1"]}), path)
    return path


def test_a_column_of_another_case_is_not_taken_for_a_lacking_one(tmp_path: Path) -> None:
    path = write(tmp_path / "north.csv", "patient,sex,Lab,sick\n1,m,5,no\n")
    with pytest.raises(
        DataError, match=r"no column 'lab'; it has: patient, sex, Lab, sick; did you mean 'Lab'\?"
    ):
        read_tables(schema(), [path])
    with pytest.raises(
        DataError, match="has no columns 'sex', 'lab', 'seen'; it has: 1 columns, none of them"
    ):
        read_features_by_schema(
            schema(sex=SEX | {"missing": "zero", "absent": "missing"}), write(path, "x\n1\n")
        )


def test_an_error_about_a_lacking_feature_says_how_to_declare_it(tmp_path: Path) -> None:
    path = write(tmp_path / "north.csv", "patient,lab,seen,sick\n")
    with pytest.raises(DataError, match=r"no column 'sex'; .* is declared with absent = 'missing'$"):
        read_tables(schema(), [path])
    path.write_text("patient,lab,seen,sex\n")
    with pytest.raises(DataError, match=r"no column 'sick'; it has: patient, lab, seen, sex$"):
        read_tables(schema(), [path])


@pytest.mark.parametrize(
    ("feature", "told"),
    [
        (SEX | {"also": {"x": "y"}}, r"features\.lab: also: another spelling .* 'x' = 'y' is none"),
        (SEX | {"also": {"f": "m"}}, r"'f' = 'm' is none"),
        (SEX | {"absent": "missing"}, r"features\.lab: absent: .* declare `missing` too"),
        ({**LAB, "missing": "error"}, r"features\.lab: absent: .* declare `missing` too"),
        ({**SEEN, "missing": "error"}, r"features\.lab: absent: .* declare `missing` too"),
    ],
)
def test_what_cannot_be_meant_is_refused(feature: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        schema(lab=feature)


def test_spellings_of_pooled_categories_go_with_them() -> None:
    class Cells:
        values = np.array([[50.0, 1.0]])
        covariance = np.eye(2)

    kept = _kept(SEX, Cells(), 20)  # type: ignore[arg-type]
    assert kept == {"categories": ["f"], "unknown": "zero", "also": {"F": "f", "woman": "f"}}
    assert "also" not in _kept({"categories": ["f", "m"]}, Cells(), 20)  # type: ignore[arg-type]
