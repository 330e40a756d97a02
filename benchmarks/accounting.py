"""Epsilon against published figures: the tables of ULDP-FL by RDP, and its Figure 2 in three ways.

The peer of a row is the figure of the literature (or of the specification); ``ours`` is what fedveil computes. For the
tables the target is the absolute difference, for Figure 2 the relative one. No times are measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks.harness import Row
from fedveil.privacy.accounting import make_accountant
from fedveil.privacy.events import Event, GaussianEvent, PoissonSampledEvent, SelfComposedEvent
from fedveil.privacy.group import lemma6, published_group_epsilon, worst_split

_SIGMA, _DELTA = 5.0, 1e-5
_TABLE_ERROR, _FIGURE_ERROR = 1e-4, 0.01

_FULL = {
    1: 0.794522,
    2: 1.158151,
    3: 1.445622,
    10: 2.813653,
    50: 7.077392,
    100: 10.725510,
    200: 16.512876,
}
_SAMPLED = {
    100: {0.1: 0.834863, 0.3: 2.759123, 0.5: 4.862241, 0.7: 7.110011, 1.0: 10.725510},
    200: {0.1: 1.203454, 0.3: 4.039943, 0.5: 7.230995, 1.0: 16.512876},
}
_FIGURE_2_SILOS = ((0.01, 100_000),)
_FIGURE_2_PUBLISHED = {1: 2.849, 2: 7.991, 4: 24.54, 8: 98.79, 16: 450.7, 32: 2151.98, 64: 11416.54}
_FIGURE_2_VALID = {16: 545.6, 32: 3267.0, 64: 20107.0}
_FIGURE_2_MIXTURE = {1: 2.69, 8: 34.2, 32: 295.8}


def rows(quick: bool) -> Iterator[Row]:
    """Compare every figure; ``quick`` leaves out the mixtures of large groups."""
    yield from _tables()
    yield from _figure_2(mixtures=8 if quick else 64)


def smallest() -> Iterator[Row]:
    """Compare one figure of the tables, and those of single records."""
    yield next(_tables())
    yield from _figure_2(largest=1)


def _tables() -> Iterator[Row]:
    for rounds, figure in _FULL.items():
        yield _absolute(f"RDP epsilon, sigma 5, everyone, T={rounds}", _rdp(rounds, 1.0), figure)
    for rounds, by_rate in _SAMPLED.items():
        for rate, figure in by_rate.items():
            yield _absolute(f"RDP epsilon, sigma 5, q={rate:g}, T={rounds}", _rdp(rounds, rate), figure)


def _figure_2(largest: int = 64, mixtures: int = 64) -> Iterator[Row]:
    """Compare the figures of groups up to a size, those of mixtures up to another one."""
    lemmas: tuple[tuple[str, Callable[..., float], dict[int, float]], ...] = (
        ("as published (no guarantee from k=16 on)", published_group_epsilon, _FIGURE_2_PUBLISHED),
        ("Lemma 6, valid orders", lemma6, _FIGURE_2_VALID),
    )
    for way, bound, figures in lemmas:
        for size, figure in figures.items():
            if size > largest:
                continue
            ours = bound(group_size=size, noise_multiplier=_SIGMA, silos=_FIGURE_2_SILOS, delta=_DELTA)
            yield _relative(f"Figure 2, k={size}, {way}", ours, figure)
    for size, figure in _FIGURE_2_MIXTURE.items():
        if size > min(largest, mixtures):
            continue
        event, _ = worst_split(group_size=size, noise_multiplier=_SIGMA, silos=_FIGURE_2_SILOS)
        ours = make_accountant("pld").epsilon(event, _DELTA)
        if size == 1:
            yield _tighter(
                f"Figure 2, k={size}, mixture; peer: a loss grid of 1e-3, so coarser", ours, figure
            )
        else:
            yield _relative(f"Figure 2, k={size}, mixture", ours, figure)


def _rdp(rounds: int, rate: float) -> float:
    release: Event = GaussianEvent(noise_multiplier=_SIGMA)
    if rate < 1:
        release = PoissonSampledEvent(rate=rate, event=release)
    return make_accountant("rdp").epsilon(SelfComposedEvent(event=release, count=rounds), _DELTA)


def _absolute(case: str, ours: float, figure: float) -> Row:
    return _row(f"{case}; target: difference", ours, figure, _TABLE_ERROR, abs(ours - figure) <= _TABLE_ERROR)


def _relative(case: str, ours: float, figure: float) -> Row:
    met = abs(ours / figure - 1) <= _FIGURE_ERROR
    return _row(f"{case}; target: relative difference", ours, figure, _FIGURE_ERROR, met)


def _tighter(case: str, ours: float, figure: float) -> Row:
    return _row(f"{case}; target: ratio of at most 1", ours, figure, 1.0, ours <= figure)


def _row(case: str, ours: float, figure: float, target: float, met: bool) -> Row:
    return Row(case=case, unit="epsilon", ours=ours, peer=figure, ratio=ours / figure, target=target, met=met)
