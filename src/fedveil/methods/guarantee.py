"""Represent a method's guarantee: one privacy event per party, and the public facts behind it."""

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
    GridEvent,
    NoGuarantee,
    SelfComposedEvent,
    at_distance,
    atoms,
    split_distance,
)
from fedveil.privacy.statement import Party
from fedveil.stage import Published

_MOST_OF_A_ROUND: Final = 4
_LEAST_LEFT: Final = 1e-100
_LOSS_BITS: Final = 32


@dataclass(frozen=True, kw_only=True)
class PublicFacts:
    """Public facts of a federation on which a guarantee depends.

    Attributes:
        n_silos: |S|.
        n_users: |U|.
        silo_records: records on which each silo trains; only DP-SGD inside the silos depends on them.
        dimension: d, the number of coordinates of a message; only the guarantee of private weighting depends on it.
    """

    n_silos: int
    n_users: int
    silo_records: tuple[int, ...] | None = None
    dimension: int | None = None

    @property
    def length(self) -> int:
        """Number of coordinates of a message; must be known."""
        assert self.dimension is not None, "a run knows it before its parties agree on anything"
        return self.dimension


@dataclass(frozen=True, kw_only=True)
class View(Party):
    """Party or coalition with the privacy event of one round's noise against it."""

    event: Event

    def with_releases(self, release_views: Iterable[View]) -> Party:
        """Return the party with what it sees of the rounds and of the side releases.

        Args:
            release_views: views of the side releases, of all parties.
        """
        more = dict.fromkeys(view.sees for view in release_views if view.role == self.role)
        sees = "; ".join((self.sees, *(f"of the releases beside the rounds: {text}" for text in more)))
        return Party(role=self.role, party=self.party, sees=sees)


