"""Plots of one run, each with a text alternative for readers who cannot see it."""

import math

from fedveil.report.drawing import (
    PALETTE,
    Plot,
    empty_figure,
    label_text,
    line,
    log_y,
    ribbon,
    show,
    show_delta,
    show_epsilon,
    words,
)
from fedveil.report.run_data import RunData
from fedveil.run.folder.documents import NORM_LEVELS, Diagnostics, Spectrum

_SILO_NAMES_SHOWN = 40
_LONGEST_LABEL = 18


def metric_curve(run: RunData, metric: str) -> Plot:
    """Plot a test metric over rounds."""
    points = [(row.round, row.test[metric]) for row in run.rounds if metric in row.test]
    figure = empty_figure(x="round", y=f"test {words(metric)}")
    line(figure, 0, name=words(metric), points=points)
    (first, start), (last, end) = points[0], points[-1]
    if all(
        value == start for _, value in points
    ):  # plotly's automatic axis around a constant would extend far beyond the metric's range
        figure.update_yaxes(range=[start - 0.05, start + 0.05])
    span = f"from {show(start)} at round {first} to {show(end)} at round {last}"
    return Plot(
        figure=figure,
        title=f"Test {words(metric)}",
        alt=f"Line: test {words(metric)} goes {span}.",
        caption=f"On held-out test data, {span}.",
    )


def epsilon_curve(run: RunData) -> Plot:
    """Plot the epsilon spent up to each round."""
    rows = [row for row in run.rounds if math.isfinite(row.epsilon)]
    figure = empty_figure(x="round", y="ε spent")
    figure.update_yaxes(rangemode="tozero")
    line(figure, 1, name="ε", points=[(row.round, row.epsilon) for row in rows])
    end = f"ε = {show_epsilon(rows[-1].epsilon)}{_delta(run)} after {rows[-1].round} rounds"
    return Plot(
        figure=figure,
        title="Privacy spent",
        alt=f"Line: the privacy spent grows with the rounds to {end}.",
        caption=f"Cumulative, for one {run.statement.unit}: {end}.",
    )


def privacy_utility(run: RunData, metric: str) -> Plot:
    """Plot a test metric against the epsilon spent up to the same round."""
    rows = [row for row in run.rounds if metric in row.test and math.isfinite(row.epsilon)]
    figure = empty_figure(x="ε spent", y=f"test {words(metric)}")
    figure.update_layout(hovermode="closest")
    line(
        figure,
        2,
        name=words(metric),
        points=[(row.epsilon, row.test[metric]) for row in rows],
        text=[f"round {row.round}" for row in rows],
    )
    price = f"ε = {show_epsilon(rows[-1].epsilon)}{_delta(run)}"
    end = f"test {words(metric)} {show(rows[-1].test[metric])} for {price}"
    return Plot(
        figure=figure,
        title=f"What privacy bought: {words(metric)} against ε",
        alt=f"Line: test {words(metric)} against the privacy spent, ending at {end}.",
        caption=f"One point per round; the last is {end}.",
    )


def spectrum(data: Spectrum) -> Plot:
    """Plot the magnitude of (last model - first model) by frequency, on two logarithmic axes."""
    figure = empty_figure(x="frequency (cycles over the parameter vector)", y="magnitude")
    shown = [
        (x, y) for x, y in zip(data.frequencies, data.magnitudes, strict=True) if math.isfinite(y) and y > 0
    ]
    line(figure, 4, name="magnitude", points=shown)
    figure.update_xaxes(type="log")
    log_y(figure, [y for _, y in shown])
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
    """Plot the deciles of the number of records of a user, over all silos."""
    users = diagnostics.records_per_user
    quantiles = users.quantiles
    share = [10 * decile for decile in range(len(quantiles))]
    figure = empty_figure(x="users with at most this many records (%)", y="records")
    line(figure, 0, name="records of a user", points=zip(share, quantiles, strict=True))
    figure.update_traces(mode="lines+markers")
    figure.update_yaxes(rangemode="tozero")
    present = f"{show(users.users_with_records)} of {show(users.users)} users have records"
    spread = f"the median user has {show(quantiles[5])}, the largest {show(quantiles[-1])}"
    return Plot(
        figure=figure,
        title="Records per user",
        alt=f"Line of deciles: {spread}.",
        caption=f"{present}; {spread}.",
    )


