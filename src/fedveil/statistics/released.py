"""What was released: the noisy vector with all that its figures follow from, as ``statistics.json`` keeps it.

Every figure is a function of this file, so a figure that nobody asked for before costs nothing and reads no record.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
from jaxtyping import Float64
from pydantic import ValidationError

from fedveil.errors import ConfigError, DataError, RunFolderError
from fedveil.files import parse_json, read_text, reading
from fedveil.population.schema import Schema
from fedveil.statistics.compose import compose
from fedveil.statistics.decoding import Cells, decode
from fedveil.statistics.layout import Layout
from fedveil.statistics.request import Request

SCHEMA_VERSION: Final = 1
FILE: Final = "statistics.json"


@dataclass(frozen=True, kw_only=True, eq=False)
class Released:
    """A release.

    Attributes:
        name: of the run.
        request: what was asked for.
        schema: what the columns are.
        silos: names of all silos.
        noise_multiplier: of the sum, in units of its sensitivity 1.
        noise_std: standard deviation of the noise on every number; more than the multiplier where shares are sized
            for silos that collude or are missing.
        vector: (d,) the sum of all silos' messages, as it was released.
    """

    name: str
    request: Request
    schema: Schema
    silos: tuple[str, ...]
    noise_multiplier: float
    noise_std: float
    vector: Float64[np.ndarray, " d"]

    @cached_property
    def layout(self) -> Layout:
        """The blocks of the vector."""
        return compose(self.request, self.schema, self.silos).layout

    @property
    def unit(self) -> float:
        """What one person, or one person-silo pair, adds to a sum."""
        return unit_of(self.request, len(self.silos))

    @property
    def people_per_unit(self) -> float:
        """How many counted units one person may be."""
        return 1 / self.unit

    @property
    def counted(self) -> str:
        """What is counted, in words."""
        return "people" if self.unit == 1 else "person-silo pairs"

    @cached_property
    def cells(self) -> Mapping[tuple[str, str], Cells]:
        """The cells of every block, by release and part."""
        return decode(self.layout, self.vector, self.noise_std, self.unit)

    def to_json(self) -> dict[str, Any]:
        """Return the release as JSON."""
        return {
            "schema_version": SCHEMA_VERSION,
            "name": self.name,
            "counted": self.counted,
            "noise": {"law": "discrete Gaussian", "multiplier": self.noise_multiplier, "std": self.noise_std},
            "covariance": "white: noise.std squared on every number of vector; of cells, (std / scale)^2 (A'A)^-1",
            "layout": [
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
            "vector": self.vector.tolist(),
            "silos": list(self.silos),
            "request": self.request.model_dump(mode="json", exclude_none=True),
            "schema": self.schema.model_dump(mode="json", exclude_none=True),
        }

    @classmethod
    def from_json(cls, data: Any, origin: object) -> Released:
        """Return the release of a document.

        Raises:
            RunFolderError: another version, or no release, or one whose layout is not that of its request.
        """
        if not isinstance(data, Mapping) or data.get("schema_version") != SCHEMA_VERSION:
            raise RunFolderError(f"{origin}: no release of schema version {SCHEMA_VERSION}")
        with reading(origin, RunFolderError):
            try:
                found = cls(
                    name=str(data["name"]),
                    request=Request.model_validate(data["request"]),
                    schema=Schema.model_validate(data["schema"]),
                    silos=tuple(str(name) for name in data["silos"]),
                    noise_multiplier=float(data["noise"]["multiplier"]),
                    noise_std=float(data["noise"]["std"]),
                    vector=np.array(data["vector"], dtype=np.float64),
                )
                whole = found.vector.shape == (found.layout.length,) and np.isfinite(found.vector).all()
            except (ValidationError, ConfigError, DataError) as error:
                raise RunFolderError(f"{origin} is damaged: its request is none") from error
            noisy = math.isfinite(found.noise_std) and found.noise_std > 0
            if not whole or not noisy or found.to_json()["layout"] != data["layout"]:
                raise RunFolderError(f"{origin} is damaged: its numbers do not fit its request")
            return found


def unit_of(request: Request, n_silos: int) -> float:
    """Return what a person's vector weighs in the sum of one silo at most: 1, or 1/|S| under uniform weights."""
    return 1 / n_silos if request.silos == "uniform" else 1.0


def read_released(folder: Path) -> Released:
    """Return what a run folder released.

    Raises:
        RunFolderError: it has no release, or a damaged one.
    """
    path = folder / FILE
    if not path.exists():
        raise RunFolderError(f"{folder}: no run of `fedveil stats`: it has no {FILE}")
    return Released.from_json(parse_json(read_text(path, RunFolderError), path, RunFolderError), path)


def dumps(released: Released) -> bytes:
    """Return the file's content."""
    return (json.dumps(released.to_json(), indent=1, allow_nan=False) + "\n").encode()
