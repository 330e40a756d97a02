"""Prepare the releases of a document of any kind, and report its scope."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from fedveil.run.config.experiment import Experiment
from fedveil.run.config.release_document import (
    DeclaredTables,
    InferenceDocument,
    ReleaseDocument,
    TableDocument,
)
from fedveil.run.releases.evaluation import asked_evaluation
from fedveil.run.releases.inference import prepare_inference, regression_without_noise
from fedveil.run.releases.preprocessing import wanted_preprocessing
from fedveil.run.releases.series import PreparedReleases
from fedveil.run.releases.statistics import prepare_release
from fedveil.statistics.compose import compose

# --- request scope -------------------------------------------------------------------------------------------------
# The scope of a document: figures, columns, and the length of its longest release. It follows from document and
# schema at constant cost. The search for the noise costs more for longer releases, so a silo checks the scope first.


@dataclass(frozen=True, kw_only=True)
class RequestScope:
    """The figures, columns and length that a document requests from tables.

    Attributes:
        figures: names of the requested figures, in the words of a silo's policy.
        columns: columns of the tables that the releases read; of a time between two dates, both. The schema names such
            a time freely, so its name must not stand for what is read.
        numbers: length of the longest release; for an evaluation that chooses its bins, with the fewest bins.
        by_silo: whether figures of single silos are requested.
    """

    figures: frozenset[str]
    columns: frozenset[str]
    numbers: int
    by_silo: bool = False


def statistics_scope(document: ReleaseDocument, declared: DeclaredTables) -> RequestScope:
    """Return the scope of a document of statistics.

    Raises:
        FedveilError: a request that does not fit the schema.
    """
    request = document.statistics
    step = compose(request, declared.schema, declared.silos)
    return RequestScope(
        figures=frozenset(name for requested in request.release.values() for name in requested.figures),
        columns=frozenset(declared.schema.read_columns(step.columns)),
        numbers=step.length,
        by_silo="silo" in request.by,
    )


def regression_scope(document: InferenceDocument, declared: DeclaredTables) -> RequestScope:
    """Return the scope of a document of a regression.

    Raises:
        FedveilError: a request that does not fit the schema.
    """
    fitted = regression_without_noise(document, declared)
    steps = [fitted.equation(index) for index in range(len(fitted.parts))]
    return RequestScope(
        figures=frozenset({f"{fitted.family.name}-regression"}),
        columns=frozenset(declared.schema.read_columns(name for step in steps for name in step.columns)),
        numbers=max(step.length for step in steps),
    )


def side_release_scope(experiment: Experiment, declared: DeclaredTables) -> RequestScope:
    """Return the scope of an experiment's side releases.

    The release of lengths of updates reads no column itself.

    Args:
        experiment: an experiment with a preprocessing, an evaluation, or both.
        declared: declared facts about its tables.

    Raises:
        FedveilError: releases that do not fit the schema.
    """
    scopes: list[RequestScope] = []
    preprocessing, evaluation = (
        wanted_preprocessing(experiment, declared),
        asked_evaluation(experiment, declared),
    )
    if preprocessing is not None:
        scopes.append(
            RequestScope(
                figures=frozenset({"preprocessing"}),
                columns=frozenset((*preprocessing.numbers, *preprocessing.pool)),
                numbers=max(layout.length for layout in preprocessing.layouts),
            )
        )
    if evaluation is not None:
        groups = frozenset(evaluation.by) - {"silo"}
        scopes.append(
            RequestScope(
                figures=frozenset({"evaluation"}),
                columns=groups | frozenset(declared.schema.read_columns(declared.schema.target_columns)),
                numbers=max(layout.length for layout in evaluation.layouts),
                by_silo="silo" in evaluation.by,
            )
        )
    return _union(scopes)


def _union(scopes: Sequence[RequestScope]) -> RequestScope:
    """Return the union of several scopes."""
    return RequestScope(
        figures=frozenset().union(*(scope.figures for scope in scopes)),
        columns=frozenset().union(*(scope.columns for scope in scopes)),
        numbers=max((scope.numbers for scope in scopes), default=0),
        by_silo=any(scope.by_silo for scope in scopes),
    )


# --- kinds ------------------------------------------------------------

_ASKED: Final[Mapping[type[TableDocument], Callable[[Any, DeclaredTables], RequestScope]]] = MappingProxyType(
    {ReleaseDocument: statistics_scope, InferenceDocument: regression_scope}
)
_PREPARE: Final[Mapping[type[TableDocument], Callable[[Any, DeclaredTables | None], PreparedReleases]]] = (
    MappingProxyType({ReleaseDocument: prepare_release, InferenceDocument: prepare_inference})
)


def request_scope(document: TableDocument, declared: DeclaredTables) -> RequestScope:
    """Return the scope of a document at constant cost; no table is opened.

    Args:
        document: the request.
        declared: declared facts about the tables.

    Raises:
        FedveilError: a request that does not fit the schema; the message names its key.
    """
    return _ASKED[type(document)](document, declared)


def prepare_document(document: TableDocument, declared: DeclaredTables | None = None) -> PreparedReleases:
    """Compose the releases of a document and find their noise; no table is opened.

    Args:
        document: the request.
        declared: declared facts about the tables; None: read them from the files that the document names.

    Raises:
        FedveilError: any mistake, or a budget that is too small for the request; the message names the key.
    """
    return _PREPARE[type(document)](document, declared)
