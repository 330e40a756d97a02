"""Catalogue of public data sets with their published preprocessing, terms of use, and allocation.

A new data set is one module with one :class:`DataSet`, registered under the entry points ``fedveil.data_sets``
(:mod:`fedveil.registry`). A data set is imported on first use.
"""

from dataclasses import dataclass
from pathlib import Path

from fedveil.data.allocation import Allocation
from fedveil.data.catalogue.data_set import DataFile, DataSet, Request, store
from fedveil.data.records import Population
from fedveil.errors import ConfigError
from fedveil.registry import find, members

__all__ = ["Allocation", "CatalogueEntry", "DataSet", "Request", "catalogue", "data_set", "digests", "load"]


@dataclass(frozen=True, kw_only=True)
class CatalogueEntry:
    """One line of the catalogue: a data set, its files, and whether a folder contains them.

    Attributes:
        name: name of the data set.
        package: package that registers it.
        title: title, or the reason why the data set cannot be imported.
        records: numbers of records, in words.
        terms: terms of use and citation.
        files: files of the variant to read.
        folder: folder of the files.
        present: whether the folder contains all files; their contents are not checked.
    """

    name: str
    package: str
    title: str
    records: str
    terms: str
    files: tuple[DataFile, ...]
    folder: Path
    present: bool


def catalogue(folder: Path | None = None) -> tuple[CatalogueEntry, ...]:
    """List the data sets, and whether the folder has their files (see :func:`load`); download nothing.

    A data set that cannot be imported is listed with the reason in place of its title.
    """
    source, entries = store(folder), []
    for member in members("data_sets"):
        try:
            dataset = member.load()
            title, records, terms, files = (
                dataset.title,
                dataset.records,
                dataset.terms,
                dataset.files(source),
            )
        except ConfigError as error:
            title, records, terms, files = str(error), "", "", ()
        entries.append(
            CatalogueEntry(
                name=member.name,
                package=member.package,
                title=title,
                records=records,
                terms=terms,
                files=files,
                folder=source.folder,
                present=all(file.present(source.folder) for file in files),
            )
        )
    return tuple(entries)


def data_set(name: str) -> DataSet:
    """Import a data set by its name.

    Raises:
        ConfigError: the name is unknown, or the data set cannot be imported.
    """
    dataset: DataSet = find("data_sets", name).load()
    return dataset


def digests(name: str, folder: Path | None = None) -> dict[str, str]:
    """Return the expected digest, ``algorithm:hexadecimal``, of every file of a data set, by path.

    The digests are public; :func:`load` compares every file with its digest.
    """
    return {file.path: ":".join(file.digest) for file in data_set(name).files(store(folder))}


def load(
    name: str,
    *,
    allocation: Allocation,
    n_users: int,
    n_silos: int | None = None,
    seed: int = 0,
    folder: Path | None = None,
) -> Population:
    """Load a data set with its published preprocessing, and allocate its records to users and silos.

    Args:
        name: name of a registered data set (listed by ``fedveil data``).
        allocation: law that assigns records to users, and to silos if the data have none.
        n_users: |U|, public.
        n_silos: |S|. None: the silos of the data set; without such silos, |U| if every user is a silo, else five.
        seed: seed of splits and allocation; the same seed gives the same population.
        folder: folder of the files; None means the folder in FEDVEIL_DATA, else the user's cache, which downloads
            fill. Every file is compared with its expected digest.

    Returns:
        The population; its ``notes`` describe subsets and quantities that were fitted on private records.

    Raises:
        ConfigError: the name is unknown, or the allocation does not fit the data.
        DataError: a file is missing, corrupted, or cannot be downloaded.

    >>> load("digits", allocation=Allocation(law="zipf"), n_users=100).n_silos
    5
    """
    dataset, source = data_set(name), store(folder)
    request = Request(allocation=allocation, n_users=n_users, n_silos=n_silos, seed=seed)
    return dataset.build(request, source, dataset.files(source))


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)
