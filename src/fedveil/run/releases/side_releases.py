"""Releases of a run that are no round of training: they spend from the same budget and stand in the same ledger.

    whole run = training of the charged rounds + every side release,    mu^2 = sum of all mu^2

Shares are shares of mu^2 of the one Gaussian release that costs the whole budget; the noise of training is found last,
so that all of them together cost what was declared. The releases are fixed before the run begins: what they cost
depends on nothing that is released.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from fedveil.errors import CompositionError
from fedveil.methods.guarantee import Guarantee
from fedveil.privacy.accounting import make_accountant
from fedveil.privacy.calibration import calibrate_noise
from fedveil.privacy.claims import Role
from fedveil.privacy.events import Adjacency, ComposedEvent, Event, GaussianEvent, NoGuarantee
from fedveil.privacy.ledger import Budget, Ledger
from fedveil.run.config.experiment import PrivacySection
from fedveil.run.releases.release import Release

BESIDE: int = 0
"""The number that the ledger has in place of a round's."""
_NAMES: Final = ("eval/1", "eval/2", "prep/1", "prep/2")
"""Of all releases of a run that are no round."""


def as_run_release(release: Release, rounds: int, *, name: str, purpose: str, of_model: bool) -> Release:
    """Return a release as one of a run of so many rounds; repeatable noise is its own, by its name."""
    number = rounds + 1 + _NAMES.index(name)
    return replace(release, number=number, name=name, purpose=purpose, of_model=of_model)


def check_composable(releases: Sequence[Release], rounds: Guarantee) -> None:
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


def document_multiplier(privacy: PrivacySection, adjacency: Adjacency = Adjacency.ADD_OR_REMOVE_ONE) -> float:
    """Return the noise multiplier of the one release that spends what a document may: its share of epsilon."""
    return shared_multiplier(privacy.share, _declared(privacy, adjacency))


def refuse_shared(privacy: PrivacySection, of_round: Event) -> None:
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


def other_documents(
    privacy: PrivacySection, adjacency: Adjacency = Adjacency.ADD_OR_REMOVE_ONE
) -> tuple[Event, ...]:
    """Return what other documents may release of the same people: one Gaussian release, or nothing."""
    if privacy.share == 1:
        return ()
    return (
        GaussianEvent(noise_multiplier=shared_multiplier(1 - privacy.share, _declared(privacy, adjacency))),
    )


def _declared(privacy: PrivacySection, adjacency: Adjacency) -> float:
    assert privacy.epsilon is not None, "documents ask for it"
    accountant = make_accountant(privacy.accountant, adjacency)
    return budget_multiplier(Budget(epsilon=privacy.epsilon, delta=privacy.delta, accountant=accountant))


def budget_multiplier(budget: Budget) -> float:
    """Return the noise multiplier of the one Gaussian release that spends a budget."""
    return calibrate_noise(lambda z: GaussianEvent(noise_multiplier=z), budget)


def shared_multiplier(share: float, whole: float) -> float:
    """Return the noise multiplier of a release with a share of mu^2 = whole^-2."""
    return whole / math.sqrt(share)


def compose_with_rounds(
    rounds: Event | None, grid_loss: float, beside: Iterable[Release], role: Role
) -> tuple[Event, float]:
    """Return what a party learns of rounds and side releases, as one event, and the loss of all grids."""
    releases = tuple(beside)
    events = (*(() if rounds is None else (rounds,)), *(one.event_for(role) for one in releases))
    loss = grid_loss + math.fsum(one.grid_loss for one in releases)
    return (events[0] if len(events) == 1 else ComposedEvent(events=events)), loss


@dataclass(frozen=True, kw_only=True, eq=False)
class SpentBudget:
    """What a ledger says that a run has spent.

    Attributes:
        charges: of rounds of training.
        beside: the side releases that were charged, each as often as it was.
        event: everything together.
    """

    charges: int
    beside: tuple[Release, ...]
    event: Event


def read_spent_budget(ledger: Ledger, run: str, releases: Sequence[Release]) -> SpentBudget:
    """Return what a run has spent: its ledger has nothing but its rounds and its side releases."""
    charged = [entry.run for entry in ledger.entries]
    beside = tuple(one for one in releases for _ in range(charged.count(one.of_run(run))))
    return SpentBudget(charges=charged.count(run), beside=beside, event=ledger.spent_event())


def charge_releases(ledger: Ledger, run: str, releases: Sequence[Release], *, repeats: bool) -> None:
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
