"""What is claimed of a method: its guarantee, against whom, and the public facts it depends on."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

from fedveil.errors import PrivacyError
from fedveil.privacy.claims import Role
from fedveil.privacy.events import (
    Adjacency,
    ComposedEvent,
    Event,
    GaussianEvent,
    NoGuarantee,
    SelfComposedEvent,
    at_distance,
    split_distance,
)
from fedveil.privacy.statement import Disclosure
from fedveil.stage import Published

_MOST_OF_A_ROUND: Final = 4
_LEAST_LEFT: Final = 1e-100


@dataclass(frozen=True, kw_only=True)
class PublicFacts:
    """The public facts of a federation that a guarantee depends on.

    Attributes:
        n_silos: |S|.
        n_users: |U|.
        silo_records: records each silo trains on; only DP-SGD inside the silos depends on it.
        dimension: d, how many numbers a message has; of guarantees, private weighting's alone depends on it.
    """

    n_silos: int
    n_users: int
    silo_records: tuple[int, ...] | None = None
    dimension: int | None = None

    @property
    def length(self) -> int:
        """How many numbers a message has, where that is known."""
        assert self.dimension is not None, "a run knows it before its parties agree on anything"
        return self.dimension


@dataclass(frozen=True, kw_only=True)
class View:
    """One party or coalition, what it sees in words, and the privacy event of one round against it."""

    role: Role
    party: str
    sees: str
    event: Event

    def disclosure(self, epsilon: float | None, beside: Iterable[View] = ()) -> Disclosure:
        """Return the view's line of a statement.

        Args:
            epsilon: of all rounds against it, and of the releases beside them (None, infinite: nothing).
            beside: the views of these releases, of all parties.
        """
        finite = epsilon if epsilon is not None and math.isfinite(epsilon) else None
        more = dict.fromkeys(one.sees for one in beside if one.role == self.role)
        sees = "; ".join((self.sees, *(f"of the releases beside the rounds: {text}" for text in more)))
        return Disclosure(role=self.role, party=self.party, sees=sees, epsilon=finite)


@dataclass(frozen=True, kw_only=True)
class Guarantee:
    """What one round of a method guarantees, and against whom.

    Attributes:
        adjacency: which neighbouring data the guarantee compares.
        event: the privacy event of one round against whoever reads the models: this is what the ledger is charged.
        unit: who is protected as a whole.
        mechanisms: every mechanism in words, with its parameters.
        views: the parties other than readers of the models.
        uncovered: choices that depend on private data and that the event does not account for.
        published: figures in the literature that the derivation does not support.
        grid_loss: what the first round costs in epsilon, per coordinate, because its noise lies on a grid.
        noise_decay: the factor by which the noise, and every event's noise multiplier, falls from round to round.
        strengths: of the rounds, repeated (:class:`~fedveil.methods.channels.Channel`).
    """

    adjacency: Adjacency
    event: Event
    unit: Literal["user", "client"] = "user"
    mechanisms: tuple[str, ...] = ()
    views: tuple[View, ...] = ()
    uncovered: tuple[str, ...] = ()
    published: tuple[Published, ...] = ()
    grid_loss: float = 0.0
    noise_decay: float = 1.0
    strengths: tuple[float, ...] = (1.0,)

    def event_for(self, role: Role) -> Event:
        """Return the event of one round against a party or coalition that has a line.

        Raises:
            KeyError: it has none.
        """
        found = {view.role: view.event for view in self.views} | {Role.READER: self.event}
        return found[role]

    def strength(self, number: int) -> float:
        """Return the precision of a round beside one whose event is stated.

        Raises:
            PrivacyError: by then next to nothing is left of noise that falls.
        """
        repeated, left = self.strengths[(number - 1) % len(self.strengths)], self.noise_decay ** (number - 1)
        if left < _LEAST_LEFT:
            raise PrivacyError(
                f"noise that falls by {self.noise_decay:g} a round is next to none in round {number}: take a larger "
                "noise_decay, or fewer rounds"
            )
        return repeated / left**2

    def event_at_round(self, event: Event, number: int, *, again: bool = False) -> Event:
        """Return an event as it is stated as it is in a round, with that round's noise.

        Args:
            event: of a round of strength 1.
            number: of the round.
            again: whether it was played before, so that one unit may move the same once more: strength 1 at least.
        """
        strength = max(1.0, self.strength(number)) if again else self.strength(number)
        if strength == 1 or isinstance(event, NoGuarantee):
            return event
        release, distance = split_distance(event)
        if strength == 0:
            return at_distance(ComposedEvent(events=()), distance)
        return at_distance(GaussianEvent(noise_multiplier=_gaussian(release) / math.sqrt(strength)), distance)

    def after_rounds(self, event: Event, rounds: int, again: int = 0) -> Event:
        """Return what so many rounds release: Gaussian releases of multipliers z_t are one of (sum z_t^-2)^(-1/2).

        Args:
            event: of a round of strength 1.
            rounds: from the first on.
            again: so many attempts at rounds that were played before, or may have been, are charged besides.
        """
        if (self.noise_decay == 1 and self.strengths == (1.0,)) or isinstance(event, NoGuarantee):
            return SelfComposedEvent(event=event, count=rounds + again)
        precision = math.fsum(self.strength(number) for number in range(1, rounds + 1))
        precision += math.fsum(self._strongest(rounds + extra + 1) for extra in range(again))
        release, distance = split_distance(event)
        whole = GaussianEvent(noise_multiplier=_gaussian(release) / math.sqrt(precision))
        return at_distance(whole, distance * (rounds + again))

    def learned_event(self, role: Role, rounds: int, again: int = 0) -> Event | None:
        """Return what a party learns of so many rounds, with attempts charged besides; None: nothing.

        Parties are sent messages before the first round, such as record counts. Against whom nothing is guaranteed,
        nothing is from then on; readers have no model before it.
        """
        event = self.event_for(role)
        if rounds + again:
            return self.after_rounds(event, rounds, again)
        return event if isinstance(event, NoGuarantee) and role is not Role.READER else None

    def _strongest(self, number: int) -> float:
        """Return the most that a round up to this one may cost when it is played again."""
        period = range(max(1, number + 1 - len(self.strengths)), number + 1)
        return max(1.0, *(self.strength(one) for one in period))

    def grid_loss_after(self, rounds: int, dimension: int) -> float:
        """Return what the grid of the noise may change of a log-likelihood ratio in so many rounds, all coordinates.

        The loss falls with the square of std / grid, which of noise that falls is between 2^29 and 2^30 in every round
        (:func:`~fedveil.privacy.noise.grid_for`, ``Channel.check_fine``): at most 4 times the loss of the first round.
        """
        most = self.grid_loss if self.noise_decay == 1 else _MOST_OF_A_ROUND * self.grid_loss
        return rounds * dimension * most


def _gaussian(event: Event) -> float:
    """Return the multiplier of an event whose rounds differ: methods let Gaussian noise alone do so."""
    assert isinstance(event, GaussianEvent), "Method lets Gaussian noise alone differ from round to round"
    return event.noise_multiplier
