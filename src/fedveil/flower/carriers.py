"""What can carry a silo's letters: by the name that ``silo.toml`` gives it, the module that a process of it runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

CARRIERS: Final[Mapping[str, str]] = {
    "fleet": "fedveil.flower.node",
    "supernode": "fedveil.flower.supernode",
}
