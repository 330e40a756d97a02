"""The plots of reports: plotly figures with one template, each with the words for a reader who cannot see it.

Colours are those of Okabe and Ito, which readers of every colour vision can tell apart. Backgrounds are
transparent and text is coloured by the page's style sheet, so a plot follows the page's light or dark theme.
"""

import html
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import plotly.graph_objects as go

from fedveil.report.run_data import NORM_LEVELS, Diagnostics, RunData, SpectrumData

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F")
DASHES = ("solid", "dash", "dot", "dashdot")
_SILO_NAMES_SHOWN = 40

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
    """A figure with its title, its caption, and `alt`: what a reader who cannot see it is told.

    `log_x` offers a switch to a logarithmic horizontal axis.
    """

    figure: go.Figure
    title: str
    alt: str
    caption: str
    log_x: bool = False


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A mean over seeds with its sample standard deviation (None for one seed), point by point.

    `colour` is its place in the palette: a variant keeps its colour in every plot of a page.
    """

    label: str
    colour: int
    x: Sequence[float]
    mean: Sequence[float]
    std: Sequence[float] | None = None


def show(value: float) -> str:
    """A number for a reader: four significant digits, infinity and missing values as such."""
    if math.isnan(value):
        return "not a number"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return re.sub(r"e([+-])0*", r"e\1", f"{value:.4g}")


def show_epsilon(epsilon: float) -> str:
    """An epsilon with two decimals (three significant digits below 0.1), rounded up, never down."""
    if not math.isfinite(epsilon) or epsilon == 0:
        return show(epsilon)
    digits = 2 if epsilon >= 0.1 else 2 - math.floor(math.log10(epsilon))
    return f"{math.ceil(epsilon * 10**digits - 1e-9) / 10**digits:,.{digits}f}"


def metric_curve(run: RunData, metric: str) -> Plot:
    """A test metric over rounds."""
    points = [(row.round, row.test[metric]) for row in run.rounds if metric in row.test]
    figure = _figure(x="round", y=f"test {words(metric)}")
    _line(figure, 0, name=words(metric), x=[x for x, _ in points], y=[y for _, y in points])
    (first, start), (last, end) = points[0], points[-1]
    span = f"from {show(start)} at round {first} to {show(end)} at round {last}"
    return Plot(
        figure=figure,
        title=f"Test {words(metric)}",
        alt=f"Line: test {words(metric)} goes {span}.",
        caption=f"On held-out test data, {span}.",
    )


def epsilon_curve(run: RunData) -> Plot:
    """The privacy spent up to each round."""
    rows = [row for row in run.rounds if math.isfinite(row.epsilon)]
    figure = _figure(x="round", y="ε spent")
    figure.update_yaxes(rangemode="tozero")
    _line(figure, 1, name="ε", x=[row.round for row in rows], y=[row.epsilon for row in rows])
    end = f"ε = {show_epsilon(rows[-1].epsilon)}{_delta(run)} after {rows[-1].round} rounds"
    return Plot(
        figure=figure,
        title="Privacy spent",
        alt=f"Line: the privacy spent grows with the rounds to {end}.",
        caption=f"Cumulative, for one {run.statement.unit}: {end}.",
    )


def privacy_utility(run: RunData, metric: str) -> Plot:
    """A test metric against the privacy spent when it was reached."""
    rows = [row for row in run.rounds if metric in row.test and math.isfinite(row.epsilon)]
    figure = _figure(x="ε spent", y=f"test {words(metric)}")
    figure.update_layout(hovermode="closest")
    _line(
        figure,
        2,
        name=words(metric),
        x=[row.epsilon for row in rows],
        y=[row.test[metric] for row in rows],
        text=[f"round {row.round}" for row in rows],
    )
    price = f"ε = {show_epsilon(rows[-1].epsilon)}{_delta(run)}"
    end = f"test {words(metric)} {show(rows[-1].test[metric])} for {price}"
    return Plot(
        figure=figure,
        title=f"What privacy bought: {words(metric)} against ε",
        alt=f"Line: test {words(metric)} against the privacy spent, ending at {end}.",
        caption=f"One point a round; the last is {end}.",
    )


def spectrum(data: SpectrumData) -> Plot:
    """Magnitude by frequency of the model's move over the whole run, both axes logarithmic."""
    figure = _figure(x="frequency (cycles over the parameter vector)", y="magnitude")
    shown = [
        (x, y) for x, y in zip(data.frequencies, data.magnitudes, strict=True) if math.isfinite(y) and y > 0
    ]
    _line(figure, 4, name="magnitude", x=[x for x, _ in shown], y=[y for _, y in shown])
    figure.update_xaxes(type="log")
    _log_y(figure, [y for _, y in shown])
    (first, start), (last, end) = shown[0], shown[-1]
    span = f"from {show(start)} at frequency {show(first)} to {show(end)} at {show(last)}"
    return Plot(
        figure=figure,
        title="Spectrum of the model's move",
        alt=f"Line on logarithmic axes: the magnitude goes {span}.",
        caption=f"Fourier coefficients of (last model - first model), {span}. Noise alone is flat; what falls with the "
        "frequency is what Laplacian smoothing keeps.",
    )


