"""The public schema of a user's own tables: which column is what, and how values become features.

Bounds and categories are DECLARED here, by somebody who knows the domain or a public sample. Nothing is
fitted on private
records: a minimum, a mean or a list of categories taken from them would leave the silos without any noise.

A number x with bounds [lower, upper] becomes 2 (x - lower) / (upper - lower) - 1, in [-1, 1]; a value
outside is clipped to its bound first. A category becomes one 0/1 feature per declared category, in the
declared order.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fedveil.errors import DataError
from fedveil.files import parse_toml, read_text
from fedveil.validation import plain

MISSING_VALUES = ("", "NA", "NaN", "nan", "null")


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Number(_Part):
    """A numeric feature, scaled from its declared bounds to [-1, 1]; values outside are clipped to them.

    A missing value is an error, or the middle of the bounds (0 after scaling), or that with a second feature
    that is 1 where the value is missing and 0 elsewhere ("indicator").
    """

    kind: Literal["number"]
    lower: Annotated[float, Field(strict=False, allow_inf_nan=False)]
    upper: Annotated[float, Field(strict=False, allow_inf_nan=False)]
    missing: Literal["error", "middle", "indicator"] = "error"

    @model_validator(mode="after")
    def _ordered(self) -> "Number":
        if not self.lower < self.upper:
            raise ValueError("lower must be below upper")
        return self

    @property
    def width(self) -> int:
        """Number of features this column becomes."""
        return 2 if self.missing == "indicator" else 1


class Category(_Part):
    """A categorical feature, one 0/1 feature per declared category.

    A value that is not declared is an error, or all zeros. A missing value is an error, or all zeros, or all
    zeros with a last feature that is 1 ("indicator").
    """

    kind: Literal["category"]
    categories: Annotated[tuple[str, ...], Field(strict=False, min_length=1)]
    unknown: Literal["error", "zero"] = "error"
    missing: Literal["error", "zero", "indicator"] = "error"

    @model_validator(mode="after")
    def _distinct(self) -> "Category":
        if len(set(self.categories)) != len(self.categories):
            raise ValueError("a category is declared twice")
        return self

    @property
    def width(self) -> int:
        """Number of features this column becomes."""
        return len(self.categories) + (self.missing == "indicator")


class Label(_Part):
    """A class label; class i is the i-th of ``classes``."""

    kind: Literal["label"]
    column: str
    classes: Annotated[tuple[str, ...], Field(strict=False, min_length=2)]

    @model_validator(mode="after")
    def _distinct(self) -> "Label":
        if len(set(self.classes)) != len(self.classes):
            raise ValueError("a class is declared twice")
        return self


class Amount(_Part):
    """A number to predict, as it is."""

    kind: Literal["number"]
    column: str


class Survival(_Part):
    """A time, not negative, and whether it ended with the event (1) or the record was censored (0)."""

    kind: Literal["survival"]
    time: str
    event: str


Feature: TypeAlias = Annotated[Number | Category, Field(discriminator="kind")]
Target: TypeAlias = Annotated[Label | Amount | Survival, Field(discriminator="kind")]


class Schema(_Part):
    """What a table's columns are; public, and the same for every silo.

    ``user`` names the column of the user, whose values are the same for the same person in every silo.
    ``silo`` names the column of the silo, or is left out where each silo has its own file. ``n_users`` is
    |U|, the public number of users, with or without records. ``silos`` may list the silos: one without a record
    then takes part like any other. Columns that the schema does not name are not read. Cells equal to one of
    ``missing_values`` are missing.
    """

    n_users: Annotated[int, Field(ge=1)]
    user: str
    silo: str | None = None
    silos: Annotated[tuple[str, ...] | None, Field(strict=False)] = None
    missing_values: Annotated[tuple[str, ...], Field(strict=False)] = MISSING_VALUES
    target: Target
    features: Annotated[dict[str, Feature], Field(min_length=1)]

    @model_validator(mode="after")
    def _one_role_per_column(self) -> "Schema":
        columns = [*self.roles, *self.features]
        for column in columns:
            if columns.count(column) > 1:
                raise ValueError(f"column '{column}' has two roles")
        return self

    @property
    def target_columns(self) -> tuple[str, ...]:
        """Columns that hold the target."""
        target = self.target
        return (target.event, target.time) if isinstance(target, Survival) else (target.column,)

    @property
    def roles(self) -> tuple[str, ...]:
        """Columns that are no features: user, silo, target."""
        return (self.user, *((self.silo,) if self.silo is not None else ()), *self.target_columns)

    @property
    def columns(self) -> tuple[str, ...]:
        """Every column that is read."""
        return (*self.roles, *self.features)

    @property
    def width(self) -> int:
        """Number of features of a record."""
        return sum(feature.width for feature in self.features.values())


def read_schema(path: Path) -> Schema:
    """Read a schema from a TOML file.

    Raises:
        DataError: the file is missing, is no TOML, or says something a schema does not; names the file and
            the key.
    """
    document = parse_toml(read_text(path, DataError), f"schema {path}", DataError)
    try:
        return Schema.model_validate(document)
    except ValidationError as error:
        problems = dict.fromkeys(_explain(problem) for problem in error.errors(include_url=False))
        raise DataError(f"schema {path} does not fit: {'; '.join(problems)}") from None


def _explain(problem: Mapping[str, Any]) -> str:
    """Return the key's path as the file has it, and what is wrong there."""
    parts = [str(part) for part in problem["loc"]]
    tag = 1 if parts[:1] == ["target"] else 2  # where pydantic puts the kind of a target or a feature
    kind = parts.pop(tag) if parts[:1] in (["target"], ["features"]) and len(parts) > tag else None
    table = _TABLES.get((parts[0], kind), Schema) if parts else Schema
    key, message = ".".join(parts), plain(problem, tuple(table.model_fields))
    return f"{key}: {message}" if key else message


_TABLES: dict[tuple[str, str | None], type[_Part]] = {
    ("features", "number"): Number,
    ("features", "category"): Category,
    ("target", "label"): Label,
    ("target", "number"): Amount,
    ("target", "survival"): Survival,
}
