"""Compose ``newton``: linear models by Newton steps on noisy sums of scores and curvatures, at user level.

Rounds 1 and 2 release sum_su w_su H_su and every later round sum_su w_su psi_su (:mod:`fedveil.training.newton`), each
with N(0, sigma^2) on every number. A user's weights sum to at most 1 and every contribution has l2 norm at most 1, so a
round is one Gaussian mechanism of multiplier sigma, as in ULDP-AVG. docs/theory/newton.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from fedveil.config_keys import FollowUp, Positive
from fedveil.data.schema import Category, Schema, Survival
from fedveil.errors import CompositionError
from fedveil.methods.contributions import SiloUserContribution
from fedveil.methods.gaussian_shares import GaussianShares
from fedveil.methods.keys import (
    Classes,
    Colluding,
    DeclaredSchema,
    Inputs,
    Noise,
    TargetKind,
    TargetRange,
    WeightPower,
)
from fedveil.methods.method import Method
from fedveil.methods.weights import Weights
from fedveil.privacy.bounds import Clip
from fedveil.privacy.sampling import Everyone
from fedveil.training.newton import (
    MOMENT_ROUNDS,
    CountFamily,
    HazardFamily,
    LinearFamily,
    LocalNewton,
    NewtonSteps,
)
from fedveil.training.server.averages import Ema

RecordLength = Annotated[
    float | None,
    Field(
        gt=1,
        allow_inf_nan=False,
        description="B, length of a record's features with the intercept, from which on it weighs less; default: the "
        "length that the schema lets expect, sqrt(1 + categories + numbers / 3); without a schema "
        "sqrt(1 + features / 3)",
    ),
]
Residual = Annotated[
    float | None,
    Field(
        gt=0,
        allow_inf_nan=False,
        description="c, bound of a residual; default: 1/2 for two classes, sqrt(1 - 1/K) for K, and a quarter of the "
        "range that the schema declares of a number to predict",
    ),
]
Ridge = Annotated[
    Positive,
    Field(description="factor of the least eigenvalue of the curvature, in units of its noise"),
]

Cap = Annotated[
    int | None,
    Field(
        ge=1,
        le=1000,
        description="for counts: a public number for which larger counts are taken; about 4 times the mean that you "
        "expect",
    ),
]
Horizon = Annotated[
    FollowUp | None,
    Field(
        description="for survival: the public time at which follow-up ends; later events count as censored; default: "
        "the `horizon` of the schema's target",
    ),
]
StartRate = Annotated[
    float | None,
    Field(
        gt=0,
        allow_inf_nan=False,
        description="for counts and survival: a public guess at the mean count, or at events per unit of time, from "
        "which the steps start; default: `cap / 4`, `0.5 / horizon`",
    ),
]


def newton(
    *,
    inputs: Inputs,
    classes: Classes,
    task: TargetKind,
    schema: DeclaredSchema,
    target_range: TargetRange,
    noise_multiplier: Noise,
    record_length: RecordLength = None,
    residual: Residual = None,
    ridge: Ridge = 1.0,
    cap: Cap = None,
    horizon: Horizon = None,
    rate: StartRate = None,
    power: WeightPower = "main",
    colluding_silos: Colluding = 0,
) -> Method:
    """Newton steps for a linear model: two rounds of curvature, then rounds of scores.

    Guarantee: in each round, readers of the models see one user through a Gaussian mechanism of multiplier sigma.
    Linear, logistic and softmax regression with the model ``whitened-linear``; with ``cap`` Poisson regression
    (``whitened-rates``), with ``horizon`` proportional hazards (``whitened-hazards``). Take 12 rounds, for counts 24.

    Raises:
        CompositionError: a number to predict without declared bounds, ``residual`` or ``cap``; survival without
            ``horizon``; a key that belongs to another kind of target.
    """
    if horizon is None and schema is not None and isinstance(schema.target, Survival):
        horizon = schema.target.horizon
    _check_keys(task, {"cap": cap, "horizon": horizon, "rate": rate, "residual": residual})
    length = expected_length(schema, inputs) if record_length is None else record_length
    family: LinearFamily
    if cap is not None:
        start = math.log(cap / 4 if rate is None else rate)
        family = CountFamily(inputs=inputs, record_length=length, center=start, cap=cap)
    elif horizon is not None:
        rate = 0.5 / horizon if rate is None else rate
        family = HazardFamily(
            inputs=inputs, record_length=length, center=math.log(rate), horizon=float(horizon), rate=rate
        )
    else:
        family = LinearFamily(
            inputs=inputs,
            classes=classes,
            record_length=length,
            residual=residual_of("newton", residual, classes, target_range),
            center=0.0 if target_range is None else sum(target_range) / 2,
        )
    return Method(
        name="newton",
        contribution=SiloUserContribution(),
        sampler=Everyone(),
        local=LocalNewton(family=family),
        bound=Clip(norm=1.0),
        weights=Weights.by_power(power),
        # |S| shares of variance sigma^2 / |S| add up to sigma^2, as in Algorithm 3 of ULDP-FL with C = 1.
        channel=GaussianShares(noise_multiplier=noise_multiplier, scale=1.0, colluding_silos=colluding_silos),
        server=NewtonSteps(family=family, ridge=ridge),
        # The first models are near the start: for a number to predict the middle of its range, maybe far from the mean.
        average=Ema(beta=0.8, skip=MOMENT_ROUNDS + 1),
    )


def _check_keys(task: str, keys: Mapping[str, object]) -> None:
    """Refuse keys of another kind of target, and survival without a horizon.

    Raises:
        CompositionError: names the key and what would be right.
    """
    present = {key for key, value in keys.items() if value is not None}
    if task == "survival" and "horizon" not in present:
        raise CompositionError(
            "newton: survival needs the public time at which follow-up ends, in the unit of the times: target.horizon "
            "in the schema, or method.horizon"
        )
    if task != "regression" and "cap" in present:
        raise CompositionError(f"newton: method.cap is for counts (regression), not for {task}")
    if task != "survival" and "horizon" in present:
        raise CompositionError(f"newton: method.horizon is for survival, not for {task}")
    if "rate" in present and not present & {"cap", "horizon"}:
        raise CompositionError("newton: method.rate is for counts (with method.cap) and survival")
    if "residual" in present and present & {"cap", "horizon"}:
        raise CompositionError(
            "newton: method.residual is not for counts and survival, which have their own bounds"
        )


def expected_length(schema: Schema | None, inputs: int) -> float:
    """Return the length of (x, 1) that public facts let expect: a number has the mean square 1/3, as if uniform.

    Args:
        schema: the declared columns; a category column has one 1. None: all features count as numbers.
        inputs: number of features.
    """
    if schema is None:
        return math.sqrt(1 + inputs / 3)
    categories = sum(isinstance(feature, Category) for feature in schema.features.values())
    return math.sqrt(1 + categories + (len(schema.features) - categories) / 3)


def residual_of(
    method: str, residual: float | None, classes: int | None, target_range: tuple[float, float] | None
) -> float | None:
    """Return the bound of a residual: as asked, or a quarter of the declared range; None for the rule of classes.

    Raises:
        CompositionError: a number to predict, without a bound and without declared bounds of the target.
    """
    if residual is not None or classes is not None:
        return residual
    if target_range is None:
        raise CompositionError(
            f"{method}: the residuals of a number to predict need a public bound: declare the target's bounds (lower "
            "and upper in the schema, target_range in Python), or give method.residual, about twice the standard "
            "deviation that you expect of them"
        )
    return (target_range[1] - target_range[0]) / 4
