"""Compute precisions of Gaussian releases: (sensitivity / noise)^2, which add up in sequence."""

from __future__ import annotations

import math
from typing import Final

from fedveil.errors import PrivacyError
from fedveil.privacy.events import ComposedEvent, ConcentratedEvent, Event, GaussianEvent

_LARGEST_RATIO: Final = 1e100


def precision(moved: float, noise: float) -> float:
    """Return (moved / noise)^2 = 1 / z^2, which adds up over releases."""
    check_ratio(moved, noise)
    return (moved / noise) ** 2


def check_ratio(moved: float, noise: float) -> None:
    """Check that the squared ratio of a sensitivity to its noise is a finite number.

    Raises:
        PrivacyError: the noise is too small for the sensitivity.
    """
    if math.isfinite(moved) and moved / _LARGEST_RATIO > noise:
        raise PrivacyError(
            f"noise of standard deviation {noise:g} hides nothing of what moves by {moved:g}: take a noise multiplier "
            "that guarantees something, or 0 for no noise"
        )


def released_event(parts: float, votes: float) -> Event:
    """Return the event of encrypted or clear parts and noisy votes, from their precisions 1/z^2.

    z = (sum_i z_i^-2)^(-1/2); no event at 0 and 0. Noise on vote counts has whole steps, so only its Renyi
    divergences are known to be at most a Gaussian's. With votes the event is therefore a concentrated (zCDP) one.
    """
    if parts + votes == 0:
        return ComposedEvent(events=())
    multiplier = 1 / math.sqrt(parts + votes)
    if votes:
        return ConcentratedEvent(noise_multiplier=multiplier)
    return GaussianEvent(noise_multiplier=multiplier)
