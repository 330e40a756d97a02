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

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from jaxtyping import Float64, Int64
from scipy.optimize import brentq
from scipy.special import stdtr, stdtrit

from fedveil.statistics.inference.equation import Sums, matrix, triangle
from fedveil.statistics.inference.families import Family

LONGEST_STEP: Final = 2.0
"""Largest l2 length of a step of theta."""
SOLVABLE: Final = 1.5
"""Smallest eigenvalue of a slope in standard deviations of its noise, below which it is raised to that to be solved:
the estimate then stays finite, and has no interval."""
_ROUNDING: Final = float(np.finfo(np.float64).eps)
_CURVED: Final = 0.5
_SWEEPS: Final = 4


@dataclass(frozen=True, kw_only=True, eq=False)
class Estimate:
    """Estimate from the releases so far.

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
        weights = np.array([1 / _variance(release, last, theta - release.theta) for release in releases])
        weights /= weights.sum()
        slopes = [_slope(release, last, theta - release.theta) for release in releases]
        combined = sum((w * s for w, s in zip(weights, slopes, strict=True)), np.zeros_like(slope))
        slope, least = solvable(combined, last.curvature_sd)
        pulls = (
            w * (release.gradient + s @ (release.theta - last.theta))
            for w, s, release in zip(weights, slopes, releases, strict=True)
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
    """Return the matrix with small eigenvalues raised, and its smallest eigenvalue over ``sd`` as it was.

    Eigenvalues are computed to about d eps |H|. Where that is more than ``sd``, it counts as the noise: a matrix of
    sums that no records have is solved like any other, and has no interval.
    """
    values, vectors = np.linalg.eigh(matrix)
    noise = max(sd, len(values) * _ROUNDING * float(np.abs(values).max()))
    raised = (vectors * np.maximum(values, SOLVABLE * noise)) @ vectors.T
    return raised, float(values.min() / noise)


def bend(sums: Sums, distance: Float64[np.ndarray, " d"]) -> Float64[np.ndarray, "d d"]:
    """Return T[d] = sum a L z z' (z'd) of H = sum a L z z', as if covariates had no third central moments.

    In an interval j a record has z = (e_j, x), so that H holds the weight h_j of the interval, the mean m_j of its
    covariates, and the covariance C of covariates within intervals, which is taken to be the same in all.

    Args:
        sums: a release of a family with intervals.
        distance: d.
    """
    size = sums.leading
    crossed, weight = (
        sums.curvature[:size, size:],
        np.maximum(np.diag(sums.curvature)[:size], sums.curvature_sd),
    )
    mean = crossed / weight[:, None]
    values, vectors = np.linalg.eigh(sums.curvature[size:, size:] - mean.T @ crossed)
    within = (vectors * np.maximum(values, 0)) @ vectors.T / weight.sum()
    along = within @ distance[size:]
    moved = distance[:size] + mean @ distance[size:]
    bent = np.zeros_like(sums.curvature)
    bent[:size, :size] = np.diag(weight * moved)
    bent[:size, size:] = weight[:, None] * (mean * moved[:, None] + along)
    bent[size:, :size] = bent[:size, size:].T
    pulled = np.outer(weight @ mean, along)
    bent[size:, size:] = (mean.T * (weight * moved)) @ mean + (weight @ moved) * within + pulled + pulled.T
    return bent


def _slope(sums: Sums, last: Sums, distance: Float64[np.ndarray, " d"]) -> Float64[np.ndarray, "d d"]:
    if sums.stopped:
        return np.asarray(sums.curvature + bend(sums, distance) / 2)
    return last.curvature if sums is last else np.asarray((sums.curvature + last.curvature) / 2)


def _bent(sums: Sums, last: Sums, distance: Float64[np.ndarray, " d"]) -> float:
    """Return the variance, per coordinate, that stands for what a slope misses."""
    size = len(distance)
    if sums.stopped:
        turned = bend(sums, distance) @ distance
        return _CURVED**2 * float(turned @ turned) / size
    if sums is last:
        return 0.0
    turned = (sums.curvature - last.curvature) @ distance
    by_noise = (sums.curvature_sd**2 + last.curvature_sd**2) / 2 * (size + 1) * float(distance @ distance)
    return _CURVED**2 * max(0.0, float(turned @ turned) - by_noise) / size


def _variance(sums: Sums, last: Sums, distance: Float64[np.ndarray, " d"]) -> float:
    """Return the mean variance of one release's equation at a distance."""
    size = len(distance)
    own = sums is last or sums.stopped
    of_slope = sums.curvature_sd**2 if own else (sums.curvature_sd**2 + last.curvature_sd**2) / 4
    along = of_slope / 2 * float(distance @ distance) * (size + 1) / size
    return sums.gradient_sd**2 + along + _bent(sums, last, distance)


