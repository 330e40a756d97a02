"""What the catalogue says about a data set, and what a caller asks of it."""

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
    """How a data set's records are to be handed out: law, |U|, |S| and seed.

    ``n_silos`` None means the data set's own silos, or five where it has none.
    """

    allocation: Allocation
    n_users: int
    n_silos: int | None
    seed: int

    @property
    def randomness(self) -> ExperimentRandomness:
        """The randomness of splits and allocation; depends on the seed alone."""
        return ExperimentRandomness(self.seed)

    def allocate(self, labels: Int64[np.ndarray, "n"]) -> tuple[Column, Column, tuple[str, ...]]:
        """Allocate records that no silo owns yet; returns (user, silo, silo names)."""
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
        """Return pictures of ten classes, those for training handed out."""
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
        """Allocate records that already lie in silos; returns the user column.

        Raises:
            ConfigError: another number of silos is asked for than the data have.
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
        name: the key it is loaded by.
        title: what it is, in a line.
        records: training and test records that come out of it, in words.
        terms: under which terms the data may be used, and whom to cite.
        variants: sets of files it can be read from; the first whose files are all there is taken, and the first is the
            one that is downloaded. A data set that is part of a dependency has one variant of no files.
        build: reads the files of a variant from a store and hands the records out.
        model: that an experiment trains unless it names another (``fedveil.training.models``); None: the task's.
        loss: that it minimises, likewise.
        metrics: by which it is judged, likewise.
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
        """Return the variant that lies in the store whole, or else the first."""
        for variant in self.variants:
            if all(file.present(source.folder) for file in variant):
                return variant
        return self.variants[0]
