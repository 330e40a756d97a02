"""What a document asks of tables: which figures, of which columns, and how many numbers of them at once.

It is known from the document and the schema alone, before any noise is looked for: what that costs grows with the
numbers, and this does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedveil.engine.experiments.declared import Declared
from fedveil.engine.experiments.experiment import Experiment
from fedveil.engine.experiments.release_document import InferenceDocument, ReleaseDocument
from fedveil.engine.releases.evaluation import asked_evaluation
from fedveil.engine.releases.inference import unfitted
from fedveil.engine.releases.preprocessing import wanted_preprocessing
from fedveil.statistics.compose import compose


@dataclass(frozen=True, kw_only=True)
class Asks:
    """What is asked of tables.

    Attributes:
        figures: what is to be shown, in the words in which a silo's policy allows it.
        columns: of the schema, that are read for it.
        numbers: how many its longest release has; of an evaluation that chooses its bins, with the fewest.
        by_silo: whether figures of single silos are to be shown.
    """

    figures: frozenset[str]
    columns: frozenset[str]
    numbers: int
    by_silo: bool = False


def statistics_asked(document: ReleaseDocument, of: Declared) -> Asks:
    """Return what a document of statistics asks.

    Raises:
        FedveilError: a request that does not fit the schema.
    """
    request = document.statistics
    step = compose(request, of.schema, of.silos)
    return Asks(
        figures=frozenset(name for one in request.release.values() for name in one.figures),
        columns=frozenset(step.columns),
        numbers=step.length,
        by_silo="silo" in request.by,
    )


def regression_asked(document: InferenceDocument, of: Declared) -> Asks:
    """Return what a document of a regression asks.

    Raises:
        FedveilError: a request that does not fit the schema.
    """
    fitted = unfitted(document, of)
    steps = [fitted.equation(place) for place in range(len(fitted.parts))]
    return Asks(
        figures=frozenset({f"{fitted.family.name}-regression"}),
        columns=frozenset(name for step in steps for name in step.columns),
        numbers=max(step.length for step in steps),
    )


def beside_training_asked(experiment: Experiment, of: Declared) -> Asks:
    """Return what the releases beside an experiment's rounds ask; that of lengths of updates reads no column itself.

    Args:
        experiment: with a preprocessing, an evaluation, or both.
        of: what is declared of its tables.

    Raises:
        FedveilError: releases that do not fit the schema.
    """
    found: list[Asks] = []
    wanted, evaluation = wanted_preprocessing(experiment, of), asked_evaluation(experiment, of)
    if wanted is not None:
        found.append(
            Asks(
                figures=frozenset({"preprocessing"}),
                columns=frozenset((*wanted.numbers, *wanted.pool)),
                numbers=max(layout.length for layout in wanted.layouts),
            )
        )
    if evaluation is not None:
        groups = frozenset(evaluation.by) - {"silo"}
        found.append(
            Asks(
                figures=frozenset({"evaluation"}),
                columns=groups | frozenset(of.schema.target_columns),
                numbers=max(layout.length for layout in evaluation.layouts),
                by_silo="silo" in evaluation.by,
            )
        )
    return _together(found)


def _together(found: Sequence[Asks]) -> Asks:
    return Asks(
        figures=frozenset().union(*(one.figures for one in found)),
        columns=frozenset().union(*(one.columns for one in found)),
        numbers=max((one.numbers for one in found), default=0),
        by_silo=any(one.by_silo for one in found),
    )
