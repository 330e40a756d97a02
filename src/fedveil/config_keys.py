"""Read an experiment's configuration keys from the fields of stages and parameters of builders.

A section of an experiment names a stage. The stage's fields are the keys of that section; their annotations declare
types, ranges and defaults. No other list of keys exists. A range also holds for a stage that is built in Python
(:func:`check_ranges`).

>>> from dataclasses import dataclass
>>> @dataclass(frozen=True, kw_only=True)
... class Shrink:
...     factor: Fraction = 0.5
...     shares: Annotated[object, composed_field()] = None
...     def __post_init__(self) -> None:
...         check_ranges(self)
>>> [(key.name, key.filled) for key in keys_of(Shrink)]
[('factor', False), ('shares', True)]
>>> Shrink(factor=2.0)
Traceback (most recent call last):
fedveil.errors.CompositionError: factor = 2.0: a finite number > 0 and <= 1 is needed
"""

from __future__ import annotations

import inspect
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from decimal import Decimal
from functools import cache, partial
from numbers import Integral, Rational, Real
from operator import ge, gt, le, lt
from types import UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from fedveil.errors import CompositionError, ConfigError, did_you_mean, show_argument

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
LearningRate = Annotated[float, Field(gt=0, le=1e30, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Share = Annotated[float, Field(ge=0, le=1)]

FollowUp = Annotated[float, Field(ge=1e-9, le=1e12, allow_inf_nan=False)]
"""A time, in the unit of the table, whose inverse is a rate; outside this range another unit is meant."""

REQUIRED: Final = inspect.Parameter.empty
"""Default of a key without a default value."""


@dataclass(frozen=True)
class ComposedField:
    """Annotation mark of a field that composition fills in; the field is no configuration key."""


@dataclass(frozen=True)
class CalibratedField:
    """Annotation mark of a number for which a word may stand; calibration then finds the number.

    Attributes:
        words: the words that are accepted.
    """

    words: tuple[str, ...]


def composed_field() -> ComposedField:
    """Return the mark of a field that composition fills in: ``shares: Annotated[GaussianShares, <mark>]``."""
    return ComposedField()


def calibrated_field(*words: str) -> CalibratedField:
    """Return the mark of a number that may be given as a word: ``Annotated[float, <mark>]``."""
    return CalibratedField(words)


@dataclass(frozen=True, kw_only=True)
class Key:
    """One field or parameter as a configuration key.

    Attributes:
        name: name of the field.
        type: its type with the declared ranges.
        default: its default; :data:`REQUIRED` without one.
        filled: whether composition fills the field in, so that it is no configuration key.
        words: words that are accepted instead of a number.
        meaning: description from the annotation, or else from the docstring.
    """

    name: str
    type: Any
    default: Any
    filled: bool
    words: tuple[str, ...]
    meaning: str

    @property
    def example(self) -> str:
        """An assignment that the key accepts, as text for an error; "" if the key takes neither a word nor a number."""
        if "calibrated" in self.words:
            return (
                f"{self.name} = 'calibrated' for the noise that privacy.epsilon needs, or {self.name} = 5.0"
            )
        if self.words:
            return f"{self.name} = '{self.words[0]}'"
        for value in (1.0, 0.5, 2.0):
            with suppress(ValidationError):
                validated = TypeAdapter(self.type).validate_python(value)
                return f"{self.name} = {validated}"
        return ""


@cache
def keys_of(member: Callable[..., Any]) -> tuple[Key, ...]:
    """Return the fields of a stage's class, or the parameters of a builder, in their order."""
    hints = get_type_hints(member, include_extras=True)
    meanings = _meanings(inspect.getdoc(member) or "")
    keys = []
    for name, parameter in inspect.signature(member).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        hint = hints.get(name, Any)
        marks = _marks(hint)
        words = tuple(word for mark in marks if isinstance(mark, CalibratedField) for word in mark.words)
        descriptions = [
            mark.description for mark in marks if isinstance(mark, FieldInfo) and mark.description
        ]
        keys.append(
            Key(
                name=name,
                type=hint,
                default=parameter.default,
                filled=any(isinstance(mark, ComposedField) for mark in marks),
                words=words,
                # The annotation's description wins: a shared key of several builders means the same in all of them.
                meaning=descriptions[-1] if descriptions else meanings.get(name, ""),
            )
        )
    return tuple(keys)


def check_ranges(stage: Any) -> None:
    """Convert a stage's numbers to plain Python numbers; check numbers, words and truth values by their fields' types.

    True and False are no numbers, and a text is none.

    Raises:
        CompositionError: a number is out of range, a word is none of its field's, or a truth value is none; names the
            field and what is accepted.
    """
    kind: Any = type(stage)
    make_plain(stage)
    for name, number, limits, requirement, other_types in _ranges(kind):
        value = getattr(stage, name)
        if isinstance(value, other_types):
            continue
        fits = isinstance(value, number) and is_number(value)
        if not (fits and is_finite(value) and all(holds(value) for holds in limits)):
            shown = show_argument(value)
            instead = "" if fits or shown.startswith("a ") else f", not a value of {type(value).__name__}"
            raise CompositionError(f"{name} = {shown}: {requirement} is needed{instead}")
    for name, allowed in _choices(kind):
        value = getattr(stage, name)
        if not any(type(value) is type(choice) and value == choice for choice in allowed):
            shown = (
                f"not {show_argument(value)}"
                f"{did_you_mean(value, [choice for choice in allowed if isinstance(choice, str)])}"
                if isinstance(value, str)
                else f"not a value of {type(value).__name__}"
            )
            raise CompositionError(f"{name} must be {' or '.join(map(repr, allowed))}, {shown}")


# --- numbers of other libraries --------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """Convert a number of numpy, pandas, PyTorch, ``fractions`` or ``decimal`` to a Python number.

    Any other value is returned unchanged. A truth value of numpy or PyTorch becomes True or False, so that it is
    refused where a number is needed. A number that is too large for a float becomes an infinity.

    >>> from fractions import Fraction
    >>> plain(Fraction(1, 2)), plain("0.5"), plain(True)
    (0.5, '0.5', True)
    """
    if value is None or isinstance(value, bool | str) or type(value) in (int, float):
        return value
    if getattr(getattr(value, "dtype", None), "kind", "") in _TIMES:
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real | Decimal):
        return _real(value)
    if getattr(value, "shape", None) == () and callable(getattr(value, "item", None)):
        with suppress(RuntimeError, TypeError, ValueError):  # no tensor on the meta device has a value
            inner = value.item()
            return inner if type(inner) is type(value) else plain(inner)
    return value


def whole(value: Any) -> Any:
    """Return :func:`plain` of a value; a float without a fraction becomes an int.

    >>> whole(20.0), whole(20.5)
    (20, 20.5)
    """
    number = plain(value)
    return int(number) if isinstance(number, float) and number.is_integer() else number


def _real(value: Any) -> float:
    """Convert a real number to a float, or to an int if its type is exact and it has no fraction."""
    try:
        # Without the limit, int() of a Decimal such as 1e999999 would build a million digits.
        exact = isinstance(value, Rational | Decimal) and abs(value) < _EXACT  # type: ignore[operator]
        if exact and value == int(value):
            return int(value)
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
    except (ValueError, ArithmeticError):  # NaN of a Decimal, which may signal
        return math.nan


def plain_inside(value: Any) -> Any:
    """Apply :func:`plain` to all values inside the tables and lists of a document."""
    if isinstance(value, Mapping):
        return {key: plain_inside(inner) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(plain_inside(inner) for inner in value)
    return plain(value)


def make_plain(stage: Any) -> None:
    """Replace numbers of other libraries by Python numbers in the fields of a frozen dataclass."""
    for field in fields(stage):
        value = getattr(stage, field.name)
        if value is None or isinstance(value, bool | str):
            continue
        converted = plain_inside(value) if isinstance(value, tuple) else plain(value)
        if converted is not value:
            object.__setattr__(stage, field.name, converted)


def is_number(value: Any) -> bool:
    """Return whether a value is a Python int or float; True and False are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def whole_argument(where: str, value: Any, least: int | None = None) -> int:
    """Return a whole-number argument as an int; accepts numbers of other libraries and 2.0.

    Args:
        where: function and argument, for the error message.
        value: the argument.
        least: the smallest accepted number.

    Raises:
        ConfigError: not a whole number, or below ``least``.
    """
    number = whole(value)
    if isinstance(number, bool) or not isinstance(number, int) or (least is not None and number < least):
        raise ConfigError(
            f"{where} must be a whole number{'' if least is None else f' >= {least}'}, not {show_argument(value)}"
        )
    return number


def finite_argument(where: str, value: Any) -> float:
    """Return a number argument as a float; accepts numbers of other libraries.

    Args are those of :func:`whole_argument`.

    Raises:
        ConfigError: not a finite number.
    """
    number = plain(value)
    if not is_finite(number):
        raise ConfigError(f"{where} must be a finite number, not {show_argument(value)}")
    return float(number)


def is_finite(value: Any) -> bool:
    """Return whether a value is a Python number that a float can hold."""
    return is_number(value) and abs(value) <= sys.float_info.max


_EXACT: Final = 1 << 63
_TIMES: Final = ("m", "M")
"""Kinds of numpy's durations and dates; numpy registers them as whole numbers."""


def limits_of(hint: Any) -> list[str]:
    """Return the limits that a type declares, as words such as "> 0"."""
    return [f"{sign} {bound:g}" for sign, _, bound in _limits(hint)]


@cache
def _ranges(
    kind: Any,
) -> tuple[tuple[str, type, tuple[Callable[[float], bool], ...], str, tuple[type, ...]], ...]:
    """Return the fields with limits: name, number type, tests, range in words, other accepted types."""
    found_ranges = []
    for key in keys_of(kind):
        limits = list(_limits(key.type))
        if limits:
            number, number_kind = (int, "whole") if float not in _types(key.type) else (Real, "finite")
            requirement = f"a {number_kind} number {' and '.join(limits_of(key.type))}"
            tests = tuple(partial(test, bound) for _, test, bound in limits)
            texts = key.words or str in _types(key.type) or Literal in _origins(key.type)
            nothing = key.default is None or type(None) in _types(key.type)
            other_types = (*((str,) if texts else ()), *((type(None),) if nothing else ()))
            found_ranges.append((key.name, number, tests, requirement, other_types))
    return tuple(found_ranges)


@cache
def _choices(kind: Any) -> tuple[tuple[str, tuple[Any, ...]], ...]:
    """Return the fields that accept single values alone (words, True and False, None), with these values."""
    choices = ((key.name, _values(key.type)) for key in keys_of(kind))
    return tuple((name, values) for name, values in choices if values)


def _values(hint: Any) -> tuple[Any, ...]:
    """Return the values that a type accepts if they can be listed; otherwise ()."""
    if hint is bool:
        return (True, False)
    if hint is type(None):
        return (None,)
    if get_origin(hint) is Literal:
        return get_args(hint)
    if get_origin(hint) is Annotated:
        return _values(get_args(hint)[0])
    parts = (
        [_values(argument) for argument in get_args(hint)] if get_origin(hint) in (Union, UnionType) else []
    )
    return tuple(value for part in parts for value in part) if parts and all(parts) else ()


def _limits(hint: Any) -> Iterator[tuple[str, Callable[[float, float], bool], float]]:
    """Yield the limits of a type: sign, comparison of (bound, value), and bound."""
    for mark in _marks(hint):
        for constraint in mark.metadata if isinstance(mark, FieldInfo) else ():
            for limit, sign, test in _LIMITS:
                bound = getattr(constraint, limit, None)
                if bound is not None:
                    yield sign, test, bound


_LIMITS: Final = (("gt", ">", lt), ("ge", ">=", le), ("lt", "<", gt), ("le", "<=", ge))
"""Attribute and sign of each limit, and the comparison of (bound, value) that must hold."""


def _marks(hint: Any) -> list[Any]:
    """Return the annotations of a type, at any depth of its alternatives."""
    if get_origin(hint) is Annotated:
        inner, *marks = get_args(hint)
        return [*_marks(inner), *marks]
    return [mark for argument in get_args(hint) for mark in _marks(argument)]


def _types(hint: Any) -> set[Any]:
    """Return the classes among the alternatives of a type."""
    if isinstance(hint, type):
        return {hint}
    inner = get_args(hint)[:1] if get_origin(hint) is Annotated else get_args(hint)
    return {kind for part in inner for kind in _types(part)}


def _origins(hint: Any) -> set[Any]:
    """Return the generic origins of a type's alternatives, such as ``Literal``."""
    return {get_origin(hint)} | {origin for part in get_args(hint) for origin in _origins(part)}


def _meanings(text: str) -> dict[str, str]:
    """Parse the description of each field from the sections Attributes and Args of a docstring."""
    meanings: dict[str, str] = {}
    for section in re.findall(r"^(?:Attributes|Args):\n((?:    .*\n?|\n)+)", text, re.MULTILINE):
        for name, meaning in re.findall(r"^    (\w+): (.*(?:\n     +.*)*)", section, re.MULTILINE):
            meanings[name] = " ".join(meaning.split())
    return meanings
