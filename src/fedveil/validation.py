"""Explain validation errors of documents in plain words: the accepted value, and the value found.

Pydantic reports errors by its own paths and terms. This module translates them to the paths and keys of the TOML or
JSON document, and makes validation stricter than pydantic where it would convert true or text to a number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from itertools import islice
from types import UnionType
from typing import Annotated, Any, Final, Literal, Self, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, ModelWrapValidatorHandler, Tag, ValidationError, model_validator
from pydantic.fields import FieldInfo

from fedveil.config_keys import is_number, plain_inside
from fedveil.errors import ConfigError, FedveilError, did_you_mean, show_argument

ModelT = TypeVar("ModelT", bound=BaseModel)

_WANTED: Final = {
    "int": "a whole number",
    "float": "a number",
    "finite": "a finite number",
    "dataclass": "a table",
    "string": "text",
    "bool": "true or false",
    "tuple": "a list",
    "list": "a list",
    "dict": "a table",
    "model": "a table",
    "path": "a path",
    "date": "a date",
}
_UNKNOWN: Final = ("extra_forbidden", "unexpected_keyword_argument")
_MOST_TOLD: Final = 40
"""Largest number of problems that an error about a document tells."""
_LIMITS: Final = {
    "greater_than_equal": ("ge", ">="),
    "greater_than": ("gt", ">"),
    "less_than_equal": ("le", "<="),
    "less_than": ("lt", "<"),
}


def _plain(problem: Mapping[str, Any]) -> str:
    """Describe one entry of ``ValidationError.errors()`` in words, without the path of its key."""
    kind, context, shown = problem["type"], problem.get("ctx", {}), _shown(problem["input"])
    if kind in ("missing", "union_tag_not_found"):
        example = context.get("example")
        return f"is required, for instance {example}" if example else "is required"
    if kind == "value_error":
        return str(problem["msg"]).removeprefix("Value error, ")
    if kind == "literal_error":
        return f"must be {context['expected']}, not {shown}"
    if kind == "union_tag_invalid":
        return f"must be one of {context['expected_tags']}, not '{context['tag']}'"
    if kind == "too_short":
        return f"needs {context['min_length']} or more entries, not {context['actual_length']}"
    if kind in _LIMITS:
        limit, sign = _LIMITS[kind]
        return f"must be {sign} {context[limit]:g}, not {shown}"
    if kind == "string_pattern_mismatch":
        return f"must match {context['pattern']}, not {shown}"
    if kind == "string_too_long":
        return f"must have at most {context['max_length']} characters, not {len(problem['input'])}"
    expected = _WANTED.get(kind.partition("_")[0])
    return str(problem["msg"]) if expected is None else f"must be {expected}, not {shown}"


class WrongSectionError(ValueError):
    """Errors inside a section that validates itself, to be reported with the document's paths.

    Attributes:
        problems: entries as in ``ValidationError.errors()``, with paths relative to the section.
        section: the type as which the section was read.
    """

    def __init__(self, problems: Sequence[Any], section: Any) -> None:
        super().__init__("a wrong section")
        self.problems, self.section = problems, section


class DocumentTable(BaseModel):
    """Base class of all tables of a document; keeps booleans, numbers and text apart.

    Pydantic alone would read true as 1 and the text "3" as 3. Every table of fedveil derives from this class, so no
    key of a document is converted like that. Unknown keys are refused, and values are fixed once read, unless a
    subclass says otherwise.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="wrap")
    @classmethod
    def _apart(cls, value: Any, read: ModelWrapValidatorHandler[Self]) -> Self:
        """Refuse a boolean read from another type and a number read from another type.

        Numbers of numpy, PyTorch and other libraries are converted to Python numbers first.
        """
        value = plain_inside(value) if isinstance(value, Mapping) else value
        parsed = read(value)
        problems = list(_mistaken(value, parsed, ()))
        if problems:
            raise WrongSectionError(problems, None)  # their paths are the document's own
        return parsed


def _mistaken(original: Any, converted: Any, path: tuple[str | int, ...]) -> Iterator[dict[str, Any]]:
    """Yield errors for values that pydantic converted to a number or a boolean from another type."""
    if isinstance(original, Mapping):
        for key, value in original.items():
            inside = (
                converted.get(key) if isinstance(converted, Mapping) else getattr(converted, str(key), None)
            )
            yield from _mistaken(value, inside, (*path, key))
    elif isinstance(original, list | tuple) and isinstance(converted, list | tuple):
        for index, (value, inside) in enumerate(zip(original, converted, strict=False)):
            yield from _mistaken(value, inside, (*path, index))
    elif is_number(converted) and original is not None and not is_number(original):
        kind = "float_type" if isinstance(converted, float) else "int_type"
        yield {"type": kind, "loc": path, "input": original, "msg": "a number is needed"}
    elif isinstance(converted, bool) and not isinstance(original, bool):
        yield {"type": "bool_type", "loc": path, "input": original, "msg": "true or false is needed"}


def validate_document(
    kind: type[ModelT], document: object, place: object, error: type[FedveilError] = ConfigError
) -> ModelT:
    """Validate a document as a table of the given kind.

    Args:
        kind: the table's class.
        document: the parsed document.
        place: name of the document in errors, mostly its path.
        error: class of the error to raise.

    Raises:
        FedveilError: of the class ``error``: a key is missing, unknown or wrong; names the place and the key.
    """
    try:
        return kind.model_validate(document)
    except ValidationError as wrong:
        raise error(f"{place}: {explain_errors(wrong, kind)}") from None