def records_per_user(diagnostics: Diagnostics) -> Plot:
    """Deciles of the number of records of a user, over all silos."""
    quantiles = diagnostics.records_per_user
    share = [10 * decile for decile in range(len(quantiles))]
    figure = _figure(x="users with at most this many records (%)", y="records")
    _line(figure, 0, name="records of a user", x=share, y=quantiles)
    figure.update_traces(mode="lines+markers")
    figure.update_yaxes(rangemode="tozero")
    present = f"{show(diagnostics.users_with_records)} of {show(diagnostics.users)} users have records"
    spread = f"the median user has {show(quantiles[5])}, the largest {show(quantiles[-1])}"
    return Plot(
        figure=figure,
        title="Records per user",
        alt=f"Line of deciles: {spread}.",
        caption=f"{present}; {spread}.",
    )


def records_per_silo(diagnostics: Diagnostics) -> Plot:
    """The number of records each silo holds; silos are numbered where there are too many to name."""
    counts = diagnostics.records_per_silo
    named = len(counts) <= _SILO_NAMES_SHOWN
    figure = _figure(x="silo", y="records")
    figure.update_layout(hovermode="closest", showlegend=False)
    figure.add_bar(
        x=list(range(len(counts))),
        y=list(counts),
        text=[_label(name) for name in diagnostics.silo_names],
        hovertemplate="%{text}: %{y} records<extra></extra>",
        textposition="none",
        marker_color=PALETTE[2],
    )
    if named:
        figure.update_xaxes(
            tickvals=list(range(len(counts))), ticktext=[_short(name) for name in diagnostics.silo_names]
        )
    figure.update_yaxes(rangemode="tozero")
    extremes = f"{show(min(counts))} to {show(max(counts))} records"
    spread = f"{len(counts)} silos hold {extremes} each, {show(sum(counts))} in all"
    return Plot(figure=figure, title="Records per silo", alt=f"Bars: {spread}.", caption=f"{spread}.")


def contribution_norms(run: RunData) -> Plot:
    """Quantile ribbons of the contributions' norms before clipping, against the clip bound."""
    rows = [row for row in run.rounds if row.norms is not None]
    rounds = [row.round for row in rows]
    levels = {
        level: [row.norms[i] for row in rows if row.norms is not None] for i, level in enumerate(NORM_LEVELS)
    }
    figure = _figure(x="round", y="l2 norm of a contribution")
    for low, high, opacity in ((0.0, 1.0, 0.10), (0.1, 0.9, 0.16), (0.25, 0.75, 0.28)):
        name = "all" if low == 0 else f"{low:.0%} to {high:.0%}"
        _ribbon(figure, 0, name=name, x=rounds, low=levels[low], high=levels[high], opacity=opacity)
    _line(figure, 0, name="median", x=rounds, y=levels[0.5])
    clips = [math.nan if row.clip is None else row.clip for row in rows]
    positive = [value for values in (*levels.values(), clips) for value in values if value > 0]
    if positive and max(positive) > 30 * min(positive):
        _log_y(figure, positive)
    bound = next((clip for clip in reversed(clips) if not math.isnan(clip)), None)
    ending = f"the median of {show(rows[-1].contributions)} is {show(levels[0.5][-1])} at round {rounds[-1]}"
    if bound is not None:
        _line(figure, 1, name="clip bound C", x=rounds, y=clips, dash="dash")
        ending += f", the clip bound {show(bound)}"
    return Plot(
        figure=figure,
        title="Contribution norms before clipping",
        alt=f"Ribbons of quantiles over rounds: {ending}.",
        caption=f"Ribbons hold all, 80% and half of the contributions; {ending}.",
    )


