"""Callbacks: they receive public numbers after each round, and private numbers only if they ask for them.

A private number (how many users took part, how long the round took, norms before clipping) is a function of the records
that no guarantee covers. A callback that asks for private numbers cannot end the run, because the end of a run is
public.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final

from safetensors.torch import save_file
from torch import Tensor

from fedveil.config_keys import is_number, plain, whole_argument
from fedveil.console import number
from fedveil.errors import ConfigError, FedveilError
from fedveil.files import as_path
from fedveil.privacy.statement import Statement, show_epsilon
from fedveil.run.advice import advice, heard_before, news
from fedveil.run.config.experiment import Experiment
from fedveil.run.folder.documents import RoundRow
from fedveil.run.folder.run_folder import Row, RunFolder
from fedveil.run.folder.shown import METRICS, Kind
from fedveil.run.setup import Prepared
from fedveil.run.training_run import Outcome, StopTraining


@dataclass(frozen=True, kw_only=True, eq=False)
class RoundSummary:
    """A completed round, described by public numbers.

    Attributes:
        number: 1, 2, ...
        rounds: how many rounds the experiment has.
        epsilon: spent so far; None if nothing is guaranteed.
        test: metrics on the PUBLIC test table; None where the round was not evaluated, or the test records were held
            out of the private ones.
        private: the rest of the round's line of metrics, for a callback with ``sees_private``; otherwise None.
        folder: the run folder, whose checkpoint is that of this round.
        advice: a suggestion, computed from released models and public numbers alone; None if there is none.
    """

    number: int
    rounds: int
    epsilon: float | None
    test: Mapping[str, float | None] | None
    private: Mapping[str, Any] | None
    folder: Path
    _prepared: Prepared = field(repr=False)
    advice: str | None = None

    def __repr__(self) -> str:
        """Public numbers alone, whatever the callback is shown."""
        spent = "none" if self.epsilon is None else show_epsilon(self.epsilon)
        return f"RoundSummary({self.number} of {self.rounds}, epsilon={spent}, folder='{self.folder}')"

    def state_dict(self) -> dict[str, Tensor]:
        """Return the parameters of this round's model by name; they are released, and so covered by epsilon."""
        checkpoint = RunFolder(self.folder).read_checkpoint()
        assert checkpoint is not None
        released = self._prepared.method.model_of(checkpoint.model, checkpoint.state)
        return self._prepared.task.state(released)


class Callback:
    """The base class of callbacks: override the methods that you need.

    Attributes:
        sees_private: whether it receives the private numbers of every round; it then cannot end the run.
        needs_public_test: whether to refuse a population whose test records were held out of the private records.
    """

    sees_private: bool = False
    needs_public_test: ClassVar[bool] = False

    def on_run_start(self, folder: Path, rounds: int, done: int) -> None:
        """Called when a run of so many rounds begins in a folder, or is resumed after ``done`` of them."""

    def on_round_end(self, round: RoundSummary) -> str | None:
        """Called after each completed round; return a reason to end the run here, or None to continue."""
        return None

    def on_run_end(self, statement: Statement | None) -> None:
        """Called when the run ends: after its last round, early, or by an error (then there is no statement: None)."""


class EarlyStop(Callback):
    """Ends a run when a metric on the PUBLIC test table has not improved for some evaluated rounds.

    Args:
        metric: its name, as in ``metrics``.
        patience: number of evaluated rounds without improvement after which the run ends.
        least: smallest difference that counts as an improvement.
        lower_is_better: whether smaller values are better; None: only for ``loss``.
    """

    needs_public_test: ClassVar[bool] = True

    def __init__(
        self, metric: str, *, patience: int = 5, least: float = 0.0, lower_is_better: bool | None = None
    ) -> None:
        self.metric, self.patience = metric, whole_argument("EarlyStop: patience", patience, 1)
        self.least = plain(least)
        if not (is_number(self.least) and math.isfinite(self.least)):
            raise ConfigError(f"EarlyStop: least must be a finite number, not {least!r}")
        lower = metric == "loss" if lower_is_better is None else lower_is_better
        self._sign = -1.0 if lower else 1.0
        self._best, self._since = -math.inf, 0

    def on_run_start(self, folder: Path, rounds: int, done: int) -> None:
        self._best, self._since = -math.inf, 0

    def on_round_end(self, round: RoundSummary) -> str | None:
        if round.test is None:
            return None
        if self.metric not in round.test:
            raise ConfigError(
                f"EarlyStop: there is no metric '{self.metric}'; there are: {', '.join(round.test)}"
            )
        value = round.test[self.metric]
        reached = -math.inf if value is None else self._sign * value
        if reached > self._best + self.least:
            self._best, self._since = reached, 0
            return None
        self._since += 1
        if self._since < self.patience:
            return None
        return f"round {round.number}: {self.metric} has not improved for {self.patience} evaluated rounds"


