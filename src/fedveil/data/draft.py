"""Draft of a schema from a PUBLIC sample of a table, with a guess of the target."""

import csv
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import tomlkit
from tomlkit.items import InlineTable, Table

from fedveil.data.cell_values import USUAL_MARKS, DeclaredValues, NumberMarks, day_of, number_of, whole_number
from fedveil.data.schema import EPOCH, ISO_DATE, MISSING_VALUES, SILO, Format
from fedveil.data.table_file import DELIMITERS, TEXT, open_table
from fedveil.data.table_reader import EVENTS, TableReader
from fedveil.data.target_leakage import (
    has_outcome_name,
    leakage_reason,
    named_like_a_duration,
    named_like_a_start,
    named_like_an_end,
    named_like_an_event,
)
from fedveil.errors import DataError, did_you_mean
from fedveil.files import LARGEST_FILE, read_content
from fedveil.sanitize import sanitize

USER_NAMES: Final = (
    "user",
    "patient",
    "pat",
    "customer",
    "client",
    "subject",
    "person",
    "member",
    "p",
    "mrn",
)
"""Usual names of the user column, alone or followed by `id`, `nr`, `no` or `number`; case and separators are free."""

SILO_NAMES: Final = ("silo", "hospital", "site", "center", "centre", "bank", "organisation", "organization")
LABEL_NAMES: Final = ("label", "target", "class", "outcome", "y")
_LINES_SEEN: Final = 200
"""Number of lines from which the format of a file is guessed."""

_MARKS: Final = (
    NumberMarks("."),
    NumberMarks(","),
    *(NumberMarks(".", between) for between in (",", "'", " ")),
    *(NumberMarks(",", between) for between in (".", "'", " ")),
)
"""Marks in numbers that a draft detects."""

_FEWEST: Final = 2
"""Smallest number of categories of a useful feature."""

LEAST_IN_PATTERN: Final = 4
"""Smallest number of columns with one prefix and one declaration that the draft writes as a pattern."""

_DATES: Final = ("%Y-%m-%d", "%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%Y%m%d")
_NUMBERED: Final = ("", "id", "nr", "no", "number")
_PATTERN_NAME: Final = "the * in its name stands for several columns in a schema; rename it"
_NO_FEATURE: Final = "being neither a number, a date, nor one of few categories"

_WARNING = """\
Drafted from a sample. If that sample holds private records, so does this file: its bounds and categories
would reveal them outside every guarantee. Draft from PUBLIC data only, then set every bound and category from
what is known of the domain, not from the records.
"""


