"""Every refusal that a read record can cause is named in the statement: no noise hides whether a run begins.

``NAMED`` lists each place that raises a ``DataError`` beside the words of the statement that name it, or beside the
public fact that decides it. A new ``raise DataError`` fails the first test until it has a line here.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import Dataset

import fedveil as fv
from fedveil.data import arrays
from fedveil.data.arrays import population
from fedveil.data.records import Population
from fedveil.data.schema import OF_ARRAYS, OF_CLIENTS, OF_PUBLIC_TESTS, invalid_cells_notice
from fedveil.errors import DataError, FedveilError
from tests.source import parsed, walked

SOURCE = Path(fv.__file__).parent
ERRORS = {"DataError", "LackingColumnsError", "MainSilosError"}
HELPERS = {
    "refuse_rows",
    "refuse",
    "_refuse_rows",
    "_refuse_first",
    "_refuse",
    "_mark_invalid",
    "_refuse_line",
}
"""Functions that raise a DataError whose problem the caller words."""

PACKAGES = (
    "data",
    "training",
    "run",
    "federation",
    "methods",
    "statistics",
    "protocols",
    "federation/hosts/folders.py",
)
"""Where records are read and used before or while a run trains."""

ID, VALUE = "if its id is missing", "missing, infinite or disallowed value"
SILO, KIND = "its silo is not declared", "another type or shape than the other records"
INDEX, SURPLUS = "another index in one pandas column", "if its user is one more than n_users"
NOBODY = "A list or a data set without any record is refused too"
CLASSES = "fewer than two are refused"
TEST = "more of the test records are also training records than chance explains"
CLIENT = "gives a client's silo a second user, or a user a second silo"
CELL, LINE = "with a cell that is not as declared", "with an incomplete or unreadable line"
TABLE_ID, TABLE_SURPLUS = "with a missing or unknown id or silo", "of one user more than n_users"

FILE = "public: the file, its kind or its columns"
SCHEMA = "public: the schema or another declaration"
ARGUMENT = "public: the type or the shape of an argument as a whole, which no single record decides"
CATALOGUE = "public: a published data set"
DRAFT = "public: a draft, before any run, by who may read the table"
BY_HAND = "public: records made by hand, or by the reader above, which has checked them"
PUBLIC_TABLE = "public: a test table"

NAMED: dict[str, dict[str, str]] = {
    "run/setup.py": {"a client is a silo that holds one user": CLIENT},
    "federation/silo_data.py": {"names a list of users": SCHEMA, "a list of users with the sha256": SCHEMA},
    "federation/hosts/folders.py": {"no such table": FILE},
    "training/losses.py": {
        "the label is not in 0..": BY_HAND,
        "the label is neither 0 nor 1": BY_HAND,
        "a label is neither 0 nor 1": BY_HAND,
        "multi_label_cross_entropy needs one 0 or 1": ARGUMENT,
        "poisson needs one floating-point number": ARGUMENT,
        "the target is no count": VALUE,
        "the target is not finite": BY_HAND,
        "the event is neither 0 nor 1": BY_HAND,
        "the time is not finite": BY_HAND,
        "the entry is not before the time": BY_HAND,
        "cross_entropy needs one int64": ARGUMENT,
        "binary_cross_entropy needs one label": ARGUMENT,
        "focal needs one int64": ARGUMENT,
        "squared_error needs": ARGUMENT,
        "cox needs (event, time)": ARGUMENT,
    },
    "methods/weights.py": {"file of main silos has the sha256": SCHEMA},
    "data/allocation.py": {"allocation 'zipf' gives each user": CATALOGUE},
    "data/arrays.py": {
        "but more users have records": SURPLUS,
        "the columns are not those of the features": PUBLIC_TABLE,
        "fewer than two classes occur": CLASSES,
        "the silo is not among those declared": SILO,
        "entries, but the features have": VALUE,
    },
    "data/cells.py": {
        "a tensor of layout": ARGUMENT,
        "which numpy cannot hold": KIND,
        "the entry is masked": VALUE,
        "the entry is missing": VALUE,
        "rows of different lengths, or no array": KIND,
        "the values are , not numbers": KIND,
        "the value is NaN or infinite": VALUE,
        "a whole number above 16777216": VALUE,
        "too large for float32": VALUE,
        "this one is missing, or text, or another object": VALUE,
        "another shape than the record of row 0": KIND,
        "uint8 here and not in row 0": KIND,
        "a record is needed, not a single": ARGUMENT,
        "a record is needed, but the shape": ARGUMENT,
    },
    "data/column_checks.py": {
        "features must be (records, ...)": BY_HAND,
        "targets must be (records,)": BY_HAND,
        "rows of features and": BY_HAND,
        "is NaN or infinite; every value": BY_HAND,
        "n_classes is a number of classes": SCHEMA,
        "the event must be 0 or 1": VALUE,
        "needs (records, k) float32 targets": BY_HAND,
        "classification needs int64 labels": BY_HAND,
        "survival needs (records, 2) float32": BY_HAND,
        "regression needs (records,) float32": BY_HAND,
    },
    "data/columns.py": {
        "is none of the numeric columns": SCHEMA,
        "is none of the columns of categories": SCHEMA,
        "is of dates, which are not counted": SCHEMA,
        "declares no column": SCHEMA,
        "but more people have records": TABLE_SURPLUS,
    },
    "data/draft.py": {"": DRAFT},
    "data/input_arrays.py": {
        "is missing, on which the model was trained": ARGUMENT,
        "their pandas indexes differ": INDEX,
        "one row a record is needed": NOBODY,
        "a record has no feature": ARGUMENT,
        "a missing id makes a column of floats": ID,
        "the id is missing": ID,
        "the id is empty": ID,
        "the id has half a character": ID,
        "a class is declared twice": SCHEMA,
        "not among the  classes that were declared": VALUE,
        "class labels are text, whole numbers or truth values": VALUE,
        "the label is missing": VALUE,
        "the label is a fraction": VALUE,
        "written as a float": VALUE,
        "one number a record is needed": ARGUMENT,
        "needs (records, k) of two targets or more": ARGUMENT,
        "survival needs (records, 2)": ARGUMENT,
        "the target is outside of target_range": VALUE,
        "two columns are called": ARGUMENT,
        "a structured array for survival needs two fields": ARGUMENT,
        "a mapping of columns is no table": ARGUMENT,
        "a sparse matrix is not read": ARGUMENT,
        "the value is missing, NaN or infinite": VALUE,
        "one entry a record is needed": ARGUMENT,
    },
    "data/main_silos.py": {"": SCHEMA},
    "data/target_leakage.py": {"put the event first": ARGUMENT},
    "data/splits.py": {"the features of a record that is trained on": TEST},
    "data/record_columns.py": {
        "its columns have different numbers of records": ARGUMENT,
        "is no column of numbers, text or dates with one entry a record": ARGUMENT,
        "has two columns of one name": ARGUMENT,
        "the data set has no record": NOBODY,
        "an item of the data set must be": KIND,
        "the item has other keys": KIND,
        "the entry is missing": VALUE,
        "the label is missing": VALUE,
    },
    "data/records.py": {"": BY_HAND},
    "data/table_file.py": {
        "a table is a .csv": FILE,
        "announces more than  rows": FILE,
        "holds neither numbers nor text": FILE,
        "expands to more than": FILE,
        "the texts of  rows have more than": CELL,
        "the sheet is nearly empty": LINE,
        "is damaged or no  file": LINE,
        "the header has no": FILE,
        "is damaged: it has": FILE,
        "has no sheet": FILE,
        "the sheet is empty": FILE,
        "and exactly one is needed": FILE,
        "has no column": FILE,
        "an odd number of quotation marks": LINE,
        "and the header": LINE,
        "a cell goes on in the next line": LINE,
    },
    "data/table_reader.py": {
        "durations, which are no numbers": FILE,
        "holds neither numbers nor text": FILE,
        "a feature that some table does not have": FILE,
        "the model was trained without missing values": "public: prediction, after the run",
        "the value is too large for float32": "public: prediction, after the run",
        "ids are text or whole numbers": TABLE_ID,
        "the id is missing": TABLE_ID,
        "the id has bytes that are no text": TABLE_ID,
        "": CELL,
    },
    "data/tables.py": {
        "is none of the tables": SCHEMA,
        "but more users have records": TABLE_SURPLUS,
        "is not of silo": TABLE_ID,
        "users are listed": SCHEMA,
        "the user is not listed": TABLE_ID,
        "a test table needs at least one": PUBLIC_TABLE,
        "is also in data.table.files": FILE,
        "is not among the silos of the schema": TABLE_ID,
        "the schema lists a silo twice": SCHEMA,
    },
}


@cache
def texts(tree: ast.Module) -> dict[str, str]:
    """The text that a name stands for, all of its assignments together."""
    found: dict[str, str] = {}
    for node in walked(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    found[target.id] = found.get(target.id, "") + text_in(node.value)
    return found


def text_in(node: ast.AST) -> str:
    return "".join(
        one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, str)
    )


def refusals(tree: ast.Module) -> Iterator[str]:
    """The message of every refusal of a file; those of helpers, which only pass a problem on, are their callers'."""
    inside = {
        id(one)
        for node in walked(tree)
        if isinstance(node, ast.FunctionDef) and node.name in HELPERS
        for one in ast.walk(node)
    }
    for node in walked(tree):
        if id(node) in inside:
            continue
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            call, name = node.exc, ast.unparse(node.exc.func).split(".")[-1]
            if name not in ERRORS:
                continue
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in HELPERS:
            call = node
        else:
            continue
        names = {one.id for one in ast.walk(call) if isinstance(one, ast.Name)}
        yield text_in(call) + "".join(texts(tree).get(name, "") for name in sorted(names))


