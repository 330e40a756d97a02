"""Detection of target leakage: features that contain the outcome, or are known only after it.

A feature is suspected by its name, or if it predicts the target on its own. A model that uses such a feature is
excellent on past records and useless for new ones, whose outcome is not yet known.

Measured on features that are no outcomes, of this project's data sets and those of scikit-learn, statsmodels and
lifelines: 2 of 392 names are suspected (twice "Time"), and none of about 300 features is suspected of revealing a
binary target. A measurement that really separates two classes, such as one species of iris from the others, looks like
a leak.
"""

import re
from collections.abc import Sequence
from typing import Final

import numpy as np
from jaxtyping import Float64, Int64

from fedveil.errors import DataError
from fedveil.sanitize import sanitize

SUSPICIOUS: Final = 0.98
"""Smallest area under the ROC curve of a single feature that is suspected of being the outcome."""

FEWEST: Final = 10
"""Smallest number of records of each class, or with one value, for a suspicion: fewer are separated by chance."""

SAME_LINE: Final = 0.9999
"""Correlation with the target above which a feature counts as the target itself, perhaps in another unit."""

BY_CHANCE: Final = 1e-6
"""Probability below which it is no coincidence that a category occurs with one class only."""

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
_OF_STARTS: Final = (
    *(
        "diagnosis",
        "diagnosed",
        "diag",
        "admission",
        "admitted",
        "inclusion",
        "included",
        "enrolment",
        "enrollment",
    ),
    *(
        "enrolled",
        "randomisation",
        "randomization",
        "surgery",
        "index",
        "baseline",
        "start",
        "started",
        "entry",
    ),
)
_OF_ENDS: Final = (
    *(
        "followup",
        "last",
        "exit",
        "end",
        "ended",
        "death",
        "died",
        "dead",
        "deceased",
        "censored",
        "censoring",
    ),
    *("event", "relapse", "recurrence", "discharge", "discharged"),
)
_PARTS: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Za-z][a-z]*")
_TIME_WORDS: Final = frozenset(
    {*_OF_DURATIONS, "t", "times", "hours", "year", "yr", "yrs", "dur", "follow", "los"}
)
_EVENT_WORDS: Final = frozenset({*_OF_EVENTS, "e", "events", "deaths", "observed", "outcome"})


def has_outcome_name(column: str) -> bool:
    """Return whether a column's name suggests an outcome, or a time until an outcome.

    >>> [has_outcome_name(name) for name in ("died", "DAYS", "followup_months", "age_days", "gender")]
    [True, True, True, False, False]
    """
    parts = {part.lower() for part in _PARTS.findall(column)}
    return bool(parts & _WORDS) or (bool(parts & _TIMES) and not parts & _BEFORE)


def named_like_an_event(column: str) -> int | None:
    """Return the rank of a column's name among usual names of survival events (0: most usual), or None.

    >>> [named_like_an_event(name) for name in ("event", "cens", "OS_STATUS", "E", "alive")]
    [0, 1, 5, 16, None]
    """
    return _rank(column, _OF_EVENTS, "e")


def named_like_a_duration(column: str) -> int | None:
    """Return the rank of a column's name among usual names of survival times (0: most usual), or None.

    >>> [named_like_a_duration(name) for name in ("time", "survival_months", "T", "age_years", "T_cells")]
    [0, 3, 15, None, None]
    """
    parts = {part.lower() for part in _PARTS.findall(column)}
    return None if parts & (_BEFORE - {"of"}) else _rank(column, _OF_DURATIONS, "t")


def named_like_a_start(column: str) -> int | None:
    """Return the rank of a column's name among usual names of the date at which follow-up starts, or None.

    >>> [named_like_a_start(name) for name in ("date_of_diagnosis", "admitted", "birth_date")]
    [0, 4, None]
    """
    return _rank(column, _OF_STARTS)


def named_like_an_end(column: str) -> int | None:
    """Return the rank of a column's name among usual names of the date at which follow-up ends, or None.

    >>> [named_like_an_end(name) for name in ("last_seen", "death_date", "birth_date")]
    [1, 5, None]
    """
    return _rank(column, _OF_ENDS)


def _rank(column: str, usual_names: tuple[str, ...], letter: str | None = None) -> int | None:
    if column.lower() == letter:
        return len(usual_names)
    parts = {part.lower() for part in _PARTS.findall(column)}
    return next((rank for rank, word in enumerate(usual_names) if word in parts), None)


