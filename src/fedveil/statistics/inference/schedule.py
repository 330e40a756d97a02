"""How the budget is split: three releases, each gradient and curvature, the last one with the spread of the scores.

Shares are of mu^2 = sum of 1 / multiplier^2, and public. The first release finds the neighbourhood, the second one is a
second equation close by, the last one carries what intervals are made of, all at one theta: a curvature taken from an
earlier theta gives widths that are 7 to 11 % short. As all three equations count towards the estimate
(:mod:`fedveil.statistics.inference.newton`), the first two need not be small.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from fedveil.statistics.inference.families import Family
from fedveil.statistics.inference.scores import Shares


@dataclass(frozen=True, kw_only=True)
class Part:
    """One release.

    Attributes:
        share: of mu^2.
        shares: within it.
    """

    share: float
    shares: Shares

    def multiplier(self, total: float) -> float:
        """Return the release's noise multiplier where one release of everything would have ``total``."""
        return total / math.sqrt(self.share)


def _parts(*releases: Shares) -> tuple[Part, ...]:
    """Return releases whose shares are of the whole."""
    found = []
    for one in releases:
        share = one.gradient + one.curvature + one.spread
        within = Shares(
            gradient=one.gradient / share, curvature=one.curvature / share, spread=one.spread / share
        )
        found.append(Part(share=share, shares=within))
    return tuple(found)


_STEADY: Final = _parts(
    Shares(gradient=0.08, curvature=0.05),
    Shares(gradient=0.20, curvature=0.07),
    Shares(gradient=0.37, curvature=0.15, spread=0.08),
)
_EXPONENTIAL: Final = _parts(
    Shares(gradient=0.06, curvature=0.05),
    Shares(gradient=0.14, curvature=0.10),
    Shares(gradient=0.33, curvature=0.24, spread=0.08),
)


def schedule(family: Family) -> tuple[Part, ...]:
    """Return the releases of a family; more for the curvature where it is small beside its noise."""
    return _EXPONENTIAL if family.exponential else _STEADY
