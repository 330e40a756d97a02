"""What private weighting adds to whole runs: uldp-avg-w on the medical sets, with the protocol and without.

The settings are those of Figures 6 and 7 of ULDP-FL (zipf allocation, all hospitals or regions, 50 rounds), with 10 and
100 users, Paillier of 3072 bits and N_max = 2000. All parties take turns on one core, so the overhead is that of the
server and all silos together; a run between institutions divides it among them. The plain run is the peer. CPU seconds:
key generation and setup, the first round (in which the silos build their tables), and the median of the later rounds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.harness import Row
from fedveil.engine.experiments.experiment import Experiment, parse_assignment
from fedveil.engine.experiments.study import Selection, load_study
from fedveil.engine.observer import Unwatched
from fedveil.engine.run import run
from fedveil.engine.run_folder.folder import Row as Metrics
from fedveil.engine.setup import prepare

_PRESETS = {"HeartDisease": "figure-6-heart-disease", "TcgaBrca": "figure-7-tcga-brca"}
_PRIVATE = ("protection.name=private-weighting", "protection.n_max=2000")


def rows(quick: bool) -> Iterator[Row]:
    """Run both sets with 10 and 100 users; with ``quick`` HeartDisease with 10 users for 3 rounds. Needs their data."""
    for name, preset in list(_PRESETS.items())[: 1 if quick else None]:
        for users in (10,) if quick else (10, 100):
            yield from _compare(name, preset, users, rounds=3 if quick else 50)


def _compare(name: str, preset: str, users: int, *, rounds: int) -> Iterator[Row]:
    asked = (f"data.n_users={users}", f"rounds={rounds}", f"evaluate_every={rounds}")
    plain, private = (_Clock.of(preset, (*asked, *added)) for added in ((), _PRIVATE))
    case = f"{name}, {users} users, {rounds} rounds, all parties on one core"
    yield Row(
        case=f"{case}: whole run under private weighting; peer: the plain run",
        unit="CPU s",
        ours=private.total,
        peer=plain.total,
        ratio=plain.total / private.total,
    )
    yield Row(case=f"{case}: overhead in all", unit="CPU s", ours=private.total - plain.total)
    yield Row(case=f"{case}: of it keys and setup", unit="CPU s", ours=private.setup - plain.setup)
    yield Row(case=f"{case}: of it the first round", unit="CPU s", ours=private.first - plain.first)
    yield Row(case=f"{case}: overhead per later round", unit="CPU s", ours=private.later - plain.later)
    for metric, value in plain.test.items():
        yield Row(
            case=f"{case}: test {metric} after the last round; peer: the plain run's, other noise",
            unit="",
            ours=private.test[metric],
            peer=value,
        )


class _Clock(Unwatched):
    """Watches a run: CPU seconds until the first round begins, and at the end of every round."""

    def __init__(self) -> None:
        self.test: dict[str, float] = {}
        self._marks = [time.process_time()]

    @classmethod
    def of(cls, preset: str, settings: tuple[str, ...]) -> _Clock:
        """Run uldp-avg-w of a preset with these settings; the population is loaded before the clock starts."""
        selection = Selection(
            scenarios=("users50-zipf",),
            variants=("uldp-avg-w",),
            overrides=tuple(parse_assignment(setting) for setting in settings),
        )
        prepared = prepare(load_study(preset, selection).experiments[0])
        with TemporaryDirectory() as folder:
            clock = cls()
            clock.test = run(prepared, Path(folder), clock).row["test"]
        return clock

    @property
    def setup(self) -> float:
        """Until the first round begins."""
        return self._marks[1] - self._marks[0]

    @property
    def first(self) -> float:
        """The first round."""
        return self._marks[2] - self._marks[1]

    @property
    def later(self) -> float:
        """Median of the later rounds."""
        return statistics.median(b - a for a, b in zip(self._marks[2:-1], self._marks[3:], strict=True))

    @property
    def total(self) -> float:
        """Until the end of the last round."""
        return self._marks[-1] - self._marks[0]

    def started(self, folder: Path, experiment: Experiment, done: int) -> None:
        """Note that the parties are ready."""
        self._marks.append(time.process_time())

    def completed(self, row: Metrics) -> None:
        """Note that a round is complete."""
        self._marks.append(time.process_time())
