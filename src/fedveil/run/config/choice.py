"""A section of an experiment that names a registered member: its name, and that member's own keys.

The keys are read off the member, a stage's class or a builder's signature (:mod:`fedveil.config_keys`), so that there
is no list of them beside it. Reading a choice loads the one member that it names and no other.

A builder and a stage differ in one thing: composition fills in what a builder is given by the population, so it is
called only then. A stage without such fields is built when it is read, and what it refuses is told with the key's path.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, is_dataclass
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    PlainSerializer,
    PlainValidator,
    PydanticUserError,
    TypeAdapter,
    ValidationError,
    create_model,
)
from pydantic.fields import FieldInfo

from fedveil.config_keys import REQUIRED, Key, keys_of
from fedveil.errors import ConfigError, FedveilError, did_you_mean
from fedveil.registry import KINDS, PACKAGE, find, members, names
from fedveil.sanitize import sanitize
from fedveil.validation import DocumentTable, WrongSectionError

_NAME: Final = "name"
_FEW: Final = 4
_OF_A_UNION: Final = 2
_JSON: Final = TypeAdapter(Any)


@dataclass(frozen=True)
class Choice:
    """A member that an experiment asks for, with all its keys.

    Attributes:
        kind: of the registry.
        name: of the member.
        keys: by name, defaults included; what composition fills in is not among them.
    """

    kind: str
    name: str
    keys: Mapping[str, Any] = field(default_factory=dict)

    @property
    def _member(self) -> Callable[..., Any]:
        return _loaded(self.kind, self.name)

    @property
    def unverified_parts(self) -> tuple[str, ...]:
        """What of it comes from other packages and was not asked for by a name of its own, in words."""
        return ()

    def get(self, key: str) -> Any:
        """Return the value of a key; None where the member has no such key."""
        return self.keys.get(key)

    def as_default(self, key: str) -> bool:
        """Return whether a key has the value that it has when it is left out, or the member has no such key."""
        return all(self.get(key) == one.default for one in own_keys(self._member) if one.name == key)

    def needs(self, what: str) -> bool:
        """Return whether the member asks composition for something, such as ``local``."""
        return any(key.name == what and key.filled for key in keys_of(self._member))

    def build(self, given: Mapping[str, Any] = MappingProxyType({}), **instead: Any) -> Any:
        """Return the stage, or what the builder makes.

        Args:
            given: what composition can fill in, by name; the member takes what it asks for.
            instead: values in place of keys, for words that stand for numbers.

        Raises:
            ConfigError: the member asks for what composition does not have.
            FedveilError: what it refuses.
        """
        member, wanted = self._member, dict[str, Any]()
        for key in keys_of(member):
            if key.filled and key.name in given:
                wanted[key.name] = given[key.name]
            elif key.filled and key.default is REQUIRED:
                raise ConfigError(
                    f"{KINDS[self.kind]} '{self.name}' needs '{key.name}', which is no key of its own but filled in; "
                    f"filled in here: {', '.join(sorted(given)) or 'nothing'}"
                )
        return member(**{**self.keys, **instead, **wanted})

    def document(self) -> dict[str, Any]:
        """Return the section as a document has it, defaults included; what has no value is left out."""
        return {_NAME: self.name, **_written(self.keys)}


@dataclass(frozen=True)
class ChoiceField:
    """Marks a field of an experiment as a section of this kind, as in ``Annotated[Choice, Chosen("channels")]``."""

    kind: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        """Return how a document's table becomes a choice, and back."""
        both = Annotated[Any, PlainValidator(self.read), PlainSerializer(Choice.document)]
        return handler.generate_schema(both)

    def read(self, given: Any) -> Choice:
        """Return the choice of a table; each problem is told with its key."""
        if isinstance(given, Choice):
            return given
        if not isinstance(given, dict):
            example = next((one.name for one in members(self.kind)), "...")
            raise section_error(
                f"must be a table with a name, for instance {{ name = '{example}' }}, not {sanitize(repr(given))}"
            )
        if not isinstance(given.get(_NAME), str):
            raise self._nameless(given)
        try:
            section = section_of(self.kind, given[_NAME])
        except ConfigError as error:
            raise section_error(str(error), (_NAME,)) from None
        try:
            keys = dict(section.model_validate({key: given[key] for key in given if key != _NAME}))
        except ValidationError as error:
            problems = [self._told(one, section) for one in error.errors(include_url=False)]
            raise WrongSectionError(problems, section) from None
        choice = Choice(kind=self.kind, name=given[_NAME], keys=keys)
        _try(choice)
        return choice

    def known_keys(self) -> list[str]:
        """Return the keys that any member of the kind has."""
        found = {_NAME}
        for one in members(self.kind):
            try:
                found |= {key.name for key in own_keys(one.load())}
            except ConfigError:
                continue  # its own command says so
        return sorted(found)

    def _nameless(self, given: Mapping[str, Any]) -> WrongSectionError:
        """Return the problems of a table without a name: a slip in that key is among those that nothing has.

        No package's code is loaded for that: the keys of its members are not known.
        """
        own = sorted({_NAME}.union(*(section_of(self.kind, name).model_fields for name in names(self.kind))))
        problems: list[dict[str, Any]] = [{"type": "missing", "loc": (_NAME,), "input": None}]
        for key in map(str, given):
            if key not in own:
                told = f"no such key in any {KINDS[self.kind]} of {PACKAGE}{did_you_mean(key, own)}"
                problems.append({"type": "value_error", "loc": (key,), "msg": told, "input": None})
        return WrongSectionError(problems, None)

    def _told(self, problem: Any, section: type[BaseModel]) -> dict[str, Any]:
        """Return a problem; an unknown key says whose it is, if it is that of a few others of the house."""
        if not problem["loc"]:
            return dict(problem)  # of several keys, each with its path
        key, kind = problem["loc"][0], problem["type"]
        inner = [] if kind == "extra_forbidden" else sorted(_inner_keys(section.model_fields[key].annotation))
        if inner and kind == "unexpected_keyword_argument":
            return {"type": kind, "loc": problem["loc"], "ctx": {"known": inner}, "input": None}
        if inner and kind == "float_parsing" and len(problem["loc"]) == _OF_A_UNION:
            told = f"must be a number, or a table with {', '.join(inner)}, not {sanitize(repr(problem['input']))}"
            return {"type": "value_error", "loc": problem["loc"], "msg": told, "input": None}
        if kind != "extra_forbidden":
            return dict(problem)
        owners = [f"'{name}'" for name in names(self.kind) if key in section_of(self.kind, name).model_fields]
        whose = f"; it belongs to name = {' or '.join(owners)}" if 0 < len(owners) <= _FEW else ""
        context = {"known": (_NAME, *section.model_fields), "whose": whose}
        return {"type": kind, "loc": problem["loc"], "ctx": context, "input": None}


