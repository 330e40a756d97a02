"""A release as the coordinator's folder has it: one round, charged, summed and written down, in this order."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float32, Float64

from fedveil.engine.folder import RunFolder
from fedveil.engine.release_run import PreparedReleases, conclude
from fedveil.engine.release_sum import NoisySum, NoisySums
from fedveil.federation.own_release import release_plan
from fedveil.federation.session_plan import EVERYBODY, Draw
from fedveil.population.records import nobodys_groups
from fedveil.protection.parts import Part, Phase


@dataclass(frozen=True, kw_only=True)
class ReleaseEnding:
    """How a release ended.

    Attributes:
        folder: the run folder.
        stopped: why there is none; None if there is.
    """

    folder: Path
    stopped: str | None


class ReleaseRounds:
    """The next release of a document, as one round.

    Args:
        prepared: the document's releases; one at least is not made.
        folder: the run folder, new or of a run that was interrupted.

    Raises:
        RunFolderError: a damaged folder, or another process at work in it.
    """

    def __init__(self, prepared: PreparedReleases, folder: RunFolder) -> None:
        self._prepared, self._folder = prepared, folder
        self._made = prepared.read(folder)
        self._release = prepared.release(self._made)
        phase = phase_of(prepared.part(len(self._made)), self._made)
        source = prepared.series.randomness()
        self.plan = release_plan(self._release, nobodys_groups(), source, phase)
        self._ledger = prepared.series.ledger(folder)
        self._done = False

    @property
    def number(self) -> int:
        """The one round."""
        return 1

    @property
    def left(self) -> bool:
        """Whether the release is not made yet."""
        return not self._done

    @property
    def model(self) -> Float32[np.ndarray, " d"]:
        """No model at all: a release of a document reads none."""
        return np.zeros(0, dtype=np.float32)

    def close(self) -> None:
        """Give the ledger back; closing twice is harmless."""
        self._ledger.close()

    def stopped(self, repeats: bool) -> str | None:
        """Return why the release may not be asked for, None if it may.

        Where an attempt that is asked for again is another release, it would cost another epsilon: privacy.epsilon is
        all that the document may spend.
        """
        if repeats or not self._charged():
            return None
        return (
            f"release {self._prepared.part(len(self._made))} was begun before and is charged; under this protection "
            "silos that are asked again release again, which would spend more than privacy.epsilon"
        )

    def begin(self, repeats: bool) -> Draw:
        """Charge the release where it is not charged yet; everybody takes part."""
        charged = self._charged()
        if not charged:
            self._ledger.charge(
                run=self._prepared.document.name,
                round=self._release.number,
                attempt=0,
                event=self._prepared.series.guarantees[len(self._made)].event,
            )
        return EVERYBODY

    def _charged(self) -> int:
        return sum(entry.round == self._release.number for entry in self._ledger.entries)

    def release(self, total: Float64[np.ndarray, " d"], summed: int) -> None:
        """Put the sum on the disk, beside those of the releases before."""
        self._made = (*self._made, NoisySum(total, self._release.std(summed)))
        self._prepared.write(self._folder, self._made)
        self._done = True

    def pass_on(self, summed: int) -> None:
        """Never: the coordinator has every sum."""
        raise AssertionError("statistics are released to the coordinator")

    def closing(self) -> list[Part]:
        """Nothing: silos sign the round, and what it states follows from its terms."""
        return []

    def conclude(self, reason: str | None, *, has_model: bool) -> ReleaseEnding:
        """Write the statement, if anything was charged, and give the ledger back."""
        if self._ledger.entries:
            conclude(self._prepared, self._folder, self._ledger)
        self._ledger.close()
        return ReleaseEnding(folder=self._folder.path, stopped=reason)


def phase_of(name: str, made: NoisySums) -> Phase:
    """Return what silos are told of a release, and of those before it."""
    return Phase(name=name, released=tuple((one.std, one.vector) for one in made))
