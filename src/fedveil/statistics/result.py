"""Files of released figures: the noisy sums, and all inputs of the figures that follow from them.

Statistics, regressions, evaluations and preprocessing have one format (:func:`figures_json`). Every figure is a
function of its file, so a figure that nobody asked for before costs nothing and reads no record.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Protocol, Self, TypeVar

import numpy as np
from jaxtyping import Float64
from pydantic import BaseModel, ValidationError

from fedveil.data.schema import Schema
from fedveil.errors import ConfigError, DataError, RunFolderError
from fedveil.files import check_schema_version, read_json, reading
from fedveil.statistics.blocks import Cells, Layout, decode
from fedveil.statistics.compose import compose
from fedveil.statistics.request import Request, unit_of

# --- stored sums ---

SCHEMA_VERSION: Final = 2
_MOST: Final = 2.0**53
"""Largest number in a stored sum: sums are exact up to 2^52 steps of a grid of at most 1. No noise has a standard
deviation above it or below its inverse: calibration tries multipliers from 0.005 to 10^6."""


@dataclass(frozen=True, eq=False)
class NoisySum:
    """Noisy sum that ends a release.

    Attributes:
        vector: (d,) the sum of the silos' messages.
        std: standard deviation of the noise on every number.
    """

    vector: Float64[np.ndarray, " d"]
    std: float

    def fits(self, length: int) -> bool:
        """Return whether this may be a sum of so many numbers: none is beyond what exact sums on the grid reach."""
        return self.vector.shape == (length,) and bool((np.abs(self.vector) <= _MOST).all())

    def to_json(self) -> dict[str, Any]:
        """Return the sum as JSON."""
        return {"noise_std": self.std, "vector": self.vector.tolist()}

    @classmethod
    def from_json(cls, data: Any, length: int, origin: object) -> NoisySum:
        """Return the sum that a document has.

        Args:
            data: the table with its numbers.
            length: what was asked for.
            origin: as in :func:`restoring`.

        Raises:
            RunFolderError: numbers that no sum has, or not as many as were asked for, or no noise.
        """
        noisy_sum = cls(np.array(data["vector"], dtype=np.float64), float(data["noise_std"]))
        if not noisy_sum.fits(length):
            raise RunFolderError(f"{origin} is damaged: its numbers do not fit the request")
        if not 1 / _MOST <= noisy_sum.std <= _MOST:
            raise RunFolderError(
                f"{origin} is damaged: its noise has a standard deviation that no release has"
            )
        return noisy_sum


NoisySums = tuple[NoisySum, ...]
"""Sums released so far, in order."""


Numbers = tuple[float, Float64[np.ndarray, " d"]]
"""Standard deviation of a release's noise, and the released (d,) float64 numbers, as the parties exchange them."""


def digest_of_release(numbers: Numbers) -> bytes:
    """Return the 32-byte digest of a release, which ties its file to the signatures of the parties.

    It is SHA-256 of the standard deviation and the numbers, all float64, little-endian.
    """
    std, vector = numbers
    return hashlib.sha256(np.array([std, *vector], dtype="<f8").tobytes()).digest()


def digest_of_all(releases: Iterable[bytes]) -> bytes:
    """Return the 32-byte digest of several releases: SHA-256 of their digests in order; zeros for none."""
    content = b"".join(releases)
    return hashlib.sha256(content).digest() if content else bytes(32)


class FiguresFile(Protocol):
    """Content of a file of released figures."""

    @classmethod
    def from_json(cls, data: Any, origin: object) -> Self:
        """Restore the content; ``origin`` names the document in errors."""
        ...


FiguresT = TypeVar("FiguresT", bound=FiguresFile)


def figures_json(
    name: str, request: BaseModel, releases: Iterable[Mapping[str, Any]], **further: Any
) -> dict[str, Any]:
    """Return the document of released figures.

    Args:
        name: name of the run.
        request: what was asked for.
        releases: the released sums in order, as JSON.
        **further: what else the figures follow from, and figures for readers of the file.
    """
    requested = request.model_dump(mode="json", exclude_none=True)
    return {
        "schema_version": SCHEMA_VERSION,
        "name": name,
        "request": requested,
        "releases": list(releases),
    } | further


def restore_sums(data: Any, lengths: Sequence[int], origin: object, *, least: int) -> NoisySums:
    """Return the released sums of a document.

    Args:
        data: the document.
        lengths: length of each release that was asked for, in order.
        origin: as in :func:`restoring`.
        least: smallest number of releases.

    Raises:
        RunFolderError: another number of releases, or a damaged sum.
    """
    tables = data["releases"]
    if not least <= len(tables) <= len(lengths):
        raise RunFolderError(f"{origin} is damaged: {len(tables)} of {len(lengths)} releases")
    return tuple(
        NoisySum.from_json(table, length, origin) for table, length in zip(tables, lengths, strict=False)
    )


