"""Test metrics as two releases of a run: planned from public numbers, charged, made of the last model, written down.

The first release places the bins of scores, the second counts labels in them (:mod:`fedveil.statistics.scores`).
Held-out people are those of the silos' own tables; somebody with records on both sides pays for both in the one ledger.
Every score is computed by itself, so that nobody else's records round it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from jaxtyping import Float32, Float64
from torch import Tensor

from fedveil.engine.experiment import Experiment
from fedveil.engine.release_method import release_builder
from fedveil.engine.release_sum import noisy_sum
from fedveil.engine.side_releases import SideRelease, multiplier_of, side_release, whole_of
from fedveil.errors import CompositionError, ConfigError
from fedveil.local.metrics import score_of
from fedveil.local.task import Task
from fedveil.methods.claims import PublicFacts
from fedveil.population.columns import Column, ColumnTable, Numbers, Places, State, read_columns
from fedveil.population.records import Population
from fedveil.population.schema import Label, Schema, read_schema
from fedveil.randomness import PrivacyRandomness
from fedveil.statistics.evaluated import Asked, Evaluated
from fedveil.statistics.layout import Layout
from fedveil.statistics.limits import LEAST_BINS, MOST_BINS
from fedveil.statistics.local import LocalStatistic
from fedveil.statistics.scores import LABEL, SCORE, enough_bins, first_layout, predicted_error

MOST_ERROR: Final = 0.1
"""Largest predicted standard deviation of the area under the curve, by noise, that is paid for."""
FIRST_SHARE: Final = 0.15
"""The first release's share of the evaluation's budget; the second has the rest."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Evaluation:
    """An evaluation, ready to be made; public numbers alone.

    Attributes:
        asked: what it is of.
        first, second: the releases. Edges stand in the second that are not those of the first, for which nobody has
            looked yet; length and norm are the same.
        error: predicted standard deviation of the area under the curve by noise.
    """

    asked: Asked
    first: SideRelease
    second: SideRelease
    error: float

    @property
    def releases(self) -> tuple[SideRelease, SideRelease]:
        """Both."""
        return self.first, self.second


def plan_evaluation(experiment: Experiment, population: Population) -> Evaluation | None:
    """Plan the evaluation that an experiment asks for, if it does; no record is looked at.

    Args:
        experiment: whose privacy.epsilon the whole run may spend.
        population: for its public numbers.

    Raises:
        CompositionError: a federation, or targets that are not two classes.
        ConfigError: groups of a number, or a budget that is too small, with what would do.
    """
    if experiment.evaluation is None:
        return None
    if not population.complete:
        raise CompositionError(
            "evaluation: between institutions no release of held-out records is made yet; remove [evaluation] and give "
            "the coordinator a public test table, whose metrics need no noise"
        )
    assert experiment.data.table is not None, "Experiment asks for it"
    whole = whole_of(experiment.privacy)
    people = population.n_users * experiment.data.table.test_share
    planner = _Planner(experiment, population, _schema(experiment), whole)
    asked, second, error = planner.second(people)
    if error > MOST_ERROR:
        raise ConfigError(
            f"evaluation: about {people:.0f} people are held out, whose area under the curve would have noise of "
            f"standard deviation {error:.2g}; {MOST_ERROR:g} is allowed. Give a larger privacy.epsilon, "
            "budget.evaluation or data.table.test_share, or fewer groups"
        )
    return Evaluation(asked=asked, first=planner.first(asked), second=second, error=error)


def make_evaluation(
    evaluation: Evaluation,
    experiment: Experiment,
    round_number: int,
    table: ColumnTable,
    privacy: PrivacyRandomness,
) -> Evaluated:
    """Make both releases of a table of scored records; they must have been charged.

    Args:
        evaluation: the plan.
        experiment: the run's.
        round_number: after which the model was taken.
        table: from :func:`scored`.
        privacy: where noise and keys come from.
    """
    asked, number = evaluation.asked, experiment.rounds + 1  # repeatable noise is not that of a round
    first, second = evaluation.releases
    placed = noisy_sum(first.numbered(number), table, privacy).vector
    step = LocalStatistic(layout=asked.layout(asked.edges(placed, _std(first, asked))))
    assert step.layout.length == second.step.layout.length
    return Evaluated(
        name=experiment.name,
        round=round_number,
        asked=asked,
        first=placed,
        second=noisy_sum(second.numbered(number + 1, step), table, privacy).vector,
        first_std=_std(first, asked),
        second_std=_std(second, asked),
    )


