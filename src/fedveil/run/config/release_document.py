"""Documents of releases from tables (the tables, the request, the guarantee), and the declared facts about tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar

import tomlkit
from pydantic import Field, model_validator

from fedveil.data.schema import Schema, read_schema
from fedveil.errors import ConfigError
from fedveil.files import read_toml
from fedveil.methods.guarantee import PublicFacts
from fedveil.run.config.choice import Choice, ChoiceField
from fedveil.run.config.experiment import DataSection, PrivacySection, Section, TableSection
from fedveil.run.config.recommended import has_capability, subtable
from fedveil.statistics.inference.request import Inference
from fedveil.statistics.request import Request
from fedveil.validation import validate_document

# --- declared facts about tables ---


@dataclass(frozen=True, kw_only=True)
class DeclaredTables:
    """Declared facts about tables.

    Attributes:
        schema: description of the columns.
        silos: names of all silos, by number.
        before: the declared schema, if a release refined it to ``schema``; None: ``schema`` is the declared one.
        clip: the bound of an update that a release found; None: as declared.
    """

    schema: Schema
    silos: tuple[str, ...]
    before: Schema | None = None
    clip: float | None = None

    @property
    def first(self) -> Schema:
        """The schema as declared."""
        return self.schema if self.before is None else self.before

    def with_refined_schema(self, schema: Schema, clip: float | None) -> DeclaredTables:
        """Return the facts with a schema and a clip that follow from releases."""
        return replace(self, schema=schema, before=self.first, clip=clip)

    def facts(self, dimension: int) -> PublicFacts:
        """Return the public facts of a release of ``dimension`` numbers."""
        return PublicFacts(n_silos=len(self.silos), n_users=self.schema.n_users, dimension=dimension)


def declared_tables(table: TableSection) -> DeclaredTables:
    """Return the declared facts about a document's tables, without reading a record.

    Raises:
        ConfigError: an unreadable schema, or silos that only the records name.
    """
    schema = read_schema(table.schema_file)
    if schema.silos is not None:
        return DeclaredTables(schema=schema, silos=schema.silos)
    if schema.silo is not None:
        raise ConfigError(
            "schema: the silos are those that occur in a column, "
            "and the set that occurs depends on the records; declare silos, all of them: silos = ['north', 'south']"
        )
    return DeclaredTables(schema=schema, silos=tuple(sorted({path.stem for path in table.files})))


STATISTICS: Final = "statistics.toml"
INFERENCE: Final = "inference.toml"
"""File names of the documents in run folders."""


class TableDocument(Section):
    """Releases from your own tables.

    `[data]`, `[privacy]` and `[protection]` are those of an experiment.

    Attributes:
        table: name of the TOML table that only this kind of document has.
        file: file name of the document in run folders.
        command: fedveil command that makes the releases.
    """

    table: ClassVar[str]
    file: ClassVar[str]
    command: ClassVar[str]

    schema_version: Literal[1] = 1
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$", max_length=100)]
    data: DataSection
    privacy: PrivacySection
    protection: Annotated[Choice, ChoiceField("protections")] = Choice("protections", "none")

    @model_validator(mode="after")
    def _one_release(self) -> TableDocument:
        """Check that the document has tables and an epsilon, and no keys of training."""
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
        """Return the complete document as TOML."""
        return tomlkit.dumps(self.model_dump(mode="json", exclude_none=True))


class ReleaseDocument(TableDocument):
    """One complete release of statistics."""

    table: ClassVar[str] = "statistics"
    file: ClassVar[str] = STATISTICS
    command: ClassVar[str] = "stats"

    statistics: Request


class InferenceDocument(TableDocument):
    """One complete regression."""

    table: ClassVar[str] = "inference"
    file: ClassVar[str] = INFERENCE
    command: ClassVar[str] = "infer"

    inference: Inference

    @model_validator(mode="before")
    @classmethod
    def _with_weights(cls, document: Any) -> Any:
        """Weigh a person alike in all silos, unless the document says otherwise or the protection hides counts."""
        table = document.get("inference") if isinstance(document, Mapping) else None
        if not isinstance(table, Mapping) or "silos" in table:
            return document
        weighs = has_capability(str(subtable(document, "protection").get("name", "")), "weighs")
        return {**document, "inference": {"silos": "records" if weighs else "uniform", **table}}


KINDS: Final[tuple[type[TableDocument], ...]] = (ReleaseDocument, InferenceDocument)


def kind_in(document: Mapping[str, Any]) -> type[TableDocument] | None:
    """Return the kind of a document of releases; None for an experiment."""
    return next((kind for kind in KINDS if kind.table in document), None)


_Document = TypeVar("_Document", bound=TableDocument)


def read_releases(path: Path, kind: type[_Document]) -> _Document:
    """Read a document of a kind; paths of its tables are relative to the document.

    Raises:
        ConfigError: the file is unreadable, of another kind, or has a wrong key, which the message names by its
            path.
    """
    document = read_toml(path)
    if kind.table not in document:
        other = kind_in(document)
        does = "run" if other is None and "method" in document else other and other.command
        instead = f"; `fedveil {does} {path}` reads it" if does else ""
        raise ConfigError(
            f"{path}: has no table [{kind.table}], which `fedveil {kind.command}` needs{instead}"
        )
    parsed = validate_document(kind, document, path)
    table = parsed.data.table
    assert table is not None
    data = parsed.data.model_copy(update={"table": table.resolve_paths(path.parent.absolute())})
    return parsed.model_copy(update={"data": data})
