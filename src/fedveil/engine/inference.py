"""One regression: three releases of one estimating equation, planned, charged one by one, and written down.

The coefficients at which a release is made follow from the releases before it, so they are public. Everything that can
be refused is refused from public numbers, before the tables are read; a charge is on disk before its release is made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fedveil.engine.folder import RunFolder
from fedveil.engine.release_document import InferenceDocument
from fedveil.engine.release_method import release_builder
from fedveil.engine.release_series import Guaranteed, Series, calibrated, declared_silos
from fedveil.engine.release_sum import noisy_sum
from fedveil.methods.claims import PublicFacts
from fedveil.methods.derive import derive
from fedveil.methods.method import Method
from fedveil.population.columns import ColumnTable, read_columns
from fedveil.population.schema import read_schema
from fedveil.privacy.events import GaussianEvent
from fedveil.privacy.statement import Statement
from fedveil.statistics.inference.equation import Equation
from fedveil.statistics.inference.fitted import FILE, Fitted, Noisy, dumps
from fedveil.statistics.inference.plan import PlannedEffect, check, planned

DOCUMENT: Final = "inference.toml"
"""The document's name in a run folder."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PreparedInference:
    """A regression, ready to be made; public numbers alone.

    Attributes:
        document: what was asked for.
        fitted: the regression without any release.
        multiplier: of all releases together.
        build: the method of a release by its local step and its noise multiplier.
        series: what the releases guarantee.
        plan: what is predicted of every coefficient.
    """

    document: InferenceDocument
    fitted: Fitted
    multiplier: float
    build: Callable[[Equation, float], Method]
    series: Series
    plan: tuple[PlannedEffect, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class InferenceOutcome:
    """What a regression left behind."""

    folder: Path
    fitted: Fitted
    statement: Statement


def prepare_inference(document: InferenceDocument) -> PreparedInference:
    """Compose the releases and find their noise, from the document and the schema; no table is opened.

    Raises:
        FedveilError: whatever is wrong, or too small a budget for what is asked, named by its key.
    """
    table, request = document.data.table, document.inference
    assert table is not None
    schema = read_schema(table.schema_file)
    silos = declared_silos(schema, table.files)
    fitted = Fitted(name=document.name, request=request, schema=schema, silos=silos)
    steps = tuple(fitted.equation(place) for place in range(len(fitted.parts)))

    def facts(step: Equation) -> PublicFacts:
        return PublicFacts(n_silos=len(silos), n_users=schema.n_users, dimension=step.length)

    def build(step: Equation, multiplier: float) -> Method:
        return release_builder(
            document.protection,
            request.silos,
            step,
            facts(step),
            key="inference.silos",
            colluding=document.privacy.colluding_silos,
        )(multiplier)

    def guaranteed(multiplier: float) -> Guaranteed:
        return [
            (derive(build(step, part.multiplier(multiplier)), facts(step)), step.length)
            for step, part in zip(steps, fitted.parts, strict=True)
        ]

    multiplier, series = calibrated(document.privacy, guaranteed)
    noises = [
        _std(build(step, part.multiplier(multiplier)), silos)
        for step, part in zip(steps, fitted.parts, strict=True)
    ]
    people = schema.n_users / (len(silos) if request.silos == "uniform" else 1)
    plan = planned(list(zip(steps, noises, strict=True)), people)
    check(
        plan,
        multiplier,
        lambda z: series.accountant.epsilon(GaussianEvent(noise_multiplier=z), document.privacy.delta),
    )
    return PreparedInference(
        document=document, fitted=fitted, multiplier=multiplier, build=build, series=series, plan=plan
    )


def make_inference(prepared: PreparedInference, parent: Path) -> InferenceOutcome:
    """Make a regression in a new folder under ``parent``.

    Raises:
        FedveilError: what is wrong with the tables; a ledger that cannot be written. Nothing more is released then.
    """
    document, fitted, series = prepared.document, prepared.fitted, prepared.series
    assert document.data.table is not None
    table = read_columns(fitted.schema, document.data.table.files, fitted.equation(0).columns)
    folder = RunFolder.create(parent, document, DOCUMENT)
    with series.ledger(folder) as ledger:
        for number, guarantee in enumerate(series.guarantees, start=1):
            ledger.charge(run=document.name, round=number, attempt=0, event=guarantee.event)
            fitted = fitted.with_release(_release(prepared, fitted, table))
        spent = ledger.spent()
    folder.write(FILE, dumps(fitted))
    public = PublicFacts(n_silos=len(fitted.silos), n_users=fitted.schema.n_users)
    statement = series.statement(document.name, spent, public, notes=NOTES)
    folder.write_json("privacy.json", statement.to_json())
    return InferenceOutcome(folder=folder.path, fitted=fitted, statement=statement)


def _release(prepared: PreparedInference, fitted: Fitted, table: ColumnTable) -> Noisy:
    """Return the next release."""
    place = len(fitted.releases)
    step = fitted.equation(place)
    method = prepared.build(step, fitted.parts[place].multiplier(prepared.multiplier))
    vector = noisy_sum(method, step, table, prepared.series.randomness(), place + 1)
    return Noisy(vector=vector, multiplier=method.channel.nominal(), std=_std(method, fitted.silos))


def _std(method: Method, silos: tuple[str, ...]) -> float:
    found = method.noise_std(len(silos))
    assert found is not None
    return found


NOTES: Final = (
    "a person counts 1, spread over her records; two ids for one person count 2 and are protected as two",
    "records without a value in the target or in one of the features are left out",
    "intervals hold if the mean is as the model says (otherwise they are of the coefficients that fit best), if how "
    "many records somebody has tells nothing beyond her features, and for a linear target with symmetric errors",
    "p-values and intervals are of one regression that was chosen before looking; another one is charged anew",
)
