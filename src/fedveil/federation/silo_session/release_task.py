"""A silo's work in a release of statistics: its people's bounded vectors, summed, with its share of the noise.

Claim: whatever the coordinator proposes, and says was released before, what a silo gives has the norm, the length and
the noise of the event that its ledger is charged with, and its counts decide nothing but the numbers that it gives.
Enforced by: step, bound, noise and event are computed here, from the document and the policy
(:func:`make_release_task`); of what was released before, finite numbers of the right lengths are taken, and the step
that follows from them has the same norm whatever they are. A coordinator that says other sums than it has read asks
at another point: all silos sign that they were told the same, and no guarantee depends on the point.
``tests/test_federation_releases.py`` tries both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from jaxtyping import Bool, Float32, Float64

from fedveil.data.columns import ColumnTable
from fedveil.data.records import Groups
from fedveil.federation.cpu_quota import Deadline
from fedveil.federation.errors import RefusalError
from fedveil.federation.policy import Policy
from fedveil.federation.session_plan import RoundStartState, SessionPlan
from fedveil.federation.silo_data import PartyTable
from fedveil.federation.silo_session.statement_check import SiloCharges, check_releases
from fedveil.federation.silo_session.task import SiloTask
from fedveil.federation.store import Tensors
from fedveil.privacy.events import ComposedEvent, Event, on_grid
from fedveil.protocols.refusals import Code
from fedveil.protocols.session_messages import Finalize, RunPart
from fedveil.randomness import PrivacyRandomness
from fedveil.run.releases.prepared_releases import PreparedReleases
from fedveil.run.releases.release import Release, ReleaseInputs
from fedveil.statistics.stored import NoisySum, NoisySums


def release_plan(
    release: Release, groups: Groups, privacy: PrivacyRandomness, phase: RunPart, dimension: int = 0
) -> SessionPlan:
    """Return what a session of a release plays: one round.

    Args:
        release: the release.
        groups: the (silo, user) pairs of whoever asks; none at the coordinator.
        privacy: where noise comes from.
        phase: which release it is.
        dimension: parameters of the model that it is of.
    """
    return SessionPlan(
        method=release.method,
        protocol_spec=release.protocol_spec(groups),
        rounds=1,
        n_users=release.public.n_users,
        dimension=dimension,
        privacy=privacy,
        phase=phase,
    )


def earlier_sums(
    told: Sequence[tuple[float, Float64[np.ndarray, " d"]]], release: Callable[[NoisySums], Release]
) -> NoisySums:
    """Return what was released before, if it may have come of these releases.

    Args:
        told: what the coordinator says.
        release: the release after some.

    Raises:
        RefusalError: other lengths, numbers that no sum has, or another noise.
    """
    made: NoisySums = ()
    for std, vector in told:
        expected, found = release(made), NoisySum(vector, std)
        possible = {expected.std(summed) for summed in range(1, expected.public.n_silos + 1)}
        if not found.fits(expected.step.length) or std not in possible:
            raise RefusalError(Code.RELEASED)
        made = (*made, found)
    return made


@dataclass(frozen=True, kw_only=True, eq=False)
class SiloReleaseTask(SiloTask):
    """A silo's work in one release.

    Attributes:
        release: what is released.
        charged: what the silo's ledger is charged with.
        records: its own records, as the step reads them; of a model, where one is sent.
        states: returns if the run states what its terms give, as :meth:`SiloTask.check_statement`.
        seconds: that counting them may take.
    """

    plan: SessionPlan
    whole: Event
    rounds: int
    release: Release
    charged: Event
    records: Callable[[Float32[np.ndarray, " d"]], ColumnTable]
    states: Callable[[Finalize, SiloCharges], None]
    seconds: float

    def event(self, number: int, *, again: bool) -> Event:
        """Return what the release is charged as."""
        return self.charged

    def workload(
        self,
        number: int,
        start: RoundStartState,
        drawn: Bool[np.ndarray, " users"] | None,
        before: Tensors,
    ) -> ReleaseInputs:
        """Return what makes the silo's sum, or its people's vectors under private weighting."""
        records, deadline = self.records(start.model), Deadline(self.seconds)
        return ReleaseInputs(self.release, records, self.plan.privacy, deadline)

    def check_statement(self, closing: Finalize, own: SiloCharges) -> None:
        """Return if the run states what its terms give, and charges what the silo's ledger shows."""
        self.states(closing, own)


def make_release_task(
    prepared: PreparedReleases, phase: RunPart, policy: Policy, table: PartyTable
) -> SiloReleaseTask:
    """Return a silo's work in one release of a document.

    Args:
        prepared: the document's releases, which the policy allows to be asked.
        phase: which of them, and what was released before.
        policy: the silo's.
        table: its own.

    Raises:
        RefusalError: more precision than the policy pays for, or what does not fit what was released before.
        DataError: a table that cannot be read.
    """
    series = prepared.series
    if len(phase.released) >= prepared.count:
        raise RefusalError(Code.RELEASED)
    made = earlier_sums(phase.released, prepared.release)
    if phase.name != prepared.part(len(made)):
        raise RefusalError(Code.RELEASED)
    release = prepared.release(made)
    policy.check_release(release.step.length, release.std())
    events = [on_grid(policy.event(one.guarantee), one.grid_loss) for one in series.releases]
    own = table.columns(release.step.columns)
    return SiloReleaseTask(
        plan=release_plan(release, own.pairs(), series.privacy.randomness(), phase),
        whole=ComposedEvent(events=tuple(events)),
        rounds=prepared.count,
        release=release,
        charged=events[len(made)],
        records=lambda _: own,
        states=partial(check_releases, prepared),
        seconds=policy.round_seconds,
    )
