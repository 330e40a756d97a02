"""How many runs a cell gets, and how many it needs to stand on the page."""

from __future__ import annotations

import statistics
from typing import Final

from reproduction.results import Results
from reproduction.table import Table

LEAST_RUNS: Final = 3
"""Runs below which a cell with chance in it is not shown on the page, nor compared."""

CHEAP_RUNS: Final = 5
"""Runs that a cell gets at least where one takes less than :data:`CHEAP_SECONDS`."""

CHEAP_SECONDS: Final = 120.0
"""CPU seconds of the mean run."""


def runs_wanted(table: Table, results: Results, cell: str, asked: int | None = None) -> int:
    """Return how many runs a cell gets.

    One where there is no chance; else as many as were asked for, or else as the table says, and then no fewer than
    :data:`CHEAP_RUNS` where the runs so far were cheap.
    """
    if table.exact:
        return 1
    if asked is not None:
        return asked
    spent = [run.cpu_seconds for run in results.runs_of(cell) if run.cpu_seconds is not None]
    cheap = bool(spent) and statistics.fmean(spent) < CHEAP_SECONDS
    return max(table.seeds, CHEAP_RUNS) if cheap else table.seeds


def cells_with_runs(table: Table, results: Results, least: int) -> list[str]:
    """Return the cells that have at least so many runs (one where there is no chance), in the table's order."""
    there = list(dict.fromkeys(run.cell for run in results.runs))
    listed = [cell.name for cell in table.cells(0)] or there
    return [cell for cell in listed if len(results.runs_of(cell)) >= (1 if table.exact else least)]
