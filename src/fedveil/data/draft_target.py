"""Guess of the target for the draft of a schema: a class, a number, or a survival time with its event."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
import tomlkit
from tomlkit.items import Table

from fedveil.data.cell_values import DeclaredValues, day_of, number_of
from fedveil.data.schema import ISO_DATE
from fedveil.data.table_reader import EVENTS
from fedveil.data.target_leakage import (
    has_outcome_name,
    named_like_a_duration,
    named_like_a_start,
    named_like_an_end,
    named_like_an_event,
)
from fedveil.sanitize import sanitize

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
    two = {
        name: cells for name, cells in columns.items() if name != time and len(distinct(cells)) <= len(EVENTS)
    }
    usable = _most_usual({name: named_like_an_event(name) for name, cells in two.items() if _is_event(cells)})
    event = usable or _most_usual({name: named_like_an_event(name) for name in two})
    return (
        None
        if time is None or event is None
        else SurvivalGuess(time=time, event=event, usable=usable is not None, dates=dates)
    )


def _start_and_end(columns: Mapping[str, pa.Array], formats: Sequence[str]) -> tuple[str, str, str] | None:
    """Return the columns of dates that look like the start and the end of follow-up, and their format."""
    for written in formats:
        days = {
            name: [None if one is None else day_of(one, written) for one in cells.to_pylist()]
            for name, cells in columns.items()
            if len(distinct(cells)) > len(EVENTS) and day_of(distinct(cells)[0], written) is not None
        }
        start = _most_usual({name: named_like_a_start(name) for name in days})
        end = _most_usual({name: named_like_an_end(name) for name in days if name != start})
        if start is None or end is None:
            continue
        both = list(zip(days[start], days[end], strict=True))
        if all(one is None or other is None or one <= other for one, other in both):
            return start, end, written
    return None


def _most_usual(ranks: Mapping[str, int | None]) -> str | None:
    found = [(rank, name) for name, rank in ranks.items() if rank is not None]
    return min(found, key=lambda one: one[0])[1] if found else None


def _is_duration(cells: pa.Array) -> bool:
    found = numbers(cells)
    return found is not None and len(distinct(cells)) > len(EVENTS) and pc.min(found).as_py() >= 0


def _is_event(cells: pa.Array) -> bool:
    values, find = distinct(cells), DeclaredValues({one: place for place, one in enumerate(EVENTS)}).place
    return bool(values) and all(find(one) is not None for one in values)


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
    found = numbers(cells)
    values = distinct(cells) if found is None else sorted(distinct(cells), key=float)
    target = tomlkit.table()
    few = 1 < len(values) <= MOST_CATEGORIES
    target.add("kind", "label" if few else "number")
    target.add("column", label)
    if guessed:
        target["column"].comment("a guess")
    if few:
        ordered = (
            sorted(values, key=lambda one: one.lower() not in NEGATIVE)
            if len(values) == len(EVENTS)
            else values
        )
        target.add("classes", ordered)
        if found is not None and len(values) > len(EVENTS):
            target["kind"].comment("a guess: the sample has few values, and they may be amounts")
            for line in _amount_lines(label, values):
                target.add(tomlkit.comment(line))
    elif found is None:
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
    return all(float(one) >= 0 and float(one).is_integer() for one in values)


def almost_numbers(cells: pa.Array) -> str:
    """Return the reason to leave out a numeric column with a few other texts; empty for other columns.

    An infinity counts as such a text, because no bound contains it.
    """
    texts = pc.drop_null(cells).to_pylist()
    marks = sorted({one for one in texts if not _is_finite(one)})
    if not marks or len(marks) > _MOST_MARKS or 2 * sum(map(_is_finite, texts)) < len(texts):
        return ""
    named = ", ".join(f"'{sanitize(one)}'" for one in marks)
    return f"a number but for {named}: name these in missing_values and declare `missing`, or set invalid = 'bin'"


def _is_finite(text: str) -> bool:
    number = number_of(text)
    return number is not None and abs(number) < float("inf")


def numbers(cells: pa.Array) -> pa.Array | None:
    """Return the cells as finite numbers; None if some cell is not a finite number."""
    try:
        found = pc.cast(cells, pa.float64())
    except pa.ArrowInvalid:
        return None
    return found if pc.all(pc.is_finite(found)).as_py() else None


def distinct(cells: pa.Array) -> list[str]:
    """Return the sorted distinct values of a column, without nulls."""
    return sorted(pc.drop_null(pc.unique(cells)).to_pylist())
