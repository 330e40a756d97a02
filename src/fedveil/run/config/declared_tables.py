"""What is declared of tables, before anybody opens one: the schema and the names of all silos."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fedveil.data.schema import Schema, read_schema
from fedveil.errors import ConfigError
from fedveil.methods.guarantee import PublicFacts
from fedveil.run.config.experiment import TableSection


@dataclass(frozen=True, kw_only=True)
class DeclaredTables:
    """What is declared of tables.

    Attributes:
        schema: what the columns are.
        silos: names of all silos, by their numbers.
        before: the schema that a release has refined to this one; None: it is as it was declared.
        clip: the bound of an update that a release has found; None: it is as it was declared.
    """

    schema: Schema
    silos: tuple[str, ...]
    before: Schema | None = None
    clip: float | None = None

    @property
    def first(self) -> Schema:
        """The schema as it was declared."""
        return self.schema if self.before is None else self.before

    def with_refined_schema(self, schema: Schema, clip: float | None) -> DeclaredTables:
        """Return it with a schema, and a clip, that follow from releases."""
        return replace(self, schema=schema, before=self.first, clip=clip)

    def facts(self, dimension: int) -> PublicFacts:
        """Return the public facts of a release of so many numbers."""
        return PublicFacts(n_silos=len(self.silos), n_users=self.schema.n_users, dimension=dimension)


def declared_tables(table: TableSection) -> DeclaredTables:
    """Return what a document declares of its tables, without a look at a record.

    Raises:
        ConfigError: an unreadable schema, or silos that are told by records alone.
    """
    schema = read_schema(table.schema_file)
    if schema.silos is not None:
        return DeclaredTables(schema=schema, silos=schema.silos)
    if schema.silo is not None:
        raise ConfigError(
            "schema: the silos are those that occur in a column, and which occur is for records to tell; declare silos"
        )
    return DeclaredTables(schema=schema, silos=tuple(sorted({path.stem for path in table.files})))
