"""Public schema of tables: the role of each column, and the encoding of its values as features.

Bounds and categories are DECLARED here, from domain knowledge or a public sample. Nothing is fitted on private
records: a minimum, a mean or a list of categories computed from them would leave the silos without any noise.

A number x with bounds [lower, upper] becomes 2 (x - lower) / (upper - lower) - 1, in [-1, 1]; a value outside is
clipped to the nearest bound first. A date is scaled in the same way by the number of its day. A category becomes one
0/1 feature per declared category, in the declared order.

The name of a feature may be a pattern, ``lab_*``, over the columns that the schema itself lists. So the content of a
table never decides the width of a model.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Mapping
from datetime import date
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, NamedTuple, TypeAlias

from pydantic import ConfigDict, Field, model_validator

from fedveil.config_keys import FollowUp
from fedveil.data.cell_values import NumberMarks, number_of
from fedveil.data.column_checks import (
    check_bounds,
    check_count,
    check_date_format,
    check_declared_bounds,
    check_distinct,
    check_not_missing,
    check_spellings,
)
from fedveil.data.identities import AS_TEXT, MOST_USERS
from fedveil.errors import ConfigError, DataError
from fedveil.files import as_path, as_text, parse_toml, read_content
from fedveil.sanitize import sanitize
from fedveil.validation import DocumentTable, validate_document

# --- invalid cells -------------------------------------------------------------------------------------------------
# Sentences of the statement about records that cause all data to be refused. The start of a run is public and carries
# no noise, so it reveals that no record causes a refusal.
#
# ``tests/test_named_refusals.py`` maps every refusal that a record can cause to the words here that name it.

_SHOWS: Final = "A run that begins therefore shows that"
_BEGINS: Final = f"{_SHOWS} there is no such record, and no guarantee covers this."

OF_ARRAYS: Final = (
    "A single record causes all records to be refused if its id is missing or its silo is not declared; if it has a "
    "missing, infinite or disallowed value, another type or shape than the other records, or another index in one "
    "pandas column than in the next; if its user is one more than n_users; or if the code of a data set fails at it. A "
    f"list or a data set without any record is refused too. {_BEGINS}"
)

OF_CLIENTS: Final = (
    "A single record that gives a client's silo a second user, or a user a second silo, causes all records to be "
    f"refused. {_BEGINS}"
)

OF_PUBLIC_TESTS: Final = (
    "All records are refused if more of the test records are also training records than chance explains. "
    f"{_SHOWS} they are not, and no guarantee covers this."
)


def invalid_cells_notice(binned: bool) -> str:
    """Return the sentence about records of a table that cause the table to be refused.

    Args:
        binned: whether invalid cells are counted in a feature of their own instead of being refused.
    """
    cells = "" if binned else ", or, in training and by silos, with a cell that is not as declared"
    instead = "" if binned else ' (invalid = "bin" refuses no cell)'
    return (
        "A single record with a missing or unknown id or silo, of one user more than n_users, with an incomplete or "
        f"unreadable line{cells}, causes its table to be refused{instead}. {_BEGINS}"
    )


# --- schema ------------------------------------------------------------

MISSING_VALUES = ("", "NA", "NaN", "nan", "null")
EPOCH: Final = date(1970, 1, 1)
SILO: Final = "silo"
"""Name of a record's silo in releases of columns, whatever its column is called; no feature or target may have it."""

DAYS_OF: Final = {"days": 1.0, "weeks": 7.0, "months": 365.25 / 12, "years": 365.25}
"""Days of a unit of follow-up time."""

ISO_DATE: Final = "%Y-%m-%d"
_NO_MARK: Final = "\n\r"


