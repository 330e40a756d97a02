"""Plan one regression: three releases of one estimating equation, charged one by one and stored.

The coefficients of a release follow from the earlier releases, so they are public. All refusals depend on public
numbers and happen before the tables are read. A charge is on disk before its release is made.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Final

from fedveil.run.config.release_document import (
    INFERENCE,
    DeclaredTables,
    InferenceDocument,
    declared_tables,
    read_releases,
)
from fedveil.run.folder.run_folder import RunFolder
from fedveil.run.releases.release import Release, design_release
from fedveil.run.releases.series import PreparedReleases, calibrate_releases
from fedveil.statistics.inference.plan import PlannedEffect, check, predict_errors
from fedveil.statistics.inference.result import FILE, FittedRegression, read_begun
from fedveil.statistics.request import unit_of
from fedveil.statistics.result import NoisySums


@dataclass(frozen=True, kw_only=True, eq=False)
class PreparedInference(PreparedReleases):
    """A regression that is ready to be released; public numbers only.

    Attributes:
        fitted: the regression without any release.
        multiplier: noise multiplier of all releases composed.
        plan: predicted error of every coefficient.
    """

    file: ClassVar[str] = FILE

    document: InferenceDocument
    fitted: FittedRegression
    multiplier: float
    plan: tuple[PlannedEffect, ...]

    def release(self, before: NoisySums) -> Release:
        """Return the next release, at the coefficients that follow from the releases before it."""
        index = len(before)
        return replace(self.series.releases[index], step=self._with(before).equation(index))

    def read(self, folder: RunFolder) -> NoisySums:
        if not (folder / FILE).exists():
            return ()
        return read_begun(folder.path).releases

    def to_json(self, sums: NoisySums) -> dict[str, Any]:
        """Return the regression with these releases as JSON."""
        return self._with(sums).to_json()

    def _with(self, sums: NoisySums) -> FittedRegression:
        return replace(self.fitted, releases=sums)


def regression_without_noise(document: InferenceDocument, declared: DeclaredTables) -> FittedRegression:
    """Return the regression of a document, without any release."""
    return FittedRegression(
        name=document.name, request=document.inference, schema=declared.schema, silos=declared.silos
    )


def prepare_inference(
    document: InferenceDocument, declared: DeclaredTables | None = None
) -> PreparedInference:
    """Compose the releases and find their noise from the document and the schema; no table is opened.

    See :func:`fedveil.run.releases.requests.prepare_document`.
    """
    request = document.inference
    assert document.data.table is not None, "TableDocument asks for it"
    declared = declared_tables(document.data.table) if declared is None else declared
    schema, silos = declared.schema, declared.silos
    fitted = regression_without_noise(document, declared)
    steps = tuple(fitted.equation(index) for index in range(len(fitted.parts)))

    designs = [
        design_release(document, request.silos, step, declared, key="inference.silos") for step in steps
    ]

    def releases(multiplier: float) -> tuple[Release, ...]:
        placed = enumerate(zip(designs, fitted.parts, strict=True), start=1)
        return tuple(
            replace(design.with_noise(part.multiplier(multiplier)), number=number)
            for number, (design, part) in placed
        )

    multiplier, series = calibrate_releases(document.privacy, schema.n_users, releases)
    noises = [release.std() for release in series.releases]
    unit = unit_of(request.silos, len(silos))

    def planned_at(factor: float) -> tuple[PlannedEffect, ...]:
        noisy = [(step, factor * noise) for step, noise in zip(steps, noises, strict=True)]
        return predict_errors(noisy, schema.n_users, unit)

    check(planned_at, fitted.family, multiplier, series.declared_for)
    return PreparedInference(
        document=document,
        declared=declared,
        notes=(*NOTES, *declared.schema.matching),
        fitted=fitted,
        multiplier=multiplier,
        series=series,
        plan=planned_at(1.0),
    )


NOTES: Final = (
    "a person counts 1, spread over that person's records; somebody with two ids counts as two people, each protected "
    "separately",
    "records without a value in the target or in one of the features are left out",
    "the intervals are valid if the mean follows the model (otherwise they are intervals for the best-fitting "
    "coefficients), if the number of a person's records carries no information beyond the features, and, for a linear "
    "target, if the errors are symmetric",
    "the p-values and intervals are valid for one regression that was chosen before seeing results; every further "
    "regression is charged",
)


def find_inference_folder(document: InferenceDocument, parent: Path) -> Path | None:
    """Return a folder with the same regression of the same tables, complete or interrupted; else None."""
    for path in sorted(parent.glob(f"*/{INFERENCE}")):
        before = read_releases(path, InferenceDocument)
        if (before.data, before.inference) == (document.data, document.inference):
            return path.parent
    return None
