"""Explain a call of a public function or class whose arguments do not fit, and find the line of the caller."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar

from fedveil.errors import ConfigError, did_you_mean

_P = ParamSpec("_P")
_R = TypeVar("_R")
_PACKAGE: Final = f"{Path(__file__).parent}{os.sep}"
_OPEN: Final = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def explain_arguments(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return the function, method or class with an error that lists its arguments where a call does not fit them.

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
    return explain_arguments_as(function.__name__)(function)


def explain_arguments_as(name: str, hint: str = "") -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Return the decorator :func:`explain_arguments` for a function or class with another public name.

    Args:
        name: the name under ``fedveil``.
        hint: end of the error: for a class that a function makes, that function.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        if isinstance(function, type):
            function.__init__ = _explained_init(function, name, hint)  # type: ignore[misc]
            return function
        signature = inspect.signature(function)
        is_method = next(iter(signature.parameters), None) == "self"

        @wraps(function)
        def check_and_call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            if is_method:
                where = f"{type(args[0]).__name__}.{name}" if args else name
                _check(where, hint, _without_self(signature), args[1:], kwargs)
            else:
                _check(f"fedveil.{name}", hint, signature, args, kwargs)
            return function(*args, **kwargs)

        return check_and_call

    return decorate


def _without_self(signature: inspect.Signature) -> inspect.Signature:
    """Return the signature of a method as its callers see it."""
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def _explained_init(kind: type, name: str, hint: str) -> Callable[..., None]:
    """Return the ``__init__`` of a class with the check; a subclass without an own one is checked under its name."""
    begin: Callable[..., None] = kind.__init__  # type: ignore[misc]
    signature = inspect.signature(kind)

    @wraps(begin)
    def check_and_initialize(self: Any, /, *args: Any, **kwargs: Any) -> None:
        label = f"fedveil.{name}" if type(self) is kind else type(self).__name__
        _check(label, hint, signature, args, kwargs)
        begin(self, *args, **kwargs)

    return check_and_initialize


def _check(
    label: str, hint: str, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Check that a call fits a signature.

    Raises:
        ConfigError: it does not; says what is wrong and which arguments there are.
    """
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        raise ConfigError(f"{label}: {_explain(signature, args, kwargs)}{hint and f'; {hint}'}") from None


def _explain(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return what is wrong with a call that does not fit a signature."""
    parameters = {
        name: parameter for name, parameter in signature.parameters.items() if parameter.kind not in _OPEN
    }
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    positional = [
        name for name, parameter in parameters.items() if parameter.kind is not parameter.KEYWORD_ONLY
    ]
    by_name = {
        name for name, parameter in parameters.items() if parameter.kind is not parameter.POSITIONAL_ONLY
    }
    for name in () if open_ended else kwargs:
        if name not in by_name:
            return f"no argument '{name}'; there are: {', '.join(parameters) or 'none'}{did_you_mean(name, parameters)}"
    if len(args) > len(positional):
        if len(positional) == len(parameters) and not open_ended:
            return f"{len(args)} arguments are too many; there are: {', '.join(parameters) or 'none'}"
        after = f" after {', '.join(positional)}" if positional else ""
        example = [f", such as {name}=..." for name in parameters if name not in positional]
        return f"give arguments by name{after}{''.join(example[-1:])}"
    for name in positional[: len(args)]:
        if name in kwargs:
            return f"{name}: given twice, by place and by name"
    passed = {*positional[: len(args)], *(by_name & kwargs.keys())}
    missing = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty and name not in passed
    ]
    slips = "".join(
        f"; '{name}' is no argument{near}" for name in kwargs if (near := _near(name, parameters, missing))
    )
    return f"{', '.join(missing)}: needed; the arguments are: {', '.join(parameters)}{slips}"


def _near(name: str, names: Iterable[str], missing: Iterable[str]) -> str:
    """Return which missing argument a name may have meant; "" for the name of an argument, or one like no other."""
    return "" if name in names else did_you_mean(name, missing)


# --- arguments of a type ----------------------------------------------------------------------------------------------
# ``where`` names function and argument in the error. Numbers are read by ``fedveil.config_keys``.


def text_argument(where: str, value: Any) -> str:
    """Return a text argument.

    Raises:
        ConfigError: not text.
    """
    if not isinstance(value, str):
        raise ConfigError(f"{where} must be text, not a value of {type(value).__name__}")
    return value


def flag_argument(where: str, value: Any) -> bool:
    """Return an argument that is True or False, of Python or numpy.

    Raises:
        ConfigError: anything else.
    """
    if type(value).__name__ not in ("bool", "bool_"):
        raise ConfigError(f"{where} must be True or False, not a value of {type(value).__name__}")
    return bool(value)


def list_argument(where: str, value: Any) -> tuple[Any, ...]:
    """Return an argument that is a list as a tuple; accepts any collection that has an order.

    Raises:
        ConfigError: a set, a single text, or no collection.
    """
    is_collection = isinstance(value, Iterable) and hasattr(value, "__len__")
    if isinstance(value, str | bytes | set | frozenset) or not is_collection:
        raise ConfigError(f"{where} must be a list, not a value of {type(value).__name__}")
    return tuple(value)


def stacklevel_of_caller() -> int:
    """Return the ``stacklevel`` by which a warning of the calling function names the first line outside this package.

    A warning is given in functions that others of this package call, some of which check their arguments first.
    """
    level, frame = 1, inspect.currentframe()
    while (
        frame is not None
        and (frame := frame.f_back) is not None
        and frame.f_code.co_filename.startswith(_PACKAGE)
    ):
        level += 1
    return level
