"""Packages of a checkout that are not installed: ``benchmarks`` and ``reproduction``."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

from fedveil.errors import ConfigError


def import_from_checkout(name: str) -> ModuleType:
    """Import a module of a package that lies in the current folder.

    Args:
        name: of the module, with its package: ``"benchmarks.harness"``.

    Raises:
        ConfigError: the current folder has no such package.
    """
    package = name.split(".")[0]
    folder = Path.cwd()
    if not (folder / package / "__init__.py").is_file():
        raise ConfigError(
            f"{package}/ is part of a checkout of fedveil and is not installed; run the command in the "
            "checkout's folder"
        )
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return import_module(name)
