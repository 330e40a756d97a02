"""Writes docs/price.md and its plot of the runs in results/price.json: ``python -m benchmarks.price_page``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
from reproduction.results import Results, Run

from benchmarks import flamby
from benchmarks.price import read, settings_of
from benchmarks.price_cases import COLUMNS, DATA, PROFILE, SEEDS, DataCase, PriceCell, cells

_PAGE: Final = Path("docs/price.md")
_PLOT: Final = Path("docs/images/price.svg")
_HEAD: Final = Path(__file__).with_name("price_head.md")
_LOST: Final = Path(__file__).with_name("price_lost.md")


def page(results: Results) -> str:
    """Return the page of some results."""
    sections = "".join(f"\n{line}" for line in ["## Results", "", *_table(results), ""])
    lost = "".join(f"\n{line}" for line in _lost(results))
    return _HEAD.read_text(encoding="utf-8") + sections + lost + "\n"


def _lost(results: Results) -> Iterator[str]:
    """Yield a line a profile: what each part that recipe U is played without gives back."""
    yield from _LOST.read_text(encoding="utf-8").splitlines()
    for case in DATA:
        for epsilon in case.profiles:
            found = _levels(case, epsilon, results)
            plain = [_mean_of(case, column, None, results) for column in ("pooled", "fedavg")]
            at = "" if epsilon is None else f", epsilon {epsilon:g}"
            yield _losses(f"{case.name}{at}", [*found, max(one or 0.0 for one in plain)])
    kept = flamby.read()
    of = {
        cell.column: mean_of([run.values[cell.metric] for run in kept.runs_of(cell.name)])
        for cell in (flamby.USER_LEVEL[0], *flamby.PROFILED)
    }
    best = max(of["pooled"] or 0.0, of["fedavg"] or 0.0)
    yield _losses(
        "FLamby's HeartDisease, 50 users, epsilon 1 at delta 0.001",
        [*(of[column] for column in ("recipe U", *PROFILE)), best],
    )


def _levels(case: DataCase, epsilon: float | None, results: Results) -> list[float | None]:
    """Return the mean metric of recipe U and of each cell of its profile; on the same seeds where starts are drawn."""
    asked = [PriceCell(case=case, column=column, epsilon=epsilon) for column in ("recipe U", *PROFILE)]
    found = [_values(_runs(cell, results), case.metric) for cell in asked]
    seeds = set(found[0])
    if "batch_size" in case.local:
        seeds = seeds.intersection(*(values for values in found if values))
    return [
        mean_of([value for seed, value in values.items() if seed in seeds], 2 if cell.draws else 1)
        for cell, values in zip(asked, found, strict=True)
    ]


def _losses(name: str, levels: Sequence[float | None]) -> str:
    """Return the line of a row; a level that has not been run leaves what is beside it open."""
    pairs = pairwise(levels)
    told = [name, *("" if one is None or other is None else f"{other - one:+.3f}" for one, other in pairs)]
    return f"| {' | '.join([*told, f'{levels[0]:.3f}', f'{levels[-1]:.3f}'])} |"


def mean_of(values: Sequence[float | None], least: int = 2) -> float | None:
    """Return the mean of a metric over runs; None of fewer than so many."""
    found = [value for value in values if value is not None]
    return float(np.mean(found)) if len(found) >= least else None


def _mean_of(case: DataCase, column: str, epsilon: float | None, results: Results) -> float | None:
    """Return the mean metric of a cell; None if it has not been run."""
    runs = (
        _runs(PriceCell(case=case, column=column, epsilon=epsilon), results)
        if _has(case, column, epsilon)
        else []
    )
    return mean_of([run.values[case.metric] for run in runs])


def _has(case: DataCase, column: str, epsilon: float | None) -> bool:
    """Whether the benchmark has a cell: more rounds and what was declared best are not for every case."""
    return any(
        one.case == case and (one.column, one.epsilon) == (column, epsilon) for one in cells(quick=False)
    )


def _table(results: Results) -> Iterator[str]:
    """Yield a row for every data set and epsilon, with a cell for every column that has been run."""
    yield f"| data | {' | '.join(COLUMNS)} | epsilon | rho |"
    yield f"|{'---|' * (len(COLUMNS) + 3)}"
    for case in DATA:
        own = [cell for cell in cells(quick=False) if cell.case == case and cell.column in COLUMNS]
        for epsilon in dict.fromkeys(cell.epsilon for cell in own):
            found = {cell.column: cell for cell in own if cell.epsilon == epsilon}
            shown = {column: _cell(cell, results) for column, cell in found.items()}
            if not any(shown.values()):
                continue
            told = [f"{case.name} ({case.metric.replace('_', ' ')})"]
            told += [shown.get(column, "") for column in COLUMNS]
            runs = _runs(found["published"], results)
            values = runs[0].values if runs else {}
            yield f"| {' | '.join([*told, _epsilons(values), _number(values.get('rho') or None)])} |"


def _epsilons(values: Mapping[str, float | None]) -> str:
    """Return epsilon to readers, and beside it that to the server under private weights where it is another."""
    readers = _number(values.get("epsilon"))
    server = _number(values.get("epsilon to the server, private weights p = 2"))
    return readers if server == readers else f"{readers} ({server})"


def _cell(cell: PriceCell, results: Results) -> str:
    runs = _runs(cell, results)
    if len(runs) < 2:
        return ""
    metric = cell.case.metric
    other = _values(
        _runs(PriceCell(case=cell.case, column="published", epsilon=cell.epsilon), results), metric
    )
    mine = _values(runs, metric)
    difference = _difference(mine if cell.draws else dict.fromkeys(other, mine[SEEDS[0]]), other)
    beside = [difference] if difference else []
    beside += [f"{len(runs)} seeds"] if len(runs) != len(SEEDS) else []
    beside += (
        ["transferred"] if cell.origin.startswith("transferred") and cell.column != "transferred" else []
    )
    return _mean(mine) + (f" ({', '.join(beside)})" if beside else "")


def _runs(cell: PriceCell, results: Results) -> list[Run]:
    settings = settings_of(cell)
    return [run for run in results.runs_of(cell.name) if run.settings == settings]


def _values(runs: Sequence[Run], metric: str) -> dict[int, float]:
    return {run.seed or 0: value for run in runs if (value := run.values[metric]) is not None}


def _mean(found: dict[int, float]) -> str:
    values = list(found.values())
    spread = f"±{np.std(values, ddof=1):.3f}" if len(values) > 1 else ""
    return f"{np.mean(values):.3f}{spread}"


def _difference(mine: dict[int, float], other: dict[int, float]) -> str:
    """Return the mean difference on the same seeds, with its standard error."""
    pairs = [mine[seed] - other[seed] for seed in mine.keys() & other.keys()]
    if len(pairs) < 2 or all(one == 0 for one in pairs):
        return ""
    return f"{np.mean(pairs):+.3f}±{np.std(pairs, ddof=1) / math.sqrt(len(pairs)):.3f}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


# --- the plot -----------------------------------------------------------------------------------------------------

_COLOURS: Final = {
    "pooled": "#9aa0a6",
    "fedavg": "#5f6368",
    "central": "#b06ab3",
    "published": "#d55e00",
    "+ weights": "#e69f00",
    "+ clip": "#56b4e9",
    "recipe U": "#0072b2",
    "longer": "#009e73",
    "best declared": "#cccccc",
}


def plot(results: Results) -> str:
    """Return an SVG: a line a data set, from 0.5 to 1, a dot a column with its standard deviation."""
    cases = [case for case in DATA if _runs(PriceCell(case=case, column="published"), results)]
    height = 60 + 46 * len(cases)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {height}" font-family="sans-serif" font-size="11">',
        f'<rect width="760" height="{height}" fill="white"/>',
    ]
    for place, (column, colour) in enumerate(_COLOURS.items()):
        x = 14.0 + 83 * place
        lines.append(
            f'<circle cx="{x:g}" cy="16" r="5" fill="{colour}"/><text x="{x + 9:g}" y="20">{column}</text>'
        )
    for value in (0.5, 0.6, 0.7, 0.8, 0.9, 1.0):
        x = _x(value)
        lines.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="34" y2="{height - 20}" stroke="#eee"/>')
        lines.append(f'<text x="{x:.1f}" y="{height - 6}" text-anchor="middle">{value:g}</text>')
    for number, case in enumerate(cases):
        y = 58 + 46 * number
        lines.append(f'<text x="8" y="{y + 4}">{escape(case.name)}</text>')
        for step, (column, colour) in enumerate(_COLOURS.items()):
            runs = _runs(PriceCell(case=case, column=column), results) if _has(case, column, None) else []
            if not runs:
                continue
            values = list(_values(runs, case.metric).values())
            mean, spread = float(np.mean(values)), float(np.std(values))
            at = y - 14 + 4 * step
            low, high = _x(max(0.5, mean - spread)), _x(mean + spread)
            lines.append(
                f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{at}" y2="{at}" stroke="{colour}" stroke-width="2"/>'
            )
            lines.append(f'<circle cx="{_x(mean):.1f}" cy="{at}" r="4" fill="{colour}"/>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def _x(value: float) -> float:
    return 230 + 510 * (min(1.0, max(0.5, value)) - 0.5) / 0.5


def main() -> None:
    """Write both."""
    results = read()
    _PAGE.write_text(page(results), encoding="utf-8")
    _PLOT.write_text(plot(results), encoding="utf-8")


if __name__ == "__main__":
    main()
