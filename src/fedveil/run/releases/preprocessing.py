"""Refine schema and clip by releases before training: plan, charge, make, and write to the run folder.

    declared schema ─► release of columns ─► preprocessing.json, schema.toml ─► prepare the run on that schema
    declared clip   ─► release of the lengths of updates ─► preprocessing.json ─► prepare the run with that clip

Nothing else is read from records: scaling, encoding and the model's width follow from the refined schema. A resumed
run, an audit and a bundle read the same files.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import tomlkit

from fedveil.data.schema import Schema
from fedveil.errors import CompositionError, ConfigError
from fedveil.methods.method import Method
from fedveil.run.config.experiment import Experiment
from fedveil.run.config.release_document import DeclaredTables
from fedveil.run.folder.run_folder import PREPROCESSED, SCHEMA, RunFolder
from fedveil.run.releases.release import Release, default_silo_weights, design_release
from fedveil.run.releases.side_releases import as_run_release, document_multiplier, shared_multiplier
from fedveil.statistics.blocks import Layout
from fedveil.statistics.local_vectors import LocalStatistic
from fedveil.statistics.preprocessing import (
    LENGTH,
    PreprocessingRequest,
    cdf_noise,
    quantile_of_lengths,
    refine_schema,
)
from fedveil.statistics.result import NoisySums, figures_json, read_figures, restore_sums, restoring

MOST_NOISE: Final = 0.2
"""Largest predicted noise on a cumulative count, as a fraction of all users.

