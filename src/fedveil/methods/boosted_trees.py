"""Compose ``boosted-trees``: gradient boosting over public structures, by noisy histograms at user level.

Each round releases one sum of bounded histograms (:mod:`fedveil.training.trees`) with N(0, sigma^2) on every number. A
user's weights sum to at most 1 and every contribution has l2 norm at most 1, so a round is one Gaussian mechanism of
multiplier sigma, as in ULDP-AVG. docs/theory/boosted-trees.md.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fedveil.config_keys import Positive
from fedveil.errors import CompositionError
from fedveil.methods.contributions import SiloUserContribution
from fedveil.methods.gaussian_shares import GaussianShares
from fedveil.methods.keys import Classes, Colluding, Inputs, Noise, Rounds, TargetRange, WeightPower
from fedveil.methods.method import Method
from fedveil.methods.newton import Residual, residual_of
from fedveil.methods.weights import Weights
from fedveil.privacy.bounds import Clip
from fedveil.privacy.sampling import Everyone
from fedveil.training.newton import LinearFamily
from fedveil.training.trees import ROUNDS, LocalTrees, TreeSteps

Rate = Annotated[
    Positive | None,
    Field(
        description="step of a round, over the mean of its 32 trees; default: 3 of classes, 1/2 of a number to predict"
    ),
]


def boosted_trees(
    *,
    inputs: Inputs,
    classes: Classes,
    target_range: TargetRange,
    noise_multiplier: Noise,
    residual: Residual = None,
    rate: Rate = None,
    power: WeightPower = "main",
    colluding_silos: Colluding = 0,
    rounds: Rounds = None,
) -> Method:
    """Boosted trees of the model ``boosted-trees``: one round of cuts, then 32 trees of depth 3 a round.

    Guarantee: in each round, readers of the models see one user through a Gaussian mechanism of multiplier sigma.
    Classification and regression; features in [-1, 1], as a schema scales them. Take 31 rounds, the most.

    Raises:
        CompositionError: more than 31 rounds; a number to predict without declared bounds, and no ``residual``.
    """
    if rounds is not None and not 2 <= rounds <= ROUNDS + 1:
        raise CompositionError(
            f"boosted-trees: rounds = {rounds}; one round finds the cuts and each of at most {ROUNDS} others grows "
            f"trees: take 2 to {ROUNDS + 1} rounds"
        )
    family = LinearFamily(
        inputs=inputs,
        classes=classes,
        record_length=1.0,
        residual=residual_of("boosted-trees", residual, classes, target_range),
        center=0.0 if target_range is None else sum(target_range) / 2,
    )
    return Method(
        name="boosted-trees",
        contribution=SiloUserContribution(),
        sampler=Everyone(),
        local=LocalTrees(family=family),
        bound=Clip(norm=1.0),
        weights=Weights.by_power(power),
        # |S| shares of variance sigma^2 / |S| add up to sigma^2, as in Algorithm 3 of ULDP-FL with C = 1.
        channel=GaussianShares(noise_multiplier=noise_multiplier, scale=1.0, colluding_silos=colluding_silos),
        # A number's residuals do not shrink as probabilities saturate: the mean of a round's trees is a whole step.
        server=TreeSteps(family=family, rate=(0.5 if classes is None else 3.0) if rate is None else rate),
    )
