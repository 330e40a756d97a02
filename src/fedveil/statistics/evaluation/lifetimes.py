"""Test metrics of a survival model, from noisy counts of exits by interval, event and bin of the score.

A record is the unit vector of (interval of its exit, event or censored, bin of its score). Horizons t_1 < ... < t_J are
the ends of the intervals. With d_jb events of interval j in bin b, c_jb censored in it and o_jb followed beyond it:

    AUC(t_k) = sum_{j <= k} w_j sum_b d_jb F_kb / sum_{j <= k} w_j d_j,    F_k = share of o_k up to the middle of b,
    C        = sum_j [sum_b d_jb (l_j below b + l_jb / 2) + d_j^2 / 4] / sum_j (d_j l_j + d_j^2 / 2),    l = o + c / 2.

AUC(t) compares people with the event by t with those who are followed beyond t. Somebody censored before t is neither;
w_j = 1 / G(middle of j) makes up for it, with G the Kaplan-Meier curve of censoring of the same table (inverse
probability weights: censoring must not depend on the score). C is Harrell's index: half of those who are censored in an
interval outlive its events. Two events of one interval are a tie, because their order within it tells little of their
hazards. Both figures correct the ties inside a bin as :mod:`.binary` does (tilted ties), C with log-hazards in place of
log-odds.

Variances: by the noise sigma^2 |gradient|^2, by the choice of people the multinomial's. The gradient is that of the
whole figure, with its weights w_j, but without the correction of ties. References: Harrell et al., JAMA 247 (1982); Uno
et al., JASA 102 (2007).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Final, TypeAlias

import numpy as np
from jaxtyping import Float64, Int64, Shaped

from fedveil.data.columns import Column, ColumnTable, State
from fedveil.statistics.blocks import Block, Layout, OneHot, isotonic_regression
from fedveil.statistics.cells import UNREADABLE, Partition
from fedveil.statistics.evaluation.binary import EXTREME, MOST_TIED, STEEPEST, tilted_ties
from fedveil.statistics.evaluation.counts import LEAST_CLASS, equal_mass_edges, first_layout
from fedveil.statistics.evaluation.evaluator import (
    SCORE,
    TARGET,
    TIME,
    Drawing,
    Evaluator,
    Figure,
    Group,
    ScoreBins,
    numbers,
    places,
)
from fedveil.statistics.intervals import Estimate, normal

BINS: Final = 8
"""Default number of score bins; the corrected binning error is about 0.001."""
_EXITS: Final = "exits"
_STEP: Final = 1e-4
_LEAST: Final = 1e-9
Cells: TypeAlias = Float64[np.ndarray, "*n exits B"]
"""Counts by exit and bin of the score; of several tables at once, where there are more axes."""


@dataclass(frozen=True)
class ExitCells(Partition):
    """Interval, event or censored, and bin of the score; a record that cannot be read has a cell of its own.

    Cells run by (censored in 1, event in 1, censored in 2, ..., event in J, beyond), and in each by rising score. An
    event at a horizon has happened by it; somebody censored at a horizon is followed beyond it.

    Attributes:
        horizons: (J,) ascending.
        edges: (B - 1,) ascending.
    """

    horizons: tuple[float, ...]
    edges: tuple[float, ...]
    columns: ClassVar[tuple[str, ...]] = (SCORE, TARGET, TIME)

    @property
    def bins(self) -> int:
        """B."""
        return len(self.edges) + 1

    @property
    def labels(self) -> tuple[str, ...]:
        exits = [f"{kind} by {time:g}" for time in self.horizons for kind in ("censored", "event")]
        cells = [f"{outcome}, bin {index}" for outcome in (*exits, "beyond") for index in range(self.bins)]
        return (*cells, UNREADABLE)

    def assign(self, table: ColumnTable) -> Int64[np.ndarray, "n"]:
        score, event, time = table.numbers(SCORE), table.places(TARGET), table.numbers(TIME)
        horizons = np.array(self.horizons)
        happened = event.values == 1
        by_event = np.searchsorted(horizons, time.values, side="left")
        by_censoring = np.searchsorted(horizons, time.values, side="right")
        interval = np.where(happened, by_event, by_censoring)
        exit_index = np.where(interval < len(horizons), 2 * interval + happened, 2 * len(horizons))
        bin_ = np.searchsorted(np.array(self.edges), score.values, side="left")
        readable = (score.state == State.VALID) & (event.state == State.VALID) & (time.state == State.VALID)
        return np.where(readable, exit_index * self.bins + bin_, self.size - 1).astype(np.int64)

    @property
    def size(self) -> int:
        """Return the number of cells: the exits of every bin, and "unreadable"."""
        return (2 * len(self.horizons) + 1) * self.bins + 1


@dataclass(frozen=True)
class Lifetimes(Evaluator):
    """Survival, by a score that is larger for those who die sooner.

    Attributes:
        horizons: (J,) ascending times, above 0.
        bins: B, of equal mass by the first release.
    """

    measure: ClassVar[str] = "c_index"

    horizons: tuple[float, ...]
    bins: int

    @property
    def compared_figures(self) -> tuple[str, ...]:
        """Return the names of figures of groups: areas by horizon, as a concordance index needs hundreds of events."""
        return tuple(f"auc by {time:g}" for time in self.horizons)

    @property
    def headline(self) -> tuple[str, ...]:
        """Return the names of the main figures of all people: the concordance index, and those of groups."""
        return ("c_index", *self.compared_figures)

    @property
    def first(self) -> Layout:
        return first_layout()

    def score_bins(self, cells: Float64[np.ndarray, " cells"]) -> ScoreBins:
        return ScoreBins(edges=equal_mass_edges(cells, self.bins), cells=cells)

    @property
    def placeholder_bins(self) -> ScoreBins:
        return ScoreBins(edges=(0.0,) * (self.bins - 1), cells=np.zeros(0))

    def columns(
        self, outputs: Float64[np.ndarray, "t k"], targets: Shaped[np.ndarray, "t *target"]
    ) -> dict[str, Column]:
        return {
            SCORE: numbers(outputs[:, 0]),
            TARGET: places(targets[:, 0]),
            TIME: numbers(targets[:, 1].astype(np.float64)),
        }

    def blocks(self, name: str, groups: Partition, placed: ScoreBins) -> tuple[Block, ...]:
        encoder = OneHot(ExitCells(self.horizons, placed.edges))
        return (Block(release=name, part=_EXITS, encoder=encoder, groups=groups),)

    def estimates(self, group: Group, placed: ScoreBins) -> Mapping[str, Estimate | None]:
        counts = self._counts(group)
        return {name: counts.area(index) for index, name in enumerate(self.compared_figures)}

    def figures(self, everybody: Group, placed: ScoreBins) -> Iterator[Figure]:
        counts = self._counts(everybody)
        total = float(counts.cells.sum())
        yield everybody.counted_unit, "", normal(total, counts.variance * counts.cells.size, 0.0)
        index = counts.concordance()
        yield "c_index", "", None if index is None else index.interval
        for name, estimate in self.estimates(everybody, placed).items():
            yield name, "", None if estimate is None else estimate.interval
        for position, time in enumerate(self.horizons):
            yield "events", f"by {time:g}", counts.count(position).interval

    def drawings(self, everybody: Group, placed: ScoreBins) -> tuple[Drawing, ...]:
        """Return the area by horizon, where there are several."""
        estimates = self.estimates(everybody, placed).values()
        points = tuple(
            (time, estimate.value)
            for time, estimate in zip(self.horizons, estimates, strict=True)
            if estimate is not None
        )
        if len(points) < 2:
            return ()
        return (
            Drawing(
                title="Area under the curve by horizon",
                x="horizon",
                y="area under the curve",
                points=points,
                line=((self.horizons[0], 0.5), (self.horizons[-1], 0.5)),
                line_name="chance",
                caption="How often somebody with the event by then has a larger score than somebody without.",
            ),
        )

    def predicted_error(self, variance: Mapping[str, float], people: float) -> float:
        """Return the standard deviation that noise alone gives the index.

        Assumed: half of the people have the event, at times spread evenly, and the score tells nothing of it.
        """
        j, b = len(self.horizons), self.bins
        cells = np.zeros((2 * j + 1, b))
        cells[1::2], cells[-1] = people / (2 * j * b), people / (2 * b)
        counts = ExitCounts(cells=cells, variance=variance[_EXITS], people_per_unit=1.0)
        flat = np.zeros(b)
        return math.sqrt(counts.estimate(lambda moved: _index(moved, flat)).noise)

    def _counts(self, group: Group) -> ExitCounts:
        """Return the counts without the cell of what is unreadable."""
        sums = group.parts[_EXITS]
        return ExitCounts(
            cells=sums.values[:-1].reshape(-1, self.bins),
            variance=sums.variance,
            people_per_unit=group.people_per_unit,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class ExitCounts:
    """Noisy counts of one group of people.

    Attributes:
        cells: (2 J + 1, B): censored and events of every interval, then those beyond; by rising score.
        variance: variance of the noise of every cell.
        people_per_unit: how many counted units one person may be.
    """

    cells: Cells
    variance: float
    people_per_unit: float

    def area(self, place: int) -> Estimate | None:
        """Return AUC(t) at a horizon; None where cases or controls are too few, or scores are tied."""
        cases, controls = _events(self.cells)[: place + 1], _followed(self.cells)[place]
        rows = len(self.cells) - 2 * (place + 1)
        if not (self._enough(cases, len(cases)) and self._enough(controls, rows)) or self._tied:
            return None
        ties = tilted_ties(_controls_and_cases(self.cells, place))
        estimate = self.estimate(lambda cells: _area(_controls_and_cases(cells, place)))
        return replace(estimate, value=estimate.value + ties)

    def concordance(self) -> Estimate | None:
        """Return C; None where events, or people beyond the first interval, are too few, or scores are tied."""
        events, followed = _events(self.cells), _followed(self.cells)
        enough = self._enough(events, len(events)) and self._enough(followed[0], len(self.cells) - 2)
        if not enough or self._tied:
            return None
        rise = _rise(self.cells)
        return self.estimate(lambda cells: _index(cells, rise))

    def count(self, place: int) -> Estimate:
        """Return how many events there are by a horizon, of these people."""
        events = _events(self.cells)[: place + 1]
        return Estimate(value=float(events.sum()), noise=self.variance * events.size, people=0.0)

    def estimate(self, figure: Callable[[Cells], Float64[np.ndarray, "*n"]]) -> Estimate:
        """Return a smooth figure with the variances of its gradient, which is taken by central differences."""
        step = _STEP * max(1.0, float(np.abs(self.cells).mean()))
        moves = step * np.eye(self.cells.size).reshape(-1, *self.cells.shape)
        gradient = (figure(self.cells + moves) - figure(self.cells - moves)) / (2 * step)
        clipped = np.clip(self.cells, 0, None).ravel()
        return Estimate(
            value=float(figure(self.cells)),
            noise=self.variance * float((gradient**2).sum()),
            people=self.people_per_unit * float((clipped * gradient**2).sum()),
        )

    def _enough(self, people: Float64[np.ndarray, "*cells"], rows: int) -> bool:
        """Return whether a count of people, summed over ``rows`` rows of cells, clearly exceeds its noise."""
        sd = math.sqrt(self.variance * rows * self.cells.shape[1])
        return bool(people.sum() >= LEAST_CLASS * sd and people.sum() > 0)

    @property
    def _tied(self) -> bool:
        """Return whether one bin holds more than half of all people."""
        return bool(self.cells.sum(axis=0).max() > MOST_TIED * self.cells.sum())


def _events(cells: Cells) -> Cells:
    """Return d, (*n, J, B), the events of every interval."""
    return cells[..., 1::2, :]


def _followed(cells: Cells) -> Cells:
    """Return o, (*n, J, B), the people who are followed beyond every interval."""
    exits = cells[..., 0:-1:2, :] + cells[..., 1::2, :]
    return np.asarray(cells.sum(axis=-2, keepdims=True) - np.cumsum(exits, axis=-2))


def _controls_and_cases(cells: Cells, horizon: int) -> Float64[np.ndarray, "*n 2 B"]:
    """Return, by bin, the people without and with the event by a horizon, had nobody been censored before.

    All controls have the same weight, 1 / G(t).
    """
    censored, events = cells[..., 0:-1:2, :].sum(axis=-1), _events(cells).sum(axis=-1)
    at_risk = _followed(cells).sum(axis=-1) + censored + events
    hazard = (censored / np.maximum(at_risk - events / 2, _LEAST))[..., : horizon + 1]
    uncensored = np.maximum(np.cumprod(1 - hazard, axis=-1), _LEAST)
    middle = np.concatenate((np.ones_like(uncensored[..., :1]), uncensored[..., :-1]), axis=-1) * (
        1 - hazard / 2
    )
    cases = (_events(cells)[..., : horizon + 1, :] / middle[..., None]).sum(axis=-2)
    return np.stack((_followed(cells)[..., horizon, :] / uncensored[..., -1:], cases), axis=-2)


def _area(pair: Float64[np.ndarray, "*n 2 B"]) -> Float64[np.ndarray, "*n"]:
    """Return how often a case has a larger score than a control, ties counted one half."""
    h0, h1 = pair[..., 0, :], pair[..., 1, :]
    below = np.cumsum(h0, axis=-1) - h0 / 2
    return np.asarray((h1 * below).sum(axis=-1) / (h0.sum(axis=-1) * h1.sum(axis=-1)))


def _index(cells: Cells, rise: Float64[np.ndarray, " B"]) -> Float64[np.ndarray, "*n"]:
    """Return C, given how log-hazards rise across every bin (see :func:`_rise`)."""
    events, censored = _events(cells), cells[..., 0:-1:2, :]
    outlive = _followed(cells) + censored / 2
    below = np.cumsum(outlive, axis=-1) - outlive * (0.5 - rise / 12)
    happened = events.sum(axis=-1)
    concordant = (events * below).sum(axis=-1) + happened**2 / 4
    pairs = happened * (outlive.sum(axis=-1) + happened / 2)
    return np.asarray(concordant.sum(axis=-1) / pairs.sum(axis=-1))


def _rise(cells: Cells) -> Float64[np.ndarray, " B"]:
    """Return how log(-log(1 - share with an event)) rises across every bin, by isotonic regression of the shares."""
    clipped = np.clip(cells, 0, None)
    events = _events(clipped).sum(axis=0)
    everybody = np.maximum(events + clipped[-1], 1.0)
    smooth = isotonic_regression(
        events / everybody, sample_weight=everybody, y_min=EXTREME, y_max=1 - EXTREME
    )
    return np.asarray(np.clip(np.gradient(np.log(-np.log1p(-smooth))), 0, STEEPEST))
