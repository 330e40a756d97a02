"""Declare the configuration keys that builders of methods share: their meaning and their range."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag

from fedveil.config_keys import calibrated_field, composed_field
from fedveil.data.schema import Schema
from fedveil.errors import PrivacyError
from fedveil.methods.correlated import CorrelatedNoise
from fedveil.methods.weights import DeclaredMain, Power
from fedveil.privacy.adaptive_clip import AdaptiveClip
from fedveil.privacy.bounds import Clip
from fedveil.training.steps import LocalSgd


def _clippable(norm: float) -> float:
    """Return a norm to which float32 updates can be clipped; refuse any other."""
    try:
        Clip(norm=norm)
    except PrivacyError as error:
        raise ValueError(str(error)) from None
    return norm


Local = Annotated[LocalSgd, composed_field()]
"""Local computation of a contribution: the experiment's table ``[local]``."""
Silos = Annotated[int, composed_field()]
"""|S|, from the population."""
Users = Annotated[int, composed_field()]
"""|U|, from the population."""
LargestSilo = Annotated[int, composed_field()]
"""Number of records of the largest silo; it counts as public if a method asks for it."""
Colluding = Annotated[int, composed_field()]
"""Number of silos that may pool their knowledge, from the table ``[privacy]``."""
Inputs = Annotated[int, composed_field()]
"""Number of features of a record, from the population."""
Classes = Annotated[int | None, composed_field()]
"""Number of classes, from the population; None for a number to predict."""
TargetKind = Annotated[str, composed_field()]
"""Kind of the targets, from the population: classification, regression or survival."""
DeclaredSchema = Annotated[Schema | None, composed_field()]
"""The public schema by which records were read; None without one."""
TargetRange = Annotated[tuple[float, float] | None, composed_field()]
"""Declared bounds of a number to predict; None without them."""

ClipNorm = Annotated[
    float,
    Field(
        gt=0,
        allow_inf_nan=False,
        description="C, l2 bound of a contribution; l1 where clients send Laplace noise",
    ),
    AfterValidator(_clippable),
]


def _number_or_table(value: object) -> str:
    return _TABLE if isinstance(value, Mapping) or is_dataclass(value) else _NUMBER


# pydantic inserts the tag of the chosen alternative into an error's path; fedveil's error messages leave it out.
_NUMBER, _TABLE = "float", "literal[table]"
"""Names of the alternatives in a path, which errors leave out."""
Clipping = Annotated[
    Annotated[ClipNorm, Tag(_NUMBER)] | Annotated[AdaptiveClip, Tag(_TABLE)],
    Discriminator(_number_or_table),
    Field(
        description="C, l2 bound of a contribution; a table of `start`, `quantile`, `share`, `least` and `most` lets "
        "it track a quantile of the updates' norms ([how](../theory/adaptive-clipping.md))"
    ),
]
_NOISE = (
    'sigma; `"calibrated"` finds the smallest one for which the accountant meets `privacy.epsilon`, `"closed-form"` '
    'takes it from the theorems of DP-Fed-LS or, with `calibration = "as-published"`, from Remark 1 of ParaAegis, and '
    "is refused by all other methods; with `noise_decay`, the noise of the first round is raised so that the whole run "
    "meets the target"
)
Noise = Annotated[
    float,
    Field(ge=0, le=1e12, allow_inf_nan=False, description=_NOISE),
    calibrated_field("calibrated", "closed-form"),
]
Stream = Annotated[
    CorrelatedNoise | None,
    Field(
        description="noise that is [correlated over rounds](../theory/correlated-noise.md): a table of `period` and "
        "`bands`; a user takes part once in `period` rounds"
    ),
]
Rounds = Annotated[int | None, composed_field()]
"""T, from the experiment."""
UserRate = Annotated[
    float, Field(gt=0, le=1, description="q, each user takes part in a round with this probability")
]
WeightPower = Annotated[
    Annotated[Power, Tag(_NUMBER)] | Annotated[DeclaredMain, Tag(_TABLE)],
    Discriminator(_number_or_table),
    Field(
        description="p of the weights n_su^p / sum_s n_su^p of a user's silos: 1 as published, 0 for equal weights; "
        '`"main"` gives all weight to the silo with most of the records; `"linked"` does too, by a file of main silos '
        "that a simulation writes, and between institutions so does a table of `main_silos`, the SHA-256 of a file "
        "that the silos share ([how](../theory/weights.md#a-file-of-main-silos))"
    ),
]
GroupSize = Annotated[
    int,
    Field(
        ge=1,
        le=1_000_000,
        description='k, the most records kept of a user; `"median"` and `"max"` look at private counts, and the '
        "statement says so",
    ),
    calibrated_field("median", "max"),
]
ClientSampling = Annotated[
    Literal["uniform", "poisson"],
    Field(
        description='clients are drawn without replacement (`"uniform"`), or each independently (`"poisson"`)'
    ),
]
ClientRate = Annotated[float, Field(gt=0, le=1, description="tau, share of the clients in a round")]
Denominator = Annotated[
    Literal["expected", "actual"],
    Field(
        description='what a mean over clients is divided by; `"actual"` is for reproduction and not covered by the '
        "guarantee"
    ),
]
Smoothing = Annotated[
    float, Field(ge=0, allow_inf_nan=False, description="sigma of Laplacian smoothing; 0: no smoothing")
]
Calibration = Annotated[
    Literal["client", "as-published"],
    Field(
        description="what the noise is measured in: the clip bound, or 2 `clip` over the records of the largest "
        "client, which is no bound for a client"
    ),
]
NoiseDecay = Annotated[float, Field(gt=0, le=1, description="factor by which the noise falls every round")]


def _public_numbers(value: object) -> object:
    if value == "records":
        raise ValueError(
            "record counts are private, because neighbouring data differs in all records of one client: give public "
            'numbers, one for each client, or "equal"'
        )
    return value


ClientWeights = Annotated[
    Literal["equal"]
    | Annotated[
        tuple[Annotated[float, Field(gt=0, allow_inf_nan=False, strict=False)], ...],
        Field(strict=False, min_length=1),
    ],
    BeforeValidator(_public_numbers),
    Field(
        description="p_k, a list of public numbers to which the clients' weights are proportional; record counts are "
        "private, and the experiment shows the numbers"
    ),
]
Scale = Annotated[
    Literal["clip", "norm"],
    Field(
        description="what a client's noise is measured in: `method.clip`, or each update's own norm, as published and "
        "without a guarantee"
    ),
]
Lattice = Annotated[
    Literal["Z1", "Z2", "Z3", "A2", "D3", "D4", "E8"],
    Field(description="lattice of the quantiser; none sends each block in the cheapest way"),
]
RoundingStep = Annotated[
    float | None,
    Field(
        ge=1e-6,
        le=0.5,
        description="largest step of the grid to which messages are rounded after their noise, in units of the noise's "
        "std ([how](../theory/round-after-noise.md)); none sends numbers",
    ),
]
Step = Annotated[
    float,
    Field(
        gt=0,
        allow_inf_nan=False,
        description="SDQ's step, in units of the noise's std or b; of `fl-sdq` in units of the scale",
    ),
]
