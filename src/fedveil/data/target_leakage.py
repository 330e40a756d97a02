"""Features that may be the outcome itself, or known only after it: by their names, and by how well each tells it alone.

A model that reads them looks excellent on records of the past and knows nothing when it is needed.
"""

import re
from collections.abc import Sequence
from typing import Final

import numpy as np
from jaxtyping import Float64, Int64

from fedveil.errors import DataError
from fedveil.sanitize import sanitize

SUSPICIOUS: Final = 0.98
"""Area under the ROC curve of one feature alone from which on it is suspected of being the outcome."""

FEWEST: Final = 10
"""Records of each class, or with one value, without which a feature is not suspected: few are told apart by chance."""

SAME_LINE: Final = 0.9999
"""Correlation from which on a feature is the number that is predicted, in another unit perhaps."""

BY_CHANCE: Final = 1e-6
"""Chance of a category's value to be found with one class alone, below which that is no chance."""

_WORDS: Final = frozenset(
    {
        "alive",
        "autopsy",
        "cens",
        "censor",
        "censored",
        "censoring",
        "dead",
        "death",
        "deceased",
        "died",
        "discharge",
        "discharged",
        "event",
        "expired",
        "followup",
        "fup",
        "fustat",
        "futime",
        "los",
        "mortality",
        "outcome",
        "outcomes",
        "readmission",
        "readmitted",
        "relapse",
        "recurrence",
        "status",
        "survival",
        "survived",
        "survtime",
        "tte",
    }
)
_TIMES: Final = frozenset({"day", "days", "month", "months", "time", "weeks"})
_BEFORE: Final = frozenset({"age", "since", "prior", "previous", "before", "baseline", "of", "birth"})
_OF_EVENTS: Final = (
    "event",
    "cens",
    "censor",
    "censored",
    "censoring",
    "status",
    "fustat",
    "died",
    "dead",
    "death",
    "deceased",
    "mortality",
    "relapse",
    "recurrence",
    "failure",
    "arrest",
)
_OF_DURATIONS: Final = (
    "time",
    "tte",
    "survtime",
    "survival",
    "futime",
    "followup",
    "fup",
    "duration",
    "days",
    "day",
    "weeks",
    "week",
    "months",
    "month",
    "years",
)
_PARTS: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Za-z][a-z]*")
_TIME_WORDS: Final = frozenset(
    {*_OF_DURATIONS, "t", "times", "hours", "year", "yr", "yrs", "dur", "follow", "los"}
)
_EVENT_WORDS: Final = frozenset({*_OF_EVENTS, "e", "events", "deaths", "observed", "outcome"})


def has_outcome_name(column: str) -> bool:
    """Return whether a column's name sounds like an outcome or a time until it.

    >>> [has_outcome_name(name) for name in ("died", "DAYS", "followup_months", "age_days", "gender")]
    [True, True, True, False, False]
    """
    parts = {part.lower() for part in _PARTS.findall(column)}
    return bool(parts & _WORDS) or (bool(parts & _TIMES) and not parts & _BEFORE)


def named_like_an_event(column: str) -> int | None:
    """Return how usual a column's name is for a survival event, 0 for the most usual; None if it is not.

    >>> [named_like_an_event(name) for name in ("event", "cens", "OS_STATUS", "E", "alive")]
    [0, 1, 5, 16, None]
    """
    return _rank(column, _OF_EVENTS, "e")


def named_like_a_duration(column: str) -> int | None:
    """Return how usual a column's name is for the time until an event, 0 for the most usual; None if it is not.

    >>> [named_like_a_duration(name) for name in ("time", "survival_months", "T", "age_years", "T_cells")]
    [0, 3, 15, None, None]
    """
    parts = {part.lower() for part in _PARTS.findall(column)}
    return None if parts & (_BEFORE - {"of"}) else _rank(column, _OF_DURATIONS, "t")


def _rank(column: str, usual: tuple[str, ...], letter: str) -> int | None:
    if column.lower() == letter:
        return len(usual)
    parts = {part.lower() for part in _PARTS.findall(column)}
    return next((rank for rank, word in enumerate(usual) if word in parts), None)


