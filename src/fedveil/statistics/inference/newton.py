"""Newton's method on released sums: every release counts, by how little noise it has.

Release k gives g_k = g(theta_k) + noise and H_k = H(theta_k) + noise. With Hbar_k the average slope between theta_k and
the solution, g(theta_k) = Hbar_k (theta - theta_k): one linear equation a release, whose noise at a distance
d_k = theta - theta_k has covariance

    sd_g^2 I + (s_k^2 / 2)(|d_k|^2 I + d_k d_k'),    s_k^2 = (sd_H,k^2 + sd_H,K^2) / 4

(the second term is exact for symmetric noise: E d = noise of a slope times a distance). Hbar_k is the mean of H_k and
H_K, the last one (the trapezoid); what that misses is taken as one half of (H_k - H_K) d_k, less what the noise of the
two explains, and counts as noise of the equation. The estimate is the least-squares solution with one weight a release,
w_k proportional to 1 / its mean variance: A theta = sum w_k (g_k + Hbar_k theta_k), A = sum w_k Hbar_k.

**Survival.** Records are followed up to a hazard under theta_k. With L the hazard under theta_k that a record was
followed through, until it was censored or stopped, E g(theta_k) = E sum a z L (e^(z'd_k) - 1): where it was stopped, L
is the same at every theta, and no later curvature tells of the bend. So the slope is taken from the release itself,
Hbar_k = H_k + T_k[d_k] / 2 with T_k = sum a L z z z' (:func:`bend`), also of the last release; one half of T_k[d_k] d_k
counts as noise here, too. Its noise is that of H_k alone, s_k = sd_H,k.

Everything here is a function of released numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Float64

from fedveil.statistics.inference.equation import Sums

LONGEST_STEP: Final = 2.0
"""Largest l2 length of a step of theta."""
SOLVABLE: Final = 1.5
"""Smallest eigenvalue of a slope in standard deviations of its noise, below which it is raised to that to be solved:
the estimate then stays finite, and has no interval."""
_CURVED: Final = 0.5
_SWEEPS: Final = 4


@dataclass(frozen=True, kw_only=True, eq=False)
class Estimate:
    """What the releases so far say.

    Attributes:
        theta: (d,) the estimate.
        slope: (d, d) A, positive definite.
        noise: (d, d) covariance of the combined equation by noise: of A (estimate - solution).
        least: smallest eigenvalue of the slope before it was made solvable, in standard deviations of the noise of the
            last curvature.
    """

    theta: Float64[np.ndarray, " d"]
    slope: Float64[np.ndarray, "d d"]
    noise: Float64[np.ndarray, "d d"]
    least: float


def estimate(releases: Sequence[Sums]) -> Estimate:
    """Return the estimate of all releases.

    Args:
        releases: in order; the last one's curvature is taken for that at the solution.
    """
    last = releases[-1]
    slope, least = solvable(last.curvature, last.curvature_sd)
    theta = last.theta + np.linalg.solve(slope, last.gradient)
    weights = np.array([1.0])
    for _ in range(_SWEEPS if len(releases) > 1 or last.stopped else 0):
        weights = np.array([1 / _variance(one, last, theta - one.theta) for one in releases])
        weights /= weights.sum()
        slopes = [_slope(one, last, theta - one.theta) for one in releases]
        combined = sum((w * s for w, s in zip(weights, slopes, strict=True)), np.zeros_like(slope))
        slope, least = solvable(combined, last.curvature_sd)
        pulls = (
            w * (one.gradient + s @ (one.theta - last.theta))
            for w, s, one in zip(weights, slopes, releases, strict=True)
        )
        theta = last.theta + np.linalg.solve(slope, sum(pulls, np.zeros_like(theta)))
    return Estimate(theta=theta, slope=slope, noise=_noise(releases, weights, theta), least=least)


def step(releases: Sequence[Sums]) -> Float64[np.ndarray, " d"]:
    """Return the theta of the next release: the estimate, no farther than the longest step from the last theta."""
    start = releases[-1].theta
    move = estimate(releases).theta - start
    length = float(np.linalg.norm(move))
    return np.asarray(start + move * min(1.0, LONGEST_STEP / length) if length > 0 else start)


def solvable(matrix: Float64[np.ndarray, "d d"], sd: float) -> tuple[Float64[np.ndarray, "d d"], float]:
    """Return the matrix with small eigenvalues raised, and its smallest eigenvalue over ``sd`` as it was."""
    values, vectors = np.linalg.eigh(matrix)
    raised = (vectors * np.maximum(values, SOLVABLE * sd)) @ vectors.T
    return raised, float(values.min() / sd)


def bend(one: Sums, distance: Float64[np.ndarray, " d"]) -> Float64[np.ndarray, "d d"]:
    """Return T[d] = sum a L z z' (z'd) of H = sum a L z z', as if covariates had no third central moments.

    In an interval j a record has z = (e_j, x), so that H holds the weight h_j of the interval, the mean m_j of its
    covariates, and the covariance C of covariates within intervals, which is taken to be the same in all.

    Args:
        one: a release of a family with intervals.
        distance: d.
    """
    size = one.leading
    crossed, weight = one.curvature[:size, size:], np.maximum(np.diag(one.curvature)[:size], one.curvature_sd)
    mean = crossed / weight[:, None]
    values, vectors = np.linalg.eigh(one.curvature[size:, size:] - mean.T @ crossed)
    within = (vectors * np.maximum(values, 0)) @ vectors.T / weight.sum()
    along = within @ distance[size:]
    moved = distance[:size] + mean @ distance[size:]
    found = np.zeros_like(one.curvature)
    found[:size, :size] = np.diag(weight * moved)
    found[:size, size:] = weight[:, None] * (mean * moved[:, None] + along)
    found[size:, :size] = found[:size, size:].T
    pulled = np.outer(weight @ mean, along)
    found[size:, size:] = (mean.T * (weight * moved)) @ mean + (weight @ moved) * within + pulled + pulled.T
    return found


def _slope(one: Sums, last: Sums, distance: Float64[np.ndarray, " d"]) -> Float64[np.ndarray, "d d"]:
    if one.stopped:
        return np.asarray(one.curvature + bend(one, distance) / 2)
    return last.curvature if one is last else np.asarray((one.curvature + last.curvature) / 2)


def _bent(one: Sums, last: Sums, distance: Float64[np.ndarray, " d"]) -> float:
    """Return the variance, per coordinate, that stands for what a slope misses."""
    size = len(distance)
    if one.stopped:
        turned = bend(one, distance) @ distance
        return _CURVED**2 * float(turned @ turned) / size
    if one is last:
        return 0.0
    turned = (one.curvature - last.curvature) @ distance
    by_noise = (one.curvature_sd**2 + last.curvature_sd**2) / 2 * (size + 1) * float(distance @ distance)
    return _CURVED**2 * max(0.0, float(turned @ turned) - by_noise) / size


def _variance(one: Sums, last: Sums, distance: Float64[np.ndarray, " d"]) -> float:
    """Return the mean variance of one release's equation at a distance."""
    size = len(distance)
    own = one is last or one.stopped
    of_slope = one.curvature_sd**2 if own else (one.curvature_sd**2 + last.curvature_sd**2) / 4
    along = of_slope / 2 * float(distance @ distance) * (size + 1) / size
    return one.gradient_sd**2 + along + _bent(one, last, distance)


def _noise(
    releases: Sequence[Sums], weights: Float64[np.ndarray, " K"], theta: Float64[np.ndarray, " d"]
) -> Float64[np.ndarray, "d d"]:
    """Return the covariance of the combined equation: the last curvature's noise may be in all slopes at once."""
    last, size = releases[-1], len(theta)
    distances = [theta - one.theta for one in releases]
    found = np.zeros((size, size))
    of_last = weights[-1] * distances[-1]
    for one, weight, distance in zip(releases, weights, distances, strict=True):
        found += np.eye(size) * weight**2 * (one.gradient_sd**2 + _bent(one, last, distance))
        if one is not last:
            pulled = weight * distance * (1.0 if one.stopped else 0.5)
            found += _along(pulled, one.curvature_sd)
            of_last = of_last if one.stopped else of_last + pulled
    found += _along(of_last, last.curvature_sd)
    return found


def _along(vector: Float64[np.ndarray, " d"], sd: float) -> Float64[np.ndarray, "d d"]:
    """Return the covariance of E v for symmetric noise E: sd^2 on its diagonal, sd^2 / 2 off it."""
    return np.asarray(sd**2 / 2 * (float(vector @ vector) * np.eye(len(vector)) + np.outer(vector, vector)))
