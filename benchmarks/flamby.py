"""FLamby's differentially private HeartDisease table, counted again, and its data at user level across silos.

The table is ``flamby/dp_example`` of owkin/FLamby at commit edacf54: FedAvg over four centres, 15 rounds of 100 batches
of 4 each, a noise that Opacus finds for the epsilon asked for. Two slips make that epsilon another one:

1. ``make_private_with_epsilon(epochs=nrounds)`` finds the noise for 15 epochs, while 1,500 batches are trained on;
2. batches come from the loader that was there before, shuffled, not from the Poisson one that Opacus returns, so that
   nothing amplifies. Each record is then in one batch of every pass: ceil(1,500 / batches) full Gaussian releases.

Both are counted, by our accountant and by dp-accounting. The rows at user level are recipe U, whose settings looked at
nothing, on FLamby's split and with its metric. Results are kept in ``results/flamby.json``;
``python -m benchmarks.flamby_page`` writes docs/flamby.md of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from dp_accounting import NeighboringRelation, dp_event
from dp_accounting.pld import PLDAccountant
from jaxtyping import Float32
from reproduction.results import ResultFolder, Results, Run, Values, digest, rounded
from torch import Tensor

from benchmarks.harness import Row
from benchmarks.price import pooled, trained, without
from benchmarks.price_cases import DATA, POOLED, PROFILE, DataCase, PriceCell
from fedveil import __version__
from fedveil.data.catalogue import data_set
from fedveil.data.catalogue.data_set import store
from fedveil.data.catalogue.heart_disease import HOSPITALS, normalise, read_hospitals
from fedveil.privacy.accounting import epsilon, make_accountant
from fedveil.privacy.calibration import calibrate_noise
from fedveil.privacy.events import Event, GaussianEvent, PoissonSampledEvent, SelfComposedEvent
from fedveil.privacy.ledger import Budget
from fedveil.run.config.experiment import parse
from fedveil.run.populations import FixedPopulation, PopulationCache
from fedveil.run.releases.records import evaluate
from fedveil.run.setup import Prepared, prepare
from fedveil.training.metrics import accuracy

DELTA: Final = 1e-3
ROUNDS: Final = 15
UPDATES: Final = 100
BATCH: Final = 4
TRAINED_ON: Final = (199, 172, 30, 85)
CLAIMED: Final = (1.0, 5.0)
PUBLISHED: Final = {1.0: 0.702, 5.0: 0.700}
"""Their metric at delta 1e-3, mean of seeds 42 to 46 of ``results_fed_heart_disease.csv`` at commit b00c657."""

SEEDS: Final = range(20, 36)
TABLE: Final = "flamby"
FOLDER: Final = Path("results")
_BY_NAME: Final = {
    case.data["name"]: case for case in DATA if case.data["name"] in ("heart_disease", "tcga_brca")
}


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One cell of the table: an epsilon that was asked for, in one centre."""

    claimed: float
    centre: int

    @property
    def name(self) -> str:
        """Of the cell in the result file."""
        return f"claimed {self.claimed:g}, {HOSPITALS[self.centre]}"

    @property
    def batches(self) -> int:
        """Of one pass over the centre's records."""
        return math.ceil(TRAINED_ON[self.centre] / BATCH)

    @property
    def settings(self) -> str:
        """Digest of what is counted."""
        return digest([self.claimed, self.batches, ROUNDS, UPDATES, DELTA])

    def values(self, seed: int | None, populations: PopulationCache) -> Values:
        """Return what the claim comes to: 1,500 batches, Poisson as it was meant and shuffled as it was run."""
        from opacus.accountants.utils import get_noise_multiplier  # a second of imports, for these rows alone

        rate, steps = 1 / self.batches, ROUNDS * UPDATES
        budget = Budget(epsilon=self.claimed, delta=DELTA, accountant=make_accountant("pld"))
        noise = calibrate_noise(lambda z: _batches(z, ROUNDS * self.batches, rate), budget)
        opacus = get_noise_multiplier(
            target_epsilon=self.claimed,
            target_delta=DELTA,
            sample_rate=rate,
            epochs=ROUNDS,
            accountant="prv",
        )
        poisson, passes = _batches(noise, steps, rate), math.ceil(steps / self.batches)
        shuffled = SelfComposedEvent(event=GaussianEvent(noise_multiplier=noise), count=passes)
        batch = dp_event.PoissonSampledDpEvent(rate, dp_event.GaussianDpEvent(noise))
        peer = PLDAccountant(NeighboringRelation.ADD_OR_REMOVE_ONE).compose(batch, steps)
        return {
            "noise multiplier": noise,
            "noise multiplier of opacus": opacus,
            "epsilon": epsilon(poisson, DELTA),
            "epsilon by dp-accounting": peer.get_epsilon(DELTA),
            "epsilon of opacus' noise": epsilon(_batches(opacus, steps, rate), DELTA),
            "epsilon as run": epsilon(shuffled, DELTA),
        }


