"""What a simulation says of the records it trains on: how they spread, and by a hash which they are."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedveil.engine.baseline import baseline
from fedveil.engine.run_folder.documents import Diagnostics, read_document
from fedveil.engine.run_folder.folder import Row, RunFolder
from fedveil.engine.setup import Prepared
from fedveil.errors import RunFolderError
from fedveil.files import parse_json, read_content

_FILE = "diagnostics.json"


def population_diagnostics(prepared: Prepared) -> Row:
    """Return what ``diagnostics.json`` holds; computed from private records, so no guarantee covers it."""
    per_user = prepared.population.records_per_user()
    return {
        "records_per_user": {
            "quantiles": np.quantile(per_user, np.linspace(0, 1, 11)).tolist(),
            "users_with_records": int((per_user > 0).sum()),
            "users": prepared.population.n_users,
        },
        "records_per_silo": prepared.population.records_per_silo().tolist(),
        "silo_names": list(prepared.population.silo_names),
        "baseline": baseline(prepared),
        "records_sha256": prepared.population.train.sha256,
    }


def require_same_records(folder: RunFolder, prepared: Prepared) -> None:
    """Refuse to treat other records as those that a run was trained on.

    Raises:
        RunFolderError: the folder does not say which records they were (a run between institutions, whose records
            were never in one place), or these are others: a table has changed, or the data set is another version.
    """
    path = folder / _FILE
    try:
        said = parse_json(read_content(path, RunFolderError), path, RunFolderError).get("records_sha256")
    except (RunFolderError, AttributeError):
        said = None
    if said is None:
        raise RunFolderError(
            f"{folder.path}: which records were trained on is unknown: {_FILE} does not name them (a run between "
            "institutions has none); only a simulation's folder, complete, can be audited or resumed"
        )
    if said != prepared.population.train.sha256:
        raise RunFolderError(
            f"{folder.path}: the training records are not those that this run began with, so its members are unknown: "
            "restore the data that experiment.toml names"
        )


def baseline_of(folder: Path) -> dict[str, float | None]:
    """Return what the best constant answer reached in a run, by metric; empty where its folder does not say.

    Raises:
        RunFolderError: ``diagnostics.json`` is damaged.
    """
    path = folder / _FILE
    if not path.exists():
        return {}
    constant: dict[str, float | None] = {**read_document(path, Diagnostics).baseline}
    return constant