With more noise, the tail of a histogram that decides a bound is not visible.
"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Preprocessing:
    """A planned preprocessing that is ready to be released; public numbers only.

    Attributes:
        request: the requested refinements.
        releases: the side releases in order; if a clip is requested, the last one counts lengths of updates.
        noise: predicted standard deviation of a cumulative count, as a fraction of all users.
        clip: the bound of an update that a release found; None: as declared.
    """

    request: PreprocessingRequest
    releases: tuple[Release, ...]
    noise: float
    clip: float | None = None

    def release(self, before: NoisySums) -> Release:
        """Return the release after ``before``."""
        return self.releases[len(before)]

    def combine_releases(self, experiment: Experiment, sums: NoisySums) -> ReleasedPreprocessing:
        """Return the result of the released sums."""
        return ReleasedPreprocessing(run=experiment.name, request=self.request, sums=sums)

    def check(self, method: Method) -> None:
        """Check that an update belongs to one user, if lengths of updates are counted by user.

        Raises:
            CompositionError: the method's contributions are not (silo, user) pairs; the message says which methods
                fit.
        """
        if self.request.clip is not None and method.contribution.per != "pair":
            raise CompositionError(
                "preprocessing.clip: counts people by the lengths of their updates, one for every (silo, user) pair; "
                f"contributions of {method.name} are those of a {method.contribution.per}: take a method of pairs, "
                "such as uldp-avg, or give method.clip alone"
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class ReleasedPreprocessing:
    """The releases of a preprocessing that are made so far.

    Attributes:
        run: name of the run.
        request: the requested refinements.
        sums: the released sums.
    """

    run: str
    request: PreprocessingRequest
    sums: NoisySums

    @property
    def schema(self) -> Schema:
        """The refined schema; the declared one if no column is refined."""
        if self.request.numbers or self.request.pool:
            return refine_schema(self.request, self.sums[0].vector, self.sums[0].std)
        return self.request.schema_

    @property
    def clip(self) -> float | None:
        """The bound of an update that a release found; None if none is requested or made yet."""
        if self.request.clip is None or len(self.sums) < len(self.request.layouts):
            return None
        return quantile_of_lengths(self.request, self.sums[-1].vector, self.sums[-1].std)

    def to_json(self) -> dict[str, Any]:
        """Return the releases as JSON."""
        return figures_json(
            self.run,
            self.request,
            (
                {"provenance": f"{self.run}/{_named(index)}"} | noisy_sum.to_json()
                for index, noisy_sum in enumerate(self.sums)
            ),
            clip=self.clip,
        )

    @classmethod
    def from_json(cls, data: Any, origin: object) -> ReleasedPreprocessing:
        """Restore the releases from a JSON document.

        Raises:
            RunFolderError: the document is damaged or of another version.
        """
        with restoring(data, origin):
            request = PreprocessingRequest.model_validate(data["request"])
            sums = restore_sums(data, [layout.length for layout in request.layouts], origin, least=1)
            return cls(run=str(data["name"]), request=request, sums=sums)


def _named(index: int) -> str:
    """Return the name within the run of the release after ``index`` others."""
    return f"prep/{index + 1}"


def read_preprocessed(folder: Path) -> ReleasedPreprocessing | None:
    """Return the released preprocessing of a run; None if nothing of it is released.

    Raises:
        RunFolderError: the file is damaged.
    """
    return read_figures(folder / PREPROCESSED, ReleasedPreprocessing)


def wanted_preprocessing(experiment: Experiment, declared: DeclaredTables) -> PreprocessingRequest | None:
    """Return the refinements that an experiment requests; None if it requests none. No table is opened.

    Raises:
        ConfigError: a clip is requested and ``method.clip`` is not a number.
    """
    section = experiment.preprocessing
    if section is None:
        return None
    return PreprocessingRequest(
        schema_=declared.first,
        silo_names=declared.silos,
        silos=section.silos or default_silo_weights(experiment),
        bounds=section.bounds,
        impute=section.impute,
        pool=section.pool,
        clip=None if section.clip is None else _middle(experiment),
    )


def plan_preprocessing(experiment: Experiment, declared: DeclaredTables) -> Preprocessing | None:
    """Plan the preprocessing of an experiment; return None if it requests none. No table is opened.

    Args:
        experiment: the experiment with its budget.
        declared: declared facts about its tables.

    Raises:
        ConfigError: columns that cannot be refined, or a budget that is too small; the message says which values
            suffice.
    """
    request = wanted_preprocessing(experiment, declared)
    if request is None:
        return None
    # The releases share the budget in proportion to their numbers of blocks.
    looked_at = [len(layout.blocks) for layout in request.layouts]
    releases = tuple(
        _plan_release(experiment, request, declared, index, many / sum(looked_at))
        for index, many in enumerate(looked_at)
    )
    noise = max(
        cdf_noise(layout, request.unit, release.std())
        for release, layout in zip(releases, request.layouts, strict=True)
    )
    share = noise / declared.schema.n_users
    if share > MOST_NOISE:
        raise ConfigError(
            f"preprocessing: the noise on a number of people below a bound would be {share:.0%} of all people, and "
            f"{MOST_NOISE:.0%} is allowed; give fewer columns, or a larger privacy.epsilon or budget.preprocessing"
        )
    return Preprocessing(request=request, releases=releases, noise=share, clip=declared.clip)


def _middle(experiment: Experiment) -> float:
    """Return the declared clip, which is the middle of the grid of lengths.

    Raises:
        ConfigError: the clip is not a number.
    """
    clip = experiment.method.get("clip")
    if not isinstance(clip, int | float):
        raise ConfigError(
            "preprocessing.clip: method.clip must be a number, around which lengths of updates are counted; a clip "
            "that moves follows a quantile of them by itself"
        )
    return float(clip)


def _plan_release(
    experiment: Experiment, request: PreprocessingRequest, declared: DeclaredTables, index: int, share: float
) -> Release:
    """Return one of the releases, with ``share`` of the preprocessing's budget."""
    layout: Layout = request.layouts[index]
    step = LocalStatistic(layout=layout)
    design = design_release(experiment, request.silos, step, declared, key="preprocessing.silos")
    release = design.with_noise(
        shared_multiplier(share * experiment.shares.preprocessing, document_multiplier(experiment.privacy))
    )
    of_updates = LENGTH in layout.columns
    purpose = (
        "people by the length of their updates, which the clip follows from"
        if of_updates
        else "histograms of columns, which bounds, medians and pooled categories follow from"
    )
    return as_run_release(
        release, experiment.rounds, name=_named(index), purpose=purpose, of_model=of_updates
    )


def check_declared(experiment: Experiment, folder: RunFolder) -> None:
    """Check that the schema is not one that another run refined.

    A preprocessing is planned on declared facts. The schema in another run's folder has that run's declared facts
    next to it.

    Raises:
        ConfigError: another run refined the named schema.
    """
    table = experiment.data.table
    assert table is not None, "Experiment asks for it"
    schema_folder = table.schema_file.parent
    if (schema_folder / PREPROCESSED).exists() and schema_folder.resolve() != folder.path.resolve():
        raise ConfigError(
            f"data.table.schema_file: {table.schema_file} was refined by another run; remove [preprocessing] to train "
            "on it, or copy it out of that run's folder to refine it further; nothing was charged"
        )


def write_preprocessed(folder: RunFolder, preprocessed: ReleasedPreprocessing) -> None:
    """Write a preprocessing to disk, then the schema that follows from it."""
    # The release first: after a crash between the two writes `settle_schema` derives the schema from it.
    folder.write_json(PREPROCESSED, preprocessed.to_json())
    folder.write(SCHEMA, _schema_text(preprocessed))


def settle_schema(folder: RunFolder) -> bool:
    """Write the schema of a folder's releases if a crash prevented it; return whether it was missing.

    Raises:
        RunFolderError: a damaged folder.
    """
    preprocessed, path = read_preprocessed(folder.path), folder / SCHEMA
    if preprocessed is None or (path.exists() and path.read_bytes() == _schema_text(preprocessed)):
        return False
    folder.write(SCHEMA, _schema_text(preprocessed))
    return True


def _schema_text(preprocessed: ReleasedPreprocessing) -> bytes:
    """Return the refined schema as TOML."""
    return tomlkit.dumps(preprocessed.schema.model_dump(mode="json", exclude_none=True)).encode()
