"""Outcome of a submitted run and its file; imports little, for processes without a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

END: Final = "run_end.json"
"""Written when a run's play ends: an :class:`RunOutcome`."""

SOCKET: Final = "party"
"""The coordinator's socket for submissions, in its folder ``run``."""


@dataclass(frozen=True)
class RunOutcome:
    """Outcome of a submitted run.

    Attributes:
        error: what went wrong, if anything.
        stopped: why it ended before its last round, if it did.
        silent: silos whose silence has ended it.
    """

    error: str | None
    stopped: str | None
    silent: tuple[str, ...]
