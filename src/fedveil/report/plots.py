"""Plots of one run and of several, each with a text alternative for readers who cannot see it."""

import math
from collections.abc import Mapping, Sequence

from fedveil.report.drawing import (
    Axis,
    Curve,
    Plot,
    Series,
    band,
    dash_of,
    endings,
    line,
    ribbon,
    show,
    show_delta,
    show_epsilon,
    words,
)
from fedveil.report.run_data import RunData
from fedveil.run.folder.documents import NORM_LEVELS, Diagnostics, PublicTest, Spectrum

# --- plots of one run ---

_SILO_NAMES_SHOWN = 40


def metric_curve(run: RunData, metric: str) -> Plot:
    """Plot a test metric over rounds."""
    points = [(row.round, row.test[metric]) for row in run.rounds if metric in row.test]
    (first, start), (last, end) = points[0], points[-1]
    span = f"from {show(start)} at round {first} to {show(end)} at round {last}"
    return Plot(
        title=f"Test {words(metric)}",
        alt=f"Line: test {words(metric)} goes {span}.",
        caption=f"On {run.tested_on}, {span}.",
        x=Axis(title="round"),
        y=Axis(title=_tested(run, metric)),
        series=(line(0, name=words(metric), points=points),),
    )


def _tested(run: RunData, metric: str) -> str:
    """Return the title of a metric's axis; the files of a plot have no caption that says what covers it."""
    return f"test {words(metric)}{'' if run.public_test is not None else ' (exact, not covered)'}"


def epsilon_curve(run: RunData) -> Plot:
    """Plot the epsilon spent up to each round."""
    rows = [row for row in run.rounds if math.isfinite(row.epsilon)]
    end = f"ε = {show_epsilon(rows[-1].epsilon)}{_delta(run)} after {rows[-1].round} rounds"
    return Plot(
        title="Privacy spent",
        alt=f"Line: the privacy spent grows with the rounds to {end}.",
        caption=f"Cumulative, for one {run.statement.unit}: {end}.",
        x=Axis(title="round"),
        y=Axis(title="ε spent", zero=True),
        series=(line(1, name="ε", points=[(row.round, row.epsilon) for row in rows]),),
    )


def privacy_utility(run: RunData, metric: str) -> Plot:
    """Plot a test metric against the epsilon spent up to the same round."""
    rows = [row for row in run.rounds if metric in row.test and math.isfinite(row.epsilon)]
    price = f"ε = {show_epsilon(rows[-1].epsilon)}{_delta(run)}"
    end = f"test {words(metric)} {show(rows[-1].test[metric])} for {price}"
    return Plot(
        title=f"What privacy bought: {words(metric)} against ε",
        alt=f"Line: test {words(metric)} against the privacy spent, ending at {end}.",
        caption=f"One point per round; the last is {end}.",
        x=Axis(title="ε spent"),
        y=Axis(title=_tested(run, metric)),
        series=(
            line(
                2,
                name=words(metric),
                points=[(row.epsilon, row.test[metric]) for row in rows],
                labels=[f"round {row.round}" for row in rows],
            ),
        ),
    )


def roc(test: PublicTest) -> Plot:
    """Plot the ROC curve of the released model on public test records."""
    return Plot(
        title="ROC curve",
        alt=f"Line of {len(test.roc)} points beside the diagonal of chance.",
        caption=f"The released model on {show(test.records)} public test records; chance is the diagonal.",
        x=Axis(title="false positive rate", bounds=(0, 1)),
        y=Axis(title="true positive rate", bounds=(0, 1)),
        series=(
            line(6, name="chance", points=[(0, 0), (1, 1)], dash="dash"),
            line(0, name="model", points=test.roc),
        ),
    )