@cache
def files() -> dict[str, tuple[str, ...]]:
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        source = path.read_text(encoding="utf-8")
        reads = name.startswith(PACKAGES) and not name.startswith("data/catalogue/")
        if reads and any(f"{one}(" in source for one in ERRORS) and (told := tuple(refusals(parsed(path)))):
            found[name] = told
    return found


def line_of(file: str, message: str) -> str | None:
    """The first words of a file's lines that a message has."""
    return next((words for words in NAMED.get(file, {}) if words in message), None)


def test_every_refusal_that_a_record_can_cause_stands_beside_the_words_that_name_it() -> None:
    """A new one is given its line in NAMED; if a record decides it, the statement must name it."""
    without = [
        f"{file}: {message}"
        for file, told in files().items()
        for message in told
        if line_of(file, message) is None
    ]
    assert without == []


def test_no_line_is_left_of_a_refusal_that_is_gone() -> None:
    used = Counter((file, line_of(file, message)) for file, told in files().items() for message in told)
    assert [(file, words) for file, lines in NAMED.items() for words in lines if not used[file, words]] == []


def test_what_names_a_refusal_is_in_a_statement() -> None:
    said = " ".join(
        (OF_ARRAYS, OF_CLIENTS, OF_PUBLIC_TESTS, invalid_cells_notice(binned=False), arrays._CLASSES_COUNTED)
    )
    words = {one for lines in NAMED.values() for one in lines.values()}
    assert {one for one in words if not one.startswith("public: ") and one not in said} == set()
    for named in (TABLE_ID, TABLE_SURPLUS, LINE):
        assert named in invalid_cells_notice(binned=True)


