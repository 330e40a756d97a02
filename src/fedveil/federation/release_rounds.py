"""A release as the coordinator's folder has it: one round, charged, summed and written down, in this order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic

import numpy as np
from jaxtyping import Float32, Float64

from fedveil.data.records import empty_groups
from fedveil.federation.audit.released_sums import digest_of_release
from fedveil.federation.audit.run_record import RunRecord
from fedveil.federation.session_plan import EVERYBODY, EndingT, RoundStartState, SampleDraw, SessionPlan
from fedveil.federation.silo_session.release_task import release_plan
from fedveil.privacy.events import Event
from fedveil.privacy.ledger import Ledger
from fedveil.protocols.session_messages import RunPart, SessionMessage
from fedveil.randomness import PrivacyRandomness
from fedveil.run.releases.release import Release
from fedveil.statistics.stored import NoisySum, NoisySums


def no_model() -> Float32[np.ndarray, " d"]:
    """Return the model that silos are sent for a release that reads none: of no parameters."""
    return np.zeros(0, dtype=np.float32)


@dataclass(frozen=True, kw_only=True, eq=False)
class DueRelease(Generic[EndingT]):
    """A release that a run's folder lacks.

    Attributes:
        release: what is released.
        phase: what silos are told of it, and of those before it.
        run, round: what the ledger calls it.
        event: what the ledger is charged with.
        privacy: where keys come from.
        keep: puts its sum on the disk: then, and not before, it counts as released.
        conclude: writes what is left behind; it is told why there is no sum, or None.
        model: (d,) of which it is; of none, for a release that reads none.
        trained: complete rounds of training before it.
        made: whether its sum is on the disk: its session plays no round then, and has the end of the run signed.
        charges: where the run ends with this release, how often a ledger was charged for rounds of training; None: it
            goes on.
        refusal: why a ledger may not be charged with it, None if it may; None: no budget but its own bounds it.
    """

    release: Release
    phase: RunPart
    run: str
    round: int
    event: Event
    privacy: PrivacyRandomness
    keep: Callable[[NoisySum], None]
    conclude: Callable[[str | None, Ledger], EndingT]
    model: Float32[np.ndarray, " d"] = field(default_factory=no_model)
    trained: int = 0
    made: bool = False
    charges: Callable[[Ledger], int] | None = None
    refusal: Callable[[Ledger], str | None] | None = None

    def is_charged_in(self, ledger: Ledger) -> bool:
        """Return whether a ledger was charged with it."""
        return any((entry.run, entry.round) == (self.run, self.round) for entry in ledger.entries)

    def plan(self) -> SessionPlan:
        """Return what its session plays."""
        return release_plan(self.release, empty_groups(), self.privacy, self.phase, len(self.model))


class ReleaseRounds(Generic[EndingT]):
    """One release, as one round.

    Args:
        due: the release.
        ledger: of the run folder; it is closed here.
        record: what the parties sign of every round.

    Raises:
        RunFolderError: the record lacks a round that was played before.
    """

    def __init__(self, due: DueRelease[EndingT], ledger: Ledger, record: RunRecord) -> None:
        self._due, self._ledger, self._record = due, ledger, record
        self.plan, self.start, self.number = due.plan(), RoundStartState(model=due.model), 1
        self.has_rounds_left = not due.made
        self._closing: list[SessionMessage] = []
        record.mend(due.trained + len(due.phase.released) + due.made)

    def close(self) -> None:
        """Give the ledger back; closing twice is harmless."""
        self._ledger.close()

    def stop_reason(self, repeats: bool) -> str | None:
        """Return why the release may not be asked for, None if it may.

        Where an attempt that is asked for again is another release, it would cost another epsilon: what a release may
        spend is declared.
        """
        if not self._due.is_charged_in(self._ledger):
            return None if self._due.refusal is None else self._due.refusal(self._ledger)
        if repeats:
            return None
        return (
            f"release {self._due.phase.name} was begun before and is charged; under this protection silos that are "
            "asked again release again, which would spend more than was declared"
        )

    def begin(self, repeats: bool) -> SampleDraw:
        """Charge the release where it is not charged yet; everybody takes part."""
        due = self._due
        if not due.is_charged_in(self._ledger):
            self._ledger.charge(run=due.run, round=due.round, attempt=0, event=due.event)
        return EVERYBODY

    def release(self, total: Float64[np.ndarray, " d"], summed: int) -> None:
        """Put the sum on the disk."""
        made = NoisySum(total, self._due.release.std(summed))
        self._record.add(digest_of_release((made.std, made.vector)), self._ledger.head.digest)
        self._due.keep(made)
        self.has_rounds_left = False

    def pass_on(self, summed: int) -> None:
        """Never: the coordinator has every sum."""
        raise AssertionError("statistics are released to the coordinator")

    def closing(self) -> list[SessionMessage]:
        """Return what silos are asked to sign once it is concluded; nothing where the run goes on."""
        return self._closing

    def conclude(self, reason: str | None, *, has_model: bool) -> EndingT:
        """Write what is left behind, and give the ledger back."""
        due = self._due
        found = due.conclude(reason, self._ledger)
        if due.charges is not None and not self.has_rounds_left:
            self._closing = self._record.close(due.trained, due.charges(self._ledger))
        self._ledger.close()
        return found


def phase_of(name: str, made: NoisySums) -> RunPart:
    """Return what silos are told of a part of a run, and of the releases before it."""
    return RunPart(name=name, released=tuple((one.std, one.vector) for one in made))
