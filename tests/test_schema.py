"""A schema is read strictly, and a draft of one can be read back."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pa_parquet
import pytest

from fedveil.data.draft import draft_schema
from fedveil.data.schema import Category, Number, Schema, parse_schema, read_schema
from fedveil.errors import DataError

SCHEMA = """
n_users = 40
user = "patient"
silo = "hospital"

[target]
kind = "label"
column = "sick"
classes = ["no", "yes"]

[features.age]
kind = "number"
lower = 0
upper = 120

[features.sex]
kind = "category"
categories = ["f", "m"]
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "schema.toml"
    path.write_text(text)
    return path


def test_a_schema_names_its_columns_and_width(tmp_path: Path) -> None:
    schema = read_schema(written(tmp_path, SCHEMA))
    assert schema.columns == ("patient", "hospital", "sick", "age", "sex")
    assert schema.width == 3
    assert Number(kind="number", lower=0, upper=1, missing="indicator").width == 2
    assert Category(kind="category", categories=("a", "b"), missing="indicator").width == 3


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("n_users = 40", "n_users = 0", "n_users: must be >= 1, not 0"),
        ("n_users = 40", f"n_users = {10**23}", "n_users: must be <= 1e+08, not 1"),
        ("n_users = 40", "", "n_users: is required"),
        ("n_users = 40", 'n_users = "40"', "n_users: must be a whole number, not '40'"),
        (
            'user = "patient"',
            'user = "patient"\nuzer = "x"',
            "uzer: no such key; known here: features, format, formats, invalid, listed_columns, missing_values",
        ),
        ("upper = 120", "upper = 0", "features.age: lower must be below upper"),
        ("upper = 120", "upper = 1e300", "features.age: lower and upper must be numbers of at most 3.4e"),
        ("upper = 120", "upper = inf", "features.age.upper: must be a finite number, not inf"),
        (
            "upper = 120",
            "upper = 120\nunit = 'a'",
            "features.age.unit: no such key; known here: absent, fill, kind, lower, missing, upper",
        ),
        ("upper = 120", "", "features.age.upper: is required"),
        (
            'kind = "number"',
            'kind = "amount"',
            "features.age.kind: must be one of 'number', 'date', 'category', not 'amount'",
        ),
        ('["f", "m"]', '["f", "f"]', "a category is declared twice"),
        ('["f", "m"]', '["f", "NA"]', "column 'sex': 'NA' is declared, and is one of missing_values"),
        ('["f", "m"]', '["f", "m"]\nalso = { "" = "m" }', "column 'sex': '' is declared, and is one of"),
        ('["no", "yes"]', '["null", "yes"]', "column 'sick': 'null' is declared, and is one of"),
        ('["f", "m"]', "[]", "features.sex.categories: needs 1 or more entries, not 0"),
        ('["no", "yes"]', '["no"]', "target.classes: needs 2 or more entries, not 1"),
        ('["no", "yes"]', '["no", "no"]', "a class is declared twice"),
        ('"hospital"', '"patient"', "column 'patient' has two roles"),
        ('column = "sick"', 'column = "age"', "column 'age' has two roles"),
        (
            'column = "sick"',
            'column = "silo"',
            "column 'silo': statistics and preprocessing call the silos so",
        ),
        ("[features.age]", "[features.age", "not a TOML document"),
    ],
)
def test_a_schema_that_does_not_fit_is_refused_by_key(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    assert old in SCHEMA
    with pytest.raises(DataError) as caught:
        read_schema(written(tmp_path, SCHEMA.replace(old, new, 1)))
    assert message in str(caught.value)
    assert "schema.toml" in str(caught.value)


def test_a_missing_schema_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.toml cannot be read"):
        read_schema(tmp_path / "none.toml")


SAMPLE = """patient,hospital,age,sex,flag,pressure,name,sick
p1,north,23,f,0,101.5,ann,no
p2,north,45,m,1,,bob,yes
p1,south,67,m,1,143.2,cid,no
p3,south,-5,,0,120.9,dee,yes
"""


def sample(folder: Path, rows: int = 90) -> Path:
    header, *lines = SAMPLE.splitlines()
    body = [lines[i % len(lines)].replace("ann", f"ann {i}") for i in range(rows)]
    path = folder / "sample.csv"
    path.write_text("\n".join([header, *body]) + "\n")
    return path


def test_a_draft_warns_and_can_be_read_back(tmp_path: Path) -> None:
    text = draft_schema(sample(tmp_path))
    assert text.startswith("# Drafted from a sample.")
    assert "PUBLIC data only" in text
    schema = read_schema(written(tmp_path, text))
    assert (schema.user, schema.silo, schema.n_users) == ("patient", "hospital", 3)
    assert schema.target_columns == ("sick",)
    assert schema.features["age"] == Number(kind="number", lower=-5, upper=67)
    assert schema.features["pressure"] == Number(kind="number", lower=100, upper=150, missing="middle")
    assert schema.features["sex"] == Category(kind="category", categories=("f", "m"), missing="zero")
    assert schema.features["flag"] == Category(kind="category", categories=("0", "1"))


def test_a_column_of_many_texts_is_left_out_with_a_comment(tmp_path: Path) -> None:
    path = tmp_path / "many.csv"
    path.write_text("user,note,x,label\n" + "".join(f"{i},note {i},{i},{i % 2}\n" for i in range(25)))
    text = draft_schema(path)
    assert "# note: left out" in text
    assert list(read_schema(written(tmp_path, text)).features) == ["x"]


def test_a_pattern_stands_for_the_listed_columns_that_have_no_declaration(tmp_path: Path) -> None:
    """The width is the schema's own: what columns a table happens to have decides nothing."""
    listed = ["patient", "hospital", "sick", "lab_b", "lab_a", "lab_sick", "lab [c]"]
    text = SCHEMA.replace('user = "patient"', f'user = "patient"\nlisted_columns = {listed}')
    text += """
[features]
"lab*" = { kind = "number", lower = 0, upper = 9 }
lab_a = { kind = "number", lower = 0, upper = 1 }
"""
    text = text.replace("[features.age]\n", "").replace('kind = "number"\nlower = 0\nupper = 120\n', "")
    text = text.replace('[features.sex]\nkind = "category"\ncategories = ["f", "m"]\n', "")
    schema = read_schema(written(tmp_path, text))
    assert list(schema.features) == ["lab_b", "lab_sick", "lab [c]", "lab_a"]
    assert schema.features["lab_a"] == Number(kind="number", lower=0, upper=1)
    for old, new, message in (
        ('"lab*"', '"bal*"', "features.bal*: no column of listed_columns is matched"),
        (
            "[features]",
            '[features]\n"*_b" = { kind = "number", lower = 0, upper = 9 }',
            "matched by '*_b' too",
        ),
        (f"listed_columns = {listed}", "", "list the tables' public header there"),
    ):
        assert old in text
        with pytest.raises(DataError) as refused:
            read_schema(written(tmp_path, text.replace(old, new, 1)))
        assert message in str(refused.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('delimiter = ";;"', "format.delimiter: must have at most 1 characters, not 2"),
        ("delimiter = '\"'", "format: delimiter must not be the quotation mark"),
        ('decimal = ","', "format: delimiter and decimal are the same character"),
        ('decimal = "\'"', "format.decimal: must be '.' or ',', not"),
        ('encoding = "utf-9"', "format: encoding: there is no encoding of text 'utf-9'"),
        ('encoding = "zlib"', "format: encoding: there is no encoding of text 'zlib'"),
        ('quote = "x"', "format.quote: must be '\"', \"'\" or ''"),
        (
            'quot = "x"',
            "format.quot: no such key; known here: date, decimal, delimiter, encoding, quote, sheet",
        ),
        ('decimal = "."\nthousands = "."', "format: thousands and decimal are the same character"),
    ],
)
def test_a_format_that_cannot_be_is_refused(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(DataError) as refused:
        read_schema(written(tmp_path, f"{SCHEMA}\n[format]\n{line}\n"))
    assert message in str(refused.value)


def test_dates_have_bounds_in_order_and_a_whole_format(tmp_path: Path) -> None:
    text = (
        SCHEMA
        + '\n[features.born]\nkind = "date"\nlower = 1900-01-01\nupper = 2000-01-01\nformat = "%d.%m.%Y"\n'
    )
    schema = read_schema(written(tmp_path, text))
    assert Schema.model_validate(schema.model_dump(mode="json")) == schema
    for old, new, message in (
        ("2000-01-01", "1900-01-01", "features.born: lower must be before upper"),
        ("%d.%m.%Y", "%m.%Y", "features.born: format must have a day"),
        ("%d.%m.%Y", "%d.%m.%%Y", "features.born: format must have a day"),
        (
            "%d.%m.%Y",
            "%d.%m.%y",
            "features.born: format: %y, a year of two digits, has no century; write years",
        ),
        ("%d.%m.%Y", "%d.%m.%Y %d", "features.born: format: no text is read by it; use marks of Python's"),
        ("%d.%m.%Y", "%-d.%m.%Y %d", "features.born: format: no text is read by it; use marks of Python's"),
        ("%d.%m.%Y", "%d.%m.%Y %b", "features.born: format: %b beside %d, %m and %Y names the day twice"),
        ("%d.%m.%Y", "%d.%m.%Y %j", "features.born: format: %j beside %d, %m and %Y names the day twice"),
        ("%d.%m.%Y", "%z%d.%m.%Y", "features.born: format: a digit may not follow %z directly"),
        ("2000-01-01", '"later"', "features.born.upper: must be"),
    ):
        with pytest.raises(DataError) as refused:
            read_schema(written(tmp_path, text.replace(old, new)))
        assert message in str(refused.value)


def test_a_draft_leaves_out_what_looks_like_an_outcome_and_says_why(tmp_path: Path) -> None:
    path = tmp_path / "sample.csv"
    lines = [f"{i},{i % 7},{i % 2},{i * 3},{i % 2 * 5 + i % 5 / 9},{i % 2}" for i in range(40)]
    path.write_text("\n".join(["user,pulse,died,days,score,label", *lines]))
    text = draft_schema(path)
    assert list(read_schema(written(tmp_path, text)).features) == ["pulse"]
    assert "# died: left out, its name sounds like an outcome" in text
    assert "# days: left out, its name" in text
    assert "# score: left out, it alone tells what is predicted" in text


def test_a_draft_is_short_for_many_columns_and_guesses_how_a_file_is_written(tmp_path: Path) -> None:
    names = [f"lab_{i:03}" for i in range(200)]
    lines = [
        f"{i};{i},5;0{i % 9 + 1}.12.1980;" + ";".join(["x", "y", "z"][i % 3] for _ in names)
        for i in range(30)
    ]
    path = tmp_path / "sample.csv"
    path.write_bytes(
        "\n".join([f"user;größe;born;{';'.join(names)};label", *(f"{one};1" for one in lines)]).encode(
            "cp1252"
        )
    )
    text = draft_schema(path)
    schema = read_schema(written(tmp_path, text))
    assert (schema.format.encoding, schema.format.delimiter, schema.format.decimal) == ("cp1252", ";", ",")
    assert schema.features["größe"] == Number(kind="number", lower=0.5, upper=30)
    assert schema.features["born"].bounds == (3652.0, 4018.0)
    assert len(schema.features) == 202
    assert text.count("kind =") < 6


def test_a_draft_takes_columns_by_name_and_parquet(tmp_path: Path) -> None:
    path = tmp_path / "sample.parquet"
    table = pa.table({"who": [1, 2, 3], "x": [0.5, 1.5, 2.5], "b": [True, False, True], "y": [3.0, 4.0, 5.5]})
    pa_parquet.write_table(table, path)
    schema = read_schema(written(tmp_path, draft_schema(path, user="who", label="b")))
    assert schema.user == "who"
    assert schema.target.kind == "label"
    assert schema.features["y"] == Number(kind="number", lower=3, upper=5.5)


def test_a_draft_says_what_helps_a_column_that_is_almost_one(tmp_path: Path) -> None:
    path = tmp_path / "sample.csv"
    lines = [
        f"{i},{i if i % 9 else '<5'},{'fmF'[i % 3]},{i % 2},{'why?' if i % 2 else 'so'} {i}"
        for i in range(40)
    ]
    path.write_text("\n".join(["patient,crp,sex,died,notes", *lines]) + "\n")
    text = draft_schema(path)
    assert "# crp: left out, a number but for '<5': name these in missing_values" in text
    assert "# F and f: one category? write one, and the others in `also`" in text
    assert 'column = "died" # a guess' in text
    path.write_text("patient,place,sick\n1,x,no\n2,x,yes\n3,x,no\n")
    assert "# place: left out, it has one value in the whole sample" in draft_schema(path)


def test_a_draft_names_what_it_lacks(tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(
        DataError, match=r"no column looks like a user's; name it \(--user COLUMN\)\. The columns are: a, b"
    ):
        draft_schema(path)
    with pytest.raises(DataError, match="no column 'c'; it has: a, b"):
        draft_schema(path, user="c")
    with pytest.raises(DataError, match="no column is left for the label"):
        draft_schema(path, user="b", silo="a")
    assert 'column = "a" # a guess' in draft_schema(path, user="b")
    path.write_text("user,b\n")
    with pytest.raises(DataError, match="has no record"):
        draft_schema(path)
    with pytest.raises(DataError, match=r"cannot be read: no such file"):
        draft_schema(tmp_path / "x.xlsx")


@pytest.mark.parametrize("name", ["*", "lab_*", "dose*"])
def test_a_draft_leaves_out_a_column_whose_name_would_be_a_pattern(name: str, tmp_path: Path) -> None:
    """Such a draft could not be read back, or declared other columns by that one."""
    path = tmp_path / "sample.csv"
    header = f"patient,lab_1,lab_2,lab_3,lab_4,{name},sick"
    lines = [f"p{row},{row},{row},{row},{row},{row}.5,{row % 2}" for row in range(10)]
    path.write_text("\n".join([header, *lines]) + "\n")
    text = draft_schema(path)
    assert f"# {name}: left out, the * in its name stands for several columns" in text
    assert set(parse_schema(text.encode(), "draft").features) == {"lab_1", "lab_2", "lab_3", "lab_4"}


def test_a_draft_leaves_out_a_column_that_is_named_as_the_silos(tmp_path: Path) -> None:
    path = tmp_path / "sample.csv"
    path.write_text(
        "patient,ward,silo,age,sick\n"
        + "".join(f"p{i},w{i % 2},{i % 3},{20 + i},{i % 2}\n" for i in range(9))
    )
    draft = written(tmp_path, draft_schema(path, silo="ward"))
    assert list(read_schema(draft).features) == ["age"]
    assert "silo: left out, its name is kept for the silos" in draft.read_text()


def test_a_schema_does_not_change(tmp_path: Path) -> None:
    schema: Schema = read_schema(written(tmp_path, SCHEMA))
    with pytest.raises(ValueError, match="frozen"):
        schema.n_users = 3
