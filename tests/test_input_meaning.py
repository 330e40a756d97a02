"""Tables and arrays that would be read in silence as something else than was meant are refused, or read as meant."""

import os
import tomllib
from datetime import date
from decimal import Decimal
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pa_parquet
import pytest

from fedveil.data.arrays import population
from fedveil.data.columns import State, read_columns
from fedveil.data.draft import draft_schema
from fedveil.data.records import Population
from fedveil.data.schema import OF_PUBLIC_TESTS, Schema
from fedveil.data.tables import read_features_by_schema, read_tables
from fedveil.errors import ConfigError, DataError
from fedveil.run.config.experiment import Experiment, parse

ROWS = "patient,age,sick\na,10,no\nb,20,yes\n"


def schema(**changes: object) -> Schema:
    fields: dict[str, object] = {
        "n_users": 5,
        "user": "patient",
        "target": {"kind": "label", "column": "sick", "classes": ["no", "yes"]},
        "features": {"age": {"kind": "number", "lower": 0, "upper": 100, "missing": "indicator"}},
    }
    return Schema.model_validate(fields | changes)


def test_a_test_table_that_trains_is_refused_by_any_name(tmp_path: Path) -> None:
    north, south = tmp_path / "north.csv", tmp_path / "south.csv"
    north.write_text(ROWS)
    south.write_text("patient,age,sick\nc,30,no\n")
    link, twin, copy = tmp_path / "link.csv", tmp_path / "twin.csv", tmp_path / "copy.csv"
    link.symlink_to(south)
    os.link(north, twin)
    copy.write_bytes(north.read_bytes())
    for test, path in ((south, south), (link, south), (twin, north), (copy, north)):
        with pytest.raises(DataError, match=r"test_file .* is also in data\.table\.files") as caught:
            read_tables(schema(), [north, south], test=test)
        assert f"as {path};" in str(caught.value)
        assert "other, public people" in str(caught.value)
    public = tmp_path / "public.csv"
    for rows in (ROWS + "c,30,no\n", "patient,age,sick\nx,20,no\n", "patient,age,sick\nb,20,yes\na,10,no\n"):
        public.write_text(rows)
        with pytest.raises(DataError, match=r"public.csv \(data\.table\.test_file.* trained on"):
            read_tables(schema(), [north, south], test=public)
    public.write_text(ROWS.replace("10", "11").replace("20", "21"))  # as many bytes
    read = read_tables(schema(), [north, south], test=public)
    assert read.public_test
    assert OF_PUBLIC_TESTS in read.notes


@pytest.mark.parametrize("ages", [pa.int16(), pa.int64(), pa.float32(), pa.float64(), pa.decimal128(5, 2)])
def test_a_number_that_stands_for_none_does_so_in_every_kind_of_table(
    tmp_path: Path, ages: pa.DataType
) -> None:
    how, path = schema(missing_values=["", "999", "-0.1"]), tmp_path / "north.parquet"
    values = [50, 999, None] if pa.types.is_integer(ages) else [50, 999, -0.1]
    cells = pa.array(values).cast(ages, safe=False)
    pa_parquet.write_table(pa.table({"patient": ["a", "b", "c"], "age": cells, "sick": ["no"] * 3}), path)
    written = tmp_path / "written.csv"
    written.write_text("patient,age,sick\na,50,no\nb,999.0,no\nc,-0.1,no\n")
    for table in (path, written):
        assert read_features_by_schema(how, table).tolist() == [[0, 0], [0, 1], [0, 1]]
        state = read_columns(how, [table], ["age"]).numbers("age").state
        assert np.array_equal(state, [State.VALID, State.MISSING, State.MISSING])


@pytest.mark.parametrize("ages", [pa.decimal128(7, 2), pa.decimal256(40, 2)])
def test_a_decimal_is_a_number_whatever_the_mark_in_text_is(tmp_path: Path, ages: pa.DataType) -> None:
    path, written = tmp_path / "north.parquet", tmp_path / "written.csv"
    cells = pa.array([Decimal("-50.25"), Decimal("99.99"), None, Decimal("0.07")], ages)
    pa_parquet.write_table(pa.table({"patient": list("abcd"), "age": cells, "sick": ["no"] * 4}), path)
    written.write_text("patient;age;sick\na;-50,25;no\nb;99,99;no\nc;;no\nd;0,07;no\n")
    how = schema(format={"delimiter": ";", "decimal": ","}, missing_values=["", "99,99"], invalid="bin")
    assert not read_features_by_schema(how, path)[:, 2].any()
    assert np.array_equal(read_features_by_schema(how, path), read_features_by_schema(how, written))
    for table in (path, written):
        age = read_columns(how, [table], ["age"]).numbers("age")
        assert np.array_equal(age.state, [State.VALID, State.MISSING, State.MISSING, State.VALID])
        assert age.values.tolist() == [-50.25, 0, 0, 0.07]


DATES = {"kind": "date", "lower": "2020-01-01", "upper": "2030-01-01"}


