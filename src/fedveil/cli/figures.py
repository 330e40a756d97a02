"""How figures of releases are printed (estimate, interval, and where its width comes from), and a statement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedveil.cli.options import OUT
from fedveil.console import rows_table

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
    from fedveil.api.releases import figure_frame

    OUT.print(rows_table(figure_frame(found, these_people=here).shown))
