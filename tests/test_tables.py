"""Tables become populations by their schema alone, and what does not fit is named without its value."""

import csv
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pa_parquet
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedveil.errors import ConfigError, DataError
from fedveil.local.loop import LoopTrainer
from fedveil.local.steps import LocalSgd
from fedveil.local.trainer import Cohort, TrainJob
from fedveil.population.records import Population
from fedveil.population.schema import Schema
from fedveil.population.tables import read_own, read_tables
from fedveil.privacy.bounds import Clip
from fedveil.randomness import ExperimentRandomness, key_of
from tests.training import task_of

SECRET = "s3cret"
COLUMNS = ("patient", "hospital", "age", "sex", "sick")
ROWS = (
    ("p2", "north", "60", "f", "no"),
    ("p1", "north", "0", "m", "yes"),
    ("p2", "south", "120", "f", "yes"),
    ("p10", "south", "90", "m", "no"),
)


def schema(**changes: object) -> Schema:
    fields: dict[str, object] = {
        "n_users": 5,
        "user": "patient",
        "silo": "hospital",
        "target": {"kind": "label", "column": "sick", "classes": ["no", "yes"]},
        "features": {
            "age": {"kind": "number", "lower": 0, "upper": 120},
            "sex": {"kind": "category", "categories": ["f", "m"]},
        },
    }
    return Schema.model_validate(fields | changes)


def with_features(**changes: dict[str, object]) -> Schema:
    return schema(features={"age": {"kind": "number", "lower": 0, "upper": 120}} | changes)


def write(path: Path, rows: object = ROWS, columns: tuple[str, ...] = COLUMNS) -> Path:
    with path.open("w", newline="") as stream:
        csv.writer(stream).writerows([columns, *rows])  # type: ignore[misc]
    return path


def read(folder: Path, rows: object = ROWS, how: Schema | None = None) -> Population:
    """Read rows as both the training table and the test table, so that all of them train."""
    path = write(folder / "table.csv", rows)
    return read_tables(how or schema(), [path], test=path)


def problem(folder: Path, rows: object, how: Schema | None = None) -> str:
    with pytest.raises(DataError) as caught:
        read(folder, rows, how)
    assert SECRET not in str(caught.value)
    return str(caught.value)


def changed(row: int, column: str, cell: str) -> list[list[str]]:
    rows = [list(cells) for cells in ROWS]
    rows[row][COLUMNS.index(column)] = cell
    return rows


def test_features_are_scaled_and_encoded_from_the_declarations(tmp_path: Path) -> None:
    population = read(tmp_path)
    assert population.train.features.tolist() == [[0, 1, 0], [-1, 0, 1], [1, 1, 0], [0.5, 0, 1]]
    assert population.train.targets.tolist() == [0, 1, 1, 0]
    assert population.silo_names == ("north", "south")
    assert population.train.silo.tolist() == [0, 0, 1, 1]
    assert population.train.user.tolist() == [2, 0, 2, 1]  # sorted union: p1, p10, p2
    assert (population.n_users, population.n_classes, population.task) == (5, 2, "classification")


def test_one_file_per_silo_is_named_by_its_stem_and_shares_users(tmp_path: Path) -> None:
    files = [
        write(tmp_path / f"{silo}.csv", [row for row in ROWS if row[1] == silo])
        for silo in ("south", "north")
    ]
    population = read_tables(schema(silo=None), files, test=files[0])
    assert population.silo_names == ("north", "south")
    assert population.train.silo.tolist() == [1, 1, 0, 0]
    assert population.train.user.tolist() == [2, 1, 2, 0]


def test_parquet_gives_the_same_population_as_csv(tmp_path: Path) -> None:
    columns = {name: [row[i] for row in ROWS] for i, name in enumerate(COLUMNS)}
    typed = columns | {"age": [float(age) for age in columns["age"]]}
    table = pa.table(typed)
    table = table.set_column(3, "sex", table.column("sex").dictionary_encode())
    pa_parquet.write_table(table, tmp_path / "table.parquet")
    path = tmp_path / "table.parquet"
    ours, theirs = read_tables(schema(), [path], test=path), read(tmp_path)
    assert ours.train.features.tolist() == theirs.train.features.tolist()
    assert ours.train.user.tolist() == theirs.train.user.tolist()