def _batches(noise_multiplier: float, steps: int, rate: float) -> Event:
    """Return so many steps over Poisson batches."""
    release = PoissonSampledEvent(rate=rate, event=GaussianEvent(noise_multiplier=noise_multiplier))
    return SelfComposedEvent(event=release, count=steps)


@dataclass(frozen=True, kw_only=True)
class UserLevel:
    """One cell at user level: recipe U on FLamby's data, at an epsilon that holds.

    Attributes:
        data: of the price benchmark.
        users: |U|; None: one record each, as FLamby counts.
        epsilon, delta: against readers of the models, adding or removing one user of all centres.
        goal: least mean of the metric.
        column: of the price benchmark: recipe U, and what shows where it loses.
    """

    data: str
    users: int
    epsilon: float
    delta: float
    goal: float
    column: str = "recipe U"

    @property
    def case(self) -> DataCase:
        """The case of the price benchmark with this number of users; HeartDisease in FLamby's number of rounds."""
        base = _BY_NAME[self.data]
        rounds = ROUNDS if self.data == "heart_disease" else base.rounds
        return replace(base, rounds=rounds, data={**base.data, "n_users": self.users})

    @property
    def metric(self) -> str:
        """What is reported."""
        return "mean accuracy of the centres" if self.data == "heart_disease" else "c_index"

    @property
    def name(self) -> str:
        """Of the cell in the result file."""
        name = f"{self.data}, {self.users} users, epsilon {self.epsilon:g} at delta {self.delta:g}"
        return name if self.column == "recipe U" else f"{name}: {self.column}"

    @property
    def settings(self) -> str:
        """Digest of what is run, the seed left out."""
        document = self.document(0)
        return digest(document if self.column == "recipe U" else {**document, "column": self.column})

    def document(self, seed: int | None) -> dict[str, Any]:
        """Return the experiment of one run."""
        found = PriceCell(case=self.case, column=self.column, epsilon=self.epsilon).document(seed or 0)
        return {**found, "privacy": {**found.get("privacy", {}), "delta": self.delta}}

    def values(self, seed: int | None, populations: PopulationCache) -> Values:
        """Run it once, with exact noise of the system's randomness."""
        experiment = parse(self.document(seed), self.name)
        population = populations.load(experiment.data, experiment.seed)
        if self.column in POOLED:
            population = pooled(population)
        prepared = without(self.column, prepare(experiment, FixedPopulation(population)))
        model = trained(prepared)
        found = evaluate(prepared, model)
        assert found is not None, "no metric is released here"
        if self.data == "heart_disease":
            found[self.metric] = mean_of_centres(prepared, model)
        if self.column != "recipe U":
            return found
        return {**found, "epsilon": prepared.epsilon_after(experiment.rounds)}


