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
from benchmarks.choices import CELLS, SHARES, rule
from benchmarks.choices import named as named_choice
from benchmarks.choices import read as read_choices
from benchmarks.table_data import OUTCOMES, OUTCOMES_OF_RDATASETS, RDATASETS, TABLES
from benchmarks.tables import MODELS, PUBLIC, Cell, epsilons_of, named, read

_PAGE: Final = Path("docs/which-model.md")
_HEAD: Final = Path(__file__).with_name("tables_head.md")
_OUTCOMES: Final = Path(__file__).with_name("outcomes_head.md")
_CHOICES: Final = Path(__file__).with_name("choices_head.md")


def page(results: Results, choices: Results, outcomes: Results, trees: Results) -> str:
    """Return the page of some results: models by table, counts and survival, and private choices among models."""
    parts = (_lines(results), _outcomes(outcomes, trees), _choices(results, choices))
    heads = (one.read_text(encoding="utf-8") for one in (_HEAD, _OUTCOMES, _CHOICES))
    return "\n\n".join(f"{head}\n" + "\n".join(part) for head, part in zip(heads, parts, strict=True)) + "\n"


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


def _outcomes(outcomes: Results, trees: Results) -> Iterator[str]:
    """Yield the rows of counts and survival; a cell without runs is a dash."""
    models = (outcomes_benchmark.MODELS[0], outcomes_benchmark.MODELS[1], outcomes_benchmark.PUBLIC)
    columns = (*models[:2], "trees, simulated", "no privacy", "trees without noise")
    yield f"| table | figure | {' | '.join(columns)} |"
    yield "| --- " * (len(columns) + 2) + "|"
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
    _PAGE.write_text(
        page(read(), read_choices(), outcomes_benchmark.read(), survival_trees.read()), encoding="utf-8"
    )
