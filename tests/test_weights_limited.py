"""Whatever a class of weights computes, what enters the sum is within what the guarantee takes a unit's move for."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from fedveil.data.records import Groups
from fedveil.methods.contributions import ClientContribution, SiloUserContribution
from fedveil.methods.method import contribution_weights
from fedveil.methods.weights import Weights
from fedveil.run.config.experiment import parse
from fedveil.run.setup import Prepared, prepare

PAIRS = SiloUserContribution()
SILOS = 3


@dataclass(frozen=True)
class Heavy(Weights):
    """Weight 1 in every silo, as somebody may write who thinks of silos and not of users."""

    def for_groups(self, groups: Groups, n_silos: int, n_users: int) -> torch.Tensor:
        return torch.ones(len(groups), dtype=torch.float64)


@pytest.fixture(scope="module")
def prepared() -> Prepared:
    return prepare(
        parse(
            {
                "name": "heavy",
                "rounds": 1,
                "data": {"name": "digits", "n_users": 12, "n_silos": SILOS},
                "method": {"name": "uldp-avg", "clip": 1.0, "noise_multiplier": 5.0},
                "local": {"learning_rate": 0.1},
            },
            "t",
        )
    )


def sums(groups: Groups, weights: torch.Tensor) -> Any:
    return np.bincount(groups.user, weights=weights.numpy())


@pytest.mark.parametrize("law", ["uniform", "records"])
def test_weights_of_a_class_that_is_wrong_are_cut(prepared: Prepared, law: Any) -> None:
    groups = prepared.setting.cohort.groups
    heavy = replace(prepared.method, weights=Heavy(law))
    found = contribution_weights(heavy, groups, prepared.population)
    assert sums(groups, heavy.weights.for_groups(groups, SILOS, 12)).max() == SILOS
    assert sums(groups, found).max() <= 1 + SILOS * 2.0**-52
    if law == "uniform":
        assert found.max() == 1 / SILOS


@pytest.mark.parametrize(
    "weights",
    [Weights.UNIFORM, Weights.BY_RECORDS, Weights.EQUAL, Weights.MAIN, Weights.by_power(2.5)],
    ids=lambda one: one.description,
)
def test_weights_of_the_house_come_back_bit_by_bit(prepared: Prepared, weights: Weights) -> None:
    groups = prepared.setting.cohort.groups
    found = weights.for_groups(groups, SILOS, 12)
    assert torch.equal(PAIRS.limit_weights(found, groups, SILOS, weights), found)


def test_nobodys_weight_is_negative_above_one_or_no_number_and_nobody_elses_changes(
    prepared: Prepared,
) -> None:
    groups = prepared.setting.cohort.groups
    right = Weights.BY_RECORDS.for_groups(groups, SILOS, 12)
    mine = torch.from_numpy(groups.user == groups.user[0])
    for wrong in (-1.0, 1.5, math.nan, math.inf, -math.inf):
        found = PAIRS.limit_weights(torch.where(mine, wrong, right), groups, SILOS, Weights.BY_RECORDS)
        assert ((found >= 0) & (found <= 1)).all()
        assert sums(groups, found).max() <= 1 + SILOS * 2.0**-52
        assert torch.equal(found[~mine], right[~mine])
        alone = ClientContribution().limit_weights(torch.full((4,), wrong), groups, SILOS, Weights.ONE)
        assert alone.tolist() == [min(1.0, max(0.0, wrong)) if wrong == wrong else 0.0] * 4
