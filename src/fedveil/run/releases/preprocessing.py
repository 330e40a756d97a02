"""What is declared, refined by releases before training: planned, charged, made, and written into the run folder.

    declared schema ─► release of columns ─► preprocessing.json, schema.toml ─► the run is prepared again, on that one
    declared clip   ─► release of the lengths of updates ─► preprocessing.json ─► prepared again, with that clip

Nothing else is read from records: scaling, encoding and the model's width follow from the refined schema. A resumed
run, an audit and a bundle read the same files.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import tomlkit

from fedveil.data.schema import Schema
from fedveil.errors import CompositionError, ConfigError, RunFolderError
from fedveil.files import read_json
from fedveil.methods.method import Method
from fedveil.run.config.declared_tables import DeclaredTables
from fedveil.run.config.experiment import Experiment
from fedveil.run.folder.run_folder import PREPROCESSED, SCHEMA, RunFolder
from fedveil.run.releases.release import Release
from fedveil.run.releases.release_method import default_silo_weights, design_release
from fedveil.run.releases.side_releases import as_run_release, document_multiplier, shared_multiplier
from fedveil.statistics.layout import Layout
from fedveil.statistics.local_vectors import LocalStatistic
from fedveil.statistics.preprocessing import (
    LENGTH,
    PreprocessingRequest,
    cdf_noise,
    quantile_of_lengths,
    refine_schema,
)
from fedveil.statistics.stored import SCHEMA_VERSION, NoisySum, NoisySums, restoring

MOST_NOISE: Final = 0.2
"""Largest predicted noise on a sum of leading bins, as a share of all people: bounds have no tail to go by beyond."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Preprocessing:
    """A preprocessing, ready to be made; public numbers alone.

    Attributes:
        wanted: what it is of.
        releases: in their order; the last is of lengths of updates where a clip is asked for.
        noise: predicted standard deviation of a sum of leading bins, as a share of all people.
        clip: the bound of an update that was found; None: it is as it was declared.
    """

    wanted: PreprocessingRequest
    releases: tuple[Release, ...]
    noise: float
    clip: float | None = None

    def release(self, before: NoisySums) -> Release:
        """Return the release after these."""
        return self.releases[len(before)]

    def combine_releases(self, experiment: Experiment, made: NoisySums) -> ReleasedPreprocessing:
        """Return what follows from the released sums."""
        return ReleasedPreprocessing(run=experiment.name, wanted=self.wanted, made=made)

    def check(self, method: Method) -> None:
        """Refuse to count lengths of updates by person where an update is not one person's.

        Raises:
            CompositionError: says what would do.
        """
        if self.wanted.clip is not None and method.contribution.per != "pair":
            raise CompositionError(
                "preprocessing.clip: counts people by the lengths of their updates, one for every (silo, user) pair; "
                f"contributions of {method.name} are those of a {method.contribution.per}: take a method of pairs, "
                "such as uldp-avg, or give method.clip alone"
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class ReleasedPreprocessing:
    """What a preprocessing released so far.

    Attributes:
        run: its name.
        wanted: what it is of.
        made: the released sums.
    """

    run: str
    wanted: PreprocessingRequest
    made: NoisySums

    @property
    def schema(self) -> Schema:
        """The refined schema; as declared where no column is looked at."""
        if self.wanted.numbers or self.wanted.pool:
            return refine_schema(self.wanted, self.made[0].vector, self.made[0].std)
        return self.wanted.schema_

    @property
    def clip(self) -> float | None:
        """The bound of an update that was found; None where none is, or not yet."""
        if self.wanted.clip is None or len(self.made) < len(self.wanted.layouts):
            return None
        return quantile_of_lengths(self.wanted, self.made[-1].vector, self.made[-1].std)

    def to_json(self) -> dict[str, Any]:
        """Return the releases as JSON."""
        return {
            "schema_version": SCHEMA_VERSION,
            "run": self.run,
            "wanted": self.wanted.model_dump(mode="json", exclude_none=True),
            "clip": self.clip,
            "releases": [
                {"provenance": f"{self.run}/{_named(place)}"} | one.to_json()
                for place, one in enumerate(self.made)
            ],
        }

    @classmethod
    def from_json(cls, data: Any, origin: object) -> ReleasedPreprocessing:
        """Return the releases of a document.

        Raises:
            RunFolderError: damaged, or another version's.
        """
        with restoring(data, origin):
            wanted = PreprocessingRequest.model_validate(data["wanted"])
            made = tuple(
                NoisySum.from_json(one, layout.length, origin)
                for one, layout in zip(data["releases"], wanted.layouts, strict=False)
            )
            if not 0 < len(made) == len(data["releases"]):
                raise RunFolderError(f"{origin} is damaged: it has other releases than were asked for")
            return cls(run=str(data["run"]), wanted=wanted, made=made)


def _named(place: int) -> str:
    """Return what the release after so many is called within the run."""
    return f"prep/{place + 1}"


def read_preprocessed(folder: Path) -> ReleasedPreprocessing | None:
    """Return what a run's preprocessing released; None where there is nothing of it.

    Raises:
        RunFolderError: a damaged one.
    """
    path = folder / PREPROCESSED
    if not path.exists():
        return None
    return ReleasedPreprocessing.from_json(read_json(path, RunFolderError), path)


def wanted_preprocessing(experiment: Experiment, of: DeclaredTables) -> PreprocessingRequest | None:
    """Return what an experiment wants refined, if it does; no table is opened.

    Raises:
        ConfigError: a clip that is no number.
    """
    section = experiment.preprocessing
    if section is None:
        return None
    return PreprocessingRequest(
        schema_=of.first,
        silo_names=of.silos,
        silos=section.silos or default_silo_weights(experiment),
        bounds=section.bounds,
        impute=section.impute,
        pool=section.pool,
        clip=None if section.clip is None else _middle(experiment),
    )


def plan_preprocessing(experiment: Experiment, of: DeclaredTables) -> Preprocessing | None:
    """Plan the preprocessing that an experiment asks for, if it does; no table is opened.

    Args:
        experiment: what asks for it.
        of: what is declared of its tables.

    Raises:
        ConfigError: columns that cannot be refined, or a budget that is too small, with what would do.
    """
    wanted = wanted_preprocessing(experiment, of)
    if wanted is None:
        return None
    looked_at = [len(layout.blocks) for layout in wanted.layouts]
    releases = tuple(
        _planned(experiment, wanted, of, place, many / sum(looked_at)) for place, many in enumerate(looked_at)
    )
    noise = max(
        cdf_noise(layout, wanted.unit, one.std())
        for one, layout in zip(releases, wanted.layouts, strict=True)
    )
    share = noise / of.schema.n_users
    if share > MOST_NOISE:
        raise ConfigError(
            f"preprocessing: the noise on a number of people below a bound would be {share:.0%} of all people, and "
            f"{MOST_NOISE:.0%} is allowed; give fewer columns, or a larger privacy.epsilon or budget.preprocessing"
        )
    return Preprocessing(wanted=wanted, releases=releases, noise=share, clip=of.clip)


def _middle(experiment: Experiment) -> float:
    """Return the declared clip, around which the grid of lengths lies."""
    clip = experiment.method.get("clip")
    if not isinstance(clip, int | float):
        raise ConfigError(
            "preprocessing.clip: method.clip must be a number, around which lengths of updates are counted; a clip "
            "that moves follows a quantile of them by itself"
        )
    return float(clip)


def _planned(
    experiment: Experiment, wanted: PreprocessingRequest, of: DeclaredTables, place: int, share: float
) -> Release:
    """Return one of the releases, which has a share of the preprocessing's budget."""
    layout: Layout = wanted.layouts[place]
    step = LocalStatistic(layout=layout)
    design = design_release(experiment, wanted.silos, step, of, key="preprocessing.silos")
    found = design.with_noise(
        shared_multiplier(share * experiment.shares.preprocessing, document_multiplier(experiment.privacy))
    )
    of_updates = LENGTH in layout.columns
    purpose = (
        "people by the length of their updates, which the clip follows from"
        if of_updates
        else "histograms of columns, which bounds, medians and pooled categories follow from"
    )
    return as_run_release(found, experiment.rounds, name=_named(place), purpose=purpose, of_model=of_updates)


def check_declared(experiment: Experiment, folder: RunFolder) -> None:
    """Refuse to refine what another run has refined: it is planned on what that run declared, which lies beside it.

    Raises:
        ConfigError: the schema that is named is such a one.
    """
    table = experiment.data.table
    assert table is not None, "Experiment asks for it"
    beside = table.schema_file.parent
    if (beside / PREPROCESSED).exists() and beside.resolve() != folder.path.resolve():
        raise ConfigError(
            f"data.table.schema_file: {table.schema_file} was refined by another run; remove [preprocessing] to train "
            "on it, or copy it out of that run's folder to refine it further; nothing was charged"
        )


def write_preprocessed(folder: RunFolder, found: ReleasedPreprocessing) -> None:
    """Put a preprocessing on the disk, and the schema that follows from it."""
    folder.write_json(PREPROCESSED, found.to_json())
    folder.write(SCHEMA, _schema_text(found))


def settle_schema(folder: RunFolder) -> bool:
    """Write the schema that a folder's releases give, where a crash came before it; return whether one had.

    Raises:
        RunFolderError: a damaged folder.
    """
    found, path = read_preprocessed(folder.path), folder / SCHEMA
    if found is None or (path.exists() and path.read_bytes() == _schema_text(found)):
        return False
    folder.write(SCHEMA, _schema_text(found))
    return True


def _schema_text(found: ReleasedPreprocessing) -> bytes:
    return tomlkit.dumps(found.schema.model_dump(mode="json", exclude_none=True)).encode()