class _Part(DocumentTable):
    """Base class of the tables of a schema."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def _check_absent(absent: str | None, missing: str) -> None:
    if absent is not None and missing == "error":
        raise ValueError("absent: a table without the column has missing values alone; declare `missing` too")


class Format(_Part):
    """Format of table files, if it differs from the defaults.

    ``delimiter``, ``quote`` and ``encoding`` apply to CSV files, ``sheet`` to Excel files (None: the first sheet).
    ``quote`` is the quotation mark around cells: None is ``"``; empty means that no mark has a meaning. ``decimal`` and
    ``thousands`` are the marks in numbers that are text, ``date`` is the format of dates that are text (None: that of
    the column). If the decimal mark is a comma, a text with a full stop is invalid, unless stops are ``thousands``.
    """

    delimiter: Annotated[str, Field(min_length=1, max_length=1)] = ","
    decimal: Literal[".", ","] = "."
    thousands: Literal[".", ",", " ", "'"] | None = None
    quote: Literal['"', "'", ""] | None = None
    encoding: str = "utf-8"
    sheet: str | None = None
    date: str | None = None

    @model_validator(mode="after")
    def _readable(self) -> "Format":
        if self.date is not None:
            check_date_format(self.date)
        if not self.delimiter.isascii() or self.delimiter in _NO_MARK:
            raise ValueError("delimiter must be one ASCII character, and no line's end")
        if self.delimiter == self.quotation_mark:
            raise ValueError("delimiter must not be the quotation mark")
        for name in ("delimiter", "thousands"):
            if getattr(self, name) == self.decimal:
                raise ValueError(f"{name} and decimal are the same character")
        try:
            # `encode` refuses codecs that are no text encodings (base64, zip), which `lookup` accepts.
            "".encode(self.encoding)
            codecs.lookup(self.encoding)
        except (LookupError, ValueError):
            raise ValueError(
                f"encoding: there is no encoding of text '{sanitize(self.encoding)}'; usual ones are utf-8, latin-1, "
                "cp1252, utf-16"
            ) from None
        return self

    @property
    def quotation_mark(self) -> str:
        """The quotation mark; empty: none."""
        return '"' if self.quote is None else self.quote

    @property
    def marks(self) -> NumberMarks:
        """Marks in numbers that are text."""
        return NumberMarks(self.decimal, self.thousands)


class FileFormat(Format):
    """Format of one file, in place of the schema's ``format``.

    ``missing_values`` are the texts of missing cells of this file; None: the schema's.
    """

    missing_values: Annotated[tuple[str, ...], Field(strict=False)] | None = None


class Number(_Part):
    """A numeric feature, scaled from its declared bounds to [-1, 1]; a value outside is clipped.

    ``missing`` is the treatment of a missing value: "error"; "middle", the middle of the bounds (0 after scaling); or
    "indicator", the middle and a second feature that is 1 if the value is missing, else 0. ``fill`` is a number that
    replaces the middle. ``absent = "missing"`` allows a table without the column: all its cells count as missing.
    Without ``absent``, such a table is an error.
    """

    kind: Literal["number"]
    lower: Annotated[float, Field(strict=False, allow_inf_nan=False)]
    upper: Annotated[float, Field(strict=False, allow_inf_nan=False)]
    missing: Literal["error", "middle", "indicator"] = "error"
    absent: Literal["missing"] | None = None
    fill: Annotated[float, Field(strict=False, allow_inf_nan=False)] | None = None

    @model_validator(mode="after")
    def _ordered(self) -> "Number":
        _check_absent(self.absent, self.missing)
        check_bounds(self.lower, self.upper)
        if self.fill is not None and (self.missing == "error" or not self.lower <= self.fill <= self.upper):
            raise ValueError("fill must lie within the bounds, where missing values are no error")
        return self

    @property
    def fill_value(self) -> float:
        """Scaled value of a missing cell."""
        return 0.0 if self.fill is None else 2 * (self.fill - self.lower) / (self.upper - self.lower) - 1

    @property
    def width(self) -> int:
        """Number of features of this column."""
        return 2 if self.missing == "indicator" else 1

    @property
    def bounds(self) -> tuple[float, float]:
        """Values that are scaled to -1 and to 1."""
        return self.lower, self.upper


class Date(_Part):
    """A date as a numeric feature: its day, scaled from the declared bounds to [-1, 1], else clipped.

    ``format`` is the ``strptime`` format of text cells, with a year of four digits; a column of dates or times needs
    none. Missing values and absent columns are treated as in :class:`Number`.
    """

    fill_value: ClassVar[float] = 0.0

    kind: Literal["date"]
    lower: Annotated[date, Field(strict=False)]
    upper: Annotated[date, Field(strict=False)]
    format: str = ISO_DATE
    missing: Literal["error", "middle", "indicator"] = "error"
    absent: Literal["missing"] | None = None

    @model_validator(mode="after")
    def _ordered(self) -> "Date":
        _check_absent(self.absent, self.missing)
        if not self.lower < self.upper:
            raise ValueError("lower must be before upper")
        check_date_format(self.format)
        return self

    @property
    def width(self) -> int:
        """Number of features of this column."""
        return 2 if self.missing == "indicator" else 1

    @property
    def bounds(self) -> tuple[float, float]:
        """Days since 1970-01-01 that are scaled to -1 and to 1."""
        return float((self.lower - EPOCH).days), float((self.upper - EPOCH).days)


class Category(_Part):
    """A categorical feature: one 0/1 feature per declared category.

    A whole number is matched by its value: ``1.0`` is ``1`` (:class:`fedveil.data.cell_values.DeclaredValues`). An
    undeclared value is an error, or all zeros (``unknown = "zero"``). A missing value is an error, all zeros
    ("zero"), or all zeros and a last feature that is 1 ("indicator"). ``also`` maps other spellings to their
    category. ``absent`` is as in :class:`Number`.
    """

    kind: Literal["category"]
    categories: Annotated[tuple[str, ...], Field(strict=False, min_length=1)]
    unknown: Literal["error", "zero"] = "error"
    missing: Literal["error", "zero", "indicator"] = "error"
    absent: Literal["missing"] | None = None
    also: dict[str, str] | None = None

    @model_validator(mode="after")
    def _distinct(self) -> "Category":
        if len(set(self.categories)) != len(self.categories):
            raise ValueError("a category is declared twice")
        _check_absent(self.absent, self.missing)
        check_spellings(self.also, self.categories)
        return self

    @property
    def width(self) -> int:
        """Number of features of this column."""
        return len(self.categories) + (self.missing == "indicator")


class Label(_Part):
    """A class label: class i is ``classes[i]``, and ``also`` maps other spellings to their class."""

    kind: Literal["label"]
    column: str
    classes: Annotated[tuple[str, ...], Field(strict=False, min_length=2)]
    also: dict[str, str] | None = None

    @model_validator(mode="after")
    def _distinct(self) -> "Label":
        if len(set(self.classes)) != len(self.classes):
            raise ValueError("a class is declared twice")
        check_spellings(self.also, self.classes)
        return self


_Number: TypeAlias = Annotated[float, Field(strict=False, allow_inf_nan=False)]
_Limits: TypeAlias = Annotated[tuple[_Number, ...], Field(strict=False)]


class Amount(_Part):
    """A number to predict, not scaled, with optional declared bounds.

    A target outside the bounds is invalid, or clipped to the nearest bound (``outside = "clip"``). ``count = true``
    declares a count 0, 1, 2, ..., whose lower bound is 0; a fraction is then invalid.
    """

    kind: Literal["number"]
    column: str
    count: Literal[True] | None = None
    lower: _Number | None = None
    upper: _Number | None = None
    outside: Literal["error", "clip"] = "error"

    @model_validator(mode="after")
    def _ordered(self) -> "Amount":
        check_declared_bounds(self.lower, self.upper, self.outside)
        if self.lower is not None and self.upper is not None:
            check_bounds(self.lower, self.upper)
        if self.count:
            check_count(self.lower, self.upper)
        return self

    @property
    def bounds(self) -> tuple[float, float] | None:
        """Declared bounds of the target; None if none are declared."""
        return None if self.lower is None or self.upper is None else (self.lower, self.upper)


class Labels(_Part):
    """Several labels of a record: ``columns`` of 0 and 1, which exclude each other in no way.

    A record without one of its labels is refused.
    """

    kind: Literal["labels"]
    columns: Annotated[tuple[str, ...], Field(strict=False, min_length=2)]

    @model_validator(mode="after")
    def _distinct(self) -> "Labels":
        check_distinct(self.columns)
        return self


class Amounts(_Part):
    """Several numbers to predict, ``columns``, not scaled, with optional declared bounds, one for each column.

    A target outside its bounds is invalid, or clipped to the nearest bound (``outside = "clip"``).
    """

    kind: Literal["numbers"]
    columns: Annotated[tuple[str, ...], Field(strict=False, min_length=2)]
    lower: _Limits | None = None
    upper: _Limits | None = None
    outside: Literal["error", "clip"] = "error"

    @model_validator(mode="after")
    def _ordered(self) -> "Amounts":
        check_distinct(self.columns)
        for key, bounds in (("lower", self.lower), ("upper", self.upper)):
            if bounds is not None and len(bounds) != len(self.columns):
                raise ValueError(f"{key}: give {len(self.columns)} numbers, one for each of columns")
        check_declared_bounds(self.lower, self.upper, self.outside)
        for lower, upper in zip(self.lower or (), self.upper or (), strict=True):
            check_bounds(lower, upper)
        return self

    @property
    def amounts(self) -> tuple[Amount, ...]:
        """The declaration of each column by itself."""
        nothing = (None,) * len(self.columns)
        declared = zip(self.columns, self.lower or nothing, self.upper or nothing, strict=True)
        return tuple(
            Amount(kind="number", column=column, lower=lower, upper=upper, outside=self.outside)
            for column, lower, upper in declared
        )


class Survival(_Part):
    """A survival target: a follow-up time >= 0, and an event that is 1 if it occurred and 0 if censored.

    ``time`` is a numeric column. Where the tables hold dates, ``start`` and ``end`` are columns of dates in ``format``,
    and ``time`` is the name of the follow-up time that is computed from them: end - start, in ``unit``.

    ``entry`` is the column of the time at which a record came under observation (late entry, left truncation), on the
    scale of ``time`` and before it; with ``start`` and ``end`` it is a column of dates too. Nobody whose event came
    before the entry is in the tables. Regressions and training read it; noisy evaluation and survival curves refuse it
    (:func:`refuse_late_entry`). ``horizon`` is the public time at which follow-up ends, for the method ``newton``.
    """

    kind: Literal["survival"]
    time: str
    event: str
    horizon: Annotated[FollowUp, Field(strict=False)] | None = None
    entry: str | None = None
    start: str | None = None
    end: str | None = None
    unit: Literal["days", "weeks", "months", "years"] | None = None
    format: str | None = None

    @model_validator(mode="after")
    def _dated_or_not(self) -> "Survival":
        dates = {"start": self.start, "end": self.end, "unit": self.unit}
        absent = [key for key, value in dates.items() if value is None]
        if absent and (len(absent) < len(dates) or self.format is not None):
            raise ValueError(
                "start, end and unit go together: two columns of dates, and the unit of the time between them "
                f"('days', 'weeks', 'months' or 'years'); {absent[0]} is not given. Leave all of them and format out "
                "if the tables hold the follow-up time as a number"
            )
        if self.format is not None:
            check_date_format(self.format)
        columns = (self.event, self.time, self.entry, self.start, self.end)
        for column in columns:
            if column is not None and columns.count(column) > 1:
                raise ValueError(f"column '{column}' has two roles")
        return self

    @property
    def durations(self) -> dict[str, "Duration"]:
        """The times that are computed from two columns of dates, by name; empty if the tables hold numbers."""
        if self.start is None or self.end is None or self.unit is None:
            return {}
        ends = {self.time: self.end} | ({} if self.entry is None else {self.entry: self.entry})
        how = self.format or ISO_DATE, DAYS_OF[self.unit]
        return {name: Duration(self.start, end, *how) for name, end in ends.items()}


class Duration(NamedTuple):
    """The days from one date to another, divided by ``unit``; ``format`` is the ``strptime`` format of text cells."""

    start: str
    end: str
    format: str
    unit: float


Feature: TypeAlias = Annotated[Number | Date | Category, Field(discriminator="kind")]
Target: TypeAlias = Annotated[Label | Labels | Amount | Amounts | Survival, Field(discriminator="kind")]


class Schema(_Part):
    """Declaration of the columns of the tables; public, and the same for every silo.

    ``user`` names the column of user ids; a person has the same id in every silo. ``silo`` names the column of silo
    ids, and is left out if each silo has its own file. ``n_users`` is |U|, the public number of users, with or
    without records. ``silos`` may list the silos: a listed silo without a record takes part like any other. Columns
    that the schema does not name are not read. A cell equal to one of ``missing_values`` is missing; numbers are
    compared by value and dates by day.

    ``users`` is the SHA-256 of the list of ids that the institutions share among themselves
    (:mod:`fedveil.data.main_silos`): one id per line, in the order of the users' numbers. A silo with another list,
    or without one, takes no part. If ``users`` is left out, ids between institutions are the numbers from 0. In one
    process, ids are compared as text and no list is read.

    ``invalid`` is the treatment of a cell that its column's declaration does not allow: no number, undeclared, or
    missing without a rule. With "error" the tables are refused, and every participant sees that such a cell exists.
    With "bin" the column of every feature gets one more feature, its last, which is 1 for an invalid cell, while the
    others are 0. A record with an invalid target is left out.

    ``format`` is the format of every file without one of its own in ``formats``, whose keys are names of files without
    their folder. A format says how a file writes its cells, not what they mean: features and targets are the same
    numbers under any format. Between institutions, each silo declares the format of its own file in ``silo.toml``.

    ``listed_columns`` is the header of the tables, for patterns only. A feature whose name has a ``*`` stands for
    every listed column that matches, has no role and no declaration of its own, in the listed order. ``features``
    holds the expanded columns.
    """

    n_users: Annotated[int, Field(ge=1, le=MOST_USERS)]
    user: str
    users: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None = None
    silo: str | None = None
    silos: Annotated[tuple[str, ...] | None, Field(strict=False)] = None
    missing_values: Annotated[tuple[str, ...], Field(strict=False)] = MISSING_VALUES
    invalid: Literal["error", "bin"] = "error"
    listed_columns: Annotated[tuple[str, ...], Field(strict=False)] = ()
    format: Format = Format()
    formats: dict[str, FileFormat] | None = None
    target: Target
    features: Annotated[dict[str, Feature], Field(min_length=1)]

    @model_validator(mode="before")
    @classmethod
    def _patterns(cls, document: Any) -> Any:
        if isinstance(document, dict) and isinstance(document.get("target"), list | tuple):
            raise ValueError(
                "target: several targets need their kind, which decides the loss: target = { kind = "
                '"labels", columns = [...] } for labels of 0 and 1, kind = "numbers" for numbers to predict'
            )
        if not isinstance(document, dict) or not isinstance(document.get("features"), dict):
            return document
        return document | {"features": _expanded(document)}

    @model_validator(mode="after")
    def _one_role_per_column(self) -> "Schema":
        columns = [*self.roles, *self.durations.keys() - set(self.roles), *self.features]
        for column in columns:
            if columns.count(column) > 1:
                raise ValueError(f"column '{column}' has two roles")
        if SILO in (*self.target_columns, *self.features):
            raise ValueError(
                f"column '{SILO}': statistics and preprocessing call the silos so; give the feature or target another "
                "name"
            )
        return self

    @model_validator(mode="after")
    def _formats_name_files(self) -> "Schema":
        for name in self.formats or ():
            if Path(name).name != name:
                raise ValueError(f"formats: '{sanitize(name)}' is no name of a file; leave out its folder")
        return self

    @model_validator(mode="after")
    def _declared_values_are_read(self) -> "Schema":
        for missing in (self.missing_values, *map(self.missing_values_of, self.formats or ())):
            for name, column in self._categorical.items():
                declared = column.categories if isinstance(column, Category) else column.classes
                check_not_missing(name, (*declared, *(column.also or ())), missing)
        return self

    def format_of(self, file: Path | str) -> Format:
        """Return the format of a file, by the file's name."""
        return (self.formats or {}).get(Path(file).name, self.format)

    def missing_values_of(self, file: Path | str) -> tuple[str, ...]:
        """Return the texts of missing cells of a file.

        A number among the schema's missing values is also missing where the file writes it with its own decimal mark.
        """
        written = self.format_of(file)
        if isinstance(written, FileFormat) and written.missing_values is not None:
            return written.missing_values
        mark, own = self.format.decimal, written.decimal
        if own == mark:
            return self.missing_values
        numbers = [text for text in self.missing_values if number_of(text.replace(mark, ".")) is not None]
        return (*self.missing_values, *(text.replace(mark, own) for text in numbers if mark in text))

    def with_file_format(self, file: Path | str, file_format: FileFormat | None) -> "Schema":
        """Return the schema with a file's own format; None: the schema unchanged.

        Raises:
            DataError: a declared category or class is a missing value of this file.
        """
        if file_format is None:
            return self
        formats = (self.formats or {}) | {Path(file).name: file_format}
        document = {name: getattr(self, name) for name in Schema.model_fields} | {"formats": formats}
        return validate_document(Schema, document, f"format of {file}", DataError)

    @property
    def target_columns(self) -> tuple[str, ...]:
        """Names of the target's columns; of a time between dates the name of the time."""
        target = self.target
        if isinstance(target, Survival):
            return (target.event, target.time, *(() if target.entry is None else (target.entry,)))
        return target.columns if isinstance(target, Labels | Amounts) else (target.column,)

    @property
    def target_names(self) -> tuple[str, ...]:
        """Names of k labels or numbers to predict; empty for any other target."""
        return self.target.columns if isinstance(self.target, Labels | Amounts) else ()

    @property
    def amounts(self) -> dict[str, Amount]:
        """Declarations of the numbers to predict, by column."""
        target = self.target
        if isinstance(target, Amount):
            return {target.column: target}
        return {amount.column: amount for amount in target.amounts} if isinstance(target, Amounts) else {}

    @property
    def roles(self) -> tuple[str, ...]:
        """Columns that are not features: user, silo, target."""
        target = self.read_columns(self.target_columns)
        return (self.user, *((self.silo,) if self.silo is not None else ()), *target)

    @property
    def columns(self) -> tuple[str, ...]:
        """Every column that is read."""
        return (*self.roles, *self.features)

    @property
    def durations(self) -> dict[str, Duration]:
        """Columns of the target that are computed from two columns of dates."""
        return self.target.durations if isinstance(self.target, Survival) else {}

    def read_columns(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the columns of the tables that these columns are read from, each once."""
        dates = {name: (duration.start, duration.end) for name, duration in self.durations.items()}
        return tuple(dict.fromkeys(column for name in names for column in dates.get(name, (name,))))

    @property
    def may_lack(self) -> frozenset[str]:
        """Columns that a table may lack; all cells of a lacking column count as missing."""
        return frozenset(name for name, feature in self.features.items() if feature.absent is not None)

    @property
    def spellings(self) -> dict[str, dict[str, str]]:
        """Alternative spellings by column, each mapped to its declared value."""
        return {name: column.also for name, column in self._categorical.items() if column.also}

    @property
    def _categorical(self) -> dict[str, Category | Label]:
        features = {name: feature for name, feature in self.features.items() if isinstance(feature, Category)}
        return features | ({self.target.column: self.target} if isinstance(self.target, Label) else {})

    @property
    def target_range(self) -> tuple[float, float] | None:
        """Declared bounds of a number to predict; None without them."""
        return self.target.bounds if isinstance(self.target, Amount) else None

    @property
    def width(self) -> int:
        """Number of features of a record."""
        return sum(feature.width + self.bins_invalid for feature in self.features.values())

    @property
    def matching(self) -> tuple[str, str, str]:
        """Sentences of the statement about the matching of a user's records: checked and unchecked facts."""
        how = (
            "a user's id is the user's number"
            if self.users is None
            else f"users are numbered by one list of ids (sha256 {self.users}), without which no silo takes part"
        )
        between = (
            f"Between institutions, {how}. That an id stands for the same person at all of them is their own claim, "
            "which nobody checks."
        )
        return AS_TEXT, between, invalid_cells_notice(self.bins_invalid)

    @property
    def bins_invalid(self) -> bool:
        """Return whether an invalid cell is encoded in a feature of its own instead of being refused."""
        return self.invalid == "bin"


def refuse_late_entry(schema: Schema | None, reader: str) -> None:
    """Refuse a schema with late entry for what would take everybody to be under observation from time 0.

    Args:
        schema: the schema; None: the records have none.
        reader: what does not read the entry, for the error.

    Raises:
        ConfigError: the schema declares an entry.
    """
    if schema is not None and isinstance(schema.target, Survival) and schema.target.entry is not None:
        raise ConfigError(
            f"target.entry: {reader} takes all records as observed from time 0, which people who entered later would "
            "bias; training and `fedveil infer` read the entry. Leave it out of the schema only if nobody entered late"
        )


def _expanded(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the features with every pattern replaced by the listed columns that it matches."""
    features, target = document["features"], document.get("target")
    roles = [document.get("user"), document.get("silo")]
    if isinstance(target, dict):
        roles += [target.get(key) for key in ("column", "time", "event", "entry", "start", "end")]
        several = target.get("columns")
        roles += several if isinstance(several, list | tuple) else []
    listed = document.get("listed_columns", ())
    # This runs before validation: the document may still have any type in any place.
    free = [name for name in listed if name not in (*roles, *features)] if _are_names(listed) else []
    expanded: dict[str, Any] = {}
    owner: dict[str, str] = {}
    for name, declared in features.items():
        if "*" not in name:
            expanded[name] = declared
            continue
        pattern = re.compile(".*".join(map(re.escape, name.split("*"))), re.DOTALL)
        matched = [column for column in free if pattern.fullmatch(column)]
        if not matched:
            raise ValueError(
                f"features.{name}: no column of listed_columns is matched; list the tables' public header there"
            )
        for column in matched:
            if column in owner:
                raise ValueError(f"features.{name}: column '{column}' is matched by '{owner[column]}' too")
            owner[column], expanded[column] = name, declared
    return expanded


def _are_names(listed: Any) -> bool:
    return isinstance(listed, list | tuple) and all(isinstance(name, str) for name in listed)


def read_schema(path: str | Path) -> Schema:
    """Read a schema from a TOML file.

    Raises:
        DataError: the file is missing, is not TOML, or is not a valid schema; the error names the file and the key.
    """
    return parse_schema(read_content(as_path(path, "read_schema"), DataError), path)


def parse_schema(content: bytes, path: Path | str) -> Schema:
    """Parse the content of a schema file.

    Raises:
        DataError: as :func:`read_schema`.
    """
    document = parse_toml(as_text(content, path, DataError), f"schema {path}", DataError)
    return validate_document(Schema, document, f"schema {path} does not fit", DataError)
