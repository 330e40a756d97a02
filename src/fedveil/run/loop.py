"""Play what a run lacks: check, charge, play and release one step after another.

    run  ─► parts: steps of one method under one protocol, such as all rounds of training, or one release
    part ─► steps: each is charged, played by the parties and released

:func:`play_part` plays a part if all parties are in this process. Between institutions
:class:`~fedveil.federation.coordinator.CoordinatorParty` takes the same parts and exchanges messages instead.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, Self, TypeVar

import numpy as np
from jaxtyping import Float32, Float64

from fedveil.errors import SiloVanished
from fedveil.methods.guarantee import Guarantee
from fedveil.run.config.experiment import Experiment
from fedveil.run.config.release_document import TableDocument
from fedveil.run.folder.run_folder import Row, RunFolder
from fedveil.run.journal import Attempt, Journal, Step, Witness
from fedveil.run.rounds.diagnostics import RoundDiagnostics
from fedveil.statistics.result import NoisySums
from fedveil.training.heap import keep_freed_memory

# --- objects that follow a run ---


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


# --- the loop ---


@dataclass(frozen=True, kw_only=True, eq=False)
class Played:
    """Result of an attempt at a step.

    Attributes:
        total: (d,) float64 noisy sum; None if only the silos have it.
        summed: number of silos in the sum.
        n_sampled: number of sampled users or clients; None if contributions are whole silos.
        diagnostics: diagnostics of a simulation; None if no process sees all silos.
    """

    total: Float64[np.ndarray, " d"] | None
    summed: int
    n_sampled: int | None = None
    diagnostics: RoundDiagnostics | None = None


class Part(Protocol):
    """A part of a run, as the run folder has it.

    Attributes:
        name: name of the part, as sent to the silos; empty for training.
        number: number of the next step within the part, from 1.
        before: the releases of earlier parts, as sent to the silos.
        step: the next step; None if none is left.
        stopped: why no step is left although some are not released; None if it is not so.
    """

    name: str
    number: int
    before: NoisySums
    step: Step | None
    stopped: str | None

    def start(self) -> tuple[Float32[np.ndarray, " d"], float | None]:
        """Return the model at the start of the next step (d = 0 without one), and its clip; None: a fixed clip."""
        ...

    def release(self, result: Played) -> None:
        """Write the result of a step durably; the step counts as released after this call, and not before."""


class Parties(Protocol):
    """All parties of a part, in this process."""

    def play(self, attempt: Attempt) -> Played:
        """Play an attempt at the part's next step.

        Raises:
            SiloVanished: silos vanished, and the protocol cannot proceed without them.
        """
        ...

    def prepare_retry(self, vanished: SiloVanished) -> None:
        """Decide who takes part in the next attempt.

        Raises:
            FedveilError: no further attempt follows.
        """


@keep_freed_memory(release=True)
def play_part(part: Part, parties: Parties) -> str | None:
    """Play all steps that a part lacks; return why steps are left, or None if none is."""
    while (step := part.step) is not None:
        if (reason := step.refusal()) is not None:
            return reason
        attempt = step.begin()
        try:
            result = parties.play(attempt)
        except SiloVanished as vanished:
            step.fail(vanished)
            parties.prepare_retry(vanished)
        else:
            part.release(result)
    return part.stopped


class Ending(Protocol):
    """Outcome of a run or of one of its parts."""

    @property
    def stopped(self) -> str | None:
        """Reason of an early end; None if it is complete."""
        ...


EndingT = TypeVar("EndingT", bound=Ending, covariant=True)


class RunParts(ABC, Generic[EndingT]):
    """All parts of a run, read from its folder alone, so that a run continues wherever it was interrupted.

    Attributes:
        folder: the run folder.
        witness: record of the steps that the parties sign, each in a process of its own; None if all parties are in
            this process.
    """

    def __init__(self, folder: RunFolder, witness: Witness | None) -> None:
        self.folder, self.witness = folder, witness
        self._journal: Journal | None = None

    @property
    def journal(self) -> Journal:
        """The open journal of the run."""
        if self._journal is None:
            self._journal = Journal(self.folder, self.guarantee, self.witness)
        return self._journal

    def close(self) -> None:
        """Close the ledger; closing twice is harmless."""
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def __enter__(self) -> Self:
        """Return the run."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the ledger."""
        self.close()

    @property
    @abstractmethod
    def guarantee(self) -> Guarantee:
        """Guarantee that names the protected unit and the adjacency of every step."""

    @property
    @abstractmethod
    def document(self) -> Experiment | TableDocument:
        """The document that the run is of."""

    @abstractmethod
    def parts(self, *, again: bool = False) -> Iterator[Part]:
        """Yield each part that the folder lacks, when the one before is released.

        Args:
            again: whether to yield the last part even if it is released, so that the silos can sign the end.

        Raises:
            FedveilError: a damaged folder, or a ledger of another document.
        """

    @property
    @abstractmethod
    def is_whole(self) -> bool:
        """Return whether nothing is left to release, so that the silos may sign the end."""

    @property
    @abstractmethod
    def counts(self) -> tuple[int, int]:
        """Number of complete training rounds, and of their charges."""

    @abstractmethod
    def conclude(self, reason: str | None) -> EndingT:
        """Write the final files for everything that is released; ``reason`` says why the part ended early."""
