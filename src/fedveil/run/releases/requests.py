"""The releases of a document, whatever its kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from fedveil.run.config.declared_tables import DeclaredTables
from fedveil.run.config.experiment import Experiment
from fedveil.run.config.release_document import InferenceDocument, ReleaseDocument, TableDocument
from fedveil.run.releases.evaluation import asked_evaluation
from fedveil.run.releases.inference import prepare_inference, regression_without_noise
from fedveil.run.releases.prepared_releases import PreparedReleases
from fedveil.run.releases.preprocessing import wanted_preprocessing
from fedveil.run.releases.statistics import prepare_release
from fedveil.statistics.compose import compose

# --- request scope -------------------------------------------------------------------------------------------------
# What a document asks of tables: which figures, of which columns, and how many numbers of them at once.
#
# It is known from the document and the schema alone, before any noise is looked for: what that costs grows with the
# numbers, and this does not.


@dataclass(frozen=True, kw_only=True)
class RequestScope:
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


def statistics_scope(document: ReleaseDocument, of: DeclaredTables) -> RequestScope:
    """Return what a document of statistics asks.

    Raises:
        FedveilError: a request that does not fit the schema.
    """
    request = document.statistics
    step = compose(request, of.schema, of.silos)
    return RequestScope(
        figures=frozenset(name for one in request.release.values() for name in one.figures),
        columns=frozenset(step.columns),
        numbers=step.length,
        by_silo="silo" in request.by,
    )


def regression_scope(document: InferenceDocument, of: DeclaredTables) -> RequestScope:
    """Return what a document of a regression asks.

    Raises:
        FedveilError: a request that does not fit the schema.
    """
    fitted = regression_without_noise(document, of)
    steps = [fitted.equation(place) for place in range(len(fitted.parts))]
    return RequestScope(
        figures=frozenset({f"{fitted.family.name}-regression"}),
        columns=frozenset(name for step in steps for name in step.columns),
        numbers=max(step.length for step in steps),
    )


def side_release_scope(experiment: Experiment, of: DeclaredTables) -> RequestScope:
    """Return what the releases beside an experiment's rounds ask; that of lengths of updates reads no column itself.

    Args:
        experiment: with a preprocessing, an evaluation, or both.
        of: what is declared of its tables.

    Raises:
        FedveilError: releases that do not fit the schema.
    """
    found: list[RequestScope] = []
    wanted, evaluation = wanted_preprocessing(experiment, of), asked_evaluation(experiment, of)
    if wanted is not None:
        found.append(
            RequestScope(
                figures=frozenset({"preprocessing"}),
                columns=frozenset((*wanted.numbers, *wanted.pool)),
                numbers=max(layout.length for layout in wanted.layouts),
            )
        )
    if evaluation is not None:
        groups = frozenset(evaluation.by) - {"silo"}
        found.append(
            RequestScope(
                figures=frozenset({"evaluation"}),
                columns=groups | frozenset(of.schema.target_columns),
                numbers=max(layout.length for layout in evaluation.layouts),
                by_silo="silo" in evaluation.by,
            )
        )
    return _together(found)


def _together(found: Sequence[RequestScope]) -> RequestScope:
    return RequestScope(
        figures=frozenset().union(*(one.figures for one in found)),
        columns=frozenset().union(*(one.columns for one in found)),
        numbers=max((one.numbers for one in found), default=0),
        by_silo=any(one.by_silo for one in found),
    )


# --- kinds ------------------------------------------------------------

_ASKED: Final[Mapping[type[TableDocument], Callable[[Any, DeclaredTables], RequestScope]]] = MappingProxyType(
    {ReleaseDocument: statistics_scope, InferenceDocument: regression_scope}
)
_PREPARE: Final[Mapping[type[TableDocument], Callable[[Any, DeclaredTables | None], PreparedReleases]]] = (
    MappingProxyType({ReleaseDocument: prepare_release, InferenceDocument: prepare_inference})
)


def request_scope(document: TableDocument, of: DeclaredTables) -> RequestScope:
    """Return what a document asks of tables, at no cost that grows with it; no table is opened.

    Args:
        document: what is asked for.
        of: what is declared of the tables.

    Raises:
        FedveilError: a request that does not fit the schema, named by its key.
    """
    return _ASKED[type(document)](document, of)


def prepare_document(document: TableDocument, of: DeclaredTables | None = None) -> PreparedReleases:
    """Compose the releases of a document and find their noise; no table is opened.

    Args:
        document: what is asked for.
        of: what is declared of the tables; None: what the files say that the document names.

    Raises:
        FedveilError: whatever is wrong, or too small a budget for what is asked, named by its key.
    """
    return _PREPARE[type(document)](document, of)
