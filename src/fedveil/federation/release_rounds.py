"""One release in the coordinator's run folder: a round, charged, summed and persisted, in this order."""

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
    """Return the model that silos receive for a release without a model: (0,) float32."""
    return np.zeros(0, dtype=np.float32)


@dataclass(frozen=True, kw_only=True, eq=False)
class DueRelease(Generic[EndingT]):
    """A release that a run's folder lacks.

    Attributes:
        release: the release.
        phase: its name, and the numbers of the releases before it, as sent to the silos.
        run, round: names of the release in the ledger.
        event: the event charged to the ledger.
        privacy: source of randomness for keys.
        keep: function that persists the sum. The release counts as released after the call, and not before.
        conclude: function that writes the final files; receives the reason for a missing sum, or None.
        model: (d,) float32 model that the release evaluates; d = 0 for a release without a model.
        trained: number of complete training rounds before the release.
        made: whether the sum is persisted. Its session then plays no round, and collects signatures of the run's end.
        charges: if the run ends with this release: counts the ledger's charges for training rounds. None: the run
            continues.
        refusal: returns why a ledger may not be charged, or None if it may. None: only the release's own bounds
            apply.
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
        """Return whether a ledger contains the charge of the release."""
        return any((entry.run, entry.round) == (self.run, self.round) for entry in ledger.entries)

    def plan(self) -> SessionPlan:
        """Return the plan of the release's session."""
        return release_plan(self.release, empty_groups(), self.privacy, self.phase, len(self.model))


class ReleaseRounds(Generic[EndingT]):
    """One release, played as a session with one round.

    Args:
        due: the release.
        ledger: ledger of the run folder; closed here.
        record: record of the parties' signatures.

    Raises:
        RunFolderError: the record lacks an earlier round.
    """

    def __init__(self, due: DueRelease[EndingT], ledger: Ledger, record: RunRecord) -> None:
        self._due, self._ledger, self._record = due, ledger, record
        self.plan, self.start, self.number = due.plan(), RoundStartState(model=due.model), 1
        self.has_rounds_left = not due.made
        self._closing: list[SessionMessage] = []
        # Lines of the record = finished rounds + earlier releases + this one if made; a further line is of an
        # unreleased round.
        record.mend(due.trained + len(due.phase.released) + due.made)

    def close(self) -> None:
        """Close the ledger; closing twice is harmless."""
        self._ledger.close()

    def stop_reason(self, repeats: bool) -> str | None:
        """Return why the release may not be requested; None if it may.

        If a repeated attempt is another release, it would cost another epsilon, and the document declares the epsilon
        of each release. Such a release is not requested again.
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
        """Charge the release if it is not charged yet; all users take part."""
        due = self._due
        if not due.is_charged_in(self._ledger):
            self._ledger.charge(run=due.run, round=due.round, attempt=0, event=due.event)
        return EVERYBODY

    def release(self, total: Float64[np.ndarray, " d"], summed: int) -> None:
        """Persist the sum."""
        made = NoisySum(total, self._due.release.std(summed))
        # The record first: a line without its sum is removed by mend() on the next start; a sum without its line
        # could not be verified.
        self._record.add(digest_of_release((made.std, made.vector)), self._ledger.head.digest)
        self._due.keep(made)
        self.has_rounds_left = False

    def pass_on(self, summed: int) -> None:
        """Never called: the coordinator has every sum."""
        raise AssertionError("statistics are released to the coordinator")

    def closing(self) -> list[SessionMessage]:
        """Return the messages that the silos sign at the end of the run; empty if the run continues."""
        return self._closing

    def conclude(self, reason: str | None, *, has_model: bool) -> EndingT:
        """Write the final files, and close the ledger."""
        due = self._due
        found = due.conclude(reason, self._ledger)
        if due.charges is not None and not self.has_rounds_left:
            self._closing = self._record.close(due.trained, due.charges(self._ledger))
        self._ledger.close()
        return found


def phase_of(name: str, made: NoisySums) -> RunPart:
    """Return the `RunPart` of a part of a run: its name, and the numbers of the releases before it."""
    return RunPart(name=name, released=tuple((one.std, one.vector) for one in made))
