"""Request for statistics: the table ``[statistics]``, checked before any record is read.

What cannot be had under a guarantee is refused by its name, with the reason and what would do instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import AfterValidator, ConfigDict, Discriminator, Field, Tag, field_validator, model_validator

from fedveil.data.column_checks import check_bounds
from fedveil.errors import did_you_mean
from fedveil.statistics.strategy import MOST_ORDERED
from fedveil.validation import DocumentTable

# --- limits -------------------------------------------------------------------------------------------------
# What documents that ask for statistics share: words, limits, and what they refuse. Nothing heavy is imported here.


SiloWeights: TypeAlias = Literal["records", "equal", "uniform"]
"""A person's weights over silos: n_su/N_u, 1/(the person's silos), or 1/|S|, which counts person-silo pairs."""


def unit_of(silos: SiloWeights, n_silos: int) -> float:
    """Return what a person's vector weighs in the sum of one silo at most: 1, or 1/|S| under uniform weights."""
    return 1 / n_silos if silos == "uniform" else 1.0


TOO_FEW: Final = "too few people for this budget"
"""Text shown for a figure without an interval."""

MOST_GROUPINGS: Final = 2
"""Columns that groups are made of."""

LEAST_BINS: Final = 8
MOST_BINS: Final = 32
"""Bins of scores in an evaluation."""

MOST_HORIZONS: Final = 12
"""Horizons of an evaluation of survival times."""


def _once(columns: tuple[str, ...]) -> tuple[str, ...]:
    """Refuse a column that is named twice: its groups would overlap, and an overlap doubles what a person moves."""
    for name in columns:
        if columns.count(name) > 1:
            raise ValueError(f"'{name}' is named twice; name it once")
    return columns


Columns: TypeAlias = Annotated[tuple[str, ...], AfterValidator(_once)]
"""Names of columns, each of them once."""


# --- request ------------------------------------------------------------------------------------------------


_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Weight = Annotated[float, Field(ge=1e-9, le=1e9, allow_inf_nan=False)]
"""A weight; in this range neither the sum of all demands nor the noise of the smallest share overflows."""
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$", max_length=100)]

_EXTREME = "is decided by one person alone, whom no noise of use hides: ask for a quantile (quantiles = [0.01, 0.99])"
_REFUSED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "min": f"a smallest value {_EXTREME}",
        "max": f"a largest value {_EXTREME}",
        "range": f"a range {_EXTREME}",
        "top": "the most frequent values of an undeclared column are chosen by the records: declare categories",
        "mode": "the most frequent values of an undeclared column are chosen by the records: declare categories",
        "distinct": "a number of distinct values is no sum over people: declare categories and show those",
        "ever": "whether a person was anything in ANY silo is an OR over silos, which no sum of noisy vectors gives: "
        'take combine = "any" inside every silo, or "mean"',
    }
)


class _Part(DocumentTable):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ColumnRelease(_Part):
    """Figures of one column. Bins lie between declared bounds, or at declared edges."""

    kind: Literal["column"] = "column"
    column: str | None = Field(None, description="default: the release's name")
    show: Annotated[tuple[str, ...], Field(min_length=1)] = ("count", "missing")
    bins: Annotated[int, Field(ge=2, le=MOST_ORDERED - 2)] | str | None = Field(
        None, description="equal bins between the declared bounds; default: 32"
    )
    edges: tuple[float, ...] | None = Field(None, description="edges of the bins, ascending, instead of bins")
    quantiles: Annotated[tuple[Annotated[float, Field(gt=0, lt=1)], ...], Field(min_length=1)] = (
        0.25,
        0.5,
        0.75,
    )
    lower: float | None = Field(None, description="bound of a number that the schema gives none")
    upper: float | None = Field(None, description="bound of a number that the schema gives none")
    weight: _Weight = Field(1.0, description="how much its error counts beside that of other releases")

    @property
    def figures(self) -> tuple[str, ...]:
        """Return the shown figures by their names in a policy."""
        return self.show

    @model_validator(mode="before")
    @classmethod
    def _no_discovery(cls, value: Any) -> Any:
        if isinstance(value, Mapping) and "discover" in value:
            raise ValueError(
                "discover is refused: publishing a category that was not declared reveals that a person has it; "
                "declare "
                "the code list in the schema, and all others are counted as undeclared"
            )
        return value

    @field_validator("show")
    @classmethod
    def _known(cls, show: tuple[str, ...]) -> tuple[str, ...]:
        for name in show:
            if name in _REFUSED:
                raise ValueError(f"'{name}' is refused: {_REFUSED[name]}")
            if name not in SHOWN:
                raise ValueError(
                    f"no figure '{name}'; there are: {', '.join(SHOWN)}{did_you_mean(name, SHOWN)}"
                )
        return show

    @model_validator(mode="after")
    def _declared(self) -> ColumnRelease:
        if isinstance(self.bins, str):
            raise ValueError(
                f"bins = '{self.bins}': bins that depend on the records leak information about them; give their "
                f"number, or edges"
            )
        if self.bins is not None and self.edges is not None:
            raise ValueError("give bins or edges, not both")
        if self.edges is not None:
            ascending(self.edges, "edges")
        if (self.lower is None) != (self.upper is None):
            raise ValueError("give lower and upper, or neither")
        if self.lower is not None and self.upper is not None:
            check_bounds(self.lower, self.upper)
        return self


