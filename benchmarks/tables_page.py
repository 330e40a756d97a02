"""Writes docs/which-model.md of results/tables.json and results/choices.json: ``python -m benchmarks.tables_page``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
from reproduction.results import Results

from benchmarks.choices import CELLS, SHARES, rule
from benchmarks.choices import named as named_choice
from benchmarks.choices import read as read_choices
from benchmarks.table_data import RDATASETS, TABLES
from benchmarks.tables import MODELS, PUBLIC, Cell, epsilons_of, named, read

_PAGE: Final = Path("docs/which-model.md")
_HEAD: Final = Path(__file__).with_name("tables_head.md")
_CHOICES: Final = Path(__file__).with_name("choices_head.md")


def page(results: Results, choices: Results) -> str:
    """Return the page of some results: models by table, and private choices among them."""
    lines, chosen = "\n".join(_lines(results)), "\n".join(_choices(results, choices))
    head, tail = (one.read_text(encoding="utf-8") for one in (_HEAD, _CHOICES))
    return f"{head}\n{lines}\n\n{tail}\n{chosen}\n"


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
    found = [run.values["auc"] for run in results.runs_of(named(cell))]
    return [one for one in found if one is not None]


def _shown(values: list[float], best: float) -> str:
    """Return mean and standard error; bold for the best mean."""
    mean, error = float(np.mean(values)), float(np.std(values, ddof=1) / np.sqrt(len(values)))
    text = f"{mean:.3f}±{error:.3f}"
    return f"**{text}**" if mean == best else text


if __name__ == "__main__":
    _PAGE.write_text(page(read(), read_choices()), encoding="utf-8")