def clipped_fraction(run: RunData) -> Plot:
    """The fraction of contributions that the clip bound shortened, over rounds."""
    points = [(row.round, row.clipped) for row in run.rounds if row.clipped is not None]
    figure = _figure(x="round", y="fraction clipped")
    figure.update_yaxes(range=[0, 1.02], tickformat=".0%")
    _line(figure, 1, name="clipped", x=[x for x, _ in points], y=[y for _, y in points])
    ending = f"{points[-1][1]:.0%} of the contributions met the bound at round {points[-1][0]}"
    return Plot(
        figure=figure,
        title="Contributions clipped",
        alt=f"Line: {ending}.",
        caption=f"{ending}. Near 100% the bound, not the data, sets the length of an update.",
    )


def uplink_bits(run: RunData) -> Plot:
    """Bits a parameter of all messages over rounds, against the information limit of the same updates."""
    sent = [(row.round, row.uplink) for row in run.rounds if row.uplink is not None]
    rounds, bits = [number for number, _ in sent], [uplink.bits_per_parameter for _, uplink in sent]
    limits = [(number, uplink.limit) for number, uplink in sent if uplink.limit is not None]
    figure = _figure(x="round", y="bits a parameter")
    _line(figure, 0, name="messages", x=rounds, y=bits)
    ending = f"{show(bits[-1])} bits a parameter at round {rounds[-1]}"
    if limits:
        bound = [limit for _, limit in limits]
        _line(figure, 1, name="information limit", x=[number for number, _ in limits], y=bound, dash="dash")
        ending += f", the limit {show(bound[-1])}"
    _log_y(figure, [value for value in (*bits, *(limit for _, limit in limits)) if value > 0])
    total = sum(uplink.bytes for _, uplink in sent)
    plain = sum(uplink.float32_bytes for _, uplink in sent)
    fewer = f", {show(plain / total)} times fewer than the same in float32" if total else ""
    return Plot(
        figure=figure,
        title="Uplink",
        alt=f"Lines on a logarithmic axis: {ending}.",
        caption=f"{ending}. All messages together: {show(total)} bytes{fewer}.",
    )


def uplink_acceptance(run: RunData) -> Plot:
    """The share of the quantisers' draws that were accepted, over rounds."""
    points = [
        (row.round, row.uplink.acceptance)
        for row in run.rounds
        if row.uplink is not None and row.uplink.acceptance is not None
    ]
    figure = _figure(x="round", y="share of draws accepted")
    figure.update_yaxes(range=[0, 1.02], tickformat=".0%")
    _line(figure, 2, name="accepted", x=[x for x, _ in points], y=[y for _, y in points])
    ending = f"{points[-1][1]:.1%} of the draws were accepted at round {points[-1][0]}"
    return Plot(
        figure=figure,
        title="Acceptance rate of the quantisers",
        alt=f"Line: {ending}.",
        caption=f"{ending}. A draw is a dither, or a shared candidate where a block selects among them.",
    )


