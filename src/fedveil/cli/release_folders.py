"""Folders of releases, by the document in them: what goes on with one that was interrupted, and what shows one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from fedveil.cli.statistics import print_inference, print_release
from fedveil.run.config.release_document import (
    InferenceDocument,
    ReleaseDocument,
    TableDocument,
    read_releases,
)
from fedveil.run.document_run import resume_releases
from fedveil.run.releases.requests import prepare_document

RELEASES: Final[Mapping[type[TableDocument], Callable[[Path, bool], None]]] = {
    ReleaseDocument: print_release,
    InferenceDocument: print_inference,
}


def kind_of(folder: Path) -> type[TableDocument] | None:
    """Return the kind of releases in a folder; None for a run that trains."""
    return next((kind for kind in RELEASES if (folder / kind.file).exists()), None)


def resume_release(folder: Path, kind: type[TableDocument], as_json: bool) -> None:
    """Make the releases that a folder lacks if it was interrupted before, and print what they show."""
    resume_releases(prepare_document(read_releases(folder / kind.file, kind)), folder)
    RELEASES[kind](folder, as_json)
