"""Read a section of an experiment that names a registered member and sets its keys.

The keys come from the member: the fields of a stage's class or the parameters of a builder
(:mod:`fedveil.config_keys`). No second list of keys exists. Reading a choice loads only the member that it names.

A builder differs from a stage in one way: composition fills in parameters that depend on the population, so a
builder is called during composition only. A stage without such fields is built when it is read, so that its
refusals name the key.
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
    """A member that an experiment names, with all its keys.

    Attributes:
        kind: kind of member in the registry.
        name: name of the member.
        keys: values by key, including defaults, without the keys that composition fills in.
    """

    kind: str
    name: str
    keys: Mapping[str, Any] = field(default_factory=dict)

    @property
    def _member(self) -> Callable[..., Any]:
        """The member's class or builder, loaded on first use."""
        return _loaded(self.kind, self.name)

    @property
    def unverified_parts(self) -> tuple[str, ...]:
        """Sentences on third-party parts that have no name of their own in the experiment."""
        return ()

    def get(self, key: str) -> Any:
        """Return the value of a key; None if the member has no such key."""
        return self.keys.get(key)

    def needs(self, key_name: str, *, without_default: bool = False) -> bool:
        """Return whether composition fills in a key of the member, such as ``local``.

        Args:
            key_name: the key.
            without_default: count only a key without a default.
        """
        return any(
            key.name == key_name and key.filled and not (without_default and key.default is not REQUIRED)
            for key in keys_of(self._member)
        )

    def build(self, filled: Mapping[str, Any] = MappingProxyType({}), **instead: Any) -> Any:
        """Build the stage, or call the builder.

        Args:
            filled: values that composition can fill in, by name; the member receives those that it declares.
            instead: numbers that replace keys whose value is a word.

        Raises:
            ConfigError: the member needs a value that composition does not have.
            FedveilError: the member refuses its keys.
        """
        member, arguments = self._member, dict[str, Any]()
        for key in keys_of(member):
            if key.filled and key.name in filled:
                arguments[key.name] = filled[key.name]
            elif key.filled and key.default is REQUIRED:
                raise ConfigError(
                    f"{KINDS[self.kind]} '{self.name}' needs '{key.name}', which is no key of its own but filled in; "
                    f"filled in here: {', '.join(sorted(filled)) or 'nothing'}"
                )
        return member(**{**self.keys, **instead, **arguments})

    def document(self) -> dict[str, Any]:
        """Return the section as a document writes it, including defaults and without keys that are None."""
        return {_NAME: self.name, **_written(self.keys)}


@dataclass(frozen=True)
class ChoiceField:
    """Annotation of a field as a section of a kind: ``Annotated[Choice, ChoiceField("channels")]``.

    Attributes:
        kind: kind of member in the registry.
    """

    kind: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        """Return the pydantic schema that converts a document's table to a choice, and back."""
        both = Annotated[Any, PlainValidator(self.read), PlainSerializer(Choice.document)]
        return handler.generate_schema(both)

    def read(self, value: Any) -> Choice:
        """Return the choice of a table.

        Raises:
            WrongSectionError: each problem with its key.
        """
        if isinstance(value, Choice):
            return value
        if not isinstance(value, dict):
            example = next((member.name for member in members(self.kind)), "...")
            raise section_error(
                f"must be a table with a name, for instance {{ name = '{example}' }}, not {sanitize(repr(value))}"
            )
        if not isinstance(value.get(_NAME), str):
            raise self._nameless(value)
        try:
            section = section_of(self.kind, value[_NAME])
        except ConfigError as error:
            raise section_error(str(error), (_NAME,)) from None
        try:
            keys = dict(section.model_validate({key: value[key] for key in value if key != _NAME}))
        except ValidationError as error:
            own = own_keys(_loaded(self.kind, value[_NAME]))
            problems = [
                _with_example(self._explain(problem, section), own)
                for problem in error.errors(include_url=False)
            ]
            raise WrongSectionError(problems, section) from None
        choice = Choice(kind=self.kind, name=value[_NAME], keys=keys)
        _try(choice)
        return choice

    def known_keys(self) -> list[str]:
        """Return the keys of all members of the kind."""
        keys = {_NAME}
        for member in members(self.kind):
            try:
                keys |= {key.name for key in own_keys(member.load())}
            except ConfigError:
                continue  # the list of members says why it cannot be loaded
        return sorted(keys)

    def _nameless(self, table: Mapping[str, Any]) -> WrongSectionError:
        """Return the problems of a table without a name, including keys that no built-in member has.

        The code of third-party packages is not loaded for an error, so the keys of their members are unknown.
        """
        own_names = sorted(
            {_NAME}.union(*(section_of(self.kind, name).model_fields for name in names(self.kind)))
        )
        problems: list[dict[str, Any]] = [{"type": "missing", "loc": (_NAME,), "input": None}]
        for key in map(str, table):
            if key not in own_names:
                message = f"no such key in any {KINDS[self.kind]} of {PACKAGE}{did_you_mean(key, own_names)}"
                problems.append({"type": "value_error", "loc": (key,), "msg": message, "input": None})
        return WrongSectionError(problems, None)

    def _explain(self, problem: Any, section: type[BaseModel]) -> dict[str, Any]:
        """Return a problem; for an unknown key, name the built-in members that have it, if few have."""
        if not problem["loc"]:
            return dict(problem)  # the problem concerns several keys and names them
        key, kind = problem["loc"][0], problem["type"]
        inner = [] if kind == "extra_forbidden" else sorted(_inner_keys(section.model_fields[key].annotation))
        if inner and kind == "unexpected_keyword_argument":
            return {"type": kind, "loc": problem["loc"], "ctx": {"known": inner}, "input": None}
        if inner and kind == "float_parsing" and len(problem["loc"]) == _OF_A_UNION:
            message = f"must be a number, or a table with {', '.join(inner)}, not {sanitize(repr(problem['input']))}"
            return {"type": "value_error", "loc": problem["loc"], "msg": message, "input": None}
        if kind != "extra_forbidden":
            return dict(problem)
        owners = [f"'{name}'" for name in names(self.kind) if key in section_of(self.kind, name).model_fields]
        owner_hint = f"; it belongs to name = {' or '.join(owners)}" if 0 < len(owners) <= _FEW else ""
        context = {"known": (_NAME, *section.model_fields), "whose": owner_hint}
        return {"type": kind, "loc": problem["loc"], "ctx": context, "input": None}


