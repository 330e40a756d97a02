"""Writes docs/which-model.md of the runs in results/tables.json: ``python -m benchmarks.tables_page``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
from reproduction.results import Results

from benchmarks.tables import EPSILONS, MODELS, PUBLIC, TABLES, Cell, named, read

_PAGE: Final = Path("docs/which-model.md")
_HEAD: Final = Path(__file__).with_name("tables_head.md")


def page(results: Results) -> str:
    """Return the page of some results."""
    lines = "\n".join(_lines(results))
    return f"{_HEAD.read_text(encoding='utf-8')}\n{lines}\n"


def _lines(results: Results) -> Iterator[str]:
    columns = (*MODELS, *PUBLIC)
    yield f"| table | epsilon | {' | '.join(columns)} |"
    yield "| --- " * (len(columns) + 2) + "|"
    for name in TABLES:
        for epsilon in EPSILONS:
            found = [_values((name, one, epsilon), results) for one in MODELS]
            best = max(float(np.mean(one)) for one in found)
            shown = [_shown(one, best) for one in found]
            plain = [f"{np.mean(_values((name, one, 0.0), results)):.3f}" for one in PUBLIC]
            yield f"| {name} | {epsilon:g} | {' | '.join((*shown, *plain))} |"


def _values(cell: Cell, results: Results) -> list[float]:
    found = [run.values["auc"] for run in results.runs_of(named(cell))]
    return [one for one in found if one is not None]


def _shown(values: list[float], best: float) -> str:
    """Return mean and standard error; bold for the best mean."""
    mean, error = float(np.mean(values)), float(np.std(values, ddof=1) / np.sqrt(len(values)))
    text = f"{mean:.3f}±{error:.3f}"
    return f"**{text}**" if mean == best else text


if __name__ == "__main__":
    _PAGE.write_text(page(read()), encoding="utf-8")
