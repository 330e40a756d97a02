"""Ids of people and silos as text: their numbering, their seed keys, and detection of near-duplicates."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Final

import numpy as np
from jaxtyping import Float64, Int32, Int64

from fedveil.data.column_files import GrowingColumn, take_values
from fedveil.randomness import key_of

AS_TEXT: Final = (
    "Ids are compared as text: a person whose id is written in two ways (case, leading zeros, accents) counts as two "
    "people, each protected separately."
)
"""Sentence of every statement about ids. It does not depend on the presence of such ids, which would reveal something
about them; :func:`near_duplicate_ids` warns the owner of the ids instead."""

MOST_USERS: Final = 100_000_000
"""Largest |U| that may be declared, so that arrays with one entry per user fit into memory."""

_SEPARATORS: Final = re.compile(r"[\s\-_.,/'\"]+")
_FRACTION: Final = re.compile(r"\.0+$")
_THOUSANDS: Final = re.compile(r"[1-9][0-9]{0,2}(?:[,' ][0-9]{3})+(?:\.0+)?")
_EXPONENT: Final = re.compile(r"[0-9](?:[.,][0-9]+)?[eE]\+?[0-9]{1,2}")
_LEADING_ZEROS: Final = re.compile(r"(?<![0-9.,])0+(?=[0-9])")
_ROUNDED: Final = re.compile(r"[0-9](?:[.,][0-9]+)?[eE]\+[0-9]{2}")
_FEWEST: Final = 10
"""Smallest number of people for which distinct numbers per person are not plausible as a coincidence."""


class _PlainCharacters(dict[int, str | None]):
    """Translation table (:meth:`str.translate`) for the comparison of ids, filled on first use.

    Invisible characters are removed. Dashes, apostrophes, quotation marks, blanks and digits of all kinds become
    ASCII characters. Letters of other alphabets become the Latin letters that look the same.
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


def _form(user_id: str) -> str:
    """Return the canonical form of an id, without the variations of :func:`near_duplicate_ids`."""
    plain = unicodedata.normalize("NFKC", user_id.translate(_PLAIN)).strip(" '\"")
    if _THOUSANDS.fullmatch(plain):
        plain = re.sub("[,' ]", "", plain)
    elif _EXPONENT.fullmatch(plain):
        plain = f"{Decimal(plain.replace(',', '.')):f}"
    plain = _LEADING_ZEROS.sub("", _FRACTION.sub("", plain))
    form = _SEPARATORS.sub("", plain).casefold()
    return form.lstrip("0") or form or user_id


def near_duplicate_ids(ids: Iterable[str]) -> list[set[str]]:
    """Return the groups of two or more ids that differ only in their spelling.

    Spelling covers the variations by people and programs: case, width, encoding of accents, blanks and invisible
    characters, dashes, apostrophes and other marks, leading zeros, separators of thousands, an exponent, letters of
    another alphabet that look the same, and the ".0" of a whole number that a program took for a float.

    >>> [sorted(group) for group in near_duplicate_ids(["7", "007", "P-1", "p1", "8", "8.0", "80", "1,000", "1E+03"])]
    [['007', '7'], ['P-1', 'p1'], ['8', '8.0'], ['1,000', '1E+03']]
    """
    every = list(ids)
    # The most frequent ids by far are their own form: whole numbers as programs write them.
    numbers = {user_id for user_id in every if user_id.isascii() and user_id.isdigit() and user_id[0] != "0"}
    forms: dict[str, set[str]] = {}
    for user_id in every:
        if user_id not in numbers:
            forms.setdefault(_form(user_id), set()).add(user_id)
    for form in numbers.intersection(forms):
        forms[form].add(form)
    return [written for written in forms.values() if len(written) > 1]


def rounded(ids: Iterable[str]) -> set[str]:
    """Return the ids in exponent notation, in which programs write and round large numbers.

    >>> sorted(rounded(["1.23457E+12", "1e+05", "12E5", "1E3", "e+05"]))
    ['1.23457E+12', '1e+05']
    """
    return {user_id for user_id in ids if _ROUNDED.fullmatch(user_id.strip())}


class Numbering:
    r"""Numbers of names that arrive some at a time: the place of each among the sorted distinct names.

    It is a context manager, which closes its file.

    Args:
        folder: folder of a file that keeps the numbers; None keeps them in memory.

    Attributes:
        places: each distinct name with its place in the order of first occurrence.

    >>> names = Numbering()
    >>> names.add(["b", "a", "a\0"])  # an array of text would drop the last character
    >>> sorted(names.places), names.sorted_places().tolist()
    (['a', 'a\x00', 'b'], [2, 0, 1])
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.places: dict[str, int] = {}
        self._folder, self._found = folder, GrowingColumn(folder)

    def __enter__(self) -> Numbering:
        return self

    def __exit__(self, *_: object) -> None:
        self._found.__exit__()

    def add(self, names: Iterable[str]) -> None:
        """Add names, in the order of the records."""
        number = [self.places.setdefault(name, len(self.places)) for name in names]
        self._found.append(np.array(number, dtype=np.int32))

    def sorted_places(self) -> Int32[np.ndarray, "n"]:
        """Return the place of every name among the sorted distinct names, after at least one piece was added."""
        rank = np.empty(len(self.places), dtype=np.int32)
        for number, name in enumerate(sorted(self.places)):
            rank[self.places[name]] = number
        return take_values(rank, self._found.array(), self._folder)


def index_names(names: list[str]) -> tuple[list[str], Int32[np.ndarray, "n"]]:
    """Return the sorted distinct names, and the (n,) index of each name among them."""
    numbering = Numbering()
    numbering.add(names)
    return sorted(numbering.places), numbering.sorted_places()


def keys_of(users: list[str]) -> Int64[np.ndarray, "users"]:
    """Return the seed key of each user: a hash of the id, independent of the presence of other users."""
    return np.array([key_of(user_id) for user_id in users], dtype=np.int64)


def identifies_user(
    values: Float64[np.ndarray, "n"], person: Int32[np.ndarray, "n"], names: Sequence[str]
) -> bool:
    """Return whether a feature is an id: one whole number per person, different for any two people.

    If every person has one record, any fine measurement has this property. Then the feature must equal the number in
    the person's id.

    Args:
        values: (n,) values of the feature; NaN if missing, which is left out.
        person: (n,) number of each record's person.
        names: ids by the number of the person.

    >>> names, person = index_names(["p%d" % (i % 10) for i in range(30)])
    >>> identifies_user(person * 3.0 + 7, person, names), identifies_user(np.arange(30.0), person, names)
    (True, False)
    """
    present = ~np.isnan(values)
    values, person = values[present], person[present]
    if np.any(values != np.rint(values)):
        return False
    people = len(np.unique(person))
    if people < _FEWEST:
        return False
    if not len(set(zip(values.tolist(), person.tolist(), strict=True))) == people == len(np.unique(values)):
        return False
    return len(values) > people or bool(np.all(values == np.array([_number(name) for name in names])[person]))


def _number(name: str) -> float:
    try:
        return float(name)
    except ValueError:
        return float("nan")