@dataclass(frozen=True)
class StageField:
    """Annotation of a field as the section of one stage: ``Annotated[LocalSgd, StageField(LocalSgd)]``.

    The section may also name a registered member, which a field of the stage holds, and set the member's keys.

    Attributes:
        stage: class of the stage, whose fields are the keys.
        kind: kind of the member that the section may name; "" for none.
        slot: field of the stage that holds the member.
    """

    stage: type[Any]
    kind: str = ""
    slot: str = ""

    @property
    def section(self) -> type[BaseModel]:
        """The keys of the stage as a pydantic model."""
        return _section(self.stage.__name__, own_keys(self.stage))

    def section_with(self, name: str) -> type[BaseModel]:
        """Return the keys of the stage and of a member as a pydantic model.

        Raises:
            ConfigError: the member does not exist, or has a key that the stage has.
        """
        own, member_keys = own_keys(self.stage), own_keys(_loaded(self.kind, name))
        twice = {_NAME, *(key.name for key in own)} & {key.name for key in member_keys}
        if twice:
            raise ConfigError(
                f"{KINDS[self.kind]} '{name}': a key of its own is called '{min(twice)}', which is taken"
            )
        return _section(f"{self.kind}:{name}", (*own, *member_keys))

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        """Return the pydantic schema that converts a document's table to the stage, and back."""
        both = Annotated[Any, PlainValidator(self.read), PlainSerializer(self.document)]
        return handler.generate_schema(both)

    def read(self, value: Any) -> Any:
        """Return the stage of a table.

        Raises:
            WrongSectionError: each problem with its key.
        """
        if type(value) is self.stage:
            return value
        if not isinstance(value, dict):
            raise section_error(f"must be a table, not {sanitize(repr(value))}")
        if self.kind and _NAME in value:
            return self._read_with_member(value)
        try:
            return self.stage(**dict(self.section.model_validate(value)))
        except ValidationError as error:
            problems = [self._explain(item) for item in error.errors(include_url=False)]
            raise WrongSectionError(problems, self.section) from None
        except FedveilError as error:
            raise section_error(str(error)) from None

    def known_keys(self) -> list[str]:
        """Return the keys of the stage, and of all members that its section may name."""
        key_names = {key.name for key in own_keys(self.stage)}
        return sorted({*key_names, *ChoiceField(self.kind).known_keys()} if self.kind else key_names)

    def document(self, stage: Any) -> dict[str, Any]:
        """Return the section as a document writes it, including defaults and without keys that are None."""
        own_values = _written({key.name: getattr(stage, key.name) for key in own_keys(self.stage)})
        return {**self.member_document(stage), **own_values}

    def member_document(self, stage: Any) -> dict[str, Any]:
        """Return the name and the keys of the stage's member; nothing for the default one."""
        declared: Any = self.stage
        default = next((key.default for key in keys_of(declared) if key.name == self.slot), None)
        if not self.kind or getattr(stage, self.slot) == default:
            return {}
        choice = choice_of(self.kind, getattr(stage, self.slot))
        assert choice is not None, "reading a section builds members that are registered"
        return choice.document()

    def _read_with_member(self, table: Mapping[str, Any]) -> Any:
        """Return the stage of a table that names a member."""
        name = table[_NAME]
        try:
            if not isinstance(name, str):
                raise ConfigError(f"must be a name in quotes, not {sanitize(repr(name))}")
            section = self.section_with(name)
        except ConfigError as error:
            raise section_error(str(error), (_NAME,)) from None
        member_keys = own_keys(_loaded(self.kind, name))
        try:
            values = dict(section.model_validate({key: table[key] for key in table if key != _NAME}))
            keys = {key.name: values.pop(key.name) for key in member_keys}
            return self.stage(**values, **{self.slot: Choice(self.kind, name, keys).build()})
        except ValidationError as error:
            problems = [_with_example(item, member_keys) for item in error.errors(include_url=False)]
            raise WrongSectionError(problems, section) from None
        except FedveilError as error:
            raise section_error(str(error)) from None

    def _explain(self, problem: Any) -> dict[str, Any]:
        """Return a problem; for an unknown key, name the built-in members that have it."""
        if problem["type"] != "extra_forbidden" or not self.kind:
            return dict(problem)
        key = problem["loc"][0]
        owners = [f"'{name}'" for name in names(self.kind) if key in section_of(self.kind, name).model_fields]
        owner_hint = f"; it belongs to name = {' or '.join(owners)}" if owners else ""
        context = {"known": (_NAME, *self.section.model_fields), "whose": owner_hint}
        return {"type": problem["type"], "loc": problem["loc"], "ctx": context, "input": None}


