"""Record software and machine of a run; list third-party code with unverified privacy claims."""

from __future__ import annotations

import hashlib
import platform
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Final

from fedveil.data.catalogue import digests
from fedveil.errors import ConfigError, RunFolderError
from fedveil.files import parse_json, read_content
from fedveil.registry import KINDS, Member, third_party
from fedveil.run.config.experiment import DataSection, Experiment, asked_for
from fedveil.run.config.in_memory_method import SESSION, unverified_algorithm
from fedveil.run.config.release_document import TableDocument
from fedveil.run.folder.run_folder import SCHEMA, Row
from fedveil.sanitize import sanitize

if TYPE_CHECKING:
    from fedveil.run.setup import Prepared

ENVIRONMENT: Final = "environment.json"


def third_party_members(experiment: Experiment | TableDocument) -> tuple[Member, ...]:
    """Return the members from other packages that a document names."""
    requested = asked_for(experiment.model_dump(mode="json", exclude_none=True))
    # Objects of a Python session are not in the registry; `unverified_parts` lists their classes.
    named = {key: member for key, member in requested.items() if not member[1].startswith(SESSION)}
    return tuple(third_party(named).values())


def unverified_plugins(experiment: Experiment) -> tuple[str, ...]:
    """List third-party stages whose privacy claims fedveil did not verify, as sentences for the statement.

    ``environment.json`` and the terms of a federation's run name the version of each package.
    """
    named = tuple(
        f"the {KINDS[member.kind]} {sanitize(member.name)} comes from the package {sanitize(member.package)}"
        for member in third_party_members(experiment)
    )
    unchecked = "and its privacy claims are taken on trust: that it does what it claims was not checked"
    return tuple(
        f"{sentence}, {unchecked}"
        for sentence in (
            *named,
            *map(sanitize, experiment.method.unverified_parts),
            *map(sanitize, unverified_algorithm(experiment.local)),
        )
    )


def environment(prepared: Prepared) -> Row:
    """Return the content of ``environment.json``."""
    packages = ("fedveil", "torch", "numpy", "scipy", "dp-accounting")
    return {
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "device": str(prepared.setting.cohort.device),
        "trainer": prepared.setting.trainer.name,
        "parameters": prepared.task.dimension,
        "packages": {name: _version(name) for name in packages}
        | {member.package: member.version for member in third_party_members(prepared.experiment)},
        "data_files": _data_files(prepared.experiment.data),
    }


def _data_files(data: DataSection) -> dict[str, str]:
    """Return the SHA-256 of the public files: those of a catalogue's data set, or the schema of tables.

    Digests of the user's tables are as private as the tables, so they are left out.
    """
    if data.table is not None:
        return {SCHEMA: _sha256(data.table.schema_file)}
    if data.name is None or data.name.startswith(SESSION):
        return {}
    return digests(data.name, data.folder)


def is_schema_of_run(folder: Path, schema_file: Path) -> bool:
    """Return whether a schema file is still the one of a run: its own refined schema, or unchanged since.

    Raises:
        RunFolderError: environment.json is damaged.
        ConfigError: the schema file cannot be read.
    """
    noted = folder / ENVIRONMENT
    if schema_file == folder / SCHEMA or not noted.is_file():
        return True
    facts = parse_json(read_content(noted, RunFolderError), noted, RunFolderError)
    before = facts.get("data_files", {}).get(SCHEMA)
    return before is None or _sha256(schema_file) == before


def _sha256(path: Path) -> str:
    return f"sha256:{hashlib.sha256(read_content(path, ConfigError)).hexdigest()}"


@cache
def _version(package: str) -> str:
    """Return the installed version of a package."""
    return metadata.version(package)