def read_figures(path: Path, kind: type[FiguresT]) -> FiguresT | None:
    """Return the content of a file of released figures; None if there is no file.

    Raises:
        RunFolderError: the file is damaged.
    """
    return kind.from_json(read_json(path, RunFolderError), path) if path.exists() else None


@contextmanager
def restoring(data: Any, origin: object) -> Iterator[None]:
    """Have all that fails for what a document holds fail with one error that names it.

    Args:
        data: the document.
        origin: what to call it: its path, mostly.

    Raises:
        RunFolderError: another version, something that is missing, or a request that none could be.
    """
    check_schema_version(data, origin, SCHEMA_VERSION)
    with reading(origin, RunFolderError):
        try:
            yield
        except (ValidationError, ConfigError, DataError) as error:
            raise RunFolderError(f"{origin} is damaged: no request could have released it") from error


# --- results ---

FILE: Final = "statistics.json"


@dataclass(frozen=True, kw_only=True, eq=False)
class ReleasedStatistics:
    """Result of one release.

    Attributes:
        name: name of the run.
        request: what was asked for.
        schema: what the columns are.
        silos: names of all silos.
        noise_multiplier: noise multiplier of the sum, in units of its sensitivity 1.
        noisy_sum: the sum of all silos' messages, as it was released. Its noise is more than the multiplier where
            shares are sized for silos that collude or are missing.
    """

    name: str
    request: Request
    schema: Schema
    silos: tuple[str, ...]
    noise_multiplier: float
    noisy_sum: NoisySum

    @cached_property
    def layout(self) -> Layout:
        """Return the blocks of the vector."""
        return compose(self.request, self.schema, self.silos).layout

    @property
    def unit(self) -> float:
        """Return what one counted unit (a person, or a (person, silo) pair) adds to a sum."""
        return unit_of(self.request.silos, len(self.silos))

    @property
    def people_per_unit(self) -> float:
        """Return the largest number of counted units of one person."""
        return 1 / self.unit

    @property
    def counted_unit(self) -> str:
        """Return the counted unit in words: people, or (person, silo) pairs."""
        return "people" if self.unit == 1 else "person-silo pairs"

    @cached_property
    def cells(self) -> Mapping[tuple[str, str], Cells]:
        """Return the cells of every block, by release and part."""
        return decode(self.layout, self.noisy_sum.vector, self.noisy_sum.std, self.unit)

    def to_json(self) -> dict[str, Any]:
        """Return the release as JSON."""
        return figures_json(
            self.name,
            self.request,
            [self.noisy_sum.to_json()],
            counted=self.counted_unit,
            noise={"law": "discrete Gaussian", "multiplier": self.noise_multiplier},
            covariance="white: noise_std^2 on every number of vector; of cells, (noise_std / scale)^2 (A'A)^-1",
            layout=[
                {
                    "release": slot.block.release,
                    "part": slot.block.part,
                    "start": slot.start,
                    "length": slot.block.length,
                    "groups": list(slot.block.groups.labels),
                    "strategy": slot.block.strategy.kind,
                    "ordered": slot.block.strategy.ordered,
                    "free": slot.block.strategy.free,
                    "share": slot.share,
                    "scale": slot.scale,
                }
                for slot in self.layout.slots
            ],
            silos=list(self.silos),
            schema=self.schema.model_dump(mode="json", exclude_none=True),
        )

    @classmethod
    def from_json(cls, data: Any, origin: object) -> ReleasedStatistics:
        """Return the release of a document.

        Raises:
            RunFolderError: another version, or no release, or one whose layout is not that of its request.
        """
        with restoring(data, origin):
            request, schema = Request.model_validate(data["request"]), Schema.model_validate(data["schema"])
            silos = tuple(str(name) for name in data["silos"])
            (noisy_sum,) = restore_sums(
                data, [compose(request, schema, silos).layout.length], origin, least=1
            )
            released = cls(
                name=str(data["name"]),
                request=request,
                schema=schema,
                silos=silos,
                noise_multiplier=float(data["noise"]["multiplier"]),
                noisy_sum=noisy_sum,
            )
            if released.to_json()["layout"] != data["layout"]:
                raise RunFolderError(f"{origin} is damaged: its layout is not that of its request")
            return released


def read_released(folder: Path) -> ReleasedStatistics:
    """Return what a run folder released.

    Raises:
        RunFolderError: it has no release, or a damaged one.
    """
    released = read_figures(folder / FILE, ReleasedStatistics)
    if released is None:
        raise RunFolderError(
            f"{folder}: no released figures: it has no {FILE} of `fedveil stats`, no regression and no [evaluation]; "
            "`fedveil report` shows a training run"
        )
    return released
