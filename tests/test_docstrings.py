"""Examples in docstrings print what stands below them."""

from __future__ import annotations

import doctest
from importlib import import_module
from pathlib import Path

import pytest

import fedveil

SOURCE = Path(fedveil.__file__).parent
MODULES = sorted(
    ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")
    for path in SOURCE.rglob("*.py")
    if ">>> " in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_a_module_print_what_they_say(name: str) -> None:
    """Each module's examples are found, and none prints anything else."""
    found = doctest.testmod(import_module(name))
    assert found.attempted
    assert not found.failed
