"""Report about tables for their owner ONLY: exact figures of private records.

Not claimed: privacy. The figures carry no noise, no guarantee covers them, and they are as private as the tables. The
report repeats no value of a cell: an id that is written in two ways is counted, not shown. A report over the tables
of one silo covers that silo only. The silos must check before a run that no person has different ids at two silos.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fedveil.data.data_findings import (
    Bears,
    ColumnFacts,
    DataFinding,
    classes_of,
    column_findings,
    facts_of,
    record_findings,
    target_findings,
    user_findings,
)
from fedveil.data.memory_tables import TableFile
from fedveil.data.raw_table import WholeTable, read_whole
from fedveil.data.schema import Schema


@dataclass(frozen=True, kw_only=True)
class SiloFacts:
    """Number of records and people of one silo."""

    name: str
    records: int
    people: int


@dataclass(frozen=True, kw_only=True)
class DataReport:
    """Exact figures and findings of tables, for the owner of the tables only.

    Attributes:
        records: number of records.
        people: number of distinct ids, as they are written.
        n_users: the declared public number of people.
        in_several_silos: number of people with records in more than one silo.
        silos: silos that are declared, have a file, or have records; some may have no record.
        columns: statistics of features and target, in the order of the schema.
        classes: number of records of each declared class; empty without a label.
        findings: facts to know before a run; those about the guarantee come first.
    """

    records: int
    people: int
    n_users: int
    in_several_silos: int
    silos: tuple[SiloFacts, ...]
    columns: tuple[ColumnFacts, ...]
    classes: dict[str, int]
    findings: tuple[DataFinding, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values; NaN becomes null."""
        document = asdict(self)
        for column in document["columns"]:
            column |= {
                key: None for key, value in column.items() if isinstance(value, float) and math.isnan(value)
            }
        return document


def data_report(schema: Schema, files: Sequence[TableFile]) -> DataReport:
    """Report on tables that a run would read, without refusing a cell.

    Args:
        schema: declaration of the columns.
        files: the tables; without a silo column, each file is a silo, named by the file's stem.

    Raises:
        ConfigError: two files would be one silo.
        DataError: a file cannot be read or lacks a column.
    """
    tables = read_whole(schema, files)
    facts = tuple(facts_of(schema, name, column) for name, column in tables.columns.items())
    people = {who for who in tables.user if who is not None}
    order: dict[Bears, int] = {"guarantee": 0, "run": 1, "model": 2}
    findings = [
        *user_findings(tables, people),
        *record_findings(tables),
        *column_findings(tables, facts),
        *target_findings(tables),
    ]
    return DataReport(
        records=len(tables),
        people=len(people),
        n_users=schema.n_users,
        in_several_silos=sum(len(where) > 1 for where in _silos_of_people(tables).values()),
        silos=tuple(_silos(tables, files)),
        columns=facts,
        classes=classes_of(tables),
        findings=tuple(sorted(findings, key=lambda one: order[one.bears_on])),
    )


def _silos_of_people(tables: WholeTable) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for who, where in zip(tables.user, tables.silo, strict=True):
        if who is not None and where is not None:
            found.setdefault(who, set()).add(where)
    return found


def _silos(tables: WholeTable, files: Sequence[TableFile]) -> Iterator[SiloFacts]:
    schema = tables.schema
    known = {*(schema.silos or ()), *(path.stem for path in files if schema.silo is None)}
    records = Counter(where for where in tables.silo if where is not None)
    people = Counter(where for silos in _silos_of_people(tables).values() for where in silos)
    for name in sorted(known | records.keys()):
        yield SiloFacts(name=name, records=records[name], people=people[name])
