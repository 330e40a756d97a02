"""What is declared of tables, before anybody opens one: the schema and the names of all silos."""

from __future__ import annotations

from dataclasses import dataclass

from fedveil.engine.sections import TableSection
from fedveil.errors import ConfigError
from fedveil.population.schema import Schema, read_schema


@dataclass(frozen=True, kw_only=True)
class Declared:
    """What is declared of tables.

    Attributes:
        schema: what the columns are.
        silos: names of all silos, by their numbers.
    """

    schema: Schema
    silos: tuple[str, ...]


def declared(table: TableSection) -> Declared:
    """Return what a document declares of its tables, without a look at a record.

    Raises:
        ConfigError: an unreadable schema, or silos that are told by records alone.
    """
    schema = read_schema(table.schema_file)
    if schema.silos is not None:
        return Declared(schema=schema, silos=schema.silos)
    if schema.silo is not None:
        raise ConfigError(
            "schema: the silos are those that occur in a column, and which occur is for records to tell; declare silos"
        )
    return Declared(schema=schema, silos=tuple(sorted({path.stem for path in table.files})))
