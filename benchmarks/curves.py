"""The page of a benchmark whose rows are points of curves: one plot per axis, with a fitted line for each curve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedveil.report.document import Section, document, table, write_document
from fedveil.report.drawing import Axis, Plot, Series, line, show


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
            Section(identifier="curves", title="Curves", plots=plots, wide=True),
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
    unit, told = rows[0]["unit"], []
    drawn: list[Series] = []
    for index, curve in enumerate(dict.fromkeys(row["place"]["curve"] for row in rows)):
        points = [Point(x=row["place"]["x"], y=row["ours"]) for row in rows if row["place"]["curve"] == curve]
        fitted = fit(points)
        shown = [
            x
            for x in np.geomspace(points[0].x, points[-1].x, 60).tolist()
            if fitted.intercept + fitted.slope * x > 0
        ]
        line_points = [(x, fitted.intercept + fitted.slope * x) for x in shown]
        drawn.append(line(index, name="", points=line_points, dash="dash"))
        drawn.append(line(index, name=curve, points=[(one.x, one.y) for one in points], mark="points"))
        told.append(f"{curve}: {show(fitted.intercept)} s + {show(fitted.slope * 1e3)} ms for each")
    return Plot(
        title=f"{unit} against {axis}",
        alt=f"Points and fitted lines on logarithmic axes. {'; '.join(told)}.",
        caption=f"Points are measured; dashed lines are fitted (least squares of relative errors). {'; '.join(told)}.",
        x=Axis(title=axis, log=True),
        y=Axis(title=unit, log=True),
        series=tuple(drawn),
    )
