"""Cells that go on in the next line, and marks that are wrong: no record ever becomes part of another one's."""

import csv
import io
import itertools
from pathlib import Path

import numpy as np
import pytest

from fedveil.data.draft import draft_schema
from fedveil.data.schema import Format, Schema, read_schema
from fedveil.data.table_file import open_table
from fedveil.data.tables import read_own
from fedveil.errors import DataError

HEADER = ("p", "note", "y", "x")
NOTES = (
    "",
    "one line",
    "two\nlines",
    "two\r\nlines\n\nand more",
    'a ""mark"", said',
    "\n",
    ",\n,",
    'with "marks"\nin it',
)


def written(notes: tuple[str, ...], end: str = "\n", **how: object) -> str:
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator=end, **how)  # type: ignore[arg-type]
    writer.writerows([HEADER, *((str(i), note, str(i % 2), str(i)) for i, note in enumerate(notes))])
    return stream.getvalue()


def schema(**changes: object) -> Schema:
    fields: dict[str, object] = {
        "n_users": 99,
        "user": "p",
        "target": {"kind": "label", "column": "y", "classes": ["0", "1"]},
        "features": {"x": {"kind": "number", "lower": 0, "upper": 98}},
    }
    return Schema.model_validate(fields | changes)


@pytest.mark.parametrize(
    ("end", "quoting"),
    [("\r\n", csv.QUOTE_MINIMAL), ("\r\n", csv.QUOTE_ALL), ("\n", csv.QUOTE_ALL), ("\r", csv.QUOTE_ALL)],
)
def test_a_note_that_nobody_reads_may_have_lines(end: str, quoting: int, tmp_path: Path) -> None:
    path = tmp_path / "north.csv"
    path.write_bytes(written(NOTES * 2, end, quoting=quoting).encode())
    read, rows = read_own(schema(), path, silo=0, name="north", users=None)
    assert rows.tolist() == list(range(16))
    assert read.user.tolist() == list(range(16))
    assert open_table(path, ("note",))["note"].to_pylist() == list(NOTES * 2)
    assert "note" in open_table(path, None).column_names


def test_a_name_of_a_column_may_have_lines(tmp_path: Path) -> None:
    path = tmp_path / "north.csv"
    path.write_text('p,"note\n(free)","y\nin mmHg"\n1,"a\nb",2\n')
    assert open_table(path, ("p", "y\nin mmHg")).to_pylist() == [{"p": "1", "y\nin mmHg": "2"}]


def test_notes_far_into_a_file_are_read_by_block(tmp_path: Path) -> None:
    """A reader that takes a file in blocks of a megabyte finds the same records."""
    path = tmp_path / "north.csv"
    path.write_text(written(tuple(f"{'word ' * 30}\n{i}, and\n{'more ' * 30}" for i in range(9000))))
    table = open_table(path, ("p", "x"))
    assert table["x"].to_pylist() == table["p"].to_pylist() == [str(i) for i in range(9000)]


def test_what_is_read_is_what_was_written_or_is_refused(tmp_path: Path) -> None:
    """Random cells of marks, delimiters and line breaks: either the records of Python's own reader, or an error."""
    draw, refused = np.random.default_rng(5), 0
    path = tmp_path / "north.csv"
    for _ in range(150):
        notes = tuple("".join(draw.choice(list('a,"\n\r '), draw.integers(0, 9))) for _ in range(4))
        path.write_bytes(written(notes, "\r\n", quoting=int(draw.integers(0, 2))).encode())
        try:
            read = open_table(path, ("note", "x")).to_pylist()
        except DataError:
            refused += 1
            continue
        assert read == [{"note": note, "x": str(i)} for i, note in enumerate(notes)]
    assert refused < 15


@pytest.mark.parametrize("notes", [("x",) * 5, ("", "a\nb", "", "c\n\nd, e", ""), (",", ",", ",", ",", ",")])
def test_wrong_marks_in_one_record_change_no_other_record(notes: tuple[str, ...], tmp_path: Path) -> None:
    """One mark or two anywhere in a person's record: refused, or all others' records are as they were."""
    path = tmp_path / "north.csv"
    lines = [written((note,)).split("\n", 1)[1].replace("0,", f"{i},", 1) for i, note in enumerate(notes)]
    others = [str(i) for i in range(5) if i != 1]
    own = lines[1][:-1]
    for first, second in itertools.product(range(len(own) + 1), range(-1, len(own) + 1)):
        wrong = own[:first] + '"' + own[first:]
        wrong = wrong if second < 0 else wrong[:second] + '"' + wrong[second:]
        path.write_text("".join([",".join(HEADER), "\n", lines[0], wrong, "\n", *lines[2:]]))
        try:
            found = open_table(path, ("p", "x")).to_pylist()
        except DataError:
            continue
        assert [row["p"] for row in found if row["p"] in others] == others


