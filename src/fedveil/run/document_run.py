"""Make the releases of one document with all silos in this process, or those that its folder lacks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedveil.data.memory_tables import TableFile
from fedveil.run.folder.run_folder import RunFolder
from fedveil.run.loop import play_part
from fedveil.run.ranks import require_one_process
from fedveil.run.releases.prepared_releases import PreparedReleases, read_records
from fedveil.run.simulation import ReleaseParties
from fedveil.run.steps.document import DocumentParts


def make_releases(prepared: PreparedReleases, parent: Path, files: Sequence[TableFile] | None = None) -> Path:
    """Make all releases in a new folder under ``parent``, and return the folder.

    Args:
        prepared: the releases.
        parent: the folder in which the run folder is created.
        files: the tables; None: the files that the document names.

    Raises:
        FedveilError: the tables are wrong, or the ledger cannot be written. Nothing more is released then.
    """
    require_one_process(prepared.document.name)
    records = read_records(prepared, files)  # before the folder exists: wrong tables leave none
    folder = RunFolder.create(parent, prepared.document)
    _play(DocumentParts(prepared, folder, records=lambda: records))
    return folder.path


def resume_releases(prepared: PreparedReleases, path: Path) -> None:
    """Make the releases that a folder lacks; if it lacks none, only write the statement again.

    Raises:
        FedveilError: as :func:`make_releases`, or a damaged folder.
    """
    require_one_process(prepared.document.name)
    _play(DocumentParts(prepared, RunFolder(path)))


def _play(document: DocumentParts) -> None:
    with document:
        for part in document.parts():
            play_part(part, ReleaseParties(part))
        document.conclude(None)
