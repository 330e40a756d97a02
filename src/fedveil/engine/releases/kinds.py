"""The releases of a document, whatever its kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from fedveil.engine.experiments.declared import Declared
from fedveil.engine.experiments.release_document import InferenceDocument, ReleaseDocument, TableDocument
from fedveil.engine.releases.asks import Asks, regression_asked, statistics_asked
from fedveil.engine.releases.inference import prepare_inference
from fedveil.engine.releases.prepared_releases import PreparedReleases
from fedveil.engine.releases.statistics import prepare_release

_ASKED: Final[Mapping[type[TableDocument], Callable[[Any, Declared], Asks]]] = MappingProxyType(
    {ReleaseDocument: statistics_asked, InferenceDocument: regression_asked}
)
_PREPARE: Final[Mapping[type[TableDocument], Callable[[Any, Declared | None], PreparedReleases]]] = (
    MappingProxyType({ReleaseDocument: prepare_release, InferenceDocument: prepare_inference})
)


def asked_of(document: TableDocument, of: Declared) -> Asks:
    """Return what a document asks of tables, at no cost that grows with it; no table is opened.

    Args:
        document: what is asked for.
        of: what is declared of the tables.

    Raises:
        FedveilError: a request that does not fit the schema, named by its key.
    """
    return _ASKED[type(document)](document, of)


def prepare_document(document: TableDocument, of: Declared | None = None) -> PreparedReleases:
    """Compose the releases of a document and find their noise; no table is opened.

    Args:
        document: what is asked for.
        of: what is declared of the tables; None: what the files say that the document names.

    Raises:
        FedveilError: whatever is wrong, or too small a budget for what is asked, named by its key.
    """
    return _PREPARE[type(document)](document, of)
