"""Entry of the catalogue (:class:`DataSet`), and request for its allocation (:class:`Request`)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from jaxtyping import Int64, UInt8

from fedveil.data.allocation import CLIENT_LAWS, Allocation, Column
from fedveil.data.catalogue.files import DataFile, Store
from fedveil.data.records import Affine, Population, Records
from fedveil.errors import ConfigError
from fedveil.randomness import ExperimentRandomness

Labelled: TypeAlias = tuple[UInt8[np.ndarray, "..."], Int64[np.ndarray, " _"]]
"""Records and their classes."""

DEFAULT_SILOS = 5
CENTRED = Affine(factor=2 / 255, shift=-1.0)
LOCAL_TEST_NOTE = (
    "Each silo with more than 500 records sets a stratified tenth of them aside, unused, as in the published "
    "experiments."
)


@dataclass(frozen=True, kw_only=True)
class Request:
    """Request for the allocation of a data set's records: law, |U|, |S| and seed.

    ``n_silos`` None means the silos of the data set. Without such silos it means |U| if every user is a silo, else
    five.
    """

    allocation: Allocation
    n_users: int
    n_silos: int | None
    seed: int

    @property
    def randomness(self) -> ExperimentRandomness:
        """Randomness of splits and allocation; it depends only on the seed."""
        return ExperimentRandomness(self.seed)

    def allocate(self, labels: Int64[np.ndarray, "n"]) -> tuple[Column, Column, tuple[str, ...]]:
        """Allocate records that have no silo yet; return the user column, the silo column and the silo names."""
        n_silos = self.n_silos
        if n_silos is None:
            n_silos = self.n_users if self.allocation.law in CLIENT_LAWS else DEFAULT_SILOS
        user, silo = self.allocation.allocate(
            labels, len(labels), n_users=self.n_users, n_silos=n_silos, randomness=self.randomness
        )
        kind = "client" if self.allocation.law in CLIENT_LAWS else "silo"
        return user, silo, tuple(f"{kind} {s}" for s in range(n_silos))

    def ten_classes(
        self,
        name: str,
        train: Labelled,
        test: Labelled,
        *,
        notes: tuple[str, ...],
        public_test: bool = True,
        scale: Affine = CENTRED,
    ) -> Population:
        """Return a population of images of ten classes, with the training images allocated to users and silos."""
        user, silo, silo_names = self.allocate(train[1])
        return Population(
            name=name,
            train=Records(features=train[0], targets=train[1], silo=silo, user=user),
            test_features=test[0],
            test_targets=test[1],
            public_test=public_test,
            n_users=self.n_users,
            silo_names=silo_names,
            task="classification",
            n_classes=10,
            scale=scale,
            notes=notes,
        )

    def allocate_within_silos(self, silo: Column, silo_names: tuple[str, ...], *, least: int) -> Column:
        """Allocate records that already belong to silos to users; return the user column.

        Args:
            silo: (n,) silo of every record.
            silo_names: names of the silos.
            least: minimum number of records per user (:meth:`Allocation.allocate_within_silos`).

        Raises:
            ConfigError: ``n_silos`` differs from the number of silos of the data.
        """
        if self.n_silos not in (None, len(silo_names)):
            raise ConfigError(
                f"n_silos is {self.n_silos}, but these data come in {len(silo_names)} silos: "
                f"{', '.join(silo_names)}; leave n_silos out"
            )
        return self.allocation.allocate_within_silos(
            silo, n_users=self.n_users, n_silos=len(silo_names), least=least, randomness=self.randomness
        )


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """One entry of the catalogue.

    Args:
        name: key of the data set.
        title: description in one line.
        records: numbers of training and test records, in words.
        terms: terms of use and citation.
        variants: alternative sets of files. The first variant whose files are all present is read; the first variant
            is the one that is downloaded. A data set that is part of a dependency has one variant without files.
        build: function that reads the files of a variant from a store and allocates the records.
        model: default model of experiments (``fedveil.training.models``); None: the default of the task.
        loss: default loss; None: the default of the task.
        metrics: default metrics; None: the defaults of the task.
    """

    name: str
    title: str
    records: str
    terms: str
    variants: tuple[tuple[DataFile, ...], ...]
    build: Callable[[Request, Store, tuple[DataFile, ...]], Population]
    model: str | None = None
    loss: str | None = None
    metrics: tuple[str, ...] | None = None

    def files(self, source: Store) -> tuple[DataFile, ...]:
        """Return the first variant whose files are all in the store, else the first variant."""
        for variant in self.variants:
            if all(file.present(source.folder) for file in variant):
                return variant
        return self.variants[0]
