"""Curves by round as SVG, drawn from result files alone: a panel for each group of cells, a line for every cell.

A line is the mean over the runs of a cell, the band around it one standard deviation (n - 1) to each side, a ring a
point that was read from the published figure. Cells with too few runs for the page are not drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from fedveil.report.drawing import PALETTE
from reproduction.results import Results, Run
from reproduction.run_counts import LEAST_RUNS, cells_with_runs
from reproduction.table import Table
from reproduction.verdicts import summary

_WIDTH, _HEIGHT, _COLUMNS = 300, 200, 3
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 10, 26, 34
_LEGEND, _ENTRY = 22, 150
_DASHES: Final = ("", "6 3", "2 2")
_TICKS: Final = 5


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One cell over rounds.

    Attributes:
        label: what tells it from the others of its panel.
        points: (round, mean, standard deviation) in order.
        published: (round, value) as they were read.
    """

    label: str
    points: tuple[tuple[int, float, float], ...]
    published: tuple[tuple[int, float], ...]


Panels = dict[str, tuple[Curve, ...]]


def panels_of(table: Table, name: str, results: Results) -> Panels:
    """Return the curves of one evaluated value, panel by panel; panels without any are left out."""
    cells = cells_with_runs(table, results, LEAST_RUNS)
    found: Panels = {}
    for beginning in table.panels:
        prefix = f"{beginning}-" if beginning else ""
        own = [cell for cell in cells if cell.startswith(prefix)]
        curves = [_curve(table, name, cell, cell.removeprefix(prefix), results) for cell in own]
        if drawn := tuple(curve for curve in curves if len(curve.points) > 1):
            found[beginning] = drawn
    return found


def _curve(table: Table, name: str, cell: str, label: str, results: Results) -> Curve:
    unit = 100.0 if table.percent and name == table.value else 1.0
    runs = [dict(_points(table, name, run)) for run in results.runs_of(cell)]
    shared = sorted(set.intersection(*(set(run) for run in runs)))
    points = []
    for number in shared:
        values = [value * unit for run in runs if (value := run[number]) is not None]
        if len(values) == len(runs):
            one = summary(values)
            points.append((number, one.mean, one.sd or 0.0))
    published = table.published_curves.get(cell, ()) if name == table.value else ()
    return Curve(label=label, points=tuple(points), published=published)


def _points(table: Table, name: str, run: Run) -> list[tuple[int, float | None]]:
    """Return what a run kept of a value by round; its last round is its value, where that is no mean of several."""
    points = list(run.curve.get(name, ()))
    if points and table.last == 1 and name in run.values:
        points.append((int(run.values["rounds"] or 0), run.values[name]))
    return points


def svg(panels: Panels, value: str) -> str:
    """Return the figure; at least one panel.

    Args:
        panels: by title, which may be empty.
        value: what the vertical axes show, in words.
    """
    labels = list(dict.fromkeys(curve.label for curves in panels.values() for curve in curves))
    columns = min(_COLUMNS, len(panels))
    width = max(columns * _WIDTH, 2 * _ENTRY)
    a_row = width // _ENTRY
    legend = _LEGEND * math.ceil(len(labels) / a_row)
    height = legend + _HEIGHT * math.ceil(len(panels) / columns)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">',
        f"<title>{escape(value)} by round</title>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for place, label in enumerate(labels):
        x, y = 8 + _ENTRY * (place % a_row), 14 + _LEGEND * (place // a_row)
        lines.append(f'<path d="M{x} {y}h18" {_stroke(place)}/>')
        lines.append(f'<text x="{x + 23}" y="{y + 4}">{escape(label)}</text>')
    for place, (title, curves) in enumerate(panels.items()):
        corner = _WIDTH * (place % columns), legend + _HEIGHT * (place // columns)
        lines += _panel(title, curves, labels, value, corner)
    return "\n".join([*lines, "</svg>"]) + "\n"


def _panel(
    title: str, curves: Sequence[Curve], labels: Sequence[str], value: str, corner: tuple[int, int]
) -> list[str]:
    left, right = corner[0] + _LEFT, corner[0] + _WIDTH - _RIGHT
    top, bottom = corner[1] + _TOP, corner[1] + _HEIGHT - _BOTTOM
    last = max(number for curve in curves for number, *_ in (*curve.points, *curve.published))
    ends = [end for curve in curves for _, mean, sd in curve.points for end in (mean - sd, mean + sd)]
    ends += [at for curve in curves for _, at in curve.published]
    low, high = min(ends), max(ends)
    high = high if high > low else low + 1.0

    def x(number: float) -> str:
        return f"{left + (right - left) * number / last:.1f}"

    def y(at: float) -> str:
        return f"{bottom - (bottom - top) * (at - low) / (high - low):.1f}"

    lines = [f'<text x="{left}" y="{top - 8}">{escape(f"{title}: " if title else "")}{escape(value)}</text>']
    for tick in _ticks(low, high):
        lines.append(f'<path d="M{left} {y(tick)}H{right}" stroke="#ddd"/>')
        lines.append(f'<text x="{left - 5}" y="{float(y(tick)) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for tick in _ticks(0, last):
        lines.append(f'<path d="M{x(tick)} {bottom}v4" stroke="#888"/>')
        lines.append(f'<text x="{x(tick)}" y="{bottom + 16}" text-anchor="middle">{tick:g}</text>')
    lines.append(f'<text x="{right}" y="{bottom + 29}" text-anchor="end">round</text>')
    lines.append(f'<path d="M{left} {bottom}H{right}" stroke="#888"/>')
    for curve in curves:
        place = labels.index(curve.label)
        colour = PALETTE[place % len(PALETTE)]
        up = [f"{x(number)} {y(mean + sd)}" for number, mean, sd in curve.points]
        down = [f"{x(number)} {y(mean - sd)}" for number, mean, sd in reversed(curve.points)]
        lines.append(f'<path d="M{"L".join(up + down)}Z" fill="{colour}" fill-opacity="0.15"/>')
        path = "L".join(f"{x(number)} {y(mean)}" for number, mean, _ in curve.points)
        lines.append(f'<path d="M{path}" {_stroke(place)}/>')
        lines += [
            f'<circle cx="{x(number)}" cy="{y(at)}" r="3" fill="none" stroke="{colour}"/>'
            for number, at in curve.published
        ]
    return lines


def _stroke(place: int) -> str:
    dash = _DASHES[place // len(PALETTE) % len(_DASHES)]
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'fill="none" stroke="{PALETTE[place % len(PALETTE)]}" stroke-width="1.6"{dashed}'


def _ticks(low: float, high: float) -> list[float]:
    """Return round numbers from low to high, about as many as fit.

    >>> _ticks(0, 80)
    [0.0, 20.0, 40.0, 60.0, 80.0]
    """
    rough = (high - low) / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]