def test_integer_and_text_ids_of_one_user_are_the_same_user(tmp_path: Path) -> None:
    rows = [("7", "a", "1", "f", "no"), ("07", "a", "1", "f", "no")]
    north = write(tmp_path / "north.csv", rows)
    pa_parquet.write_table(
        pa.table({"patient": [7], "age": [1], "sex": ["m"], "sick": ["no"]}), tmp_path / "south.parquet"
    )
    files = [north, tmp_path / "south.parquet"]
    population = read_tables(schema(silo=None), files, test=north)
    assert population.train.user.tolist() == [1, 0, 1]


@given(st.lists(st.floats(-1e300, 1e300), min_size=1, max_size=20), st.data())
def test_every_scaled_number_lies_between_minus_one_and_one(values: list[float], data: st.DataObject) -> None:
    lower = data.draw(st.floats(-1e6, 1e6))
    upper = lower + data.draw(st.floats(1e-3, 1e6))
    how = schema(features={"age": {"kind": "number", "lower": lower, "upper": upper}})
    table = {"patient": ["a"] * len(values), "hospital": ["b"] * len(values), "sick": ["no"] * len(values)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.parquet"
        pa_parquet.write_table(pa.table(table | {"age": values}), path)
        features = read_tables(how, [path], test=path).train.features
    assert features.min() >= -1
    assert features.max() <= 1


def test_missing_numbers_and_categories_follow_their_policy(tmp_path: Path) -> None:
    rows = [("u", "h", "", "", "no"), ("u", "h", "120", "m", "no")]
    number = {"kind": "number", "lower": 0, "upper": 120}
    category = {"kind": "category", "categories": ["f", "m"]}
    middle = schema(features={"age": number | {"missing": "middle"}, "sex": category | {"missing": "zero"}})
    assert read(tmp_path, rows, middle).train.features.tolist() == [[0, 0, 0], [1, 0, 1]]
    told = schema(
        features={"age": number | {"missing": "indicator"}, "sex": category | {"missing": "indicator"}}
    )
    assert read(tmp_path, rows, told).train.features.tolist() == [[0, 1, 0, 0, 1], [1, 0, 0, 1, 0]]
    assert "record 1 (the header not counted), column 'age': the value is missing" in problem(tmp_path, rows)


def test_an_undeclared_category_is_an_error_or_all_zeros(tmp_path: Path) -> None:
    rows = changed(2, "sex", SECRET)
    told = problem(tmp_path, rows)
    assert "table.csv, record 3 (the header not counted), column 'sex'" in told
    zero = with_features(sex={"kind": "category", "categories": ["f", "m"], "unknown": "zero"})
    assert read(tmp_path, rows, zero).train.features[2].tolist() == [1, 0, 0]


@pytest.mark.parametrize(
    ("row", "column", "cell", "message"),
    [
        (1, "patient", "", "record 2 (the header not counted), column 'patient': the id is missing"),
        (3, "hospital", "NA", "record 4 (the header not counted), column 'hospital': the id is missing"),
        (0, "age", SECRET, "record 1 (the header not counted), column 'age': the value is no number"),
        (0, "age", "inf", "column 'age': the value is infinite"),
        (2, "sick", SECRET, "record 3 (the header not counted), column 'sick': the label is not among"),
        (2, "sick", "", "record 3 (the header not counted), column 'sick': the label is missing"),
    ],
)
def test_a_cell_that_does_not_fit_is_named_by_file_record_and_column(
    tmp_path: Path, row: int, column: str, cell: str, message: str
) -> None:
    told = problem(tmp_path, changed(row, column, cell))
    assert message in told
    assert "table.csv" in told


def test_null_users_in_parquet_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    rows = {"hospital": ["a", "a"], "age": [1, 2], "sex": ["f", "m"], "sick": ["no", "yes"]}
    pa_parquet.write_table(pa.table(rows | {"patient": ["p", None]}), path)
    with pytest.raises(DataError, match=r"record 2 .* column 'patient': the id is missing"):
        read_tables(schema(), [path], test=path)
    pa_parquet.write_table(pa.table(rows | {"patient": [1.0, 2.0]}), path)
    with pytest.raises(DataError, match="ids are text or whole numbers, not double"):
        read_tables(schema(), [path], test=path)


def test_survival_and_number_targets(tmp_path: Path) -> None:
    columns = ("patient", "hospital", "age", "days", "died")
    path = write(tmp_path / "t.csv", [("a", "h", "3", "10.5", "1"), ("b", "h", "4", "7", "0")], columns)
    survival = with_features().model_copy(
        update={"target": schema(target={"kind": "survival", "time": "days", "event": "died"}).target}
    )
    population = read_tables(survival, [path], test=path)
    assert population.task == "survival"
    assert population.train.targets.tolist() == [[1, 10.5], [0, 7]]
    number = with_features().model_copy(
        update={"target": schema(target={"kind": "number", "column": "days"}).target}
    )
    assert read_tables(number, [path], test=path).train.targets.tolist() == [10.5, 7]
    for row, message in (
        (("a", "h", "3", "-1", "1"), "time"),
        (("a", "h", "3", "1", "2"), "event must be 0 or 1"),
    ):
        write(path, [row], columns)
        with pytest.raises(DataError, match=message):
            read_tables(survival, [path], test=path)
    write(path, [("a", "h", "3", "1e300", "1")], columns)
    with pytest.raises(DataError, match="too large"):
        read_tables(number, [path], test=path)


def test_a_seeded_share_of_the_records_is_held_out_where_no_test_table_is(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", [(f"u{i}", "h", str(i), "f", "no") for i in range(100)])
    how = schema(n_users=100)
    one, same, other = (read_tables(how, [path], test_share=0.3, seed=seed) for seed in (0, 0, 1))
    assert len(one.train) + len(one.test_targets) == 100
    assert 10 < len(one.test_targets) < 55
    assert one.test_features.tolist() == same.test_features.tolist()
    assert one.test_features.tolist() != other.test_features.tolist()
    ages = np.concatenate((one.train.features[:, 0], one.test_features[:, 0]))
    assert len(np.unique(ages)) == 100
    assert any("held out" in note for note in one.notes)


def test_a_share_may_hold_out_nothing_or_everything(tmp_path: Path) -> None:
    """How many records there are decides no refusal: another user's record could change it."""
    path = write(tmp_path / "t.csv")
    assert len(read_tables(schema(), [path], test_share=1e-12).test_targets) == 0
    assert len(read_tables(schema(), [path], test_share=1 - 1e-12).train) == 0


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
@pytest.mark.parametrize(
    "target",
    [
        {"kind": "label", "column": "sick", "classes": ["no", "yes"]},
        {"kind": "number", "column": "age"},
        {"kind": "survival", "time": "age", "event": "died"},
    ],
    ids=lambda target: target["kind"],
)
def test_a_header_alone_is_a_silo(target: dict[str, object], suffix: str, tmp_path: Path) -> None:
    columns = ("patient", "height", "sex", "sick", "age", "died")
    features = {
        "height": {"kind": "number", "lower": 0, "upper": 120, "missing": "indicator"},
        "sex": {"kind": "category", "categories": ["f", "m"]},
    }
    how = schema(silo=None, target=target, features=features)
    rows = [("p1", "60", "f", "no", "3", "1"), ("p2", "50", "m", "yes", "4", "0")]
    full, empty = write(tmp_path / "north.csv", rows, columns), tmp_path / f"east.{suffix}"
    if suffix == "csv":
        write(empty, [], columns)
    else:
        pa_parquet.write_table(pa.table({name: pa.nulls(0) for name in columns}), empty)
    held = read_tables(how, [full, empty], test=full)
    assert held.silo_names == ("east", "north")
    assert held.records_per_silo().tolist() == [0, 2]
    alone = read_tables(how, [empty], test=full)
    assert alone.silo_names == ("east",)
    assert len(alone.train) == 0
    assert alone.feature_shape == held.feature_shape
    own = read_own(how, empty, silo=1, name="east", users=("p1", "p2"))
    assert (len(own), own.features.shape[1:]) == (0, held.feature_shape)


def test_silos_that_are_read_off_the_records_are_named_as_uncovered(tmp_path: Path) -> None:
    assert any("Declare silos" in note for note in read(tmp_path).notes)
    declared = read(tmp_path, how=schema(silos=["north", "south"]))
    assert not any("Declare silos" in note for note in declared.notes)


@pytest.mark.parametrize("tested", [False, True])
@pytest.mark.parametrize("removed", ["u00", "u07", "u19"])
def test_removing_a_user_changes_nothing_of_any_other(tmp_path: Path, removed: str, tested: bool) -> None:
    """Neither which of her records are held out, nor her batches: the sum moves by the bound at most."""
    rng = np.random.default_rng(0)
    rows = [
        (f"u{who:02}", silo, str(int(age)), "fm"[int(age) % 2], ("no", "yes")[int(rng.integers(2))])
        for who in range(20)
        for silo in ("north", "south")
        for age in rng.integers(0, 120, 6)
    ]
    test = write(tmp_path / "test.csv") if tested else None
    how = schema(n_users=20, silos=["north", "south"])

    def held_and_sum(name: str, kept: list[tuple[str, ...]]) -> tuple[dict[bytes, int], torch.Tensor]:
        population = read_tables(how, [write(tmp_path / name, kept)], test=test)
        groups = population.train.by_silo_user()
        cohort = Cohort.of(
            population.train, groups=groups, n_silos=2, scale=population.scale, device=torch.device("cpu")
        )
        local = LocalSgd(learning_rate=2.0, epochs=2, batch_size=1)
        trainer = LoopTrainer(task=task_of("linear", population.feature_shape, 2), local=local)
        start = trainer.task.initial()
        ones = torch.ones(len(groups), dtype=torch.float64)
        found = trainer.sums(
            TrainJob(
                start,
                cohort,
                torch.arange(len(groups)),
                ones,
                Clip(norm=1.0),
                ExperimentRandomness(0),
                ("round", 1),
            ),
        )
        keys, counts = np.unique(groups.key, return_counts=True)
        return dict(zip(keys.tolist(), counts.tolist(), strict=True)), found.total

    of_all, sum_of_all = held_and_sum("all.csv", rows)
    of_rest, sum_of_rest = held_and_sum("rest.csv", [row for row in rows if row[0] != removed])
    assert of_rest.keys() == of_all.keys() - {key_of(removed)}
    moved = (sum_of_all - sum_of_rest).norm(dim=1)
    assert (moved > 0).all()
    assert (moved <= 1.0).all()


def test_more_users_than_declared_are_refused(tmp_path: Path) -> None:
    assert "n_users is 2 in the schema, but more users have records" in problem(
        tmp_path, ROWS, schema(n_users=2)
    )


def test_declared_silos_are_there_without_records_too_and_no_others(tmp_path: Path) -> None:
    held = read(tmp_path, ROWS, schema(silos=["west", "north", "south"]))
    assert held.records_per_silo().tolist() == [0, 2, 2]
    assert "silo 'south' is not among the silos" in problem(tmp_path, ROWS, schema(silos=["north"]))
    assert read(tmp_path, ROWS, schema(silos=["south", "north"])).train.silo.tolist() == [1, 1, 0, 0]


def test_files_that_are_no_such_table_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.csv cannot be read"):
        read_tables(schema(), [tmp_path / "none.csv"])
    with pytest.raises(DataError, match=r"a table is a \.csv or a \.parquet file"):
        read_tables(schema(), [tmp_path / "table.xlsx"])
    short = write(tmp_path / "short.csv", [("p", "n")], ("patient", "hospital"))
    with pytest.raises(
        DataError, match=r"has no column 'sick', and exactly one is needed; it has: patient, hospital"
    ):
        read_tables(schema(), [short])
    with pytest.raises(DataError, match="has no record; a test table needs at least one"):
        read_tables(schema(), [write(tmp_path / "t.csv")], test=write(tmp_path / "none-tested.csv", []))
    ragged = tmp_path / "ragged.csv"
    ragged.write_text(f"patient,hospital,age,sex,sick\np,h,1,f,no\n{SECRET}: x,h\n")
    with pytest.raises(DataError, match=r"Expected 5 columns, got 2$"):
        read_tables(schema(), [ragged])
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(SECRET.encode() * 10)
    with pytest.raises(DataError, match=r"broken\.parquet is damaged") as caught:
        read_tables(schema(), [broken])
    assert SECRET not in str(caught.value)


def test_requests_that_cannot_be_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv")
    with pytest.raises(ConfigError, match="no table is named"):
        read_tables(schema(), [])
    with pytest.raises(ConfigError, match="two files would both be silo 't'"):
        read_tables(schema(silo=None), [path, tmp_path / "t.parquet"])
    with pytest.raises(ConfigError, match="between 0 and 1, not 1"):
        read_tables(schema(), [path], test_share=1.0)


@pytest.mark.parametrize("cell", ['"0', 'a "quoted word', '"two\nlines"', '"two\rlines"'])
def test_a_cell_that_goes_on_in_the_next_line_is_refused_by_its_line(cell: str, tmp_path: Path) -> None:
    """Otherwise one person's cell would decide which records of others there are."""
    path = tmp_path / "t.csv"
    rows = [",".join(row) for row in ROWS]
    text = "\n".join([",".join((*COLUMNS, "note")), f"{rows[0]},{cell}", *(f"{row}," for row in rows[1:])])
    path.write_bytes(text.encode())
    with pytest.raises(DataError, match=r"t\.csv, line 2: an odd number of quotation marks") as refused:
        read_tables(schema(), [path], test=path)
    assert "word" not in str(refused.value)
    path.write_text(text.replace(cell, '"a ""quoted"" word, with a comma"'))
    assert len(read_tables(schema(), [path], test=path).train) > 0
