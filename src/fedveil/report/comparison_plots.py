"""Plots that compare runs: variants, planned budgets, and the values of a swept key."""

from collections.abc import Mapping, Sequence

from fedveil.report.drawing import Axis, Curve, Plot, Series, band, dash_of, endings, line, show, words

_BANDS = "bands are one sample standard deviation over seeds."


def _bands(curves: Sequence[Curve]) -> tuple[Series, ...]:
    return tuple(series for curve in curves for series in band(curve))


def compared_by_round(curves: Sequence[Curve], metric: str) -> Plot:
    """Plot a test metric over rounds: one curve per variant, with a band of one standard deviation."""
    return Plot(
        title=f"Test {words(metric)} by round",
        alt="Lines with bands, one a variant. " + endings(curves),
        caption=f"Mean over seeds; {_BANDS}",
        x=Axis(title="round"),
        y=Axis(title=f"test {words(metric)}"),
        series=_bands(curves),
    )


def compared_by_epsilon(
    private: Sequence[Curve], unprotected: Sequence[Curve], metric: str, *, measured_by: str
) -> Plot:
    """Plot privacy-utility curves: a test metric against epsilon, for at least one private variant.

    A variant without a guarantee has infinite epsilon, and is drawn as a dashed line at its last mean.

    Args:
        private: curves of the variants with a guarantee.
        unprotected: curves of the variants without a guarantee.
        metric: the test metric.
        measured_by: unit of privacy of epsilon, for the axis.
    """
    spent = [x for curve in private for x in curve.x]
    span = [0.0, min((x for x in spent if x > 0), default=1.0), max(spent)]  # zero is off a logarithmic axis
    levels = tuple(
        line(
            curve.colour,
            name=f"{curve.label} (ε = ∞)",
            points=[(x, curve.mean[-1]) for x in span],
            dash="dash",
        )
        for curve in unprotected
    )
    note = " Dashed: no guarantee (ε = ∞), the last round's mean." if unprotected else ""
    return Plot(
        title=f"Privacy and utility: test {words(metric)} against ε",
        alt="Lines with bands, one a variant. " + endings([*private, *unprotected]),
        caption=f"One point per round; {_BANDS}{note}",
        x=_cost_axis(private, f"ε spent ({measured_by})"),
        y=Axis(title=f"test {words(metric)}"),
        series=(*_bands(private), *levels),
    )


def _cost_axis(curves: Sequence[Curve], title: str) -> Axis:
    """Return the axis of a cost: logarithmic if one curve ends at more than 20 times the cost of another."""
    ends = [curve.x[-1] for curve in curves]
    return Axis(title=title, log=max(ends) > 20 * min(ends))


def compared_by_communication(curves: Sequence[Curve], metric: str) -> Plot:
    """Plot rate-accuracy curves: a test metric against the MiB sent to the server so far."""
    return Plot(
        title=f"Rate and accuracy: test {words(metric)} against the cost of communication",
        alt="Lines with bands, one a variant. " + endings(curves),
        caption=f"One point per round; {_BANDS}",
        x=_cost_axis(curves, "MiB sent to the server, all messages so far"),
        y=Axis(title=f"test {words(metric)}"),
        series=_bands(curves),
    )


def plan_curves(curves: Sequence[Curve], *, axis: str, log: bool) -> Plot:
    """Plot epsilon against one planned quantity: one curve for every setting of the other quantities."""
    return Plot(
        title=f"ε against {axis}",
        alt=f"Lines: epsilon against {axis}. " + endings(curves),
        caption="Logarithmic vertical axis; every point is a row of the table.",
        x=Axis(title=axis, log=log),
        y=Axis(title="ε", log=True),
        series=tuple(series for curve in curves for series in band(curve, mark="line and points")),
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
    drawn = [(index, label, points) for index, (label, points) in enumerate(lines.items()) if points]
    place = {value: number for number, value in enumerate(values)}
    alt = " ".join(
        f"A line{f' ({label})' if label else ''} from {show(points[0][1])} at {points[0][0]}"
        f" to {show(points[-1][1])} at {points[-1][0]}."
        for _, label, points in drawn
    )
    caption = "Mean over runs that differ in their seeds alone."
    if len(drawn) > 1:
        caption = f"One line for each combination of the other settings. {caption}"
    return Plot(
        title=f"{y} against {key}",
        alt=alt,
        caption=caption,
        x=Axis(title=key, categories=tuple(values)),
        y=Axis(title=y),
        series=tuple(
            line(
                index,
                name=label or y,
                points=[(place[value], mean) for value, mean in points],
                dash=dash_of(index),
                mark="line and points",
            )
            for index, label, points in drawn
        ),
    )


def pareto(points: Sequence[tuple[float, float, str, bool]], *, x: str, y: str) -> Plot:
    """Plot every run by cost and result, with the Pareto front joined by a line.

    Args:
        points: (cost, result, label, whether the run is on the front) of every run.
        x: name of the cost.
        y: name of the result.
    """
    best = sorted(point for point in points if point[3])
    beaten = [point for point in points if not point[3]]
    named = "; ".join(f"{label}: {show(good)} for {show(cost)}" for cost, good, label, _ in best)
    return Plot(
        title=f"{y} for {x}",
        alt=f"Not beaten: {named}.",
        caption="A point a run.",
        x=Axis(title=x),
        y=Axis(title=y),
        series=(
            line(
                0,
                name="no run beats it",
                points=[point[:2] for point in best],
                labels=[point[2] for point in best],
                mark="line and points",
            ),
            line(
                1,
                name="beaten",
                points=[point[:2] for point in beaten],
                labels=[point[2] for point in beaten],
                mark="points",
            ),
        ),
    )