USER_LEVEL: Final = (
    UserLevel(data="heart_disease", users=50, epsilon=1.0, delta=DELTA, goal=0.702),
    UserLevel(data="heart_disease", users=200, epsilon=1.0, delta=DELTA, goal=0.702),
    UserLevel(data="heart_disease", users=486, epsilon=1.0, delta=DELTA, goal=0.702),
    UserLevel(data="tcga_brca", users=50, epsilon=5.0, delta=1e-5, goal=0.80),
    UserLevel(data="tcga_brca", users=50, epsilon=5.0, delta=DELTA, goal=0.80),
)
"""486 users hold one record each: user level is then record level, which is what FLamby's table means."""

PROFILED: Final = tuple(replace(USER_LEVEL[0], column=column) for column in (*PROFILE, "pooled", "fedavg"))
"""Where the row that misses its goal loses; nothing is drawn in them, so two seeds show it."""


def mean_of_centres(prepared: Prepared, model: Float32[Tensor, " d"]) -> float:
    """Return FLamby's metric: the mean of the centres' accuracies, each normalised by its own training rows."""
    source = store(prepared.experiment.data.folder)
    found = read_hospitals([source.path(file) for file in data_set("heart_disease").files(source)])
    return float(
        np.mean(
            [
                accuracy(
                    prepared.task.predict(model, torch.from_numpy(normalise(one.test, one.train))),
                    torch.from_numpy(one.test_labels),
                )
                for one in found
            ]
        )
    )


def read() -> Results:
    """Return the runs that are kept."""
    found = ResultFolder(FOLDER).read(TABLE)
    return found.model_copy(update={"command": "fedveil bench flamby"})


def claims() -> list[Claim]:
    """Return the cells of the table."""
    return [Claim(claimed=claimed, centre=centre) for claimed in CLAIMED for centre in range(len(HOSPITALS))]


def rows(quick: bool) -> Iterator[Row]:
    """Count the claims and play what the result file does not have; with ``quick`` one seed, kept nowhere."""
    kept = Results(table=TABLE, command="fedveil bench flamby") if quick else read()
    populations = PopulationCache()
    work: list[tuple[Claim | UserLevel, int | None]] = [(cell, None) for cell in claims()]
    work += [(cell, seed) for cell in USER_LEVEL for seed in (SEEDS[:1] if quick else SEEDS)]
    work += [(cell, seed) for cell in PROFILED for seed in SEEDS[: 1 if quick else 2]]
    for cell, seed in work:
        if kept.has(cell.name, seed, cell.settings):
            continue
        kept = kept.adding([_run(cell, seed, populations)])
        if not quick:
            ResultFolder(FOLDER).write(kept)
    for claim in claims():
        value = kept.runs_of(claim.name)[0].values["epsilon"]
        assert value is not None
        yield Row(
            case=f"{claim.name}: 1,500 batches",
            unit=f"epsilon at delta {DELTA:g}",
            ours=value,
            peer=claim.claimed,
            ratio=value / claim.claimed,
        )
    for cell in USER_LEVEL:
        found = [run.values[cell.metric] for run in kept.runs_of(cell.name)]
        mean = float(np.mean([value for value in found if value is not None]))
        yield Row(
            case=f"{cell.name} ({len(found)} seeds)",
            unit=cell.metric,
            ours=mean,
            target=cell.goal,
            met=mean >= cell.goal,
        )


def smallest() -> Iterator[Row]:
    """Count the claim of the smallest centre, and play one cell once."""
    populations = PopulationCache()
    for cell, seed in ((claims()[HOSPITALS.index("switzerland")], None), (USER_LEVEL[0], SEEDS[0])):
        for name, value in _run(cell, seed, populations).values.items():
            if value is not None:
                yield Row(case=cell.name, unit=name, ours=value)


def _run(cell: Claim | UserLevel, seed: int | None, populations: PopulationCache) -> Run:
    before = time.process_time()
    values = cell.values(seed, populations)
    return Run(
        cell=cell.name,
        seed=seed,
        settings=cell.settings,
        version=__version__,
        cpu_seconds=rounded(time.process_time() - before),
        values={name: rounded(value) for name, value in values.items()},
    )
