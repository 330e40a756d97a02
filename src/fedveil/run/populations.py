"""Supply the population of an experiment: loaded once per study, or fixed by a party."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fedveil.data.allocation import Allocation
from fedveil.data.catalogue import load
from fedveil.data.records import Population
from fedveil.data.schema import read_schema
from fedveil.data.tables import read_source, read_tables
from fedveil.errors import RunFolderError
from fedveil.files import read_content
from fedveil.run.config.experiment import DataSection, refuse_session
from fedveil.run.config.release_document import DeclaredTables, declared_tables
from fedveil.run.executors import Machines
from fedveil.run.releases.preprocessing import read_preprocessed


class PopulationCache:
    """Populations of the experiments of one study; each is loaded once and shared.

    Attributes:
        machines: where the population is trained on. Sentences of a statement about machines must be the same on
            all.
    """

    machines: Machines = "this"

    def __init__(self) -> None:
        self._loaded: dict[tuple[DataSection, int], Population] = {}

    def load(self, data: DataSection, seed: int) -> Population:
        """Return the population of a data section.

        Args:
            data: names the records and their allocation.
            seed: the experiment's seed, used if the section has none.
        """
        key = (data, seed if data.seed is None else data.seed)
        if key not in self._loaded:
            self._loaded[key] = load_population(data, seed)
        return self._loaded[key]

    def declared_tables(self, data: DataSection) -> DeclaredTables:
        """Return the declared facts about tables; no table is opened.

        A preprocessing that was released into the schema's folder has refined them.
        """
        assert data.table is not None
        declared, before = declared_tables(data.table), read_preprocessed(data.table.schema_file.parent)
        return (
            declared if before is None else replace(declared, before=before.request.schema_, clip=before.clip)
        )


class FixedPopulation(PopulationCache):
    """The one population of a party; paths in an experiment's data section are ignored.

    Args:
        population: the records of the party.
        machines: where the run trains; a program that holds all records trains them on this machine.
        declared: declared facts about the tables of the population; None: read them from the data section's files.
    """

    def __init__(
        self, population: Population, machines: Machines = "several", declared: DeclaredTables | None = None
    ) -> None:
        super().__init__()
        self._population, self.machines, self._declared = population, machines, declared

    def load(self, data: DataSection, seed: int) -> Population:
        return with_schema_file(self._population, data)

    def declared_tables(self, data: DataSection) -> DeclaredTables:
        return super().declared_tables(data) if self._declared is None else self._declared


def with_schema_file(people: Population, data: DataSection) -> Population:
    """Return a population read from tables under the schema that a data section names, if it names another.

    A run with [preprocessing] names the schema that its releases refined.
    """
    source, table = people.source, data.table
    if source is None or table is None or table.schema_file == source.schema_file:
        return people
    refined = read_content(table.schema_file, RunFolderError)
    return read_source(replace(source, schema_file=table.schema_file, schema=refined))


def on_refined_schema(folder: Path, data: DataSection, people: Population) -> Population:
    """Return a population under the schema that the releases of a run's folder refined, if there are such.

    Raises:
        RunFolderError: the run began with another schema.
    """
    released = read_preprocessed(folder)
    if released is None or people.source is None:
        return people
    if released.request.schema_ != people.schema:
        raise RunFolderError(f"{folder}: the run began with another schema; hand over the same tables")
    return with_schema_file(people, data)


def load_population(data: DataSection, seed: int) -> Population:
    """Load the records of a data section: the user's tables, or a catalogue data set.

    Raises:
        FedveilError: the files are missing or do not fit their schema.
    """
    if data.table is not None:
        return read_tables(
            read_schema(data.table.schema_file),
            data.table.files,
            test=data.table.test_file,
            test_share=data.table.test_share,
            seed=seed if data.seed is None else data.seed,
        )
    assert data.name is not None
    assert data.n_users is not None
    refuse_session("data.name", data.name)
    return load(
        data.name,
        allocation=data.allocation or Allocation(),
        n_users=data.n_users,
        n_silos=data.n_silos,
        seed=seed if data.seed is None else data.seed,
        folder=data.folder,
    )
