"""CPU seconds of a run: until its first round begins, of that round, and of the later ones."""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from fedveil.run.config.experiment import Experiment
from fedveil.run.folder.run_folder import Row
from fedveil.run.loop import NullObserver
from fedveil.run.setup import Prepared
from fedveil.run.training_run import run


@dataclass
class Clock(NullObserver):
    """Watches a run of this process; the records are loaded before it starts."""

    marks: list[float] = field(default_factory=lambda: [time.process_time()])

    @classmethod
    def measure(cls, prepared: Prepared) -> Clock:
        """Play a run in a folder that is not kept."""
        with tempfile.TemporaryDirectory() as folder:
            clock = cls()
            run(prepared, Path(folder), clock)
        return clock

    @property
    def setup(self) -> float:
        """Until the first round begins: keys and what the parties agree on."""
        return self.marks[1] - self.marks[0]

    @property
    def first(self) -> float:
        """The first round."""
        return self.marks[2] - self.marks[1]

    @property
    def later(self) -> float:
        """Median of the later rounds."""
        return statistics.median(b - a for a, b in zip(self.marks[2:-1], self.marks[3:], strict=True))

    def on_run_start(self, folder: Path, experiment: Experiment, done: int) -> None:
        """Note that the parties are ready."""
        self.marks.append(time.process_time())

    def on_round_end(self, row: Row) -> None:
        """Note that a round is complete."""
        self.marks.append(time.process_time())