def refuse_time_before_event(names: Sequence[str], where: str) -> None:
    """Return unless the names of two columns of a survival target say that the time stands before the event.

    The order is (event, time). Times that are all 0 or 1 could be events, so the values do not show a wrong order.

    Args:
        names: of the two columns, which are public.
        where: what to call the target.

    Raises:
        DataError: the first is named like a time, or the second like an event, and not both alike.

    >>> refuse_time_before_event(("died", "days_to_death"), "targets")
    """
    first, second = ({word.lower() for word in _PARTS.findall(name)} for name in names)
    time = [bool(words & _TIME_WORDS) for words in (first, second)]
    event = [
        bool(words & _EVENT_WORDS) and not timed for words, timed in zip((first, second), time, strict=True)
    ]
    if (time[0] and not time[1]) or (event[1] and not event[0]):
        raise DataError(
            f"{where}: survival needs (event, time), and the columns are called '{sanitize(names[0])}' and "
            f"'{sanitize(names[1])}'; put the event first, or rename the columns if this is the order"
        )


def single_feature_auc(values: Float64[np.ndarray, "n"], positive: Int64[np.ndarray, "n"]) -> float:
    """Return how well a number orders two classes, whichever way: max(AUC, 1 - AUC); NaN for a class of fewer than 10.

    Args:
        values: of one feature; NaN where it is missing, which is left out.
        positive: 1 for one class and 0 for the other.

    >>> single_feature_auc(np.arange(20.0), np.repeat([1, 0], 10))
    1.0
    """
    there = ~np.isnan(values)
    values, positive = values[there], positive[there]
    n_positive = int(positive.sum())
    n_negative = len(positive) - n_positive
    if min(n_positive, n_negative) < FEWEST:
        return float("nan")
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    rank = np.cumsum(count) - (count - 1) / 2
    area = (rank[place][positive == 1].sum() - n_positive * (n_positive + 1) / 2) / (n_positive * n_negative)
    return float(max(area, 1 - area))


def leakage_reason(
    values: Float64[np.ndarray, "n"], positive: Int64[np.ndarray, "n"], *, category: bool
) -> str:
    """Return in which way a feature gives the class away, as a sentence's end; empty where it does not.

    Args:
        values: of the feature, NaN where it is missing: a number, or the place of a category.
        positive: 1 for one class and 0 for the other.
        category: whether the values are places. One in more than a tenth of the records is an id, not a category,
            and tells nothing.

    >>> died, sick = np.repeat([1.0, 0.0, 0.0], [20, 5, 75]), np.repeat([1, 1, 0], [20, 5, 75])
    >>> leakage_reason(died, sick, category=True)
    'one of its values is found with one class alone'
    """
    if category:
        there = ~np.isnan(values)
        place, positive = values[there].astype(np.int64), positive[there]
        count, share = np.bincount(place), float(positive.mean()) if len(place) else 0.0
        if np.count_nonzero(count) > len(place) / 10:
            return ""
        high = np.bincount(place, weights=positive)
        chance = np.where(high == count, share**count, np.where(high == 0, (1 - share) ** count, 1.0))
        values = (high / np.maximum(count, 1))[
            place
        ]  # a category is as high as its share of positive records
    if single_feature_auc(values, positive) >= SUSPICIOUS:
        return "it alone tells what is predicted almost always"
    decided = category and bool(np.any((count >= FEWEST) & (chance < BY_CHANCE)))
    return "one of its values is found with one class alone" if decided else ""


def is_linear_copy(values: Float64[np.ndarray, "n"], target: Float64[np.ndarray, "n"]) -> bool:
    """Return whether a feature and a number that is predicted lie on one line, in 10 records or more.

    >>> is_linear_copy(np.arange(10.0), 3 - 2 * np.arange(10.0)), is_linear_copy(np.arange(10.0), np.arange(10.0) ** 2)
    (True, False)
    """
    there = ~(np.isnan(values) | np.isnan(target))
    first, second = values[there], target[there]
    if len(first) < FEWEST or np.ptp(first) == 0 or np.ptp(second) == 0:
        return False
    return bool(abs(np.corrcoef(first, second)[0, 1]) > SAME_LINE)


def determines_class(values: Float64[np.ndarray, "n"], classes: Int64[np.ndarray, "n"]) -> bool:
    """Return whether each value of a feature is found with one class alone, and each class with 10 records or more.

    A feature whose values are more than a tenth of the records tells nothing so: they are hardly found twice.

    >>> classes = np.arange(60) % 3
    >>> determines_class(7.0 - classes, classes), determines_class(np.arange(60) % 4.0, classes)
    (True, False)
    """
    there = ~np.isnan(values)
    values, classes = values[there], classes[there]
    distinct = len(np.unique(values))
    if not 1 < distinct <= len(values) / 10 or np.unique(classes, return_counts=True)[1].min() < FEWEST:
        return False
    return len(set(zip(values.tolist(), classes.tolist(), strict=True))) == distinct
