"""A release of statistics as a part of a run with one step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32

from fedveil.data.columns import ColumnTable
from fedveil.randomness import PrivacyRandomness
from fedveil.run.journal import Journal, Step, StepKey
from fedveil.run.loop import Played
from fedveil.run.releases.release import Release
from fedveil.statistics.result import NoisySum, NoisySums, digest_of_release


def no_model() -> Float32[np.ndarray, " d"]:
    """Return the model that silos receive for a release without a model: (0,) float32."""
    return np.zeros(0, dtype=np.float32)


def refuse_repeat(journal: Journal, key: StepKey, name: str) -> str | None:
    """Return why a release that is due may not be charged once more; None if it may.

    Silos that are asked again would make another release. They refuse a statement in which one of their releases is
    charged twice. In one process a further charge is allowed, and the statement names it.
    """
    if not journal.is_signed or not journal.count_charges(key):
        return None
    return (
        f"release {name} was begun before and is charged; under this protection silos that are asked again release "
        "again, which would spend more than was declared"
    )


@dataclass(kw_only=True, eq=False)
class ReleasePart:
    """One release.

    Attributes:
        name: name of the part.
        journal: journal of the run.
        planned: the release.
        step: the charge of the release; None once the release is made.
        before: sums of all earlier releases of the run.
        keep: persists the sum.
        records: reads the records of all silos; called only if all silos are in this process.
        privacy: source of noise and keys.
        model: (d,) float32 model that the release evaluates; d = 0 for a release without a model.
        number: always 1: the part has one step.
        stopped: always None: a release that is refused keeps its step.
    """

    name: str
    journal: Journal
    planned: Release
    step: Step | None
    before: NoisySums
    keep: Callable[[NoisySum], None]
    records: Callable[[], ColumnTable]
    privacy: PrivacyRandomness
    model: Float32[np.ndarray, " d"]
    number: int = 1
    stopped: str | None = None

    def start(self) -> tuple[Float32[np.ndarray, " d"], float | None]:
        """Return the model that the release evaluates, and no clip."""
        return self.model, None

    def release(self, played: Played) -> None:
        """Persist the sum."""
        assert played.total is not None, "statistics are released to the coordinator"
        made = NoisySum(played.total, self.planned.std(played.summed))
        self.journal.release(lambda: digest_of_release((made.std, made.vector)), lambda: self.keep(made))
        self.step = None
