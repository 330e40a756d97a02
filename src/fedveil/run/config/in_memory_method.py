"""Describe a method that was composed in Python, so that an experiment's document can identify it.

Guarantee: a run resumes only with a composition whose stages have the same description as at its start: class, and
every field by value. A value that has no description is refused before the run begins. Not claimed: that the code
of the classes is the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import Enum
from types import MappingProxyType
from typing import Annotated, Any, Final

from pydantic import GetCoreSchemaHandler, PlainSerializer, PlainValidator, ValidationInfo

from fedveil.errors import ConfigError
from fedveil.methods.capabilities import count_colluding
from fedveil.registry import is_own
from fedveil.run.config.choice import Choice, ChoiceField, StageField, choice_of, section_error
from fedveil.sanitize import sanitize
from fedveil.training.local_algorithms import PLAIN, LocalAlgorithm
from fedveil.training.steps import LocalSgd
from fedveil.validation import WrongSectionError

SESSION: Final = "session:"
"""Prefix of the names of objects that were passed in Python: data, a model, a loss, a metric, a method."""

_NAME: Final = "name"
_STAGES: Final = "stages"


@dataclass(frozen=True)
class ChosenMethod(ChoiceField):
    """Annotation of the section of a method, which may have been composed in Python."""

    kind: str = "methods"

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        """Return the pydantic schema, which also names a missing table ``[local]`` if the section is wrong."""
        both = Annotated[Any, PlainValidator(self._read_section), PlainSerializer(Choice.document)]
        return handler.generate_schema(both)

    def _read_section(self, value: Any, info: ValidationInfo) -> Choice:
        try:
            return self.read(value)
        except WrongSectionError as error:
            absent = info.data.get("local", ...) is None
            if not absent or error.section is None or not Choice(self.kind, value[_NAME]).needs("local"):
                raise
            problem = {
                "type": "value_error",
                "loc": (),
                "msg": explain_missing_local(value[_NAME]),
                "input": None,
            }
            raise WrongSectionError([*error.problems, problem], error.section) from None

    def read(self, value: Any) -> Choice:
        """Return the choice of a table; for a method composed in Python, its description."""
        if isinstance(value, dict) and str(value.get(_NAME)).startswith(SESSION):
            return InMemoryMethod.read(value)
        return super().read(value)


def explain_missing_local(method: str) -> str:
    """Return what a document of a method that trains locally lacks."""
    return f"{method} trains locally; give [local] with a learning_rate, for instance 'by-rule' or 0.1"


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
        stages = {
            stage.name: _describe_value(getattr(method, stage.name), stage.name) for stage in fields(method)
        }
        return cls(kind="methods", name=f"{SESSION}{method.name}", keys={_STAGES: stages}, value=method)

    @classmethod
    def read(cls, table: Mapping[str, Any]) -> InMemoryMethod:
        """Return the choice that a document describes."""
        stages = table.get(_STAGES)
        is_valid = isinstance(stages, dict) and all(isinstance(text, str) for text in stages.values())
        if not is_valid or table.keys() != {_NAME, _STAGES}:
            raise section_error(
                f"a method of a Python session has the keys name and stages, and '{_STAGES}' are texts"
            )
        return cls(kind="methods", name=table[_NAME], keys={_STAGES: stages})

    @property
    def unverified_parts(self) -> tuple[str, ...]:
        """Sentences on stages whose classes come from other packages."""
        stages = (
            {}
            if self.value is None
            else {stage.name: getattr(self.value, stage.name) for stage in fields(self.value)}
        )
        foreign = {name: type(stage) for name, stage in stages.items() if not is_own(type(stage))}
        return tuple(
            f"the {name} {stage.__qualname__} comes from {stage.__module__}, and was handed over in Python"
            for name, stage in foreign.items()
        )

    def needs(self, key_name: str, *, without_default: bool = False) -> bool:
        """Return False, because a composed method is complete."""
        return False

    def build(self, filled: Mapping[str, Any] = MappingProxyType({}), **instead: Any) -> Any:
        """Return the method.

        Raises:
            ConfigError: only the description is known, or the experiment sets another number of colluding silos.
        """
        if self.value is None:
            raise ConfigError(
                f"method.name: '{sanitize(self.name)}' was composed in a Python session, and "
                "is not available in this process; fedveil.resume(folder, model, people, method=...) goes on with "
                "the same composition"
            )
        pooling = filled.get("colluding_silos", 0)
        if pooling not in (0, count_colluding(self.value.channel)):
            raise ConfigError(
                f"privacy.colluding_silos = {pooling}: the noise of a composed method is sized by its own channel, for "
                f"{count_colluding(self.value.channel)}; give that colluding_silos"
            )
        return self.value


@dataclass(frozen=True)
class LocalField(StageField):
    """Annotation of the section ``[local]``, whose local algorithm may have been passed in Python."""

    stage: type[Any] = LocalSgd
    kind: str = "local_algorithms"
    slot: str = "algorithm"

    def read(self, table: Any) -> Any:
        """Return the local steps of a table; an algorithm of a Python session is described alone."""
        if not isinstance(table, dict) or not str(table.get(_NAME)).startswith(SESSION):
            return super().read(table)
        local = super().read({key: value for key, value in table.items() if key not in (_NAME, _ALGORITHM)})
        return replace(
            local, algorithm=DescribedAlgorithm(name=str(table[_NAME]), text=str(table.get(_ALGORITHM)))
        )

    def member_document(self, stage: Any) -> dict[str, Any]:
        """Return the name and the keys of the algorithm, or its description if it was passed in Python."""
        algorithm = stage.algorithm
        if isinstance(algorithm, DescribedAlgorithm):
            return {_NAME: algorithm.name, _ALGORITHM: algorithm.text}
        if algorithm != PLAIN and choice_of(self.kind, algorithm) is None:
            name = f"{SESSION}{type(algorithm).__name__}"
            return {_NAME: name, _ALGORITHM: describe_algorithm(algorithm)}
        return super().member_document(stage)


_ALGORITHM: Final = "algorithm"


@dataclass(frozen=True, kw_only=True)
class DescribedAlgorithm(LocalAlgorithm):
    """A local algorithm that was passed in Python, as a document describes it; it cannot be run.

    Attributes:
        name: its name in the document.
        text: its class and fields.
    """

    name: str
    text: str

    def slope(self, gradient: Any, at: Any, state: Any) -> Any:
        """Refuse to compute.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(next(iter(self.refuses(None))))

    def refuses(self, method: Any) -> Iterable[str]:
        """Refuse every method: only the session that made the algorithm can run it."""
        yield (
            f"local.name: '{sanitize(self.name)}' was handed over in a Python session, and "
            "is not available in this process; fedveil.resume(folder, model, people, local=...) goes on with the "
            "same algorithm"
        )


