"""Every document tells what is wrong with it in one way: by the paths in it, with the keys of the right table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, with_config

from fedveil.validation import explain_errors


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Number(Strict):
    kind: Literal["number"] = "number"
    lower: float


class Words(Strict):
    kind: Literal["words", "text"] = "words"
    most: Annotated[int, Field(ge=1)] | Literal["all"] | None = None


@with_config(extra="forbid")
@dataclass(frozen=True)
class Line:
    round: int
    note: str | None = None


class Document(Strict):
    columns: dict[str, Annotated[Number | Words, Field(discriminator="kind")]]
    lines: tuple[Line, ...] = ()
    first: Line | None = None
    bins: Annotated[int, Field(ge=2)] | str = 2
    levels: Annotated[tuple[Annotated[float, Field(lt=1)], ...], Field(min_length=1)] = (0.5,)


GOOD: dict[str, Any] = {"columns": {"age": {"kind": "number", "lower": 0}}}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"colums": {}},
            "colums: no such key; known here: bins, columns, first, levels, lines; did you mean 'columns'?",
        ),
        (
            {"colums": {}, "level": 1, "first": {"round": 1, "nte": "", "by": ""}},
            "first.nte: no such key; known here: note, round; did you mean 'note'?; first.by: no such key; "
            "colums: no such key; known here: bins, columns, first, levels, lines; did you mean 'columns'?; "
            "level: no such key; did you mean 'levels'?",
        ),
        ({"columns": {"age": {"kind": "number"}}}, "columns.age.lower: is required"),
        (
            {"columns": {"age": {"kind": "number", "lower": 0, "low": 1}}},
            "columns.age.low: no such key; known here: kind, lower; did you mean 'lower'?",
        ),
        (
            {"columns": {"ward": {"kind": "text", "most": "some"}}},
            "columns.ward.most: must be a whole number, not 'some'; columns.ward.most: must be 'all', not 'some'",
        ),
        (
            {"lines": [{"round": 1}, {"round": "two", "why": ""}]},
            "lines.1.round: must be a whole number, not 'two'; lines.1.why: no such key; known here: note, round",
        ),
        ({"first": {"note": 3}}, "first.round: is required; first.note: must be text, not 3"),
        (
            {"columns": {"a": {"kind": "date"}}},
            "columns.a.kind: must be one of 'number', 'words', 'text', not 'date'",
        ),
        ({"columns": {"a": {}}}, "columns.a.kind: is required"),
        (
            {"columns": {"a": {"knd": "number", "lower": 0}}},
            "columns.a.kind: is required; columns.a.knd: no such key; known here: kind, lower, most; "
            "did you mean 'kind'?",
        ),
        ({"first": 3}, "first: must be a table, not 3"),
        ({"bins": 1}, "bins: must be >= 2, not 1"),
        ({"levels": [2]}, "levels.0: must be < 1, not 2"),
        ({"levels": []}, "levels: needs 1 or more entries, not 0"),
    ],
)
def test_a_problem_is_told_by_its_path_and_the_keys_that_are_known_there(
    changes: dict[str, Any], told: str
) -> None:
    Document.model_validate(GOOD)
    with pytest.raises(ValidationError) as found:
        Document.model_validate(GOOD | changes)
    assert explain_errors(found.value, Document) == told


def test_of_many_problems_the_first_are_told() -> None:
    """A hostile file with a million wrong entries was answered by a million sentences."""
    with pytest.raises(ValidationError) as wrong:
        Document.model_validate({"columns": {}, "levels": ["x"] * 1000})
    told = explain_errors(wrong.value, Document)
    assert told.startswith("levels.0: must be a number")
    assert (told.count("; "), told.endswith("; and more like these")) == (40, True)


def test_a_dataclass_is_a_document_too() -> None:
    with pytest.raises(ValidationError) as found:
        TypeAdapter(Line).validate_python({"round": 1, "sum": 2})
    assert explain_errors(found.value, Line) == "sum: no such key; known here: note, round"
