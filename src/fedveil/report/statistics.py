"""Page of a statistical release, and the section of released test metrics in the page of a training run."""

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
    found = rows(released)
    return document(
        title=released.name,
        kicker="fedveil · statistics",
        lead=f"What is counted is {released.counted_unit}. What was promised comes first; what was found comes "
        "after it.",
        sections=[promise(statement), *_releases(released, found)],
    )


def promise(statement: Statement) -> Section:
    """Return the section of the privacy statement."""
    return Section(
        identifier="statement",
        title="Privacy statement",
        body=statement_claim(statement) + parties(statement),
    )


def _releases(released: ReleasedStatistics, found: Sequence[Row]) -> Iterator[Section]:
    """Yield one section per release, with its plots and its table."""
    for place, name in enumerate(released.request.release):
        own = [row for row in found if row.release == name]
        yield Section(
            identifier=f"release-{place}",
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
    here = _ends(interval.low_here, interval.high_here)
    return [
        label,
        row.group,
        interval.in_words(show(interval.estimate)),
        _ends(interval.low, interval.high),
        here,
        f"{interval.privacy:.0%}",
    ]


def _ends(low: float | None, high: float | None) -> str:
    return f"{'open' if low is None else show(low)} to {'open' if high is None else show(high)}"


def _plots(released: ReleasedStatistics, name: str, own: Sequence[Row]) -> Iterator[Plot]:
    if released.request.release[name].kind == "survival":
        yield from _survival(released, name)
    counts = [row for row in own if row.figure == "count" and row.group == ALL]
    known = [(row.cell, row.interval) for row in counts if row.interval is not None]
    if len(known) > 1:
        yield _bars(name, released.counted_unit, known)


def _bars(name: str, counted: str, known: Sequence[tuple[str, Interval]]) -> Plot:
    """Plot the noisy counts of cells with their intervals."""
    most, interval = max(known, key=lambda one: one[1].estimate)
    return Plot(
        title=name,
        alt=f"Bars: {counted} by cell; most are in {most}, {show(interval.estimate)}.",
        caption=f"Noisy counts of {counted} with 95 % intervals for the population; cells with too few are not drawn.",
        x=Axis(title=name, categories=tuple(cell for cell, _ in known)),
        y=Axis(title=counted, zero=True),
        series=(
            Series(
                name="",
                mark="bars",
                x=tuple(range(len(known))),
                y=tuple(one.estimate for _, one in known),
                low=tuple(one.low or 0.0 for _, one in known),
                high=tuple(one.estimate if one.high is None else one.high for _, one in known),
            ),
        ),
    )


def _survival(released: ReleasedStatistics, name: str) -> Iterator[Plot]:
    """Yield the plot of the Kaplan-Meier curves with their simultaneous bands, if any curve has points."""
    told, drawn = [], []
    for place, (group, curve) in enumerate(curves(released, name).items()):
        if not len(curve.grid):
            continue
        # S(t) = 1 with certainty at the start of the grid.
        low, high = (np.concatenate(([1.0], end)).tolist() for end in curve.band())
        start = released.request.release[name].grid[0]  # type: ignore[union-attr]
        times = [start, *curve.grid.tolist()]
        drawn.append(ribbon(place, points=zip(times, low, high, strict=True), opacity=0.16))
        drawn.append(line(place, name=group, points=zip(times, [1.0, *curve.falling.tolist()], strict=True)))
        last = curve.point(len(curve.grid) - 1)
        value = TOO_FEW if last is None else f"{show(last.estimate)} ({_ends(last.low, last.high)})"
        told.append(f"{group}: {value} at {show(float(curve.grid[-1]))}")
    if told:
        yield Plot(
            title=f"Kaplan-Meier: {name}",
            alt=f"Lines falling from 1; {'; '.join(told)}.",
            caption=f"With the simultaneous 95 % band for the population. {'; '.join(told)}.",
            x=Axis(title="time"),
            y=Axis(title="surviving", bounds=(0, 1)),
            series=tuple(drawn),
        )


# --- test metrics of a training run ---


def evaluation_section(run: RunData) -> Section | None:
    """Return the section of released test metrics; None without them.

    Released metrics are noisy, have intervals, and are covered by the statement.
    """
    found = run.evaluated
    if found is None:
        return None
    by_bin = [row_cells(row) for row in found.rows if row.figure == BY_BIN]
    rows = [row_cells(row) for row in found.rows if row.figure != BY_BIN]
    bins = collapsible(
        "The calibration as a table", table(HEAD, by_bin, caption="Shares by bin of the score")
    )
    return Section(
        identifier="evaluation",
        title="Test metrics",
        remarks=notice(
            f"Released once, of the model after round {found.round}: every figure follows from noisy sums over "
            "held-out people, and is covered by the statement.",
            kind="note",
        ),
        plots=list(_evaluation_plots(found)),
        body=table(
            HEAD, rows, caption="Figures with their intervals for the population these people come from"
        )
        + (bins if by_bin else EMPTY),
    )


def _evaluation_plots(found: ReleasedEvaluation) -> Iterator[Plot]:
    for one in found.drawings:
        yield Plot(
            title=one.title,
            alt=f"{one.title}: {len(one.points)} noisy points beside a line for {one.line_name}.",
            caption=one.caption,
            x=Axis(title=one.x),
            y=Axis(title=one.y),
            series=(
                line(6, name=one.line_name, points=one.line, dash="dash"),
                line(0, name="model", points=one.points),
            ),
        )