def draft_schema(
    samples: Path | Sequence[Path],
    *,
    user: str | None = None,
    silo: str | None = None,
    label: str | None = None,
) -> str:
    """Draft the TOML of a schema from public samples; a person must check and correct it.

    Numbers get the range of the sample, rounded outward to two significant digits; dates get the years of the sample.
    Columns of text, or of at most two distinct numbers, become categories. Two kinds of columns are left out, with a
    comment: text columns with more than 20 distinct values, and columns that look like an outcome, by their name or
    because they alone separate two classes. Four or more columns with one prefix and one declaration become a
    pattern. The format of each CSV file (encoding, delimiter, marks in numbers) is guessed from its first lines, that
    of dates from all cells; files whose formats differ get one each. A feature that some sample lacks is ``absent``.

    Args:
        samples: one sample, or one for each silo, in any supported format.
        user: user column; None guesses it by name.
        silo: silo column; None guesses it by name, and the draft has none if no name fits.
        label: column of the class label. None guesses it by name; else takes a survival time, or its start and end as
            dates, and its event (0 and 1) with usual names; else the last column that can be a target, preferably with
            the name of an outcome.

    Returns:
        TOML that :func:`read_schema` accepts, with comments.

    Raises:
        DataError: a sample cannot be read, is empty, lacks a named column, or no column looks like a user column.
    """
    paths = [samples] if isinstance(samples, Path) else list(samples)
    formats = {sample: guess_format(sample) for sample in paths}
    tables = {sample: _cells(sample, written) for sample, written in formats.items()}
    formats = _with_dates(formats, tables)
    path, names = paths[0], list(dict.fromkeys(name for table in tables.values() for name in table))
    cells, lacked = _joined(names, list(tables.values()))
    user = _choose_column(
        path, names, user, tuple(f"{name}{end}" for name in USER_NAMES for end in _NUMBERED)
    )
    if user is None:
        raise DataError(
            f"{path}: no column looks like a user's; name it (--user COLUMN). The columns are: "
            f"{sanitize(', '.join(names))}"
        )
    silo = _choose_column(path, names, silo, SILO_NAMES)
    guessed = label is None
    label = _choose_column(path, names, label, LABEL_NAMES)
    if lacked & {user, silo, label}:
        raise DataError(
            f"{path}: a sample lacks column '{sanitize(min(lacked & {user, silo, label}, key=str))}'"
        )
    candidates = {name: cells[name] for name in names if name not in (user, silo)}
    survival = None if label else guess_survival(candidates, _DATES)
    usable = survival if survival is not None and survival.usable else None
    label = label or guess_label(candidates) if usable is None else usable.event
    if label is None or label in (user, silo):
        raise DataError(
            f"{path}: no column is left for the label; name it (--label COLUMN). The columns are: "
            f"{sanitize(', '.join(names))}"
        )
    declared, left_out = _sorted_out(
        [name for name in names if name not in {user, silo, label, *(usable.columns if usable else ())}],
        cells,
        label,
    )
    for name in declared.keys() & lacked:
        declared[name]["absent"] = "missing"
    patterns = _patterns(declared)

    document = tomlkit.document()
    for line in _WARNING.splitlines():
        document.add(tomlkit.comment(line))
    document.add("n_users", tomlkit.item(len(distinct(cells[user]))))
    document["n_users"].comment("users in the sample; declare the public number of ALL users")
    document.add("user", tomlkit.item(user))
    if silo is not None:
        document.add("silo", tomlkit.item(silo))
    if patterns:
        document.add(
            "listed_columns", tomlkit.item([name for name in names if "*" not in name]).multiline(True)
        )
    _add_formats(document, formats)
    if usable is not None:
        target = survival_target(usable)
    else:
        target = label_target(label, cells[label], guessed=guessed)
        if survival is not None:
            named = " and ".join(
                sanitize(column) for column in (*(survival.dates or (survival.time,))[:2], survival.event)
            )
            target.add(
                tomlkit.comment(f"survival, with {named}? Write the event as 0 and 1 in the tables first")
            )
    document.add("target", target)
    document.add("features", _features(declared, left_out, patterns, cells))
    return tomlkit.dumps(document)


def _cells(path: Path, file_format: Format) -> dict[str, pa.Array]:
    """Return the text of every cell by column: null if missing, numbers as a program writes them.

    Raises:
        DataError: the sample has no record.
    """
    sample = open_table(path, None, file_format)
    if not sample.num_rows:
        raise DataError(f"{path} has no record; a draft needs a sample")
    reader, cells = TableReader(path, sample, MISSING_VALUES, file_format.marks), dict[str, pa.Array]()
    for name in sample.column_names:
        text, missing = reader.text(name)
        text = pc.if_else(pa.array(missing), None, text)
        values = reader.parse_numbers(text)
        if (
            file_format.marks != USUAL_MARKS
            and not pc.any(pc.and_(values.is_null(), text.is_valid())).as_py()
        ):
            text = values.cast(pa.string())
        cells[name] = _whole(text)
    return cells


