"""Entry of the catalogue (:class:`DataSet`), its files (:class:`DataFile`), and request for its allocation.

Files are found in a folder or downloaded, and always checked against their digest.
"""

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
from jaxtyping import Int64, UInt8

from fedveil.data.allocation import CLIENT_LAWS, Allocation, Column
from fedveil.data.records import Affine, Population, Records
from fedveil.errors import ConfigError, DataError
from fedveil.randomness import ExperimentRandomness

_BLOCK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class DataFile:
    """One file that a data set is read from.

    Args:
        path: path relative to the data folder.
        sha256: SHA-256 of the content, 64 hexadecimal digits; empty if the source publishes only an MD5.
        md5: MD5 of the content, 32 hexadecimal digits; it detects a damaged file, not a forged one.
        urls: https addresses of exactly this content, tried in turn; empty if it cannot be downloaded.
    """

    path: str
    sha256: str = ""
    md5: str = ""
    urls: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if other := [url for url in self.urls if not url.startswith("https://")]:
            raise ValueError(f"{self.path}: only https addresses are opened, not {other[0]}")

    @property
    def digest(self) -> tuple[str, str]:
        """Algorithm and hexadecimal digits of the expected digest."""
        return ("sha256", self.sha256) if self.sha256 else ("md5", self.md5)

    def present(self, folder: Path) -> bool:
        """Return whether the folder has a file of this name; its content is checked when it is read."""
        return (folder / self.path).is_file()


@dataclass(frozen=True, kw_only=True)
class Store:
    """Folder of data files; ``download`` says whether missing files may be downloaded into it."""

    folder: Path
    download: bool

    def path(self, file: DataFile) -> Path:
        """Return the path of a file after a check of its digest; download a missing file if that is allowed.

        Raises:
            DataError: the file is missing and cannot or may not be downloaded; its digest is not the expected one
                (the error shows both); or it cannot be written to disk.
        """
        path = self.folder / file.path
        if not path.is_file():
            if not self.download:
                raise DataError(
                    f"{path} is missing; put it there, or name no folder and unset FEDVEIL_DATA, so that it "
                    "is downloaded"
                )
            fetch(file, path)
        algorithm, expected = file.digest
        actual = digest_of(path, algorithm)
        if actual != expected:
            raise DataError(
                f"{path} is not the file it should be: its {algorithm} is {actual}, expected {expected}; delete "
                "it and fetch it again"
            )
        return path


def store(folder: Path | None) -> Store:
    """Return the store: the given folder, else that in FEDVEIL_DATA, else a cache that downloads fill.

    The cache is in the system's usual place: ``$XDG_CACHE_HOME/fedveil`` or ``~/.cache/fedveil`` on Linux.
    """
    named = folder if folder is not None else os.environ.get("FEDVEIL_DATA")
    if named:
        return Store(folder=Path(named), download=False)
    import pooch

    return Store(folder=pooch.os_cache("fedveil"), download=True)


def digest_of(path: Path, algorithm: str = "sha256") -> str:
    """Return a digest of a file in hexadecimal digits; the file is read in blocks."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, algorithm).hexdigest()


def fetch(file: DataFile, target: Path) -> None:
    """Download a file to ``target`` atomically: the target is the whole, checked file, or does not exist.

    Raises:
        DataError: the file has no address, no address serves the expected content (the error shows both digests), or
            the file cannot be written to disk.
    """
    if not file.urls:
        raise DataError(
            f"{file.path} cannot be downloaded; see its source in `fedveil data` and put it at {target}"
        )
    import pooch

    failures, digest = [], ":".join(file.digest)
    for url in file.urls:
        downloader = pooch.HTTPDownloader(timeout=60, chunk_size=_BLOCK)
        try:
            pooch.retrieve(url, digest, fname=target.name, path=target.parent, downloader=downloader)
        except (OSError, ValueError) as error:
            failures.append(f"{url}: {error}")
        else:
            return
    helps = "Put it there, or let FEDVEIL_DATA name the folder that has it."
    raise DataError(f"{file.path} could not be downloaded to {target}. {helps} {'; '.join(failures)}")


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
