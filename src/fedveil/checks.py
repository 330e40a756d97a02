"""What was looked at when something was verified: the outcome of every check, and what no check can show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fedveil.errors import FedveilError

Outcome = Literal["holds", "fails", "unchecked"]


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that was looked at, what came of it, and why."""

    name: str
    outcome: Outcome
    detail: str


@dataclass(frozen=True, kw_only=True)
class Verification:
    """Everything that was checked of a file or folder, and what was not."""

    path: Path
    checks: tuple[Check, ...]

    def __str__(self) -> str:
        """One line a check, what fails first."""
        order = ("fails", "holds", "unchecked")
        found = sorted(self.checks, key=lambda one: order.index(one.outcome))
        return "\n".join(f"{one.outcome:9} {one.name}: {one.detail}" for one in found)

    @property
    def holds(self) -> bool:
        """Whether nothing that could be checked fails."""
        return all(one.outcome != "fails" for one in self.checks)


class Unchecked(Exception):
    """There is nothing to check; says why."""


def tried(name: str, check: Callable[[], str]) -> Check:
    """Return what came of a check, which says in words what holds, or raises."""
    try:
        return Check(name=name, outcome="holds", detail=check())
    except Unchecked as why:
        return Check(name=name, outcome="unchecked", detail=str(why))
    except FedveilError as error:
        return Check(name=name, outcome="fails", detail=str(error))
