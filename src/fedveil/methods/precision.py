"""Precisions of Gaussian releases: (move / noise)^2 of each, which add up over releases in sequence."""

from __future__ import annotations

import math
from typing import Final

from fedveil.errors import PrivacyError
from fedveil.privacy.events import ComposedEvent, ConcentratedEvent, Event, GaussianEvent

_LARGEST_RATIO: Final = 1e100


def precision(moved: float, noise: float) -> float:
    """Return (moved / noise)^2, which adds up over releases."""
    check_ratio(moved, noise)
    return (moved / noise) ** 2


def check_ratio(moved: float, noise: float) -> None:
    """Return if noise hides enough of a move that the square of their ratio is a number.

    Raises:
        PrivacyError: it does not.
    """
    if math.isfinite(moved) and moved / _LARGEST_RATIO > noise:
        raise PrivacyError(
            f"noise of standard deviation {noise:g} hides nothing of what moves by {moved:g}: take a noise multiplier "
            "that guarantees something, or 0 for no noise"
        )


def released_event(parts: float, votes: float) -> Event:
    """Return the release of parts and noisy counts of votes, each with its precision 1/z^2; nothing at 0 and 0.

    Noise on counts has whole steps, so that only its Renyi divergences are known to be a Gaussian's.
    """
    if parts + votes == 0:
        return ComposedEvent(events=())
    multiplier = 1 / math.sqrt(parts + votes)
    if votes:
        return ConcentratedEvent(noise_multiplier=multiplier)
    return GaussianEvent(noise_multiplier=multiplier)
