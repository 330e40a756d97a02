"""What stands in tables, for whoever holds them ALONE: figures of private records, and what they do to a run.

Nothing here is noisy and nothing is covered by a guarantee: it is as private as the tables. It repeats no value of a
cell: an id that is written in two ways is counted, not shown. A report over the tables of one silo sees that silo
alone; the same person under another id elsewhere is for the silos to settle before a run.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
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
from fedveil.data.raw_table import WholeTable, read_whole
from fedveil.data.schema import Schema


@dataclass(frozen=True, kw_only=True)
class SiloFacts:
    """Records and people of one silo."""

    name: str
    records: int
    people: int


@dataclass(frozen=True, kw_only=True)
class DataReport:
    """What stands in tables. See the module's text for whom it is.

    Attributes:
        records: how many.
        people: different ids, as they are written.
        n_users: the declared public number of people.
        in_several_silos: people who have records in more than one.
        silos: those that are declared, have a file of their own or have records; some may have none.
        columns: features and target, in the schema's order.
        classes: records of each declared class; empty without a label.
        findings: what to know before a run, what bears on the guarantee first.
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
        """Return the report for machines; a share of no records is null."""
        document = asdict(self)
        for column in document["columns"]:
            column |= {
                key: None for key, value in column.items() if isinstance(value, float) and math.isnan(value)
            }
        return document


def data_report(schema: Schema, files: Sequence[Path]) -> DataReport:
    """Look through tables that a run would read.

    Args:
        schema: what their columns are.
        files: as for a run; without a silo column each is a silo, named by the file's stem.

    Raises:
        ConfigError: two files that would be one silo.
        DataError: a file that cannot be read or lacks a column. No cell is an error.
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


def _silos(tables: WholeTable, files: Sequence[Path]) -> Iterator[SiloFacts]:
    schema = tables.schema
    known = {*(schema.silos or ()), *(path.stem for path in files if schema.silo is None)}
    records = Counter(where for where in tables.silo if where is not None)
    people = Counter(where for silos in _silos_of_people(tables).values() for where in silos)
    for name in sorted(known | records.keys()):
        yield SiloFacts(name=name, records=records[name], people=people[name])
