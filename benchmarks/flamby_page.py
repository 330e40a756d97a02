"""Writes docs/flamby.md of the runs in results/flamby.json: ``python -m benchmarks.flamby_page``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
from reproduction.results import Results

from benchmarks.flamby import DELTA, PUBLISHED, USER_LEVEL, UserLevel, claims, read

_PAGE: Final = Path("docs/flamby.md")
_HEAD: Final = Path(__file__).with_name("flamby_head.md")
_COUNTED: Final = (
    ("noise multiplier", "noise multiplier"),
    ("Poisson, 1,500 batches", "epsilon"),
    ("the same by dp-accounting", "epsilon by dp-accounting"),
    ("of Opacus' noise", "epsilon of opacus' noise"),
    ("as run: shuffled", "epsilon as run"),
)

_INTRODUCTION: Final = """Recipe U ([what it is](price.md)), whose settings looked at nothing, on FLamby's split, \
against readers of the models, adding or
removing one user of all centres. Users' records are handed out by Zipf's law; 486 users hold one record each, which \
is what FLamby's table
counts. HeartDisease takes FLamby's 15 rounds, and its metric: the mean of the four centres' accuracies, each \
normalised by its own training
rows. FLamby's own figures are {} at the claimed epsilon 1 and {} at 5 (mean of the five seeds of \
`results_fed_heart_disease.csv` at commit
b00c657). Of TcgaBrca it is the C-index of all test patients. Mean ± standard deviation over seeds 20 to 35. The 15 \
rounds were taken after 50 had given less at 50 users. As in FLamby, features are normalised by each centre's own \
training rows, which no epsilon here covers.

"""


def page(results: Results) -> str:
    """Return the page of some results."""
    return _HEAD.read_text(encoding="utf-8") + "\n".join(
        ["", *_claims(results), "", *_user_level(results), ""]
    )


def _claims(results: Results) -> Iterator[str]:
    yield f"| claimed epsilon at delta {DELTA:g}, centre | {' | '.join(head for head, _ in _COUNTED)} |"
    yield f"|---|{'---|' * len(_COUNTED)}"
    for claim in claims():
        (run,) = results.runs_of(claim.name)
        yield f"| {claim.name} | {' | '.join(f'{run.values[key]:.2f}' for _, key in _COUNTED)} |"


def _user_level(results: Results) -> Iterator[str]:
    yield "## At user level, at an epsilon that holds"
    yield ""
    yield from _INTRODUCTION.format(*(f"{PUBLISHED[claimed]:.3f}" for claimed in (1.0, 5.0))).splitlines()
    yield "| data | users | epsilon | delta | metric | goal | seeds |"
    yield f"|{'---|' * 7}"
    for cell in USER_LEVEL:
        yield _row(cell, results)


def _row(cell: UserLevel, results: Results) -> str:
    found = [run.values[cell.metric] for run in results.runs_of(cell.name) if run.settings == cell.settings]
    values = np.array([value for value in found if value is not None])
    told = f"{values.mean():.3f}±{values.std(ddof=1):.3f}"
    numbers = f"{cell.users} | {cell.epsilon:g} | {cell.delta:g} | {told} | {cell.goal:g} | {len(values)}"
    return f"| {cell.data} | {numbers} |"


def main() -> None:
    """Write it."""
    _PAGE.write_text(page(read()), encoding="utf-8")


if __name__ == "__main__":
    main()
