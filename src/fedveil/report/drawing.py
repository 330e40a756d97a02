"""Plots as data (axes, series, texts), formats of numbers, and plots drawn as SVG for pages and files.

:mod:`fedveil.report.figure_files` writes them as files. The colours are those of Okabe and Ito, which are
distinguishable for every colour vision.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal
from typing import Final, Literal

from markupsafe import Markup
from markupsafe import escape as escaped

from fedveil.privacy import statement
from fedveil.privacy.statement import round_exactly
from fedveil.sanitize import strip_control_characters

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
        opacity: opacity of a ribbon.
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
    metric, bracket, suffix = name.partition("[")
    return f"{_WRITTEN.get(metric, metric.replace('_', ' '))}{bracket}{suffix}"


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


# --- SVG ---

_FONT: Final = "system-ui, -apple-system, 'Segoe UI', 'Helvetica Neue', Arial, sans-serif"
_SIZE: Final = 12.0
_LETTER: Final = 6.3
"""Mean width of a letter at the font size; layout needs no more precision."""
_DASH: Final = {"solid": "none", "dash": "7 4", "dot": "2 3", "dashdot": "7 3 2 3"}
_LONGEST: Final = 18
"""Letters of a category's name on an axis."""
_LONGEST_ENTRY: Final = 110
_HOVERED: Final = 150
"""Most points of a series that show their value under the pointer."""
_TICKS: Final = 5
_LARGEST: Final = 1e100
"""Size of values beyond which a scale does not reach: they lie at its end. Intervals of ratios that noise alone
decides are that wide, and the quotient of their ends is no number."""
_INK: Final = "#56616f"
_GRID: Final = "#e2e6eb"


def draw(plot: Plot, *, wide: bool = False) -> Markup:
    """Return a plot as one SVG element: 460 x 290 units, 960 x 380 if wide."""
    width, height = (960.0, 380.0) if wide else (460.0, 290.0)
    entries = _entries(plot, width)
    x_ticks, y_ticks = _scale(plot, "x"), _scale(plot, "y")
    left = 26 + _LETTER * max((len(text) for _, text in y_ticks.ticks), default=1)
    tilted = _LETTER * max((len(text) for _, text in x_ticks.ticks), default=0) > (width - left) / max(
        len(x_ticks.ticks), 1
    )
    bottom = 44 + (0.55 * _LETTER * max(len(text) for _, text in x_ticks.ticks) if tilted else 0)
    top = 10 + 18 * max((row + 1 for row, _, _ in entries), default=0)
    area = _Area(
        x=x_ticks, y=y_ticks, left=left, right=width - 12, top=top, bottom=height - bottom, tilted=tilted
    )
    parts = [*_frame(plot, area)]
    for series in plot.series:
        parts.extend(_MARKS[series.mark](series, area))
        parts.extend(_hovered(series, area, plot))
    parts.extend(_legend(entries))
    return Markup(
        '<svg class="plot" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {} {}" role="img" aria-label="{}" '
        'font-family="{}" font-size="{}">{}</svg>'
    ).format(f"{width:g}", f"{height:g}", _clean(plot.alt), _FONT, f"{_SIZE:g}", Markup("").join(parts))


@dataclass(frozen=True, kw_only=True)
class _Scale:
    """Map from values of an axis to [0, 1], with the ticks (value, text)."""

    low: float
    high: float
    log: bool
    ticks: tuple[tuple[float, str], ...]

    def at(self, value: float) -> float:
        """Return the position of a value; NaN for one that has none."""
        if not math.isfinite(value) or (self.log and value <= 0):
            return math.nan
        low, high, value = (
            (math.log(self.low), math.log(self.high), math.log(value))
            if self.log
            else (self.low, self.high, value)
        )
        return min(max((value - low) / (high - low), 0.0), 1.0)

    def at_end(self, value: float) -> float:
        """Return the position of an end of an interval; one beyond the scale lies at the end of the scale."""
        if math.isnan(value) or (-math.inf < value < math.inf and not (self.log and value <= 0)):
            return self.at(value)
        return 1.0 if value > 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class _Area:
    """Rectangle in which series are drawn."""

    x: _Scale
    y: _Scale
    left: float
    right: float
    top: float
    bottom: float
    tilted: bool

    def across(self, value: float, *, end: bool = False) -> float:
        """Return the horizontal coordinate of a value, or of the end of an interval."""
        return self.left + (self.x.at_end if end else self.x.at)(value) * (self.right - self.left)

    def up(self, value: float, *, end: bool = False) -> float:
        """Return the vertical coordinate of a value, or of the end of an interval."""
        return self.bottom - (self.y.at_end if end else self.y.at)(value) * (self.bottom - self.top)