def scored(
    asked: Asked, experiment: Experiment, population: Population, scores: Float64[np.ndarray, " t"]
) -> ColumnTable:
    """Return the held-out records of the tables with their scores and labels.

    Args:
        asked: which columns are needed.
        experiment: names the tables.
        population: which of their records are held out, and their labels.
        scores: of the held-out records; NaN where the model has diverged.
    """
    assert experiment.data.table is not None
    assert population.test_rows is not None
    wanted = tuple(name for name in asked.by if name != "silo")
    table = read_columns(asked.schema_, experiment.data.table.files, wanted).take(population.test_rows)
    there = ~np.isnan(scores)
    state = np.where(there, State.VALID, State.INVALID).astype(np.int8)
    labels = np.asarray(population.test_targets, dtype=np.int64)
    valid = np.full(len(labels), State.VALID, dtype=np.int8)
    columns: dict[str, Column] = {
        SCORE: Numbers(values=np.where(there, scores, 0.0), state=state),
        LABEL: Places(values=labels, state=valid),
    }
    return replace(table, columns={**table.columns, **columns})


def scores_of(task: Task, population: Population, model: Float32[Tensor, " d"]) -> Float64[np.ndarray, " t"]:
    """Return the score of every held-out record, each computed by itself: nobody else's records round it."""
    raw = torch.from_numpy(population.scale.apply(np.asarray(population.test_features)))
    if not len(raw):
        return np.zeros(0)
    return score_of(task.predict(model.cpu(), raw, batch_size=1)).double().numpy()


class _Planner:
    """The releases of an evaluation, each with its share of the budget."""

    def __init__(self, experiment: Experiment, population: Population, schema: Schema, whole: float) -> None:
        self._experiment, self._population, self._schema, self._whole = experiment, population, schema, whole
        section = experiment.evaluation
        assert section is not None
        self._section = section
        weighs = experiment.protection.build().weighs
        self._silos = section.silos or ("equal" if weighs else "uniform")

    def first(self, asked: Asked) -> SideRelease:
        """Return the release that places the bins."""
        purpose = "the scores of held-out records, which place the bins of the next release"
        return self._release("eval/1", purpose, first_layout(), FIRST_SHARE)

    def second(self, people: float) -> tuple[Asked, SideRelease, float]:
        """Return the release that counts labels, with as few bins as lose less than a quarter of its noise."""
        given = self._section.bins
        purpose = "labels of held-out records by bins of their scores: test metrics follow from it"
        for bins in (given,) if given is not None else range(LEAST_BINS, MOST_BINS + 1):
            asked = Asked(
                schema_=self._schema,
                silo_names=self._population.silo_names,
                silos=self._silos,
                by=self._section.by,
                bins=bins,
            )
            layout = asked.layout((0.0,) * bins)
            release = self._release("eval/2", purpose, layout, 1 - FIRST_SHARE)
            noise = _std(release, asked) / (layout.slots[0].scale * asked.unit)
            if enough_bins(bins, noise, people):
                break
        return asked, release, predicted_error(bins, noise, people)

    def _release(self, name: str, purpose: str, layout: Layout, share: float) -> SideRelease:
        facts = PublicFacts(
            n_silos=self._population.n_silos, n_users=self._population.n_users, dimension=layout.length
        )
        step = LocalStatistic(layout=layout)
        build = release_builder(
            self._experiment.protection,
            self._silos,
            step,
            facts,
            key="evaluation.silos",
            colluding=self._experiment.privacy.colluding_silos,
        )
        multiplier = multiplier_of(share * self._experiment.shares.evaluation, self._whole)
        return side_release(name, purpose, step, build(multiplier), facts)


def _schema(experiment: Experiment) -> Schema:
    """Return the schema of an experiment's tables, if its target is two classes.

    Raises:
        CompositionError: it is another one.
        ConfigError: a column with a name that the table of scored records needs.
    """
    assert experiment.data.table is not None
    schema = read_schema(experiment.data.table.schema_file)
    if not isinstance(schema.target, Label) or len(schema.target.classes) != 2:
        raise CompositionError(
            "evaluation: is of two classes (target.kind = 'label' with two classes); this schema has another target"
        )
    for reserved in (SCORE, LABEL):
        if reserved in schema.columns:
            raise ConfigError(
                f"evaluation: a column of the schema is named '{reserved}'; give it another name"
            )
    return schema


def _std(release: SideRelease, asked: Asked) -> float:
    """Return the standard deviation of a release's noise, per number."""
    found = release.method.noise_std(len(asked.silo_names))
    assert found is not None
    return found
