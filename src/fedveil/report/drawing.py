"""Plots as data: axes, series and texts; and the formats of numbers.

:mod:`fedveil.report.svg` draws them in pages, :mod:`fedveil.report.figure_files` writes them as files. The colours are
those of Okabe and Ito, which are distinguishable for every colour vision.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal
from typing import Final, Literal

from fedveil.privacy import statement
from fedveil.privacy.statement import round_exactly

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F")
DASHES = ("solid", "dash", "dot", "dashdot")

Mark = Literal["line", "line and points", "points", "bars", "ribbon", "intervals"]
"""Mark of a series; "intervals" are points with intervals along the horizontal axis."""


@dataclass(frozen=True, kw_only=True)
class Axis:
    """Axis of a plot.

    Attributes:
        title: name of the quantity; empty for none.
        log: whether the axis is logarithmic; values that are not positive are left out.
        bounds: fixed ends; None: the ends follow from the data.
        zero: whether the axis includes 0.
        percent: whether ticks are percentages.
        categories: names of the categories 0, 1, ...; empty for numbers.
        rule: value at which a dotted line marks "no effect"; None for none.
    """

    title: str
    log: bool = False
    bounds: tuple[float, float] | None = None
    zero: bool = False
    percent: bool = False
    categories: tuple[str, ...] = ()
    rule: float | None = None


@dataclass(frozen=True, kw_only=True)
class Series:
    """Data that are drawn with one mark and one colour; a value that is not finite leaves a gap.

    Attributes:
        name: entry of the legend; empty for none.
        mark: how the data are drawn.
        colour: index into the palette.
        x: horizontal positions; a category is its number on the axis.
        y: vertical positions.
        low: lower ends of a ribbon, or of intervals; empty without them.
        high: upper ends.
        dash: one of `DASHES`.
        opacity: of a ribbon.
        labels: a text per point, shown under the pointer; empty for none.
    """

    name: str
    mark: Mark = "line"
    colour: int = 0
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    dash: str = "solid"
    opacity: float = 1.0
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Plot:
    """A figure as data, with its texts.

    Attributes:
        title: title above the plot.
        alt: text alternative for readers who cannot see the plot.
        caption: text below the plot.
        x: horizontal axis.
        y: vertical axis.
        series: what is drawn, the last one on top.
    """

    title: str
    alt: str
    caption: str
    x: Axis
    y: Axis
    series: tuple[Series, ...]


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A mean over seeds with its sample standard deviation (None for one seed), point by point.

    `colour` is an index into the palette: a variant keeps its colour in every plot of a page.
    """

    label: str
    colour: int
    x: Sequence[float]
    mean: Sequence[float]
    std: Sequence[float] | None = None


def show(value: float) -> str:
    """Format a number with four significant digits; infinity and NaN are named."""
    if math.isnan(value):
        return "not a number"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if value == int(value) and abs(value) < 1e15:  # float64 holds 15 significant decimal digits
        return f"{int(value):,}"
    return _short(f"{value:.4g}")


def show_epsilon(epsilon: float | None) -> str:
    """Format an epsilon with two decimals (three significant digits below 0.1), rounded up.

    None is infinite. Epsilon is never rounded down, because the text would then claim more privacy than holds.
    """
    if epsilon is None:
        return show(math.inf)
    if not math.isfinite(epsilon) or epsilon == 0:
        return show(epsilon)
    # Exact decimal arithmetic: float formatting rounds to nearest, and could round an epsilon down.
    decimals = 2 if epsilon >= 0.1 else 2 - Decimal(epsilon).adjusted()
    return f"{round_exactly(epsilon, decimals, ROUND_CEILING):,f}"


def show_delta(delta: float) -> str:
    """Format a delta with six significant digits, rounded up, never down."""
    return _short(statement.show_delta(delta))


def _short(number: str) -> str:
    """Remove the leading zeros of an exponent."""
    return re.sub(r"e([+-])0*", r"e\1", number) if "e" in number else number


_WRITTEN: Final = {"auc": "AUC", "c_index": "C-index", "r2": "R²", "mae": "MAE", "rmse": "RMSE", "mcc": "MCC"}


def words(name: str) -> str:
    """Return the name of a metric as it is usually written, with blanks instead of underscores.

    >>> words("auc[fever]"), words("balanced_accuracy")
    ('AUC[fever]', 'balanced accuracy')
    """
    metric, bracket, rest = name.partition("[")
    return f"{_WRITTEN.get(metric, metric.replace('_', ' '))}{bracket}{rest}"


def line(
    colour: int,
    *,
    name: str,
    points: Iterable[tuple[float, float]],
    dash: str = "solid",
    mark: Mark = "line",
    labels: Sequence[str] = (),
) -> Series:
    """Return the series through some points; a single point is drawn as a point."""
    points = tuple(points)
    return Series(
        name=name,
        mark="points" if len(points) == 1 else mark,
        colour=colour,
        x=tuple(x for x, _ in points),
        y=tuple(y for _, y in points),
        dash=dash,
        labels=tuple(labels),
    )


def dash_of(index: int) -> str:
    """Return the dash style of a line: lines beyond the palette repeat its colours with another dash."""
    return DASHES[(index // len(PALETTE)) % len(DASHES)]


def ribbon(
    colour: int, *, name: str = "", points: Iterable[tuple[float, float, float]], opacity: float
) -> Series:
    """Return the filled band between `low` and `high` of points (x, low, high)."""
    # A gap in a filled band would connect unrelated edges: leave out rounds without finite quantiles.
    points = tuple(point for point in points if all(map(math.isfinite, point)))
    low, high = tuple(low for _, low, _ in points), tuple(high for _, _, high in points)
    x = tuple(x for x, _, _ in points)
    return Series(name=name, mark="ribbon", colour=colour, x=x, y=(), low=low, high=high, opacity=opacity)


def band(curve: Curve, *, mark: Mark = "line") -> tuple[Series, ...]:
    """Return a curve, after its band of one standard deviation if it has one."""
    points = list(zip(curve.x, curve.mean, strict=True))
    drawn = line(curve.colour, name=curve.label, points=points, dash=dash_of(curve.colour), mark=mark)
    if curve.std is None:
        return (drawn,)
    edges = [(x, mean - std, mean + std) for (x, mean), std in zip(points, curve.std, strict=True)]
    return ribbon(curve.colour, points=edges, opacity=0.16), drawn


def endings(curves: Sequence[Curve]) -> str:
    """Return a sentence with the last value of every curve."""
    return "; ".join(f"{curve.label} ends at {show(curve.mean[-1])}" for curve in curves) + "."
