"""Record software and machine of a run; list third-party code with unverified privacy claims."""

from __future__ import annotations

import platform
from functools import cache
from importlib import metadata
from typing import TYPE_CHECKING

from fedveil.data.catalogue import digests
from fedveil.registry import KINDS, Member, third_party
from fedveil.run.config.experiment import DataSection, Experiment, asked_for
from fedveil.run.config.in_memory_method import SESSION, unverified_algorithm
from fedveil.run.config.release_document import TableDocument
from fedveil.run.folder.run_folder import Row
from fedveil.sanitize import sanitize

if TYPE_CHECKING:
    from fedveil.run.setup import Prepared


def third_party_members(experiment: Experiment | TableDocument) -> tuple[Member, ...]:
    """Return the members from other packages that a document names."""
    asked = asked_for(experiment.model_dump(mode="json", exclude_none=True))
    # Objects of a Python session are not in the registry; `unverified_parts` lists their classes.
    named = {key: one for key, one in asked.items() if not one[1].startswith(SESSION)}
    return tuple(third_party(named).values())


def unverified_plugins(experiment: Experiment) -> tuple[str, ...]:
    """List third-party stages whose privacy claims fedveil did not verify, as sentences for the statement.

    ``environment.json`` and the terms of a federation's run name the version of each package.
    """
    named = tuple(
        f"the {KINDS[one.kind]} {sanitize(one.name)} comes from the package {sanitize(one.package)}"
        for one in third_party_members(experiment)
    )
    unchecked = "and its privacy claims are taken on trust: that it does what it claims was not checked"
    return tuple(
        f"{one}, {unchecked}"
        for one in (
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
        | {one.package: one.version for one in third_party_members(prepared.experiment)},
        "data_files": _data_files(prepared.experiment.data),
    }


def _data_files(data: DataSection) -> dict[str, str]:
    """Return the digests of a catalogue data set's files, which are public.

    Digests of the user's tables are as private as the tables, so they are left out.
    """
    if data.name is None or data.name.startswith(SESSION):
        return {}
    return digests(data.name, data.folder)


@cache
def _version(package: str) -> str:
    """Return the installed version of a package."""
    return metadata.version(package)
