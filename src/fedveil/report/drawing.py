"""Elements of plots: template, colours, lines, bands, and formats of numbers.

The colours are those of Okabe and Ito, which are distinguishable for every colour vision. Backgrounds are transparent
and the page's style sheet colours the text, so a plot follows the light or dark theme of the page.
"""

import html
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal

import plotly.graph_objects as go

from fedveil.privacy import statement
from fedveil.privacy.statement import round_exactly
from fedveil.sanitize import strip_control_characters

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F")
DASHES = ("solid", "dash", "dot", "dashdot")

_AXIS = {
    "showline": True,
    "linecolor": "rgba(128,128,128,0.6)",
    "gridcolor": "rgba(128,128,128,0.18)",
    "zeroline": False,
    "ticks": "outside",
    "tickcolor": "rgba(128,128,128,0.6)",
    "ticklen": 4,
    "automargin": True,
    "title": {"standoff": 10},
}
_TEMPLATE = go.layout.Template(
    layout={
        "font": {
            "family": "system-ui, -apple-system, 'Segoe UI', sans-serif",
            "size": 13,
            "color": "#4b5563",
        },
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "colorway": list(PALETTE),
        "margin": {"l": 8, "r": 12, "t": 12, "b": 8},
        "height": 330,
        "hovermode": "x unified",
        "hoverlabel": {
            "bgcolor": "#1f2937",
            "bordercolor": "#1f2937",
            "font": {"color": "#f9fafb", "size": 12},
        },
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "xanchor": "left", "yanchor": "bottom"},
        "xaxis": _AXIS,
        "yaxis": _AXIS,
        "bargap": 0.25,
    }
)


@dataclass(frozen=True, kw_only=True)
class Plot:
    """A figure with its texts.

    Attributes:
        figure: the plotly figure.
        title: title above the plot.
        alt: text alternative for readers who cannot see the plot.
        caption: text below the plot.
        log_x: whether the page offers a switch to a logarithmic horizontal axis.
    """

    figure: go.Figure
    title: str
    alt: str
    caption: str
    log_x: bool = False


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
    return re.sub(r"e([+-])0*", r"e\1", number)


def words(name: str) -> str:
    """Return the name of a metric with blanks instead of underscores."""
    return name.replace("_", " ")


def label_text(text: str) -> str:
    """Escape a text for plotly, which interprets some HTML in labels."""
    return html.escape(strip_control_characters(text), quote=False)


def empty_figure(*, x: str, y: str) -> go.Figure:
    """Return an empty figure with the common template and named axes."""
    titles = {axis: {"title": {"text": label_text(text)}} for axis, text in (("xaxis", x), ("yaxis", y))}
    return go.Figure(layout={"template": _TEMPLATE, **titles})


def log_y(figure: go.Figure, values: Sequence[float]) -> None:
    """Set a logarithmic vertical axis for positive values, with ticks at 1, 2 and 5 times powers of ten."""
    low, high = (
        math.floor(math.log10(min(values, default=1.0))),
        math.ceil(math.log10(max(values, default=1.0))),
    )
    steps = (1, 2, 5) if high - low <= 3 else (1,)
    ticks = [step * 10.0**power for power in range(low, high + 1) for step in steps]
    figure.update_yaxes(type="log", tickvals=ticks, ticktext=[show(tick) for tick in ticks])


def line(
    figure: go.Figure,
    index: int,
    *,
    name: str,
    points: Iterable[tuple[float | str, float]],
    dash: str = "solid",
    text: Sequence[str] | None = None,
) -> None:
    """Add a line through points in the palette colour `index`; a single point is drawn as a marker."""
    points = list(points)
    figure.add_scatter(
        x=[x for x, _ in points],
        y=[y for _, y in points],
        name=label_text(name),
        text=text,
        mode="lines+markers" if len(points) == 1 else "lines",
        line={"color": PALETTE[index % len(PALETTE)], "dash": dash, "width": 2.25},
    )


def dash_of(index: int) -> str:
    """Return the dash style of a line: lines beyond the palette repeat its colours with another dash."""
    return DASHES[(index // len(PALETTE)) % len(DASHES)]


def ribbon(
    figure: go.Figure,
    index: int,
    *,
    name: str | None,
    points: Iterable[tuple[float, float, float]],
    opacity: float,
) -> None:
    """Add a filled polygon between `low` and `high` of points (x, low, high).

    A ribbon without a name is not in the legend.
    """
    red, green, blue = (int(PALETTE[index % len(PALETTE)][i : i + 2], 16) for i in (1, 3, 5))
    # A gap in a filled polygon would connect unrelated edges: leave out rounds without finite quantiles.
    points = [point for point in points if all(map(math.isfinite, point))]
    figure.add_scatter(
        x=[x for x, _, _ in points] + [x for x, _, _ in reversed(points)],
        y=[high for _, _, high in points] + [low for _, low, _ in reversed(points)],
        name=name,
        showlegend=name is not None,
        fill="toself",
        fillcolor=f"rgba({red},{green},{blue},{opacity})",
        line={"width": 0},
        mode="lines",
        hoverinfo="skip",
    )


def band(figure: go.Figure, curve: Curve) -> None:
    """Add a curve with its band of one standard deviation."""
    points = list(zip(curve.x, curve.mean, strict=True))
    if curve.std is not None:
        around = zip(points, curve.std, strict=True)
        edges = [(x, mean - std, mean + std) for (x, mean), std in around]
        ribbon(figure, curve.colour, name=None, points=edges, opacity=0.16)
    line(figure, curve.colour, name=curve.label, points=points, dash=dash_of(curve.colour))


def endings(curves: Sequence[Curve]) -> str:
    """Return a sentence with the last value of every curve."""
    return "; ".join(f"{curve.label} ends at {show(curve.mean[-1])}" for curve in curves) + "."