@pytest.mark.parametrize("mark", ["01.01.1900", "1900-01-01"])
@pytest.mark.parametrize("missing", ["error", "middle", "indicator"])
def test_a_date_that_is_missing_is_so_in_every_kind_of_table(tmp_path: Path, mark: str, missing: str) -> None:
    day = DATES | {"format": "%d.%m.%Y", "missing": missing}
    how = schema(features={"age": day}, missing_values=["", mark], invalid="bin")
    path = tmp_path / "north.csv"
    path.write_text(f"patient,age,sick\na,01.01.2020,no\nb,,no\nc,{mark},no\n")
    expected = read_features_by_schema(how, path).tolist()
    days = pa.array([date(2020, 1, 1), None, date(1900, 1, 1)])
    for kind in (pa.date32(), pa.date64(), pa.timestamp("ms"), pa.timestamp("us"), pa.timestamp("ns", "UTC")):
        table = pa.table({"patient": ["a", "b", "c"], "age": days.cast(kind), "sick": ["no"] * 3})
        path = tmp_path / "north.parquet"
        pa_parquet.write_table(table, path)
        assert read_features_by_schema(how, path).tolist() == expected
        if missing == "error":
            with pytest.raises(DataError, match=r"record 2 .* column 'age': the value is missing; declare"):
                read_features_by_schema(how.model_copy(update={"invalid": "error"}), path)
    first, second = {"error": ([-1, 0], [0, 1]), "middle": ([-1, 0], [0, 0])}.get(
        missing, ([-1, 0, 0], [0, 1, 0])
    )
    assert expected == [first, second, second]


def test_a_column_of_durations_is_refused_where_it_is_read_and_drafted(tmp_path: Path) -> None:
    path, stay = tmp_path / "north.parquet", pa.array([5, 7], pa.duration("us"))
    table = pa.table({"patient": ["a", "b"], "age": stay, "sick": ["no", "yes"]})
    pa_parquet.write_table(table, path)
    told = r"north\.parquet, column 'age': a column of type duration\[us\].*numbers, of days"
    with pytest.raises(DataError, match=told):
        read_features_by_schema(schema(), path)
    with pytest.raises(DataError, match=told):
        read_features_by_schema(schema(features={"age": DATES}), path)
    with pytest.raises(DataError, match=told):
        draft_schema(path)


def people(targets: object, user: object, **changes: object) -> Population:
    frame = pd.DataFrame({"age": [0.1, 0.2, 0.3, 0.4]}, index=[3, 1, 2, 0])
    declared: dict[str, object] = {"silo": ["n", "n", "s", "s"], "n_users": 9, "task": "classification"}
    declared |= {"classes": [0, 1], "silos": ["n", "s"], "test": (frame + 1, [0, 1, 0, 1])}
    return population(frame, targets, user=user, **declared | changes)  # type: ignore[arg-type]


def test_pandas_indexes_that_differ_are_refused() -> None:
    names, order = ["a", "b", "c", "d"], [3, 1, 2, 0]
    with pytest.raises(DataError, match=r"features and user: .*reset_index\(drop=True\)"):
        people([0, 1, 0, 1], pd.Series(names))
    with pytest.raises(DataError, match="features and targets: their pandas indexes differ"):
        people(pd.Series([0, 1, 0, 1]), names)
    table = pd.DataFrame({"age": [1.0, 2.0]})
    with pytest.raises(DataError, match="test features and test targets: their"):
        people([0, 1, 0, 1], names, test=(table, pd.Series([0, 1], index=[1, 0])))
    same = people(pd.Series([0, 1, 0, 1], index=order), pd.Series(names, index=order))
    assert (
        same.train.user.tolist() == people([0, 1, 0, 1], np.array(names)).train.user.tolist() == [0, 1, 2, 3]
    )


def test_a_share_to_hold_out_is_refused_beside_a_test_table(tmp_path: Path) -> None:
    def read(**changes: object) -> Experiment:
        table = {"schema_file": "s.toml", "files": ["north.csv"]} | changes
        fixed = {"name": "try", "rounds": 1, "local": {"learning_rate": 0.1}, "method": {"name": "fedavg"}}
        return parse(fixed | {"data": {"table": table}}, "x.toml")

    table, tested = read(test_share=0.3).data.table, read(test_file="public.csv")
    assert table is not None
    assert table.test_share == 0.3
    assert parse(tomllib.loads(tested.to_toml()), "x.toml") == tested  # it states the usual share
    told = r"x\.toml: data\.table: test_share is of .*beside test_file none are; leave test_share or test_file out"
    with pytest.raises(ConfigError, match=told):
        read(test_file="public.csv", test_share=0.3)
    for name in ("north.csv", "public.csv"):
        (tmp_path / name).write_text(ROWS)
    with pytest.raises(
        ConfigError, match=r"tables: test_share is of .* beside test= none are; leave test_share"
    ):
        read_tables(schema(), [tmp_path / "north.csv"], test=tmp_path / "public.csv", test_share=0.3)


def test_a_cell_with_an_underscore_is_no_number(tmp_path: Path) -> None:
    path = tmp_path / "north.csv"
    path.write_text(ROWS.replace("20", "1_0"))
    with pytest.raises(DataError, match=r"record 2 .*column 'age': the value is no number"):
        read_features_by_schema(schema(), path)
