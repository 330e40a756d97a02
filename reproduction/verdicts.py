"""When a measured value agrees with a published one: rules that are stated before anything is compared.

Every rule has a level of 95 percent. Few runs give wide intervals, and then "inside" or "undecided" says little, which
is why the page prints the number of runs and the half width of the interval beside the verdict.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Final, Literal

from scipy import stats

Agreement = Literal["inside", "outside", "not comparable"]
Order = Literal["holds", "contradicted", "undecided", "not comparable"]
BoundHolds = Literal["holds", "vacuous", "violated"]
_LEVEL: Final = 0.95


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Runs of one cell.

    Attributes:
        n: number of runs.
        mean: of them.
        sd: standard deviation with n - 1; None for one run.
        exact: whether there is no chance in the value, so that one run is all.
    """

    n: int
    mean: float
    sd: float | None
    exact: bool = False


def summary(values: Sequence[float], *, exact: bool = False) -> Summary:
    """Return mean and standard deviation of at least one value."""
    spread = statistics.stdev(values) if len(values) > 1 else None
    return Summary(n=len(values), mean=statistics.fmean(values), sd=spread, exact=exact)


def half_width(ours: Summary, *, runs: int | None) -> float | None:
    """Return t s sqrt(1/n + 1/k): how far the mean of k other runs of the same law lies from ours, in 95 of 100 cases.

    Args:
        ours: n runs with standard deviation s.
        runs: k; None for infinitely many, which gives the interval of the law's own mean.

    Returns:
        the half width; 0 for an exact value, None where no standard deviation is known.
    """
    if ours.exact:
        return 0.0
    if ours.sd is None:
        return None
    quantile = float(stats.t.ppf((1 + _LEVEL) / 2, ours.n - 1))
    return quantile * ours.sd * math.sqrt(1 / ours.n + (0.0 if runs is None else 1 / runs))


def agreement(ours: Summary, published: str, *, runs: int) -> Agreement:
    """Compare with a published mean of ``runs`` runs.

    Inside: the published figure, anywhere within its printed digits, lies in the prediction interval of
    :func:`half_width` around our mean. Without a standard deviation (one run of something with chance in it) nothing
    is compared.

    >>> agreement(Summary(n=1, mean=2.8492, sd=None, exact=True), "2.85", runs=1)
    'inside'
    """
    width = half_width(ours, runs=runs)
    if width is None:
        return "not comparable"
    digits = Decimal(published).as_tuple().exponent
    assert isinstance(digits, int)
    reach = width + 10.0**digits / 2
    return "inside" if abs(ours.mean - float(published)) <= reach * (1 + 1e-9) else "outside"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two cells, run by run.

    Attributes:
        n: pairs.
        difference: mean of the first less the second.
        width: half width of its 95 percent t-interval; 0 for exact values, None for one pair with chance in it.
        order: what follows; not comparable where the two were not measured alike.
    """

    n: int
    difference: float
    width: float | None
    order: Order


def order(
    better: Sequence[float], worse: Sequence[float], *, less: bool = False, exact: bool = False
) -> Comparison:
    """Compare two cells over the same seeds: does the first lie above the second (``less``: below)?

    The differences of equal seeds are averaged, since these share data and allocation; the order holds, or is
    contradicted, where the 95 percent t-interval of their mean excludes zero.
    """
    found = summary([a - b for a, b in zip(better, worse, strict=True)], exact=exact)
    width = half_width(found, runs=None)
    verdict: Order = "undecided"
    if width is not None and abs(found.mean) > width:
        verdict = "holds" if (found.mean < 0) == less else "contradicted"
    return Comparison(n=found.n, difference=found.mean, width=width, order=verdict)


def bound_holds(measured: Summary, bound: float, trivial: float) -> BoundHolds:
    """Say what an upper bound is worth beside what was measured.

    Violated: the measured mean less its 95 percent half width is above the bound. Vacuous: the bound is no less than
    ``trivial``, what is known without it. Otherwise it holds.
    """
    width = half_width(measured, runs=None)
    if measured.mean - (width or 0.0) > bound:
        return "violated"
    return "vacuous" if bound >= trivial else "holds"
