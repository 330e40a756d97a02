"""Release the test metrics of a run: plan from public numbers, charge, compute, store.

The target decides the releases (:mod:`fedveil.statistics.evaluation.evaluator`). Scores need two: first the places
of their bins, then counts in the bins. Any other target needs one. Held-out users are those of the silos' own
tables. A user with records in both training and test part pays for both in the one ledger. Every output is computed
by itself, so that its rounding does not depend on the records of others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from jaxtyping import Float32, Float64
from torch import Tensor

from fedveil.data.columns import ColumnTable, read_columns
from fedveil.data.records import Population
from fedveil.data.schema import Label, Schema
from fedveil.data.tables import files_of
from fedveil.errors import ConfigError, RunFolderError
from fedveil.files import read_json, reading
from fedveil.run.config.experiment import Experiment
from fedveil.run.config.release_document import DeclaredTables
from fedveil.run.folder.run_folder import RunFolder
from fedveil.run.releases.release import Release, default_silo_weights, design_release
from fedveil.run.releases.side_releases import as_run_release, document_multiplier, shared_multiplier
from fedveil.statistics.blocks import Layout
from fedveil.statistics.evaluation.binary import enough_bins
from fedveil.statistics.evaluation.evaluator import RESERVED
from fedveil.statistics.evaluation.result import (
    EVALUATING,
    EvaluationRequest,
    ReleasedEvaluation,
    read_evaluated,
)
from fedveil.statistics.figures import ALL
from fedveil.statistics.local_vectors import LocalStatistic
from fedveil.statistics.request import LEAST_BINS, MOST_BINS
from fedveil.statistics.result import NoisySum, NoisySums
from fedveil.training.task import Task
from fedveil.training.trainer import Progress

MOST_ERROR: Final = 0.1
"""Largest predicted standard deviation of the first test metric by noise; planning refuses larger ones."""
FIRST_SHARE: Final = 0.15
"""Share of the evaluation's budget for the places of the score bins; the counts in the bins have the rest."""
_CHUNK: Final = 256
"""Number of records that are scored between two reports of progress."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Evaluation:
    """A planned evaluation that is ready to be released; public numbers only.

    Attributes:
        request: the requested metrics, groups and weights.
        releases: the side releases in order. The step of the last one contains placeholder bins, because the bins
            of the first release are not known yet; its length and norm do not depend on them.
        error: predicted standard deviation of the measure by noise.
    """

    request: EvaluationRequest
    releases: tuple[Release, ...]
    error: float

    @property
    def measure(self) -> str:
        """Name of the figure whose noise is predicted."""
        return self.request.evaluator.measure

    def release(self, before: NoisySums) -> Release:
        """Return the release that follows ``before``; its step depends on these sums and public facts only."""
        planned = self.releases[len(before)]
        if len(before) + 1 < len(self.releases):
            return planned
        return replace(
            planned, step=LocalStatistic(layout=self.request.last(self.request.score_bins(before)))
        )

    def combine_releases(self, name: str, round_number: int, sums: NoisySums) -> ReleasedEvaluation:
        """Return the evaluation that follows from all released sums.

        Args:
            name: name of the run.
            round_number: the round after which the model was taken.
            sums: sums of all releases, in order.
        """
        return ReleasedEvaluation(name=name, round=round_number, request=self.request, releases=sums)


def asked_evaluation(experiment: Experiment, declared: DeclaredTables) -> EvaluationRequest | None:
    """Return the evaluation request of an experiment; None if it has none. No table is opened.

    The number of bins is that of the experiment; if it is None, planning chooses the number.
    """
    section = experiment.evaluation
    if section is None:
        return None
    return EvaluationRequest(
        schema_=declared.schema,
        silo_names=declared.silos,
        silos=section.silos or default_silo_weights(experiment),
        **section.model_dump(exclude={"silos"}),
    )


def plan_evaluation(experiment: Experiment, declared: DeclaredTables) -> Evaluation | None:
    """Plan the evaluation of an experiment; return None if it requests none. No table is opened.

    Args:
        experiment: its privacy.epsilon covers the whole run.
        declared: declared facts about its tables.

    Raises:
        ConfigError: groups of a numerical column, a target without its bounds or horizons, or a budget that is too
            small; the message says which values suffice.
    """
    request = asked_evaluation(experiment, declared)
    if request is None:
        return None
    assert experiment.data.table is not None, "Experiment asks for it"
    _check_names(declared.schema)
    people = declared.schema.n_users * experiment.data.table.test_share
    planner = _Planner(experiment, declared, request)
    evaluation = planner.planned(people)
    if evaluation.error > MOST_ERROR:
        raise ConfigError(
            f"evaluation: about {people:.0f} people are held out, whose {evaluation.measure} would have noise of "
            f"standard deviation {evaluation.error:.2g}; {MOST_ERROR:g} is allowed. Each of these suffices: "
            f"{', or '.join(_remedies(experiment, declared, request)) or 'none of a larger epsilon or share'}"
        )
    return evaluation


def _remedies(experiment: Experiment, declared: DeclaredTables, request: EvaluationRequest) -> list[str]:
    """Return the changes of one public number that make the predicted noise small enough, each by itself.

    Every number is planned again with the change, rounded up to two significant digits.
    """
    privacy, shares, table = experiment.privacy, experiment.shares, experiment.data.table
    assert table is not None, "Experiment asks for it"
    assert privacy.epsilon is not None, "Experiment asks for it"
    users, test_share, original = declared.schema.n_users, table.test_share, request

    def error(
        *,
        people: float = users * test_share,
        epsilon: float = privacy.epsilon,
        share: float = shares.evaluation,
    ) -> float:
        changed = experiment.model_copy(
            update={
                "privacy": privacy.model_copy(update={"epsilon": epsilon}),
                "budget": shares.model_copy(update={"evaluation": share}),
            }
        )
        return _Planner(changed, declared, original).planned(people).error

    other = shares.preprocessing * (experiment.preprocessing is not None) + shares.votes
    searches = (
        ("privacy.epsilon", privacy.epsilon, 100.0, lambda value: error(epsilon=value)),
        ("budget.evaluation", shares.evaluation, 0.5 - other, lambda value: error(share=value)),
        ("data.table.test_share", test_share, 0.5, lambda value: error(people=users * value)),
        (
            "people (n_users of the schema)",
            float(users),
            1e9,
            lambda value: error(people=test_share * value),
        ),
    )
    remedies = [
        f"{name} = {value:.12g}"
        for name, start, most, error_at in searches
        if (value := _least_value(error_at, start, most)) is not None
    ]
    if request.by:
        original = request.model_copy(update={"by": ()})
        remedies += ["evaluation.by left out"] if error() <= MOST_ERROR else []
    return remedies


def _least_value(error_at: Callable[[float], float], start: float, most: float) -> float | None:
    """Return a value of two significant digits above ``start`` at which the error is small enough, near the least.

    The error falls as the value grows. None: ``most`` does not suffice.
    """
    low, high = start, most
    if start >= most or error_at(most) > MOST_ERROR:
        return None
    while high > 1.02 * low:
        middle = math.sqrt(low) * math.sqrt(high)
        low, high = (low, middle) if error_at(middle) <= MOST_ERROR else (middle, high)
    digit = 10.0 ** (math.floor(math.log10(high)) - 1)
    return min(most, math.ceil(high / digit) * digit)


def read_evaluation(folder: RunFolder) -> NoisySums:
    """Return the releases of an evaluation that are made.

    Raises:
        RunFolderError: a file is damaged.
    """
    whole, path = read_evaluated(folder.path), folder / EVALUATING
    if whole is not None:
        return whole.releases
    if not path.exists():
        return ()
    content = read_json(path, RunFolderError)
    with reading(path, RunFolderError):
        return tuple(
            NoisySum.from_json(release, len(release["vector"]), path) for release in content["releases"]
        )


def attach_scores(
    request: EvaluationRequest,
    experiment: Experiment,
    population: Population,
    outputs: Float64[np.ndarray, "t k"],
) -> ColumnTable:
    """Read the held-out records of the tables and attach the model's outputs and the targets.

    Args:
        request: names the columns of groups.
        experiment: names the tables.
        population: names the held-out records, with their targets.
        outputs: (t, k) float64 outputs for the held-out records; NaN if the model diverged.
    """
    assert experiment.data.table is not None
    files = files_of(population, experiment.data.table.files)
    table = read_columns(request.schema_, files, groups_of(request))
    return with_outputs(request, table, population, outputs)


def groups_of(request: EvaluationRequest) -> tuple[str, ...]:
    """Return the columns that define groups of held-out records."""
    return tuple(name for name in request.by if name != "silo")


def with_outputs(
    request: EvaluationRequest,
    table: ColumnTable,
    population: Population,
    outputs: Float64[np.ndarray, "t k"],
) -> ColumnTable:
    """Return the held-out records of a table with the model's outputs and the targets as columns."""
    assert population.test_rows is not None
    table = table.take(population.test_rows)
    columns = request.evaluator.columns(outputs, np.asarray(population.test_targets))
    return replace(table, columns={**table.columns, **columns})


