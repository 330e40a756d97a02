"""Explain a call of a public function whose arguments do not fit its signature."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, Final, ParamSpec, TypeVar

from fedveil.errors import ConfigError, did_you_mean

_P = ParamSpec("_P")
_R = TypeVar("_R")
_NAMED: Final = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def explain_arguments(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return the function with an error that lists its arguments where a call has a wrong or too few of them.

    A function with open keyword arguments checks these itself; in a call that lacks a needed argument, one that nearly
    has its name is taken for a slip.

    >>> @explain_arguments
    ... def grow(plant: str, *, water: float = 1.0) -> None: ...
    >>> grow("rose", wather=2)
    Traceback (most recent call last):
    fedveil.errors.ConfigError: fedveil.grow: no argument 'wather'; there are: plant, water; did you mean 'water'?
    >>> grow()
    Traceback (most recent call last):
    fedveil.errors.ConfigError: fedveil.grow: plant: needed; the arguments are: plant, water
    """
    signature = inspect.signature(function)

    @wraps(function)
    def explained(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            signature.bind(*args, **kwargs)
        except TypeError:
            name = f"fedveil.{function.__name__}"
            raise ConfigError(f"{name}: {_explain(signature, args, kwargs)}") from None
        return function(*args, **kwargs)

    return explained


def _explain(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return what is wrong with a call that does not fit a signature."""
    known = {name: one for name, one in signature.parameters.items() if one.kind in _NAMED}
    open_ended = any(one.kind is one.VAR_KEYWORD for one in signature.parameters.values())
    for name in () if open_ended else kwargs:
        if name not in known:
            return f"no argument '{name}'; there are: {', '.join(known)}{did_you_mean(name, known)}"
    places = [name for name, one in known.items() if one.kind is one.POSITIONAL_OR_KEYWORD]
    if len(args) > len(places):
        first = ", ".join(places)
        return f"give arguments by name after {first or 'none'}, such as {next(reversed(known), 'name')}=..."
    for name in places[: len(args)]:
        if name in kwargs:
            return f"{name}: given twice, by place and by name"
    given = {*places[: len(args)], *kwargs}
    missing = [name for name, one in known.items() if one.default is one.empty and name not in given]
    slips = "".join(
        f"; '{name}' is no argument{near}" for name in kwargs if (near := _near(name, known, missing))
    )
    return f"{', '.join(missing)}: needed; the arguments are: {', '.join(known)}{slips}"


def _near(name: str, known: Iterable[str], missing: Iterable[str]) -> str:
    """Return which missing argument a name may have meant; "" for the name of an argument, or one like no other."""
    return "" if name in known else did_you_mean(name, missing)
