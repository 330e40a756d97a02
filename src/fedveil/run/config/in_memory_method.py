"""Describe a method that was composed in Python, so that an experiment's document can identify it.

Guarantee: a run resumes only with a composition whose stages have the same description as at its start: class, and
every field by value. A value that has no description is refused before the run begins. Not claimed: that the code
of the classes is the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any, Final

from fedveil.errors import ConfigError
from fedveil.registry import PACKAGE
from fedveil.run.config.choice import Choice, ChoiceField, section_error
from fedveil.sanitize import sanitize

SESSION: Final = "session:"
"""Prefix of the names of objects that were passed in Python: data, a model, a loss, a metric, a method."""

_NAME: Final = "name"
_STAGES: Final = "stages"


@dataclass(frozen=True)
class ChosenMethod(ChoiceField):
    """Annotation of the section of a method, which may have been composed in Python."""

    kind: str = "methods"

    def read(self, given: Any) -> Choice:
        """Return the choice of a table; for a method composed in Python, its description."""
        if isinstance(given, dict) and str(given.get(_NAME)).startswith(SESSION):
            return InMemoryMethod.read(given)
        return super().read(given)


@dataclass(frozen=True)
class InMemoryMethod(Choice):
    """A method that was composed in Python; a document has its name and a description of its stages.

    Attributes:
        value: the method; None if a document was read, because only the session that composed it can build it.
    """

    value: Any = field(default=None, compare=False)

    @classmethod
    def from_method(cls, method: Any) -> InMemoryMethod:
        """Return the choice of a composed method.

        Raises:
            ConfigError: a stage holds a value without a description; the message names its path.
        """
        stages = {one.name: _spelt(getattr(method, one.name), one.name) for one in fields(method)}
        return cls(kind="methods", name=f"{SESSION}{method.name}", keys={_STAGES: stages}, value=method)

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> InMemoryMethod:
        """Return the choice that a document describes."""
        stages = given.get(_STAGES)
        known = isinstance(stages, dict) and all(isinstance(one, str) for one in stages.values())
        if not known or given.keys() != {_NAME, _STAGES}:
            raise section_error(
                f"a method of a Python session has the keys name and stages, and '{_STAGES}' are texts"
            )
        return cls(kind="methods", name=given[_NAME], keys={_STAGES: stages})

    @property
    def unverified_parts(self) -> tuple[str, ...]:
        """Sentences on stages whose classes come from other packages."""
        stages = (
            {}
            if self.value is None
            else {one.name: getattr(self.value, one.name) for one in fields(self.value)}
        )
        found = {name: type(one) for name, one in stages.items() if _is_strange(type(one))}
        return tuple(
            f"the {name} {one.__qualname__} comes from {one.__module__}, and was handed over in Python"
            for name, one in found.items()
        )

    def needs(self, what: str, *, without_default: bool = False) -> bool:
        """Return False, because a composed method is complete."""
        return False

    def build(self, given: Mapping[str, Any] = MappingProxyType({}), **instead: Any) -> Any:
        """Return the method.

        Raises:
            ConfigError: only the description is known, or the experiment sets another number of colluding silos.
        """
        if self.value is None:
            raise ConfigError(
                f"method.name: '{sanitize(self.name)}' was composed in a Python session, and is nowhere to be found "
                "from here; fedveil.resume(folder, model, people, method=...) goes on with the same composition"
            )
        pooling = given.get("colluding_silos", 0)
        if pooling not in (0, self.value.channel.colluding_silos):
            raise ConfigError(
                f"privacy.colluding_silos = {pooling}: the noise of a composed method is sized by its own channel, for "
                f"{self.value.channel.colluding_silos}; give that colluding_silos"
            )
        return self.value


def _spelt(value: Any, path: str) -> str:
    """Return a description of a value that is the same in every session.

    Raises:
        ConfigError: the value has none: it is not a number, text, list, enum member or dataclass of those.
    """
    if isinstance(value, Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if is_dataclass(value) and not isinstance(value, type):
        kind = type(value)
        inside = ", ".join(
            f"{one.name}={_spelt(getattr(value, one.name), f'{path}.{one.name}')}" for one in fields(value)
        )
        return f"{kind.__module__ + ':' if _is_strange(kind) else ''}{kind.__qualname__}({inside})"
    if isinstance(value, tuple | list):
        return f"[{', '.join(_spelt(one, f'{path}.{at}') for at, one in enumerate(value))}]"
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    raise ConfigError(
        f"method.{path}: experiment.toml cannot say {type(value).__qualname__}, so that a resumed run could not be "
        "told from another; stages are numbers, texts, lists of them, and dataclasses of those"
    )


def _is_strange(kind: type[Any]) -> bool:
    """Return whether a class comes from another package."""
    return kind.__module__.partition(".")[0] not in (PACKAGE, "builtins")