def outputs_of(
    task: Task, population: Population, model: Float32[Tensor, " d"], progress: Progress | None = None
) -> Float64[np.ndarray, "t k"]:
    """Return the outputs for every held-out record, each computed in a batch of one.

    The rounding of an output therefore does not depend on the records of others.

    Args:
        task: the task of the model.
        population: holds the held-out records.
        model: (d,) float32 parameters.
        progress: called before every chunk of records.

    Returns:
        (t, k) float64 outputs.
    """
    raw = torch.from_numpy(population.scale.apply(np.asarray(population.test_features)))
    if not len(raw):
        return np.zeros((0, 1))
    chunks = []
    for start in range(0, len(raw), _CHUNK):
        if progress is not None:
            progress(start, len(raw))
        chunks.append(task.predict(model.cpu(), raw[start : start + _CHUNK], batch_size=1))
    return torch.cat(chunks).double().numpy()


class _Planner:
    """Planner of an evaluation's releases, each with its share of the budget."""

    def __init__(self, experiment: Experiment, declared: DeclaredTables, request: EvaluationRequest) -> None:
        self._experiment, self._declared, self._request = experiment, declared, request
        self._document_multiplier = document_multiplier(experiment.privacy)

    def planned(self, people: float) -> Evaluation:
        """Return the evaluation of about ``people`` held-out users.

        With two classes, it has the smallest number of bins whose loss of accuracy is below a quarter of the
        predicted noise.
        """
        target, requested_bins = self._declared.schema.target, self._request.bins
        if requested_bins is not None or not isinstance(target, Label) or len(target.classes) > 2:
            return self._with(requested_bins, people)
        for bins in range(LEAST_BINS, MOST_BINS + 1):
            evaluation = self._with(bins, people)
            (noise,) = self._variances(evaluation).values()
            if enough_bins(bins, noise**0.5, people):
                break
        return evaluation

    def _with(self, bins: int | None, people: float) -> Evaluation:
        """Return the evaluation with this number of bins and its predicted error."""
        request = self._request.model_copy(update={"bins": bins})
        *before, last = request.layouts
        placing = "the scores of held-out records, which place the bins of the next release"
        # `before` is the placing of score bins: one release for scores, none for other targets.
        releases = [self._release("eval/1", placing, layout, FIRST_SHARE) for layout in before]
        share = 1 - FIRST_SHARE * len(before)
        purpose = (
            "targets of held-out records beside what the model makes of them: test metrics follow from it"
        )
        releases.append(self._release(f"eval/{len(before) + 1}", purpose, last, share))
        planned = Evaluation(request=request, releases=tuple(releases), error=0.0)
        error = request.evaluator.predicted_error(self._variances(planned), people)
        return replace(planned, error=error)

    def _variances(self, planned: Evaluation) -> dict[str, float]:
        """Return the noise variance of every block that covers all users, in users squared, by block."""
        last, request = planned.releases[-1], planned.request
        return {
            slot.block.part: (last.std() / (slot.scale * request.unit)) ** 2
            for slot in request.layouts[-1].slots_of(ALL)
        }

    def _release(self, name: str, purpose: str, layout: Layout, share: float) -> Release:
        """Return a release with a share of the evaluation's budget, named and numbered within the run."""
        experiment, step = self._experiment, LocalStatistic(layout=layout)
        design = design_release(experiment, self._request.silos, step, self._declared, key="evaluation.silos")
        release = design.with_noise(
            shared_multiplier(share * experiment.shares.evaluation, self._document_multiplier)
        )
        return as_run_release(release, experiment.rounds, name=name, purpose=purpose, of_model=True)


def _check_names(schema: Schema) -> None:
    """Refuse a schema whose column names the table of held-out records reserves.

    Raises:
        ConfigError: a column has a reserved name.
    """
    for reserved in RESERVED:
        if reserved in schema.columns:
            raise ConfigError(
                f"evaluation: a column of the schema is named '{reserved}'; give it another name"
            )
