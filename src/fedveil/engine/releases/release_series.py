"""What one or several releases from tables guarantee together: one budget, one ledger, one statement."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from fedveil.engine.experiments.sections import PrivacySection
from fedveil.engine.releases.side_releases import charged_often, of_others
from fedveil.engine.run_folder.folder import RunFolder, finite
from fedveil.methods.claims import Guarantee, PublicFacts
from fedveil.privacy.accountant import Accountant, epsilon_on_grid
from fedveil.privacy.accounting import make_accountant
from fedveil.privacy.calibration import calibrate_noise
from fedveil.privacy.claims import Role
from fedveil.privacy.events import Event, GaussianEvent, atoms, compose
from fedveil.privacy.ledger import Budget, Ledger
from fedveil.privacy.statement import Disclosure, Statement, epsilons_by_accountant

Guaranteed = Sequence[tuple[Guarantee, int]]
"""What every release guarantees, and how many numbers it has."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """Releases of one document in their order, made under one protection by the same silos.

    Attributes:
        privacy: the budget.
        accountant: who bounds epsilon.
        guarantees: of every release; they have the same unit, adjacency and parties.
        lengths: how many numbers every release has.
    """

    privacy: PrivacySection
    accountant: Accountant
    guarantees: tuple[Guarantee, ...]
    lengths: tuple[int, ...]

    @property
    def secure(self) -> bool:
        """Whether the noise cannot be predicted."""
        return self.privacy.insecure_seed is None

    @property
    def loss(self) -> float:
        """What the grid of the noise may change of a log-likelihood ratio, in all releases together."""
        return sum(
            one.grid_loss_after(1, length) for one, length in zip(self.guarantees, self.lengths, strict=True)
        )

    @property
    def event(self) -> Event:
        """Everything that is released."""
        return _all([one.event for one in self.guarantees])

    def against(self, role: Role) -> Event:
        """Return all releases as they are against a party or coalition."""
        return _all([one.against(role) for one in self.guarantees])

    def epsilon_of(self, event: Event) -> float:
        """Return the epsilon of an event of all releases, the grids of their noise included."""
        return epsilon_on_grid(self.accountant, event, self.privacy.delta, self.loss)

    def ledger(self, folder: RunFolder) -> Ledger:
        """Return the ledger of a run folder."""
        first = self.guarantees[0]
        return Ledger(folder / "ledger.jsonl", unit=first.unit, adjacency=first.adjacency)

    def declared_for(self, multiplier: float) -> float:
        """Return what privacy.epsilon must be for the same share of it to pay releases of this multiplier together."""
        whole = GaussianEvent(noise_multiplier=multiplier * math.sqrt(self.privacy.share))
        return self.accountant.epsilon(whole, self.privacy.delta)

    def charged(self, times: Sequence[int]) -> Series:
        """Return the series in which every release happens so many times: what was asked for again is another one."""
        repeated = [
            (one, length)
            for one, length, many in zip(self.guarantees, self.lengths, times, strict=True)
            for _ in range(many)
        ]
        guarantees, lengths = zip(*repeated, strict=True)
        return replace(self, guarantees=guarantees, lengths=lengths)

    def statement(
        self, name: str, times: Sequence[int], public: PublicFacts, notes: tuple[str, ...]
    ) -> Statement:
        """Return what the releases guarantee: the fold's lines, and what was charged.

        Args:
            name: of the run.
            times: how often the ledger was charged with each of them.
            public: how many people and silos there are.
            notes: what else a reader should know.
        """
        first, made = self.guarantees[0], self.charged(times)
        mechanisms = dict.fromkeys(text for one in self.guarantees for text in one.mechanisms)
        seeded = "the noise came from a known seed (privacy.insecure_seed), so anybody can subtract it"
        source = "the operating system's cryptographic generator"
        return Statement(
            unit=first.unit,
            adjacency=first.adjacency,
            epsilon=made.epsilon_of(made.event) if self.secure else None,
            delta=self.privacy.delta,
            accountant=self.accountant.name,
            epsilons=epsilons_by_accountant(made.event, self.privacy.delta, first.adjacency, loss=made.loss),
            event=made.event,
            units=public.n_users,
            mechanisms=(
                *(
                    f"release {name}/{number}: {length} numbers; one person moves their sum over {public.n_silos} "
                    f"silos by at most 1 (l2){charged_often(charged)}"
                    for number, (length, charged) in enumerate(zip(self.lengths, times, strict=True), start=1)
                ),
                *mechanisms,
            ),
            trust=tuple(
                Disclosure(
                    role=view.role,
                    party=view.party,
                    sees=view.sees,
                    epsilon=finite(made.epsilon_of(made.against(view.role))) if self.secure else None,
                )
                for view in first.views
            ),
            randomness=f"noise drawn from {source}"
            if self.secure
            else "noise derived from a seed, for repetition",
            secure_randomness=self.secure,
            uncovered=(
                *dict.fromkeys(text for one in self.guarantees for text in one.uncovered),
                *_UNCOVERED,
            ),
            notes=notes,
            reasons=() if self.secure else (seeded,),
            released="statistics",
        )


def calibrated(privacy: PrivacySection, guaranteed: Callable[[float], Guaranteed]) -> tuple[float, Series]:
    """Return the least noise multiplier whose releases fit the budget, and what they guarantee.

    Args:
        privacy: the budget.
        guaranteed: what all releases guarantee, as a function of the multiplier.

    Raises:
        BudgetError: no multiplier fits.
    """
    assert privacy.epsilon is not None
    accountant = make_accountant(privacy.accountant)

    @lru_cache(maxsize=4)
    def series(multiplier: float) -> Series:
        guarantees, lengths = zip(*guaranteed(multiplier), strict=True)
        return Series(privacy=privacy, accountant=accountant, guarantees=guarantees, lengths=lengths)

    budget = Budget(epsilon=privacy.epsilon, delta=privacy.delta, accountant=accountant)
    others = of_others(privacy)
    found = calibrate_noise(lambda z: _all([series(z).event, *others]), budget, loss=lambda z: series(z).loss)
    return found, series(found)


def _all(events: Sequence[Event]) -> Event:
    found: Counter[Event] = Counter()
    for event in events:
        found.update(atoms(event))
    return compose(found)


_UNCOVERED: Final = (
    "declared bounds, bins, grids and categories, if somebody set them after looking at the records",
    "what else is released from the same records: other releases and runs, --again among them, add to epsilon "
    "(fedveil spent composes their ledgers)",
    "how long the release takes, which whoever waits for it can see: it depends on how many records there are",
)