@dataclass(frozen=True)
class StageField:
    """Marks a field of an experiment as the section of one stage, as in ``Annotated[LocalSgd, Keys(LocalSgd)]``.

    Attributes:
        stage: its class, whose fields are the keys.
    """

    stage: type[Any]

    @property
    def section(self) -> type[BaseModel]:
        """The keys as a pydantic model."""
        return _section(self.stage.__name__, own_keys(self.stage))

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        """Return how a document's table becomes the stage, and back."""
        both = Annotated[Any, PlainValidator(self.read), PlainSerializer(self.document)]
        return handler.generate_schema(both)

    def read(self, given: Any) -> Any:
        """Return the stage of a table; each problem is told with its key."""
        if type(given) is self.stage:
            return given
        if not isinstance(given, dict):
            raise section_error(f"must be a table, not {sanitize(repr(given))}")
        try:
            return self.stage(**dict(self.section.model_validate(given)))
        except ValidationError as error:
            raise WrongSectionError(error.errors(include_url=False), self.section) from None
        except FedveilError as error:
            raise section_error(str(error)) from None

    def known_keys(self) -> list[str]:
        """Return the keys."""
        return sorted(key.name for key in own_keys(self.stage))

    def document(self, stage: Any) -> dict[str, Any]:
        """Return the section as a document has it, defaults included; what has no value is left out."""
        return _written({key.name: getattr(stage, key.name) for key in own_keys(self.stage)})