def calibration(test: PublicTest) -> Plot:
    """Plot observed fractions against predicted probabilities on public test records."""
    shown = [(entry.predicted, entry.observed) for entry in test.calibration]
    return Plot(
        title="Calibration",
        alt=f"{len(shown)} points beside the diagonal of a calibrated model.",
        caption="Predicted probability of the second class against the fraction observed, in ten bins of equal width.",
        x=Axis(title="predicted probability", bounds=(0, 1)),
        y=Axis(title="observed fraction", bounds=(0, 1)),
        series=(
            line(6, name="calibrated", points=[(0, 0), (1, 1)], dash="dash"),
            line(
                0,
                name="model",
                points=shown,
                mark="line and points",
                labels=[f"{show(entry.weight)} records" for entry in test.calibration],
            ),
        ),
    )


def spectrum(data: Spectrum) -> Plot:
    """Plot the magnitude of (last model - first model) by frequency, on two logarithmic axes."""
    shown = [
        (x, y) for x, y in zip(data.frequencies, data.magnitudes, strict=True) if math.isfinite(y) and y > 0
    ]
    (first, start), (last, end) = shown[0], shown[-1]
    span = f"from {show(start)} at frequency {show(first)} to {show(end)} at {show(last)}"
    return Plot(
        title="Spectrum of the model's move",
        alt=f"Line on logarithmic axes: the magnitude goes {span}.",
        caption=f"Fourier coefficients of (last model - first model), {span}. Noise alone is flat; what falls with the "
        "frequency is what Laplacian smoothing keeps.",
        x=Axis(title="frequency (cycles over the parameter vector)", log=True),
        y=Axis(title="magnitude", log=True),
        series=(line(4, name="magnitude", points=shown),),
    )


def records_per_user(diagnostics: Diagnostics) -> Plot:
    """Plot the deciles of the number of records of a user, over all silos."""
    users = diagnostics.records_per_user
    quantiles = users.quantiles
    share = [10 * decile for decile in range(len(quantiles))]
    present = f"{show(users.users_with_records)} of {show(users.users)} users have records"
    spread = f"the median user has {show(quantiles[5])}, the largest {show(quantiles[-1])}"
    return Plot(
        title="Records per user",
        alt=f"Line of deciles: {spread}.",
        caption=f"{present}; {spread}.",
        x=Axis(title="users with at most this many records (%)"),
        y=Axis(title="records", zero=True),
        series=(
            line(
                0,
                name="records of a user",
                points=zip(share, quantiles, strict=True),
                mark="line and points",
            ),
        ),
    )


def records_per_silo(diagnostics: Diagnostics) -> Plot:
    """Plot the number of records of each silo; silos are numbered if they are too many to name."""
    counts = diagnostics.records_per_silo
    named = diagnostics.silo_names if len(counts) <= _SILO_NAMES_SHOWN else ()
    extremes = f"{show(min(counts))} to {show(max(counts))} records"
    spread = f"{len(counts)} silos hold {extremes} each, {show(sum(counts))} in all"
    return Plot(
        title="Records per silo",
        alt=f"Bars: {spread}.",
        caption=f"{spread}.",
        x=Axis(title="silo", categories=named),
        y=Axis(title="records", zero=True),
        series=(
            Series(
                name="",
                mark="bars",
                colour=2,
                x=tuple(range(len(counts))),
                y=counts,
                labels=diagnostics.silo_names,
            ),
        ),
    )


