"""Which of two events costs more, and the costliest of several."""

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
    """Return whether an event is known to cost at least what another does, for every delta and in every composition.

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
        case PoissonSampledEvent(), PoissonSampledEvent():
            return event.rate >= other.rate and covers(event.event, other.event)
        case _, PoissonSampledEvent():
            return covers(event, other.event)
    return event == other


def dominating_event(events: Iterable[Event]) -> Event:
    """Return an event that costs at least what each of some does: one of them, or the composition of those left.

    Where none of them does and some are seen at a distance, it is the costliest release at the largest distance.
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
