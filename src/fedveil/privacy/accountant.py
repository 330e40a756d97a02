"""The interface of accountants, what they refuse, and the closed form for Gaussian releases without sampling."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from functools import lru_cache
from typing import Final

from scipy.optimize import brentq
from scipy.special import log_ndtr

from fedveil.errors import PrivacyError
from fedveil.privacy.events import Adjacency, Event, atoms, split_distance, split_grid_loss


class Accountant(ABC):
    """Upper bounds on what events cost; a frozen value, so that an answer can be kept.

    Attributes:
        adjacency: the neighbours that the bounds compare.
    """

    adjacency: Adjacency

    @property
    @abstractmethod
    def name(self) -> str:
        """Name under which reports show the figure."""

    def supports(self, event: Event) -> bool:
        """Whether the accountant has a valid bound for the event under its adjacency."""
        return all(self._supported(release) for release in atoms(split_grid_loss(event)[0]))

    def epsilon(self, event: Event, delta: float) -> float:
        """Return the smallest epsilon that this accountant can show for a delta (infinite without a guarantee).

        Raises:
            PrivacyError: delta is not in (0, 1), or next to 0; a release without a bound; a limit of the accountant.
        """
        _check_delta(delta)
        event, loss = split_grid_loss(event)
        if loss:
            left = delta * math.exp(-loss)
            return self.epsilon(event, left) + loss if left >= _LEAST_DELTA else math.inf
        event, distance = split_distance(event)
        return (
            self._apart(event, delta, distance) if distance else self._epsilon(self._released(event), delta)
        )

    def delta(self, event: Event, epsilon: float) -> float:
        """Return the smallest delta that this accountant can show for an epsilon (1 without a guarantee).

        Raises:
            PrivacyError: a negative epsilon, or a release without a bound.
        """
        if not epsilon >= 0:
            raise PrivacyError(f"epsilon = {epsilon}: must not be negative")
        event, loss = split_grid_loss(event)
        if loss:
            return min(1.0, math.exp(loss) * self.delta(event, epsilon - loss)) if epsilon >= loss else 1.0
        event, distance = split_distance(event)
        shown = self._delta(self._released(event), epsilon)
        return min(1.0, shown + _seen_apart(epsilon, distance)) if distance else shown

    @abstractmethod
    def _supported(self, release: Event) -> bool:
        """Whether there is a bound for one kind of release."""

    @abstractmethod
    def _epsilon(self, releases: Counter[Event], delta: float) -> float:
        """Return the epsilon of supported releases, each so many times."""

    @abstractmethod
    def _delta(self, releases: Counter[Event], epsilon: float) -> float:
        """Return the delta of supported releases, each so many times."""

    def _released(self, event: Event) -> Counter[Event]:
        """Return the releases of a supported event; refuse an unsupported one, naming the release."""
        counts = atoms(event)
        for release in counts:
            if not self.supports(release):
                raise PrivacyError(
                    f"accountant {self.name!r} has no bound for {type(release).__name__} under "
                    f"{self.adjacency.value} ({release}); choose an accountant that supports it"
                )
        return counts

    def _apart(self, event: Event, delta: float, distance: float) -> float:
        """Return the epsilon of an event that is seen at a statistical distance d (:class:`NearbyEvent`).

        The least epsilon of the event at delta - (1 + e^epsilon) d: its right side grows with epsilon, so that the
        steps from 0 on rise to it. Infinite where there is none; what is returned was checked.

        Raises:
            PrivacyError: the accountant has no number for the event.
        """
        epsilon = 0.0
        for step in range(_MOST_STEPS):
            left = delta - _seen_apart(epsilon, distance)
            if left < _LEAST_DELTA:
                return math.inf
            try:
                found = self.epsilon(event, left)
            except PrivacyError:  # next to nothing is left of delta
                if step == 0:
                    raise
                return math.inf
            if found <= epsilon:
                return epsilon
            epsilon = found * (1 + _STEP)
        return math.inf


_LEAST_DELTA: Final = 1e-300
_LEAST_STRENGTH: Final = 1e-6
"""Of Gaussian releases: weaker ones are counted as one of this, for below it rounding is all that is left of delta."""
_MOST_STEPS: Final = 100
_STEP: Final = 1e-10
"""Epsilon is rounded up by this share of it where it is found in steps."""
_LARGEST_POWER: Final = 700.0
"""e to the power of it is a number of float64."""
_LARGEST_STRENGTH: Final = 1e8
"""Of stronger ones delta is rounded away: they are counted by the tail of their loss, a millionth of epsilon more."""


def _check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise PrivacyError(f"delta = {delta}: must be above 0 and below 1 (well below 1 / number of users)")
    if delta < _LEAST_DELTA:
        raise PrivacyError(
            f"delta = {delta}: must be at least {_LEAST_DELTA:g}, for double precision to count with it"
        )


def is_large_delta(delta: float, units: int) -> bool:
    """Return whether delta is at least 1 / units: publishing one unit's data, chosen at random, has such a delta.

    >>> is_large_delta(1e-5, 99_999), is_large_delta(1e-5, 100_000)
    (False, True)
    """
    return delta >= 1 / units


def explain_large_delta(delta: float, units: int) -> str:
    """Return why a delta of 1 / units or more is refused, and which would do."""
    return (
        f"delta = {delta:g} is not below 1 / n_users = 1 / {units}: publishing the data of one user, chosen at random, "
        f"has such a delta. Give a delta well below {1 / units:.3g}"
    )


@lru_cache(maxsize=256)  # a run asks for the same before a round, after it, for each party and at its end
def epsilon_on_grid(accountant: Accountant, event: Event, delta: float, loss: float) -> float:
    """Return the epsilon of an event whose noise lies on a grid.

    Args:
        accountant: what counts the event as if its noise were continuous.
        event: everything that was released.
        delta: of the statement.
        loss: the most by which the grid changes a log-likelihood ratio, of all releases together: what is
            (epsilon, delta) with continuous noise is (epsilon + loss, e^loss delta) on the grid.
    """
    return accountant.epsilon(event, delta * math.exp(-loss)) + loss


def _seen_apart(epsilon: float, distance: float) -> float:
    """Return (1 + e^epsilon) d; infinite where float64 does not hold the power."""
    return (1 + math.exp(epsilon)) * distance if epsilon <= _LARGEST_POWER else math.inf


def full_sensitivity(adjacency: Adjacency) -> float:
    """Sensitivity of a full sum in clip units: 1, or 2 when a contribution is replaced by another one."""
    return 1.0 if adjacency is Adjacency.ADD_OR_REMOVE_ONE else 2.0


def gaussian_delta(mu: float, epsilon: float) -> float:
    """Return the exact delta of Gaussian releases of total strength ``mu``.

    mu^2 = sum_t (sensitivity_t / std_t)^2, and
    delta = Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu)   (Balle and Wang 2018, Theorem 8; the
    composition is Dong, Roth and Su 2022, Corollary 3.3). ``mu`` = 0 means nothing was released.
    """
    if mu == 0:
        return 0.0
    mu = max(mu, _LEAST_STRENGTH)
    upper = float(log_ndtr(mu / 2 - epsilon / mu))
    lower = epsilon + float(log_ndtr(-mu / 2 - epsilon / mu))
    return max(0.0, -math.exp(upper) * math.expm1(min(0.0, lower - upper)))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return the smallest epsilon with :func:`gaussian_delta` at most ``delta``, rounded up by 1e-12 of it.

    >>> round(gaussian_epsilon(200**0.5 / 5, 1e-5), 4)
    15.4562
    """
    _check_delta(delta)
    if gaussian_delta(mu, 0.0) <= delta:
        return 0.0
    mu = max(mu, _LEAST_STRENGTH)
    highest = mu * mu / 2 + mu * (math.sqrt(2 * math.log(1 / delta)) + 1)
    if mu > _LARGEST_STRENGTH:  # the loss is beyond that with a probability of at most delta
        return highest
    root = float(brentq(lambda e: gaussian_delta(mu, e) - delta, 0.0, highest, xtol=1e-14, rtol=1e-14))
    return root * (1 + 1e-12) + 1e-13
