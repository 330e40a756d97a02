"""Show progress and results of a run: a progress bar on a terminal, one line per round elsewhere."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from fedveil.errors import FedveilError
from fedveil.sanitize import sanitize, strip_control_characters

if TYPE_CHECKING:  # what is only named here takes seconds to import
    # Only annotations need these; at run time the import would take seconds.
    from fedveil.privacy.statement import Statement
    from fedveil.run.config.experiment import Experiment
    from fedveil.run.folder.run_folder import Row
    from fedveil.run.steps.experiment import Outcome


_WHOLE: Final = 10_000
"""Width in columns when no terminal reads the output: wider than any table."""


class Terminal(Console):
    """Console of a command. It prints text verbatim: no markup, no emoji names, no inserted line breaks.

    A terminal breaks long lines itself and joins them again when they are copied. Without a terminal, tables are as
    wide as they need, whatever COLUMNS says.

    Args:
        options: options of rich's console.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, soft_wrap=True, **options)
        if not self.is_terminal:
            self.width = _WHOLE

    def render_str(self, text: str, **options: Any) -> Text:
        """Render a text without control characters; every line and every table cell passes this method."""
        return super().render_str(strip_control_characters(text), **options)


class _Uncut(Table):
    """Table that becomes wider than a narrow terminal rather than cut a word."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render the table with every column at least as wide as its longest word."""
        wide = options.update(max_width=_WHOLE)
        for column in self.columns:
            cells = (column.header, *column.cells)
            column.min_width = max(Measurement.get(console, wide, cell).minimum for cell in cells)
        yield from super().__rich_console__(console, options)


class _Advising:
    """Base of the observers: adds the resume command to an interruption, and prints each advice once.

    Args:
        resume: the command that resumes a run; the run's folder is appended.
    """

    def __init__(self, resume: str) -> None:
        self._resume = resume
        self._folder: Path | None = None

    def _note(self, error: BaseException | None) -> None:
        if error is not None and not isinstance(error, FedveilError) and self._folder is not None:
            error.add_note(
                f"`{self._resume} {shlex.quote(str(self._folder))}` goes on from the last complete round"
            )

    def _listen(self, folder: Path, experiment: Experiment) -> str | None:
        """Note that a run started; return a notice if an earlier run has the same name."""
        self._folder = folder
        self._planned, self._heard, self._advised = experiment.rounds, list[Any](), 0
        # A run folder whose name is taken gets the suffix -2, -3, ...; an earlier run of the same experiment lies
        # next to it.
        name, _, number = folder.name.rpartition("-")
        if name != experiment.name or not number.isdecimal():
            return None
        earlier = folder.with_name(name if number == "2" else f"{name}-{int(number) - 1}")
        if not (earlier / "experiment.toml").is_file():
            return None
        unfinished = f" and is not finished: `{self._resume} {shlex.quote(str(earlier))}` continues it"
        return (
            f"{earlier} exists{'' if (earlier / 'privacy.json').exists() else unfinished}. This is another run; "
            "what both cost the same people adds up (`fedveil spent`)"
        )

    def _advice(self, row: Row) -> str | None:
        from fedveil.run.advice import advice, heard_before, news  # with torch, seconds to import
        from fedveil.run.folder.documents import RoundRow

        if not self._heard and self._folder is not None:
            # A resumed run reads the rounds before it from its folder, so that advice does not depend on
            # interruptions.
            self._heard += heard_before(self._folder, row["round"])
        self._heard.append(RoundRow.model_validate(row))
        remark = news(advice(self._heard, self._planned), self._advised)
        self._advised += 0 if remark is None else remark.count("\n") + 1
        return remark


@contextmanager
def spinner(text: str, console: Console | None = None) -> Iterator[None]:
    """Show on a terminal that work without rounds goes on, and for how long; elsewhere print nothing.

    Args:
        text: what is done.
        console: None: the terminal of the errors, so that results can be piped.
    """
    console = Terminal(stderr=True) if console is None else console
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        progress.add_task(sanitize(text), total=None)
        yield


class BarObserver(_Advising):
    """Progress bar of a run, with the last metric and epsilon next to it."""

    def __init__(self, console: Console, *, resume: str = "fedveil resume") -> None:
        super().__init__(resume)
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

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._progress.stop()
        self._note(error)

    def on_run_start(self, folder: Path, experiment: Experiment, done: int) -> None:
        """Start the progress bar of a run."""
        if (notice := self._listen(folder, experiment)) is not None:
            self._progress.console.print(notice)
        self._task = self._progress.add_task(
            sanitize(experiment.name), total=experiment.rounds, completed=done, status=""
        )

    def training(self, round_number: int, done: int, total: int) -> None:
        """Advance the bar within a round."""
        if self._task is not None and total:
            self._progress.update(self._task, completed=round_number - 1 + done / total)

    def on_round_end(self, row: Row) -> None:
        """Advance the bar to the end of the round."""
        if self._task is not None:
            self._progress.update(self._task, completed=row["round"], status=sanitize(headline(row)))
        if (remark := self._advice(row)) is not None:
            self._progress.console.print(remark)


class LineObserver(_Advising):
    """One line per round, for logs; silent if ``quiet``."""

    def __init__(self, console: Console, *, quiet: bool = False, resume: str = "fedveil resume") -> None:
        super().__init__(resume)
        self._console, self._quiet = console, quiet
        self._name = ""

    def __enter__(self) -> LineObserver:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._note(error)

    def on_run_start(self, folder: Path, experiment: Experiment, done: int) -> None:
        """Print the run's name, its first round and its folder."""
        self._name = experiment.name
        notice = self._listen(folder, experiment)
        if not self._quiet:
            if notice is not None:
                self._console.print(f"{self._name}: {notice}", highlight=False)
            self._console.print(f"{self._name}: from round {done} of {self._planned}, kept in {folder}")

    def training(self, round_number: int, done: int, total: int) -> None:
        """Ignore progress within a round."""

    def on_round_end(self, row: Row) -> None:
        """Print the round's line."""
        if not self._quiet:
            text = f"{self._name} round {row['round']}/{self._planned} {headline(row)} {row['seconds']:.2f}s"
            self._console.print(text, highlight=False)
            if (remark := self._advice(row)) is not None:
                self._console.print(f"{self._name}: {remark}", highlight=False)


