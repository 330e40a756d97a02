"""Shapes and types of annotated functions, checked while the tests run; what was checked once is remembered.

jaxtyping with beartype decides by the types of what is passed and returned, and by the types and shapes of arrays: by
nothing else of them, but where an annotation names values (``Literal``). A call whose arguments and result are of
kinds that passed before is therefore let through; any other is checked in full. The hook checks every call of
the innermost loops otherwise, which took more than half of the time of the tests that train. Where a session leaves
slow tests out, it looks at the functions that are given or return arrays alone, and at the first :data:`FAST` calls of
each in every file of tests: other types mypy has checked.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import re
import threading
import types
from collections.abc import Callable, Collection, Hashable, Sequence
from enum import Enum
from functools import partial
from typing import Any, Final

import jaxtyping
import numpy as np
import torch

_LONGEST: Final = 64
"""Elements of a container that are looked at, every one; a longer container is checked anew each time."""
_STRICT: Final = jaxtyping.jaxtyped
_PLAIN: Final[set[type]] = set()
"""Types that were met of whose values nothing but the type is looked at."""
_ARRAYS: Final[set[type]] = set()
"""Types of arrays that were met: nothing but type, dtype and shape is looked at."""

FAST: Final = 100
"""Calls of each function that are looked at in each file of tests, where slow tests are left out."""
_calls = math.inf
_file = ""


def look_at(calls: float, file: str) -> None:
    """Look at so many calls of every function while the tests of a file run."""
    global _calls, _file
    if file != _file:
        _calls, _file = calls, file


def install(packages: Sequence[str], typechecker: str, *, arrays_alone: bool) -> None:
    """Check every annotated function and dataclass of the modules below ``packages`` that are imported from now on.

    Args:
        packages: packages.
        typechecker: what decides, by its name.
        arrays_alone: whether functions that no array is given to, and that return none, are left out.
    """
    jaxtyping.jaxtyped = partial(
        remembering, arrays_alone=arrays_alone
    )  # the name that the hook decorates with
    jaxtyping.install_import_hook(list(packages), typechecker)


class _UnknownError(Exception):
    """A value whose kind does not say what a check would find."""


def _kind(value: Any) -> Hashable:
    """Return all that a check looks at of a value.

    Raises:
        _UnknownError: more of it would be looked at.
    """
    of = type(value)
    if of in _PLAIN:
        return of
    if of in _ARRAYS:
        return of, value.dtype, value.shape
    how = _how(of)
    if how == "array":
        _ARRAYS.add(of)
        return of, value.dtype, value.shape
    if how == "class":
        return of, value
    if how == "plain":
        return of
    if how == "unknown" or len(value) > _LONGEST:
        raise _UnknownError
    if how == "tuple":
        return of, *map(_kind, value)
    return of, frozenset(map(_kind, value.items() if how == "mapping" else value))


def _kinds(values: Collection[Any]) -> tuple[Hashable, ...]:
    """Return the kinds of values, most of which are of types of which nothing more is looked at."""
    types_ = tuple(map(type, values))
    return types_ if _PLAIN.issuperset(types_) else tuple(map(_kind, values))


def _kind_and_value(value: Any) -> Hashable:
    """Return all that a check looks at of a value where the annotation names values."""
    if _how(type(value)) in ("tuple", "elements", "mapping"):
        raise _UnknownError
    return (type(value), value) if isinstance(value, str | int | float | Enum) else _kind(value)


@functools.cache
def _how(of: type) -> str:
    """Return how values of a type are looked at."""
    for how, types_ in (
        ("array", (torch.Tensor, np.ndarray)),
        ("tuple", (tuple,)),
        ("elements", (list, set, frozenset)),
        ("mapping", (dict, types.MappingProxyType)),
        ("class", (type,)),
        ("plain", (str, bytes, range, Enum)),
        ("unknown", (Collection,)),
        ("plain", (object,)),
    ):
        if issubclass(of, types_):
            if how == "plain":
                _PLAIN.add(of)
            return how
    raise AssertionError(of)


class _Checks:
    """The checks of one function, whichever closure it has, and the kinds that passed them."""

    def __init__(self, function: Callable[..., Any], typechecker: Any) -> None:
        self._code = function.__code__  # stays, so that no other code gets its identity
        self._running = running = threading.local()

        def run(*args: Any, **kwargs: Any) -> Any:
            return running.call(*args, **kwargs)

        names = function.__globals__  # annotations are read there
        stub: Any = types.FunctionType(run.__code__, names, function.__name__, None, run.__closure__)
        signature = inspect.signature(function)
        # A word may stand for a number that calibration finds; `check_ranges` looks at both.
        free = [
            one.replace(annotation=Any) if "calibrated_field(" in str(one.annotation) else one
            for one in signature.parameters.values()
        ]
        signature = signature.replace(parameters=free)
        stub.__signature__ = signature
        stub.__module__, stub.__qualname__ = function.__module__, function.__qualname__
        self._strict = _STRICT(stub, typechecker=typechecker)
        asked = signature.parameters.values()
        valued = [(n, one) for n, one in enumerate(asked) if _by_value(one.annotation, names)]
        self._valued = [(n, one.name) for n, one in valued]
        self._many_valued = any(one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for _, one in valued)
        self.result = _kind_and_value if _by_value(signature.return_annotation, names) else _kind
        self.valued = bool(valued) or self.result is _kind_and_value
        """Whether a check looks at values."""
        self.passed: dict[Hashable, set[Hashable]] = {}
        """The kinds of arguments that passed, and with each the kinds of results that did."""

    def given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
        """Return all that a check looks at of arguments.

        Raises:
            _UnknownError: more of them would be looked at.
        """
        kinds: Hashable = _kinds(args)
        if kwargs:
            kinds = kinds, tuple(kwargs), _kinds(kwargs.values())
        if self._valued:
            if self._many_valued:
                raise _UnknownError
            many = len(args)
            values = (args[n] if n < many else kwargs.get(name) for n, name in self._valued)
            kinds = kinds, tuple(map(_kind_and_value, values))
        return kinds

    def passing(self, function: Callable[..., Any], given: Hashable) -> Callable[..., Any]:
        """Return the function, which when it is called remembers that such arguments passed."""

        def passed(*args: Any, **kwargs: Any) -> Any:
            self.passed.setdefault(given, set())
            return function(*args, **kwargs)

        return passed

    def __call__(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call, and check arguments before and the result after."""
        self._running.call = call
        return self._strict(*args, **kwargs)


