"""Plan one release of statistics from public numbers; find existing releases of the same request.

Whether a request is refused depends on public numbers only, and is decided before the tables are read.
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
        step: what each silo computes from its records: the vector whose noisy sum is released.
        plan: predicted error of every block of that vector; a block is one requested figure by its groups.
    """

    file: ClassVar[str] = FILE

    document: ReleaseDocument
    step: LocalStatistic
    plan: tuple[Planned, ...]

    def release(self, before: NoisySums) -> Release:
        assert not before, "statistics are one release"
        return self.series.releases[0]

    def read(self, folder: RunFolder) -> NoisySums:
        """Return the released sum of a folder, as a tuple; empty if nothing is released.

        Raises:
            RunFolderError: the file is damaged or is a release of another request.
        """
        if not (folder / FILE).exists():
            return ()
        stored, declared = read_released(folder.path), self.declared
        requested = (self.document.statistics, declared.schema, declared.silos)
        if (stored.request, stored.schema, stored.silos) != requested:
            raise RunFolderError(
                f"{folder / FILE} is a release of other figures, or of other tables, than requested"
            )
        return (stored.noisy_sum,)

    def to_json(self, sums: NoisySums) -> dict[str, Any]:
        (noisy_sum,) = sums
        return ReleasedStatistics(
            name=self.document.name,
            request=self.document.statistics,
            schema=self.declared.schema,
            silos=self.declared.silos,
            noise_multiplier=nominal_multiplier(self.release(()).method.channel),
            noisy_sum=noisy_sum,
        ).to_json()


def prepare_release(document: ReleaseDocument, declared: DeclaredTables | None = None) -> PreparedRelease:
    """Compose a release and find its noise from the document and the schema; no table is opened.

    See :func:`fedveil.run.releases.requests.prepare_document`.
    """
    assert document.data.table is not None, "TableDocument requires a table"
    declared = declared_tables(document.data.table) if declared is None else declared
    request, schema = document.statistics, declared.schema
    step, silos = compose(request, schema, declared.silos), request.silos
    design = design_release(document, silos, step, declared, key="statistics.silos")
    multiplier, series = calibrate_releases(
        document.privacy, schema.n_users, lambda z: (design.with_noise(z),)
    )
    plan = predict_errors(
        request,
        step.layout,
        n_users=schema.n_users,
        noise_std=series.releases[0].std(),
        unit=unit_of(silos, len(declared.silos)),
    )
    check(plan, multiplier, series.declared_for)
    return PreparedRelease(
        document=document,
        declared=declared,
        series=series,
        notes=(_counting_note(silos, len(declared.silos)), *schema.matching),
        step=step,
        plan=plan,
    )


def find_release_folder(document: ReleaseDocument, prepared: PreparedRelease, parent: Path) -> Path | None:
    """Find an earlier release that already has every requested figure of the same tables.

    Args:
        document: the new request.
        prepared: the new request, prepared.
        parent: folder whose sub-folders are searched.

    Returns:
        The run folder of the first such release in alphabetical order; None if there is none.
    """
    request, declared = document.statistics, prepared.declared
    requested = {(block.encoder, block.groups) for block in prepared.step.layout.blocks}
    for path in sorted(parent.glob(f"*/{FILE}")):
        earlier, stored = read_releases(path.parent / STATISTICS, ReleaseDocument), read_released(path.parent)
        if (earlier.data, stored.schema, stored.silos) != (document.data, declared.schema, declared.silos):
            continue
        combined = (stored.request.combine, stored.request.order, stored.request.silos)
        if combined != (request.combine, request.order, request.silos):
            continue
        if requested <= {(block.encoder, block.groups) for block in stored.layout.blocks}:
            return path.parent
    return None


def _counting_note(silos: SiloWeights, n_silos: int) -> str:
    """Return the sentence for the statement on how users with records in several silos are counted."""
    if silos == "uniform" and n_silos > 1:
        return (
            "pairs of a person and a silo are counted: a person counts 1 in each silo that has records of that person, "
            "and is protected in all of them together"
        )
    return (
        "a person counts 1, spread over that person's records; somebody with two ids counts as two people, each "
        "protected separately"
    )
