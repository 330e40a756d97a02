"""The protection stage: what hides a single silo's message from the server.

The protocols themselves are in ``fedveil.protection``; these values say which one a method runs under.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class NoProtection:
    """The server receives every silo's message as it is."""


@dataclass(frozen=True)
class SecureAggregation:
    """The server receives masked messages and learns their sum alone (Bonawitz et al. 2017).

    Masks live in whole numbers modulo a power of two, so it needs messages on a grid, in a range known beforehand, that
    are useful when only their sum is seen: bounded sums that carry their silo's share of the noise.
    """


Protection = NoProtection | SecureAggregation

NO_PROTECTION: Final = NoProtection()
"""The default of a method."""
