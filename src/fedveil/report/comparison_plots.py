"""Plots that compare runs: variants, planned budgets, and the values of a swept key."""

from collections.abc import Mapping, Sequence
from typing import Literal

import plotly.graph_objects as go

from fedveil.report.drawing import (
    Curve,
    Plot,
    band,
    dash_of,
    empty_figure,
    endings,
    label_text,
    line,
    log_y,
    show,
    words,
)


def compared_by_round(curves: Sequence[Curve], metric: str) -> Plot:
    """Plot a test metric over rounds: one curve per variant, with a band of one standard deviation."""
    figure = empty_figure(x="round", y=f"test {words(metric)}")
    for curve in curves:
        band(figure, curve)
    return Plot(
        figure=figure,
        title=f"Test {words(metric)} by round",
        alt="Lines with bands, one a variant. " + endings(curves),
        caption="Mean over seeds; bands are one sample standard deviation.",
        log_x=True,
    )


def compared_by_epsilon(
    private: Sequence[Curve], unprotected: Sequence[Curve], metric: str, *, measured_by: str
) -> Plot:
    """Plot privacy-utility curves: a test metric against epsilon, for at least one private variant.

    A variant without a guarantee has infinite epsilon, and is drawn as a dashed line at its last mean. The axis is
    initially logarithmic if one variant ends at more than 20 times the epsilon of another.

    Args:
        private: curves of the variants with a guarantee.
        unprotected: curves of the variants without a guarantee.
        metric: the test metric.
        measured_by: unit of privacy of epsilon, for the axis.
    """
    figure = _against_cost(private, x=f"ε spent ({measured_by})", y=f"test {words(metric)}")
    spent = [x for curve in private for x in curve.x]
    span = [0.0, min((x for x in spent if x > 0), default=1.0), max(spent)]  # zero is off a logarithmic axis
    for curve in unprotected:
        level = [(x, curve.mean[-1]) for x in span]
        line(figure, curve.colour, name=f"{curve.label} (ε = ∞)", points=level, dash="dash")
    note = " Dashed: no guarantee (ε = ∞), the last round's mean." if unprotected else ""
    return Plot(
        figure=figure,
        title=f"Privacy and utility: test {words(metric)} against ε",
        alt="Lines with bands, one a variant. " + endings([*private, *unprotected]),
        caption=f"One point per round; bands are one sample standard deviation over seeds.{note}",
        log_x=True,
    )


def _against_cost(curves: Sequence[Curve], *, x: str, y: str) -> go.Figure:
    """Return a figure of curves over a cost.

    The axis is initially logarithmic if one curve ends at more than 20 times the cost of another.
    """
    figure = empty_figure(x=x, y=y)
    figure.update_layout(hovermode="closest")
    for curve in curves:
        band(figure, curve)
    ends = [curve.x[-1] for curve in curves]
    if max(ends) > 20 * min(ends):
        figure.update_xaxes(type="log", dtick="D2")
    return figure


def compared_by_communication(curves: Sequence[Curve], metric: str) -> Plot:
    """Plot rate-accuracy curves: a test metric against the MiB sent to the server so far."""
    figure = _against_cost(curves, x="MiB sent to the server, all messages so far", y=f"test {words(metric)}")
    return Plot(
        figure=figure,
        title=f"Rate and accuracy: test {words(metric)} against the cost of communication",
        alt="Lines with bands, one a variant. " + endings(curves),
        caption="One point per round; bands are one sample standard deviation over seeds.",
        log_x=True,
    )


def plan_curves(curves: Sequence[Curve], *, axis: str, scale: Literal["linear", "log"]) -> Plot:
    """Plot epsilon against one planned quantity: one curve for every setting of the other quantities."""
    figure = empty_figure(x=axis, y="ε")
    figure.update_layout(hovermode="closest")
    figure.update_xaxes(type=scale, dtick="D2" if scale == "log" else None)
    log_y(figure, [mean for curve in curves for mean in curve.mean if mean > 0])
    for curve in curves:
        band(figure, curve)
    figure.update_traces(mode="lines+markers")
    return Plot(
        figure=figure,
        title=f"ε against {axis}",
        alt=f"Lines: epsilon against {axis}. " + endings(curves),
        caption="Logarithmic vertical axis; every point is a row of the table.",
    )


def against_key(
    lines: Mapping[str, Sequence[tuple[str, float]]], values: Sequence[str], key: str, y: str
) -> Plot:
    """Plot one measure against a swept key: one line for each combination of the other settings.

    Args:
        lines: the points (value of the key, mean) of each line, by label; a line without points keeps its colour.
        values: all values of the key, in their order on the axis.
        key: the swept key.
        y: name of the measure.
    """
    figure = empty_figure(x=key, y=y)
    drawn = [(index, label, points) for index, (label, points) in enumerate(lines.items()) if points]
    for index, label, points in drawn:
        shown = [(label_text(value), mean) for value, mean in points]
        line(figure, index, name=label or y, points=shown, dash=dash_of(index))
    figure.update_traces(mode="lines+markers")
    figure.update_xaxes(
        type="category", categoryorder="array", categoryarray=[label_text(one) for one in values]
    )
    alt = " ".join(
        f"A line{f' ({label})' if label else ''} from {show(points[0][1])} at {points[0][0]}"
        f" to {show(points[-1][1])} at {points[-1][0]}."
        for _, label, points in drawn
    )
    caption = "Mean over runs that differ in their seeds alone."
    if len(drawn) > 1:
        caption = f"One line for each combination of the other settings. {caption}"
    return Plot(figure=figure, title=f"{y} against {key}", alt=alt, caption=caption)


def pareto(points: Sequence[tuple[float, float, str, bool]], *, x: str, y: str) -> Plot:
    """Plot every run by cost and result, with the Pareto front joined by a line.

    Args:
        points: (cost, result, label, whether the run is on the front) of every run.
        x: name of the cost.
        y: name of the result.
    """
    figure, best = empty_figure(x=x, y=y), sorted(point for point in points if point[3])
    for index, shown in enumerate((best, [point for point in points if not point[3]])):
        name, labels = ("no run beats it", "beaten")[index], [label_text(point[2]) for point in shown]
        line(figure, index, name=name, points=[point[:2] for point in shown], text=labels)
        figure.data[index].mode = ("lines+markers", "markers")[index]
    figure.update_layout(hovermode="closest")
    named = "; ".join(f"{label}: {show(good)} for {show(cost)}" for cost, good, label, _ in best)
    return Plot(figure=figure, title=f"{y} for {x}", alt=f"Not beaten: {named}.", caption="A point a run.")
