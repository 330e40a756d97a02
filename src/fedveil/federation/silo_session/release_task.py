"""Task of a silo in a release of statistics: its users' bounded vectors, summed, plus a noise share.

Claim: whatever the coordinator proposes, and whatever earlier results it reports, the silo's contribution has the
norm, length and noise of the event charged to its ledger. The silo's counts affect only the contributed numbers.
Enforced by: the silo computes step, bound, noise and event itself, from the document and the policy
(:func:`make_release_task`). From earlier results it accepts only finite numbers of the right lengths, and the norm of
the next step does not depend on them. A coordinator that reports other sums than it received requests the release at
another point. All silos sign that they received the same report, and no guarantee depends on the point.
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
from fedveil.privacy.events import ComposedEvent, Event
from fedveil.protocols.refusals import Code
from fedveil.protocols.session_messages import Finalize, RunPart
from fedveil.randomness import PrivacyRandomness
from fedveil.run.releases.prepared_releases import PreparedReleases
from fedveil.run.releases.release import Release, ReleaseInputs
from fedveil.statistics.result import NoisySum, NoisySums


def release_plan(
    release: Release, groups: Groups, privacy: PrivacyRandomness, phase: RunPart, dimension: int = 0
) -> SessionPlan:
    """Return the plan of a release's session: one round.

    Args:
        release: the release.
        groups: the party's (silo, user) pairs; empty at the coordinator.
        privacy: source of the noise.
        phase: name of the release, and the numbers released before it.
        dimension: number of parameters of the model that the release evaluates; 0 if none.
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
    """Check reported results of earlier releases and return them as noisy sums.

    Args:
        told: the reported numbers, as pairs of noise standard deviation and vector.
        release: function that returns the release that follows some noisy sums.

    Raises:
        RefusalError: a vector has another length or impossible numbers, or a standard deviation is impossible.
    """
    made: NoisySums = ()
    for std, vector in told:
        expected, found = release(made), NoisySum(vector, std)
        # The noise of a sum depends on the number of silos in it: one value per possible number.
        possible = {expected.std(summed) for summed in range(1, expected.public.n_silos + 1)}
        if not found.fits(expected.step.length) or std not in possible:
            raise RefusalError(Code.RELEASED)
        made = (*made, found)
    return made


@dataclass(frozen=True, kw_only=True, eq=False)
class SiloReleaseTask(SiloTask):
    """Task of a silo in one release.

    Attributes:
        plan: plan of the session.
        whole: event of the whole run in the silo's ledger.
        rounds: number of charges in ``whole``.
        release: the release.
        charged: the event charged to the silo's ledger.
        records: function that returns the columns of the step from the silo's records, given the received model.
        states: statement check of the run, as :meth:`SiloTask.check_statement`.
        seconds: time limit for counting the records.
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
        """Return the event of the release."""
        return self.charged

    def workload(
        self,
        number: int,
        start: RoundStartState,
        drawn: Bool[np.ndarray, " users"] | None,
        before: Tensors,
    ) -> ReleaseInputs:
        """Return the inputs of the silo's sum, or of its users' vectors under private weighting."""
        records, deadline = self.records(start.model), Deadline(self.seconds)
        return ReleaseInputs(self.release, records, self.plan.privacy, deadline)

    def check_statement(self, closing: Finalize, own: SiloCharges) -> None:
        """Check the run's statement against its terms and the silo's charges."""
        self.states(closing, own)


def make_release_task(
    prepared: PreparedReleases, phase: RunPart, policy: Policy, table: PartyTable
) -> SiloReleaseTask:
    """Return a silo's task in one release of a document.

    Args:
        prepared: releases of the document, whose requests the policy allows.
        phase: name of the release, and the numbers released before it.
        policy: the silo's policy.
        table: the silo's table.

    Raises:
        RefusalError: the release is more precise than the policy allows, or the part does not fit the earlier
            releases.
        DataError: the table cannot be read.
    """
    series = prepared.series
    if len(phase.released) >= prepared.count:
        raise RefusalError(Code.RELEASED)
    made = earlier_sums(phase.released, prepared.release)
    if phase.name != prepared.part(len(made)):
        raise RefusalError(Code.RELEASED)
    release = prepared.release(made)
    policy.check_release(release.step.length, release.std())
    events = [one.with_grid(policy.event(one.guarantee)) for one in series.releases]
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
