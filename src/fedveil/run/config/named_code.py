"""Code that an experiment names by import paths: of a run folder it runs only where its reader names it too.

A run folder may come from somebody else, and reading it must run nothing of its writer's choice. Stages, methods and
data sets are members of installed packages (:mod:`fedveil.registry`); a model, a loss or a metric may be any object of
any module that Python finds. Whoever begins a run names them in their own document; whoever goes on with a folder,
audits it or makes a bundle of it says by name which of them they trust.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from fedveil.errors import ConfigError
from fedveil.run.config.experiment import Experiment
from fedveil.run.config.in_memory_method import SESSION
from fedveil.sanitize import sanitize


def find_named_code(experiment: Experiment) -> dict[str, str]:
    """Return the import paths that an experiment names, each with the first key that does; nothing is imported."""
    model = experiment.model
    asked = [("model.name", model.name), ("model.loss", model.loss)]
    asked += [("model.metrics", one) for one in model.metrics or ()]
    found: dict[str, str] = {}
    for key, path in asked:
        if path is not None and ":" in path and not path.startswith(SESSION):
            found.setdefault(path, key)
    return found


def check_code(experiment: Experiment, trusted: Collection[str], folder: Path) -> None:
    """Return if all code that a run folder's experiment names is trusted, before any of it is imported.

    Args:
        experiment: as the folder has it.
        trusted: import paths that its reader names.
        folder: the run folder, for errors.

    Raises:
        ConfigError: it names other code; says which, and how to trust it.
    """
    strange = {path: key for path, key in find_named_code(experiment).items() if path not in trusted}
    if not strange:
        return
    names = ", ".join(f"{key} = '{sanitize(path)}'" for path, key in strange.items())
    allowed = " ".join(f"--code {sanitize(path)}" for path in strange)
    raise ConfigError(
        f"{folder}: its experiment names code of this machine that would be imported and run: {names}. A run folder "
        f"may come from somebody else; if you trust that code to run on what this folder holds, say so: {allowed}"
    )