def _noise(
    releases: Sequence[Sums], weights: Float64[np.ndarray, " K"], theta: Float64[np.ndarray, " d"]
) -> Float64[np.ndarray, "d d"]:
    """Return the covariance of the combined equation: the last curvature's noise may be in all slopes at once."""
    last, size = releases[-1], len(theta)
    distances = [theta - release.theta for release in releases]
    total = np.zeros((size, size))
    of_last = weights[-1] * distances[-1]
    for release, weight, distance in zip(releases, weights, distances, strict=True):
        total += np.eye(size) * weight**2 * (release.gradient_sd**2 + _bent(release, last, distance))
        if release is not last:
            pulled = weight * distance * (1.0 if release.stopped else 0.5)
            total += _along(pulled, release.curvature_sd)
            of_last = of_last if release.stopped else of_last + pulled
    total += _along(of_last, last.curvature_sd)
    return total


def _along(vector: Float64[np.ndarray, " d"], sd: float) -> Float64[np.ndarray, "d d"]:
    """Return the covariance of E v for symmetric noise E: sd^2 on its diagonal, sd^2 / 2 off it."""
    return np.asarray(sd**2 / 2 * (float(vector @ vector) * np.eye(len(vector)) + np.outer(vector, vector)))


# --- covariance ---------------------------------------------------------------------------------------------
# The covariance of an estimate: spread of people and noise of releases, neither left out.
#
#     V = A^-1 (S_+ + Sigma) A^-1
#
# with A and Sigma slope and noise of the combined equation (see above), and S_+ what
# the released spread S says of the spread of scores (the sandwich of people). At the truth the equation is a score of
# people plus noise, and A times the error of the estimate is exactly that; so noise of A is in error and width alike.
#
# **The spread.** S has d (d + 1) / 2 noisy numbers, often with more noise than content. It is drawn towards what a
# spread is like: c A + c' A J A, its projection on these two matrices, where J keeps the leading coefficients: c A
# where residuals are as the model says, c' A J A for what the records of a person have in common. The distance to them
# is multiplied by 1 - (k - 2) s^2 / distance^2 where that is positive, s the noise's standard deviation and k the
# dimensions that remain (James and Stein 1961; towards a subspace: Efron and Morris 1973): nothing changes where S is
# well known. Negative eigenvalues of the result are taken for 0.
#
# **Intervals.** The part a' E a of a variance, E what is left of the noise of S, has a known standard deviation t. As
# for any estimated variance the quantile is Student's, of 2 V^2 / t^2 degrees of freedom (Satterthwaite 1946); to the
# first order in t^2 that gives the level for any distribution of the error in V.
#
# The curvature is not raised by a floor that intervals could rest on: where its smallest eigenvalue is too close to its
# noise there is no interval (measured: floors of a few standard deviations give 70 to 92 % coverage).


_UPPER: Final = 0.975


@dataclass(frozen=True, kw_only=True)
class Effect:
    """A coefficient in units of its column.

    Attributes:
        name: name of the coefficient.
        estimate: its value.
        low, high: of its 95 % interval for the population.
        z: estimate over standard error.
        freedom: degrees of freedom of Student's law for its interval and p.
        p: two-sided, of no effect.
        privacy: the share of its variance that is noise.
        ratio: e^estimate with its interval; None where the family has no such meaning.
    """

    name: str
    estimate: float
    low: float
    high: float
    z: float
    freedom: float
    p: float
    privacy: float
    ratio: tuple[float, float, float] | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Covariance:
    """Covariance of an estimate, on the scale of the equation.

    Attributes:
        whole: (d, d) V.
        noise: (d, d) the part of it that is noise.
        freedom: (d,) degrees of freedom of the variances.
    """

    whole: Float64[np.ndarray, "d d"]
    noise: Float64[np.ndarray, "d d"]
    freedom: Float64[np.ndarray, " d"]

    @property
    def reach(self) -> Float64[np.ndarray, " d"]:
        """Half the widths of the 95 % intervals."""
        half_widths: np.ndarray = stdtrit(self.freedom, _UPPER) * np.sqrt(np.diag(self.whole))
        return half_widths


