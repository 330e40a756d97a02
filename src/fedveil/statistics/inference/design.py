"""The design: which numbers a record's covariates are, from declared columns and public scales alone."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
from jaxtyping import Bool, Float64

from fedveil.data.columns import ColumnTable, State


class Term(ABC):
    """The covariates of one column.

    Attributes:
        column: which.
    """

    column: str

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """Names of its coefficients."""

    @property
    @abstractmethod
    def unit(self) -> float:
        """Return the length of one unit of the covariate, in units of its column."""

    @property
    @abstractmethod
    def expected_moments(self) -> tuple[float, float]:
        """Mean and variance that are expected of a covariate, for bounds and predictions alone."""

    @abstractmethod
    def covariates(self, table: ColumnTable) -> tuple[Float64[np.ndarray, "n k"], Bool[np.ndarray, " n"]]:
        """Return the covariates of all records, and which have a value."""


@dataclass(frozen=True)
class Scaled(Term):
    """A number, clipped to its declared bounds: (x - centre) / scale.

    Attributes:
        lower, upper: declared bounds.
        centre, scale: public; about the mean and the standard deviation.
    """

    column: str
    lower: float
    upper: float
    centre: float
    scale: float
    expected_moments: ClassVar[tuple[float, float]] = (0.0, 1.0)

    @property
    def names(self) -> tuple[str, ...]:
        return (self.column,)

    @property
    def unit(self) -> float:
        return self.scale

    def covariates(self, table: ColumnTable) -> tuple[Float64[np.ndarray, "n k"], Bool[np.ndarray, " n"]]:
        column = table.numbers(self.column)
        clipped = np.clip(column.values, self.lower, self.upper)
        return ((clipped - self.centre) / self.scale)[:, None], column.state == State.VALID


@dataclass(frozen=True)
class Levels(Term):
    """A category: 1 where a record has it, for every declared category but the reference.

    Attributes:
        categories: as declared.
        reference: one of them.
    """

    column: str
    categories: tuple[str, ...]
    reference: str
    unit: ClassVar[float] = 1.0

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"{self.column} = {name}" for name in self.categories if name != self.reference)

    @property
    def expected_moments(self) -> tuple[float, float]:
        """Return p and p (1 - p), as if all categories were as frequent."""
        p = 1 / len(self.categories)
        return p, p * (1 - p)

    def covariates(self, table: ColumnTable) -> tuple[Float64[np.ndarray, "n k"], Bool[np.ndarray, " n"]]:
        """Return one covariate for every category but the reference."""
        column = table.places(self.column)
        compared = [index for index, name in enumerate(self.categories) if name != self.reference]
        return (column.values[:, None] == compared).astype(np.float64), column.state == State.VALID


@dataclass(frozen=True)
class Design:
    """All covariates.

    Attributes:
        terms: terms of the columns, in order.
    """

    terms: tuple[Term, ...]

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the columns that are read."""
        return tuple(term.column for term in self.terms)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of all coefficients."""
        return tuple(name for term in self.terms for name in term.names)

    @cached_property
    def units(self) -> tuple[float, ...]:
        """Return the length of one unit of every covariate, in units of its column."""
        return tuple(term.unit for term in self.terms for _ in term.names)

    @cached_property
    def expected_moments(self) -> tuple[tuple[float, float], ...]:
        """Expected means and variances of all covariates."""
        return tuple(term.expected_moments for term in self.terms for _ in term.names)

    @cached_property
    def levels(self) -> tuple[tuple[int, ...], ...]:
        """Places of the covariates of every column of categories."""
        levels, position = [], 0
        for term in self.terms:
            if isinstance(term, Levels):
                levels.append(tuple(range(position, position + len(term.names))))
            position += len(term.names)
        return tuple(levels)

    @property
    def length(self) -> float:
        """Return the expected length of (1, x)."""
        return math.sqrt(1 + sum(mean**2 + spread for mean, spread in self.expected_moments))

    def covariates(self, table: ColumnTable) -> tuple[Float64[np.ndarray, "n p"], Bool[np.ndarray, " n"]]:
        """Return the covariates of all records, and which records have all of them."""
        complete = np.ones(len(table), dtype=np.bool_)
        columns = [np.empty((len(table), 0))]
        for term in self.terms:
            values, present = term.covariates(table)
            complete &= present
            columns.append(values)
        return np.concatenate(columns, axis=1), complete
