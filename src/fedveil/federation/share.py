"""What one party of a federation holds of its data: a silo its own records, the coordinator a public test table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from fedveil.engine.declared import Declared
from fedveil.engine.sections import DataSection
from fedveil.engine.setup import Populations
from fedveil.errors import DataError
from fedveil.federation.membership import Membership
from fedveil.files import LARGEST_FILE, read_text
from fedveil.population.columns import ColumnTable, read_own_columns
from fedveil.population.records import Population, Records
from fedveil.population.schema import Label, Schema
from fedveil.population.tables import TASKS, read_own, read_test


@dataclass(frozen=True, kw_only=True, eq=False)
class Share(Population):
    """A population of which this process has the records of one party alone.

    All else (|U|, the silos' names, task, classes) is that of the whole federation.

    Attributes:
        table: where its records come from, for what reads them otherwise than training does; None: from nowhere.
    """

    complete: ClassVar[bool] = False

    table: OwnTable | None = None


@dataclass(frozen=True, kw_only=True)
class OwnTable:
    """The table of one party: what is declared of all, and the party's own file.

    Attributes:
        schema: the public one.
        silos: names of all silos.
        silo: the silo's number; None: the coordinator, which has no records.
        path: the silo's own file.
        users: all users' ids, in the order of their numbers; None: ids are numbers from 0.
    """

    schema: Schema
    silos: tuple[str, ...]
    silo: int | None = None
    path: Path | None = None
    users: tuple[str, ...] | None = None

    @property
    def declared(self) -> Declared:
        """What is declared of all tables."""
        return Declared(schema=self.schema, silos=self.silos)

    def columns(self, schema: Schema, wanted: Sequence[str]) -> ColumnTable:
        """Return columns of the silo's own records.

        Raises:
            DataError: a file that cannot be read or lacks a column.
        """
        assert self.silo is not None, "the coordinator has no records"
        assert self.path is not None
        return read_own_columns(
            schema, self.path, wanted, silo=self.silo, silo_names=self.silos, users=self.users
        )


def silo_share(schema: Schema, table: Path, membership: Membership, silo: int, users: Path | None) -> Share:
    """Read what a silo holds.

    Args:
        schema: the public schema.
        table: the silo's own file.
        membership: the federation.
        silo: the silo's number.
        users: a file of all users' ids, one a line; None: ids are numbers from 0. Known to the silos alone.

    Raises:
        DataError: a table that does not fit the schema; named by file, record and column.
    """
    listed = None if users is None else tuple(read_text(users, DataError, largest=LARGEST_FILE).splitlines())
    own = OwnTable(schema=schema, silos=membership.silos, silo=silo, path=table, users=listed)
    records = read_own(schema, table, silo=silo, name=membership.silos[silo], users=listed)
    return _share(own, records, records.features[:1], records.targets[:1])


def public_share(schema: Schema, test: Path, membership: Membership) -> Share:
    """Read what the coordinator holds: the public test table, which is never trained on.

    The engine evaluates models on it, and derives from its shape what a model looks like.
    """
    features, targets = read_test(schema, test)
    nobody = np.zeros(len(features), dtype=np.int32)
    records = Records(features=features, targets=targets, silo=nobody, user=nobody)
    own = OwnTable(schema=schema, silos=membership.silos)
    return _share(own, records, features, targets)


def _share(
    own: OwnTable,
    records: Records,
    features: np.ndarray,
    targets: np.ndarray,
) -> Share:
    schema = own.schema
    return Share(
        name="federation",
        train=records,
        test_features=features,
        test_targets=targets,
        n_users=schema.n_users,
        silo_names=own.silos,
        table=own,
        task=TASKS[schema.target.kind],
        n_classes=len(schema.target.classes) if isinstance(schema.target, Label) else None,
        notes=(
            "Features are scaled and encoded from declared bounds and categories: nothing is fitted on records.",
        ),
    )


class FixedPopulation(Populations):
    """The one population that a party has, whatever an experiment's data section says: no path of it is read.

    Args:
        share: what the party holds.
    """

    def __init__(self, share: Population) -> None:
        super().__init__()
        self._share = share

    def of(self, data: DataSection, seed: int) -> Population:
        """Return the party's share."""
        return self._share
