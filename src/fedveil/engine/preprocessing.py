"""A run's schema refined by one release before training: planned, charged, made, and written into the run folder.

    declared schema ─► release prep/1 ─► preprocessing.json, schema.toml ─► the run is prepared again, on that one

Nothing else is read from records: scaling, encoding and the model's width follow from the refined schema. A resumed
run, an audit and a bundle read the same file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import tomlkit
from jaxtyping import Float64

from fedveil.engine.declared import Declared
from fedveil.engine.experiment import Experiment
from fedveil.engine.folder import PREPROCESSED, SCHEMA, RunFolder
from fedveil.engine.release_method import release_builder
from fedveil.engine.release_sum import NoisySum, Release, noisy_sum
from fedveil.engine.side_releases import SideRelease, charge, multiplier_of, side_release, whole_of
from fedveil.errors import ConfigError, RunFolderError
from fedveil.files import read_json
from fedveil.population.columns import ColumnTable, read_columns
from fedveil.population.records import Population
from fedveil.population.schema import Schema
from fedveil.privacy.ledger import Ledger
from fedveil.randomness import PrivacyRandomness
from fedveil.statistics.local import LocalStatistic
from fedveil.statistics.preprocessing import Wanted, cdf_noise, refined
from fedveil.statistics.stored import SCHEMA_VERSION, noisy_vector, restoring

MOST_NOISE: Final = 0.2
"""Largest predicted noise on a sum of leading bins, as a share of all people: bounds have no tail to go by beyond."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Preprocessing:
    """A preprocessing, ready to be made; public numbers alone.

    Attributes:
        wanted: what it is of.
        release: what is released.
        noise: predicted standard deviation of a sum of leading bins, as a share of all people.
    """

    wanted: Wanted
    release: SideRelease
    noise: float

    def release_of(self, experiment: Experiment) -> Release:
        """Return the release; its repeatable noise is neither that of a round nor of the evaluation."""
        return self.release.numbered(experiment.rounds + 3)

    def preprocessed(self, experiment: Experiment, made: NoisySum) -> Preprocessed:
        """Return what follows from the released sum."""
        return Preprocessed(
            provenance=self.release.of_run(experiment.name),
            wanted=self.wanted,
            vector=made.vector,
            noise_std=made.std,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Preprocessed:
    """What a preprocessing released.

    Attributes:
        provenance: the release's name in the ledger.
        wanted: what it is of.
        vector: the released sum.
        noise_std: standard deviation of its noise, per number.
    """

    provenance: str
    wanted: Wanted
    vector: Float64[np.ndarray, " d"]
    noise_std: float

    @property
    def schema(self) -> Schema:
        """The refined schema."""
        return refined(self.wanted, self.vector, self.noise_std)

    def to_json(self) -> dict[str, Any]:
        """Return the release as JSON."""
        return {
            "schema_version": SCHEMA_VERSION,
            "provenance": self.provenance,
            "wanted": self.wanted.model_dump(mode="json", exclude_none=True),
            "noise_std": self.noise_std,
            "vector": self.vector.tolist(),
        }


def read_preprocessed(folder: Path) -> Preprocessed | None:
    """Return what a run's preprocessing released; None where there is none.

    Raises:
        RunFolderError: a damaged one.
    """
    path = folder / PREPROCESSED
    if not path.exists():
        return None
    data = read_json(path, RunFolderError)
    with restoring(data, path):
        wanted, std = Wanted.model_validate(data["wanted"]), float(data["noise_std"])
        vector = noisy_vector(data["vector"], std, wanted.layout.length, path)
        return Preprocessed(provenance=str(data["provenance"]), wanted=wanted, vector=vector, noise_std=std)


def plan_preprocessing(experiment: Experiment, of: Declared) -> Preprocessing | None:
    """Plan the preprocessing that an experiment asks for, if it does; no table is opened.

    Args:
        experiment: what asks for it.
        of: what is declared of its tables.

    Raises:
        ConfigError: columns that cannot be refined, or a budget that is too small, with what would do.
    """
    section = experiment.preprocessing
    if section is None:
        return None
    weighs = experiment.protection.build().weighs
    wanted = Wanted(
        schema_=of.first,
        silo_names=of.silos,
        silos=section.silos or ("equal" if weighs else "uniform"),
        bounds=section.bounds,
        impute=section.impute,
        pool=section.pool,
    )
    layout = wanted.layout
    facts = of.facts(layout.length)
    step = LocalStatistic(layout=layout)
    build = release_builder(
        experiment.protection,
        wanted.silos,
        step,
        facts,
        key="preprocessing.silos",
        colluding=experiment.privacy.colluding_silos,
    )
    multiplier = multiplier_of(experiment.shares.preprocessing, whole_of(experiment.privacy))
    purpose = "histograms of columns, which bounds, medians and pooled categories follow from"
    release = side_release("prep/1", purpose, step, build(multiplier), facts)
    noise = cdf_noise(wanted, release.numbered(0).std()) / of.schema.n_users
    if noise > MOST_NOISE:
        raise ConfigError(
            f"preprocessing: the noise on a number of people below a bound would be {noise:.0%} of all people, and "
            f"{MOST_NOISE:.0%} is allowed; give fewer columns, or a larger privacy.epsilon or budget.preprocessing"
        )
    return Preprocessing(wanted=wanted, release=release, noise=noise)


def make_preprocessing(
    planned: Preprocessing,
    experiment: Experiment,
    population: Population,
    folder: RunFolder,
    ledger: Ledger,
    privacy: PrivacyRandomness,
) -> Experiment:
    """Charge, make and write a preprocessing that is not written yet; return the experiment on the refined schema.

    It is of the records that are trained on; held-out ones have no part in it. Noise comes from the run's own source.

    Raises:
        ConfigError: the declared schema is the one that another run has refined. It was planned on the schema that run
            declared, which is beside it, and not on the one that is named.
    """
    table = experiment.data.table
    assert table is not None, "Experiment asks for it"
    beside = table.schema_file.parent
    if (beside / PREPROCESSED).exists() and beside.resolve() != folder.path.resolve():
        raise ConfigError(
            f"data.table.schema_file: {table.schema_file} was refined by another run; remove [preprocessing] to train "
            "on it, or copy it out of that run's folder to refine it further; nothing was charged"
        )
    found = read_preprocessed(folder.path)
    if found is None:
        charge(ledger, experiment.name, (planned.release,))
        release = planned.release_of(experiment)
        made = noisy_sum(release, _trained(planned, experiment, population), privacy)
        found = planned.preprocessed(experiment, made)
    write_preprocessed(folder, found)
    return folder.refined(experiment)


def write_preprocessed(folder: RunFolder, found: Preprocessed) -> None:
    """Put a preprocessing on the disk, and the schema that follows from it."""
    folder.write_json(PREPROCESSED, found.to_json())
    document = found.schema.model_dump(mode="json", exclude_none=True)
    folder.write(SCHEMA, tomlkit.dumps(document).encode())


def _trained(planned: Preprocessing, experiment: Experiment, population: Population) -> ColumnTable:
    """Return the columns of the records that are trained on."""
    table = experiment.data.table
    assert table is not None
    found = read_columns(planned.wanted.schema_, table.files, planned.release.step.columns)
    if population.test_rows is None:
        return found
    return found.take(np.setdiff1d(np.arange(len(found)), population.test_rows))
