"""The section of a run's report on released test metrics: the table, the ROC curve and the calibration."""

from __future__ import annotations

from collections.abc import Iterator

from fedveil.report.document import Section, figures, notice, table
from fedveil.report.drawing import Plot, blank, line, show
from fedveil.report.run_data import RunData
from fedveil.report.statistics import HEAD, row_cells
from fedveil.statistics.evaluated import Evaluated


def evaluation_section(run: RunData) -> Section | None:
    """Released test metrics: noisy, with intervals, and covered by the statement."""
    found = run.evaluated
    if found is None:
        return None
    rows = [row_cells(row) for row in found.rows]
    return Section(
        identifier="evaluation",
        title="Test metrics",
        body=notice(
            f"Released once, of the model after round {found.round}: every figure follows from two noisy sums over "
            "held-out people, and is covered by the statement.",
            kind="note",
        )
        + figures(list(_plots(found)))
        + table(
            HEAD, rows, caption="Every figure with its interval for the population these people come from"
        ),
    )


def _plots(found: Evaluated) -> Iterator[Plot]:
    points = [
        (false.estimate, true.estimate)
        for _, false, true in found.roc
        if false is not None and true is not None
    ]
    area = found.headline.get("auc")
    if points and area is not None:
        figure = blank(x="false positive rate", y="true positive rate")
        line(figure, 0, name="model", points=[(0.0, 0.0), *points, (1.0, 1.0)])
        yield Plot(
            figure=figure,
            title="ROC",
            alt=f"A curve from (0, 0) to (1, 1); the area under it is {show(area)}.",
            caption=f"Noisy rates at the edges of the bins; the area under the curve is {show(area)}.",
        )
    shares = [(mean, interval.estimate) for mean, interval in found.calibration if interval is not None]
    if shares:
        figure = blank(x="predicted probability of class 1", y="observed share")
        line(figure, 0, name="calibrated", points=[(0.0, 0.0), (1.0, 1.0)])
        line(figure, 1, name="model", points=shares)
        yield Plot(
            figure=figure,
            title="Calibration",
            alt=f"Observed shares of class 1 beside predicted ones, in {len(shares)} bins.",
            caption="Noisy shares in bins of the score; a calibrated model lies on the diagonal.",
        )
