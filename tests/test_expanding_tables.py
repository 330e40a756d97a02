"""Small files of tables that would expand to gigabytes, or take minutes: each is refused before it does."""

from __future__ import annotations

import resource
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fedveil.data.table_file import open_table
from fedveil.errors import DataError

SHEET = "xl/worksheets/sheet1.xml"


def equal_rows(path: Path, rows: int) -> Path:
    """Write a Parquet file of equal rows, some bytes for each million of them."""
    piece = pa.table({"user": np.zeros(10**6, dtype=np.int64), "x": np.ones(10**6)})
    with pq.ParquetWriter(path, piece.schema, compression="zstd") as writer:
        for _ in range(rows // 10**6):
            writer.write_table(piece, row_group_size=10**6)
    return path


def workbook(path: Path, *cells: str) -> Path:
    """Write an ``.xlsx`` file whose first sheet has these cells, each a number, in a row of its own."""
    calamine = pytest.importorskip("python_calamine")
    assert calamine
    kinds = "http://schemas.openxmlformats.org"
    office = f"{kinds}/officeDocument/2006/relationships"
    rows = "".join(
        f'<row r="{one.lstrip("ABCDEFGHIJKLMNOPQRSTUVWXYZ")}"><c r="{one}" t="inlineStr"><is><t>x</t></is></c></row>'
        for one in cells
    )
    related = (
        f'<Relationships xmlns="{kinds}/package/2006/relationships"><Relationship Id="r" Type="{office}/'
    )
    members = {
        "_rels/.rels": f'{related}officeDocument" Target="xl/workbook.xml"/></Relationships>',
        "xl/_rels/workbook.xml.rels": f'{related}worksheet" Target="worksheets/sheet1.xml"/></Relationships>',
        "xl/workbook.xml": f'<workbook xmlns="{kinds}/spreadsheetml/2006/main" xmlns:r="{office}"><sheets>'
        '<sheet name="s" sheetId="1" r:id="r"/></sheets></workbook>',
        SHEET: f'<worksheet xmlns="{kinds}/spreadsheetml/2006/main"><sheetData>{rows}</sheetData></worksheet>',
    }
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in members.items():
            archive.writestr(name, f'<?xml version="1.0"?>{text}')
    return path


def test_equal_rows_beyond_number_are_refused_before_they_are_read(tmp_path: Path) -> None:
    path = equal_rows(tmp_path / "many.parquet", 40_000_000)
    assert path.stat().st_size < 1_000_000
    began = time.process_time()
    with pytest.raises(DataError, match="more than 8 rows for each of its bytes") as found:
        open_table(path, ["user", "x"])
    assert time.process_time() - began < 1
    assert str(path) in str(found.value)
    assert open_table(equal_rows(tmp_path / "few.parquet", 1_000_000), ["x"]).num_rows == 1_000_000


@pytest.mark.parametrize("kind", [pa.string(), pa.large_binary(), pa.dictionary(pa.int32(), pa.string())])
def test_a_long_text_that_is_repeated_is_refused_before_it_is_written_out(
    kind: pa.DataType, tmp_path: Path
) -> None:
    """60,000 cells of 1 MB are 60 GB, in a file of 1 MB."""
    index = pa.array(np.zeros(60_000, dtype=np.int32))
    cells = pa.DictionaryArray.from_arrays(index, pa.array(["a" * (1 << 20)]))
    table = pa.table({"text": cells, "x": np.arange(60_000)})
    path = tmp_path / "long.parquet"
    pq.write_table(table, path, store_schema=False, compression="zstd")
    if not pa.types.is_string(kind):  # written with the schema of one row, of which the file has many
        small = pa.schema([("text", kind), ("x", pa.int64())])
        one = pa.table(
            {"text": pa.array(["a" * (1 << 20)] * 400, pa.string()).cast(kind), "x": range(400)}, small
        )
        pq.write_table(one, path, compression="zstd")
    limits = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(
        DataError, match=r"column 'text': the texts of \d+ rows have more than 268435456 bytes"
    ):
        open_table(path, ["text", "x"])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - limits < 1 << 21  # kB: 2 GB


def test_texts_of_every_kind_are_read_as_they_were_written(tmp_path: Path) -> None:
    texts = ["a", None, "", "b" * 300, "a"]
    plain = pa.array(texts)
    table = pa.table(
        {
            "string": plain,
            "large": plain.cast(pa.large_string()),
            "binary": plain.cast(pa.binary()),
            "category": plain.dictionary_encode(),
        }
    )
    pq.write_table(table, tmp_path / "kinds.parquet")
    read = open_table(tmp_path / "kinds.parquet", table.column_names)
    for name in table.column_names:
        assert read.schema.field(name).type == table.schema.field(name).type
        assert read[name].to_pylist() == table[name].to_pylist()


def test_lists_and_wide_values_are_refused_before_they_are_read(tmp_path: Path) -> None:
    table = pa.table({"list": [[1, 2]], "wide": pa.array([b"a" * 5000], pa.binary(5000)), "x": [1]})
    pq.write_table(table, tmp_path / "wide.parquet")
    for name in ("list", "wide"):
        with pytest.raises(
            DataError, match=f"column '{name}': a column of type .* holds neither numbers nor text"
        ):
            open_table(tmp_path / "wide.parquet", [name, "x"])
    assert open_table(tmp_path / "wide.parquet", ["x"]).num_rows == 1


def test_cells_in_opposite_corners_of_a_sheet_are_refused(tmp_path: Path) -> None:
    """The reader of such a sheet asked for 500 GB, and its whole process was aborted, in which no error is caught."""
    path = workbook(tmp_path / "corners.xlsx", "A1", "XFD1048576")
    assert path.stat().st_size < 2000
    code = (
        "import sys\nfrom pathlib import Path\nfrom fedveil.data.table_file import open_table\n"
        "from fedveil.errors import DataError\n"
        "try:\n    open_table(Path(sys.argv[1]), None)\nexcept DataError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "the sheet is nearly empty between its first and its last cell" in done.stdout
    near = workbook(tmp_path / "near.xlsx", "A1", "A2", "A40000")
    assert open_table(near, ["x"]).num_rows == 39_999


def test_a_workbook_that_expands_to_more_than_is_read_is_refused(tmp_path: Path) -> None:
    path = workbook(tmp_path / "bomb.xlsx", "A1")
    content = path.read_bytes()
    size = (
        content.rindex(b"PK\x01\x02") + 24
    )  # the size that the archive's directory gives for its last member
    path.write_bytes(content[:size] + (2**32 - 2).to_bytes(4, "little") + content[size + 4 :])
    with pytest.raises(DataError, match=r"expands to more than|is damaged"):
        open_table(path, ["x"])