def contribution_norms(run: RunData) -> Plot:
    """Plot quantiles of the contributions' l2 norms before clipping, with the clip bound C."""
    rows = [row for row in run.rounds if row.norms is not None]
    rounds = [row.round for row in rows]
    levels = {
        level: [row.norms[i] for row in rows if row.norms is not None] for i, level in enumerate(NORM_LEVELS)
    }
    drawn = [
        ribbon(
            0,
            name="all" if low == 0 else f"{low:.0%} to {high:.0%}",
            points=zip(rounds, levels[low], levels[high], strict=True),
            opacity=opacity,
        )
        for low, high, opacity in ((0.0, 1.0, 0.10), (0.1, 0.9, 0.16), (0.25, 0.75, 0.28))
    ]
    drawn.append(line(0, name="median", points=zip(rounds, levels[0.5], strict=True)))
    clips = [math.nan if row.clip is None else row.clip for row in rows]
    positive = [value for values in (*levels.values(), clips) for value in values if value > 0]
    bound = next((clip for clip in reversed(clips) if not math.isnan(clip)), None)
    ending = f"the median of {show(rows[-1].contributions)} is {show(levels[0.5][-1])} at round {rounds[-1]}"
    if bound is not None:
        drawn.append(line(1, name="clip bound C", points=zip(rounds, clips, strict=True), dash="dash"))
        ending += f", the clip bound {show(bound)}"
    return Plot(
        title="Contribution norms before clipping",
        alt=f"Ribbons of quantiles over rounds: {ending}.",
        caption=f"Ribbons hold all, 80% and half of the contributions; {ending}.",
        x=Axis(title="round"),
        # On a linear axis, norms that differ by more than a factor of 30 would hide the smaller ones.
        y=Axis(title="l2 norm of a contribution", log=bool(positive) and max(positive) > 30 * min(positive)),
        series=tuple(drawn),
    )


def clipped_fraction(run: RunData) -> Plot:
    """Plot the fraction of clipped contributions over rounds."""
    points = [(row.round, row.clipped) for row in run.rounds if row.clipped is not None]
    ending = f"{points[-1][1]:.0%} of the contributions met the bound at round {points[-1][0]}"
    return Plot(
        title="Contributions clipped",
        alt=f"Line: {ending}.",
        caption=f"{ending}. Near 100% the bound, not the data, sets the length of an update.",
        x=Axis(title="round"),
        y=Axis(title="fraction clipped", bounds=(0, 1), percent=True),
        series=(line(1, name="clipped", points=points),),
    )


def bits_a_parameter(run: RunData) -> Plot:
    """Plot the bits per parameter of all messages over rounds, with the information limit of the updates."""
    sent = [(row.round, row.communication_cost) for row in run.rounds if row.communication_cost is not None]
    bits = [(number, cost.bits_per_parameter) for number, cost in sent]
    limits = [(number, cost.limit) for number, cost in sent if cost.limit is not None]
    drawn = [line(0, name="messages", points=bits)]
    ending = f"{show(bits[-1][1])} bits per parameter at round {bits[-1][0]}"
    if limits:
        drawn.append(line(1, name="information limit", points=limits, dash="dash"))
        ending += f", the limit {show(limits[-1][1])}"
    total = sum(row.bytes_up or 0 for row in run.rounds)
    plain = sum(cost.float32_bytes for _, cost in sent)
    fewer = f", {show(plain / total)} times fewer than the same in float32" if total else ""
    return Plot(
        title="Cost of communication",
        alt=f"Lines on a logarithmic axis: {ending}.",
        caption=f"{ending}. All messages together: {show(total)} bytes{fewer}.",
        x=Axis(title="round"),
        y=Axis(title="bits per parameter", log=True),
        series=tuple(drawn),
    )


def acceptance(run: RunData) -> Plot:
    """Plot the acceptance rate of the quantisers' draws over rounds."""
    points = [
        (row.round, row.communication_cost.acceptance)
        for row in run.rounds
        if row.communication_cost is not None and row.communication_cost.acceptance is not None
    ]
    ending = f"{points[-1][1]:.1%} of the draws were accepted at round {points[-1][0]}"
    return Plot(
        title="Acceptance rate of the quantisers",
        alt=f"Line: {ending}.",
        caption=f"{ending}. A draw is a dither, or a shared candidate where a block selects among them.",
        x=Axis(title="round"),
        y=Axis(title="share of draws accepted", bounds=(0, 1), percent=True),
        series=(line(2, name="accepted", points=points),),
    )


def _delta(run: RunData) -> str:
    return f" at δ = {show_delta(run.statement.delta)}"


# --- plots that compare runs ---

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
    positions = {value: number for number, value in enumerate(values)}
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
                points=[(positions[value], mean) for value, mean in points],
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
