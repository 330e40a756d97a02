"""DP-Fed-LS's Table 2 on the images that its authors tested on: the first 1,010 of MNIST's test set.

Their program tests on the first 101 batches of ten, after the round that was best on validation data. Here stand the
accuracy on these images after the last round, the same model's on all 10,000, and the best of all rounds on the 1,010
themselves, which no choice by other data can exceed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from fedveil.run.config.experiment import parse
from fedveil.run.config.study import Selection, study_documents
from fedveil.run.folder.run_folder import Row, RunFolder
from fedveil.run.loop import NullObserver
from fedveil.run.populations import PopulationCache
from fedveil.run.releases.records import evaluate
from fedveil.run.setup import Prepared, prepare
from fedveil.run.training_run import run
from reproduction.results import Values

IMAGES: Final = 1_010
"""101 batches of ten."""
_SAMPLINGS: Final = ("uniform", "poisson")
_EPSILONS: Final = (6, 7, 8, 9)


@dataclass
class _Accuracies(NullObserver):
    """Keeps the accuracy after every round."""

    found: list[float] = field(default_factory=list)

    def on_round_end(self, row: Row) -> None:
        """Note a round's."""
        self.found.append(row["test"]["accuracy"])


def table_2(seed: int) -> Iterator[tuple[str, Values]]:
    """Every cell of the table at the noise of Theorems 1 and 2."""
    populations = PopulationCache()
    chosen = Selection(
        scenarios=tuple(f"theorem-{law}-eps{epsilon}" for law in _SAMPLINGS for epsilon in _EPSILONS),
        overrides=({"seed": seed, "evaluate_every": 1},),
    )
    for document in study_documents("table-2-mnist", chosen):
        name = str(document["name"])
        yield name, _play(prepare(parse(document, name), populations))


def _play(prepared: Prepared) -> Values:
    population, watched = prepared.population, _Accuracies()
    few = replace(
        population,
        test_features=population.test_features[:IMAGES],
        test_targets=population.test_targets[:IMAGES],
    )
    with tempfile.TemporaryDirectory() as folder:
        played = run(replace(prepared, population=few), Path(folder), watched)
        checkpoint = RunFolder.open(played.folder)[0].read_checkpoint()
    assert checkpoint is not None, "the run is complete"
    every = evaluate(prepared, checkpoint.model)
    assert every is not None, "nothing here is released instead"
    return {
        "accuracy": watched.found[-1],
        "best round": max(watched.found),
        "all images": every["accuracy"],
    }
