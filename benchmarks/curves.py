"""The page of a benchmark whose rows are points of curves: one plot per axis, with a fitted line for each curve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedveil.report.document import Section, document, figures, table, write_document
from fedveil.report.drawing import PALETTE, Plot, empty_figure, label_text, log_y, show


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a row's figure stands: which plot (the words of its horizontal axis), which curve, and at what x."""

    plot: str
    curve: str
    x: float


@dataclass(frozen=True, kw_only=True)
class Point:
    """One measured point."""

    x: float
    y: float


@dataclass(frozen=True, kw_only=True)
class Line:
    """y = intercept + slope x."""

    intercept: float
    slope: float


def fit(points: Sequence[Point]) -> Line:
    """Return the line with the least squares of relative errors: small points count as much as large ones."""
    x, y = np.array([point.x for point in points], dtype=float), np.array([point.y for point in points])
    slope, intercept = np.polyfit(x, y, 1, w=1 / y)
    return Line(intercept=float(intercept), slope=float(slope))


def write_page(bench: Mapping[str, Any], path: Path) -> Path:
    """Write the page of what ``fedveil bench NAME --json`` prints.

    Raises:
        ValueError: no row is a point of a curve.
        RunFolderError: the file cannot be written.
    """
    placed = [row for row in bench["rows"] if row["place"]]
    if not placed:
        raise ValueError(f"the benchmark {bench['name']} measured no curve")
    names = list(dict.fromkeys(row["place"]["plot"] for row in placed))
    plots = [_plot(name, [row for row in placed if row["place"]["plot"] == name]) for name in names]
    machine = bench["machine"]
    rows = [[row["case"], row["unit"], show(row["ours"])] for row in bench["rows"]]
    page = document(
        title=f"Benchmark {bench['name']}",
        kicker="fedveil · bench",
        lead=f"Measured on {machine['cores']} cores of {machine['processor']}; CPU seconds of one core.",
        sections=[
            Section(identifier="curves", title="Curves", body=figures(plots, wide=True)),
            Section(
                identifier="rows",
                title="Every figure",
                body=table(["case", "unit", "figure"], rows, caption="Rows"),
            ),
        ],
    )
    return write_document(path, page)


def _plot(axis: str, rows: Sequence[Mapping[str, Any]]) -> Plot:
    """Points and fitted lines on logarithmic axes."""
    unit = rows[0]["unit"]
    figure = empty_figure(x=axis, y=unit)
    figure.update_layout(height=460, hovermode="closest")
    told = []
    for index, curve in enumerate(dict.fromkeys(row["place"]["curve"] for row in rows)):
        points = [Point(x=row["place"]["x"], y=row["ours"]) for row in rows if row["place"]["curve"] == curve]
        line, colour = fit(points), PALETTE[index % len(PALETTE)]
        figure.add_scatter(
            x=[point.x for point in points],
            y=[point.y for point in points],
            name=label_text(curve),
            mode="markers",
            marker={"color": colour, "size": 9},
        )
        drawn = [
            x for x in np.geomspace(points[0].x, points[-1].x, 60) if line.intercept + line.slope * x > 0
        ]
        figure.add_scatter(
            x=drawn,
            y=[line.intercept + line.slope * x for x in drawn],
            showlegend=False,
            hoverinfo="skip",
            mode="lines",
            line={"color": colour, "dash": "dash", "width": 1.75},
        )
        told.append(f"{curve}: {show(line.intercept)} s + {show(line.slope * 1e3)} ms for each")
    figure.update_xaxes(type="log", dtick=1)
    log_y(figure, [row["ours"] for row in rows])
    return Plot(
        figure=figure,
        title=f"{unit} against {axis}",
        alt=f"Points and fitted lines on logarithmic axes. {'; '.join(told)}.",
        caption=f"Points are measured; dashed lines are fitted (least squares of relative errors). {'; '.join(told)}.",
    )