class _Joint(_Part):
    """Base class of requests that are one figure each."""

    kind: str

    @property
    def figures(self) -> tuple[str, ...]:
        """Return the shown figures by their names in a policy."""
        return (self.kind,)


class SurvivalRelease(_Joint):
    """Kaplan-Meier curve of the schema's survival target on a declared grid of times."""

    kind: Literal["survival"]
    grid: Annotated[tuple[float, ...], Field(min_length=2, max_length=MOST_ORDERED)]
    weight: _Weight = 1.0

    @field_validator("grid")
    @classmethod
    def _ascending(cls, grid: tuple[float, ...]) -> tuple[float, ...]:
        ascending(grid, "grid")
        return grid


class CrossRelease(_Joint):
    """Cross table of columns of categories."""

    kind: Literal["cross"]
    columns: Annotated[Columns, Field(min_length=2, max_length=4)]
    weight: _Weight = 1.0


class CorrelationRelease(_Joint):
    """Correlations of numbers, from their moments between declared bounds."""

    kind: Literal["correlation"]
    columns: Annotated[Columns, Field(min_length=2, max_length=64)]
    weight: _Weight = 1.0


SHOWN: Final = ("count", "missing", "histogram", "categories", "quantiles", "mean", "variance")
"""Figures of one column."""

FIGURES: Final = (*SHOWN, "survival", "cross", "correlation")
"""All that a release of statistics can show, as a silo's policy allows it."""


def _kind(value: Any) -> str:
    """Return which kind a release is: a column where it does not say."""
    kind = value.get("kind", "column") if isinstance(value, Mapping) else getattr(value, "kind", "column")
    return str(kind)


AnyRelease = Annotated[
    Annotated[ColumnRelease, Tag("column")]
    | Annotated[SurvivalRelease, Tag("survival")]
    | Annotated[CrossRelease, Tag("cross")]
    | Annotated[CorrelationRelease, Tag("correlation")],
    Discriminator(_kind),
]


class Request(_Part):
    """The table ``[statistics]``."""

    combine: Literal["mean", "first", "last", "any"] = Field(
        "mean",
        description="of a person's records in a silo; first and last need order, any takes 0/1 columns",
    )
    order: str | None = Field(None, description="numeric column that first and last go by")
    silos: SiloWeights = Field(
        "records",
        description="a person's weights over silos: n_su/N_u, 1/(the person's silos), or 1/|S|, which counts "
        "person-silo pairs",
    )
    by: Annotated[Columns, Field(max_length=8)] = Field(
        (), description='at most two columns of declared categories that groups are made of; "silo" is one'
    )
    max_standard_error: _Positive | None = Field(
        None,
        description="people: a cell whose noise has a larger standard deviation is refused; default: a quarter of "
        "n_users over the number of cells",
    )
    floor: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        10.0, description="people: a cell whose interval reaches below is not shown"
    )
    release: Annotated[dict[Name, AnyRelease], Field(min_length=1)]

    @field_validator("combine", mode="before")
    @classmethod
    def _linear(cls, combine: Any) -> Any:
        if combine in ("ever", "or", "any-silo"):
            raise ValueError(f"'{combine}' is refused: {_REFUSED['ever']}")
        return combine

    @field_validator("by")
    @classmethod
    def _partition(cls, by: tuple[str, ...]) -> tuple[str, ...]:
        if len(by) > MOST_GROUPINGS:
            raise ValueError(
                f"{len(by)} columns: at most {MOST_GROUPINGS}, or the groups hold too few people; ask for a cross "
                "table of the columns that matter"
            )
        return by

    @model_validator(mode="after")
    def _ordered(self) -> Request:
        needed = self.combine in ("first", "last")
        if needed and self.order is None:
            raise ValueError(f"order: combine = '{self.combine}' goes by a column; name it")
        if not needed and self.order is not None:
            raise ValueError("order: belongs to combine = 'first' or 'last'")
        return self


def ascending(values: tuple[float, ...], key: str) -> None:
    """Refuse fewer than two values, values that do not increase, and a range that :func:`check_bounds` refuses."""
    if len(values) < 2 or any(not low < high for low, high in pairwise(values)):
        raise ValueError(f"{key}: at least two numbers, each above the one before")
    try:
        check_bounds(values[0], values[-1])
    except ValueError:
        raise ValueError(
            f"{key}: numbers of at most 3.4e38 are needed, of which the first and the last differ in float32"
        ) from None
