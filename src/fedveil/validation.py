"""Plain words for what a document's validation refuses: what would be right, and what is there instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from pydantic import ValidationError

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
_LIMITS: Final = {
    "greater_than_equal": ("ge", ">="),
    "greater_than": ("gt", ">"),
    "less_than_equal": ("le", "<="),
    "less_than": ("lt", "<"),
}


def plain(problem: Mapping[str, Any], known: Sequence[str]) -> str:
    """Return one problem in words; the path of its key is the caller's.

    Args:
        problem: one of ``ValidationError.errors()``.
        known: the keys of the table that the problem lies in, for an unknown one.
    """
    kind, context, given = problem["type"], problem.get("ctx", {}), _shown(problem["input"])
    if kind == "missing":
        return "is required"
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"no such key; known here: {', '.join(sorted(known))}"
    if kind == "value_error":
        return str(problem["msg"]).removeprefix("Value error, ")
    if kind == "literal_error":
        return f"must be {context['expected']}, not {given}"
    if kind == "union_tag_not_found":
        return f"{_key(context)}: is required"
    if kind == "union_tag_invalid":
        return f"{_key(context)}: must be one of {context['expected_tags']}, not '{context['tag']}'"
    if kind == "too_short":
        return f"needs {context['min_length']} or more entries, not {context['actual_length']}"
    if kind in _LIMITS:
        limit, sign = _LIMITS[kind]
        return f"must be {sign} {context[limit]:g}, not {given}"
    if kind == "string_pattern_mismatch":
        return f"must match {context['pattern']}, not {given}"
    if kind == "string_too_long":
        return f"must have at most {context['max_length']} characters, not {len(problem['input'])}"
    wanted = _WANTED.get(kind.partition("_")[0])
    return str(problem["msg"]) if wanted is None else f"must be {wanted}, not {given}"


def problems(error: ValidationError, known: Sequence[str]) -> str:
    """Return what is wrong with a document, key by key.

    Args:
        error: what its validation raised.
        known: the document's own keys.
    """
    return "; ".join(
        ": ".join(part for part in (".".join(map(str, one["loc"])), plain(one, known)) if part)
        for one in error.errors(include_url=False)
    )


def _key(context: Mapping[str, Any]) -> str:
    """Return the key by which the kinds of a table are told apart."""
    return str(context["discriminator"]).removesuffix("()").strip("'")


def _shown(value: Any) -> str:
    """Return a value as the document has it; a table or list by its kind alone."""
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list | tuple):
        return "a list"
    return str(value).lower() if isinstance(value, bool) else repr(value)
