"""Writes the table of docs/theory/recommended.md of results/defaults.json: ``python -m benchmarks.defaults_page``."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
from reproduction.results import Results

from benchmarks.defaults import EPSILONS, GRID, NEWTON, DefaultsCell, Setting, mean, read
from benchmarks.defaults_data import CASES, DefaultsCase

PAGE: Final = Path(__file__).parents[1] / "docs" / "theory" / "recommended.md"
BEGIN, END = "<!-- table of results/defaults.json -->\n", "<!-- end of the table -->"


def table(kept: Results) -> str:
    """Return the table of some results, in Markdown."""
    lines = [
        "| data, metric | rho at 2 | "
        + " | ".join(f"epsilon {one:g}" for one in sorted(EPSILONS))
        + " | best of the grid at 2 | newton at 2 |",
        "|" + "---|" * (4 + len(EPSILONS)),
    ]
    for case in CASES:
        rho = next((run.values["rho"] or 0.0 for run in _runs(kept, case, "recommended", 2.0)), 0.0)
        shown = [
            f"**{_shown(kept, case, 'recommended', one)}** / {_shown(kept, case, 'tutorial', one)}"
            for one in sorted(EPSILONS)
        ]
        points = [mean(kept, DefaultsCell(case=case, setting=point, epsilon=EPSILONS[0])) for point in GRID]
        best = max((one for one in points if one is not None), default=None)
        name = f"{case.name}, {case.metric}" + ("" if case.seen else " *")
        shown.append("not played" if best is None else f"{best:.3f}")
        shown.append(_shown(kept, case, NEWTON, 2.0) if case.has_newton else "not played")
        lines.append(f"| {name} | {rho:.2f} | {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


def _runs(kept: Results, case: DefaultsCase, setting: Setting, epsilon: float) -> tuple:  # type: ignore[type-arg]
    return kept.runs_of(DefaultsCell(case=case, setting=setting, epsilon=epsilon).name)


def _shown(kept: Results, case: DefaultsCase, setting: Setting, epsilon: float) -> str:
    """Return mean and standard error of a cell."""
    found = [run.values[case.metric] or 0.0 for run in _runs(kept, case, setting, epsilon)]
    if len(found) < 2:
        return "not played"
    return f"{np.mean(found):.3f}±{np.std(found, ddof=1) / len(found) ** 0.5:.3f}"


def page(text: str, kept: Results) -> str:
    """Return a page's text with its table written anew."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + table(kept) + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), read()), encoding="utf-8")