def explain_errors(error: ValidationError | WrongSectionError, document: Any) -> str:
    """Describe the errors of a document, key by key, with the paths that its author knows; of many, the first 40.

    Args:
        error: the error that validation raised.
        document: the type as which the document was read: a pydantic model or a dataclass.
    """
    problems = error.problems if isinstance(error, WrongSectionError) else error.errors(include_url=False)
    errors = list(islice(_told(problems, document, (), {}), _MOST_TOLD + 1))
    more = ["and more like these"] if len(errors) > _MOST_TOLD else []
    errors = errors[:_MOST_TOLD]
    ranged = {path for path, kind, _ in errors if kind in _LIMITS}
    inside = {path.rpartition(".")[0] for path, _, _ in errors}
    messages = (
        f"{path}: {description}" if path else description
        for path, kind, description in errors
        # For a union type, pydantic reports one error per alternative. If the value fits one alternative but not its
        # range, the type errors and the words of the others are noise. If entries of a list are refused, pydantic also
        # reports the list as too short.
        if not ((kind.endswith("_type") or kind == "literal_error") and path in ranged)
        and not (kind == "too_short" and path in inside)
    )
    return "; ".join((*dict.fromkeys(messages), *more))


def _told(
    problems: Sequence[Any], document: Any, above: tuple[str, ...], listed: dict[Any, str]
) -> Iterator[tuple[str, str, str]]:
    """Yield the path, the kind and the description of every error.

    ``listed`` remembers which tables already had their known keys listed, so that a list appears once.
    """
    for problem in problems:
        path, known_keys, hint = _place(document, problem["loc"])
        context = problem.get("ctx", {})
        inner = context.get("error")
        if "discriminator" in context:  # the key by which the kinds of a table are told apart
            path = (*path, str(context["discriminator"]).removesuffix("()").strip("'_"))
        if isinstance(inner, WrongSectionError):
            yield from _told(inner.problems, inner.section, (*above, *path), listed)
            continue
        key_path = ".".join((*above, *path))
        if problem["type"] in _UNKNOWN:
            has = ", ".join(sorted(context.get("known", known_keys)))
            first = listed.setdefault((*above, *path[:-1], has), key_path) == key_path
            near = context.get("whose") or did_you_mean(path[-1], has.split(", "))
            yield key_path, problem["type"], f"no such key{f'; known here: {has}' * first}{near}"
        else:
            yield key_path, problem["type"], _plain(problem)
        if problem["type"] == "union_tag_not_found" and isinstance(problem["input"], Mapping):
            kinds = sorted({key for arm in get_args(hint) for key in _keys(_bare(arm)) or {}})
            for key in map(str, problem["input"]):
                if key not in kinds:  # where a slip in the key that tells the kinds apart is found
                    message = f"no such key; known here: {', '.join(kinds)}{did_you_mean(key, kinds)}"
                    yield ".".join((*above, *path[:-1], key)), "extra_forbidden", message


def _place(document: Any, location: Sequence[str | int]) -> tuple[tuple[str, ...], list[str], Any]:
    """Return an error's path in the document, the known keys of its table, and its type.

    For a union type, pydantic inserts the name of the alternative into the path. The document has no such level, so
    this function drops it.
    """
    path, known_keys, hint = list[str](), list[str](), _bare(document)
    for part in location:
        keys, inside = _keys(hint), get_args(hint)
        if get_origin(hint) in (Union, UnionType):
            hint = next((_bare(arm) for arm in inside if _is_called(arm, part)), None)
            continue
        if keys is not None:
            known_keys, hint = list(keys), _bare(keys.get(str(part)))
        else:
            hint = _bare(inside[1 if get_origin(hint) is dict else 0]) if inside else None
        path.append(str(part))
    return tuple(path), known_keys, hint


def _bare(hint: Any) -> Any:
    """Return a type without its annotations and without None among its alternatives."""
    if get_origin(hint) is Annotated:
        return _bare(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType) and type(None) in get_args(hint):
        alternatives = tuple(arm for arm in get_args(hint) if arm is not type(None))
        return _bare(alternatives[0]) if len(alternatives) == 1 else Union[alternatives]  # noqa: UP007
    return hint


def _keys(table: Any) -> dict[str, Any] | None:
    """Return the keys of a table with their types; None if the type is no table."""
    fields: dict[str, FieldInfo] | None = getattr(table, "__pydantic_fields__", None)
    if fields is not None:
        return {name: field.annotation for name, field in fields.items()}
    return get_type_hints(table) if isinstance(table, type) and is_dataclass(table) else None


def _is_called(arm: Any, part: str | int) -> bool:
    """Return whether an error path's element names this alternative, by its tag or by a Literal field."""
    marks = get_args(arm)[1:] if get_origin(arm) is Annotated else ()
    words = [get_args(hint) for hint in (_keys(_bare(arm)) or {}).values() if get_origin(hint) is Literal]
    return any(isinstance(mark, Tag) and mark.tag == part for mark in marks) or any(
        part in choices for choices in words
    )


def _shown(value: Any) -> str:
    """Return a value as it appears in a document; a table or list is shown by its kind alone."""
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list | tuple):
        return "a list"
    return str(value).lower() if isinstance(value, bool) else show_argument(value)
