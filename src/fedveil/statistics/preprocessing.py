"""Refinement of declared bounds, medians, categories and of the clip by releases.

=========  ================================================  =======================================================
asked for  a record is                                       decoded to
=========  ================================================  =======================================================
bounds     the prefix code of its bin on the signed powers    the outermost bins whose tails hold more than 2 % and
           of two inside of the declared range                more than 2 standard deviations of the noise
impute     the same (64 equal bins where no bounds are)       the median
pool       the unit vector of its category                    categories below a count become "other": all zeros
clip       the prefix code of the length of the update that   the .8 quantile of the lengths
           a (silo, user) pair computes from the initial
           model, on the grid C 2^(k/2), k = -8, ..., 8
=========  ================================================  =======================================================

The first three are one release, and refine the schema. The last is another one, after it: updates are computed on the
refined schema. C is the declared clip. An update of nothing, or one that is not finite, has no length.

A threshold that is too LOW is the disaster: one noisy far bin gives a code from 0 to 2 the upper bound 524288. So it is
2 standard deviations of a sum of leading bins, and at most 40 %. A column without enough people keeps what is declared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

import numpy as np
from jaxtyping import Float64
from pydantic import ConfigDict, Field

from fedveil.data.schema import Category, Number, Schema
from fedveil.errors import ConfigError
from fedveil.statistics.blocks import Block, Cells, Layout, OneHot, decode, isotonic_regression
from fedveil.statistics.cells import Bins, Categories
from fedveil.statistics.intervals import NORMAL_95
from fedveil.statistics.request import SiloWeights, unit_of
from fedveil.statistics.strategy import largest_leading
from fedveil.validation import DocumentTable

LENGTH: Final = "length of update"
"""The column of what clip is found by."""
CLIP_QUANTILE: Final = 0.8
"""The share of updates that the clip which is found leaves as they are."""
_CELLS: Final = "cells"
_TAIL: Final = 0.02
_MOST_TAIL: Final = 0.4
_SURE: Final = 2.0
_EQUAL_BINS: Final = 64
_POWERS: Final = range(-10, 21)
_HALF_POWERS: Final = range(-8, 9)


class PreprocessingRequest(DocumentTable):
    """Request for preprocessing: public, and fixed before a record is read.

    Attributes:
        schema_: as declared.
        silo_names: names of all silos.
        silos: a person's weights over silos.
        bounds: numbers whose bounds are refined.
        impute: numbers whose missing values are taken for the median.
        pool: categories of a column with fewer people than this become "other".
        clip: the declared bound of an update, in the middle of the grid on which another is found; None: it stays.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_: Schema
    silo_names: tuple[str, ...]
    silos: SiloWeights
    bounds: tuple[str, ...]
    impute: tuple[str, ...]
    pool: Mapping[str, float]
    clip: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None

    @property
    def unit(self) -> float:
        """Return the largest weight of a person's vector in the sum of one silo."""
        return unit_of(self.silos, len(self.silo_names))

    @property
    def numbers(self) -> tuple[str, ...]:
        """Return the numbers that are looked at."""
        return tuple(dict.fromkeys((*self.bounds, *self.impute)))

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """Return the layouts in the order of the releases: of columns, then of update lengths; each only if requested.

        Raises:
            ConfigError: as :attr:`layout`.
        """
        columns = (self.layout,) if self.numbers or self.pool else ()
        return columns if self.clip is None else (*columns, Layout((_lengths(self.clip),)))

    @property
    def layout(self) -> Layout:
        """Return the blocks of the release that refines the schema, one a column.

        Raises:
            ConfigError: a column of another kind, or missing values that no rule allows.
        """
        blocks = [self._number(name) for name in self.numbers]
        return Layout((*blocks, *(self._category(name) for name in self.pool)))

    def edges(self, name: str) -> tuple[float, ...]:
        """Return the edges of a number's bins."""
        feature = self._feature(name)
        if name not in self.bounds:
            return tuple(np.linspace(feature.lower, feature.upper, _EQUAL_BINS + 1).tolist())
        powers, edges = [2.0**power for power in _POWERS], [feature.lower]
        for edge in (*(-power for power in reversed(powers)), 0.0, *powers):
            # Any two edges may become the bounds, which must differ in float32.
            if np.float32(edges[-1]) < np.float32(edge) < np.float32(feature.upper):
                edges.append(edge)
        return (*edges, feature.upper)

    def _feature(self, name: str) -> Number:
        feature = self.schema_.features.get(name)
        if not isinstance(feature, Number):
            raise ConfigError(f"preprocessing: '{name}' is no number among the features of the schema")
        if name in self.impute and feature.missing == "error":
            raise ConfigError(
                f"preprocessing.impute: the schema lets no value of '{name}' be missing; declare missing = 'middle' or "
                "'indicator'"
            )
        return feature

    def _number(self, name: str) -> Block:
        return Block(release=name, part=_CELLS, encoder=OneHot(Bins(name, self.edges(name))), kind="prefix")

    def _category(self, name: str) -> Block:
        feature = self.schema_.features.get(name)
        if not isinstance(feature, Category):
            raise ConfigError(f"preprocessing.pool: '{name}' is no category among the features of the schema")
        encoder = OneHot(Categories(name, feature.categories, pooled=True))
        return Block(release=name, part=_CELLS, encoder=encoder)


