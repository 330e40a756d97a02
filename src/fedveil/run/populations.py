"""What an experiment is trained on: populations that are loaded once, or the one that a party has."""

from __future__ import annotations

from dataclasses import replace

from fedveil.data.allocation import Allocation
from fedveil.data.catalogue import load
from fedveil.data.records import Population
from fedveil.data.schema import read_schema
from fedveil.data.tables import read_tables
from fedveil.run.config.declared_tables import DeclaredTables, declared_tables
from fedveil.run.config.experiment import DataSection, refuse_session
from fedveil.run.placement import Machines
from fedveil.run.releases.preprocessing import read_preprocessed


class PopulationCache:
    """The populations of the experiments of one study: each is loaded once, however many train on it.

    Attributes:
        machines: where they are trained on; what a statement says of machines must be the same on all of them.
    """

    machines: Machines = "this"

    def __init__(self) -> None:
        self._loaded: dict[tuple[DataSection, int], Population] = {}

    def load(self, data: DataSection, seed: int) -> Population:
        """Return the population of a data section; ``seed`` is the experiment's, used where the section has none."""
        key = (data, seed if data.seed is None else data.seed)
        if key not in self._loaded:
            self._loaded[key] = load_population(data, seed)
        return self._loaded[key]

    def declared_tables(self, data: DataSection) -> DeclaredTables:
        """Return what is declared of tables; none is opened."""
        assert data.table is not None
        found, before = declared_tables(data.table), read_preprocessed(data.table.schema_file.parent)
        return found if before is None else replace(found, before=before.wanted.schema_, clip=before.clip)


class FixedPopulation(PopulationCache):
    """The one population that a party has, whatever an experiment's data section says: no path of it is read.

    Args:
        population: what the party holds.
        machines: where the run trains; a program that holds all records trains them on this one.
        of: what is declared of the tables that it comes from; None: what the data section's files say.
    """

    def __init__(
        self, population: Population, machines: Machines = "several", of: DeclaredTables | None = None
    ) -> None:
        super().__init__()
        self._population, self.machines, self._declared = population, machines, of

    def load(self, data: DataSection, seed: int) -> Population:
        return self._population

    def declared_tables(self, data: DataSection) -> DeclaredTables:
        return super().declared_tables(data) if self._declared is None else self._declared


def load_population(data: DataSection, seed: int) -> Population:
    """Load the records an experiment trains on."""
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
