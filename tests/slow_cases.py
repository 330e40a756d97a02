"""Cases that the slow suite alone plays, beside cases of the same kind that every run of the suite plays."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def thorough(cases: Iterable[Any]) -> list[Any]:
    """Return parameters that are marked slow; a tuple or a list holds the values of several arguments."""
    return [_parameter(case, [pytest.mark.slow]) for case in cases]


def some(cases: Iterable[Any], every: int) -> list[Any]:
    """Return parameters of which the first, and each that is a multiple of ``every`` after it, are not slow."""
    return [
        _parameter(case, [pytest.mark.slow] if number % every else []) for number, case in enumerate(cases)
    ]


def _parameter(case: Any, marks: list[pytest.MarkDecorator]) -> Any:
    if hasattr(case, "marks"):  # made by pytest.param
        return pytest.param(*case.values, marks=[*case.marks, *marks], id=case.id)
    return pytest.param(*(case if isinstance(case, list | tuple) else (case,)), marks=marks)