class Checkpoints(Callback):
    """Keeps the model of every k-th round as ``round-NNNNN.safetensors`` in a folder.

    Args:
        folder: where; made if it is missing.
        every: k.
    """

    def __init__(self, folder: str | Path, *, every: int = 1) -> None:
        self.folder, self.every = (
            as_path(folder, "Checkpoints"),
            whole_argument("Checkpoints: every", every, 1),
        )

    def on_round_end(self, round: RoundSummary) -> str | None:
        if round.number % self.every == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            save_file(
                {name: value.contiguous() for name, value in round.state_dict().items()},
                self.folder / f"round-{round.number:05d}.safetensors",
            )
        return None


class Progress(Callback):
    """Prints one line a round: its number, epsilon, and the metrics on a public test table; and advice, once."""

    def __init__(self) -> None:
        self._advised = 0

    def on_run_start(self, folder: Path, rounds: int, done: int) -> None:
        self._advised = 0

    def on_round_end(self, round: RoundSummary) -> str | None:
        spent = "none" if round.epsilon is None else show_epsilon(round.epsilon)
        metrics = "".join(f"  {name} {number(value)}" for name, value in (round.test or {}).items())
        print(f"round {round.number}/{round.rounds}  epsilon {spent}{metrics}")
        if (said := news(round.advice, self._advised)) is not None:
            print(said)
            self._advised += said.count("\n") + 1
        return None


_PUBLIC: Final = frozenset(name for name, kind in METRICS.items() if kind is Kind.COVERED)


class CallbackObserver:
    """The observer of a run that tells callbacks what each may know."""

    def __init__(self, prepared: Prepared, callbacks: Sequence[Any], *, public_test: bool) -> None:
        if not isinstance(callbacks, Sequence):
            raise ConfigError(f"callbacks: a list is needed, [{type(callbacks).__name__}(...)]")
        for one in callbacks:
            if not isinstance(one, Callback):
                what = (
                    f"{one.__name__} is a class; hand over {one.__name__}()"
                    if isinstance(one, type)
                    else f"not {type(one).__name__}"
                )
                raise ConfigError(f"callbacks: a fedveil.Callback is needed: {what}")
            if one.needs_public_test and not public_test:
                raise ConfigError(
                    f"callbacks: {type(one).__name__} ends the run by test metrics, and these test records are held "
                    "out of the private ones: when the run ends would tell of them. Hand over public records: "
                    "fedveil.data(..., test=(features, targets))"
                )
        self._prepared, self._callbacks, self._public_test = prepared, tuple(callbacks), public_test
        # asked once: who has looked has looked
        self._see = tuple(bool(one.sees_private) for one in callbacks)
        self._folder: Path | None = None
        self._heard: list[RoundRow] = []

    def on_run_start(self, folder: Path, experiment: Experiment, done: int) -> None:
        """Tell every callback where the run is kept."""
        self._folder, self._heard = folder, []
        for one in self._callbacks:
            one.on_run_start(folder, experiment.rounds, done)

    def training(self, round_number: int, done: int, total: int) -> None:
        """Tell nobody: how many steps a round takes depends on who takes part."""

    def on_round_end(self, row: Row) -> None:
        """Tell every callback of a round.

        Raises:
            StopTraining: one of them has a reason to end.
            ConfigError: it has, but it sees private numbers.
        """
        if not self._heard and self._folder is not None:
            self._heard += heard_before(self._folder, row["round"])
        self._heard.append(RoundRow.model_validate(row))
        reasons = []
        for one, sees_private in zip(self._callbacks, self._see, strict=True):
            try:
                reason = one.on_round_end(self._summary(row, sees_private))
            except StopTraining as error:
                reason = str(error)
            if reason is not None and sees_private:
                raise ConfigError(
                    f"callbacks: {type(one).__name__} sees private numbers, so it cannot end the run: when a run ends "
                    "is public; let another callback end it by public numbers"
                )
            reasons += [reason] if reason is not None else []
        if reasons:
            raise StopTraining("; ".join(reasons))

    def until_the_end(self, play: Callable[[], Outcome]) -> Outcome:
        """Play a run, and tell every callback that was told of it how it ended, whatever happens.

        What code of a user's own raises is raised as it is, with a note of how to go on.
        """
        statement = None
        try:
            outcome = play()
            statement = outcome.statement
            return outcome
        except Exception as error:
            if self._folder is not None and not isinstance(error, FedveilError):
                error.add_note(
                    f"the run is kept: fedveil.resume({str(self._folder)!r}, model, people) goes on from its last "
                    "complete round"
                )
            raise
        finally:
            for one in self._callbacks if self._folder is not None else ():
                one.on_run_end(statement)

    def _summary(self, row: Row, private: bool) -> RoundSummary:
        assert self._folder is not None, "told of its start first"
        shown = private or self._public_test
        return RoundSummary(
            number=row["round"],
            rounds=self._prepared.experiment.rounds,
            epsilon=row["epsilon"],
            test=row["test"] if shown else None,
            private={key: value for key, value in row.items() if key not in _PUBLIC | {"test"}}
            if private
            else None,
            folder=self._folder,
            advice=advice(self._heard, self._prepared.experiment.rounds),
            _prepared=self._prepared,
        )