class _OfAStage(DocumentTable):
    """Base of the pydantic models that hold a member's keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())


@cache
def section_of(kind: str, name: str) -> type[BaseModel]:
    """Return the keys of a member as a pydantic model.

    Raises:
        ConfigError: the member does not exist, cannot be loaded, or has a key that no document can set.
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
        annotation = key.type if not key.words else key.type | Literal[key.words]
        fields[key.name] = (annotation, FieldInfo(default=... if key.default is REQUIRED else key.default))
    return create_model(title, __base__=_OfAStage, **fields)


def _inner_keys(hint: Any) -> set[str]:
    """Return the keys of the tables that a key's value may be."""
    if isinstance(hint, type) and is_dataclass(hint):
        return {key.name for key in keys_of(hint) if not key.filled}
    return {key for argument in get_args(hint) for key in _inner_keys(argument)}


def _written(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that are not None, with values as a document writes them."""
    return {key: _JSON.dump_python(value, mode="json") for key, value in keys.items() if value is not None}


def own_keys(member: Callable[..., Any]) -> tuple[Key, ...]:
    """Return the keys of a member that a document may set."""
    return tuple(key for key in keys_of(member) if not key.filled)


def choice_of(kind: str, stage: Any) -> Choice | None:
    """Return the choice that builds a stage; None if the stage's class is not registered."""
    for member in members(kind):
        if type(stage).__module__ != member.path.partition(":")[0]:
            continue  # do not import a module that cannot define this stage
        if member.load() is type(stage):
            keys = {key.name: getattr(stage, key.name) for key in own_keys(type(stage))}
            return Choice(kind=kind, name=member.name, keys=keys)
    return None


@cache
def _loaded(kind: str, name: str) -> Callable[..., Any]:
    """Load a member whose keys can be read.

    Raises:
        ConfigError: the member does not exist, cannot be loaded, or is not a class or function with readable
            parameters.
    """
    member = find(kind, name)
    loaded: Callable[..., Any] = member.load()
    try:
        keys_of(loaded)
    except (TypeError, NameError, ValueError) as error:
        raise ConfigError(
            f"{KINDS[kind]} '{sanitize(name)}' of the package {sanitize(member.package)} is no class or function whose "
            f"parameters can be read: {sanitize(str(error))}"
        ) from error
    return loaded


def _with_example(problem: Any, keys: tuple[Key, ...]) -> dict[str, Any]:
    """Return a problem; a missing key gets an assignment that would be right."""
    if problem["type"] != "missing":
        return dict(problem)
    example = next((key.example for key in keys if problem["loc"] == (key.name,)), "")
    return {**problem, "ctx": {"example": example}}


def _try(choice: Choice) -> None:
    """Build a stage that needs nothing of the population, so that reading reports its refusals."""
    keys = keys_of(_loaded(choice.kind, choice.name))
    if any(key.filled and key.default is REQUIRED for key in keys):
        return
    # A word, such as "calibrated", stands for a number that only composition can find.
    if any(isinstance(choice.get(key.name), str) for key in keys if key.words):
        return
    try:
        choice.build()
    except FedveilError as error:
        raise section_error(str(error)) from None


def section_error(message: str, path: tuple[str, ...] = ()) -> WrongSectionError:
    """Return the error of a section, or of a key in it."""
    problem = {"type": "value_error", "loc": path, "msg": message, "input": None}
    return WrongSectionError([problem], None)
