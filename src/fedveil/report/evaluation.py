"""Section of a run's report on released test metrics: table, ROC curve and calibration."""

from __future__ import annotations

from collections.abc import Iterator

from fedveil.report.document import Section, figures, notice, table
from fedveil.report.drawing import Plot, empty_figure, line
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
        body=notice(
            f"Released once, of the model after round {found.round}: every figure follows from noisy sums over "
            "held-out people, and is covered by the statement.",
            kind="note",
        )
        + figures(list(_plots(found)))
        + table(
            HEAD, rows, caption="Every figure with its interval for the population these people come from"
        ),
    )


def _plots(found: ReleasedEvaluation) -> Iterator[Plot]:
    for one in found.drawings:
        figure = empty_figure(x=one.x, y=one.y)
        line(figure, 0, name=one.line_name, points=list(one.line))
        line(figure, 1, name="model", points=list(one.points))
        yield Plot(
            figure=figure,
            title=one.title,
            alt=f"{one.title}: {len(one.points)} noisy points beside a line for {one.line_name}.",
            caption=one.caption,
        )
