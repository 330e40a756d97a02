"""Pages of statistical releases and of regressions, and the section of released test metrics in a run's page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from fedveil.privacy.statement import Statement
from fedveil.report.document import (
    EMPTY,
    Section,
    collapsible,
    document,
    notice,
    parties,
    statement_claim,
    table,
    write_document,
)
from fedveil.report.drawing import Axis, Plot, Series, line, ribbon, show
from fedveil.report.run_data import RunData
from fedveil.run.folder.documents import read_statement
from fedveil.statistics.evaluation.binary import BY_BIN
from fedveil.statistics.evaluation.result import ReleasedEvaluation
from fedveil.statistics.figures import ALL, Row, curves, rows
from fedveil.statistics.inference.newton import Effect
from fedveil.statistics.inference.result import TOO_FEW_HERE, FittedRegression, read_fitted
from fedveil.statistics.intervals import Interval
from fedveil.statistics.request import TOO_FEW
from fedveil.statistics.result import ReleasedStatistics, read_released

HEAD = ("figure", "group", "estimate", "95 % interval", "of these people alone", "width from privacy")


def write_statistics(folder: Path) -> Path:
    """Write `report.html` of a release into its run folder, from the released figures only.

    Raises:
        RunFolderError: the folder has no release or no statement, or cannot be written to.
    """
    return write_document(
        folder / "report.html",
        statistics_page(read_released(folder), read_statement(folder / "privacy.json")),
    )


def statistics_page(released: ReleasedStatistics, statement: Statement) -> str:
    """Return the page of a statistical release as one HTML text."""
    all_rows = rows(released)
    return document(
        title=released.name,
        kicker="fedveil · statistics",
        lead=f"What is counted is {released.counted_unit}. What was promised comes first; what was found comes "
        "after it.",
        sections=[promise(statement), *_releases(released, all_rows)],
    )


def promise(statement: Statement) -> Section:
    """Return the section of the privacy statement."""
    return Section(
        identifier="statement",
        title="Privacy statement",
        body=statement_claim(statement) + parties(statement),
    )


def _releases(released: ReleasedStatistics, rows: Sequence[Row]) -> Iterator[Section]:
    """Yield one section per release, with its plots and its table."""
    for index, name in enumerate(released.request.release):
        own = [row for row in rows if row.release == name]
        yield Section(
            identifier=f"release-{index}",
            title=name,
            plots=list(_plots(released, name, own)),
            body=table(HEAD, [row_cells(row) for row in own], caption=f"All figures of {name}"),
        )


def row_cells(row: Row) -> list[str]:
    """Return the cells of one figure; a figure with too few people has no interval."""
    label = f"{row.figure} {row.cell}".strip()
    interval = row.interval
    if interval is None:
        return [label, row.group, TOO_FEW, "", "", ""]
    ends_here = _ends(interval.low_here, interval.high_here)
    return [
        label,
        row.group,
        interval.in_words(show(interval.estimate)),
        _ends(interval.low, interval.high),
        ends_here,
        f"{interval.privacy:.0%}",
    ]


def _ends(low: float | None, high: float | None) -> str:
    return f"{'open' if low is None else show(low)} to {'open' if high is None else show(high)}"


def _plots(released: ReleasedStatistics, name: str, rows: Sequence[Row]) -> Iterator[Plot]:
    if released.request.release[name].kind == "survival":
        yield from _survival(released, name)
    counts = [row for row in rows if row.figure == "count" and row.group == ALL]
    cells = [(row.cell, row.interval) for row in counts if row.interval is not None]
    if len(cells) > 1:
        yield _bars(name, released.counted_unit, cells)


def _bars(name: str, counted: str, cells: Sequence[tuple[str, Interval]]) -> Plot:
    """Plot the noisy counts of cells with their intervals."""
    most, interval = max(cells, key=lambda cell: cell[1].estimate)
    return Plot(
        title=name,
        alt=f"Bars: {counted} by cell; most are in {most}, {show(interval.estimate)}.",
        caption=f"Noisy counts of {counted} with 95 % intervals for the population; cells with too few are not drawn.",
        x=Axis(title=name, categories=tuple(cell for cell, _ in cells)),
        y=Axis(title=counted, zero=True),
        series=(
            Series(
                name="",
                mark="bars",
                x=tuple(range(len(cells))),
                y=tuple(interval.estimate for _, interval in cells),
                low=tuple(interval.low or 0.0 for _, interval in cells),
                high=tuple(
                    interval.estimate if interval.high is None else interval.high for _, interval in cells
                ),
            ),
        ),
    )


def _survival(released: ReleasedStatistics, name: str) -> Iterator[Plot]:
    """Yield the plot of the Kaplan-Meier curves with their simultaneous bands, if any curve has points."""
    sentences, drawn = [], []
    for index, (group, curve) in enumerate(curves(released, name).items()):
        if not len(curve.grid):
            continue
        # S(t) = 1 with certainty at the start of the grid.
        low, high = (np.concatenate(([1.0], end)).tolist() for end in curve.band())
        start = released.request.release[name].grid[0]  # type: ignore[union-attr]
        times = [start, *curve.grid.tolist()]
        drawn.append(ribbon(index, points=zip(times, low, high, strict=True), opacity=0.16))
        drawn.append(line(index, name=group, points=zip(times, [1.0, *curve.falling.tolist()], strict=True)))
        last = curve.point(len(curve.grid) - 1)
        value = TOO_FEW if last is None else f"{show(last.estimate)} ({_ends(last.low, last.high)})"
        sentences.append(f"{group}: {value} at {show(float(curve.grid[-1]))}")
    if sentences:
        yield Plot(
            title=f"Kaplan-Meier: {name}",
            alt=f"Lines falling from 1; {'; '.join(sentences)}.",
            caption=f"With the simultaneous 95 % band for the population. {'; '.join(sentences)}.",
            x=Axis(title="time"),
            y=Axis(title="surviving", bounds=(0, 1)),
            series=tuple(drawn),
        )


# --- test metrics of a training run ---


def evaluation_section(run: RunData) -> Section | None:
    """Return the section of released test metrics; None without them.

    Released metrics are noisy, have intervals, and are covered by the statement.
    """
    evaluation = run.evaluated
    if evaluation is None:
        return None
    by_bin = [row_cells(row) for row in evaluation.rows if row.figure == BY_BIN]
    rows = [row_cells(row) for row in evaluation.rows if row.figure != BY_BIN]
    bins = collapsible(
        "The calibration as a table", table(HEAD, by_bin, caption="Shares by bin of the score")
    )
    return Section(
        identifier="evaluation",
        title="Test metrics",
        remarks=notice(
            f"Released once, of the model after round {evaluation.round}: every figure follows from noisy sums over "
            "held-out people, and is covered by the statement.",
            kind="note",
        ),
        plots=list(_evaluation_plots(evaluation)),
        body=table(
            HEAD, rows, caption="Figures with their intervals for the population these people come from"
        )
        + (bins if by_bin else EMPTY),
    )


def _evaluation_plots(evaluation: ReleasedEvaluation) -> Iterator[Plot]:
    for drawing in evaluation.drawings:
        yield Plot(
            title=drawing.title,
            alt=f"{drawing.title}: {len(drawing.points)} noisy points beside a line for {drawing.line_name}.",
            caption=drawing.caption,
            x=Axis(title=drawing.x),
            y=Axis(title=drawing.y),
            series=(
                line(6, name=drawing.line_name, points=drawing.line, dash="dash"),
                line(0, name="model", points=drawing.points),
            ),
        )


# --- regressions ---

_RATIOS = {"logistic": "odds ratio", "poisson": "rate ratio", "survival": "hazard ratio"}


def write_inference(folder: Path) -> Path:
    """Write `report.html` of a regression into its run folder, from the released figures only.

    Raises:
        RunFolderError: the folder has no regression or no statement, or cannot be written to.
    """
    fitted = read_fitted(folder)
    page = document(
        title=fitted.name,
        kicker="fedveil · inference",
        lead="What was promised comes first; what was found comes after it.",
        sections=[promise(read_statement(folder / "privacy.json")), _found(fitted)],
    )
    return write_document(folder / "report.html", page)


def p_text(p: float) -> str:
    """Return a p-value in the usual format of publications.

    >>> p_text(3e-7), p_text(0.0456)
    ('< 0.0001', '0.0456')
    """
    return "< 0.0001" if p < 1e-4 else f"{p:.4f}"


def freedom_text(freedom: float) -> str:
    """Return degrees of freedom with three significant digits, and from 100 on as a whole number.

    >>> freedom_text(8.4375), freedom_text(1163.2)
    ('8.44', '1163')
    """
    return f"{freedom:.0f}" if freedom >= 100 else f"{freedom:.3g}"


def _found(fitted: FittedRegression) -> Section:
    family = fitted.family.name
    title = f"{family} regression of {', '.join(fitted.family.columns)}"
    if fitted.hidden_reason is not None:
        return Section(
            identifier="coefficients", title=title, body=notice(fitted.hidden_reason, kind="warning")
        )
    ratio = _RATIOS.get(family)
    head = ["", "coefficient", "95 % interval", *([ratio, "95 % interval"] if ratio else [])]
    body = [_cells(effect) for effect in fitted.effects]
    width = len(body[0])
    body += [[name, TOO_FEW_HERE, *[""] * (width - 2)] for name in fitted.lost]
    drawn = list(_forest([effect for effect in fitted.effects if effect.name in fitted.design.names], ratio))
    return Section(
        identifier="coefficients",
        title=title,
        plots=drawn,
        body=table([*head, "t", "df", "p", "width from privacy"], body, caption="All coefficients"),
    )


def _cells(effect: Effect) -> list[str]:
    ratios = (
        []
        if effect.ratio is None
        else [show(effect.ratio[0]), f"{show(effect.ratio[1])} to {show(effect.ratio[2])}"]
    )
    return [
        effect.name,
        show(effect.estimate),
        f"{show(effect.low)} to {show(effect.high)}",
        *ratios,
        f"{effect.z:.2f}",
        freedom_text(effect.freedom),
        p_text(effect.p),
        f"{effect.privacy:.0%}",
    ]


def _forest(effects: Sequence[Effect], ratio: str | None) -> Iterator[Plot]:
    """Yield a forest plot: coefficients with their intervals, one below the other."""
    if not effects:
        return
    ends = [
        (effect.estimate, effect.low, effect.high) if effect.ratio is None else effect.ratio
        for effect in effects
    ]
    label = ratio or "coefficient"
    estimates = "; ".join(
        f"{effect.name}: {show(value)}" for effect, (value, _, _) in zip(effects, ends, strict=True)
    )
    yield Plot(
        title=label.capitalize(),
        alt=f"Points with intervals, one a coefficient. {estimates}.",
        caption=f"With 95 % intervals for the population, per unit of the column. {estimates}.",
        # No effect is a ratio of 1 or a coefficient of 0; ratios are symmetric on a logarithmic axis.
        x=Axis(title=label, log=ratio is not None, rule=0.0 if ratio is None else 1.0),
        y=Axis(title="", categories=tuple(effect.name for effect in effects)),
        series=(
            Series(
                name="",
                mark="intervals",
                x=tuple(value for value, _, _ in ends),
                y=tuple(range(len(ends))),
                low=tuple(low for _, low, _ in ends),
                high=tuple(high for _, _, high in ends),
            ),
        ),
    )
