"""A first draft of a schema, from a PUBLIC sample of a table."""

import math
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import tomlkit
from tomlkit.items import Table

from fedveil.errors import DataError
from fedveil.foreign import foreign
from fedveil.population.schema import MISSING_VALUES
from fedveil.population.table_reader import open_table, text_cells

USER_NAMES = (
    "user",
    "user_id",
    "patient",
    "patient_id",
    "customer",
    "customer_id",
    "client",
    "subject",
    "person",
    "pid",
)
SILO_NAMES = ("silo", "hospital", "site", "center", "centre", "bank", "organisation", "organization")
LABEL_NAMES = ("label", "target", "class", "outcome", "y")
MOST_CATEGORIES = 20

_WARNING = """\
Drafted from a sample. If that sample holds private records, so does this file: its bounds and categories
would reveal them outside every guarantee. Draft from PUBLIC data only, then set every bound and category from
what is known of the domain, not from the records.
"""


def draft_schema(
    path: Path, *, user: str | None = None, silo: str | None = None, label: str | None = None
) -> str:
    """Draft the TOML of a schema from a public sample, to be read and mended by a person.

    Numbers get the sample's range, rounded outward to two digits; columns of text or of few whole numbers
    (at most two distinct) become categories; text columns with more than 20 distinct values are left out,
    with a comment.

    Args:
        path: CSV or Parquet sample.
        user: column of the user; None guesses by name.
        silo: column of the silo; None guesses by name, and none is fine.
        label: column of the class label; None guesses by name, else takes the last column.

    Returns:
        TOML that :func:`read_schema` accepts, with comments.

    Raises:
        DataError: the sample cannot be read, is empty, has no column of such a name, or none that looks like
            a user's.
    """
    sample = open_table(path, None)
    names = sample.column_names
    if not sample.num_rows:
        raise DataError(f"{path} has no record; a draft needs a sample")
    user = _chosen(path, names, user, USER_NAMES)
    if user is None:
        raise DataError(
            f"{path}: no column looks like a user's; name it. The columns are: {', '.join(names)}"
        )
    silo = _chosen(path, names, silo, SILO_NAMES)
    label = _chosen(path, names, label, LABEL_NAMES) or names[-1]
    if label in (user, silo):
        raise DataError(
            f"{path}: no column is left for the label; name it. The columns are: {', '.join(names)}"
        )

    document = tomlkit.document()
    for line in _WARNING.splitlines():
        document.add(tomlkit.comment(line))
    document.add("n_users", tomlkit.item(len(_distinct(_cells(path, sample, user)))))
    document["n_users"].comment("users in the sample; declare the public number of ALL users")
    document.add("user", tomlkit.item(user))
    if silo is not None:
        document.add("silo", tomlkit.item(silo))
    document.add("target", _target(label, _cells(path, sample, label)))
    features = tomlkit.table(is_super_table=True)
    for name in names:
        if name in (user, silo, label):
            continue
        feature = _feature(_cells(path, sample, name))
        if feature is None:
            features.add(
                tomlkit.comment(f"{name}: left out, being neither a number nor one of few categories")
            )
        else:
            features.add(name, feature)
    document.add("features", features)
    return tomlkit.dumps(document)


def _chosen(path: Path, names: list[str], asked: str | None, usual: tuple[str, ...]) -> str | None:
    """The column asked for, or the first that has a usual name."""
    if asked is not None and asked not in names:
        raise DataError(f"{path} has no column '{asked}'; it has: {', '.join(names)}")
    return asked or next((name for name in names if name.lower() in usual), None)


def _target(label: str, cells: pa.Array) -> Table:
    distinct = _distinct(cells)
    target = tomlkit.table()
    if 1 < len(distinct) <= MOST_CATEGORIES:
        target.add("kind", "label")
        target.add("column", label)
        target.add("classes", distinct)
    else:
        target.add("kind", "number")
        target.add("column", label)
    return target


def _feature(cells: pa.Array) -> Table | None:
    """The declaration of a feature, None where it is neither a number nor one of few categories."""
    distinct = _distinct(cells)
    numbers = _numbers(cells)
    feature = tomlkit.table()
    if numbers is not None and len(distinct) > 2:
        extremes = pc.min_max(numbers).as_py()
        feature.add("kind", "number")
        feature.add("lower", _outward(extremes["min"], math.floor))
        feature.add("upper", _outward(extremes["max"], math.ceil))
        missing = "middle"
    elif 0 < len(distinct) <= MOST_CATEGORIES:
        feature.add("kind", "category")
        feature.add("categories", distinct)
        missing = "zero"
    else:
        return None
    if cells.null_count:
        feature.add("missing", missing)
    return feature


def _cells(path: Path, sample: pa.Table, name: str) -> pa.Array:
    """A column's cells as the text that tables are read by, null where missing."""
    try:
        text, missing = text_cells(sample.column(name), pa.array(MISSING_VALUES, pa.string()))
    except DataError as error:
        raise DataError(f"{path}, column '{foreign(name)}': {error}") from error
    return pc.if_else(pa.array(missing), None, text)


def _numbers(cells: pa.Array) -> pa.Array | None:
    """The finite numbers that all cells are, or None."""
    try:
        numbers = pc.cast(cells, pa.float64())
    except pa.ArrowInvalid:
        return None
    return numbers if pc.all(pc.is_finite(numbers)).as_py() else None


def _distinct(cells: pa.Array) -> list[str]:
    """Distinct values, sorted."""
    return sorted(pc.drop_null(pc.unique(cells)).to_pylist())


def _outward(bound: float, rounding: Callable[[float], int]) -> float:
    """Round a bound away from the sample to two significant digits."""
    if bound == 0:
        return 0.0
    digit = 10.0 ** (math.floor(math.log10(abs(bound))) - 1)
    return float(f"{rounding(bound / digit) * digit:.6g}")
