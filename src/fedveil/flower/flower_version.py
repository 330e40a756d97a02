"""The supported releases of Flower; any other is refused before anything of it is imported.

The carrier uses names of Flower that are not all public. ``tests/test_flower_contract.py`` compares them with a
record of each supported release: under another release nobody knows what a name does. This module imports nothing of
Flower, so that the command line starts where the extra ``federation`` is not installed.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Final

from fedveil.errors import ConfigError

RELEASES: Final = ("1.41", "1.42")
"""By their first two numbers; as the extra ``federation`` has them."""


def check_flower_version() -> None:
    """Return if the installed release of Flower is one of them.

    Raises:
        ConfigError: it is another one, or there is none; says which would do, and how to install it.
    """
    wanted = f"{RELEASES[0]} to {RELEASES[-1]}"
    try:
        found = version("flwr")
    except PackageNotFoundError:
        raise ConfigError(
            "a federation needs flwr, which is not installed: pip install 'fedveil[federation]'"
        ) from None
    if ".".join(found.split(".")[:2]) not in RELEASES:
        raise ConfigError(
            f"flwr {found} is installed, and this release of fedveil carries letters over flwr {wanted} alone: its "
            "doors are made of names that another release may have changed. pip install 'fedveil[federation]' brings "
            "one of them; nothing was started"
        )
