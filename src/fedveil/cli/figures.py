"""How figures of releases are printed (estimate, interval, and where its width comes from), and a statement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedveil.cli.options import OUT
from fedveil.console import ends, number, rows_table
from fedveil.statistics.limits import TOO_FEW

if TYPE_CHECKING:  # what is only named here takes seconds to import
    from fedveil.privacy.statement import Statement
    from fedveil.statistics.figures import Row


def print_statement(statement: Statement) -> None:
    """Print the sentences of a statement, the claim first."""
    for sentence in statement.sentences():
        OUT.print(sentence, highlight=False, soft_wrap=not OUT.is_terminal)


def print_rows(found: Sequence[Row], here: bool = False) -> None:
    """Print a table of figures.

    Args:
        found: the figures.
        here: whether intervals are for these people alone, without the spread of a population.
    """
    OUT.print(rows_table([_told(row, here) for row in found]))


def _told(row: Row, here: bool) -> dict[str, str]:
    """Return a row in words."""
    cells = {"release": row.release, "group": row.group, "figure": f"{row.figure} {row.cell}".strip()}
    interval = row.interval
    if interval is None:
        return cells | {"estimate": TOO_FEW, "95 % interval": "", "width": ""}
    low, high = (interval.low_here, interval.high_here) if here else (interval.low, interval.high)
    privacy = 1.0 if here else interval.privacy
    width = f"privacy {privacy:.0%}, people {1 - privacy:.0%}"
    estimate = interval.in_words(number(interval.estimate))
    return cells | {"estimate": estimate, "95 % interval": ends(low, high), "width": width}
