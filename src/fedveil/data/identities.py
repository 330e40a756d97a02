"""Ids of people and silos, as text: numbered, and hashed to what a person's own training is seeded by."""

import re
import unicodedata
from collections.abc import Iterable, Sequence
from decimal import Decimal
from typing import Final

import numpy as np
from jaxtyping import Float64, Int32, Int64

from fedveil.randomness import key_of

AS_TEXT: Final = (
    "Ids are compared as text: a person whose id is written in two ways (case, leading zeros, accents) counts as two "
    "people, each protected separately."
)
"""What every statement about ids says. No statement looks whether there are such ids, for that would tell of them; who
holds the ids is warned (:func:`near_duplicate_ids`)."""

MOST_USERS: Final = 100_000_000
"""What |U| may be, wherever it is declared: what is kept for each user then fits a machine's memory."""

_SEPARATORS: Final = re.compile(r"[\s\-_.,/'\"]+")
_FRACTION: Final = re.compile(r"\.0+$")
_THOUSANDS: Final = re.compile(r"[1-9][0-9]{0,2}(?:[,' ][0-9]{3})+(?:\.0+)?")
_EXPONENT: Final = re.compile(r"[0-9](?:[.,][0-9]+)?[eE]\+?[0-9]{1,2}")
_LEADING_ZEROS: Final = re.compile(r"(?<![0-9.,])0+(?=[0-9])")
_ROUNDED: Final = re.compile(r"[0-9](?:[.,][0-9]+)?[eE]\+[0-9]{2}")
_FEWEST: Final = 10
"""People of whom a feature that has another number for each is no chance."""


class _PlainCharacters(dict[int, str | None]):
    """What each character becomes where ids are compared, for :meth:`str.translate`: made when it is first met.

    Characters that are not shown are left out; dashes, apostrophes, quotation marks, blanks and digits of all kinds are
    the ASCII ones; letters of other alphabets that look like Latin ones are those.
    """

    def __missing__(self, code: int) -> str | None:
        character = chr(code)
        kind, digit = unicodedata.category(character), unicodedata.decimal(character, None)
        plain: str | None = character
        if digit is not None:
            plain = str(digit)
        elif (kind in ("Cf", "Cc") and not character.isspace()) or character in _UNSEEN:
            plain = None
        elif kind == "Pd" or character in "\u2212\u02d7\u2043":
            plain = "-"
        elif kind in ("Pi", "Pf") or character in _APOSTROPHES:
            plain = "'"
        elif character.isspace():
            plain = " "
        return self.setdefault(code, plain)


_APOSTROPHES: Final = "'`\u00b4\u02b9\u02bb\u02bc\u02c8\u02ca\u02cb\u2032\u2035\u201a\u201e\ua78c\uff07"
_UNSEEN: Final = "\u034f\u115f\u1160\u2800\u3164\uffa0" + "".join(map(chr, range(0xFE00, 0xFE10)))
_LETTERS: Final = str.maketrans(
    "АВЕЅІЈКМНОРСТУХаеѕіјорсухΑΒΕΖΗΙΚΜΝΟΡΤΥΧο",
    "ABESIJKMHOPCTYXaesijopcyxABEZHIKMNOPTYXo",
)
_PLAIN: Final = _PlainCharacters(_LETTERS)  # type: ignore[arg-type]


def _form(who: str) -> str:
    """Return an id without what people and programs vary when they write it."""
    plain = unicodedata.normalize("NFKC", who.translate(_PLAIN)).strip(" '\"")
    if _THOUSANDS.fullmatch(plain):
        plain = re.sub("[,' ]", "", plain)
    elif _EXPONENT.fullmatch(plain):
        plain = f"{Decimal(plain.replace(',', '.')):f}"
    plain = _LEADING_ZEROS.sub("", _FRACTION.sub("", plain))
    form = _SEPARATORS.sub("", plain).casefold()
    return form.lstrip("0") or form or who


def near_duplicate_ids(ids: Iterable[str]) -> list[set[str]]:
    """Return the ids that differ from one another in their form alone, each group of them together.

    The form is what people and programs vary when they write an id: case, width, accents' encoding, blanks and
    characters that are not shown, dashes, apostrophes and other marks, leading zeros, separators of thousands, an
    exponent, letters of another alphabet that look the same, and the ".0" of a whole number that a program took for a
    real one.

    >>> [sorted(group) for group in near_duplicate_ids(["7", "007", "P-1", "p1", "8", "8.0", "80", "1,000", "1E+03"])]
    [['007', '7'], ['P-1', 'p1'], ['8', '8.0'], ['1,000', '1E+03']]
    """
    forms: dict[str, set[str]] = {}
    for who in ids:
        forms.setdefault(_form(who), set()).add(who)
    return [written for written in forms.values() if len(written) > 1]


def rounded(ids: Iterable[str]) -> set[str]:
    """Return the ids in the exponent notation in which programs write, and round, large numbers.

    >>> sorted(rounded(["1.23457E+12", "1e+05", "12E5", "1E3", "e+05"]))
    ['1.23457E+12', '1e+05']
    """
    return {who for who in ids if _ROUNDED.fullmatch(who.strip())}


def index_names(names: list[str]) -> tuple[list[str], Int32[np.ndarray, "n"]]:
    r"""Return the sorted distinct names, and the place of each name among them.

    >>> distinct, place = index_names(["b", "a", "a\0"])  # an array of text would drop the last character
    >>> len(distinct), place.tolist()
    (3, [2, 0, 1])
    """
    distinct = sorted(set(names))
    places = {name: place for place, name in enumerate(distinct)}
    return distinct, np.array([places[name] for name in names], dtype=np.int32)


def keys_of(users: list[str]) -> Int64[np.ndarray, "users"]:
    """Return what each user's batches are seeded by: the id, not the place among those present."""
    return np.array([key_of(who) for who in users], dtype=np.int64)


def identifies_user(
    values: Float64[np.ndarray, "n"], person: Int32[np.ndarray, "n"], names: Sequence[str]
) -> bool:
    """Return whether a feature is an id: one whole number for all records of a person, and another for everybody else.

    Of people with one record each any fine measurement does that: there it must be the number in their id.

    Args:
        values: of the feature, NaN where it is missing, which is left out.
        person: whose record it is.
        names: the ids, by the number of the person.

    >>> names, person = index_names(["p%d" % (i % 10) for i in range(30)])
    >>> identifies_user(person * 3.0 + 7, person, names), identifies_user(np.arange(30.0), person, names)
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
