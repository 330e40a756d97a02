"""Who holds what: records over silos and users, their allocation, users' own tables, the data sets.

Calling the package makes a population of arrays: ``fedveil.population(features=..., targets=..., user=..., silo=...)``
is :func:`fedveil.population.arrays.population`.
"""

import sys as _sys
import types as _types
import typing as _typing


class _Room(_types.ModuleType):
    """The package, callable: ``fedveil.population`` names both the room and its first function."""

    def __call__(self, *given: _typing.Any, **named: _typing.Any) -> _typing.Any:
        from fedveil.population.arrays import population

        return population(*given, **named)


_sys.modules[__name__].__class__ = _Room
