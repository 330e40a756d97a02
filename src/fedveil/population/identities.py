"""Ids of people and silos, as text: numbered, and hashed to what a person's own training is seeded by."""

import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
from jaxtyping import Float64, Int32, Int64

from fedveil.randomness import key_of

AS_TEXT: Final = (
    "Ids are compared as text: a person whose id is written in two ways (case, leading zeros, accents) counts as two "
    "people, each protected separately."
)
"""What every statement about ids says. No statement looks whether there are such ids, for that would tell of them; who
holds the ids is warned (:func:`alike`)."""

MOST_USERS: Final = 100_000_000
"""What |U| may be, wherever it is declared: what is kept for each user then fits a machine's memory."""

_SEPARATORS: Final = re.compile(r"[\s\-_./]+")
_FRACTION: Final = re.compile(r"\.0+$")
_FEWEST: Final = 10
"""People of whom a feature that has another number for each is no chance."""


def alike(ids: Iterable[str]) -> list[set[str]]:
    """Return the ids that differ from one another in their form alone, each group of them together.

    The form is what people vary when they write an id: case, width, accents' encoding, blanks, marks, leading zeros,
    and the ".0" of a whole number that a program took for a real one.

    >>> [sorted(group) for group in alike(["7", "007", "P-1", "p1", "8", "8.0", "80"])]
    [['007', '7'], ['P-1', 'p1'], ['8', '8.0']]
    """
    forms: dict[str, set[str]] = {}
    for who in ids:
        plain = _SEPARATORS.sub("", _FRACTION.sub("", unicodedata.normalize("NFKC", who))).casefold()
        forms.setdefault(plain.lstrip("0") or plain, set()).add(who)
    return [written for written in forms.values() if len(written) > 1]


def numbered(names: list[str]) -> tuple[list[str], Int32[np.ndarray, "n"]]:
    r"""Return the sorted distinct names, and the place of each name among them.

    >>> distinct, place = numbered(["b", "a", "a\0"])  # an array of text would drop the last character
    >>> len(distinct), place.tolist()
    (3, [2, 0, 1])
    """
    distinct = sorted(set(names))
    places = {name: place for place, name in enumerate(distinct)}
    return distinct, np.array([places[name] for name in names], dtype=np.int32)


def keys_of(users: list[str]) -> Int64[np.ndarray, "users"]:
    """Return what each user's batches are seeded by: the id, not the place among those present."""
    return np.array([key_of(who) for who in users], dtype=np.int64)


def tells_who(values: Float64[np.ndarray, "n"], person: Int32[np.ndarray, "n"], names: Sequence[str]) -> bool:
    """Return whether a feature is an id: one whole number for all records of a person, and another for everybody else.

    Of people with one record each any fine measurement does that: there it must be the number in their id.

    Args:
        values: of the feature, NaN where it is missing, which is left out.
        person: whose record it is.
        names: the ids, by the number of the person.

    >>> names, person = numbered(["p%d" % (i % 10) for i in range(30)])
    >>> tells_who(person * 3.0 + 7, person, names), tells_who(np.arange(30.0), person, names)
    (True, False)
    """
    there = ~np.isnan(values)
    values, person = values[there], person[there]
    people = len(np.unique(person))
    if people < _FEWEST or np.any(values != np.rint(values)):
        return False
    if not len(set(zip(values.tolist(), person.tolist(), strict=True))) == people == len(np.unique(values)):
        return False
    return len(values) > people or bool(np.all(values == np.array([_number(name) for name in names])[person]))


def _number(name: str) -> float:
    try:
        return float(name)
    except ValueError:
        return float("nan")
