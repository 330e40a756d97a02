"""Cases that the slow suite alone plays, beside cases of the same kind that every run of the suite plays."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_only(cases: Iterable[Any]) -> list[Any]:
    """Return parameters that are marked slow; a tuple or a list holds the values of several arguments."""
    return [_parameter(case, [pytest.mark.slow]) for case in cases]


def fast_every(cases: Iterable[Any], step: int) -> list[Any]:
    """Return parameters of which numbers 0, step, 2 step, ... are fast and all others are marked slow."""
    return [
        _parameter(case, [pytest.mark.slow] if number % step else []) for number, case in enumerate(cases)
    ]


def _parameter(case: Any, marks: list[pytest.MarkDecorator]) -> Any:
    if hasattr(case, "marks"):  # made by pytest.param
        return pytest.param(*case.values, marks=[*case.marks, *marks], id=case.id)
    return pytest.param(*(case if isinstance(case, list | tuple) else (case,)), marks=marks)
