"""What a run is made of: versions and machine, and the code of other packages, whose claims nobody here has checked."""

from __future__ import annotations

import platform
from functools import cache
from importlib import metadata
from typing import TYPE_CHECKING

from fedveil.data.catalogue import digests
from fedveil.registry import KINDS, Member, third_party
from fedveil.run.config.experiment import DataSection, Experiment, asked_for
from fedveil.run.config.in_memory_method import SESSION
from fedveil.run.config.release_document import TableDocument
from fedveil.run.folder.run_folder import Row
from fedveil.sanitize import sanitize

if TYPE_CHECKING:
    from fedveil.run.setup import Prepared


def third_party_members(experiment: Experiment | TableDocument) -> tuple[Member, ...]:
    """Return the members that a document asks for and other packages bring."""
    asked = asked_for(experiment.model_dump(mode="json", exclude_none=True))
    named = {key: one for key, one in asked.items() if not one[1].startswith(SESSION)}
    return tuple(third_party(named).values())


def unverified_plugins(experiment: Experiment) -> tuple[str, ...]:
    """Return, for the statement, whose claims a run rests on: nothing shows that such a stage does what it says.

    ``environment.json`` names the version, and so do the terms of a federation's run.
    """
    named = tuple(
        f"the {KINDS[one.kind]} {sanitize(one.name)} comes from the package {sanitize(one.package)}"
        for one in third_party_members(experiment)
    )
    unchecked = "and its privacy claims are taken on trust: that it does what it claims was not checked"
    return tuple(
        f"{one}, {unchecked}" for one in (*named, *map(sanitize, experiment.method.unverified_parts))
    )


def environment(prepared: Prepared) -> Row:
    """Return what ``environment.json`` holds."""
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
    """Return the digests of a catalogue's files, which are public; those of other tables are as private as they are."""
    if data.name is None or data.name.startswith(SESSION):
        return {}
    return digests(data.name, data.folder)


@cache
def _version(package: str) -> str:
    return metadata.version(package)
