"""Interface of evaluators: the vectors released for one kind of target, and the figures computed from them.

===================  ==========================  ====================================================================
target               releases                    a record's vector in the last one
===================  ==========================  ====================================================================
two classes          scores, then labels         unit vector of (label, bin of the score): :mod:`.binary`
more classes         labels                      unit vector of (class, predicted class): :mod:`.confusion`
a number             errors                      (error, its square, target, its square), scaled: :mod:`.amounts`
survival             scores, then exits          unit vector of (interval, event or not, bin of the score):
                                                 :mod:`.lifetimes`
===================  ==========================  ====================================================================

Where scores are binned, a first release places the bins and the second one's edges are a function of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Final, TypeAlias

import numpy as np
from jaxtyping import Float64, Shaped

from fedveil.data.columns import Column, Numbers, Places, State
from fedveil.statistics.blocks import Block, Layout
from fedveil.statistics.cells import Partition
from fedveil.statistics.intervals import Estimate, Interval

SCORE: Final = "the score"
TARGET: Final = "the target"
TIME: Final = "the time"
RESERVED: Final = (SCORE, TARGET, TIME)
"""Columns of the table of held-out records; a column of a schema that has such a name is refused."""

Figure: TypeAlias = tuple[str, str, Interval | None]
"""Name and cell of a figure, and its value; None where there is none."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Sums:
    """Noisy sums of one group of people.

    Attributes:
        values: (width,) in people.
        variance: variance of the noise of every one; it is white.
    """

    values: Float64[np.ndarray, " width"]
    variance: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    """Figures released about one group of people.

    Attributes:
        parts: sums by the name of their block.
        people_per_unit: how many counted units one person may be.
    """

    parts: Mapping[str, Sums]
    people_per_unit: float

    @property
    def counted_unit(self) -> str:
        """Return the counted unit in words: people, or (person, silo) pairs."""
        return "people" if self.people_per_unit == 1 else "person-silo pairs"

    def complement(self, part: Group) -> Group:
        """Return everybody but a part, whose noise is independent of what remains."""
        return replace(
            self,
            parts={
                name: Sums(
                    values=sums.values - part.parts[name].values,
                    variance=sums.variance - part.parts[name].variance,
                )
                for name, sums in self.parts.items()
            },
        )

    @classmethod
    def union(cls, members: Sequence[Group]) -> Group:
        """Return disjoint groups as one."""
        return cls(
            parts={
                name: Sums(
                    values=np.sum([member.parts[name].values for member in members], axis=0),
                    variance=sum(member.parts[name].variance for member in members),
                )
                for name in members[0].parts
            },
            people_per_unit=members[0].people_per_unit,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class ScoreBins:
    """The bins of scores, as the first release placed them.

    Attributes:
        edges: ascending; equal edges leave bins between them empty.
        cells: the decoded first release; empty where there is none, and before it is made.
        covariance: covariance of their noise; None where there is none.
    """

    edges: tuple[float, ...] = ()
    cells: Float64[np.ndarray, " cells"]
    covariance: Float64[np.ndarray, "cells cells"] | None = None


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """Curve for the report: noisy points, and a reference line to compare them with."""

    title: str
    x: str
    y: str
    points: tuple[tuple[float, float], ...]
    line: tuple[tuple[float, float], ...]
    line_name: str
    caption: str


class Evaluator(ABC):
    """Base class: vectors released for one kind of target, and the figures computed from them; all of it public.

    Attributes:
        measure: the figure whose predicted noise decides whether the evaluation is worth its budget.
        compared: figures that groups are compared by.
        headline: figures that runs are compared by.
    """

    measure: ClassVar[str]

    @property
    @abstractmethod
    def compared_figures(self) -> tuple[str, ...]:
        """Figures that groups are compared by: the keys of :meth:`estimates`."""

    @property
    def headline(self) -> tuple[str, ...]:
        """Those, unless a kind of target says otherwise."""
        return self.compared_figures

    @property
    def first(self) -> Layout | None:
        """Return the release that places the bins of scores; None where nothing is binned."""
        return None

    def score_bins(self, cells: Float64[np.ndarray, " cells"]) -> ScoreBins:
        """Return the bins, a function of the decoded first release."""
        return ScoreBins(cells=cells)

    @property
    def placeholder_bins(self) -> ScoreBins:
        """Bins that stand in for those of a release which is not made yet: as many."""
        return ScoreBins(cells=np.zeros(0))

    @abstractmethod
    def columns(
        self, outputs: Float64[np.ndarray, "t k"], targets: Shaped[np.ndarray, "t *target"]
    ) -> dict[str, Column]:
        """Return the columns of held-out records that the releases read.

        Args:
            outputs: outputs of the model; NaN where it has diverged, which is a cell of its own.
            targets: targets of the records.
        """

    @abstractmethod
    def blocks(self, name: str, groups: Partition, placed: ScoreBins) -> tuple[Block, ...]:
        """Return the blocks of the last release for a partition of people, which is their release's name."""

    @abstractmethod
    def estimates(self, group: Group, placed: ScoreBins) -> Mapping[str, Estimate | None]:
        """Return the compared figures of a group; None for one that too few people have."""

    @abstractmethod
    def figures(self, everybody: Group, placed: ScoreBins) -> Iterator[Figure]:
        """Yield every figure of all people."""

    def drawings(self, everybody: Group, placed: ScoreBins) -> tuple[Drawing, ...]:
        """Return curves for the report; none, unless a kind of target has some."""
        return ()

    @abstractmethod
    def predicted_error(self, variance: Mapping[str, float], people: float) -> float:
        """Return the predicted standard deviation of the measure by noise.

        Args:
            variance: variance of the noise of every block of all people, in people.
            people: how many are held out.
        """


def numbers(values: Float64[np.ndarray, " t"]) -> Numbers:
    """Return a column of numbers; what is no number is invalid."""
    valid = ~np.isnan(values)
    return Numbers(values=np.where(valid, values, 0.0), state=_state(valid))


def places(values: Shaped[np.ndarray, " t"], readable: Shaped[np.ndarray, " t"] | None = None) -> Places:
    """Return a column of classes; what is not readable is invalid."""
    valid = np.ones(len(values), dtype=np.bool_) if readable is None else readable
    return Places(values=np.where(valid, values, 0).astype(np.int64), state=_state(valid))


def _state(is_present: Shaped[np.ndarray, " t"]) -> Shaped[np.ndarray, " t"]:
    return np.where(is_present, State.VALID, State.INVALID).astype(np.int8)
