"""Define the interface of objects that follow a run."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from fedveil.run.config.experiment import Experiment
from fedveil.run.folder.run_folder import Row


class StopTraining(Exception):
    """Signal from an observer to end the run after the current complete round, with a reason.

    The run then evaluates its model and writes its statement, as after its last round.
    """


class Observer(Protocol):
    """Receiver of a run's progress, which no guarantee covers.

    A line of metrics has test metrics and a simulation's diagnostics. Steps and their times depend on the
    participants and their numbers of records (:mod:`fedveil.run.folder.shown`). Output of an observer is therefore
    as private as the records.
    """

    def on_run_start(self, folder: Path, experiment: Experiment, done: int) -> None:
        """Handle the start of a run, or its resume after ``done`` complete rounds."""

    def training(self, round_number: int, done: int, total: int) -> None:
        """Handle progress of a round's local training: ``done`` of ``total`` steps."""

    def on_round_end(self, row: Row) -> None:
        """Handle the line of metrics of a complete round.

        Raises:
            StopTraining: to end the run here.
        """


class NullObserver(Observer):
    """An observer that ignores everything; the run folder holds all results."""

    def on_run_start(self, folder: Path, experiment: Experiment, done: int) -> None:
        """Ignore the start."""

    def training(self, round_number: int, done: int, total: int) -> None:
        """Ignore the progress."""

    def on_round_end(self, row: Row) -> None:
        """Ignore the round."""
