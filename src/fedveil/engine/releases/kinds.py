"""The releases of a document, whatever its kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from fedveil.engine.experiments.declared import Declared
from fedveil.engine.experiments.release_document import InferenceDocument, ReleaseDocument, TableDocument
from fedveil.engine.releases.inference import prepare_inference
from fedveil.engine.releases.release_run import PreparedReleases
from fedveil.engine.releases.releases import prepare_release

_PREPARE: Final[Mapping[type[TableDocument], Callable[[Any, Declared], PreparedReleases]]] = MappingProxyType(
    {ReleaseDocument: prepare_release, InferenceDocument: prepare_inference}
)


def prepare_document(document: TableDocument, of: Declared) -> PreparedReleases:
    """Compose the releases of a document and find their noise; no table is opened.

    Args:
        document: what is asked for.
        of: what is declared of the tables.

    Raises:
        FedveilError: whatever is wrong, or too small a budget for what is asked, named by its key.
    """
    return _PREPARE[type(document)](document, of)
