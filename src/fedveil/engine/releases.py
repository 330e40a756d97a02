"""One release of statistics: planned from public numbers, charged, summed over the silos, and written down.

In this order: everything that can be refused is refused from public numbers; the tables are read; the ledger is
charged, durably; the silos' vectors are bounded, added up and sent through the method's protection; what was released
is written. What a release shows is decoded from that file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float64

from fedveil.engine.folder import RunFolder
from fedveil.engine.release_document import DOCUMENT, ReleaseDocument, read_release_document
from fedveil.engine.release_method import release_builder
from fedveil.engine.release_series import Series, calibrated, declared_silos
from fedveil.engine.release_sum import noisy_sum
from fedveil.methods.claims import PublicFacts
from fedveil.methods.derive import derive
from fedveil.methods.method import Method
from fedveil.population.columns import read_columns
from fedveil.population.schema import Schema, read_schema
from fedveil.privacy.events import GaussianEvent
from fedveil.privacy.statement import Statement
from fedveil.statistics.compose import compose
from fedveil.statistics.local import LocalStatistic
from fedveil.statistics.plan import Planned, check, planned
from fedveil.statistics.released import FILE, Released, dumps, read_released, unit_of


@dataclass(frozen=True, kw_only=True, eq=False)
class PreparedRelease:
    """A release, ready to be made; public numbers alone.

    Attributes:
        document: what was asked for.
        schema: of the tables.
        silos: names of all silos.
        method: the composition.
        step: its local step.
        series: what it guarantees.
        plan: what is predicted of every block.
    """

    document: ReleaseDocument
    schema: Schema
    silos: tuple[str, ...]
    method: Method
    step: LocalStatistic
    series: Series
    plan: tuple[Planned, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class ReleaseOutcome:
    """What a release left behind."""

    folder: Path
    released: Released
    statement: Statement


def prepare_release(document: ReleaseDocument) -> PreparedRelease:
    """Compose a release and find its noise, from the document and the schema; no table is opened.

    Raises:
        FedveilError: whatever is wrong, or too small a budget for what is asked, named by its key.
    """
    table = document.data.table
    assert table is not None
    schema = read_schema(table.schema_file)
    silos = declared_silos(schema, table.files)
    step = compose(document.statistics, schema, silos)
    facts = PublicFacts(n_silos=len(silos), n_users=schema.n_users, dimension=step.layout.length)
    build = release_builder(
        document.protection,
        document.statistics.silos,
        step,
        facts,
        key="statistics.silos",
        colluding=document.privacy.colluding_silos,
    )
    privacy = document.privacy
    multiplier, series = calibrated(privacy, lambda z: ((derive(build(z), facts), step.length),))
    method = build(multiplier)
    std = method.noise_std(len(silos))
    assert std is not None
    plan = planned(
        document.statistics,
        step.layout,
        n_users=schema.n_users,
        noise_std=std,
        unit=unit_of(document.statistics, len(silos)),
    )
    check(
        plan,
        multiplier,
        lambda z: series.accountant.epsilon(GaussianEvent(noise_multiplier=z), privacy.delta),
    )
    return PreparedRelease(
        document=document,
        schema=schema,
        silos=silos,
        method=method,
        step=step,
        series=series,
        plan=plan,
    )


def make_release(prepared: PreparedRelease, parent: Path) -> ReleaseOutcome:
    """Make a release in a new folder under ``parent``.

    Raises:
        FedveilError: what is wrong with the tables; a ledger that cannot be written. Nothing is released then.
    """
    document = prepared.document
    assert document.data.table is not None
    table = read_columns(prepared.schema, document.data.table.files, prepared.step.columns)
    folder = RunFolder.create(parent, document, DOCUMENT)
    series = prepared.series
    with series.ledger(folder) as ledger:
        ledger.charge(run=document.name, round=1, attempt=0, event=series.guarantees[0].event)
        spent = ledger.spent()
    vector = noisy_sum(prepared.method, prepared.step, table, series.randomness())
    released = _released(prepared, vector)
    folder.write(FILE, dumps(released))
    public = PublicFacts(n_silos=len(prepared.silos), n_users=prepared.schema.n_users)
    statement = series.statement(document.name, spent, public, notes=(_counted(prepared),))
    folder.write_json("privacy.json", statement.to_json())
    return ReleaseOutcome(folder=folder.path, released=released, statement=statement)


def answered(document: ReleaseDocument, prepared: PreparedRelease, parent: Path) -> Path | None:
    """Return a folder whose release has every cell that is asked for, of the same tables; None if there is none."""
    for path in sorted(parent.glob(f"*/{FILE}")):
        before, stored = read_release_document(path.parent / DOCUMENT), read_released(path.parent)
        same = (before.data, stored.schema, stored.silos) == (document.data, prepared.schema, prepared.silos)
        asked, had = document.statistics, stored.request
        alike = (asked.combine, asked.order, asked.silos) == (had.combine, had.order, had.silos)
        cells = {(block.encoder, block.groups) for block in stored.layout.blocks}
        if same and alike and {(one.encoder, one.groups) for one in prepared.step.layout.blocks} <= cells:
            return path.parent
    return None


def _released(prepared: PreparedRelease, vector: Float64[np.ndarray, " d"]) -> Released:
    std = prepared.method.noise_std(len(prepared.silos))
    assert std is not None
    return Released(
        name=prepared.document.name,
        request=prepared.document.statistics,
        schema=prepared.schema,
        silos=prepared.silos,
        noise_multiplier=prepared.method.channel.nominal(),
        noise_std=std,
        vector=vector,
    )


def _counted(prepared: PreparedRelease) -> str:
    if prepared.document.statistics.silos == "uniform" and len(prepared.silos) > 1:
        return (
            "what is counted is person-silo pairs: a person counts 1 in every silo that has a record of hers, and is "
            "protected in all of them together"
        )
    return (
        "a person counts 1, spread over her records; two ids for one person count 2 and are protected as two"
    )
