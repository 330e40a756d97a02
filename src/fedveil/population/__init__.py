"""Who holds what: records over silos and users, their allocation, users' own tables, the data sets.

Calling the package makes a population of arrays: ``fedveil.population(features=..., targets=..., user=..., silo=...)``
is :func:`fedveil.population.arrays.population`.
"""

import sys
from types import ModuleType
from typing import Any


class _Room(ModuleType):
    """The package, callable: ``fedveil.population`` names both the room and its first function."""

    def __call__(self, *given: Any, **named: Any) -> Any:
        from fedveil.population.arrays import population

        return population(*given, **named)


sys.modules[__name__].__class__ = _Room
