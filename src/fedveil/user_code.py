"""Code of a user's own (a loss, a metric, a model, a stage of a package): where it failed, in one line.

Claim: the line names the function, its file and line and the kind of exception, and not the exception's message, which
may quote values of private records. The message and the whole traceback are for whoever asks for them: the log shows
them from the level ``debug`` on. A frame is a user's where its module is none of this package, of Python or of a
package that this one depends on. ``tests/test_user_code.py``.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from types import FrameType
from typing import Final

from fedveil.errors import FedveilError, UserCodeError
from fedveil.sanitize import quiet_log, sanitize

_PACKAGE: Final = "fedveil"
_LOG: Final = quiet_log(_PACKAGE)


@contextmanager
def name_user_code() -> Iterator[None]:
    """Have code of a user's own that fails inside fail with one error that names it; all other errors are as they were.

    Raises:
        UserCodeError: a function that is not this package's has raised.
    """
    try:
        yield
    except FedveilError:
        raise
    except Exception as error:
        place = failed_at(error)
        if place is None:
            raise
        _LOG.debug("%s", place, exc_info=error)
        notes = "".join(f"; {sanitize(note)}" for note in getattr(error, "__notes__", ()))
        raise UserCodeError(
            f"{place} raised {type(error).__name__}: code of your own, or of a package that you named. What it says "
            "may quote records, so it is not shown; `fedveil --log-level debug ...` shows it, with the traceback"
            f"{notes}"
        ) from None


def failed_at(error: BaseException) -> str | None:
    """Return the innermost function of a user's own that an error passed through, with file and line; None: none."""
    frames = list(traceback.walk_tb(error.__traceback__))
    for frame, line in reversed(frames):
        if _is_users(frame):
            code = frame.f_code
            return f"{sanitize(code.co_qualname)} ({sanitize(code.co_filename)}, line {line})"
    return None


def _is_users(frame: FrameType) -> bool:
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    if not package or package == _PACKAGE or package in sys.stdlib_module_names:
        return False
    distributions = packages_distributions().get(package, ())
    return not any(_plain(one) in _needed() for one in distributions)


@cache
def _needed() -> frozenset[str]:
    """Return the installed distributions that this one depends on, itself among them, at any depth."""
    found, left = set[str](), [_PACKAGE]
    while left:
        name = left.pop()
        if name in found:
            continue
        found.add(name)
        try:
            asked = requires(name) or ()
        except PackageNotFoundError:
            continue
        left += [_plain(one) for one in asked]
    return frozenset(found)


def _plain(requirement: str) -> str:
    """Return the name of a requirement as names are compared."""
    name = re.match(r"[\w.-]+", requirement)
    return re.sub(r"[-_.]+", "-", name[0] if name else "").lower()
