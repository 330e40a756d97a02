"""DP-Fed-LS's curves of training loss (Figures 2 and S10): the runs of Table 2, evaluated on what they train on.

A run evaluates its models on test records alone, since metrics of training records are covered by no epsilon. Here the
training records stand in the place of the test table as well, as only a simulation on public images may have it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from fedveil.run.config.experiment import parse
from fedveil.run.config.study import Selection, study_documents
from fedveil.run.folder.run_folder import Row
from fedveil.run.loop import NullObserver
from fedveil.run.populations import PopulationCache
from fedveil.run.setup import Prepared, prepare
from fedveil.run.training_run import run
from reproduction.results import Values

_SAMPLINGS: Final = ("uniform", "poisson")
_EPSILONS: Final = (6, 7, 8, 9)
_EVERY: Final = 5
_ROUNDS: Final = (5, 10, 20, 30)


@dataclass
class _Losses(NullObserver):
    """Keeps loss and accuracy at every evaluated round."""

    found: dict[int, Row] = field(default_factory=dict)

    def on_round_end(self, row: Row) -> None:
        """Note a round's."""
        if row["test"] is not None:
            self.found[row["round"]] = row["test"]


def table_2(seed: int) -> Iterator[tuple[str, Values]]:
    """Every cell of the table at the noise of Theorems 1 and 2."""
    populations = PopulationCache()
    chosen = Selection(
        scenarios=tuple(f"theorem-{law}-eps{epsilon}" for law in _SAMPLINGS for epsilon in _EPSILONS),
        overrides=({"seed": seed, "evaluate_every": _EVERY},),
    )
    for document in study_documents("table-2-mnist", chosen):
        name = str(document["name"])
        yield name, _play(prepare(parse(document, name), populations))


def _play(prepared: Prepared) -> Values:
    population, watched = prepared.population, _Losses()
    trained = replace(
        population,
        test_features=population.train.features,
        test_targets=population.train.targets,
        test_weights=None,
        test_rows=None,
    )
    with tempfile.TemporaryDirectory() as folder:
        run(replace(prepared, population=trained), Path(folder), watched)
    return {
        **{f"loss after {number}": watched.found[number]["loss"] for number in _ROUNDS},
        "training accuracy": watched.found[_ROUNDS[-1]]["accuracy"],
    }