def test_records_that_may_be_several_are_refused_by_their_line(tmp_path: Path) -> None:
    """Two marks that two people's cells lack or have too many would make one record of theirs and all between."""
    path = tmp_path / "north.csv"
    text = 'p,note,y,x\n0,"a\nb",0,1\n1,"oops,0,1\n2,s3cret,1,1\n3,oops",1,1\n4,,0,1\n'
    path.write_text(text)
    with pytest.raises(
        DataError, match=r"north\.csv, line 4: a cell goes on in the next line, and each of"
    ) as refused:
        open_table(path, ("p",))
    assert "s3cret" not in str(refused.value)
    path.write_text(text.replace("s3cret,1,1", "s3cret"))
    assert open_table(path, ("p",))["p"].to_pylist() == ["0", "1", "4"]  # as a note of its own lines would be


@pytest.mark.parametrize(
    "text", ['p,x\n1,"a\n2,""\n3,""\n', 'p,x\r\n1,"a\r\n2,b\r\n', 'p,x\n1,"a\n2,"""b"""\n']
)
def test_a_cell_without_an_end_is_refused_where_it_begins(text: str, tmp_path: Path) -> None:
    path = tmp_path / "north.csv"
    path.write_bytes(text.encode())
    with pytest.raises(DataError, match="line 2: "):
        open_table(path, ("p",))


def test_a_record_of_another_length_is_named_by_its_own_line(tmp_path: Path) -> None:
    path = tmp_path / "north.csv"
    path.write_text('p,note,x\n1,"a\nb\n\nc",1\n2,"d\ne",2,2\n')
    with pytest.raises(DataError, match=r"north\.csv, line 6: it has 4 cells, and the header 3"):
        open_table(path, ("p", "x"))


def test_bytes_that_are_no_text_refuse_nothing_where_nobody_reads_them(tmp_path: Path) -> None:
    path = tmp_path / "north.csv"
    path.write_bytes("p,größe,note,x\n1,2,3,4\n".encode("cp1252") + b"2,\xff,\xe4,5\n")
    assert open_table(path, ("p", "x"))["x"].to_pylist() == ["4", "5"]
    with pytest.raises(DataError, match=r"line 1, byte 4: not utf-8; declare the encoding"):
        open_table(path, ("p", "note"))
    with pytest.raises(DataError, match=r"line 1, byte 4: not utf-8; declare the encoding"):
        open_table(path, None)


@pytest.mark.parametrize("rule", ["error", "bin"])
def test_lines_in_a_cell_that_is_read_are_no_declared_value(rule: str, tmp_path: Path) -> None:
    how = schema(
        invalid=rule, features={"note": {"kind": "category", "categories": ["one two", "one", "three"]}}
    )
    path = tmp_path / "north.csv"
    path.write_text(written(("one\ntwo", "three")))
    if rule == "error":
        with pytest.raises(DataError, match=r"record 1 .*column 'note': the value is not among the declared"):
            read_own(how, path, silo=0, name="north", users=None)
    else:
        read, _ = read_own(how, path, silo=0, name="north", users=None)
        assert read.features.tolist() == [[0, 0, 0, 1], [0, 0, 1, 0]]


@pytest.mark.parametrize("name", ["NORTH.CSV", "north.Csv", "north.txt", "north.TXT", "north.tsv"])
def test_files_are_known_by_their_endings_in_any_case(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(written(("a",) * 30).replace(",", "\t"))
    how = schema(format=Format(delimiter="\t"))
    assert len(read_own(how, path, silo=0, name=path.stem, users=None)[0]) == 30
    draft = tmp_path / "schema.toml"
    draft.write_text(draft_schema(path, user="p"))
    assert read_schema(draft).format == Format(delimiter="\t")
