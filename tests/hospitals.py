"""Hospitals' tables as files, and the runs that are asked for on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedveil.run.config.experiment import merge, parse
from fedveil.run.setup import Prepared, prepare

FILES = ("north", "south", "west")


def write_tables(folder: Path, header: str, rows: Mapping[str, Sequence[str]]) -> None:
    """Write one CSV file per hospital."""
    for name, lines in rows.items():
        (folder / f"{name}.csv").write_text("\n".join((header, *lines)) + "\n")


def table_in(folder: Path, files: Sequence[str] = FILES, **more: Any) -> dict[str, Any]:
    """Return the data section of the tables of a folder."""
    paths = [str(folder / f"{name}.csv") for name in files]
    return {"table": {"schema_file": str(folder / "schema.toml"), "files": paths, **more}}


def prepared_run(folder: Path, *asked: dict[str, Any]) -> Prepared:
    """Prepare a short run over the tables of three hospitals, with sections laid over it."""
    document: dict[str, Any] = {
        "name": "hospitals",
        "rounds": 2,
        "data": table_in(folder),
        "local": {"learning_rate": 0.5},
        "method": {"name": "uldp-avg", "clip": 1.0, "noise_multiplier": "calibrated"},
        "server": {"learning_rate": 20.0},
        "protection": {"name": "secure-aggregation"},
    }
    for changes in asked:
        document = merge(document, changes)
    return prepare(parse(document, "test"))
