"""Read the declared facts about tables, before any table is opened: schema and silo names."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fedveil.data.schema import Schema, read_schema
from fedveil.errors import ConfigError
from fedveil.methods.guarantee import PublicFacts
from fedveil.run.config.experiment import TableSection


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
            "schema: the silos are those that occur in a column, and which occur is for records to tell; declare "
            "silos, all of them: silos = ['north', 'south']"
        )
    return DeclaredTables(schema=schema, silos=tuple(sorted({path.stem for path in table.files})))
