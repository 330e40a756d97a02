"""Plan one release of statistics from public numbers; find existing releases of the same request.

All refusals depend on public numbers and happen before the tables are read.
:mod:`fedveil.run.releases.series` gives the order of the steps of a release.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from fedveil.errors import RunFolderError
from fedveil.methods.capabilities import nominal_multiplier
from fedveil.run.config.release_document import (
    STATISTICS,
    DeclaredTables,
    ReleaseDocument,
    declared_tables,
    read_releases,
)
from fedveil.run.folder.run_folder import RunFolder
from fedveil.run.releases.release import Release, design_release
from fedveil.run.releases.series import PreparedReleases, calibrate_releases
from fedveil.statistics.compose import Planned, check, compose, predict_errors
from fedveil.statistics.local_vectors import LocalStatistic
from fedveil.statistics.request import SiloWeights, unit_of
from fedveil.statistics.result import FILE, NoisySums, ReleasedStatistics, read_released


@dataclass(frozen=True, kw_only=True, eq=False)
class PreparedRelease(PreparedReleases):
    """A release of statistics that is ready to be made; public numbers only.

    Attributes:
        step: the local step of the release.
        plan: predicted error of every block.
    """

    file: ClassVar[str] = FILE

    document: ReleaseDocument
    step: LocalStatistic
    plan: tuple[Planned, ...]

    def release(self, before: NoisySums) -> Release:
        assert not before, "there is no second release"
        return self.series.releases[0]

    def read(self, folder: RunFolder) -> NoisySums:
        """Return the released sum of a folder; empty if nothing is released.

        Raises:
            RunFolderError: the file is damaged or is a release of another request.
        """
        if not (folder / FILE).exists():
            return ()
        stored, of = read_released(folder.path), self.declared
        if (stored.request, stored.schema, stored.silos) != (self.document.statistics, of.schema, of.silos):
            raise RunFolderError(
                f"{folder / FILE} is a release of other figures, or of other tables, than asked for"
            )
        return (stored.made,)

    def to_json(self, made: NoisySums) -> dict[str, Any]:
        (found,) = made
        return ReleasedStatistics(
            name=self.document.name,
            request=self.document.statistics,
            schema=self.declared.schema,
            silos=self.declared.silos,
            noise_multiplier=nominal_multiplier(self.release(()).method.channel),
            made=found,
        ).to_json()


def prepare_release(document: ReleaseDocument, of: DeclaredTables | None = None) -> PreparedRelease:
    """Compose a release and find its noise from the document and the schema; no table is opened.

    See :func:`fedveil.run.releases.requests.prepare_document`.
    """
    assert document.data.table is not None, "TableDocument asks for it"
    of = declared_tables(document.data.table) if of is None else of
    request = document.statistics
    step, silos = compose(request, of.schema, of.silos), request.silos
    design = design_release(document, silos, step, of, key="statistics.silos")
    multiplier, series = calibrate_releases(
        document.privacy, of.schema.n_users, lambda z: (design.with_noise(z),)
    )
    plan = predict_errors(
        request,
        step.layout,
        n_users=of.schema.n_users,
        noise_std=series.releases[0].std(),
        unit=unit_of(silos, len(of.silos)),
    )
    check(plan, multiplier, series.declared_for)
    return PreparedRelease(
        document=document,
        declared=of,
        series=series,
        notes=(_counted(silos, len(of.silos)), *of.schema.matching),
        step=step,
        plan=plan,
    )


def find_release_folder(document: ReleaseDocument, prepared: PreparedRelease, parent: Path) -> Path | None:
    """Return a folder whose release has every requested cell of the same tables; None if there is none."""
    for path in sorted(parent.glob(f"*/{FILE}")):
        before, stored = read_releases(path.parent / STATISTICS, ReleaseDocument), read_released(path.parent)
        of = prepared.declared
        same = (before.data, stored.schema, stored.silos) == (document.data, of.schema, of.silos)
        asked, had = document.statistics, stored.request
        alike = (asked.combine, asked.order, asked.silos) == (had.combine, had.order, had.silos)
        cells = {(block.encoder, block.groups) for block in stored.layout.blocks}
        if same and alike and {(one.encoder, one.groups) for one in prepared.step.layout.blocks} <= cells:
            return path.parent
    return None


def _counted(silos: SiloWeights, n_silos: int) -> str:
    """Return the note of a statement on the counting of users over silos."""
    if silos == "uniform" and n_silos > 1:
        return (
            "pairs of a person and a silo are counted: a person counts 1 in each silo that has records of that person, "
            "and is protected in all of them together"
        )
    return (
        "a person counts 1, spread over that person's records; somebody with two ids counts as two people, each "
        "protected separately"
    )
