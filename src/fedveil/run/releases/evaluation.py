"""Test metrics as releases of a run: planned from public numbers, charged, made of the last model, written down.

What is released goes by the target (:mod:`fedveil.statistics.evaluation.evaluator`): of scores first their bins, then
counts in them; of anything else one release. Held-out people are those of the silos' own tables; somebody with
records on both sides pays for both in the one ledger. Every output is computed by itself, so that nobody else's
records round it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from jaxtyping import Float32, Float64
from torch import Tensor

from fedveil.data.columns import ColumnTable, read_columns
from fedveil.data.records import Population
from fedveil.data.schema import Label, Schema
from fedveil.errors import ConfigError
from fedveil.randomness import PrivacyRandomness
from fedveil.run.config.declared_tables import DeclaredTables
from fedveil.run.config.experiment import Experiment
from fedveil.run.releases.release import Release, noisy_sum
from fedveil.run.releases.release_method import default_silo_weights, design_release
from fedveil.run.releases.side_releases import as_run_release, document_multiplier, shared_multiplier
from fedveil.statistics.evaluation.binary import enough_bins
from fedveil.statistics.evaluation.evaluator import RESERVED
from fedveil.statistics.evaluation.result import EvaluationRequest, ReleasedEvaluation
from fedveil.statistics.figures import ALL
from fedveil.statistics.layout import Layout
from fedveil.statistics.limits import LEAST_BINS, MOST_BINS
from fedveil.statistics.local_vectors import LocalStatistic
from fedveil.statistics.stored import NoisySums
from fedveil.training.task import Task
from fedveil.training.trainer import Progress

MOST_ERROR: Final = 0.1
"""Largest predicted standard deviation of the first test metric, by noise, that is paid for."""
FIRST_SHARE: Final = 0.15
"""The share of the evaluation's budget that places the bins of scores; counts in them have the rest."""
_CHUNK: Final = 256
"""How many records are scored between two looks at the clock."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Evaluation:
    """An evaluation, ready to be made; public numbers alone.

    Attributes:
        asked: what it is of.
        releases: in their order. In the last one's step bins stand that are not those of the first release, for which
            nobody has looked yet; length and norm are the same.
        error: predicted standard deviation of the measure by noise.
    """

    asked: EvaluationRequest
    releases: tuple[Release, ...]
    error: float

    @property
    def measure(self) -> str:
        """The figure whose noise is predicted."""
        return self.asked.evaluator.measure

    def release(self, before: NoisySums) -> Release:
        """Return the release after these; its step is a function of them, and of public things."""
        planned = self.releases[len(before)]
        if len(before) + 1 < len(self.releases):
            return planned
        return replace(planned, step=LocalStatistic(layout=self.asked.last(self.asked.score_bins(before))))

    def combine_releases(self, name: str, round_number: int, sums: NoisySums) -> ReleasedEvaluation:
        """Return the evaluation that all releases together are.

        Args:
            name: of the run.
            round_number: after which the model was taken.
            sums: of all releases.
        """
        return ReleasedEvaluation(name=name, round=round_number, asked=self.asked, releases=sums)


def asked_evaluation(experiment: Experiment, of: DeclaredTables) -> EvaluationRequest | None:
    """Return what an experiment's evaluation is of, if it has one; no table is opened.

    Its bins are those that the experiment gives; where it gives none, planning finds how many.
    """
    section = experiment.evaluation
    if section is None:
        return None
    return EvaluationRequest(
        schema_=of.schema,
        silo_names=of.silos,
        silos=section.silos or default_silo_weights(experiment),
        **section.model_dump(exclude={"silos"}),
    )


def plan_evaluation(experiment: Experiment, of: DeclaredTables) -> Evaluation | None:
    """Plan the evaluation that an experiment asks for, if it does; no table is opened.

    Args:
        experiment: whose privacy.epsilon the whole run may spend.
        of: what is declared of its tables.

    Raises:
        ConfigError: groups of a number, a target without its bounds or horizons, or a budget that is too small, with
            what would do.
    """
    asked = asked_evaluation(experiment, of)
    if asked is None:
        return None
    assert experiment.data.table is not None, "Experiment asks for it"
    _check_names(of.schema)
    people = of.schema.n_users * experiment.data.table.test_share
    planner = _Planner(experiment, of, asked)
    evaluation = planner.planned(people)
    if evaluation.error > MOST_ERROR:
        raise ConfigError(
            f"evaluation: about {people:.0f} people are held out, whose {evaluation.measure} would have noise of "
            f"standard deviation {evaluation.error:.2g}; {MOST_ERROR:g} is allowed. Give a larger privacy.epsilon, "
            "budget.evaluation or data.table.test_share, or fewer groups"
        )
    return evaluation


def make_evaluation(
    evaluation: Evaluation,
    experiment: Experiment,
    round_number: int,
    table: ColumnTable,
    privacy: PrivacyRandomness,
) -> ReleasedEvaluation:
    """Make all releases of a table of held-out records; they must have been charged.

    Args:
        evaluation: the plan.
        experiment: the run's.
        round_number: after which the model was taken.
        table: from :func:`attach_scores`.
        privacy: where noise and keys come from.
    """
    sums: NoisySums = ()
    while len(sums) < len(evaluation.releases):
        sums = (*sums, noisy_sum(evaluation.release(sums), table, privacy))
    return evaluation.combine_releases(experiment.name, round_number, sums)


def attach_scores(
    asked: EvaluationRequest,
    experiment: Experiment,
    population: Population,
    outputs: Float64[np.ndarray, "t k"],
) -> ColumnTable:
    """Return the held-out records of the tables with what the model makes of them, and their targets.

    Args:
        asked: which columns are needed.
        experiment: names the tables.
        population: which of their records are held out, and their targets.
        outputs: of the held-out records; NaN where the model has diverged.
    """
    assert experiment.data.table is not None
    table = read_columns(asked.schema_, experiment.data.table.files, groups_of(asked))
    return with_outputs(asked, table, population, outputs)


def groups_of(asked: EvaluationRequest) -> tuple[str, ...]:
    """Return the columns that groups of held-out records are made of."""
    return tuple(name for name in asked.by if name != "silo")


def with_outputs(
    asked: EvaluationRequest, table: ColumnTable, population: Population, outputs: Float64[np.ndarray, "t k"]
) -> ColumnTable:
    """Return the held-out records of a table with what the model makes of them, and their targets."""
    assert population.test_rows is not None
    table = table.take(population.test_rows)
    columns = asked.evaluator.columns(outputs, np.asarray(population.test_targets))
    return replace(table, columns={**table.columns, **columns})


def outputs_of(
    task: Task, population: Population, model: Float32[Tensor, " d"], progress: Progress | None = None
) -> Float64[np.ndarray, "t k"]:
    """Return the outputs for every held-out record, each computed by itself: nobody else's records round it.

    Args:
        task: whose model it is.
        population: whose records are held out.
        model: its parameters.
        progress: called before every chunk of records.
    """
    raw = torch.from_numpy(population.scale.apply(np.asarray(population.test_features)))
    if not len(raw):
        return np.zeros((0, 1))
    found = []
    for start in range(0, len(raw), _CHUNK):
        if progress is not None:
            progress(start, len(raw))
        found.append(task.predict(model.cpu(), raw[start : start + _CHUNK], batch_size=1))
    return torch.cat(found).double().numpy()


class _Planner:
    """The releases of an evaluation, each with its share of the budget."""

    def __init__(self, experiment: Experiment, of: DeclaredTables, asked: EvaluationRequest) -> None:
        self._experiment, self._of, self._asked = experiment, of, asked
        self._whole = document_multiplier(experiment.privacy)

    def planned(self, people: float) -> Evaluation:
        """Return the evaluation; of two classes with as few bins as lose less than a quarter of their noise."""
        target, given = self._of.schema.target, self._asked.bins
        if given is not None or not isinstance(target, Label) or len(target.classes) > 2:
            return self._with(given, people)
        for bins in range(LEAST_BINS, MOST_BINS + 1):
            found = self._with(bins, people)
            (noise,) = self._variances(found).values()
            if enough_bins(bins, noise**0.5, people):
                break
        return found

    def _with(self, bins: int | None, people: float) -> Evaluation:
        asked = self._asked.model_copy(update={"bins": bins})
        *before, last = asked.layouts
        placing = "the scores of held-out records, which place the bins of the next release"
        releases = [self._release("eval/1", placing, layout, FIRST_SHARE) for layout in before]
        share = 1 - FIRST_SHARE * len(before)
        purpose = (
            "targets of held-out records beside what the model makes of them: test metrics follow from it"
        )
        releases.append(self._release(f"eval/{len(before) + 1}", purpose, last, share))
        planned = Evaluation(asked=asked, releases=tuple(releases), error=0.0)
        error = asked.evaluator.predicted_error(self._variances(planned), people)
        return replace(planned, error=error)

    def _variances(self, planned: Evaluation) -> dict[str, float]:
        """Return the variance of the noise of every block of all people, in people."""
        last, asked = planned.releases[-1], planned.asked
        return {
            slot.block.part: (last.std() / (slot.scale * asked.unit)) ** 2
            for slot in asked.layouts[-1].slots_of(ALL)
        }

    def _release(self, name: str, purpose: str, layout: Layout, share: float) -> Release:
        experiment, step = self._experiment, LocalStatistic(layout=layout)
        design = design_release(experiment, self._asked.silos, step, self._of, key="evaluation.silos")
        found = design.with_noise(shared_multiplier(share * experiment.shares.evaluation, self._whole))
        return as_run_release(found, experiment.rounds, name=name, purpose=purpose, of_model=True)


def _check_names(schema: Schema) -> None:
    """Refuse columns with a name that the table of held-out records needs."""
    for reserved in RESERVED:
        if reserved in schema.columns:
            raise ConfigError(
                f"evaluation: a column of the schema is named '{reserved}'; give it another name"
            )