class _OfAStage(DocumentTable):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())


@cache
def section_of(kind: str, name: str) -> type[BaseModel]:
    """Return the keys of a member as a pydantic model.

    Raises:
        ConfigError: no such member, or one that cannot be loaded or has no keys that a document could give.
    """
    keys = own_keys(_loaded(kind, name))
    if any(key.name == _NAME for key in keys):
        raise ConfigError(f"{KINDS[kind]} '{name}': a key of its own is called 'name', which is taken")
    try:
        return _section(f"{kind}:{name}", keys)
    except (PydanticUserError, NameError) as error:
        raise ConfigError(
            f"{KINDS[kind]} '{name}': a key that no document can give: {sanitize(str(error))}"
        ) from error


@cache
def _section(title: str, keys: tuple[Key, ...]) -> type[BaseModel]:
    """Return keys as a pydantic model."""
    fields: dict[str, Any] = {}
    for key in keys:
        wanted = key.type if not key.words else key.type | Literal[key.words]
        fields[key.name] = (wanted, FieldInfo(default=... if key.default is REQUIRED else key.default))
    return create_model(title, __base__=_OfAStage, **fields)


def _inner_keys(hint: Any) -> set[str]:
    """Return the keys of the tables that a key's value may be."""
    if isinstance(hint, type) and is_dataclass(hint):
        return {key.name for key in keys_of(hint) if not key.filled}
    return {key for one in get_args(hint) for key in _inner_keys(one)}


def _written(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that have a value, as a document has them."""
    return {key: _JSON.dump_python(value, mode="json") for key, value in keys.items() if value is not None}


def own_keys(member: Callable[..., Any]) -> tuple[Key, ...]:
    """Return the keys of a member that a document may give."""
    return tuple(key for key in keys_of(member) if not key.filled)


def choice_of(kind: str, stage: Any) -> Choice | None:
    """Return the choice that a stage is what comes of; None if it is of no registered class."""
    for one in members(kind):
        if type(stage).__module__ != one.place.partition(":")[0]:
            continue  # nor is it loaded for that
        if one.load() is type(stage):
            keys = {key.name: getattr(stage, key.name) for key in own_keys(type(stage))}
            return Choice(kind=kind, name=one.name, keys=keys)
    return None


@cache
def _loaded(kind: str, name: str) -> Callable[..., Any]:
    """Return a member whose keys can be read.

    Raises:
        ConfigError: there is none, it cannot be loaded, or it is no class or function with readable parameters.
    """
    member = find(kind, name)
    found: Callable[..., Any] = member.load()
    try:
        keys_of(found)
    except (TypeError, NameError, ValueError) as error:
        raise ConfigError(
            f"{KINDS[kind]} '{sanitize(name)}' of the package {sanitize(member.package)} is no class or function whose "
            f"parameters can be read: {sanitize(str(error))}"
        ) from error
    return found


def _try(choice: Choice) -> None:
    """Build a stage that needs nothing of the population, so that what it refuses is told when it is read."""
    keys = keys_of(_loaded(choice.kind, choice.name))
    if any(key.filled and key.default is REQUIRED for key in keys):
        return
    if any(isinstance(choice.get(key.name), str) for key in keys if key.words):
        return
    try:
        choice.build()
    except FedveilError as error:
        raise section_error(str(error)) from None


def section_error(why: str, path: tuple[str, ...] = ()) -> WrongSectionError:
    """Return the problem of a section, or of a key in it."""
    problem = {"type": "value_error", "loc": path, "msg": why, "input": None}
    return WrongSectionError([problem], None)
