"""Public data sets by name, with their published preprocessing, their terms and their allocation to users
and silos.

A new data set is one module with one :class:`DataSet`, registered under the entry points ``fedveil.data_sets``
(:mod:`fedveil.registry`); one is imported when it is asked for.
"""

from dataclasses import dataclass
from pathlib import Path

from fedveil.data.allocation import Allocation
from fedveil.data.catalogue.data_set import DataSet, Request
from fedveil.data.catalogue.files import DataFile, store
from fedveil.data.records import Population
from fedveil.errors import ConfigError
from fedveil.registry import find, members

__all__ = ["Allocation", "CatalogueEntry", "DataSet", "Request", "catalogue", "data_set", "digests", "load"]


@dataclass(frozen=True, kw_only=True)
class CatalogueEntry:
    """One line of the catalogue as a folder has it: what the data set is, and whether its files are there."""

    name: str
    package: str
    title: str
    records: str
    terms: str
    files: tuple[DataFile, ...]
    folder: Path
    present: bool


def catalogue(folder: Path | None = None) -> tuple[CatalogueEntry, ...]:
    """List the data sets and whether their files lie in the folder (see :func:`load`); downloads nothing.

    One that cannot be imported is listed with the reason in place of its title.
    """
    source, entries = store(folder), []
    for member in members("data_sets"):
        try:
            one = member.load()
            title, records, terms, files = one.title, one.records, one.terms, one.files(source)
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
    """Return the data set of a name, imported.

    Raises:
        ConfigError: there is none, or it cannot be imported.
    """
    found: DataSet = find("data_sets", name).load()
    return found


def digests(name: str, folder: Path | None = None) -> dict[str, str]:
    """Return the digest by which every file of a data set is known, ``algorithm:hexadecimal``, by its path.

    They are public, and :func:`load` has compared every file with its own.
    """
    return {one.path: ":".join(one.digest) for one in data_set(name).files(store(folder))}


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
        name: of a registered data set (``fedveil data``).
        allocation: the law by which users (and silos, where the data have none) get records.
        n_users: |U|, public.
        n_silos: |S|; None for the data set's own silos, or five where it has none.
        seed: of splits and allocation; the same seed gives the same population.
        folder: where the files lie; None means the folder named by FEDVEIL_DATA, else the user's cache, which
            is filled by downloading. Every file is checked against its sha256.

    Returns:
        The population; its ``notes`` say what is a subset and what was fitted on private records.

    Raises:
        ConfigError: an unknown name; an allocation that does not fit the data.
        DataError: a file that is missing, corrupted, or cannot be downloaded.

    >>> load("digits", allocation=Allocation(law="zipf"), n_users=100).n_silos
    5
    """
    found, source = data_set(name), store(folder)
    request = Request(allocation=allocation, n_users=n_users, n_silos=n_silos, seed=seed)
    return found.build(request, source, found.files(source))


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)
