"""Lemma 9 and Theorems 12 and 13 of CEPAM: the paper's figures, exact divergences, and what they are worth."""

import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

from fedveil.errors import PrivacyError
from fedveil.privacy.published_bounds import (
    amplified_epsilon,
    gaussian_profile,
    laplace_profile,
    sampled_gaussian_delta,
)

PAPER = {"clients": 30, "steps": 15, "records": 1666, "std": 0.1, "gamma": 1.0, "base_epsilon": 5.9}


def test_the_gaussian_figures_of_the_paper() -> None:
    found = gaussian_profile(**PAPER)
    assert found.epsilon == pytest.approx(1.45, abs=5e-3)
    assert found.delta == pytest.approx(9.69e-3, abs=5e-6)
    assert found.meaningless


def test_the_laplace_figure_of_the_paper() -> None:
    found = laplace_profile(steps=15, records=1666, b=0.1, gamma=1.0, base_epsilon=5000.0)
    assert found.epsilon == pytest.approx(4995, abs=0.5)
    assert found.delta == 0
    assert not found.meaningless


def test_the_published_delta_is_the_one_without_noise() -> None:
    deltas = [gaussian_profile(**(PAPER | {"gamma": gamma})).delta for gamma in (0.3, 1.0, 100.0)]
    assert deltas == pytest.approx([deltas[-1]] * 3, rel=1e-9)
    assert gaussian_profile(**(PAPER | {"gamma": 0.01})).delta < 1e-9


def hockey_stick(epsilon: float, shift: float, steps: int, records: int) -> float:
    """Delta at epsilon of sum_j Binomial(tau, 1/n)(j) N(j shift, 1) against N(0, 1), by the trapezoidal rule."""
    x = np.linspace(-12, 12 + steps * shift, 400_001)
    weights = stats.binom.pmf(np.arange(steps + 1), steps, 1 / records)
    mixture = sum(w * stats.norm.pdf(x, j * shift) for j, w in enumerate(weights))
    return float(np.trapezoid(np.maximum(mixture - math.exp(epsilon) * stats.norm.pdf(x), 0.0), x))


@pytest.mark.parametrize(("shift", "base_epsilon"), [(0.3, 0.5), (1.0, 1.0), (2.0, 5.0)])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_lemma_9_bounds_the_exact_divergence_and_meets_it_for_one_step(
    shift: float, base_epsilon: float, steps: int
) -> None:
    exact = hockey_stick(amplified_epsilon(base_epsilon, steps=steps, records=20), shift, steps, 20)
    bound = sampled_gaussian_delta(shift=shift, steps=steps, records=20, base_epsilon=base_epsilon)
    assert exact <= bound * (1 + 1e-6)
    if steps == 1:
        assert exact == pytest.approx(bound, rel=1e-6)


def test_extreme_arguments_stay_finite() -> None:
    for base_epsilon in (1e-9, 1e-3, 50.0, 1e4):
        for shift in (1e-6, 1.0, 1e6):
            delta = sampled_gaussian_delta(shift=shift, steps=15, records=1666, base_epsilon=base_epsilon)
            assert 0 <= delta <= 1


@pytest.mark.parametrize(
    "changes", [{"clients": 0}, {"records": 1}, {"std": 0.0}, {"gamma": math.inf}, {"base_epsilon": -1.0}]
)
def test_arguments_outside_their_domain_are_refused_by_name(changes: dict[str, Any]) -> None:
    with pytest.raises(PrivacyError, match=next(iter(changes))):
        gaussian_profile(**(PAPER | changes))


def test_theorem_13_is_refused_below_its_least_epsilon() -> None:
    with pytest.raises(PrivacyError, match="at least 2 tau gamma / b = 300"):
        laplace_profile(steps=15, records=1666, b=0.1, gamma=1.0, base_epsilon=299.0)
