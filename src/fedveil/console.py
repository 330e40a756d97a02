"""What a person sees while a run goes on: a progress bar on a terminal, one line a round elsewhere."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from fedveil.foreign import foreign, inert

if TYPE_CHECKING:  # what is only named here takes seconds to import
    from fedveil.engine.experiment import Experiment
    from fedveil.engine.folder import Row
    from fedveil.engine.run import Outcome
    from fedveil.privacy.statement import Statement


class Terminal(Console):
    """Where a command prints. Text is shown as it stands: no markup is read, and nothing but colours of our own.

    Args:
        options: of rich's console.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Return a text as rich shows it; every line and every cell of a table passes here."""
        return super().render_str(inert(text), **options)


class BarObserver:
    """A live bar per run, with the last metric and epsilon beside it."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}", markup=False),
            TimeRemainingColumn(),
            console=console,
            refresh_per_second=8,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> BarObserver:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def started(self, folder: Path, experiment: Experiment, done: int) -> None:
        """Open the bar of a run."""
        self._task = self._progress.add_task(
            foreign(experiment.name), total=experiment.rounds, completed=done, status=""
        )

    def training(self, round_number: int, done: int, total: int) -> None:
        """Move the bar within a round."""
        if self._task is not None and total:
            self._progress.update(self._task, completed=round_number - 1 + done / total)

    def completed(self, row: Row) -> None:
        """Move the bar to the end of the round."""
        if self._task is not None:
            self._progress.update(self._task, completed=row["round"], status=foreign(headline(row)))


class LineObserver:
    """One line a round, for logs; silent if ``quiet``."""

    def __init__(self, console: Console, *, quiet: bool = False) -> None:
        self._console, self._quiet = console, quiet
        self._name, self._rounds = "", 0

    def __enter__(self) -> LineObserver:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def started(self, folder: Path, experiment: Experiment, done: int) -> None:
        """Say which run begins, and where it is kept."""
        self._name, self._rounds = experiment.name, experiment.rounds
        if not self._quiet:
            self._console.print(f"{self._name}: from round {done} of {self._rounds}, kept in {folder}")

    def training(self, round_number: int, done: int, total: int) -> None:
        """Nothing within a round."""

    def completed(self, row: Row) -> None:
        """Print the round's line."""
        if not self._quiet:
            text = f"{self._name} round {row['round']}/{self._rounds} {headline(row)} {row['seconds']:.2f}s"
            self._console.print(text, highlight=False)


def observer(console: Console, *, quiet: bool) -> BarObserver | LineObserver:
    """Return the observer that fits where the output goes."""
    return BarObserver(console) if console.is_terminal and not quiet else LineObserver(console, quiet=quiet)


def headline(row: Row) -> str:
    """Return the first test metric and epsilon of a round, in one line."""
    parts = []
    if row["test"]:
        name, value = next(iter(row["test"].items()))
        parts.append(f"{name} {number(value)}")
    parts.append(f"epsilon {epsilon_text(row['epsilon'])}")
    return "  ".join(parts)


def number(value: float | None, *, none: str = "-") -> str:
    """Return a number with four significant digits."""
    if value is None or math.isnan(value):
        return none
    return f"{value:.4g}" if abs(value) < 10000 else f"{value:.3e}"


def epsilon_text(epsilon: float | None) -> str:
    """Return an epsilon rounded up, as the statement does; "none" where nothing is guaranteed."""
    from fedveil.privacy.statement import show_epsilon  # takes seconds to import

    return "none" if epsilon is None else show_epsilon(epsilon)


def outcome_table(outcomes: Sequence[Outcome]) -> Table:
    """Return the table a run ends with: metric, epsilon, delta, unit, seconds."""
    metric = next((name for one in outcomes if one.row["test"] for name in one.row["test"]), "metric")
    table = Table(title=None)
    table.add_column("run", no_wrap=True)
    for column in (f"test {metric}", "epsilon", "to server", "delta", "unit", "rounds", "seconds"):
        table.add_column(column, justify="left" if column == "unit" else "right")
    for one in outcomes:
        guaranteed = one.statement.epsilon is not None
        table.add_row(
            one.folder.name,
            number((one.row["test"] or {}).get(metric)),
            epsilon_text(one.statement.epsilon),
            _to_server(one.statement),
            number(one.statement.delta) if guaranteed else "-",
            one.statement.unit if guaranteed else "-",
            str(one.rounds),
            f"{one.seconds:.1f}",
        )
    return table


def _to_server(statement: Statement) -> str:
    """Return the epsilon against the server, which may see more than the models."""
    against = next((d.epsilon for d in statement.trust if d.party == "the server"), statement.epsilon)
    return epsilon_text(against)


def transposed_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Return the fields of a few rows, one field a line."""
    table = Table(show_header=False)
    for key in rows[0]:
        table.add_row(key.replace("_", " "), *(_cell(row[key]) for row in rows))
    return table


def rows_table(rows: Iterable[dict[str, Any]], title: str | None = None) -> Table:
    """Return a table of flat rows; the first row's keys are the columns."""
    rows = list(rows)
    table = Table(title=title)
    for key in rows[0] if rows else ():
        table.add_column(key.replace("_", " "))
    for row in rows:
        table.add_row(*(_cell(value) for value in row.values()))
    return table


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None or isinstance(value, float):
        return number(value)
    return str(value)


def print_json(document: Any) -> None:
    """Print one JSON object on standard output, and nothing else."""
    print(json.dumps(document, indent=2, allow_nan=False, default=str))