def refuse_time_before_event(names: Sequence[str], where: str) -> None:
    """Refuse a survival target whose column names say that the time stands before the event.

    The required order is (event, time). The values do not show a wrong order: times that are all 0 or 1 could be
    events.

    Args:
        names: names of the columns, which are public; an entry, the third, is not looked at.
        where: name of the target in errors.

    Raises:
        DataError: only the first column is named like a time, or only the second is named like an event.

    >>> refuse_time_before_event(("died", "days_to_death"), "targets")
    """
    first, second = ({word.lower() for word in _PARTS.findall(name)} for name in names[:2])
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
    """Return max(AUC, 1 - AUC) of one feature for two classes; NaN if a class has fewer than 10 records.

    The larger of the two counts, because a feature may separate the classes in either direction.

    Args:
        values: (n,) values of the feature; NaN if missing, which is left out.
        positive: (n,) 1 for one class and 0 for the other.

    >>> single_feature_auc(np.arange(20.0), np.repeat([1, 0], 10))
    1.0
    """
    present = ~np.isnan(values)
    values, positive = values[present], positive[present]
    n_positive = int(positive.sum())
    n_negative = len(positive) - n_positive
    if min(n_positive, n_negative) < FEWEST:
        return float("nan")
    # AUC = (R - p (p + 1) / 2) / (p q): the Mann-Whitney statistic, with R the rank sum of the p positive records
    # among p + q; tied values share their mean rank.
    _, index, count = np.unique(values, return_inverse=True, return_counts=True)
    rank = np.cumsum(count) - (count - 1) / 2
    area = (rank[index][positive == 1].sum() - n_positive * (n_positive + 1) / 2) / (n_positive * n_negative)
    return float(max(area, 1 - area))


def leakage_reason(
    values: Float64[np.ndarray, "n"], positive: Int64[np.ndarray, "n"], *, category: bool
) -> str:
    """Return the reason why a feature reveals the class, as the end of a sentence; empty if it does not.

    Args:
        values: (n,) numbers, or indices of categories; NaN if missing.
        positive: (n,) 1 for one class and 0 for the other.
        category: whether the values are indices of categories. A column with more categories than a tenth of its
            records is an id rather than a category, and is not suspected.

    >>> died, sick = np.repeat([1.0, 0.0, 0.0], [20, 5, 75]), np.repeat([1, 1, 0], [20, 5, 75])
    >>> leakage_reason(died, sick, category=True)
    'one of its values is found with one class alone'
    """
    if category:
        present = ~np.isnan(values)
        index, positive = values[present].astype(np.int64), positive[present]
        count, share = np.bincount(index), float(positive.mean()) if len(index) else 0.0
        if np.count_nonzero(count) > len(index) / 10:
            return ""
        # Under independence, all `count` records of a category are positive with probability share^count, and all are
        # negative with probability (1 - share)^count.
        high = np.bincount(index, weights=positive)
        chance = np.where(high == count, share**count, np.where(high == 0, (1 - share) ** count, 1.0))
        values = (high / np.maximum(count, 1))[
            index
        ]  # order categories by their share of positive records, so that the AUC applies
    if single_feature_auc(values, positive) >= SUSPICIOUS:
        return "it alone tells what is predicted almost always"
    decided = category and bool(np.any((count >= FEWEST) & (chance < BY_CHANCE)))
    return "one of its values is found with one class alone" if decided else ""


def is_linear_copy(values: Float64[np.ndarray, "n"], target: Float64[np.ndarray, "n"]) -> bool:
    """Return whether a feature is a linear function of a numeric target, on 10 records or more.

    >>> is_linear_copy(np.arange(10.0), 3 - 2 * np.arange(10.0)), is_linear_copy(np.arange(10.0), np.arange(10.0) ** 2)
    (True, False)
    """
    present = ~(np.isnan(values) | np.isnan(target))
    first, second = values[present], target[present]
    if len(first) < FEWEST or np.ptp(first) == 0 or np.ptp(second) == 0:
        return False
    # |correlation| = 1 if and only if the points lie on one line that is not parallel to an axis.
    return bool(abs(np.corrcoef(first, second)[0, 1]) > SAME_LINE)


def determines_class(values: Float64[np.ndarray, "n"], classes: Int64[np.ndarray, "n"]) -> bool:
    """Return whether each value of a feature occurs with one class, and each class in 10 or more records.

    A feature with more distinct values than a tenth of the records is not suspected: its values hardly repeat, so
    each occurs with one class by chance.

    >>> classes = np.arange(60) % 3
    >>> determines_class(7.0 - classes, classes), determines_class(np.arange(60) % 4.0, classes)
    (True, False)
    """
    present = ~np.isnan(values)
    values, classes = values[present], classes[present]
    distinct = len(np.unique(values))
    if not 1 < distinct <= len(values) / 10 or np.unique(classes, return_counts=True)[1].min() < FEWEST:
        return False
    return len(set(zip(values.tolist(), classes.tolist(), strict=True))) == distinct