def describe_algorithm(algorithm: LocalAlgorithm) -> str:
    """Return the description of a local algorithm: class, and every field by value.

    Raises:
        ConfigError: a field holds a value without a description.
    """
    if isinstance(algorithm, DescribedAlgorithm):
        return algorithm.text
    return _describe_value(algorithm, "local")


def unverified_algorithm(local: LocalSgd | None) -> tuple[str, ...]:
    """Return a sentence on a local algorithm of another package that was passed in Python."""
    if local is None or is_own(type(local.algorithm)):
        return ()
    if choice_of("local_algorithms", local.algorithm) is not None:
        return ()  # named, so it is listed with its package
    kind = type(local.algorithm)
    return (
        f"the local algorithm {kind.__qualname__} comes from {kind.__module__}, and was handed over in Python",
    )


def _describe_value(value: Any, path: str) -> str:
    """Return a description of a value that is the same in every session.

    Raises:
        ConfigError: the value has none: it is not a number, text, list, enum member or dataclass of those.
    """
    if isinstance(value, Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if is_dataclass(value) and not isinstance(value, type):
        kind = type(value)
        inside = ", ".join(
            f"{member.name}={_describe_value(getattr(value, member.name), f'{path}.{member.name}')}"
            for member in fields(value)
        )
        return f"{'' if is_own(kind) else f'{kind.__module__}:'}{kind.__qualname__}({inside})"
    if isinstance(value, tuple | list):
        return f"[{', '.join(_describe_value(item, f'{path}.{at}') for at, item in enumerate(value))}]"
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    raise ConfigError(
        f"method.{path}: experiment.toml cannot represent {type(value).__qualname__}, "
        "so that a resumed run could not be distinguished from another; stages are numbers, texts, lists of "
        "them, and dataclasses of those"
    )
