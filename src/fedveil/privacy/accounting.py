"""Turn events into epsilon: the accountants by name.

=============  =================================================  ==========================================
accountant     bound                                              used for
=============  =================================================  ==========================================
``pld``        privacy loss distributions, composed by FFT and    every reported epsilon: the tightest
               rounded up; exact if every release is an
               unsampled Gaussian release
``rdp``        Renyi divergences on Opacus' orders, converted by  reproduction of the published tables
               Balle et al. 2020, Theorem 21
``rdp-2017``   the same divergences, converted by Mironov 2017,   reproduction of older tables
               Proposition 3
=============  =================================================  ==========================================

An accountant is a value. It states which events it ``supports`` and refuses the others with a
:class:`~fedveil.errors.PrivacyError`: it never approximates an event by another event. All accountants support
:class:`NoGuarantee`, whose epsilon is infinite.
"""

from __future__ import annotations

from collections.abc import Iterable

from fedveil.errors import PrivacyError
from fedveil.privacy.accountant import Accountant
from fedveil.privacy.events import (
    Adjacency,
    ComposedEvent,
    ConcentratedEvent,
    Event,
    GaussianEvent,
    LaplaceEvent,
    NoGuarantee,
    PoissonSampledEvent,
    at_distance,
    split_distance,
)
from fedveil.privacy.loss_distributions import PldAccountant
from fedveil.privacy.renyi import Conversion, RdpAccountant

ACCOUNTANTS = ("pld", "rdp", "rdp-2017")


def make_accountant(name: str, adjacency: Adjacency = Adjacency.ADD_OR_REMOVE_ONE) -> Accountant:
    """Return the accountant of a name (one of ``ACCOUNTANTS``) with its default settings.

    Raises:
        PrivacyError: an unknown name.
    """
    match name:
        case "pld":
            return PldAccountant(adjacency=adjacency)
        case "rdp" | "rdp-2017":
            return RdpAccountant(adjacency=adjacency, conversion=Conversion(name))
    raise PrivacyError(f"accountant {name!r} is unknown; choose one of {', '.join(ACCOUNTANTS)}")


def epsilon(
    event: Event,
    delta: float,
    accountant: str = "pld",
    adjacency: Adjacency = Adjacency.ADD_OR_REMOVE_ONE,
) -> float:
    """Return the event's epsilon at ``delta`` by the named accountant (infinite without a guarantee).

    >>> from fedveil.privacy.events import GaussianEvent, SelfComposedEvent
    >>> rounds = SelfComposedEvent(event=GaussianEvent(noise_multiplier=5.0), count=200)
    >>> round(epsilon(rounds, 1e-5, "rdp"), 4), round(epsilon(rounds, 1e-5), 4)
    (16.5129, 15.4562)
    """
    return make_accountant(name=accountant, adjacency=adjacency).epsilon(event, delta)


# --- dominating event ---------------------------------------------------------------------------------------
# Compare events by cost, and find an event that dominates several events.


def covers(event: Event, other: Event) -> bool:
    """Return whether ``event`` is known to cost at least as much as ``other``.

    The comparison holds for every delta and in every composition. False means "not known".

    >>> covers(GaussianEvent(noise_multiplier=1.0), GaussianEvent(noise_multiplier=2.0))
    True
    """
    (event, seen_at), (other, other_at) = split_distance(event), split_distance(other)
    if seen_at < other_at and not isinstance(event, NoGuarantee):
        return False
    match event, other:
        case (NoGuarantee(), _) | (_, ComposedEvent(events=())):
            return True
        case (
            (GaussianEvent(noise_multiplier=one), GaussianEvent(noise_multiplier=another))
            | (LaplaceEvent(noise_multiplier=one), LaplaceEvent(noise_multiplier=another))
            | (
                ConcentratedEvent(noise_multiplier=one),
                ConcentratedEvent(noise_multiplier=another) | GaussianEvent(noise_multiplier=another),
            )
        ):
            return one <= another
        # A larger sampling rate costs more. An unsampled event covers its sampled version (next case): sampling
        # never increases the cost.
        case PoissonSampledEvent(), PoissonSampledEvent():
            return event.rate >= other.rate and covers(event.event, other.event)
        case _, PoissonSampledEvent():
            return covers(event, other.event)
    return event == other


def dominating_event(events: Iterable[Event]) -> Event:
    """Return an event that costs at least as much as each of several events.

    The result is one of the events if it covers all others, and otherwise the composition of the events that no other
    covers. If some of these are seen at a distance, the result is the dominating release at the largest distance.
    """
    left: list[Event] = []
    for event in events:
        if not any(covers(kept, event) for kept in left):
            left = [kept for kept in left if not covers(event, kept)] + [event]
    if len(left) == 1:
        return left[0]
    parts = [split_distance(event) for event in left]
    if distance := max((seen_at for _, seen_at in parts), default=0.0):
        return at_distance(dominating_event(release for release, _ in parts), distance)
    return ComposedEvent(events=tuple(left))
