"""Who watches a run."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from fedveil.run.config.experiment import Experiment
from fedveil.run.folder.run_folder import Row


class Observer(Protocol):
    """Who is told how a run goes on, and so sees what no guarantee covers.

    A line of metrics has test metrics and a simulation's diagnostics, and steps and their times depend on who takes
    part and with how many records (:mod:`fedveil.run.folder.shown`). What an observer shows is as
    private as the records.
    """

    def on_run_start(self, folder: Path, experiment: Experiment, done: int) -> None:
        """A run begins, or goes on after ``done`` complete rounds."""

    def training(self, round_number: int, done: int, total: int) -> None:
        """Local training of a round has taken ``done`` of ``total`` steps."""

    def on_round_end(self, row: Row) -> None:
        """A round is complete; its line of metrics.

        Raises:
            StopTraining: the run shall end here.
        """


class NullObserver(Observer):
    """Looks at nothing: the run folder says it all."""

    def on_run_start(self, folder: Path, experiment: Experiment, done: int) -> None:
        """Nothing."""

    def training(self, round_number: int, done: int, total: int) -> None:
        """Nothing."""

    def on_round_end(self, row: Row) -> None:
        """Nothing."""