def covariance(estimate: Estimate, last: Sums) -> Covariance:
    """Return the covariance of the estimate.

    Args:
        estimate: what all releases say.
        last: the release that the spread was sent with.
    """
    assert last.spread is not None
    inverse = np.linalg.inv(estimate.slope)
    noise = inverse @ estimate.noise @ inverse
    spread, basis, kept_share = shrunk_covariance(last.spread, last.spread_sd, estimate.slope, last.leading)
    whole = noise + inverse @ spread @ inverse
    squares = triangle(inverse[:, :, None] * inverse[:, None, :])
    inside, all_of_it = ((squares @ basis) ** 2).sum(axis=1), (squares**2).sum(axis=1)
    unsure = last.spread_sd**2 * (inside + kept_share**2 * (all_of_it - inside))
    with np.errstate(divide="ignore"):
        return Covariance(whole=whole, noise=noise, freedom=2 * np.diag(whole) ** 2 / unsure)


def shrunk_covariance(
    spread: Float64[np.ndarray, "d d"], sd: float, slope: Float64[np.ndarray, "d d"], leading: int
) -> tuple[Float64[np.ndarray, "d d"], Float64[np.ndarray, "k 2"], float]:
    """Return the spread drawn towards what a spread is like, the basis of that, and how much is kept of the rest.

    Args:
        spread: S, with noise.
        sd: standard deviation of its noise.
        slope: A.
        leading: how many coefficients J keeps.
    """
    like = np.stack((slope, slope[:, :leading] @ slope[:leading]))
    basis, _ = np.linalg.qr(triangle(like).T)
    entries = triangle(spread[None])[0]
    inside = basis @ (basis.T @ entries)
    remainder = entries - inside
    noise, length = max(0, len(entries) - 4) * sd**2, float(remainder @ remainder)
    kept_share = 1 - noise / length if noise < length else float(not noise)
    values, vectors = np.linalg.eigh(matrix(inside + kept_share * remainder, len(spread)))
    return (vectors * np.maximum(values, 0)) @ vectors.T, basis, kept_share


def effect(
    name: str,
    values: tuple[float, float, float, float],
    unit: float,
    *,
    origin: float = 0.0,
    multiplies: bool,
) -> Effect:
    """Return one coefficient with its figures.

    Args:
        name: name of the coefficient.
        values: coefficient, its variance, the part of that which is noise, and the degrees of freedom of the variance,
            on the scale of the equation.
        unit: what the coefficient is multiplied by.
        origin: what is added to it then.
        multiplies: whether e^coefficient means something.
    """
    value, variance, noise, freedom = values
    estimate, error = value * unit + origin, math.sqrt(variance) * unit
    reach = float(stdtrit(freedom, _UPPER)) * error
    low, high = estimate - reach, estimate + reach
    z = estimate / error if error > 0 else math.copysign(math.inf, estimate)
    return Effect(
        name=name,
        estimate=estimate,
        low=low,
        high=high,
        z=z,
        freedom=freedom,
        p=float(2 * stdtr(freedom, -abs(z))),
        privacy=noise / variance if variance > 0 else 1.0,
        ratio=(_exp(estimate), _exp(low), _exp(high)) if multiplies else None,
    )


def _exp(value: float) -> float:
    """Return e^value, at most the largest number."""
    return math.exp(min(value, 700.0))


