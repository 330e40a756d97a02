"""What documents that ask for statistics share: words, limits, and what they refuse. Nothing heavy is imported here."""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias

from pydantic import AfterValidator

SiloWeights: TypeAlias = Literal["records", "equal", "uniform"]
"""A person's weights over silos: n_su/N_u, 1/(the person's silos), or 1/|S|, which counts person-silo pairs."""


def unit_of(silos: SiloWeights, n_silos: int) -> float:
    """Return what a person's vector weighs in the sum of one silo at most: 1, or 1/|S| under uniform weights."""
    return 1 / n_silos if silos == "uniform" else 1.0


TOO_FEW: Final = "too few people for this budget"
"""What stands in place of a figure that has no interval."""

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
