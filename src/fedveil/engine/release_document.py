"""The document of a statistical release: which tables, what is asked of them, and under which guarantee."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import tomlkit
from pydantic import Field, ValidationError, model_validator

from fedveil.engine.choice import Choice, Chosen, flat
from fedveil.engine.experiment import read_toml
from fedveil.engine.sections import DataSection, PrivacySection, Section
from fedveil.errors import ConfigError
from fedveil.statistics.request import (
    ColumnRelease,
    CorrelationRelease,
    CrossRelease,
    Request,
    SurvivalRelease,
)
from fedveil.validation import plain

DOCUMENT = "statistics.toml"
"""Its name in a run folder."""


class ReleaseDocument(Section):
    """One release, complete. `[data]`, `[privacy]` and `[protection]` are those of an experiment."""

    schema_version: Literal[1] = 1
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$", max_length=100)]
    data: DataSection
    privacy: PrivacySection
    protection: Annotated[Choice, Chosen("protections")] = Choice("protections", "none")
    statistics: Request

    @model_validator(mode="after")
    def _one_release(self) -> ReleaseDocument:
        if self.data.table is None:
            raise ValueError(
                "data.table: statistics are of your own tables, whose schema declares bounds and categories"
            )
        if self.privacy.epsilon is None:
            raise ValueError("privacy.epsilon: needed; it is what the release may spend")
        if self.privacy.budget is not None:
            raise ValueError("privacy.budget: belongs to training; a release spends privacy.epsilon at once")
        if self.protection.get("dropout_rate"):
            raise ValueError("protection.dropout_rate: belongs to the simulation of training")
        return self

    def to_toml(self) -> str:
        """Return the complete document."""
        return tomlkit.dumps(self.model_dump(mode="json", exclude_none=True))


def read_release_document(path: Path) -> ReleaseDocument:
    """Read a document; the paths of its tables are taken relative to it.

    Raises:
        ConfigError: unreadable, or a key that is wrong, by its path.
    """
    document = read_toml(path)
    try:
        found = ReleaseDocument.model_validate(document)
    except ValidationError as error:
        problems = dict.fromkeys(_told(*found) for found in flat(error.errors(include_url=False)))
        raise ConfigError(f"{path}: {'; '.join(problems)}") from None
    table = found.data.table
    assert table is not None
    data = found.data.model_copy(update={"table": table.anchored(path.parent.absolute())})
    return found.model_copy(update={"data": data})


def _told(path: tuple[int | str, ...], problem: Any, known: list[str] | None) -> str:
    """Return a key's path and what is wrong there."""
    place = [str(part) for part in path]
    if place[:2] == ["statistics", "release"] and len(place) > 3:
        del place[3]  # where pydantic puts the kind
    message = plain(problem, _keys(path) if known is None else known)
    return f"{'.'.join(place)}: {message}" if place else message


def _keys(place: tuple[int | str, ...]) -> tuple[str, ...]:
    """Return the keys of the table in which a problem lies."""
    table: Any = ReleaseDocument
    if place[:2] == ("statistics", "release") and len(place) > 3:
        table = _KINDS.get(str(place[3]), ReleaseDocument)
    elif len(place) > 1:
        field = ReleaseDocument.model_fields.get(str(place[0]))
        table = field.annotation if field is not None else ReleaseDocument
    return tuple(table.model_fields)


_KINDS = {
    "column": ColumnRelease,
    "survival": SurvivalRelease,
    "cross": CrossRelease,
    "correlation": CorrelationRelease,
}