@dataclass(frozen=True, kw_only=True)
class Guarantee:
    """Guarantee of one round of a method, per party.

    The events of ``event`` and ``views`` are those of continuous noise in a round of strength 1. What rounds release,
    and what ledgers are charged with, are the events of :meth:`event_at_round` and :meth:`after_rounds`: they have the
    noise of each round and the loss of its grid (:class:`~fedveil.privacy.events.GridEvent`).

    Attributes:
        adjacency: the neighbouring data that the guarantee compares.
        event: privacy event of one round's noise against readers of the models.
        unit: the protected unit.
        mechanisms: every mechanism in words, with its parameters.
        views: views of the parties other than readers of the models.
        uncovered: choices that depend on private data and for which the event does not account.
        published: figures in the literature that the derivation does not support.
        grid_loss: loss of the first round, per coordinate, because its noise lies on a grid.
        dimension: d, the number of coordinates of a message; needed for events with a loss of a grid.
        noise_decay: factor by which the noise, and every event's noise multiplier, decays from round to round.
        strengths: strengths of the rounds, repeated (:class:`~fedveil.methods.channels.Channel`).
    """

    adjacency: Adjacency
    event: Event
    unit: Literal["user", "client"] = "user"
    mechanisms: tuple[str, ...] = ()
    views: tuple[View, ...] = ()
    uncovered: tuple[str, ...] = ()
    published: tuple[Published, ...] = ()
    grid_loss: float = 0.0
    dimension: int | None = None
    noise_decay: float = 1.0
    strengths: tuple[float, ...] = (1.0,)

    def event_for(self, role: Role) -> Event:
        """Return the event of one round's noise against a party or coalition of the statement.

        Raises:
            KeyError: the statement has no line for it.
        """
        events = {view.role: view.event for view in self.views} | {Role.READER: self.event}
        return events[role]

    def strength(self, number: int) -> float:
        """Return the precision (1 / z^2) of round ``number`` relative to a round of strength 1.

        strength_t / ``noise_decay``^(2 (t - 1)), because a multiplier scales with the noise.

        Raises:
            PrivacyError: decaying noise is practically zero by then.
        """
        repeated, decay = self.strengths[(number - 1) % len(self.strengths)], self.noise_decay ** (number - 1)
        if decay < _LEAST_LEFT:
            raise PrivacyError(
                f"noise that falls by {self.noise_decay:g} a round is next to none in round {number}: take a larger "
                "noise_decay, or fewer rounds"
            )
        return repeated / decay**2

    def event_at_round(self, event: Event, number: int, *, again: bool = False) -> Event:
        """Return the event of round ``number`` with its noise and the loss of its grid.

        z_t = z / sqrt(strength_t).

        Args:
            event: the event of a round of strength 1.
            number: number of the round, from 1.
            again: whether the round was played before. A unit may then change the same messages once more, so the
                strength is at least 1.
        """
        strength = max(1.0, self.strength(number)) if again else self.strength(number)
        grid = self._grid(event)
        if strength != 1 and not isinstance(event, NoGuarantee):
            release, distance = split_distance(event)
            # The noise of a round of strength 0 costs nothing; its messages keep their distance and their grid's loss.
            noise = (
                (GaussianEvent(noise_multiplier=_gaussian(release) / math.sqrt(strength)),)
                if strength
                else ()
            )
            event = at_distance(ComposedEvent(events=noise), distance)
        return ComposedEvent(events=(event, *grid)) if grid else event

    def after_rounds(self, event: Event, rounds: int, again: int = 0) -> Event:
        """Return the event of ``rounds`` rounds with the noise of each round and the loss of all grids.

        Gaussian releases of multipliers z_t in sequence are one Gaussian release of multiplier (sum_t z_t^-2)^(-1/2).

        Args:
            event: the event of a round of strength 1.
            rounds: number of rounds, from the first.
            again: number of repeated attempts that are charged in addition: rounds that were played before, or may
                have been.
        """
        if (self.noise_decay == 1 and self.strengths == (1.0,)) or isinstance(event, NoGuarantee):
            return SelfComposedEvent(event=self.event_at_round(event, 1), count=rounds + again)
        precision = math.fsum(self.strength(number) for number in range(1, rounds + 1))
        # Which rounds were repeated is unknown here, so each repetition is charged as the strongest round so far.
        precision += math.fsum(self._strongest(rounds + extra + 1) for extra in range(again))
        release, distance = split_distance(event)
        whole = GaussianEvent(noise_multiplier=_gaussian(release) / math.sqrt(precision))
        grid = (SelfComposedEvent(event=grid_event, count=rounds + again) for grid_event in self._grid(event))
        return ComposedEvent(events=(at_distance(whole, distance * (rounds + again)), *grid))

    def learned_event(self, role: Role, rounds: int, again: int = 0) -> Event | None:
        """Return the event of everything that a party learns in so many rounds and attempts; None for nothing.

        Some parties receive messages before the first round, such as record counts. A party without a guarantee
        therefore has none from then on. Readers have no model before the first round.
        """
        event = self.event_for(role)
        if rounds + again:
            return self.after_rounds(event, rounds, again)
        return event if isinstance(event, NoGuarantee) and role is not Role.READER else None

    def _strongest(self, number: int) -> float:
        """Return the largest strength of a repeated round, for rounds up to ``number``; at least 1."""
        # Strengths repeat with their period and decay only raises them, so the last period has the largest.
        period = range(max(1, number + 1 - len(self.strengths)), number + 1)
        return max(1.0, *(self.strength(round_number) for round_number in period))

    def _grid(self, event: Event) -> tuple[GridEvent, ...]:
        """Return the loss of a round's grid over all coordinates; empty if the event releases or guarantees nothing.

        The loss falls with the square of std / grid. With decaying noise this ratio is between 2^29 and 2^30 in every
        round (:func:`~fedveil.privacy.noise.grid_for`, ``Channel.check_fine``). So the loss of a round is at most 4
        times that of the first round.

        Raises:
            PrivacyError: the number of coordinates is unknown.
        """
        if self.grid_loss == 0 or isinstance(event, NoGuarantee) or not atoms(event):
            return ()
        if self.dimension is None:
            raise PrivacyError(
                "the loss of the noise's grid is per coordinate: derive the guarantee with PublicFacts(dimension=...)"
            )
        most = self.grid_loss if self.noise_decay == 1 else _MOST_OF_A_ROUND * self.grid_loss
        return (GridEvent(loss=_round_up(self.dimension * most)),)


def _round_up(loss: float) -> float:
    """Return a loss with 32 bits, so that machines whose exponentials differ in the last bit state equal events."""
    mantissa, exponent = math.frexp(loss)
    return math.ldexp(math.ceil(math.ldexp(mantissa, _LOSS_BITS)), exponent - _LOSS_BITS)


def _gaussian(event: Event) -> float:
    """Return the multiplier of a Gaussian event; methods let only Gaussian noise differ between rounds."""
    assert isinstance(event, GaussianEvent), "Method lets Gaussian noise alone differ from round to round"
    return event.noise_multiplier
