"""Compare events by cost, and find an event that dominates several events."""

from __future__ import annotations

from collections.abc import Iterable

from fedveil.privacy.events import (
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
