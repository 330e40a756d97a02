"""Data of one party of a federation: a silo's own records, or the coordinator's public test table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np

from fedveil.data.columns import ColumnTable, read_own_columns
from fedveil.data.main_silos import MainSilos, read_main_silos, read_salted
from fedveil.data.records import Population, Records
from fedveil.data.schema import FileFormat, Label, Schema, Survival
from fedveil.data.tables import TASKS, hold_out, read_own, read_test
from fedveil.errors import DataError
from fedveil.federation.membership import Membership
from fedveil.run.config.release_document import DeclaredTables


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class LocalPopulation(Population):
    """Population in which this process has the records of one party only.

    All other facts (|U|, the silos' names, task, classes) describe the whole federation.

    Attributes:
        table: source of the records, for readers other than training; None if the records have no table.
    """

    complete: ClassVar[bool] = False

    table: PartyTable | None = None

    @property
    def declared(self) -> DeclaredTables | None:
        """Declared facts of all parties' tables; None if the records have no table."""
        return None if self.table is None else self.table.declared


@dataclass(frozen=True, kw_only=True)
class PartyTable:
    """Table of one party: the declared facts of all tables, and the party's own file.

    Attributes:
        declared: declared facts of all tables.
        silo: number of the silo; None: the coordinator, which has no records.
        path: the silo's own file, or the coordinator's public test table; None: no file.
        file_format: format of the silo's own file; None: the schema's. It decides only how cells are read: neither the
            agreed schema nor any message depends on it.
        users: ids of all users, in the order of their numbers; None: ids are numbers from 0.
        main_silos: main silo of every user; None if the silo has no file of them.
    """

    declared: DeclaredTables
    silo: int | None = None
    path: Path | None = None
    file_format: FileFormat | None = None
    users: tuple[str, ...] | None = None
    main_silos: MainSilos | None = None

    def with_refined_schema(self, schema: Schema, clip: float | None) -> PartyTable:
        """Return the table under a refined schema and clip, both computed from releases."""
        return replace(self, declared=self.declared.with_refined_schema(schema, clip))

    def columns(self, names: Sequence[str], schema: Schema | None = None) -> ColumnTable:
        """Read columns of the silo's own records.

        Args:
            names: names of the columns.
            schema: schema of the columns; None: the declared one.

        Raises:
            DataError: a file cannot be read, or lacks a column.
        """
        silos = self.declared.silos
        assert self.silo is not None, "the coordinator has no records"
        assert self.path is not None
        schema = (schema or self.declared.schema).with_file_format(self.path, self.file_format)
        return read_own_columns(schema, self.path, names, silo=self.silo, silo_names=silos, users=self.users)

    def load_population(self, holdout: HoldoutSpec | None = None) -> LocalPopulation:
        """Load the party's population: a silo's records, or the coordinator's public test table, if any.

        The coordinator evaluates models on its table. The shape of a model follows from the schema alone.

        Args:
            holdout: which of a silo's records are held out; None: none.

        Raises:
            DataError: a table does not fit the schema; names file, record and column.
        """
        schema, silos = self.declared.schema, self.declared.silos
        if self.silo is None:
            features, targets = _nothing(schema) if self.path is None else read_test(schema, self.path)
            zeros = np.zeros(len(features), dtype=np.int32)
            records = Records(features=features, targets=targets, silo=zeros, user=zeros)
            return self._of(records, features, targets, None)
        assert self.path is not None
        name = silos[self.silo]
        local = schema.with_file_format(self.path, self.file_format)
        records, rows = read_own(local, self.path, silo=self.silo, name=name, users=self.users)
        # A population needs a test set: without held-out records, the first training record stands in.
        if holdout is None:
            return self._of(records, records.features[:1], records.targets[:1], None)
        return self._of(*hold_out(records, rows, holdout.share, holdout.seed))

    def _of(
        self, records: Records, features: np.ndarray, targets: np.ndarray, rows: np.ndarray | None
    ) -> LocalPopulation:
        schema = self.declared.schema
        return LocalPopulation(
            name="federation",
            train=records,
            test_features=features,
            test_targets=targets,
            test_rows=rows,
            public_test=self.silo is None and self.path is not None,
            n_users=schema.n_users,
            schema=schema,
            target_range=schema.target_range,
            target_names=schema.target_names,
            silo_names=self.declared.silos,
            main_silos=self.main_silos,
            table=self,
            task=TASKS[schema.target.kind],
            n_classes=len(schema.target.classes) if isinstance(schema.target, Label) else None,
            notes=(
                "Features are scaled and encoded from declared bounds and categories: nothing is fitted on records.",
                *schema.matching,
            ),
        )


@dataclass(frozen=True)
class HoldoutSpec:
    """Selection of the records held out for testing.

    Attributes:
        share: probability of each record.
        seed: seed of the selection.
    """

    share: float
    seed: int


def _nothing(schema: Schema) -> tuple[np.ndarray, np.ndarray]:
    """Return empty features and targets in the shapes of a schema."""
    features = np.zeros((0, schema.width), dtype=np.float32)
    if isinstance(schema.target, Label):
        return features, np.zeros(0, dtype=np.int64)
    width = len(schema.target_columns if isinstance(schema.target, Survival) else schema.target_names)
    return features, np.zeros((0, width) if width else 0, dtype=np.float32)


@dataclass(frozen=True)
class SiloFiles:
    """Files of a silo.

    Attributes:
        table: the silo's own table.
        users: list of all users' ids, if the schema names one; else None. Known to the silos only.
        main_silos: file of all users' main silos; None: no run needs it.
        file_format: format of the table; None: the schema's.
    """

    table: Path
    users: Path | None = None
    main_silos: Path | None = None
    file_format: FileFormat | None = None


def load_silo_population(
    schema: Schema, files: SiloFiles, membership: Membership, silo: int
) -> LocalPopulation:
    """Read a silo's table, user list and main silos.

    Args:
        schema: the public schema.
        files: the silo's files.
        membership: the federation.
        silo: number of the silo.

    Raises:
        DataError: a table does not fit the schema (names file, record and column), or the list of users is not the
            one that the schema names.

    Guarantees:
        Silos with the same schema, which the founder's signature covers, have the same list byte for byte, or none.
        So an id has one number in all silos, and no person counts as two users.
    """
    listed = _listed(schema, files.users)
    declared = DeclaredTables(schema=schema, silos=membership.silos)
    main_silos = None
    if files.main_silos is not None:
        ids = tuple(map(str, range(schema.n_users))) if listed is None else listed
        main_silos = read_main_silos(files.main_silos, ids, membership.silos)
    party = PartyTable(
        declared=declared,
        silo=silo,
        path=files.table,
        file_format=files.file_format,
        users=listed,
        main_silos=main_silos,
    )
    return party.load_population()


def _listed(schema: Schema, path: Path | None) -> tuple[str, ...] | None:
    """Return all users' ids, in the order of their numbers; None if ids are numbers."""
    if path is None and schema.users is not None:
        raise DataError(
            f"silo.toml: the schema names a list of users (sha256 {schema.users}); name that file (users)"
        )
    if path is None:
        return None
    user_list = read_salted(path)
    if user_list.digest != schema.users:
        raise DataError(
            f"{path}: a list of users with the sha256 {user_list.digest}, and the schema names "
            + ("none: ids are numbers from 0 then" if schema.users is None else f"that with {schema.users}")
        )
    return user_list.lines


def load_public_test_table(schema: Schema, test: Path | None, membership: Membership) -> PartyTable:
    """Return the coordinator's table: a public test table, never used for training, or none."""
    return PartyTable(declared=DeclaredTables(schema=schema, silos=membership.silos), path=test)
