"""Releases of a run that are no round of training: they spend from the same budget and stand in the same ledger.

    whole run = training of the charged rounds + every side release,    mu^2 = sum of all mu^2

Shares are shares of mu^2 of the one Gaussian release that costs the whole budget; the noise of training is found last,
so that all of them together cost what was declared. The releases are fixed before the run begins: what they cost
depends on nothing that is released.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from fedveil.engine.experiments.sections import PrivacySection
from fedveil.engine.releases.release_sum import Release
from fedveil.errors import CompositionError
from fedveil.methods.claims import Guarantee, PublicFacts
from fedveil.methods.derive import derive
from fedveil.methods.method import Method
from fedveil.methods.statistic import noise_of
from fedveil.privacy.accounting import make_accountant
from fedveil.privacy.calibration import calibrate_noise
from fedveil.privacy.claims import Role
from fedveil.privacy.events import Adjacency, ComposedEvent, Event, GaussianEvent, NoGuarantee
from fedveil.privacy.ledger import Budget, Ledger
from fedveil.statistics.local import LocalStatistic

BESIDE: int = 0
"""The number that the ledger has in place of a round's."""
_NAMES: Final = ("eval/1", "eval/2", "prep/1", "prep/2")
"""Of all releases of a run that are no round."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SideRelease:
    """A release of statistics inside of a run; public before the run begins.

    Attributes:
        name: within the run, such as "eval/1".
        purpose: what it is for, in words.
        step: its local step. Where it depends on an earlier release, one of the same length and norm stands here.
        method: the composition.
        guarantee: what it guarantees.
        facts: how many silos and people there are, and how many numbers it has.
        of_model: whether what it is of follows from a model, which silos are sent.
    """

    name: str
    purpose: str
    step: LocalStatistic
    method: Method
    guarantee: Guarantee
    facts: PublicFacts
    of_model: bool

    def after(self, rounds: int, step: LocalStatistic | None = None) -> Release:
        """Return the release as its parties play it; repeatable noise is its own, by its name.

        Args:
            rounds: of the run; their noise has the numbers up to there.
            step: its local step, where that depends on an earlier release.
        """
        return Release(
            method=self.method,
            step=self.step if step is None else step,
            public=self.facts,
            number=rounds + 1 + _NAMES.index(self.name),
        )

    @property
    def std(self) -> float:
        """The standard deviation of the noise on every number."""
        return noise_of(self.method, self.facts.n_silos)

    @property
    def grid_loss(self) -> float:
        """What the grid of its noise may change of a log-likelihood ratio."""
        return self.guarantee.grid_loss_after(1, self.step.layout.length)

    def against(self, role: Role) -> Event:
        """Return the event against a party; a party that has no line is promised nothing."""
        lines = {view.role: view.event for view in self.guarantee.views} | {Role.READER: self.guarantee.event}
        return lines.get(role, NoGuarantee(reason=f"nothing is said of what it learns of {self.name}"))

    def of_run(self, run: str) -> str:
        """Return what the ledger calls it."""
        return f"{run}/{self.name}"


def side_release(
    name: str, purpose: str, step: LocalStatistic, method: Method, facts: PublicFacts, *, of_model: bool
) -> SideRelease:
    """Return a release with what it guarantees among these people and silos."""
    guarantee = derive(method, facts)
    return SideRelease(
        name=name,
        purpose=purpose,
        step=step,
        method=method,
        guarantee=guarantee,
        facts=facts,
        of_model=of_model,
    )


def check_beside(releases: Sequence[SideRelease], rounds: Guarantee) -> None:
    """Refuse releases that one ledger cannot have beside the rounds: they must protect the same unit in the same sense.

    Raises:
        CompositionError: they do not.
    """
    for one in releases:
        own = one.guarantee
        if (own.unit, own.adjacency) != (rounds.unit, rounds.adjacency):
            raise CompositionError(
                f"{one.name}: protects one {own.unit} under {own.adjacency.value}, and the method of training one "
                f"{rounds.unit} under {rounds.adjacency.value}: no epsilon covers both; take a method of users, such "
                "as uldp-avg"
            )


def whole_of(privacy: PrivacySection, adjacency: Adjacency = Adjacency.ADD_OR_REMOVE_ONE) -> float:
    """Return the noise multiplier of the one release that spends what a document may: its share of epsilon."""
    return multiplier_of(privacy.share, _declared(privacy, adjacency))


def check_shared(privacy: PrivacySection, of_round: Event) -> None:
    """Refuse a share of an epsilon for rounds that are no Gaussian releases.

    Gaussian releases of mu_i^2 = share_i mu^2 are together one of mu^2. Two documents of sampled rounds are not bounded
    so, though each of them would spend no more than epsilon beside one Gaussian release: both use up delta.

    Raises:
        CompositionError: they are of another kind.
    """
    if privacy.share != 1 and not isinstance(of_round, GaussianEvent | NoGuarantee):
        raise CompositionError(
            "privacy.share: only Gaussian releases can share one epsilon, and rounds of drawn users (or of another "
            "noise, or of groups) are none; draw nobody, or give every document an epsilon of its own: they add up"
        )


def of_others(
    privacy: PrivacySection, adjacency: Adjacency = Adjacency.ADD_OR_REMOVE_ONE
) -> tuple[Event, ...]:
    """Return what other documents may release of the same people: one Gaussian release, or nothing."""
    if privacy.share == 1:
        return ()
    return (GaussianEvent(noise_multiplier=multiplier_of(1 - privacy.share, _declared(privacy, adjacency))),)


def _declared(privacy: PrivacySection, adjacency: Adjacency) -> float:
    assert privacy.epsilon is not None, "documents ask for it"
    accountant = make_accountant(privacy.accountant, adjacency)
    return whole_multiplier(Budget(epsilon=privacy.epsilon, delta=privacy.delta, accountant=accountant))


def whole_multiplier(budget: Budget) -> float:
    """Return the noise multiplier of the one Gaussian release that spends a budget."""
    return calibrate_noise(lambda z: GaussianEvent(noise_multiplier=z), budget)


def multiplier_of(share: float, whole: float) -> float:
    """Return the noise multiplier of a release with a share of mu^2 = whole^-2."""
    return whole / math.sqrt(share)


def together(
    rounds: Event | None, grid_loss: float, beside: Iterable[SideRelease], role: Role
) -> tuple[Event, float]:
    """Return what a party learns of rounds and side releases, as one event, and the loss of all grids."""
    releases = tuple(beside)
    events = (*(() if rounds is None else (rounds,)), *(one.against(role) for one in releases))
    loss = grid_loss + math.fsum(one.grid_loss for one in releases)
    return (events[0] if len(events) == 1 else ComposedEvent(events=events)), loss


@dataclass(frozen=True, kw_only=True, eq=False)
class Spent:
    """What a ledger says that a run has spent.

    Attributes:
        charges: of rounds of training.
        beside: the side releases that were charged, each as often as it was.
        event: everything together.
    """

    charges: int
    beside: tuple[SideRelease, ...]
    event: Event

    def with_due(self, planned: Sequence[SideRelease]) -> tuple[SideRelease, ...]:
        """Return the side releases that were charged, and those planned ones that will be."""
        return (*self.beside, *(one for one in planned if one not in self.beside))


def spent_of(ledger: Ledger, run: str, releases: Sequence[SideRelease]) -> Spent:
    """Return what a run has spent: its ledger has nothing but its rounds and its side releases."""
    charged = [entry.run for entry in ledger.entries]
    beside = tuple(one for one in releases for _ in range(charged.count(one.of_run(run))))
    return Spent(charges=charged.count(run), beside=beside, event=ledger.spent())


def charged_often(times: int) -> str:
    """Return, for a statement, that a release was charged more than once; nothing for one."""
    return f"; charged {times} times, for it was made again" if times > 1 else ""


def charge(ledger: Ledger, run: str, releases: Sequence[SideRelease], *, repeats: bool) -> None:
    """Charge releases; only then may they be made.

    Args:
        ledger: of the run.
        run: its name.
        releases: those that are made next: none of them is written.
        repeats: whether one that is made again is the same release, since its noise is from a seed. Fresh noise is
            charged again, for nothing shows that what was charged and not written was not seen.
    """
    for one in releases:
        name = one.of_run(run)
        times = sum(entry.run == name for entry in ledger.entries)
        if not times or not repeats:
            ledger.charge(run=name, round=BESIDE, attempt=times, event=one.guarantee.event)