def compared_by_round(curves: Sequence[Curve], metric: str) -> Plot:
    """A test metric over rounds, one curve a variant, with a band of one standard deviation over seeds."""
    figure = _figure(x="round", y=f"test {words(metric)}")
    for curve in curves:
        _band(figure, curve)
    return Plot(
        figure=figure,
        title=f"Test {words(metric)} by round",
        alt="Lines with bands, one a variant. " + _endings(curves),
        caption="Mean over seeds; bands are one sample standard deviation.",
        log_x=True,
    )


def compared_by_epsilon(
    private: Sequence[Curve], unprotected: Sequence[Curve], metric: str, *, measured_by: str
) -> Plot:
    """Privacy-utility curves: a test metric against epsilon, for at least one private variant.

    A variant without a guarantee lies at infinite epsilon: a dashed line at its last mean. `measured_by` says
    whose epsilon is on the axis, which starts out logarithmic where one variant ends at 20 times the
    epsilon of another.
    """
    figure = _figure(x=f"ε spent ({measured_by})", y=f"test {words(metric)}")
    figure.update_layout(hovermode="closest")
    for curve in private:
        _band(figure, curve)
    ends = [curve.x[-1] for curve in private]
    if max(ends) > 20 * min(ends):
        figure.update_xaxes(type="log", dtick="D2")
    spent = [x for curve in private for x in curve.x]
    span = [0.0, min((x for x in spent if x > 0), default=1.0), max(spent)]  # zero is off a logarithmic axis
    for curve in unprotected:
        level = [curve.mean[-1]] * len(span)
        _line(figure, curve.colour, name=f"{curve.label} (ε = ∞)", x=span, y=level, dash="dash")
    note = " Dashed: no guarantee (ε = ∞), the last round's mean." if unprotected else ""
    return Plot(
        figure=figure,
        title=f"Privacy and utility: test {words(metric)} against ε",
        alt="Lines with bands, one a variant. " + _endings([*private, *unprotected]),
        caption=f"One point a round; bands are one sample standard deviation over seeds.{note}",
        log_x=True,
    )


def compared_by_uplink(curves: Sequence[Curve], metric: str) -> Plot:
    """Rate-accuracy curves: a test metric against the bytes that were sent to the server until then."""
    figure = _figure(x="MiB sent to the server, all messages so far", y=f"test {words(metric)}")
    figure.update_layout(hovermode="closest")
    for curve in curves:
        _band(figure, curve)
    ends = [curve.x[-1] for curve in curves]
    if max(ends) > 20 * min(ends):
        figure.update_xaxes(type="log", dtick="D2")
    return Plot(
        figure=figure,
        title=f"Rate and accuracy: test {words(metric)} against the uplink",
        alt="Lines with bands, one a variant. " + _endings(curves),
        caption="One point a round; bands are one sample standard deviation over seeds.",
        log_x=True,
    )


def planned(curves: Sequence[Curve], *, axis: str, scale: Literal["linear", "log"]) -> Plot:
    """Epsilon against one planned quantity, one curve for every setting of the others."""
    figure = _figure(x=axis, y="ε")
    figure.update_layout(hovermode="closest")
    figure.update_xaxes(type=scale, dtick="D2" if scale == "log" else None)
    _log_y(figure, [mean for curve in curves for mean in curve.mean if mean > 0])
    for curve in curves:
        _band(figure, curve)
    figure.update_traces(mode="lines+markers")
    return Plot(
        figure=figure,
        title=f"ε against {axis}",
        alt=f"Lines: epsilon against {axis}. " + _endings(curves),
        caption="Logarithmic vertical axis; every point is a row of the table.",
    )


def against_key(points: Sequence[tuple[str, float]], key: str, y: str) -> Plot:
    """What one measure does as a key is swept: its mean at every value."""
    figure = _figure(x=key, y=y)
    _line(figure, 0, name=y, x=[value for value, _ in points], y=[mean for _, mean in points])
    figure.update_traces(mode="lines+markers").update_xaxes(type="category")
    alt = f"A line from {show(points[0][1])} at {points[0][0]} to {show(points[-1][1])} at {points[-1][0]}."
    return Plot(figure=figure, title=f"{y} against {key}", alt=alt, caption="Mean over runs of one value.")