# --- identified coefficients --------------------------------------------------------------------------------
# Which coefficients a regression's releases identify: an empty interval or category costs its own coefficient only.
#
# The log hazard of an interval in which nobody is followed, and the coefficient of a category that nobody has, are in
# no record's score. Their rows of the curvature are noise, so the smallest eigenvalue of the whole curvature is noise
# too. Without these rows the other equations are as they were, and they do not depend on the coefficients that are left
# out.
#
# The weight of an interval or of a category is its diagonal entry of H (covariates are 0 or 1). That of a reference
# category is the weight of all records less that of the other categories; where nobody has it, the intercept and every
# contrast with it are unknown, and one of the contrasts is held at its last value so that the rest can be solved.
#
# **A weight that is small and not 0.** A coefficient j that is left out is held at its last value. What that moves in
# the other equations is sum a z r over the records of j alone, about m r_j with m the mean of z among them and r_j the
# residual of equation j at the estimate. r_j is released: r_j^2 less what noise explains counts as noise along E zz',
# which stands for mm'. :data:`MOST_LEFT_OUT` limits how much of all weight is treated this way.


MOST_LEFT_OUT: Final = 0.1
"""Largest share of the weight of all records that coefficients without an interval may have together."""
_LIGHT: Final = 3.0
"""Largest weight of what is left out, in smallest eigenvalues that are enough: beside an intercept, an indicator with
the weight w has an eigenvalue of w / 3 at least unless most records have it."""


@dataclass(frozen=True, kw_only=True)
class Indicator:
    """An interval, a category, or a reference category, with the weight of its records.

    Attributes:
        weight: weight of its records.
        sd: standard deviation of the noise on it.
        coefficient: the coefficient that is held where the records are too few.
        lost: the coefficients that have no interval then.
    """

    weight: float
    sd: float
    coefficient: int
    lost: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Identified:
    """The estimate of the coefficients that are identified.

    Attributes:
        solved: (k,) which coefficients are solved for.
        lost: those that have no interval, whether they are solved for or not.
        releases: the releases, restricted to what is solved for.
        estimate: their estimate.
        enough: whether their curvature is clear of its noise.
    """

    solved: Int64[np.ndarray, " k"]
    lost: frozenset[int]
    releases: tuple[Sums, ...]
    estimate: Estimate
    enough: bool


def indicators(sums: Sums) -> Iterator[Indicator]:
    """Yield the intervals, the categories and the reference categories of a release."""
    weight, sd = np.diag(sums.curvature), sums.curvature_sd
    leading = range(sums.leading)
    if sums.stopped and sums.leading > 1:
        yield from (Indicator(weight=float(weight[j]), sd=sd, coefficient=j, lost=(j,)) for j in leading)
    for levels in sums.levels:
        yield from (Indicator(weight=float(weight[j]), sd=sd, coefficient=j, lost=(j,)) for j in levels)
        yield Indicator(
            weight=float(weight[list(leading)].sum() - weight[list(levels)].sum()),
            sd=sd * float(np.sqrt(len(leading) + len(levels))),
            coefficient=max(levels, key=lambda j: float(weight[j])),
            lost=(*leading, *levels),
        )


def moving(sums: Sums) -> Int64[np.ndarray, " k"]:
    """Return the coefficients that the next step may move: the noise of an empty one would use up the step."""
    fixed = {
        indicator.coefficient for indicator in indicators(sums) if indicator.weight < SOLVABLE * indicator.sd
    }
    return _without(sums, fixed)


def restricted(releases: Sequence[Sums], selected: Int64[np.ndarray, " k"]) -> tuple[Sums, ...]:
    """Return releases about some coefficients, the others being held at their values of the last release.

    A gradient at other values of these is moved there along its own curvature, whose noise is counted.
    """
    last = releases[-1]
    if len(selected) == len(last.theta):
        return tuple(releases)
    fixed = np.setdiff1d(np.arange(len(last.theta)), selected)
    places = {int(old): new for new, old in enumerate(selected)}
    results = []
    for release in releases:
        away = last.theta[fixed] - release.theta[fixed]
        square = np.ix_(selected, selected)
        results.append(
            replace(
                release,
                theta=release.theta[selected],
                gradient=release.gradient[selected] - release.curvature[np.ix_(selected, fixed)] @ away,
                curvature=release.curvature[square],
                spread=None if release.spread is None else release.spread[square],
                gradient_sd=float(
                    np.hypot(release.gradient_sd, release.curvature_sd * np.linalg.norm(away) / np.sqrt(2))
                ),
                leading=int((selected < release.leading).sum()),
                levels=tuple(tuple(places[j] for j in levels if j in places) for levels in release.levels),
            )
        )
    return tuple(results)


