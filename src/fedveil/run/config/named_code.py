"""Find the import paths that an experiment names; run them only if the folder's reader agrees.

A run folder may come from another person, and reading it must run no code of that person's choice. Stages, methods
and data sets are members of installed packages (:mod:`fedveil.registry`). A model, a loss or a metric may be any
object of any module that Python finds. A user who begins a run names them in the experiment. A user who resumes,
audits or bundles a folder must state by name which of them to trust.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from fedveil.errors import ConfigError
from fedveil.run.config.experiment import Experiment
from fedveil.run.config.in_memory_method import SESSION
from fedveil.sanitize import sanitize


def find_named_code(experiment: Experiment) -> dict[str, str]:
    """Return the import paths that an experiment names, each with its first key; nothing is imported."""
    model = experiment.model
    asked = [("model.name", model.name), ("model.loss", model.loss)]
    asked += [("model.metrics", one) for one in model.metrics or ()]
    found: dict[str, str] = {}
    for key, path in asked:
        if path is not None and ":" in path and not path.startswith(SESSION):
            found.setdefault(path, key)
    return found


def check_code(experiment: Experiment, trusted: Collection[str], folder: Path) -> None:
    """Check that all code named by a run folder's experiment is trusted, before any of it is imported.

    Args:
        experiment: the experiment of the folder.
        trusted: import paths that the reader of the folder names.
        folder: the run folder, for errors.

    Raises:
        ConfigError: the experiment names other code; the message lists it, and how to trust it.
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