def pareto(points: Sequence[tuple[float, float, str, bool]], *, x: str, y: str) -> Plot:
    """Every run by cost and result (cost, result, label, whether no other beats it), with the front joined."""
    figure, best = _figure(x=x, y=y), sorted(point for point in points if point[3])
    for index, shown in enumerate((best, [point for point in points if not point[3]])):
        name, labels = ("no run beats it", "beaten")[index], [point[2] for point in shown]
        _line(figure, index, name=name, x=[p[0] for p in shown], y=[p[1] for p in shown], text=labels)
        figure.data[index].mode = ("lines+markers", "markers")[index]
    figure.update_layout(hovermode="closest")
    named = "; ".join(f"{label}: {show(good)} for {show(cost)}" for cost, good, label, _ in best)
    return Plot(figure=figure, title=f"{y} for {x}", alt=f"Not beaten: {named}.", caption="A point a run.")


def words(name: str) -> str:
    """A metric's name as a reader would write it."""
    return name.replace("_", " ")


def _label(text: str) -> str:
    """Text as it must be given to plotly, which reads a little HTML in labels, to be shown as it stands."""
    return html.escape(text, quote=False)


def _figure(*, x: str, y: str) -> go.Figure:
    figure = go.Figure(layout={"template": _TEMPLATE})
    figure.update_xaxes(title_text=_label(x))
    figure.update_yaxes(title_text=_label(y))
    return figure


def _log_y(figure: go.Figure, values: Sequence[float]) -> None:
    """A logarithmic vertical axis over positive values, marked at 1, 2 and 5 times powers of ten."""
    low, high = (
        math.floor(math.log10(min(values, default=1.0))),
        math.ceil(math.log10(max(values, default=1.0))),
    )
    steps = (1, 2, 5) if high - low <= 3 else (1,)
    ticks = [step * 10.0**power for power in range(low, high + 1) for step in steps]
    figure.update_yaxes(type="log", tickvals=ticks, ticktext=[show(tick) for tick in ticks])


def _line(
    figure: go.Figure,
    index: int,
    *,
    name: str,
    x: Sequence[float] | Sequence[str],
    y: Sequence[float],
    dash: str = "solid",
    text: Sequence[str] | None = None,
) -> None:
    figure.add_scatter(
        x=list(x),
        y=list(y),
        name=_label(name),
        text=text,
        mode="lines+markers" if len(x) == 1 else "lines",
        line={"color": PALETTE[index % len(PALETTE)], "dash": dash, "width": 2.25},
    )


def _ribbon(
    figure: go.Figure,
    index: int,
    *,
    name: str | None,
    x: Sequence[float],
    low: Sequence[float],
    high: Sequence[float],
    opacity: float,
) -> None:
    """A filled polygon, out along `high` and back along `low`; unnamed ribbons stay out of the legend."""
    red, green, blue = (int(PALETTE[index % len(PALETTE)][i : i + 2], 16) for i in (1, 3, 5))
    points = [point for point in zip(x, low, high, strict=True) if all(map(math.isfinite, point))]
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


def _band(figure: go.Figure, curve: Curve) -> None:
    if curve.std is not None:
        low = [mean - std for mean, std in zip(curve.mean, curve.std, strict=True)]
        high = [mean + std for mean, std in zip(curve.mean, curve.std, strict=True)]
        _ribbon(figure, curve.colour, name=None, x=curve.x, low=low, high=high, opacity=0.16)
    dash = DASHES[(curve.colour // len(PALETTE)) % len(DASHES)]
    _line(figure, curve.colour, name=curve.label, x=curve.x, y=curve.mean, dash=dash)


def _endings(curves: Sequence[Curve]) -> str:
    return "; ".join(f"{curve.label} ends at {show(curve.mean[-1])}" for curve in curves) + "."


def _delta(run: RunData) -> str:
    return f" at δ = {show(run.statement.delta)}"


def _short(name: str, length: int = 18) -> str:
    return _label(name if len(name) <= length else name[: length - 1] + "…")
