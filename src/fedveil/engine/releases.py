"""One release of statistics: planned from public numbers, charged, summed over the silos, and written down.

In this order: everything that can be refused is refused from public numbers; the tables are read; the ledger is
charged, durably; the silos' vectors are bounded, added up and sent through the method's protection; what was released
is written. What a release shows is decoded from that file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from jaxtyping import Float64

from fedveil.engine.folder import RunFolder, finite
from fedveil.engine.release_document import DOCUMENT, ReleaseDocument, read_release_document
from fedveil.engine.release_method import release_builder
from fedveil.engine.release_sum import noisy_sum
from fedveil.errors import ConfigError
from fedveil.methods.claims import Guarantee, PublicFacts
from fedveil.methods.derive import derive
from fedveil.methods.method import Method
from fedveil.population.columns import read_columns
from fedveil.population.schema import Schema, read_schema
from fedveil.privacy.accountant import Accountant, epsilon_on_grid
from fedveil.privacy.accounting import make_accountant
from fedveil.privacy.calibration import calibrate_noise
from fedveil.privacy.events import Event, GaussianEvent
from fedveil.privacy.ledger import Budget, Ledger
from fedveil.privacy.statement import Disclosure, Statement, epsilons_by_accountant
from fedveil.randomness import PrivacyRandomness
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
        guarantee: what it guarantees.
        accountant: who bounds epsilon.
        plan: what is predicted of every block.
    """

    document: ReleaseDocument
    schema: Schema
    silos: tuple[str, ...]
    method: Method
    step: LocalStatistic
    guarantee: Guarantee
    accountant: Accountant
    plan: tuple[Planned, ...]

    @property
    def secure(self) -> bool:
        """Whether the noise cannot be predicted."""
        return self.document.privacy.insecure_seed is None

    def epsilon_of(self, event: Event) -> float:
        """Return the epsilon of an event of the release, the grid of its noise included."""
        loss = self.guarantee.grid_loss_after(1, self.step.layout.length)
        return epsilon_on_grid(self.accountant, event, self.document.privacy.delta, loss)


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
    silos = _silos(schema, table.files)
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
    accountant = make_accountant(document.privacy.accountant)
    event, loss = _costs(build, facts)
    budget = Budget(epsilon=_target(document), delta=document.privacy.delta, accountant=accountant)
    multiplier = calibrate_noise(event, budget, loss=loss)
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
    check(plan, multiplier, lambda z: accountant.epsilon(GaussianEvent(noise_multiplier=z), budget.delta))
    return PreparedRelease(
        document=document,
        schema=schema,
        silos=silos,
        method=method,
        step=step,
        guarantee=derive(method, facts),
        accountant=accountant,
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
    guarantee = prepared.guarantee
    with Ledger(folder / "ledger.jsonl", unit=guarantee.unit, adjacency=guarantee.adjacency) as ledger:
        ledger.charge(run=document.name, round=1, attempt=0, event=guarantee.event)
        spent = ledger.spent()
    vector = noisy_sum(prepared.method, prepared.step, table, _randomness(document))
    released = _released(prepared, vector)
    folder.write(FILE, dumps(released))
    statement = _statement(prepared, spent)
    folder.write_json("privacy.json", statement.to_json())
    return ReleaseOutcome(folder=folder.path, released=released, statement=statement)


def _randomness(document: ReleaseDocument) -> PrivacyRandomness:
    seed = document.privacy.insecure_seed
    return PrivacyRandomness.system() if seed is None else PrivacyRandomness.insecure(seed)


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


def _silos(schema: Schema, files: tuple[Path, ...]) -> tuple[str, ...]:
    """Return the names of all silos, without a look at a record."""
    if schema.silos is not None:
        return schema.silos
    if schema.silo is not None:
        raise ConfigError(
            "schema: the silos are those that occur in a column, and which occur is for records to tell; declare silos"
        )
    return tuple(sorted({path.stem for path in files}))


def _costs(
    build: Callable[[float], Method], facts: PublicFacts
) -> tuple[Callable[[float], Event], Callable[[float], float]]:
    """Return event and grid loss of the release as functions of its noise multiplier."""
    assert facts.dimension is not None
    dimension = facts.dimension

    def event(noise_multiplier: float) -> Event:
        return derive(build(noise_multiplier), facts).event

    def loss(noise_multiplier: float) -> float:
        return derive(build(noise_multiplier), facts).grid_loss_after(1, dimension)

    return event, loss


def _target(document: ReleaseDocument) -> float:
    assert document.privacy.epsilon is not None
    return document.privacy.epsilon


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


def _statement(prepared: PreparedRelease, spent: Event) -> Statement:
    """Return what the release guarantees: the fold's lines, and what was charged."""
    guarantee, privacy = prepared.guarantee, prepared.document.privacy
    length, n_silos = prepared.step.layout.length, len(prepared.silos)
    seeded = "the noise came from a known seed (privacy.insecure_seed), so anybody can subtract it"
    source = "the operating system's cryptographic generator"
    return Statement(
        unit=guarantee.unit,
        adjacency=guarantee.adjacency,
        epsilon=prepared.epsilon_of(guarantee.event) if prepared.secure else None,
        delta=privacy.delta,
        accountant=prepared.accountant.name,
        epsilons=epsilons_by_accountant(
            spent, privacy.delta, guarantee.adjacency, loss=guarantee.grid_loss_after(1, length)
        ),
        event=spent,
        units=prepared.schema.n_users,
        mechanisms=(
            f"release {prepared.document.name}/1: {length} numbers; one person moves their sum over {n_silos} silos "
            "by at most 1 (l2)",
            *guarantee.mechanisms,
        ),
        trust=tuple(
            Disclosure(
                role=view.role,
                party=view.party,
                sees=view.sees,
                epsilon=finite(prepared.epsilon_of(view.event)) if prepared.secure else None,
            )
            for view in guarantee.views
        ),
        randomness=f"noise drawn from {source}"
        if prepared.secure
        else "noise derived from a seed, for repetition",
        secure_randomness=prepared.secure,
        uncovered=(*guarantee.uncovered, *_UNCOVERED),
        notes=(_counted(prepared),),
        reasons=() if prepared.secure else (seeded,),
        released="statistics",
    )


_UNCOVERED: Final = (
    "declared bounds, bins, grids and categories, if somebody set them after looking at the records",
    "what else is released from the same records: other releases and runs, --again among them, add to epsilon",
    "how long the release takes, which whoever waits for it can see: it depends on how many records there are",
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
