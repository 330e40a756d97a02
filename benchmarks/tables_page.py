"""Writes docs/which-model.md of the results of three benchmarks: ``python -m benchmarks.tables_page``.

They are ``tables``, ``counts_and_survival`` and ``choices``, in this order on the page.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
from reproduction.results import Results

from benchmarks.choices import CELLS, SHARES, rule
from benchmarks.choices import named as named_choice
from benchmarks.choices import read as read_choices
from benchmarks.counts_and_survival import PUBLIC as NO_PRIVACY
from benchmarks.counts_and_survival import named as named_study
from benchmarks.counts_and_survival import read as read_studies
from benchmarks.table_data import RDATASETS, TABLES
from benchmarks.tables import MODELS, PUBLIC, Cell, epsilons_of, named, read

_PAGE: Final = Path("docs/which-model.md")
_HEAD: Final = Path(__file__).with_name("tables_head.md")
_STUDIES: Final = Path(__file__).with_name("counts_and_survival_head.md")
_CHOICES: Final = Path(__file__).with_name("choices_head.md")


def page(results: Results, studies: Results, choices: Results) -> str:
    """Return the page of some results: models by table, by study, and private choices among them."""
    parts = [
        (_HEAD, _lines(results)),
        (_STUDIES, _studies(studies)),
        (_CHOICES, _choices(results, choices)),
    ]
    texts = [head.read_text(encoding="utf-8") + "\n" + "\n".join(lines) for head, lines in parts]
    return "\n\n".join(texts) + "\n"


def _lines(results: Results) -> Iterator[str]:
    columns = (*MODELS, *PUBLIC)
    yield f"| table | epsilon | {' | '.join(columns)} |"
    yield "| --- " * (len(columns) + 2) + "|"
    for name in (*TABLES, *RDATASETS):
        for epsilon in epsilons_of(name):
            found = [_values((name, one, epsilon), results) for one in MODELS]
            best = max(float(np.mean(one)) for one in found)
            shown = [_shown(one, best) for one in found]
            plain = [f"{np.mean(_values((name, one, 0.0), results)):.3f}" for one in PUBLIC]
            yield f"| {name} | {epsilon:g} | {' | '.join((*shown, *plain))} |"


def _studies(results: Results) -> Iterator[str]:
    """Yield the rows of counts and survival: one a study and private model, beside no privacy."""
    yield "| study | model | mean ± standard error | no privacy |"
    yield "| --- | --- | --- | --- |"
    cells = dict.fromkeys(run.cell for run in results.runs)
    for name in dict.fromkeys(cell.split(": ")[0] for cell in cells):
        plain = np.mean(_numbers(named_study(name, NO_PRIVACY), results))
        found = {one: _numbers(one, results) for one in cells if one.startswith(f"{name}: ")}
        del found[named_study(name, NO_PRIVACY)]
        best = max(float(np.mean(one)) for one in found.values())
        for cell, values in found.items():
            model = cell.removeprefix(f"{name}: ").partition(", epsilon")[0]
            yield f"| {name} | {model} | {_shown(values, best)} | {plain:.3f} |"


def _numbers(cell: str, results: Results) -> list[float]:
    """Return the values of a cell that has one value a run."""
    found = [value for run in results.runs_of(cell) for value in run.values.values()]
    return [one for one in found if one is not None]


def _choices(results: Results, choices: Results) -> Iterator[str]:
    """Yield the rows of the private choice, each with its mean difference from the rule on the same seeds."""
    shown = [f"share {share:g}: AUC less the rule's | trees chosen" for share in SHARES]
    yield f"| table | epsilon | rule | its AUC | {' | '.join(shown)} |"
    yield "| --- " * (4 + 2 * len(SHARES)) + "|"
    for cell in CELLS:
        name, epsilon = cell
        model = rule(name, epsilon)
        whole = {run.seed: run.values["auc"] for run in results.runs_of(named((name, model, epsilon)))}
        found = choices.runs_of(named_choice(cell))
        by_rule, texts = np.array([whole[run.seed] for run in found], dtype=np.float64), []
        for share in SHARES:
            chosen = np.array([run.values[f"auc, share {share:g}"] for run in found], dtype=np.float64)
            less, trees = chosen - by_rule, [run.values[f"trees chosen, share {share:g}"] for run in found]
            error = float(np.std(less, ddof=1) / np.sqrt(len(less)))
            texts += [f"{np.mean(less):+.3f}±{error:.3f}", f"{trees.count(1.0)} of {len(trees)}"]
        yield f"| {name} | {epsilon:g} | {model} | {by_rule.mean():.3f} | {' | '.join(texts)} |"


def _values(cell: Cell, results: Results) -> list[float]:
    return _numbers(named(cell), results)


def _shown(values: list[float], best: float) -> str:
    """Return mean and standard error; bold for the best mean."""
    mean, error = float(np.mean(values)), float(np.std(values, ddof=1) / np.sqrt(len(values)))
    text = f"{mean:.3f}±{error:.3f}"
    return f"**{text}**" if mean == best else text


if __name__ == "__main__":
    _PAGE.write_text(page(read(), read_studies(), read_choices()), encoding="utf-8")
