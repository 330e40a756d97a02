"""The recommended settings beside a tutorial's fixed settings and the best of a grid: linear models on 14 tables.

Seeds 40 on, which chose nothing, draw noise and batches; records, split and allocation of a table stay. The grid is
chosen on the test records, so its best is an upper bound that nobody can reach. Runs are kept in
``results/defaults.json`` one by one; ``python -m benchmarks.defaults_page`` writes docs/theory/recommended.md's table.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, Final

import numpy as np
from reproduction.results import ResultFolder, Results, Run, digest, rounded

from benchmarks.defaults_data import CASES, DefaultsCase
from benchmarks.harness import Row
from benchmarks.price import trained
from fedveil import __version__
from fedveil.data.records import Population
from fedveil.methods.guarantee import PublicFacts
from fedveil.methods.noise_ratio import noise_to_displacement
from fedveil.run.config.experiment import merge, parse
from fedveil.run.populations import FixedPopulation
from fedveil.run.releases.records import evaluate
from fedveil.run.setup import prepare

TABLE: Final = "defaults"
FOLDER: Final = Path("results")
EPSILONS: Final = (2.0, 1.0, 5.0)
SEEDS: Final = range(40, 48)
GRID: Final = tuple(product((0.3, 1.0, 3.0), (0.3, 1.0, 3.0)))
"""Local rate in units of the rule's, and server rate in mean updates."""
_TUTORIAL: Final = {
    "rounds": 20,
    "method": {"name": "uldp-avg-w", "clip": 1.0, "noise_multiplier": "calibrated"},
    "local": {"learning_rate": 0.5, "epochs": 5, "batch_size": 16},
}
NEWTON: Final = "newton"
"""Newton steps with their own defaults, of tables with classes."""
HALF: Final = "recommended in 15 rounds"
Setting = str | tuple[float, float]


@cache
def _population(case: DefaultsCase) -> Population:
    return case.make()


@dataclass(frozen=True, kw_only=True)
class DefaultsCell:
    """One data set under one setting at one epsilon."""

    case: DefaultsCase
    setting: Setting
    epsilon: float

    @property
    def name(self) -> str:
        """Of the cell in the result file."""
        named = (
            self.setting if isinstance(self.setting, str) else "rate x {:g}, step {:g}".format(*self.setting)
        )
        return f"{self.case.name}: {named}, epsilon {self.epsilon:g}"

    @property
    def seeds(self) -> range:
        """Two for a point of the grid."""
        return SEEDS if isinstance(self.setting, str) else SEEDS[:2]

    def document(self, seed: int) -> dict[str, Any]:
        """Return the experiment of one run; its data section stands for the population."""
        people = _population(self.case)
        found: dict[str, Any] = {
            "name": "defaults",
            "seed": seed,
            "data": {"name": "digits", "n_users": people.n_users, "n_silos": people.n_silos},
            "model": {"name": "linear", "loss": self.case.loss, "metrics": [self.case.metric]},
            "privacy": {"epsilon": self.epsilon},
            # Masks change no bit of a model, and take time.
            "protection": {"name": "none"},
        }
        if self.setting == HALF:
            found["rounds"] = 15
        if self.setting == NEWTON:
            model = found["model"] | {"name": "whitened-linear"}
            method = {"name": "newton", "power": "linked", "noise_multiplier": "calibrated"}
            return found | {"model": model, "method": method}
        if self.setting == "tutorial":
            return merge(found, _TUTORIAL)
        if isinstance(self.setting, tuple):
            rate, step = self.setting
            local = prepare(parse(found, "the rule"), FixedPopulation(people)).experiment.local
            assert local is not None, "the recommended method trains locally"
            found |= {
                "local": {"learning_rate": rate * local.learning_rate},
                "server": {"learning_rate": step},
            }
        return found

    def settings(self) -> str:
        """Return the digest of what is run, the seed left out."""
        return digest({**self.document(0), "on": self.case.name})

    def played(self, seed: int) -> Run:
        """Run the cell once, with exact noise of the system's randomness."""
        before, people = time.process_time(), _population(self.case)
        document = self.document(seed)
        prepared = prepare(parse(document, self.name), FixedPopulation(people))
        found = evaluate(prepared, trained(prepared))
        assert found is not None, "no metric is released here"
        facts = PublicFacts(n_silos=people.n_silos, n_users=people.n_users, dimension=prepared.task.dimension)
        values = {
            **found,
            "epsilon": prepared.epsilon_after(prepared.experiment.rounds),
            "rho": noise_to_displacement(prepared.method, facts, prepared.experiment.rounds),
        }
        return Run(
            cell=self.name,
            seed=seed,
            settings=digest({**document, "seed": 0, "on": self.case.name}),
            version=__version__,
            cpu_seconds=rounded(time.process_time() - before),
            values={name: rounded(value) for name, value in values.items()},
        )


def cells(quick: bool = False) -> Iterator[DefaultsCell]:
    """Yield every cell, in the order in which they are played: the grid last."""
    cases = CASES[:1] if quick else CASES
    for epsilon in EPSILONS[:1] if quick else EPSILONS:
        for case, setting in product(cases, ("recommended", "tutorial")):
            yield DefaultsCell(case=case, setting=setting, epsilon=epsilon)
    for case in () if quick else (CASES[0], CASES[6]):
        yield DefaultsCell(case=case, setting=HALF, epsilon=EPSILONS[0])
    for case in cases[:1] if quick else cases:
        if case.has_newton:
            yield DefaultsCell(case=case, setting=NEWTON, epsilon=EPSILONS[0])
    for case, point in product(() if quick else cases, GRID):
        yield DefaultsCell(case=case, setting=point, epsilon=EPSILONS[0])


def rows(quick: bool) -> Iterator[Row]:
    """Play what the result file does not have; with ``quick`` one data set, kept nowhere."""
    asked = list(cells(quick))
    kept = Results(table=TABLE, command="fedveil bench defaults") if quick else read()
    for cell in asked:
        for seed in cell.seeds:
            if kept.has(cell.name, seed, cell.settings()):
                continue
            kept = kept.adding([cell.played(seed)])
            if not quick:
                ResultFolder(FOLDER).write(kept)
    for cell in asked:
        yield Row(case=cell.name, unit=cell.case.metric, ours=mean(kept, cell) or 0.0)


def smallest() -> Iterator[Row]:
    """Play all three kinds of settings once on the smallest table."""
    for setting in ("recommended", "tutorial", GRID[0]):
        cell = DefaultsCell(case=CASES[6], setting=setting, epsilon=5.0)
        found = cell.played(SEEDS[0]).values[cell.case.metric]
        assert found is not None, "there are test records"
        yield Row(case=cell.name, unit=cell.case.metric, ours=found)


def read() -> Results:
    """Return the runs that are kept."""
    found = ResultFolder(FOLDER).read(TABLE)
    return found.model_copy(update={"command": "fedveil bench defaults"})


def mean(kept: Results, cell: DefaultsCell) -> float | None:
    """Return the mean of a cell's metric; None without a run."""
    values = [run.values[cell.case.metric] for run in kept.runs_of(cell.name)]
    found = [value for value in values if value is not None]
    return float(np.mean(found)) if found else None