def _with_dates(
    formats: Mapping[Path, Format], tables: Mapping[Path, dict[str, pa.Array]]
) -> dict[Path, Format]:
    """Return the formats with a date format for each file, if files write a column of dates differently.

    The dates of these files become ISO dates in ``tables``.
    """
    styles: dict[Path, str] = {}
    for name in dict.fromkeys(name for table in tables.values() for name in table):
        fitting = {path: _date_formats(table[name]) for path, table in tables.items() if name in table}
        if all(fitting.values()) and not set.intersection(*map(set, fitting.values())):
            styles |= {path: fits[0] for path, fits in fitting.items() if fits[0] != _DATES[0]}
    for path, style in styles.items():
        for name, cells in tables[path].items():
            if style in _date_formats(cells):
                coded = cells.dictionary_encode()
                days = np.array(
                    [day_of(cell, style) for cell in coded.dictionary.to_pylist()], "datetime64[D]"
                )
                tables[path][name] = pa.array(days.astype(str), pa.string()).take(coded.indices)
    return {path: written.model_copy(update={"date": styles.get(path)}) for path, written in formats.items()}


def _date_formats(cells: pa.Array) -> list[str]:
    """Return the date formats that fit all cells."""
    values = distinct(cells)
    return [form for form in _DATES if all(day_of(value, form) is not None for value in values)]


def _joined(
    names: Sequence[str], tables: Sequence[dict[str, pa.Array]]
) -> tuple[dict[str, pa.Array], set[str]]:
    """Return the cells of all samples by column, null where a sample lacks the column, and the lacked columns."""
    lacked = {name for name in names for table in tables if name not in table}
    rows = [len(next(iter(table.values()))) for table in tables]
    cells = {
        name: pa.concat_arrays(
            [table.get(name, pa.nulls(n, pa.string())) for table, n in zip(tables, rows, strict=True)]
        )
        for name in names
    }
    return cells, lacked


def _add_formats(document: tomlkit.TOMLDocument, formats: Mapping[Path, Format]) -> None:
    """Add one format if all files have the same, else the format of every file with an unusual one."""
    if len(set(formats.values())) == 1:
        written = next(iter(formats.values()))
        if written != Format():
            document.add("format", tomlkit.item(written.model_dump(exclude_defaults=True)))
        return
    table = tomlkit.table(is_super_table=True)
    for path, written in formats.items():
        if written != Format():
            table.add(path.name, tomlkit.item(written.model_dump(exclude_defaults=True)))
    document.add("formats", table)


def _whole(cells: pa.Array) -> pa.Array:
    """Write whole numbers without fractions of zeros and exponents; return other columns unchanged."""
    coded = cells.dictionary_encode()
    values = [whole_number(text) for text in coded.dictionary.to_pylist()]
    if None in values:
        return cells
    return pa.array([str(value) for value in values], pa.string()).take(coded.indices)


