"""Tables become populations by their schema alone, and what does not fit is named without its value."""

import codecs
import contextlib
import csv
import sys
import tempfile
import traceback
import zipfile
from collections.abc import Iterator
from datetime import date, datetime, timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pa_parquet
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from fedveil.data.records import Population
from fedveil.data.schema import Format, Schema, invalid_cells_notice
from fedveil.data.table_file import open_table, without_days
from fedveil.data.tables import held_out, read_own, read_tables
from fedveil.errors import ConfigError, DataError
from fedveil.privacy.bounds import Clip
from fedveil.randomness import ExperimentRandomness, key_of
from fedveil.training.loop import LoopTrainer
from fedveil.training.steps import LocalSgd
from fedveil.training.trainer import Cohort, TrainJob
from tests.training import task_of

SECRET = "s3cret"
COLUMNS = ("patient", "hospital", "age", "sex", "sick")
ROWS = (
    ("p2", "north", "60", "f", "no"),
    ("p1", "north", "0", "m", "yes"),
    ("p2", "south", "120", "f", "yes"),
    ("p10", "south", "90", "m", "no"),
)


@pytest.fixture(autouse=True, scope="module")
def _tested_on_what_trains() -> Iterator[None]:
    """Allow tests here to train on all records of the one table that they write: test_input_meaning.py refuses it."""
    with pytest.MonkeyPatch.context() as patch:
        for check in ("check_public", "refuse_training_records"):
            patch.setattr(f"fedveil.data.tables.{check}", lambda *given: None)
        yield


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
    assume(np.float32(lower) < np.float32(upper))  # others are refused
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


def test_what_one_record_refuses_a_table_for_is_said_as_not_covered(tmp_path: Path) -> None:
    """With that person the run never begins, otherwise it does: no noise hides that, so every statement says it."""
    rows, binned = changed(1, "age", SECRET), schema(invalid="bin")
    assert "the value is no number" in problem(tmp_path, rows)
    said = read(tmp_path).notes
    assert any(
        "with a cell that is not as declared" in note and "no guarantee covers this" in note for note in said
    )
    read(tmp_path, rows, binned)
    assert "the id is missing" in problem(tmp_path, changed(1, "patient", ""), binned)
    (said,) = {note for note in read(tmp_path, how=binned).notes if "table to be refused" in note}
    assert "missing or unknown id or silo" in said
    assert "not as declared" not in said
    assert invalid_cells_notice(False) in schema().matching  # of releases, and between institutions


def test_a_parquet_file_that_announces_other_rows_than_it_has_takes_no_room_for_them(tmp_path: Path) -> None:
    """Each place of its end that says 77 says 2 * 10^11 instead: it is read for what it has, or refused."""
    path, rows = tmp_path / "table.parquet", 77
    pa_parquet.write_table(pa.table({"age": range(rows)}), path)
    content = path.read_bytes()
    start = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    body, end = content[:start], content[start:-8]
    said = [at for at in range(len(end)) if end.startswith(_varint(2 * rows), at)]
    assert len(said) >= 3  # of the file, of its group and of the column
    read = []
    for at in said:
        lie = end[:at] + _varint(4 * 10**11) + end[at + 2 :]
        path.write_bytes(body + lie + len(lie).to_bytes(4, "little") + content[-4:])
        with contextlib.suppress(DataError):
            read.append(open_table(path, None).num_rows)
    assert set(read) == {rows}
    assert len(read) < len(said)
    assert pa.default_memory_pool().max_memory() < 1 << 32


