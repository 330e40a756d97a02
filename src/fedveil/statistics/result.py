"""Result of a release: the noisy vector and all inputs of its figures, as stored in ``statistics.json``.

Every figure is a function of this file, so a figure that nobody asked for before costs nothing and reads no record.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from fedveil.data.schema import Schema
from fedveil.errors import RunFolderError
from fedveil.files import read_json
from fedveil.statistics.compose import compose
from fedveil.statistics.decoding import Cells, decode
from fedveil.statistics.layout import Layout
from fedveil.statistics.request import Request, unit_of
from fedveil.statistics.stored import SCHEMA_VERSION, NoisySum, restoring

FILE: Final = "statistics.json"


@dataclass(frozen=True, kw_only=True, eq=False)
class ReleasedStatistics:
    """Result of one release.

    Attributes:
        name: of the run.
        request: what was asked for.
        schema: what the columns are.
        silos: names of all silos.
        noise_multiplier: of the sum, in units of its sensitivity 1.
        made: the sum of all silos' messages, as it was released. Its noise is more than the multiplier where shares
            are sized for silos that collude or are missing.
    """

    name: str
    request: Request
    schema: Schema
    silos: tuple[str, ...]
    noise_multiplier: float
    made: NoisySum

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
        return decode(self.layout, self.made.vector, self.made.std, self.unit)

    def to_json(self) -> dict[str, Any]:
        """Return the release as JSON."""
        return {
            "schema_version": SCHEMA_VERSION,
            "name": self.name,
            "counted": self.counted_unit,
            "noise": {"law": "discrete Gaussian", "multiplier": self.noise_multiplier},
            "covariance": "white: noise_std^2 on every number of vector; of cells, (noise_std / scale)^2 (A'A)^-1",
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
            **self.made.to_json(),
            "silos": list(self.silos),
            "request": self.request.model_dump(mode="json", exclude_none=True),
            "schema": self.schema.model_dump(mode="json", exclude_none=True),
        }

    @classmethod
    def from_json(cls, data: Any, origin: object) -> ReleasedStatistics:
        """Return the release of a document.

        Raises:
            RunFolderError: another version, or no release, or one whose layout is not that of its request.
        """
        with restoring(data, origin):
            request, schema = Request.model_validate(data["request"]), Schema.model_validate(data["schema"])
            silos = tuple(str(name) for name in data["silos"])
            found = cls(
                name=str(data["name"]),
                request=request,
                schema=schema,
                silos=silos,
                noise_multiplier=float(data["noise"]["multiplier"]),
                made=NoisySum.from_json(data, compose(request, schema, silos).layout.length, origin),
            )
            if found.to_json()["layout"] != data["layout"]:
                raise RunFolderError(f"{origin} is damaged: its layout is not that of its request")
            return found


def read_released(folder: Path) -> ReleasedStatistics:
    """Return what a run folder released.

    Raises:
        RunFolderError: it has no release, or a damaged one.
    """
    path = folder / FILE
    if not path.exists():
        raise RunFolderError(f"{folder}: no run of `fedveil stats`: it has no {FILE}")
    return ReleasedStatistics.from_json(read_json(path, RunFolderError), path)
