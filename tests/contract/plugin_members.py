"""Members of other packages that the contract suites test too.

    FEDVEIL_CONTRACT=samplers=my_package.sampling:HALF pytest tests/contract/test_samplers.py

runs the suite of samplers with the object ``HALF`` of ``my_package.sampling`` as one more sampler. Several members are
separated by commas.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

from fedveil.user_code import import_object

VARIABLE: Final = "FEDVEIL_CONTRACT"
KINDS: Final = ("samplers", "local_algorithms", "optimizers", "averages", "denoisers", "protections")
"""Kinds of members whose suites take members of other packages."""


def plugin_members(kind: str, environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return the members of a kind that the environment names, by their import paths.

    Raises:
        ValueError: an entry is not ``kind=module:object`` with a known kind.
        ConfigError: the object cannot be imported.
    """
    found: dict[str, Any] = {}
    for entry in filter(None, environment.get(VARIABLE, "").split(",")):
        named, _, path = entry.partition("=")
        if named not in KINDS:
            raise ValueError(
                f"{VARIABLE}: {entry!r} is not kind=module:object with a kind of {', '.join(KINDS)}"
            )
        if named == kind:
            found[path] = import_object(path, f"{VARIABLE}, {kind}")
    return found