def identify(releases: Sequence[Sums], least: float) -> Identified:
    """Return the estimate of what the releases identify: the lightest indicators are left out until that is enough.

    Args:
        releases: all, in order.
        least: how many standard deviations of its noise the smallest eigenvalue of the slope must be from 0.
    """
    last = releases[-1]
    room = MOST_LEFT_OUT * float(np.diag(last.curvature)[: last.leading].sum())
    light = [indicator for indicator in indicators(last) if indicator.weight < _LIGHT * least * indicator.sd]
    light.sort(key=lambda indicator: indicator.weight / indicator.sd)
    left_out: list[Indicator] = []
    while True:
        identified = _identified(releases, left_out, least)
        if identified.enough or not light:
            return identified
        left_out.append(light.pop(0))
        is_left = (_without(last, (indicator.coefficient for indicator in left_out)) < last.leading).any()
        if not is_left or sum(max(0.0, indicator.weight) for indicator in left_out) > room:
            return identified


def _identified(releases: Sequence[Sums], left_out: Sequence[Indicator], least: float) -> Identified:
    last = releases[-1]
    selected = _without(last, (indicator.coefficient for indicator in left_out))
    own = restricted(releases, selected)
    solution = estimate(own)
    _, smallest = solvable(own[-1].curvature, own[-1].curvature_sd)
    fixed = np.setdiff1d(np.arange(len(last.theta)), selected)
    if len(fixed):
        moved = last.curvature[np.ix_(fixed, selected)] @ (solution.theta - own[-1].theta)
        residual = last.gradient[fixed] - moved
        excess = float(np.maximum(0.0, residual**2 - last.gradient_sd**2).sum())
        weight = float(np.diag(solution.slope)[: own[-1].leading].sum())
        solution = replace(solution, noise=solution.noise + excess * solution.slope / weight)
    return Identified(
        solved=selected,
        lost=frozenset(j for indicator in left_out for j in indicator.lost),
        releases=own,
        estimate=solution,
        enough=bool(smallest >= SOLVABLE and solution.least >= least),
    )


def _without(sums: Sums, fixed: Iterable[int]) -> Int64[np.ndarray, " k"]:
    return np.setdiff1d(np.arange(len(sums.theta)), list(fixed))


# --- convergence --------------------------------------------------------------------------------------------
# How the first step comes near the solution, and whether the last release lies near enough to it for intervals.
#
# Newton's method takes the mean of a target for a straight line in its predictor. From one outcome in two to one in
# twenty that line is far off: three of its steps do not arrive, and an interval around where they end holds nothing.
#
# **The leap.** At the start all records have the same predictor (slopes are 0), so the mean m is known there, and what
# the first release says of it is undone by m itself: with Newton's move e_j of an interval's mean predictor,
#
#     m(eta_j + leap_j) = m(eta_j) + m'(eta_j) e_j,
#
# and slopes are Newton's times m' at the start over m' there. Two standard deviations of noise are left between m and
# its limits. A leap of 1 or less is left to Newton's method.
#
# **What is left.** Around the last theta the equation is taken for a straight line; d is how far the solution is from
# there, A the slope, and T[d] the bend of A (:func:`~fedveil.statistics.inference.newton.bend`), c the share of it that
# the mean has there, |d log m' / d eta|. What the line misses moves the estimate by about
#
#     beta = (c / 2) A^-1 T[d] d.
#
# For d the distance of the estimate is taken, less what its noise explains of d d'. Intervals are shown where no
# |beta_j| is above three quarters of its standard error, the mean of z'd over records is at most .6, and its root mean
# square at most 1. For survival beta is in the estimate. docs/theory/inference.md has what was measured.


