"""Report where the user's own code failed (a loss, a metric, a model, a plugin stage), in one line.

Claim: the line names the function, its file and line, and the kind of exception. It omits the exception's message,
which may quote values of private records. The log shows the message and the whole traceback from level ``debug`` on.
A frame counts as user code if its module belongs neither to fedveil nor to Python nor to a package that fedveil
depends on. ``tests/test_user_code.py``.
"""

from __future__ import annotations

import importlib
import re
import sys
import traceback
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from types import FrameType
from typing import Final, cast

from fedveil.errors import ConfigError, FedveilError, UserCodeError, did_you_mean
from fedveil.sanitize import quiet_log, sanitize

_PACKAGE: Final = "fedveil"
_LOG: Final = quiet_log(_PACKAGE)


@contextmanager
def name_user_code(*passed: type[Exception]) -> Iterator[None]:
    """Turn an exception in the user's own code into one error that names it; pass all other errors on.

    Args:
        passed: exceptions that no code of the user raises; looking for their origin would take a second.

    Raises:
        UserCodeError: a function outside of fedveil and its dependencies raised.
    """
    try:
        yield
    except Exception as error:
        location = None if isinstance(error, (FedveilError, *passed)) else failed_at(error)
        if location is None:
            raise
        _LOG.debug("%s", location, exc_info=error)
        notes = "".join(f"; {sanitize(note)}" for note in getattr(error, "__notes__", ()))
        if missing := _missing_package(error):
            raise UserCodeError(f"{location} imports {missing}, which is not installed{notes}") from None
        raise UserCodeError(
            f"{location} raised {type(error).__name__}: code of your own, or of a package that you named. What it says "
            "may quote records, so it is not shown; `fedveil --log-level debug ...` shows it, with the traceback"
            f"{notes}"
        ) from None


def failed_at(error: BaseException) -> str | None:
    """Return the innermost user function that an error passed through, with file and line; None if none."""
    frames = list(traceback.walk_tb(error.__traceback__))
    # A user's function may fail inside a library call: the innermost user frame is the one to look at.
    for frame, line in reversed(frames):
        if _is_users(frame):
            code = frame.f_code
            return f"{sanitize(code.co_qualname)} ({sanitize(code.co_filename)}, line {line})"
    return None


def _missing_package(error: Exception) -> str:
    """Return the module that an import statement did not find; empty for another error.

    A name that no statement in the code has, such as one that a data set chose, may quote a record.
    """
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if any(f"{name}.".startswith(f"{error.name}.") for name in frame.f_code.co_names):
            return error.name
    return ""


def _is_users(frame: FrameType) -> bool:
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    if not package or package == _PACKAGE or package in sys.stdlib_module_names:
        return False
    distributions = _distributions().get(package, ())
    return not any(_plain(distribution) in _needed() for distribution in distributions)


@cache
def _distributions() -> Mapping[str, list[str]]:
    """Return the installed distributions of each package; finding them reads every distribution's list of files."""
    return packages_distributions()


@cache
def _needed() -> frozenset[str]:
    """Return the installed distributions that fedveil depends on, itself included, at any depth."""
    needed, pending = set[str](), [_PACKAGE]
    while pending:
        name = pending.pop()
        if name in needed:
            continue
        needed.add(name)
        try:
            # Includes the requirements of optional extras: their code is a library's too.
            requirements = requires(name) or ()
        except PackageNotFoundError:
            continue
        pending += [_plain(requirement) for requirement in requirements]
    return frozenset(needed)


def _plain(requirement: str) -> str:
    """Return the normalised name of a requirement (PEP 503)."""
    name = re.match(r"[\w.-]+", requirement)
    return re.sub(r"[-_.]+", "-", name[0] if name else "").lower()


# --- objects named by an import path ---


def check_name(name: str, kind: str, names: Collection[str]) -> None:
    """Check that a name is known or is an import path ``package.module:name``.

    Raises:
        ConfigError: it is neither; the error lists the known names.
    """
    module, _, attribute = name.partition(":")
    if name not in names and not (module and attribute):
        raise ConfigError(
            f"no {kind} named {name!r}; use one of {', '.join(names)}, or "
            f"package.module:name{did_you_mean(name, names)}"
        )


def import_object(path: str, kind: str, names: Collection[str] = ()) -> object:
    """Return the object at an import path ``package.module:attribute``.

    Raises:
        ConfigError: the path has another form (the error lists the known names), or nothing can be imported from it.
    """
    check_name(path, kind, names)
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # an import runs the module's code, which may raise anything
        why = error if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"{kind} {path}: module {module_name} cannot be imported ({sanitize(str(why))})"
        ) from error
    if not hasattr(module, attribute):
        raise ConfigError(f"{kind} {path}: module {module_name} has no {attribute}")
    return cast(object, getattr(module, attribute))
