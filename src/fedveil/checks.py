"""Record the outcome of every check of a verification, and list what no check can show."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from fedveil.arguments import list_argument
from fedveil.errors import ConfigError, FedveilError
from fedveil.sanitize import one_line, sanitize

Outcome = Literal["holds", "fails", "unchecked"]
_ROUNDING: Final = 1e-6
_NOTHING: Final = 1e-300
_KEY: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check with its outcome and reason; both texts are single lines without control characters."""

    name: str
    outcome: Outcome
    detail: str

    def __post_init__(self) -> None:
        """Sanitize both texts: a line break from a file's text could pass for a further check."""
        for key, text in (("name", self.name), ("detail", self.detail)):
            object.__setattr__(self, key, one_line(text))


@dataclass(frozen=True, kw_only=True)
class Verification:
    """All checks of a file or folder, including those that could not be made."""

    path: Path
    checks: tuple[Check, ...]

    def __str__(self) -> str:
        """Return one line per check, failures first."""
        order = ("fails", "holds", "unchecked")
        ordered = sorted(self.checks, key=lambda check: order.index(check.outcome))
        return "\n".join(f"{check.outcome:9} {check.name}: {check.detail}" for check in ordered)

    def __repr__(self) -> str:
        counted = Counter(check.outcome for check in self.checks)
        counts = ", ".join(f"{counted[outcome]} {outcome}" for outcome in ("holds", "fails", "unchecked"))
        return f"Verification(path='{self.path}', holds={self.holds}, checks: {counts})"

    @property
    def holds(self) -> bool:
        """Return whether no check failed; unchecked items do not count."""
        return all(check.outcome != "fails" for check in self.checks)


class Unchecked(Exception):
    """Signal that there is nothing to check; the message says why."""


def run_check(name: str, check: Callable[[], str]) -> Check:
    """Run a check and return its outcome: it returns a sentence if it holds, and raises otherwise."""
    try:
        return Check(name=name, outcome="holds", detail=check())
    except Unchecked as why:
        return Check(name=name, outcome="unchecked", detail=str(why))
    except FedveilError as error:
        return Check(name=name, outcome="fails", detail=str(error))


def not_checkable(limits: Mapping[str, str]) -> tuple[Check, ...]:
    """Return the facts that no check can show, as unchecked items by name."""
    return tuple(Check(name=name, outcome="unchecked", detail=limit) for name, limit in limits.items())


def check_trusted(keys: Sequence[str]) -> None:
    """Check that the given trusted keys are public keys.

    Raises:
        ConfigError: a key is malformed; no check has run yet.
    """
    for key in list_argument("trusted", keys):
        if not isinstance(key, str) or not _KEY.fullmatch(key):
            shown = sanitize(key) if isinstance(key, str) else type(key).__name__
            raise ConfigError(
                f"trusted key '{shown}': a public key is 64 hexadecimal digits, as `fedveil sign` prints it"
            )


def equal_up_to_rounding(document: Any, recomputed: Any) -> bool:
    """Return whether two JSON documents are equal, except for the rounding of another machine.

    Fractions may differ by a relative 1e-6, however small they are (a p-value below 1e-9 is a figure too), or if both
    are below 1e-300. Everything else must be equal, and both must have the same keys. JSON has no NaN.
    """
    if isinstance(document, dict) and isinstance(recomputed, dict):
        return document.keys() == recomputed.keys() and all(
            equal_up_to_rounding(document[key], recomputed[key]) for key in document
        )
    if isinstance(document, (list, tuple)) and isinstance(recomputed, (list, tuple)):
        return len(document) == len(recomputed) and all(
            equal_up_to_rounding(*pair) for pair in zip(document, recomputed, strict=True)
        )
    if isinstance(document, float) and isinstance(recomputed, float):
        return math.isclose(document, recomputed, rel_tol=_ROUNDING, abs_tol=_NOTHING)
    return bool(document == recomputed)