# --- scales ---


def _scale(plot: Plot, name: str) -> _Scale:
    """Return the scale of the axis "x" or "y" of a plot."""
    axis: Axis = getattr(plot, name)
    if axis.categories:
        # The first category is on the left, or on top.
        low, high = -0.5, len(axis.categories) - 0.5
        ticks = tuple((float(number), _shortened(text)) for number, text in enumerate(axis.categories))
        return _Scale(low=low, high=high, log=False, ticks=ticks) if name == "x" else _reversed(ticks)
    values = [value for series in plot.series for value in _values(series, name)]
    if axis.rule is not None:
        values.append(axis.rule)
    values = [value for value in values if math.isfinite(value) and (value > 0 or not axis.log)]
    if axis.log:
        return _log_scale(values)
    if axis.zero:
        values.append(0.0)
    low, high = axis.bounds or (min(values, default=0.0), max(values, default=1.0))
    low, high = (min(max(end, -_LARGEST), _LARGEST) for end in (low, high))
    if high - low <= 1e-9 * max(abs(low), abs(high)):  # equal, or too close for ticks between them
        room = 0.05 * max(1.0, abs(low))
        low, high = low - room, high + room
    if axis.bounds is None:
        pad = (0.04 if name == "y" or any(s.mark == "bars" for s in plot.series) else 0.0) * (high - low)
        low, high = low if axis.zero and low == 0 else low - pad, high + pad
    if name == "x" and any(series.mark == "bars" for series in plot.series):
        low, high = low - 0.5, high + 0.5
    return _Scale(low=low, high=high, log=False, ticks=tuple(_linear_ticks(low, high, axis.percent)))


def _values(series: Series, name: str) -> Sequence[float]:
    """Return all values of a series on one axis."""
    sideways = series.mark == "intervals"
    if name == "x":
        return (*series.x, *series.low, *series.high) if sideways else series.x
    return series.y if sideways else (*series.y, *series.low, *series.high)


def _reversed(ticks: tuple[tuple[float, str], ...]) -> _Scale:
    return _Scale(low=len(ticks) - 0.5, high=-0.5, log=False, ticks=ticks)


