"""Public data sets by name, with their published preprocessing, their terms and their allocation to users
and silos.

A new data set is one module with one :class:`DataSet` and one line in :data:`DATASETS`.
"""

from dataclasses import dataclass
from pathlib import Path

from fedveil.errors import ConfigError
from fedveil.population.allocation import Allocation
from fedveil.population.catalogue.creditcard import CREDITCARD
from fedveil.population.catalogue.data_set import DataSet, Request
from fedveil.population.catalogue.digits import DIGITS
from fedveil.population.catalogue.files import DataFile, store
from fedveil.population.catalogue.heart_disease import HEART_DISEASE
from fedveil.population.catalogue.imagenette import IMAGENETTE_SUBSET
from fedveil.population.catalogue.mnist import MNIST, MNIST_CANONICAL, MNIST_CENTRED, MNIST_RGB
from fedveil.population.catalogue.shakespeare import SHAKESPEARE
from fedveil.population.catalogue.svhn import SVHN, SVHN_SUBSET
from fedveil.population.catalogue.tcga_brca import TCGA_BRCA
from fedveil.population.records import Population

_ALL = (
    DIGITS,
    MNIST,
    MNIST_CANONICAL,
    MNIST_CENTRED,
    MNIST_RGB,
    SVHN,
    SVHN_SUBSET,
    IMAGENETTE_SUBSET,
    SHAKESPEARE,
    CREDITCARD,
    HEART_DISEASE,
    TCGA_BRCA,
)
DATASETS: dict[str, DataSet] = {data_set.name: data_set for data_set in _ALL}

__all__ = ["DATASETS", "Allocation", "DataSet", "Entry", "Request", "catalogue", "load"]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One line of the catalogue as a folder has it: what the data set is, and whether its files are there."""

    name: str
    title: str
    records: str
    terms: str
    files: tuple[DataFile, ...]
    folder: Path
    present: bool


def catalogue(folder: Path | None = None) -> tuple[Entry, ...]:
    """List the data sets and whether their files lie in the folder (see :func:`load`); downloads nothing."""
    source = store(folder)
    return tuple(
        Entry(
            name=data_set.name,
            title=data_set.title,
            records=data_set.records,
            terms=data_set.terms,
            files=data_set.files(source),
            folder=source.folder,
            present=all(file.present(source.folder) for file in data_set.files(source)),
        )
        for data_set in DATASETS.values()
    )


def load(
    name: str,
    *,
    allocation: Allocation,
    n_users: int,
    n_silos: int | None = None,
    seed: int = 0,
    folder: Path | None = None,
) -> Population:
    """Load a data set with its published preprocessing and hand its records to users and silos.

    Args:
        name: a key of :data:`DATASETS`.
        allocation: the law by which users (and silos, where the data have none) get records.
        n_users: |U|, public.
        n_silos: |S|; None for the data set's own silos, or five where it has none.
        seed: of splits and allocation; the same seed gives the same population.
        folder: where the files lie; None means the folder named by FEDVEIL_DATA, else a cache in the user's
            data folder, which is filled by downloading. Every file is checked against its sha256.

    Returns:
        The population; its ``notes`` say what is a subset and what was fitted on private records.

    Raises:
        ConfigError: an unknown name; an allocation that does not fit the data.
        DataError: a file that is missing, corrupted, or cannot be downloaded.

    >>> load("digits", allocation=Allocation(law="zipf"), n_users=100).n_silos
    5
    """
    if name not in DATASETS:
        raise ConfigError(f"there is no data set '{name}'; there are {', '.join(sorted(DATASETS))}")
    data_set = DATASETS[name]
    source = store(folder)
    request = Request(allocation=allocation, n_users=n_users, n_silos=n_silos, seed=seed)
    return data_set.build(request, source, data_set.files(source))