def _sorted_out(
    names: Sequence[str], cells: dict[str, pa.Array], label: str
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Return the declarations of the features, and for every other column the reason for leaving it out."""
    declared, left_out = dict[str, dict[str, Any]](), dict[str, str]()
    for name in names:
        name_problem = "its name is kept for the silos" if name == SILO else ""
        name_problem = _PATTERN_NAME if "*" in name else name_problem
        feature, reason = _feature(cells[name]), name_problem or _outcome(name, cells[name], cells[label])
        if feature is None or reason:
            left_out[name] = reason or _nothing(cells[name])
        else:
            declared[name] = feature
    return declared, left_out


def _nothing(cells: pa.Array) -> str:
    """Return the reason why a column is not declared as a feature."""
    values = len(distinct(cells))
    if values < _FEWEST:
        return "it has one value in the whole sample" if values else "it is empty here"
    return almost_numbers(cells) or _NO_FEATURE


def guess_format(path: Path) -> Format:
    """Guess the format of a CSV file; any other file has the default format.

    The encoding is UTF-16 if the file begins with its byte order mark, else UTF-8 if the file decodes, else cp1252.
    The delimiter is the most frequent candidate in the header. Of the cells of the first 200 lines, those that are
    numbers under one pair of marks alone decide about the marks: ``1,5`` is a number with a decimal comma,
    ``1.234,5`` one with points between thousands. ``1.234`` decides nothing.
    """
    if path.suffix.lower() not in TEXT:
        return Format()
    content = read_content(path, DataError, largest=LARGEST_FILE)
    encoding = "utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8"
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError:
        encoding, text = "cp1252", content.decode("cp1252", errors="replace")
    lines = text.lstrip("\ufeff").splitlines()[: 1 + _LINES_SEEN] or [""]
    delimiter = max(DELIMITERS, key=lines[0].count)
    quote = None if '"' in "".join(lines) or not _is_quoted(lines, delimiter, "'") else "'"
    cells = [
        cell.strip()
        for row in csv.reader(lines[1:], delimiter=delimiter, quotechar=quote or '"')
        for cell in row
    ]
    marks = max(
        (candidate for candidate in _MARKS if candidate.decimal != delimiter),
        key=lambda candidate: sum(_decides_for(candidate, cell) for cell in cells),
    )
    fields = {"encoding": encoding, "delimiter": delimiter, "quote": quote}
    return Format.model_validate(fields | {"decimal": marks.decimal, "thousands": marks.thousands})


def _is_quoted(lines: Sequence[str], delimiter: str, quote: str) -> bool:
    """Return whether every cell that begins or ends with a mark does both, and one does."""
    cells = [cell.strip() for line in lines for cell in line.split(delimiter)]
    marked = [cell for cell in cells if cell.startswith(quote) or cell.endswith(quote)]
    return bool(marked) and all(
        len(cell) > 1 and cell.startswith(quote) and cell.endswith(quote) for cell in marked
    )


def _decides_for(marks: NumberMarks, cell: str) -> bool:
    """Return whether a cell is a number under these marks and under no others of :data:`_MARKS`.

    Marks without thousands read a plain number under other marks of the same decimal, too: they come first there.
    """
    read = [candidate for candidate in _MARKS if number_of(candidate.pointed(cell)) is not None]
    return bool(read) and {candidate.decimal for candidate in read} == {marks.decimal} and marks == read[0]


def _outcome(name: str, cells: pa.Array, labels: pa.Array) -> str:
    """Return the reason why a column may be known only after the target; empty if it is not suspected."""
    if has_outcome_name(name):
        return "its name sounds like an outcome; declare it if it is known BEFORE what is predicted"
    floats, values, classes = numbers(cells), distinct(cells), distinct(labels)
    category = floats is None or len(values) <= 2
    if len(classes) != 2:
        return ""
    coded = pc.index_in(cells, pa.array(values, pa.string())) if category else floats
    read = pc.fill_null(pc.cast(coded, pa.float64()), np.nan).to_numpy(zero_copy_only=False)
    positive = np.asarray(pc.fill_null(pc.equal(labels, classes[1]), False)).astype(np.int64)
    reason = leakage_reason(read, positive, category=category)
    return reason and f"{reason}; declare it if it is known BEFORE what is predicted"


def _patterns(declared: dict[str, dict[str, Any]]) -> dict[str, list[str]]:
    """Return the patterns of several columns with one declaration, each with its columns."""
    alike: dict[tuple[str, str], list[str]] = {}
    for name, feature in declared.items():
        beginning = "".join(takewhile(lambda character: character not in "_-.0123456789", name))
        if beginning and beginning != name:
            alike.setdefault((beginning, repr(feature)), []).append(name)
    patterns: dict[str, list[str]] = {}
    for (beginning, _), members in alike.items():
        pattern = f"{beginning}{_mark(members, beginning)}*"
        # A pattern is dropped if it would also match a column with another declaration.
        conflicts = [
            column for column in declared if column.startswith(pattern[:-1]) and column not in members
        ]
        if len(members) >= LEAST_IN_PATTERN and not conflicts and pattern not in patterns:
            patterns[pattern] = members
    return patterns


def _mark(members: Sequence[str], beginning: str) -> str:
    """Return the character after the common prefix if all names share it and it is no digit, else empty."""
    following = {name[len(beginning)] for name in members}
    return following.pop() if len(following) == 1 and not following & set("0123456789") else ""


def _features(
    declared: dict[str, dict[str, Any]],
    left_out: dict[str, str],
    patterns: dict[str, list[str]],
    cells: dict[str, pa.Array],
) -> Table:
    """Return the TOML table of features, one line each, with comments about guesses and left-out columns."""
    features = tomlkit.table()
    within = {name: pattern for pattern, members in patterns.items() for name in members}
    for name, reason in left_out.items():
        features.add(tomlkit.comment(f"{sanitize(name)}: left out, {reason}"))
    for name, feature in declared.items():
        key = within.get(name, name)
        if key not in features:
            features.add(key, _inline(feature))
            if twice := _other_cases(feature):
                features[key].comment(f"{sanitize(twice)}: one category? write one, and the others in `also`")
            if other := _other_format(feature, cells[name]):
                features[key].comment(f"a guess: all cells of the sample are dates as {other} too")
    return features


def _other_cases(feature: dict[str, Any]) -> str:
    """Return the categories that differ only in case, as text; empty if there are none."""
    alike: dict[str, list[str]] = {}
    for category in feature.get("categories", ()):
        alike.setdefault(category.lower(), []).append(category)
    return "; ".join(" and ".join(same) for same in alike.values() if len(same) > 1)


def _other_format(feature: dict[str, Any], cells: pa.Array) -> str:
    """Return another date format that fits all cells of a date column; empty if none fits."""
    if feature["kind"] != "date":
        return ""
    own = feature.get("format", _DATES[0])
    return next((other for other in _date_formats(cells) if other != own), "")


def _inline(feature: dict[str, Any]) -> InlineTable:
    table = tomlkit.inline_table()
    table.update(feature)
    return table


def _choose_column(
    path: Path, names: list[str], requested: str | None, usual_names: tuple[str, ...]
) -> str | None:
    """Return the requested column, else the first column with a usual name, else None."""
    if requested is not None and requested not in names:
        raise DataError(
            f"{path} has no column '{sanitize(requested)}'; it has: {sanitize(', '.join(names))}"
            f"{sanitize(did_you_mean(requested, names))}"
        )
    return requested or next(
        (name for name in names if re.sub(r"[\W_]", "", name).lower() in usual_names), None
    )


def _feature(cells: pa.Array) -> dict[str, Any] | None:
    """Return the declaration of a feature; None if it is no number, no date, and has many categories."""
    values, floats = distinct(cells), numbers(cells)
    feature: dict[str, Any]
    if floats is not None and len(values) > 2:
        extremes = pc.min_max(floats).as_py()
        lower, upper = _outward(extremes["min"], math.floor), _outward(extremes["max"], math.ceil)
        feature = {"kind": "number", "lower": lower, "upper": upper}
        missing = "middle"
    elif len(values) > 2 and (dates := _dates(cells)):
        feature, missing = dates, "middle"
    elif _FEWEST <= len(values) <= MOST_CATEGORIES:
        feature, missing = {"kind": "category", "categories": values}, "zero"
    else:
        return None
    return feature | ({"missing": missing} if cells.null_count else {})


def _dates(cells: pa.Array) -> dict[str, Any] | None:
    """Return the declaration of a date column in the first format that fits all cells; None if none fits."""
    values = distinct(cells)
    for written in _DATES:
        days = [day_of(value, written) for value in values]
        valid_days = [day for day in days if day is not None]
        if len(valid_days) == len(values):
            first, last = (EPOCH + timedelta(days=end(valid_days)) for end in (min, max))
            feature = {
                "kind": "date",
                "lower": first.replace(month=1, day=1),
                "upper": date(last.year + 1, 1, 1),
            }
            return feature | ({} if written == _DATES[0] else {"format": written})
    return None


def _outward(bound: float, rounding: Callable[[float], int]) -> float:
    """Round a bound away from the sample to two significant digits."""
    if bound == 0:
        return 0.0
    digit = 10.0 ** (math.floor(math.log10(abs(bound))) - 1)  # the place of the second significant digit
    return float(f"{rounding(bound / digit) * digit:.6g}")


# --- guess of the target ---


MOST_CATEGORIES: Final = 20
NEGATIVE: Final = frozenset({"no", "n", "false", "negative", "neg", "none", "absent", "nein", "non"})
"""Words that name the negative one of two classes: it is listed first, so that the second class is predicted."""

_MOST_MARKS: Final = 5
"""Largest number of distinct non-numeric texts in a column that still counts as numeric."""


@dataclass(frozen=True, kw_only=True)
class SurvivalGuess:
    """Columns that look like a survival target.

    Attributes:
        time: column of the time, or the name of the time between two columns of dates.
        event: column of the event.
        usable: whether the event has the values 0 and 1, which a schema requires.
        dates: columns of the start and the end of follow-up, and the format of their dates; None: the time is a column.
    """

    time: str
    event: str
    usable: bool
    dates: tuple[str, str, str] | None = None

    @property
    def columns(self) -> frozenset[str]:
        """The columns of the target."""
        return frozenset((self.event, *((self.time,) if self.dates is None else self.dates[:2])))


def guess_survival(columns: Mapping[str, pa.Array], formats: Sequence[str]) -> SurvivalGuess | None:
    """Return the columns that look like a time and its event, by name and values; None without both.

    Without a column of times, two columns of dates in one of these formats that are named like the start and the end
    of follow-up are taken, if no end is before its start.
    """
    time = _most_usual(
        {name: named_like_a_duration(name) for name, cells in columns.items() if _is_duration(cells)}
    )
    dates = None if time is not None else _start_and_end(columns, formats)
    if dates is not None:
        time = "follow_up" if "follow_up" not in columns else "follow_up_from_dates"
    binary_columns = {
        name: cells for name, cells in columns.items() if name != time and len(distinct(cells)) <= len(EVENTS)
    }
    usable = _most_usual(
        {name: named_like_an_event(name) for name, cells in binary_columns.items() if _is_event(cells)}
    )
    event = usable or _most_usual({name: named_like_an_event(name) for name in binary_columns})
    return (
        None
        if time is None or event is None
        else SurvivalGuess(time=time, event=event, usable=usable is not None, dates=dates)
    )


def _start_and_end(columns: Mapping[str, pa.Array], formats: Sequence[str]) -> tuple[str, str, str] | None:
    """Return the columns of dates that look like the start and the end of follow-up, and their format."""
    for written in formats:
        days = {
            name: [None if cell is None else day_of(cell, written) for cell in cells.to_pylist()]
            for name, cells in columns.items()
            if len(distinct(cells)) > len(EVENTS) and day_of(distinct(cells)[0], written) is not None
        }
        start = _most_usual({name: named_like_a_start(name) for name in days})
        end = _most_usual({name: named_like_an_end(name) for name in days if name != start})
        if start is None or end is None:
            continue
        day_pairs = list(zip(days[start], days[end], strict=True))
        if all(
            start_day is None or end_day is None or start_day <= end_day for start_day, end_day in day_pairs
        ):
            return start, end, written
    return None


def _most_usual(ranks: Mapping[str, int | None]) -> str | None:
    ranked = [(rank, name) for name, rank in ranks.items() if rank is not None]
    return min(ranked, key=lambda entry: entry[0])[1] if ranked else None


def _is_duration(cells: pa.Array) -> bool:
    floats = numbers(cells)
    return floats is not None and len(distinct(cells)) > len(EVENTS) and pc.min(floats).as_py() >= 0


def _is_event(cells: pa.Array) -> bool:
    values, find = distinct(cells), DeclaredValues({event: index for index, event in enumerate(EVENTS)}).place
    return bool(values) and all(find(value) is not None for value in values)


def guess_label(columns: Mapping[str, pa.Array]) -> str | None:
    """Return the last column that can be a target, preferring columns with the name of an outcome."""
    able = [
        name
        for name, cells in columns.items()
        if 1 < len(distinct(cells)) <= MOST_CATEGORIES or numbers(cells) is not None
    ]
    return next(reversed([name for name in able if has_outcome_name(name)] or able or list(columns)), None)


def survival_target(guess: SurvivalGuess) -> Table:
    """Return the TOML table of a survival target."""
    target, event = tomlkit.table(), guess.event
    target.add("kind", "survival")
    target.add("time", guess.time)
    if guess.dates is None:
        target["time"].comment("a guess")
    else:
        start, end, written = guess.dates
        target["time"].comment("the name of the time from start to end")
        target.add("start", start)
        target["start"].comment("a guess")
        target.add("end", end)
        target["end"].comment("a guess: the date of the event, or the last day without it")
        target.add("unit", "days")
        target["unit"].comment("or 'weeks', 'months', 'years'")
        if written != ISO_DATE:
            target.add("format", written)
    target.add("event", event)
    reverse = "; by its name it may be the other way round" if event.lower().startswith("cens") else ""
    target["event"].comment(f"a guess: 1 must be the event and 0 a censored record{reverse}")
    target.add(
        tomlkit.comment("horizon = 1825: the time at which follow-up ends by the protocol, if it does")
    )
    return target


def label_target(label: str, cells: pa.Array, *, guessed: bool) -> Table:
    """Return the TOML table of a target column: a label if it has few values, else a number."""
    floats = numbers(cells)
    values = distinct(cells) if floats is None else sorted(distinct(cells), key=float)
    target = tomlkit.table()
    few = 1 < len(values) <= MOST_CATEGORIES
    target.add("kind", "label" if few else "number")
    target.add("column", label)
    if guessed:
        target["column"].comment("a guess")
    if few:
        ordered = (
            sorted(values, key=lambda value: value.lower() not in NEGATIVE)
            if len(values) == len(EVENTS)
            else values
        )
        target.add("classes", ordered)
        if floats is not None and len(values) > len(EVENTS):
            target["kind"].comment("a guess: the sample has few values, and they may be amounts")
            for line in _amount_lines(label, values):
                target.add(tomlkit.comment(line))
    elif floats is None:
        target["kind"].comment(almost_numbers(cells) or "not all cells of the sample are numbers")
    else:
        for line in _bound_lines(values):
            target.add(tomlkit.comment(line))
    return target


def _amount_lines(label: str, values: Sequence[str]) -> list[str]:
    """Return comments that declare a column of few numbers as an amount instead of a label."""
    count = "count = true, lower = 0, " if _are_counts(values) else "lower = ..., "
    return [
        f"If {sanitize(label)} is an amount and no class, remove classes and declare kind = 'number', {count}",
        "upper = ..., with bounds that are known of the domain and not taken from records.",
    ]


def _bound_lines(values: Sequence[str]) -> list[str]:
    """Return comments that ask for the bounds of a number to predict; none is taken from the sample."""
    lines = [
        "newton and [evaluation] need the least and the largest value that the domain allows, not those of records:",
        "lower = ...",
        "upper = ...",
    ]
    if _are_counts(values):
        lines.append(
            "count = true, for a count 0, 1, 2, ... with lower = 0: Poisson regression is then taken"
        )
    return lines


def _are_counts(values: Sequence[str]) -> bool:
    return all(float(value) >= 0 and float(value).is_integer() for value in values)


def almost_numbers(cells: pa.Array) -> str:
    """Return the reason to leave out a numeric column with a few other texts; empty for other columns.

    An infinity counts as such a text, because no bound contains it.
    """
    texts = pc.drop_null(cells).to_pylist()
    marks = sorted({text for text in texts if not _is_finite(text)})
    if not marks or len(marks) > _MOST_MARKS or 2 * sum(map(_is_finite, texts)) < len(texts):
        return ""
    named = ", ".join(f"'{sanitize(mark)}'" for mark in marks)
    return f"a number but for {named}: name these in missing_values and declare `missing`, or set invalid = 'bin'"


def _is_finite(text: str) -> bool:
    number = number_of(text)
    return number is not None and abs(number) < float("inf")


def numbers(cells: pa.Array) -> pa.Array | None:
    """Return the cells as finite numbers; None if some cell is not a finite number."""
    try:
        floats = pc.cast(cells, pa.float64())
    except pa.ArrowInvalid:
        return None
    return floats if pc.all(pc.is_finite(floats)).as_py() else None


def distinct(cells: pa.Array) -> list[str]:
    """Return the sorted distinct values of a column, without nulls."""
    return sorted(pc.drop_null(pc.unique(cells)).to_pylist())
