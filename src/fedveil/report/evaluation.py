"""Section of a run's report on released test metrics: table, ROC curve and calibration."""

from __future__ import annotations

from collections.abc import Iterator

from fedveil.report.document import Section, notice, table
from fedveil.report.drawing import Axis, Plot, line
from fedveil.report.run_data import RunData
from fedveil.report.statistics import HEAD, row_cells
from fedveil.statistics.evaluation.result import ReleasedEvaluation


def evaluation_section(run: RunData) -> Section | None:
    """Return the section of released test metrics; None without them.

    Released metrics are noisy, have intervals, and are covered by the statement.
    """
    found = run.evaluated
    if found is None:
        return None
    rows = [row_cells(row) for row in found.rows]
    return Section(
        identifier="evaluation",
        title="Test metrics",
        remarks=notice(
            f"Released once, of the model after round {found.round}: every figure follows from noisy sums over "
            "held-out people, and is covered by the statement.",
            kind="note",
        ),
        plots=list(_plots(found)),
        body=table(
            HEAD, rows, caption="Every figure with its interval for the population these people come from"
        ),
    )


def _plots(found: ReleasedEvaluation) -> Iterator[Plot]:
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
