"""Files of the catalogue: found in a folder or downloaded, and always checked against their digest."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from fedveil.errors import DataError

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
        found = digest_of(path, algorithm)
        if found != expected:
            raise DataError(
                f"{path} is not the file it should be: its {algorithm} is {found}, expected {expected}; delete "
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

    failures, known = [], ":".join(file.digest)
    for url in file.urls:
        downloader = pooch.HTTPDownloader(timeout=60, chunk_size=_BLOCK)
        try:
            pooch.retrieve(url, known, fname=target.name, path=target.parent, downloader=downloader)
        except (OSError, ValueError) as error:
            failures.append(f"{url}: {error}")
        else:
            return
    helps = "Put it there, or let FEDVEIL_DATA name the folder that has it."
    raise DataError(f"{file.path} could not be downloaded to {target}. {helps} {'; '.join(failures)}")
