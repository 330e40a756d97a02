"""Releases of a run that are not training rounds; they share its budget and its ledger.

    whole run = training of the charged rounds + every side release,    mu^2 = sum of all mu^2

Shares are shares of mu^2 of the one Gaussian release that costs the whole budget. The noise of training is found
last, so that training and side releases together cost the declared epsilon. The releases are fixed before the run
begins, so their cost depends on no released number.
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
"""Round number of a side release in the ledger."""
_NAMES: Final = ("eval/1", "eval/2", "prep/1", "prep/2")
"""Names of all possible side releases of a run; their order fixes the numbers that repeatable noise derives from."""


def as_run_release(release: Release, rounds: int, *, name: str, purpose: str, of_model: bool) -> Release:
    """Return a release as a side release of a run with ``rounds`` rounds.

    Its number is unique within the run, so that repeatable noise differs from that of rounds and other releases.
    """
    # Rounds have the numbers 1 to T.
    number = rounds + 1 + _NAMES.index(name)
    return replace(release, number=number, name=name, purpose=purpose, of_model=of_model)


def check_composable(releases: Sequence[Release], rounds: Guarantee) -> None:
    """Check that side releases and rounds protect the same unit under the same adjacency.

    Raises:
        CompositionError: they do not, so that one ledger cannot hold both.
    """
    for release in releases:
        own = release.guarantee
        if (own.unit, own.adjacency) != (rounds.unit, rounds.adjacency):
            raise CompositionError(
                f"{release.name}: protects one {own.unit} under {own.adjacency.value}, and the method of training one "
                f"{rounds.unit} under {rounds.adjacency.value}: no epsilon covers both; take a method of users, such "
                "as uldp-avg"
            )


def document_multiplier(privacy: PrivacySection, adjacency: Adjacency = Adjacency.ADD_OR_REMOVE_ONE) -> float:
    """Return the noise multiplier of the one Gaussian release that spends a document's share of epsilon."""
    return shared_multiplier(privacy.share, _declared(privacy, adjacency))


def refuse_shared(privacy: PrivacySection, of_round: Event) -> None:
    """Refuse to share one epsilon between documents if the rounds are not Gaussian releases.

    Gaussian releases with mu_i^2 = share_i mu^2 compose to one release with mu^2. For two documents of sampled
    rounds this bound fails. Each of them may spend at most epsilon when composed with one Gaussian release, but
    each uses up delta.

    Raises:
        CompositionError: the rounds are not Gaussian releases.
    """
    if privacy.share != 1 and not isinstance(of_round, GaussianEvent | NoGuarantee):
        raise CompositionError(
            "privacy.share: only Gaussian releases can share one epsilon; rounds of sampled users, of another noise, "
            "or of groups are no Gaussian releases; sample nobody, or give every document an epsilon of its own: "
            "they add up"
        )


_SPARED: Final = 1 + 5e-5
"""Every document reserves this many times the share of the others.

Shares that sum to 1 then compose to epsilon at most, although accountants round the epsilon of several releases up by
more than that of one.
"""


def other_documents(
    privacy: PrivacySection, adjacency: Adjacency = Adjacency.ADD_OR_REMOVE_ONE
) -> tuple[Event, ...]:
    """Return the releases that other documents may make about the same users: one Gaussian, or none."""
    if privacy.share == 1:
        return ()
    others = _SPARED * (1 - privacy.share)
    return (GaussianEvent(noise_multiplier=shared_multiplier(others, _declared(privacy, adjacency))),)


def _declared(privacy: PrivacySection, adjacency: Adjacency) -> float:
    """Return the noise multiplier of the one Gaussian release that spends the declared epsilon."""
    assert privacy.epsilon is not None, "documents ask for it"
    accountant = make_accountant(privacy.accountant, adjacency)
    return budget_multiplier(Budget(epsilon=privacy.epsilon, delta=privacy.delta, accountant=accountant))


def budget_multiplier(budget: Budget) -> float:
    """Return the noise multiplier of the one Gaussian release that spends a budget."""
    return calibrate_noise(lambda z: GaussianEvent(noise_multiplier=z), budget)


def shared_multiplier(share: float, multiplier: float) -> float:
    """Return the noise multiplier of a release with a share of mu^2 = whole^-2."""
    return multiplier / math.sqrt(share)


def compose_with_rounds(rounds: Event | None, side_releases: Iterable[Release], role: Role) -> Event:
    """Return the event that a role observes: rounds and side releases.

    Args:
        rounds: the event of all rounds; None for none.
        side_releases: side releases, repeated as often as they were charged.
        role: the observing party.
    """
    events = (*(() if rounds is None else (rounds,)), *(release.event_for(role) for release in side_releases))
    return events[0] if len(events) == 1 else ComposedEvent(events=events)


@dataclass(frozen=True, kw_only=True, eq=False)
class SpentBudget:
    """The spent budget of a run, read from its ledger.

    Attributes:
        charges: number of charges of rounds.
        side_releases: the charged side releases, repeated as often as they were charged.
        event: the composed event of all charges.
    """

    charges: int
    side_releases: tuple[Release, ...]
    event: Event


def read_spent_budget(ledger: Ledger, run: str, releases: Sequence[Release]) -> SpentBudget:
    """Return the spent budget of a run, whose ledger holds its rounds and side releases only."""
    charged = [entry.run for entry in ledger.entries]
    side_releases = tuple(release for release in releases for _ in range(charged.count(release.of_run(run))))
    return SpentBudget(charges=charged.count(run), side_releases=side_releases, event=ledger.spent_event())