def observer(console: Console, *, quiet: bool, resume: str = "fedveil resume") -> BarObserver | LineObserver:
    """Return the observer that fits the output; ``resume`` is the command that resumes its runs."""
    if console.is_terminal and not quiet:
        return BarObserver(console, resume=resume)
    return LineObserver(console, quiet=quiet, resume=resume)


def headline(row: Row) -> str:
    """Return the first test metric and epsilon of a round, in one line."""
    parts = []
    if row["test"]:
        name, value = next(iter(row["test"].items()))
        parts.append(f"{name} {number(value)}")
    parts.append(f"epsilon {epsilon_text(row['epsilon'])}")
    return "  ".join(parts)


def number(value: float | None, *, none: str = "-") -> str:
    """Return a number with four significant digits; ``none`` for None and NaN."""
    if value is None or math.isnan(value):
        return none
    return f"{value:.4g}" if abs(value) < 10000 else f"{value:.3e}"


def ends(low: float | None, high: float | None) -> str:
    """Return the ends of an interval; an unbounded end is shown as "open"."""
    return f"{number(low, none='open')} .. {number(high, none='open')}"


def epsilon_text(epsilon: float | None) -> str:
    """Return an epsilon rounded up, as in the statement; "none" without a guarantee."""
    from fedveil.privacy.statement import show_epsilon  # takes seconds to import

    return "none" if epsilon is None else show_epsilon(epsilon)


def outcome_table(outcomes: Sequence[Outcome]) -> Table:
    """Return the final table of runs: metric, epsilon, delta, unit and seconds, then constant baselines.

    The last rows show the metric of the best constant prediction (the majority class, or the mean).
    """
    from fedveil.run.folder.diagnostics import baseline_of  # with torch, seconds to import

    metric = next((name for outcome in outcomes for name in _metrics(outcome)), "metric")
    table = _Uncut(title=None)
    table.add_column("run", no_wrap=True)
    for column in (f"test {metric}", "epsilon", "to server", "delta", "unit", "rounds", "seconds"):
        table.add_column(column, justify="left" if column == "unit" else "right")
    for outcome in outcomes:
        guaranteed = outcome.statement.epsilon is not None
        table.add_row(
            outcome.folder.name,
            _metrics(outcome).get(metric, "-"),
            epsilon_text(outcome.statement.epsilon),
            _to_server(outcome.statement),
            delta_text(outcome.statement.delta, outcome.statement.units) if guaranteed else "-",
            outcome.statement.unit if guaranteed else "-",
            str(outcome.rounds),
            f"{outcome.seconds:.1f}",
        )
    constants = [baseline_of(outcome.folder).get(metric) for outcome in outcomes]
    for constant in dict.fromkeys(
        value for value in constants if value is not None and not math.isnan(value)
    ):
        table.add_row("constant baseline", number(constant), *[""] * 6)
    return table


def delta_text(delta: float, units: int | None) -> str:
    """Return delta; if it is too large to protect a single unit, with the bound 1 / n that it exceeds."""
    from fedveil.privacy.accountant import is_large_delta  # takes seconds to import

    large = units is not None and is_large_delta(delta, units)
    return f"{number(delta)} (not below 1 / {units})" if large else number(delta)


def _metrics(outcome: Outcome) -> dict[str, str]:
    """Return a run's test metrics: exact values of a simulation, or released values with intervals.

    A released figure is never shown without its interval: if the interval has an open end, the figure may be far off.
    """
    if outcome.evaluated is None:
        return {name: number(value) for name, value in (outcome.row["test"] or {}).items()}
    return {
        name: "-"
        if interval is None
        else f"{number(interval.estimate)} ({ends(interval.low, interval.high)})"
        for name, interval in outcome.evaluated.headline.items()
    }


def _to_server(statement: Statement) -> str:
    """Return the epsilon against the server, which may see more than the models."""
    from fedveil.privacy.claims import Role  # with torch, seconds to import

    return epsilon_text(statement.line_for(Role.SERVER))


def transposed_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table of a few rows with one line per field."""
    table = _Uncut(show_header=False)
    for key in rows[0]:
        table.add_row(key.replace("_", " "), *(cell_text(key, row[key]) for row in rows))
    return table


def rows_table(rows: Iterable[Mapping[str, Any]], title: str | None = None) -> Table:
    """Return a table of flat rows; the keys of the first row are the columns."""
    rows = list(rows)
    table = _Uncut(title=title)
    for key in rows[0] if rows else ():
        table.add_column(key.replace("_", " "))
    for row in rows:
        table.add_row(*(cell_text(key, value) for key, value in row.items()))
    return table


def cell_text(key: str, value: Any) -> str:
    """Return the value of a column as text for a table."""
    if key == "epsilon" and not isinstance(value, str):
        return epsilon_text(value)
    if key == "noise_multiplier" and isinstance(value, float):
        from fedveil.privacy.statement import show_noise  # takes seconds to import

        return show_noise(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None or isinstance(value, float):
        return number(value)
    return str(value)


def print_json(document: Any) -> None:
    """Print one JSON object on standard output, and nothing else."""
    print(json.dumps(document, indent=2, allow_nan=False, default=str))