def _varint(value: int) -> bytes:
    """A whole number as Parquet's footer has it: seven bits a byte, the lowest first."""
    low = value % 128
    return bytes([low]) if value == low else bytes([low | 128]) + _varint(value // 128)


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
    bounded = {"kind": "number", "column": "days", "lower": 0, "upper": 10}
    for outside, found in (("error", None), ("clip", [10, 7])):
        declared = with_features().model_copy(
            update={"target": schema(target=bounded | {"outside": outside}).target}
        )
        if found is not None:
            assert read_tables(declared, [path], test=path).train.targets.tolist() == found
            continue
        with pytest.raises(
            DataError, match=r"t\.csv, record 1 .*column 'days': .* bounds, 0 to 10$"
        ) as refused:
            read_tables(declared, [path], test=path)
        assert "10.5" not in str(refused.value)
        binned = declared.model_copy(update={"invalid": "bin"})
        assert read_tables(binned, [path], test=path).train.targets.tolist() == [7]
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


def test_a_silo_finds_in_its_own_table_which_of_its_records_are_held_out() -> None:
    """Of users with records in several silos too: their fate goes by id and records in that silo alone."""
    rng = np.random.default_rng(3)
    user, silo = rng.integers(0, 40, 400).astype(np.int32), rng.integers(0, 3, 400).astype(np.int32)
    key = user.astype(np.int64) * 977
    whole = held_out(user, silo, key, 0.3, 5)
    assert 0.2 < whole.mean() < 0.4
    for own in range(3):
        rows = silo == own
        assert (held_out(user[rows], silo[rows], key[rows], 0.3, 5) == whole[rows]).all()


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
    own, _ = read_own(how, empty, silo=1, name="east", users=("p1", "p2"))
    assert (len(own), own.features.shape[1:]) == (0, held.feature_shape)


def test_silos_that_are_read_off_the_records_are_named_as_uncovered(tmp_path: Path) -> None:
    assert any("Declare silos" in note for note in read(tmp_path).notes)
    declared = read(tmp_path, how=schema(silos=["north", "south"]))
    assert not any("Declare silos" in note for note in declared.notes)


@pytest.mark.parametrize("tested", [False, True])
@pytest.mark.parametrize("removed", ["u00", "u07", "u19"])
def test_removing_a_user_changes_nothing_of_any_other(tmp_path: Path, removed: str, tested: bool) -> None:
    """Neither which of a user's records are held out, nor their batches: the sum moves by the bound at most."""
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
        cohort = Cohort.from_records(
            population.train, groups=groups, n_silos=2, scale=population.scale, device=torch.device("cpu")
        )
        local = LocalSgd(learning_rate=2.0, epochs=1, batch_size=1)
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
    told = problem(tmp_path, ROWS, schema(silos=["north"]))
    assert "record 3 of all files together (headers not counted), column 'hospital': its silo is not" in told
    assert "south" not in told
    assert read(tmp_path, ROWS, schema(silos=["south", "north"])).train.silo.tolist() == [1, 1, 0, 0]


@pytest.mark.parametrize("suffix", ["csv", "parquet", "xlsx"])
def test_a_first_record_in_place_of_a_header_is_not_repeated(suffix: str, tmp_path: Path) -> None:
    """Errors that listed the columns of a file printed a record where the header was missing."""
    path = tabulated(tmp_path / f"t.{suffix}", [SECRET, "51", "HIV"], [["p2", "35", "none"]])
    with pytest.raises(DataError, match="3 columns, none of them wanted; write a header") as told:
        open_table(path, ["patient", "age", "sick"])
    assert SECRET not in str(told.value)
    assert "HIV" not in str(told.value)
    with pytest.raises(DataError, match="it has: 3 columns, none of them wanted") as told:
        open_table(path, ["HI"])
    assert "HIV" not in str(told.value)


def test_files_that_are_no_such_table_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.csv cannot be read"):
        read_tables(schema(), [tmp_path / "none.csv"])
    with pytest.raises(DataError, match=r"a table is a \.csv \(\.txt, \.tsv\), a \.parquet or an Excel file"):
        read_tables(schema(), [tmp_path / "table.sav"])
    short = write(tmp_path / "short.csv", [("p", "n")], ("patient", "hospital"))
    with pytest.raises(DataError, match=r"has no columns 'sick', 'age', 'sex'; it has: patient, hospital$"):
        read_tables(schema(), [short])
    with pytest.raises(DataError, match="has no record; a test table needs at least one"):
        read_tables(schema(), [write(tmp_path / "t.csv")], test=write(tmp_path / "none-tested.csv", []))
    ragged = tmp_path / "ragged.csv"
    ragged.write_text(f"patient,hospital,age,sex,sick\np,h,1,f,no\n{SECRET}: x,h\n")
    with pytest.raises(DataError, match=r"ragged\.csv, line 3: it has 2 cells, and the header 5; write"):
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


@pytest.mark.parametrize("cell", ['"0', 'a "quoted word'])
def test_a_mark_that_is_not_closed_is_refused_by_its_line(cell: str, tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    "cell", ['5" nail, and 6"', 'a""', 'a"b"', '""a"', r'\"a"', ' "a"', '"a" ', '"a"b"c"', '""a""']
)
@pytest.mark.parametrize("rule", ["error", "bin"])
def test_an_even_number_of_marks_may_not_be_whole_either(cell: str, rule: str, tmp_path: Path) -> None:
    """A reader takes a mark inside of a cell for a message, and the next one may open a cell over others' lines."""
    path = tmp_path / "t.csv"
    rows = [",".join(row) for row in ROWS]
    header = ",".join((*COLUMNS, "note"))
    path.write_text("\n".join([header, f'{rows[0]},{cell},"x', *(f"{row}," for row in rows[1:])]))
    with pytest.raises(DataError, match=r"t\.csv, line 2: "):
        read_tables(schema(invalid=rule), [path], test=path)
    path.write_text("\n".join([header, f"{rows[0]},{cell}", *(f"{row}," for row in rows[1:])]))
    with pytest.raises(DataError, match=r"t\.csv, line 2: "):
        read_tables(schema(invalid=rule), [path], test=path)


@pytest.mark.parametrize("cell", ['""', '"a"', '"a""b"', '""""', '"""a"""', '"x,""y"', '"a"",""b"'])
def test_cells_between_marks_are_read_as_they_are_written(cell: str, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(codecs.BOM_UTF8 + f'"a","b"\r\n{cell},{cell}\r\n1,{cell}'.encode())
    read = open_table(path, ("a", "b"))
    plain = cell[1:-1].replace('""', '"')
    assert read["a"].to_pylist() == [plain, "1"]
    assert read["b"].to_pylist() == [plain, plain]


def test_line_numbers_count_every_kind_of_line_end(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    for content, line in (
        (b'a,b\r\n1,2\r\n"x,3\r\n', 3),
        (b'a,b\r1,2\r3,"4', 3),
        (b'"a,b\n', 1),
        (b'a\n\n\n"', 4),
    ):
        path.write_bytes(content)
        with pytest.raises(DataError, match=f"line {line}: an odd number"):
            open_table(path, None)


def table_of(text: str, encoding: str, path: Path) -> Path:
    path.write_bytes(text.encode(encoding))
    return path


def test_a_file_is_read_as_the_schema_says_it_is_written(tmp_path: Path) -> None:
    german = "patient;hospital;age;sex;sick\np1;Köln;60,5;f;no\np2;Köln;1.200,5;m;no\n"
    how = schema(format={"delimiter": ";", "decimal": ",", "encoding": "cp1252"})
    path = table_of(german, "cp1252", tmp_path / "t.csv")
    with pytest.raises(DataError, match=r"record 2 .*'age': the value is no number"):
        read_tables(how, [path], test=path)  # a full stop is no decimal mark here, and no thousands' either
    good = german.replace("1.200,5", "120,0")
    for encoding in ("cp1252", "utf-16", "utf-8"):
        path = table_of(good, encoding, tmp_path / "t.csv")
        told = how.model_copy(update={"format": how.format.model_copy(update={"encoding": encoding})})
        found = read_tables(told, [path], test=path)
        assert found.train.features[:, 0].tolist() == pytest.approx([60.5 / 60 - 1, 1])
        assert found.silo_names == ("Köln",)
    table_of(german, "cp1252", path)
    with pytest.raises(
        DataError,
        match=r"line 2, byte 34: not utf-8; declare the encoding .* in the schema, \[format\] .*\[formats.\"t.csv\"\]",
    ):
        read_tables(schema(format={"delimiter": ";"}), [path])


def test_dates_are_days_between_declared_bounds(tmp_path: Path) -> None:
    born = {
        "kind": "date",
        "lower": "1900-01-01",
        "upper": "1900-12-31",
        "format": "%d.%m.%Y",
        "missing": "indicator",
    }
    how = schema(features={"age": born})
    rows = [
        ("p", "h", cell, "f", "no") for cell in ("01.01.1900", "31.12.1900", "02.07.1900", "", "5.5.2024")
    ]
    features = read(tmp_path, rows, how).train.features
    assert features.tolist() == pytest.approx(np.array([[-1, 0], [1, 0], [0, 0], [0, 1], [1, 0]]))
    typed = {"patient": ["p"] * 2, "hospital": ["h"] * 2, "sick": ["no"] * 2}
    for kind in (pa.date32(), pa.timestamp("us"), pa.timestamp("ns", tz="UTC")):
        column = pa.array([datetime(1900, 12, 31, 23, 59), None], pa.timestamp("us")).cast(kind, safe=False)
        pa_parquet.write_table(pa.table(typed | {"age": column}), tmp_path / "t.parquet")
        path = tmp_path / "t.parquet"
        assert read_tables(how, [path], test=path).train.features.tolist() == [[1, 0], [0, 1]]
    for wrong in (SECRET, "31.02.1900", "1900-01-01", "01.01.1900 x"):
        said = problem(tmp_path, [("p", "h", wrong, "f", "no")], how)
        assert "record 1 (the header not counted), column 'age': the value is no date as %d.%m.%Y" in said


def workbook(path: Path, sheets: dict[str, list[list[object]]]) -> Path:
    """Write a small Excel file by hand: text inline, numbers as they are, dates as numbers of a date style."""
    main = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
    other = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
    kind = "http://schemas.openxmlformats.org/package/2006/relationships"

    def cell(value: object) -> str:
        if isinstance(value, str):
            return f'<c t="inlineStr"><is><t>{value}</t></is></c>' if value else "<c/>"
        if isinstance(value, datetime):
            return f'<c s="1"><v>{(value - datetime(1899, 12, 30)) / timedelta(days=1)}</v></c>'
        if isinstance(value, date):
            return f'<c s="1"><v>{(value - date(1899, 12, 30)).days}</v></c>'
        return f"<c><v>{value}</v></c>"

    with zipfile.ZipFile(path, "w") as file:
        listed = "".join(
            f'<sheet name="{name}" sheetId="{i}" r:id="r{i}"/>' for i, name in enumerate(sheets, 1)
        )
        file.writestr(
            "xl/workbook.xml",
            f'<workbook xmlns="{main}" xmlns:r="{other}"><sheets>{listed}</sheets></workbook>',
        )
        file.writestr(
            "xl/styles.xml",
            f'<styleSheet xmlns="{main}"><cellXfs><xf numFmtId="0"/><xf numFmtId="14"/></cellXfs></styleSheet>',
        )
        rels = "".join(
            f'<Relationship Id="r{i}" Type="{other}/worksheet" Target="worksheets/sheet{i}.xml"/>'
            for i in range(1, len(sheets) + 1)
        )
        root = f'<Relationship Id="r" Type="{other}/officeDocument" Target="xl/workbook.xml"/>'
        file.writestr("_rels/.rels", f'<Relationships xmlns="{kind}">{root}</Relationships>')
        file.writestr("xl/_rels/workbook.xml.rels", f'<Relationships xmlns="{kind}">{rels}</Relationships>')
        for i, rows in enumerate(sheets.values(), 1):
            data = "".join(f"<row>{''.join(map(cell, row))}</row>" for row in rows)
            file.writestr(
                f"xl/worksheets/sheet{i}.xml",
                f'<worksheet xmlns="{main}"><sheetData>{data}</sheetData></worksheet>',
            )
    return path


def test_an_excel_file_gives_the_same_population_as_csv(tmp_path: Path) -> None:
    pytest.importorskip("python_calamine", reason="the extra excel is not installed")
    rows = [[*row[:2], float(row[2]), *row[3:]] for row in ROWS]
    path = workbook(tmp_path / "t.xlsx", {"notes": [["x"]], "2024": [list(COLUMNS), *rows]})
    how = schema(format={"sheet": "2024"})
    ours, theirs = read_tables(how, [path], test=path), read(tmp_path)
    assert ours.train.features.tolist() == theirs.train.features.tolist()
    assert ours.train.user.tolist() == theirs.train.user.tolist()
    with pytest.raises(DataError, match=r"t\.xlsx has no sheet '2025'; it has: notes, 2024"):
        read_tables(schema(format={"sheet": "2025"}), [path])
    with pytest.raises(DataError, match=r"has no columns 'patient', .*; it has: 1 columns, none"):
        read_tables(schema(), [path])
    path.write_bytes(SECRET.encode())
    with pytest.raises(DataError, match=r"t\.xlsx is damaged or no \.xlsx file$"):
        read_tables(schema(), [path])


def test_a_cell_of_an_excel_file_means_the_same_whatever_its_column_holds(tmp_path: Path) -> None:
    pytest.importorskip("python_calamine", reason="the extra excel is not installed")
    born, odd = [date(1900, 3, 1), date(1949, 1, 1)], ("unknown", 2.5, 1e300, date(2020, 1, 1))
    head: list[object] = ["patient", "code", "born", "sick"]
    rows: list[list[object]] = [[7, 1, born[0], 0], ["p8", -9, "02.01.1950", 1], [9, 0.00001, born[1], 1]]
    features = {
        "code": {"kind": "category", "categories": ["1", "1e-05"], "unknown": "zero", "missing": "indicator"},
        "born": {"kind": "date", "lower": "1900-01-01", "upper": "2000-01-01", "format": "%d.%m.%Y"},
    }
    target = {"kind": "label", "column": "sick", "classes": ["0", "1"]}
    how = schema(silo=None, invalid="bin", missing_values=["", "-9"], target=target, features=features)
    path, read_back = tmp_path / "t.xlsx", []
    for more in ([], *([["m", cell, cell, 0]] for cell in odd)):
        found = read_tables(how, [workbook(path, {"s": [head, *rows, *more]})], test_share=1e-9).train
        read_back.append(found.features[:3].tolist())
    assert all(one == read_back[0] for one in read_back)
    codes, days = np.array(read_back[0])[:, :4], np.array(read_back[0])[:, 4:]
    assert codes.tolist() == [[1, 0, 0, 0], [0, 0, 1, 0], [0, 1, 0, 0]]
    whole = (date(2000, 1, 1) - date(1900, 1, 1)).days
    expected = [2 * (day - date(1900, 1, 1)).days / whole - 1 for day in (born[0], date(1950, 1, 2), born[1])]
    assert days[:, 0] == pytest.approx(expected, abs=1e-6)
    assert not days[:, 1].any()


@pytest.mark.parametrize("cell", [2.5, 2.0**53, date(2020, 1, 1)])
def test_a_number_that_excel_rounds_and_a_date_are_no_ids(tmp_path: Path, cell: object) -> None:
    pytest.importorskip("python_calamine", reason="the extra excel is not installed")
    path = workbook(tmp_path / "t.xlsx", {"s": [list(COLUMNS), *ROWS, [cell, *ROWS[0][1:]]]})
    with pytest.raises(DataError, match=r"column 'patient': ids are text or whole numbers below 2\^53"):
        read_tables(schema(), [path])


def test_cells_of_excel_are_written_with_the_declared_decimal_mark(tmp_path: Path) -> None:
    pytest.importorskip("python_calamine", reason="the extra excel is not installed")
    rows: list[list[object]] = [
        ["x"],
        ["a"],
        [2],
        [0.5],
        [""],
        [date(1901, 1, 1)],
        [datetime(1902, 2, 3, 18)],
    ]
    column = open_table(workbook(tmp_path / "t.xlsx", {"s": rows}), None, Format(decimal=",", delimiter=";"))
    assert without_days(column.column("x")).to_pylist() == ["a", "2", "0,5", None, "1901-01-01", "1902-02-03"]


def test_without_a_reader_of_excel_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "python_calamine", None)
    path = tmp_path / "t.xlsx"
    path.write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"the extra excel: pip install 'fedveil\[excel\]'"):
        open_table(path, None)


def test_the_readers_reason_is_whole_and_tells_no_cell(tmp_path: Path) -> None:
    broken = tmp_path / "t.parquet"
    for content, said in (
        (SECRET.encode() * 9, "magic bytes not found in footer. Either"),
        (b"", "file size is 0 bytes"),
    ):
        broken.write_bytes(content)
        with pytest.raises(DataError, match=said) as refused:
            open_table(broken, None)
        assert SECRET not in str(refused.value)
    empty = tmp_path / "t.csv"
    empty.write_bytes(b"")
    with pytest.raises(DataError, match="it is empty; one without records has its header"):
        open_table(empty, None)


# --- invalid cells with a place of their own ------------------------------------------------------------------

WRONG = (
    ("age", SECRET),
    ("age", "inf"),
    ("age", ""),
    ("sex", SECRET),
    ("sex", ""),
    ("sex", "f\udcff"),
    ("sick", SECRET),
    ("sick", ""),
)


def written_with(folder: Path, row: int, column: str, cell: str) -> Path:
    """Write the table with one cell changed; a lone surrogate becomes a byte that is no UTF-8."""
    lines = [",".join(COLUMNS), *(",".join(cells) for cells in changed(row, column, cell))]
    path = folder / "table.csv"
    path.write_bytes(("\n".join(lines) + "\n").encode("utf-8", "surrogateescape"))
    return path


@pytest.mark.parametrize(("column", "cell"), WRONG)
def test_an_invalid_cell_changes_nothing_but_its_own_record(tmp_path: Path, column: str, cell: str) -> None:
    """By the rule "bin": a feature of its own where a feature is invalid, no record where a target is."""
    how = schema(invalid="bin")
    assert how.width == 3 + 2
    plain = read_tables(how, [write(tmp_path / "table.csv")], test=write(tmp_path / "test.csv"))
    assert plain.train.features[:, [1, 4]].tolist() == [[0, 0]] * 4
    path = written_with(tmp_path, 2, column, cell)
    found = read_tables(how, [path], test=tmp_path / "test.csv")
    others = [0, 1, 3]
    if column == "sick":
        assert found.train.features.tolist() == plain.train.features[others].tolist()
        assert found.train.user.tolist() == plain.train.user[others].tolist()
        return
    assert found.train.features[others].tolist() == plain.train.features[others].tolist()
    expected = [0, 1, 1, 0, 0] if column == "age" else [1, 0, 0, 0, 1]
    assert found.train.features[2].tolist() == expected
    with pytest.raises(DataError):
        read_tables(schema(), [path], test=tmp_path / "test.csv")


def test_rules_of_a_column_stand_above_that_of_the_schema(tmp_path: Path) -> None:
    features = {
        "age": {"kind": "number", "lower": 0, "upper": 120, "missing": "indicator"},
        "sex": {"kind": "category", "categories": ["f", "m"], "unknown": "zero", "missing": "zero"},
    }
    how = schema(features=features, invalid="bin")
    rows = [("p1", "north", "", SECRET, "no"), ("p2", "north", "ninety", "", "yes")]
    path = write(tmp_path / "table.csv", rows)
    found = read_tables(how, [path], test=path)
    assert found.train.features.tolist() == [[0, 1, 0, 0, 0, 0], [0, 0, 1, 0, 0, 0]]


def test_invalid_targets_of_survival_and_amounts_leave_their_records_out(tmp_path: Path) -> None:
    columns = ("patient", "hospital", "age", "days", "died")
    rows = [
        ("a", "n", "1", "5", "1"),
        ("b", "n", "1", "-5", "1"),
        ("c", "n", "1", "6", "2"),
        ("d", "n", "1", "x", "0"),
    ]
    path = write(tmp_path / "table.csv", rows, columns)
    number = {"age": {"kind": "number", "lower": 0, "upper": 120}}
    target = {"kind": "survival", "time": "days", "event": "died"}
    found = read_tables(schema(target=target, features=number, invalid="bin"), [path], test=path)
    assert found.train.targets.tolist() == [[1, 5]]
    amount = {"kind": "number", "column": "days"}
    found = read_tables(schema(target=amount, features=number, invalid="bin"), [path], test=path)
    assert found.train.targets.tolist() == [5, -5, 6]


def test_held_out_rows_are_those_of_the_files(tmp_path: Path) -> None:
    """Counted over all files, records that are left out included."""
    rows = [(f"p{i}", "north", "60", "f", SECRET if i % 3 == 0 else "no") for i in range(20)]
    files = [
        write(tmp_path / f"{name}.csv", [(*row[:1], name, *row[2:]) for row in rows]) for name in ("a", "b")
    ]
    found = read_tables(schema(n_users=20, invalid="bin", silos=["a", "b"]), files, test_share=0.5)
    assert found.test_rows is not None
    assert len(found.test_rows) == len(found.test_targets)
    assert set(found.test_rows.tolist()) <= {i for i in range(40) if i % 20 % 3}
    assert any(row >= 20 for row in found.test_rows)
    assert len(found.train) + len(found.test_rows) == 26


def test_an_id_that_is_no_text_is_refused_whatever_the_rule(tmp_path: Path) -> None:
    """Two such ids would read alike, and two people would be protected as one."""
    path = written_with(tmp_path, 2, "patient", "p\udcff")
    with pytest.raises(DataError, match=r"record 3 .*'patient': the id has bytes that are no text"):
        read_tables(schema(invalid="bin"), [path], test=path)


def test_another_delimiter_is_told_as_such(tmp_path: Path) -> None:
    path = tmp_path / "north.csv"
    path.write_text('patient;age;ward\n1;34;"a; b"\n')
    with pytest.raises(
        DataError, match=r"the header has no ',', .* but it has ';': declare it in the schema, \[format\]"
    ):
        open_table(path, ["patient", "age"])


@pytest.mark.parametrize("suffix", ["csv", "parquet", "xlsx"])
def test_blanks_around_a_columns_name_are_ignored_as_around_a_cell(suffix: str, tmp_path: Path) -> None:
    """No record is read as one without the column, and two columns that differ in blanks alone are refused."""
    header = ["patient ", " age", "\tward\xa0"]
    rows = [["p1", "34", "a"], ["p2", "35", "b"]]
    path = tabulated(tmp_path / f"t.{suffix}", header, rows)
    found = open_table(path, ["age", "patient"], may_lack={"age"})
    assert [without_days(found[name]).to_pylist() for name in found.column_names] == [
        ["34", "35"],
        ["p1", "p2"],
    ]
    assert open_table(path, None).column_names == ["patient", "age", "ward"]
    twice = tabulated(tmp_path / f"twice.{suffix}", ["age", "age ", "patient"], rows)
    assert without_days(open_table(twice, ["patient"])["patient"]).to_pylist() == ["a", "b"]
    with pytest.raises(DataError, match="has 2 columns 'age', and exactly one is needed"):
        open_table(twice, ["patient", "age"])


def test_a_column_that_is_declared_with_a_blank_is_not_read_as_absent(tmp_path: Path) -> None:
    """An earlier release took the name as the file had it; the table has the column, and no value of it is missing."""
    path = tabulated(tmp_path / "t.csv", ["patient", "age "], [["p1", "34"]])
    with pytest.raises(DataError, match="has no column 'age '; it has: patient, age; did you mean 'age'"):
        open_table(path, ["patient", "age "], may_lack={"age "})


def tabulated(path: Path, header: list[str], rows: list[list[str]]) -> Path:
    """Write a table as its suffix says."""
    if path.suffix == ".csv":
        path.write_text("\n".join(",".join(row) for row in [header, *rows]), encoding="utf-8")
    elif path.suffix == ".parquet":
        columns = [pa.array(column) for column in zip(*rows, strict=True)]
        pa_parquet.write_table(pa.table(columns, names=header), path)
    else:
        workbook(path, {"s": [header, *rows]})
    return path


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_a_line_of_another_length_is_named(tmp_path: Path, end: str, encoding: str) -> None:
    path, how = tmp_path / "t.csv", Format(encoding=encoding, delimiter=";")
    whole = ["", "a;b", "1;2", "", '"x;y;z";"2""; "', "", "3;"]
    path.write_text(end.join(whole), encoding=encoding, newline="")
    assert open_table(path, None, how)["b"].to_pylist() == ["2", '2"; ', ""]
    for ragged, there in ((f"{SECRET};2;3", "3 cells"), (f'"{SECRET};2"', "1 cell"), (" ", "1 cell")):
        for behind in ([], ["4;5", "", "1;2;3;4"]):
            path.write_text(end.join([*whole, ragged, *behind]), encoding=encoding, newline="")
            with pytest.raises(DataError) as refused:
                open_table(path, None, how)
            assert str(refused.value) == (
                f"{path}, line 8: it has {there}, and the header 2; write every cell, empty ones too, and one "
                "with ';', the delimiter, inside of it between quotation marks"
            )
            assert SECRET not in "".join(traceback.format_exception(refused.value))


def test_a_line_of_another_length_is_named_far_into_a_file(tmp_path: Path) -> None:
    path, lines = tmp_path / "t.csv", ["1234567,7654321"] * 200_000  # more than three blocks of the reader
    path.write_text("\n".join(["a,b", *lines, "1", *lines]))
    with pytest.raises(DataError, match=r"t\.csv, line 200002: it has 1 cell, and the header 2"):
        open_table(path, ["b"])


def test_a_header_in_another_encoding_says_so_where_cells_may_be_anything(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes("größe,alter\n1,2\n".encode("cp1252"))
    with pytest.raises(
        DataError, match=r"has no column 'größe'.*in another encoding; declare it in the schema, \[format\]"
    ):
        open_table(path, ["größe"], tolerant=True)
    assert open_table(path, ["alter"], tolerant=True).num_rows == 1
    path.write_bytes("größe,alter\n1,2\n".encode("utf-16"))
    with pytest.raises(DataError, match="byte 0: not utf-8; declare the encoding"):
        open_table(path, ["alter"], tolerant=True)
    wide = Format(encoding="utf-16")
    assert open_table(path, ["größe"], wide, tolerant=True).column_names == ["größe"]