def _linear_ticks(low: float, high: float, percent: bool) -> Iterator[tuple[float, str]]:
    """Yield ticks at multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1):
        value = number * step
        yield value, f"{value:.0%}" if percent else show(float(f"{value:.10g}"))


def _log_scale(values: Sequence[float]) -> _Scale:
    """Return a logarithmic scale with ticks at 1, 2 and 5 times powers of ten, or at powers alone."""
    low, high = min(values, default=1.0), max(values, default=10.0)
    low, high = (min(max(end, 1 / _LARGEST), _LARGEST) for end in (low, high))
    low, high = (low, high) if high > low * (1 + 1e-9) else (low / 2, high * 2)
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors = (1, 2, 5) if last - first <= 3 else (1,)
    every = max(1, math.ceil((last - first) / 8))
    ticks = [factor * 10.0**power for power in range(first, last + 1, every) for factor in factors]
    edge = (high / low) ** 0.03
    shown = [tick for tick in ticks if low / edge <= tick <= high * edge]
    return _Scale(
        low=low / edge, high=high * edge, log=True, ticks=tuple((tick, show(tick)) for tick in shown)
    )


# --- frame ---


def _frame(plot: Plot, area: _Area) -> Iterator[Markup]:
    """Yield grid, axes, ticks, titles and rules."""
    for value, text in area.y.ticks:
        y = area.up(value)
        yield _line((area.left, y), (area.right, y), _GRID, "grid")
        yield _text(area.left - 7, y + 4, text, "end")
    every = max(1, math.ceil(len(area.x.ticks) * 14 / (area.right - area.left)))
    for value, text in area.x.ticks[::every]:
        x = area.across(value)
        if not plot.x.categories:
            yield _line((x, area.top), (x, area.bottom), _GRID, "grid")
        if area.tilted:
            yield _text(x + 3, area.bottom + 14, text, "end", turn=-35)
        else:
            yield _text(x, area.bottom + 17, text, "middle")
    yield _line((area.left, area.bottom), (area.right, area.bottom), _INK, "axis")
    yield _line((area.left, area.top), (area.left, area.bottom), _INK, "axis")
    if plot.x.rule is not None:
        x = area.across(plot.x.rule)
        yield _line((x, area.top), (x, area.bottom), _INK, "axis", _DASH["dot"])
    centre = (area.left + area.right) / 2
    if plot.x.title:
        below = max((len(text) for _, text in area.x.ticks), default=0) * 0.55 * _LETTER if area.tilted else 0
        yield _text(centre, area.bottom + 36 + below, plot.x.title, "middle")
    if plot.y.title:
        yield _text(12, (area.top + area.bottom) / 2, plot.y.title, "middle", turn=-90)


def _entries(plot: Plot, width: float) -> list[tuple[int, float, Series]]:
    """Return the entries of the legend with their rows and positions; none for a single series."""
    named = [series for series in plot.series if series.name]
    if len(named) < 2:
        return []
    entries: list[tuple[int, float, Series]] = []
    row, x = 0, 8.0
    for series in named:
        needed = 42 + _LETTER * min(len(series.name), _LONGEST_ENTRY)
        if x + needed > width and x > 8:
            row, x = row + 1, 8.0
        entries.append((row, x, series))
        x += needed + 8
    return entries


def _legend(entries: Sequence[tuple[int, float, Series]]) -> Iterator[Markup]:
    for row, x, series in entries:
        y, colour = 12 + 18 * row, _colour(series)
        if series.mark == "ribbon":
            yield Markup('<rect x="{}" y="{}" width="20" height="10" fill="{}" fill-opacity="{}"/>').format(
                _number(x), _number(y - 5), colour, max(series.opacity, 0.15)
            )
        elif series.mark == "points":
            yield _circle(x + 10, y, 4, colour)
        else:
            yield _line((x, y), (x + 20, y), colour, "series", _DASH[series.dash], 2.25)
        yield _text(x + 26, y + 4, _shortened(series.name, _LONGEST_ENTRY), "start")


# --- marks ---


def _draw_line(series: Series, area: _Area) -> Iterator[Markup]:
    """Yield the path of a line, which is interrupted where a value is missing."""
    steps, pen = [], "M"
    for x, y in zip(series.x, series.y, strict=True):
        across, up = area.across(x), area.up(y)
        if math.isnan(across) or math.isnan(up):
            pen = "M"
            continue
        steps.append(f"{pen}{_number(across)} {_number(up)}")
        pen = "L"
    yield Markup(
        '<path class="series" d="{}" fill="none" stroke="{}" stroke-width="2.25" stroke-dasharray="{}" '
        'stroke-linejoin="round"/>'
    ).format("".join(steps), _colour(series), _DASH[series.dash])


def _draw_points(series: Series, area: _Area) -> Iterator[Markup]:
    for x, y in zip(series.x, series.y, strict=True):
        across, up = area.across(x), area.up(y)
        if not math.isnan(across) and not math.isnan(up):
            yield _circle(across, up, 4, _colour(series))


def _draw_both(series: Series, area: _Area) -> Iterator[Markup]:
    yield from _draw_line(series, area)
    yield from _draw_points(series, area)


def _draw_ribbon(series: Series, area: _Area) -> Iterator[Markup]:
    upper = [(area.across(x), area.up(y, end=True)) for x, y in zip(series.x, series.high, strict=True)]
    lower = [(area.across(x), area.up(y, end=True)) for x, y in zip(series.x, series.low, strict=True)]
    corners = [point for point in (*upper, *reversed(lower)) if not any(map(math.isnan, point))]
    path = " ".join(f"{_number(x)},{_number(y)}" for x, y in corners)
    yield Markup('<polygon class="series" points="{}" fill="{}" fill-opacity="{}"/>').format(
        path, _colour(series), series.opacity
    )


def _draw_bars(series: Series, area: _Area) -> Iterator[Markup]:
    """Yield bars, with their vertical intervals if they have some."""
    half = 0.375 * (area.across(1.0, end=True) - area.across(0.0, end=True))
    for x, y in zip(series.x, series.y, strict=True):
        top, base, left = area.up(y), area.up(0.0, end=True), area.across(x) - half
        if not math.isnan(top + left):
            yield Markup('<rect class="series" x="{}" y="{}" width="{}" height="{}" fill="{}"/>').format(
                _number(left),
                _number(min(top, base)),
                _number(2 * half),
                _number(abs(base - top)),
                _colour(series),
            )
    for x, low, high in zip(series.x, series.low, series.high, strict=False):
        across = area.across(x)
        ends = area.up(low, end=True), area.up(high, end=True)
        if not math.isnan(across + sum(ends)):
            yield _line((across, ends[0]), (across, ends[1]), _INK, "axis", width=1.5)


def _draw_intervals(series: Series, area: _Area) -> Iterator[Markup]:
    """Yield points with horizontal intervals."""
    for y, low, high in zip(series.y, series.low, series.high, strict=True):
        up = area.up(y)
        ends = area.across(low, end=True), area.across(high, end=True)
        if not math.isnan(up + sum(ends)):
            yield _line((ends[0], up), (ends[1], up), _colour(series), "series", width=2)
    yield from _draw_points(series, area)


_MARKS: Final[dict[str, Callable[[Series, _Area], Iterator[Markup]]]] = {
    "line": _draw_line,
    "points": _draw_points,
    "line and points": _draw_both,
    "ribbon": _draw_ribbon,
    "bars": _draw_bars,
    "intervals": _draw_intervals,
}


def _hovered(series: Series, area: _Area, plot: Plot) -> Iterator[Markup]:
    """Yield invisible discs that show the values under the pointer."""
    if series.mark == "ribbon" or len(series.x) > _HOVERED:
        return
    labels = series.labels or ("",) * len(series.x)
    for x, y, label in zip(series.x, series.y, labels, strict=True):
        across, up = area.across(x), area.up(y)
        if math.isnan(across) or math.isnan(up):
            continue
        values = (
            f"{_named(plot.x, x)}: {show(y)}"
            if series.mark != "intervals"
            else f"{_named(plot.y, y)}: {show(x)}"
        )
        tooltip = ", ".join(text for text in (series.name, label, values) if text)
        # An f-string, since `Markup.format` costs five times as much and a report has thousands of these.
        yield Markup(
            f'<circle cx="{_number(across)}" cy="{_number(up)}" r="7" fill="#000" fill-opacity="0">'
            f"<title>{_clean(tooltip)}</title></circle>"
        )


def _named(axis: Axis, value: float) -> str:
    if axis.categories:
        return axis.categories[int(value)]
    return f"{axis.title} {show(value)}"


# --- elements ---


def _line(
    start: tuple[float, float],
    end: tuple[float, float],
    colour: str,
    kind: str,
    dash: str = "none",
    width: float = 1.0,
) -> Markup:
    return Markup(
        '<line class="{}" x1="{}" y1="{}" x2="{}" y2="{}" stroke="{}" stroke-width="{}" stroke-dasharray="{}"/>'
    ).format(kind, *map(_number, (*start, *end)), colour, f"{width:g}", dash)


def _circle(x: float, y: float, radius: float, colour: str) -> Markup:
    return Markup('<circle class="series" cx="{}" cy="{}" r="{}" fill="{}"/>').format(
        _number(x), _number(y), f"{radius:g}", colour
    )


def _text(x: float, y: float, text: str, anchor: str, turn: float = 0) -> Markup:
    turned = (
        Markup(' transform="rotate({} {} {})"').format(turn, _number(x), _number(y)) if turn else Markup("")
    )
    return Markup('<text x="{}" y="{}" fill="{}" text-anchor="{}"{}>{}</text>').format(
        _number(x), _number(y), _INK, anchor, turned, _clean(text)
    )


def _clean(text: str) -> Markup:
    return escaped(strip_control_characters(text))


def _number(value: float) -> str:
    return f"{value:.1f}"


def _colour(series: Series) -> str:
    return PALETTE[series.colour % len(PALETTE)]


def _shortened(text: str, longest: int = _LONGEST) -> str:
    return text if len(text) <= longest else text[: longest - 1] + "…"