def test_a_refusal_is_found_however_it_is_worded() -> None:
    lines = 'why = "no word"\nraise DataError(f"{x}: wrong")\nself._refuse(wrong, column, why)\nraise ValueError("x")\n'
    assert list(refusals(ast.parse(lines))) == [": wrong", "no word"]
    assert list(refusals(ast.parse('def _refuse(why):\n    raise DataError(f"row: {why}")'))) == []
    assert len(files()) >= 20


# --- what a statement says of the data that it is about ------------------------------------------------------------

X = np.random.default_rng(0).normal(size=(6, 2)).astype(np.float32)


class Failing(Dataset):  # type: ignore[type-arg]
    """A data set whose own code fails at its third record."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, row: int) -> Any:
        if row == 2:
            raise KeyError("SECRET")
        return X[row], 0.5


def clients(silo: Any = "abcdef", user: Any = "uvwxyz", **changes: Any) -> Population:
    given: dict[str, Any] = {"n_users": 6, "task": "regression", "silos": list("abcdef")} | changes
    given["test"] = (np.full((1, 2), 9.0), [0.5])
    return population(X, np.arange(6), user=list(user), silo=list(silo), **given)


def notes(folder: Path, held: Population, method: str = "dp-fed") -> str:
    chosen = fv.method(method, clip=1.0, noise_multiplier=1.0, local_learning_rate=0.1)
    return " ".join(fv.train("linear", held, method=chosen, rounds=1, folder=folder).statement.notes)


def test_a_user_beyond_n_users_refuses_all_and_the_statement_says_so(tmp_path: Path) -> None:
    assert SURPLUS in notes(tmp_path, clients(), "uldp-avg")
    with pytest.raises(DataError, match="n_users is 5, but more users have records"):
        clients(n_users=5)


def test_a_second_user_of_a_clients_silo_refuses_all_and_the_statement_says_so(tmp_path: Path) -> None:
    assert CLIENT in notes(tmp_path / "clients", clients())
    assert CLIENT not in notes(tmp_path / "pairs", clients(), "uldp-avg")
    for silo, user in (("abcdea", "uvwxyz"), ("abcdef", "uvwxyu")):
        with pytest.raises(DataError, match="a client is a silo that holds one user"):
            notes(tmp_path / "no", clients(silo, user))
    assert not list(tmp_path.glob("no/*"))


def test_a_data_set_that_fails_at_a_record_or_has_none_refuses_all_and_the_statement_says_so() -> None:
    given: dict[str, Any] = {"silo": list("abcd"), "user": list("uvwx"), "n_users": 6, "task": "regression"}
    with pytest.raises(FedveilError, match=r"Failing\.__getitem__.* raised KeyError") as caught:
        population(Failing(), **given)
    assert "SECRET" not in str(caught.value)
    said = " ".join(clients().notes)
    assert "if the code of a data set fails at it" in said
    assert NOBODY in said
    with pytest.raises(DataError, match="one row a record is needed"):
        population([], [], **given | {"silo": [], "user": [], "silos": ["a"]})