LONGEST_LAST: Final = 1.0
"""Largest root mean square of what is left of the records' predictors."""
LONGEST_TOGETHER: Final = 0.6
"""Largest mean of it (in an interval): of what is left in many directions the line misses little, of this all."""
MOST_BENT: Final = 0.75
"""Largest share of a standard error that the bend of the last equation may be."""
_LIMIT: Final = 12.0
_SHORT: Final = 1.0
_LEAST_SLOPE: Final = 1e-6


def next_theta(family: Family, releases: Sequence[Sums]) -> Float64[np.ndarray, " d"]:
    """Return where the next release is made: Newton's step, or the leap after the first one.

    A coefficient of an empty interval or category stays where it is.
    """
    movable = moving(releases[-1])
    if not (
        movable < releases[-1].leading
    ).any():  # no interval stands out of its noise: there is nothing to go by
        return releases[-1].theta.copy()
    own = restricted(releases, movable)
    target = leap(family, own[0]) if len(own) == 1 and family.curved else None
    at = releases[-1].theta.copy()
    at[movable] = step(own) if target is None else target
    return at


def leap(family: Family, sums: Sums) -> Float64[np.ndarray, " d"] | None:
    """Return the theta that the mean of the target says, where all records had one predictor; None where that is near.

    Args:
        family: whose mean it is.
        sums: the first release, at slopes of 0.
    """
    size = sums.leading
    slope, _ = solvable(sums.curvature, sums.curvature_sd)
    move, weight = np.linalg.solve(slope, sums.gradient), np.diag(slope)[:size]
    means = slope[:size] / weight[:, None]
    leaps, fallen = np.transpose(
        [
            _undone(family, at, newton, unsure)
            for at, newton, unsure in zip(sums.theta, means @ move, sums.gradient_sd / weight, strict=False)
        ]
    )
    if np.abs(leaps).max() <= _SHORT:
        return None
    effects = move[size:] * weight.sum() / (weight @ fallen)
    effects *= min(1.0, LONGEST_STEP / max(float(np.linalg.norm(effects)), 1e-300))
    theta = sums.theta.copy()
    theta[:size] += leaps - means[:, size:] @ effects
    theta[size:] += effects
    return theta


def has_converged(family: Family, releases: Sequence[Sums], estimate: Estimate) -> bool:
    """Return whether the last release lies near enough to the solution for intervals around the estimate to hold.

    Distances are those of the estimate, less what its noise explains of their squares.
    """
    last, slope = releases[-1], estimate.slope
    distance, uncertainty = estimate.theta - last.theta, covariance(estimate, last)
    weight = np.diag(slope)[: last.leading]
    remaining = float(distance @ slope @ distance) - float(np.trace(slope @ uncertainty.noise))
    together = np.abs(slope[: last.leading] @ distance) / weight
    if remaining > LONGEST_LAST**2 * float(weight.sum()) or together.max() > LONGEST_TOGETHER:
        return False
    if family.stopped or not family.curved:
        return True
    at, (values, vectors) = replace(last, curvature=slope), np.linalg.eigh(uncertainty.noise)
    turned = bend(at, distance) @ distance
    for value, vector in zip(values, vectors.T, strict=True):
        turned = turned - value * (bend(at, vector) @ vector)
    middle = float(slope[0] @ last.theta) / float(slope[0, 0])
    curved = abs(math.log(family.mean(middle + 0.5)[1] / family.mean(middle - 0.5)[1]))
    missed = curved / 2 * np.abs(np.linalg.solve(slope, turned))
    return bool((missed <= MOST_BENT * np.sqrt(np.diag(uncertainty.whole))).all())


def _undone(family: Family, predictor: float, newton: float, unsure: float) -> tuple[float, float]:
    """Return how far a predictor moves with the mean, and its slope there over that where it was."""
    mean, slope = family.mean(predictor)
    low, high = family.mean(predictor - _LIMIT)[0], family.mean(predictor + _LIMIT)[0]
    margin = 2 * unsure * slope
    target = min(max(mean + slope * newton, min(mean, low + margin)), max(mean, high - margin))
    to = float(brentq(lambda move: family.mean(predictor + move)[0] / target - 1, -_LIMIT, _LIMIT))
    return to, max(family.mean(predictor + to)[1] / slope, _LEAST_SLOPE)
