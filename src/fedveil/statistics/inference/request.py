"""Request for a regression: the table ``[inference]``, checked before any record is read."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Final, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from fedveil.data.columns import categories_of
from fedveil.data.schema import Number, Schema, Survival
from fedveil.errors import ConfigError, did_you_mean
from fedveil.statistics.inference.design import Design, Levels, Scaled, Term
from fedveil.statistics.inference.families import Family, Linear, Logistic, PiecewiseExponential, Poisson
from fedveil.statistics.request import Columns, ascending
from fedveil.validation import DocumentTable

_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Finite = Annotated[float, Field(allow_inf_nan=False)]
_SIXTH = 1 / 6
MOST_COEFFICIENTS = 200
FAMILIES: Final = tuple(kind.name for kind in (Linear, Logistic, Poisson, PiecewiseExponential))
"""Names of all families."""


_Rate = Annotated[float, Field(gt=0, le=1e300)]
_Usual = Annotated[float, Field(ge=1e-12, le=1e12)]
_Centre = Annotated[float, Field(ge=-1e12, le=1e12)]
"""Sizes in the unit of a column; outside of these ranges another unit is meant, and squares overflow."""
_MOST_SCALES: Final = 1e6


class _Part(DocumentTable):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Scale(_Part):
    """Scale of a number: mean and standard deviation, known from elsewhere or released before."""

    centre: _Finite
    scale: _Positive


class _Asked(_Part):
    """Keys that all families share."""

    features: Annotated[Columns, Field(min_length=1)] | None = Field(
        None, description="columns of the schema's features; default: all"
    )
    scale: Mapping[str, Scale] = Field(
        {}, description="of a number: centre and scale; default: the middle and a sixth of its declared range"
    )
    reference: Mapping[str, str] = Field(
        {}, description="of a category: what others are compared with; default: the first declared"
    )
    bound: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = Field(
        None,
        description="B: longer designs (1, x) weigh less; default: seven eighths of the expected length, three "
        "quarters for Poisson and survival",
    )
    combine: Literal["mean", "first", "last"] = Field(
        "mean", description="of a person's records in a silo; first and last need order"
    )
    order: str | None = Field(None, description="numeric column that first and last go by")
    silos: Literal["records", "equal", "uniform"] = Field(
        "records",
        description="a person's weights over silos: n_su/N_u, 1/(the person's silos), or 1/|S|; default: "
        "'records' under private-weighting, else 'uniform'",
    )

    @model_validator(mode="after")
    def _ordered(self) -> _Asked:
        if (self.combine == "mean") != (self.order is None):
            raise ValueError("order: belongs to combine = 'first' or 'last', which need it")
        return self

    @abstractmethod
    def equation(self, schema: Schema) -> Family:
        """Return the family's equation.

        Raises:
            ConfigError: a target that the family does not explain.
        """

    def design(self, schema: Schema) -> Design:
        """Return the design.

        Raises:
            ConfigError: a column that is no feature, or is the target; a scale or a reference of what has none.
        """
        explained = self.equation(schema).columns
        features = self.features or tuple(name for name in schema.features if name not in explained)
        for name in features:
            if name not in schema.features:
                raise ConfigError(
                    f"inference.features: '{name}' is no feature of the schema; there are: {', '.join(schema.features)}"
                    f"{did_you_mean(name, schema.features)}"
                )
            if name in explained:
                raise ConfigError(f"inference.features: '{name}' is what is explained")
        for key, settings in (("scale", self.scale), ("reference", self.reference)):
            for name in settings:
                if name not in features:
                    raise ConfigError(f"inference.{key}.{name}: no such feature is requested")
        design = Design(terms=tuple(self._term(schema, name) for name in features))
        if len(design.names) > MOST_COEFFICIENTS:
            raise ConfigError(
                f"inference.features: {len(design.names)} coefficients, and at most {MOST_COEFFICIENTS} can be had; "
                "take fewer columns"
            )
        return design

    def _term(self, schema: Schema, name: str) -> Term:
        feature = schema.features[name]
        if isinstance(feature, Number):
            if name in self.reference:
                raise ConfigError(f"inference.reference.{name}: a number has no categories")
            middle, sixth = (feature.lower + feature.upper) / 2, (feature.upper - feature.lower) * _SIXTH
            scale = self.scale.get(name) or Scale(centre=middle, scale=sixth)
            farthest = max(abs(feature.lower - scale.centre), abs(feature.upper - scale.centre))
            if not farthest / _MOST_SCALES <= scale.scale <= farthest * _MOST_SCALES:
                raise ConfigError(
                    f"inference.scale.{name}: its bounds lie up to {farthest:g} from the centre, which is more than a "
                    f"million times the scale {scale.scale:g}, or less than a millionth of it"
                )
            return Scaled(name, feature.lower, feature.upper, scale.centre, scale.scale)
        categories = categories_of(schema, name, "inference.features")
        assert categories is not None, "what is no number has categories"
        if name in self.scale:
            raise ConfigError(f"inference.scale.{name}: categories have no scale")
        reference = self.reference.get(name, categories[0])
        if reference not in categories:
            raise ConfigError(
                f"inference.reference.{name}: '{reference}' is not declared; there are: {', '.join(categories)}"
            )
        if len(categories) < 2:
            raise ConfigError(
                f"inference.features: '{name}' has one category, which nothing is compared with"
            )
        return Levels(name, categories, reference)


class _OneColumn(_Asked):
    """Keys of the families that explain one column."""

    target: str | None = Field(None, description="column that is explained; default: the schema's target")

    def response_column(self, schema: Schema) -> str:
        """Return the column that is explained."""
        if self.target is not None:
            return self.target
        if isinstance(schema.target, Survival):
            raise ConfigError(
                "inference.target: the schema's target is a survival time; name a column, or take family = 'survival'"
            )
        if len(schema.target_columns) > 1:
            raise ConfigError(
                f"inference.target: the schema has several targets; name one of {', '.join(schema.target_columns)}"
            )
        return schema.target_columns[0]

    def number(self, schema: Schema) -> str:
        """Return the column that is explained, a number."""
        column = self.response_column(schema)
        if categories_of(schema, column, "inference.target") is not None:
            raise ConfigError(f"inference.target: '{column}' has categories, and a number is needed")
        return column


class LogisticInference(_OneColumn):
    """Odds of the second of two declared categories."""

    family: Literal["logistic"]
    rate: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None,
        description="a guess at the share of records with the second category, where the first step starts; "
        "default: one half",
    )

    def equation(self, schema: Schema) -> Family:
        column = self.response_column(schema)
        categories = categories_of(schema, column, "inference.target")
        if categories is None or len(categories) != 2:
            raise ConfigError(
                f"inference.target: '{column}' must be declared with two categories, of which the second is explained"
            )
        return Logistic(column, self.rate)


class LinearInference(_OneColumn):
    """A number's mean, by Huber's equation."""

    family: Literal["linear"]
    centre: _Centre = Field(0.0, description="a usual value of the target, where the first step starts")
    cut: _Usual = Field(description="residuals count up to this size; about twice their standard deviation")

    def equation(self, schema: Schema) -> Family:
        return Linear(self.number(schema), self.centre, self.cut)


class PoissonInference(_OneColumn):
    """A rate of counts."""

    family: Literal["poisson"]
    cap: Annotated[int, Field(ge=1, le=1000)] = Field(
        description="larger counts are taken for it; lower is less noise"
    )
    rate: _Rate | None = Field(
        None, description="a guess at the mean count, where the first step starts; default: 1"
    )

    def equation(self, schema: Schema) -> Family:
        return Poisson(self.number(schema), self.cap, self.rate or 1.0)


class SurvivalInference(_Asked):
    """Hazards of the schema's survival target, constant between the times of a grid."""

    family: Literal["survival"]
    grid: Annotated[tuple[float, ...], Field(min_length=2, max_length=50)]
    rate: _Rate | None = Field(
        None,
        description="a guess at events per unit of time; default: one for every two people by the end of the grid",
    )
    hazard: Annotated[float, Field(gt=0, le=1)] = Field(
        0.6, description="c: a record is followed until its cumulative hazard is this"
    )

    @field_validator("grid")
    @classmethod
    def _ascending(cls, grid: tuple[float, ...]) -> tuple[float, ...]:
        ascending(grid, "grid")
        return grid

    def equation(self, schema: Schema) -> Family:
        target = schema.target
        if not isinstance(target, Survival):
            raise ConfigError(
                "inference.family: the schema's target is no survival time (target.kind = 'survival')"
            )
        rate = self.rate or 0.5 / (self.grid[-1] - self.grid[0])
        return PiecewiseExponential(
            target.time, target.event, self.grid, rate, self.hazard, entry=target.entry
        )


Inference = Annotated[
    LogisticInference | LinearInference | PoissonInference | SurvivalInference, Field(discriminator="family")
]