def records_per_silo(diagnostics: Diagnostics) -> Plot:
    """Plot the number of records of each silo; silos are numbered if they are too many to name."""
    counts = diagnostics.records_per_silo
    named = len(counts) <= _SILO_NAMES_SHOWN
    figure = empty_figure(x="silo", y="records")
    figure.update_layout(hovermode="closest", showlegend=False)
    figure.add_bar(
        x=list(range(len(counts))),
        y=list(counts),
        text=[label_text(name) for name in diagnostics.silo_names],
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
    """Plot quantiles of the contributions' l2 norms before clipping, with the clip bound C."""
    rows = [row for row in run.rounds if row.norms is not None]
    rounds = [row.round for row in rows]
    levels = {
        level: [row.norms[i] for row in rows if row.norms is not None] for i, level in enumerate(NORM_LEVELS)
    }
    figure = empty_figure(x="round", y="l2 norm of a contribution")
    for low, high, opacity in ((0.0, 1.0, 0.10), (0.1, 0.9, 0.16), (0.25, 0.75, 0.28)):
        name = "all" if low == 0 else f"{low:.0%} to {high:.0%}"
        ribbon(
            figure, 0, name=name, points=zip(rounds, levels[low], levels[high], strict=True), opacity=opacity
        )
    line(figure, 0, name="median", points=zip(rounds, levels[0.5], strict=True))
    clips = [math.nan if row.clip is None else row.clip for row in rows]
    positive = [value for values in (*levels.values(), clips) for value in values if value > 0]
    # On a linear axis, norms that differ by more than a factor of 30 would hide the smaller ones.
    if positive and max(positive) > 30 * min(positive):
        log_y(figure, positive)
    bound = next((clip for clip in reversed(clips) if not math.isnan(clip)), None)
    ending = f"the median of {show(rows[-1].contributions)} is {show(levels[0.5][-1])} at round {rounds[-1]}"
    if bound is not None:
        line(figure, 1, name="clip bound C", points=zip(rounds, clips, strict=True), dash="dash")
        ending += f", the clip bound {show(bound)}"
    return Plot(
        figure=figure,
        title="Contribution norms before clipping",
        alt=f"Ribbons of quantiles over rounds: {ending}.",
        caption=f"Ribbons hold all, 80% and half of the contributions; {ending}.",
    )


def clipped_fraction(run: RunData) -> Plot:
    """Plot the fraction of clipped contributions over rounds."""
    points = [(row.round, row.clipped) for row in run.rounds if row.clipped is not None]
    figure = empty_figure(x="round", y="fraction clipped")
    figure.update_yaxes(range=[0, 1.02], tickformat=".0%")
    line(figure, 1, name="clipped", points=points)
    ending = f"{points[-1][1]:.0%} of the contributions met the bound at round {points[-1][0]}"
    return Plot(
        figure=figure,
        title="Contributions clipped",
        alt=f"Line: {ending}.",
        caption=f"{ending}. Near 100% the bound, not the data, sets the length of an update.",
    )


def bits_a_parameter(run: RunData) -> Plot:
    """Plot the bits per parameter of all messages over rounds, with the information limit of the updates."""
    sent = [(row.round, row.communication_cost) for row in run.rounds if row.communication_cost is not None]
    bits = [(number, cost.bits_per_parameter) for number, cost in sent]
    limits = [(number, cost.limit) for number, cost in sent if cost.limit is not None]
    figure = empty_figure(x="round", y="bits per parameter")
    line(figure, 0, name="messages", points=bits)
    ending = f"{show(bits[-1][1])} bits per parameter at round {bits[-1][0]}"
    if limits:
        line(figure, 1, name="information limit", points=limits, dash="dash")
        ending += f", the limit {show(limits[-1][1])}"
    log_y(figure, [value for _, value in (*bits, *limits) if value > 0])
    total = sum(row.bytes_up or 0 for row in run.rounds)
    plain = sum(cost.float32_bytes for _, cost in sent)
    fewer = f", {show(plain / total)} times fewer than the same in float32" if total else ""
    return Plot(
        figure=figure,
        title="Cost of communication",
        alt=f"Lines on a logarithmic axis: {ending}.",
        caption=f"{ending}. All messages together: {show(total)} bytes{fewer}.",
    )


def acceptance(run: RunData) -> Plot:
    """Plot the acceptance rate of the quantisers' draws over rounds."""
    points = [
        (row.round, row.communication_cost.acceptance)
        for row in run.rounds
        if row.communication_cost is not None and row.communication_cost.acceptance is not None
    ]
    figure = empty_figure(x="round", y="share of draws accepted")
    figure.update_yaxes(range=[0, 1.02], tickformat=".0%")
    line(figure, 2, name="accepted", points=points)
    ending = f"{points[-1][1]:.1%} of the draws were accepted at round {points[-1][0]}"
    return Plot(
        figure=figure,
        title="Acceptance rate of the quantisers",
        alt=f"Line: {ending}.",
        caption=f"{ending}. A draw is a dither, or a shared candidate where a block selects among them.",
    )


def _delta(run: RunData) -> str:
    return f" at δ = {show_delta(run.statement.delta)}"


def _short(name: str) -> str:
    return label_text(name if len(name) <= _LONGEST_LABEL else name[: _LONGEST_LABEL - 1] + "…")