def _by_value(annotation: Any, names: dict[str, Any]) -> bool:
    """Return whether a check against an annotation looks at values, as ``Literal`` does."""
    if isinstance(annotation, str):
        try:
            annotation = eval(annotation, dict(names))
        except Exception:  # nothing is checked against a name that is not to be had
            return False
    return "Literal" in repr(annotation)


_OF: Final[dict[int, _Checks]] = {}
"""By the identity of the code, which closures share; two dataclasses may have equal code, and other annotations."""


def _takes_arrays(fn: types.FunctionType) -> bool:
    """Return whether an annotation of a function names an array, by whichever name the module has for it."""
    words = {word for one in fn.__annotations__.values() for word in re.findall(r"\w+", str(one))}
    named = [fn.__globals__[word] for word in words if word in fn.__globals__]
    return any(one in (torch.Tensor, np, np.ndarray) or "jaxtyping" in repr(one) for one in named)


def remembering(fn: Any = None, *, typechecker: Any = None, arrays_alone: bool = False) -> Any:
    """Decorate like :func:`jaxtyping.jaxtyped`, and let calls through that differ from none that passed."""
    again = partial(remembering, typechecker=typechecker, arrays_alone=arrays_alone)
    if fn is None:
        return again
    if inspect.isclass(fn):
        if dataclasses.is_dataclass(fn) and not hasattr(fn.__init__, "remembers"):
            fn.__init__ = again(fn.__init__)
        return fn
    if isinstance(fn, classmethod | staticmethod):
        return type(fn)(again(fn.__func__))
    if isinstance(fn, property):
        return property(*(one and again(one) for one in (fn.fget, fn.fset, fn.fdel)))
    if not isinstance(fn, types.FunctionType):
        return _STRICT(fn, typechecker=typechecker)
    if arrays_alone and not _takes_arrays(fn):
        return fn

    checks: _Checks | None = None
    valued = True
    file, left = "", 0.0

    @functools.wraps(fn)
    def called(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        nonlocal checks, valued, file, left
        if file is not _file:
            file, left = _file, _calls
        if left <= 0:
            return fn(*args, **kwargs)
        left -= 1
        if checks is None:
            of: Any = inspect.unwrap(fn)  # wrappers of one decorator share their code
            checks = _OF.get(id(of.__code__))
            if checks is None:
                checks = _OF[id(of.__code__)] = _Checks(of, typechecker)
            valued = checks.valued
        try:
            given = _kinds(args) if not valued and not kwargs else checks.given(args, kwargs)
        except _UnknownError:
            return checks(fn, args, kwargs)

        passed = checks.passed.get(given)
        result = checks(checks.passing(fn, given), args, kwargs) if passed is None else fn(*args, **kwargs)
        kind: Hashable = type(result)
        if valued or kind not in _PLAIN:
            try:
                kind = checks.result(result)
            except _UnknownError:
                if passed is not None:
                    checks(lambda *_, **__: result, args, kwargs)
                return result
        if passed is None:
            checks.passed[given].add(kind)
        elif kind not in passed:
            checks(lambda *_, **__: result, args, kwargs)
            passed.add(kind)
        return result

    called.remembers = True  # type: ignore[attr-defined]
    return called