def refine_schema(
    request: PreprocessingRequest, vector: Float64[np.ndarray, " d"], noise_std: float
) -> Schema:
    """Return the schema as the release refines it: a function of the release and public things.

    Args:
        request: what was asked for.
        vector: the released sum.
        noise_std: standard deviation of its noise, per number.
    """
    cells = decode(request.layout, vector, noise_std, request.unit)
    document = request.schema_.model_dump(mode="json", exclude_none=True)
    for name in request.numbers:
        distribution = _Distribution.from_cells(request.edges(name), cells[name, _CELLS])
        feature = document["features"][name]
        if distribution is None:
            continue
        if name in request.bounds:
            feature["lower"], feature["upper"] = distribution.bounds()
            if "fill" in feature:  # like any other number that lies outside
                feature["fill"] = float(np.clip(feature["fill"], feature["lower"], feature["upper"]))
        if name in request.impute:
            feature["fill"] = float(np.clip(distribution.quantile(0.5), feature["lower"], feature["upper"]))
    for name, least in request.pool.items():
        document["features"][name] |= _kept(document["features"][name], cells[name, _CELLS], least)
    return Schema.model_validate(document)


def quantile_of_lengths(
    request: PreprocessingRequest, vector: Float64[np.ndarray, " d"], noise_std: float
) -> float:
    """Return the bound of an update that a release of lengths gives: their quantile; as declared where nobody is.

    Args:
        request: what was asked for.
        vector: the released sum.
        noise_std: standard deviation of its noise, per number.
    """
    assert request.clip is not None
    cells = decode(Layout((_lengths(request.clip),)), vector, noise_std, request.unit)
    distribution = _Distribution.from_cells(_length_edges(request.clip), cells[LENGTH, _CELLS])
    return request.clip if distribution is None else distribution.quantile(CLIP_QUANTILE)


def _length_edges(clip: float) -> tuple[float, ...]:
    return tuple(clip * 2.0 ** (power / 2) for power in _HALF_POWERS)


def _lengths(clip: float) -> Block:
    return Block(
        release=LENGTH, part=_CELLS, encoder=OneHot(Bins(LENGTH, _length_edges(clip))), kind="prefix"
    )


def cdf_noise(layout: Layout, unit: float, noise_std: float) -> float:
    """Return the largest standard deviation of noise on a sum of leading bins, in people; 0 without numbers.

    Args:
        layout: what is released.
        unit: what a person weighs in the sum of one silo at most.
        noise_std: standard deviation of the noise on every number.
    """
    return max(noise_std / (slot.scale * unit) * slot.block.strategy.leading_noise for slot in layout.slots)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Distribution:
    """The people of a column below every edge.

    Attributes:
        edges: (B + 1,) of the bins; values beyond them are taken for the ends.
        below: (B,) isotonic people up to the upper edge of every bin; the last is all.
        noise: the largest standard deviation of such a sum.
    """

    edges: tuple[float, ...]
    below: Float64[np.ndarray, " B"]
    noise: float

    @classmethod
    def from_cells(cls, edges: tuple[float, ...], cells: Cells) -> _Distribution | None:
        """Return the distribution of decoded cells; None where there is nobody."""
        ordered = len(edges) + 1
        sums = np.cumsum(cells.values[0, :ordered])
        total = float(sums[-1])
        noise = math.sqrt(largest_leading(cells.covariance, ordered))
        if total <= _SURE * noise:
            return None
        rising = isotonic_regression(np.clip(sums, 0, total))[1:]
        rising[-2:] = total
        return cls(edges=edges, below=rising[:-1], noise=noise)

    def bounds(self) -> tuple[float, float]:
        """Return the outermost edges whose tails are no noise."""
        total = float(self.below[-1])
        tail = min(max(_TAIL * total, _SURE * self.noise), _MOST_TAIL * total)
        first = int(np.argmax(self.below > tail))
        last = int(np.argmax(self.below >= total - tail))
        return self.edges[first], self.edges[max(first, last) + 1]

    def quantile(self, level: float) -> float:
        """Return where a share of all people is below, linear within bins."""
        shares = np.concatenate(([0.0], self.below / self.below[-1])) + 1e-12 * np.arange(len(self.edges))
        return float(np.interp(level, shares, np.array(self.edges)))


def _kept(feature: Mapping[str, Any], cells: Cells, least: float) -> dict[str, Any]:
    """Return the categories that are not pooled, the fullest one in any case; others are all zeros."""
    names = feature["categories"]
    values, sd = cells.values[0, : len(names)], np.sqrt(np.diag(cells.covariance)[: len(names)])
    is_kept = values + NORMAL_95 * sd >= least
    is_kept[int(np.argmax(values))] = True
    if is_kept.all():
        return {}
    categories = [name for name, keep in zip(names, is_kept, strict=True) if keep]
    also = {spelling: meant for spelling, meant in feature.get("also", {}).items() if meant in categories}
    return {"categories": categories, "unknown": "zero"} | ({"also": also} if "also" in feature else {})
