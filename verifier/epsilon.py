"""Bound the epsilon of ledger events from above, with arithmetic of its own (numpy alone).

Every number is an upper bound: rounding, quadrature, truncated tails, the FFT and aliasing have error terms that are
added. README.md has the mathematics and the assumptions about floating point. Notation: P and Q are the laws of a
release for two neighbours, l = ln dP/dQ is the privacy loss, delta(epsilon) = E_P[(1 - e^(epsilon - l))^+].
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]
U = 2.0**-53  # unit roundoff of float64
ADD_OR_REMOVE, REPLACE = "add-or-remove-one", "replace-one"
NODES, WEIGHTS = np.polynomial.legendre.leggauss(10)
QUADRATURE = 1e-21  # relative error of ten nodes on 1/32 standard deviation (README.md)
LEAST_SHIFT, MOST_SHIFT = 1e-8, 2000.0  # weaker releases count as LEAST_SHIFT, stronger ones have no bound
LEAST_RATE, LEAST_DELTA = 1e-12, 1e-250
MOST_CELLS, MOST_POINTS = 1 << 18, 1 << 22
MOST_LOG = 690.0  # its exponential is a float64 number
CLOSE = 5e-4  # refinement ends when it gains less than this part of epsilon


class RefusedError(Exception):
    """There is no bound."""


# --- events: JSON to counted releases --------------------------------------------------------------------------------
NOISE = {"noise_multiplier"}
FIELDS = {
    "gaussian": NOISE,
    "concentrated": NOISE,
    "laplace": NOISE,
    "mixture_of_gaussians": {*NOISE, "sensitivities", "probabilities"},
    "poisson_sampled": {"rate", "event"},
    "sampled_without_replacement": {"population", "sample", "event"},
    "composed": {"events"},
    "self_composed": {"count", "event"},
    "no_guarantee": {"reason"},
    "nearby": {"distance"},
    "grid": {"loss"},
}


def number(event: Mapping[str, Any], key: str, low: float, high: float, kind: Any = int | float) -> Any:
    """Return a number of an event in [low, high]: a float, or a whole number if ``kind`` is int."""
    value = event[key]
    if isinstance(value, bool) or not isinstance(value, kind) or not low <= value <= high:
        raise RefusedError(f"{event['type']}.{key} = {value!r}: must be a number from {low:g} to {high:g}")
    return value if kind is int else float(value)


def kind_of(event: Any) -> str:
    """Return the type of an event that has exactly the fields of its type."""
    kind = event.get("type") if isinstance(event, Mapping) else None
    if not isinstance(kind, str) or kind not in FIELDS or set(event) != FIELDS[kind] | {"type"}:
        raise RefusedError(f"no claim is made about the event {str(event)[:100]!r}")
    return kind


def expand(event: Any, count: int = 1) -> Counter[tuple[Any, ...]]:
    """Count the releases and costs in an event (:func:`release`); refuse what is unknown."""
    match kind_of(event):
        case "composed":
            return sum((expand(each, count) for each in event["events"]), Counter())
        case "self_composed":
            return expand(event["event"], count * number(event, "count", 1, 1e15, int))
    return Counter({release(event): count})


def release(event: Any) -> tuple[Any, ...]:
    """Return the key of a release, with the sampling rate q and the noise multiplier z, or of a cost.

    ("gaussian" or "concentrated", z), ("laplace", q, z), ("poisson", q, z), ("fixed", q, z), ("mixture", c, p, z);
    ("no_guarantee", reason), ("nearby", distance), ("grid", loss).
    """
    kind = event["type"]
    if kind in ("no_guarantee", "nearby", "grid"):
        (key,) = FIELDS[kind]
        most = {"nearby": 1.0, "grid": 1e300}
        return (kind, number(event, key, 0, most[kind]) if kind in most else str(event[key]))
    if kind in ("poisson_sampled", "sampled_without_replacement"):
        if kind == "poisson_sampled":
            rate, sampled = number(event, "rate", 0, 1), {"gaussian": "poisson", "laplace": "laplace"}
        else:
            population = number(event, "population", 1, 1e15, int)
            rate, sampled = number(event, "sample", 1, population, int) / population, {"gaussian": "fixed"}
        if kind_of(event["event"]) not in sampled:
            raise RefusedError(f"no claim is made about such a sample of a {event['event']['type']} event")
        inner = release(event["event"])
        return (
            inner
            if rate == 1
            else (sampled[inner[0]], min(max(rate, LEAST_RATE) * (1 + 4 * U), 1.0), inner[-1])
        )
    z = number(event, "noise_multiplier", 1e-100, 1e100)
    if kind != "mixture_of_gaussians":
        return ("laplace", 1.0, z) if kind == "laplace" else (kind, z)
    shifts, weights = (
        tuple(number({"type": kind, key: value}, key, 0, most) for value in event[key])
        for key, most in (("sensitivities", 1e100), ("probabilities", 1.0))
    )
    if len(shifts) != len(weights) or abs(math.fsum(weights) - 1) > 1e-11 * max(10, len(weights)):
        raise RefusedError(
            "mixture_of_gaussians: one probability per sensitivity is needed, and they sum to 1"
        )
    return ("mixture", shifts, weights, z)


# --- loss of one release ---------------------------------------------------------------------------------------------
@dataclass
class Atoms:
    """Measure that dominates a release: ``masses`` at finite ``losses``, and mass ``lost`` at loss infinity.

    sum_i masses_i (1 - e^(epsilon - losses_i))^+ + lost >= delta(epsilon) for every real epsilon.
    """

    losses: Array
    masses: Array
    lost: float


def log_ratio(weights: Array, shifts: Array, x: Array) -> tuple[Array, Array]:
    """Return ln(sum_i w_i N(x; c_i, 1) / N(x; 0, 1)) for weights that sum to 1, and a bound on its absolute error."""
    if len(shifts) == 1:  # of weight 1
        term = shifts[0] * (x - shifts[0] / 2)
        return term, 16 * U * (2 + np.abs(term))
    components = list(zip(weights, shifts, strict=True))
    biggest, most = np.full_like(x, -np.inf), np.zeros_like(x)
    total, size, scaled = np.zeros_like(x), np.zeros_like(x), np.full_like(x, 1e-300)
    for weight, shift in components:
        term = shift * (x - shift / 2)
        moved = weight * np.expm1(np.minimum(term, MOST_LOG))
        total, size = total + moved, size + np.abs(moved)
        biggest, most = np.maximum(biggest, term), np.maximum(most, np.abs(term))
    for weight, shift in components:
        scaled += weight * np.exp(shift * (x - shift / 2) - biggest)
    # ln(1 + sum w (e^a - 1)) keeps relative precision near 0; elsewhere the logarithm of the sum does.
    near = (total > -0.5) & (total < 1e3)
    work, total = 16 * U * (len(shifts) + 1 + most), np.where(near, total, 0.0)
    return np.where(near, np.log1p(total), biggest + np.log(scaled)), np.where(
        near, work * size / (1 + total), work
    )


def split_cells(mass: Array, loss: Array, at: Array, error: Array) -> Array:
    """Move the mass of every cell to the losses at its ends, keeping its masses under P and Q; return masses at ends.

    Mass m at loss l becomes m w at the upper end b and m (1 - w) at the lower end a, w = (1 - e^(a-l)) / (1 - e^(a-b)).
    This raises every delta(epsilon), because (1 - e^(epsilon - l))^+ is convex in e^-l. Shapes: mass and loss (cells,
    nodes); at, the rising losses at the ends, (cells + 1,); error, of a difference of losses, (cells,).
    """
    total, width = mass.sum(axis=1), np.diff(at)
    spread = math.sqrt(float(np.average((loss - np.average(loss, weights=mass)) ** 2, weights=mass)))
    wide = width > 1e3 * error + 1e-5 * spread  # else all mass goes to the upper end, at a loss of no weight
    up = (mass * -np.expm1(-np.maximum(loss - at[:-1, None], 0.0))).sum(axis=1)
    share = np.where(wide, up / np.maximum(total, 1e-300) / -np.expm1(-np.where(wide, width, 1.0)), 1.0)
    slack = np.where(wide, 4 * error / np.where(wide, np.minimum(width, 1.0), 1.0), 0.0)
    masses = np.append(0.0, total * np.minimum(share + slack, 1.0))
    masses[:-1] += total * np.where(wide, np.clip(1 - share + slack, 0.0, 1.0), 0.0)
    return masses


def cut(low: float, high: float, step: float) -> tuple[Array, Array, Array]:
    """Cut an interval into cells; return ends, and nodes and weights of the quadrature of every cell."""
    cells = max(256, math.ceil((high - low) / step))
    if not cells <= MOST_CELLS:
        raise RefusedError("the noise is next to none, or the cells too many")
    ends = np.linspace(low, high, cells + 1)
    half = np.diff(ends)[:, None] / 2
    return ends, ends[:-1, None] + half * (NODES + 1), half * WEIGHTS


def mixture_atoms(p: tuple[Array, Array], q: tuple[Array, Array], reach: float, step: float) -> Atoms:
    """Return atoms for P = sum_i p_i N(a_i, 1) against Q = sum_i q_i N(b_i, 1), a_i >= 0 >= b_i: the loss rises with x.

    The mass beyond ``reach`` above is lost; the mass beyond ``reach`` below stays at the lowest loss.
    """
    ends, x, weights = cut(float(p[1].min()) - reach, float(p[1].max()) + reach, step)
    (above, e1), (below, e2) = log_ratio(*p, x), log_ratio(*q, x)
    (top, e3), (bottom, e4) = log_ratio(*p, ends), log_ratio(*q, ends)
    inflation = 1 + 64 * U * (2 + x * x + np.abs(above)) + 4 * e1
    mass = weights * np.exp(np.maximum(above - x * x / 2 - math.log(2 * math.pi) / 2, -MOST_LOG)) * inflation
    at, e = np.maximum.accumulate(top - bottom), e3 + e4
    error = 2 * np.maximum((e1 + e2).max(axis=1), np.maximum(e[1:], e[:-1])) + 8 * U * np.diff(at)
    masses = split_cells(mass, above - below, at, error + 2 * QUADRATURE)
    # Twice a normal tail: the rest covers the quadrature of components that are further away than ``reach``.
    tail = math.exp(-reach * reach / 2)
    masses[0] += tail
    return Atoms(at + e, masses, tail)


def laplace_atoms(rate: float, scale: float, step: float, *, backward: bool) -> Atoms:
    """Return atoms for P = (1 - q) Lap(0, b) + q Lap(1, b) against Q = Lap(0, b); ``backward``: for Q against P.

    The unsampled loss a(x) is -1/b below 0, (2x - 1) / b on [0, 1] and 1/b above; the loss is ln(1 + q (e^a - 1)).
    """
    ends, x, weights = cut(0.0, 1.0, step * min(scale, 1.0))

    def loss(x: Array) -> Array:
        a = (2 * x - 1) / scale
        small = np.log1p(rate * np.expm1(np.minimum(a, 600.0)))
        return np.where(a < 600, small, a + np.log(rate + (1 - rate) * np.exp(-np.maximum(a, 600.0))))

    def density(x: Array) -> Array:
        one, two = (np.exp(-np.minimum(far / scale, MOST_LOG)) for far in (x, 1 - x))
        return (one if backward else (1 - rate) * one + rate * two) * (1 + 1e-12) / 2

    at, inner, mass, beyond = loss(ends), loss(x), weights * density(x) / scale, density(np.array([0.0, 1.0]))
    if backward:
        at, inner, mass, beyond = -at[::-1], -inner[::-1], mass[::-1], beyond[::-1]
    error = 64 * U * (np.maximum(np.abs(at[1:]), np.abs(at[:-1])) + np.diff(at)) + 2 * QUADRATURE
    masses = split_cells(mass, inner, at, error)
    masses[[0, -1]] += beyond
    return Atoms(at + 64 * U * np.abs(at), masses, 0.0)


def symmetric_atoms(one: Atoms) -> Atoms:
    """Return the symmetric measure with the delta of ``one`` for epsilon >= 0: e^-l m(l) at -l, and the rest at 0."""
    excess = max(0.0, float(one.masses.sum()) + one.lost - 1)  # everything that was rounded up
    losses, masses = one.losses[one.losses > 0], one.masses[one.losses > 0]
    back = masses * np.exp(-np.minimum(losses, MOST_LOG))
    rest = max(0.0, 1 - float(masses.sum() + back.sum())) + 2 * excess + one.lost + 1e-13
    return Atoms(np.hstack((-losses[::-1], 0.0, losses)), np.hstack((back[::-1], rest, masses)), one.lost)


@lru_cache(maxsize=64)
def atoms_of(key: tuple[Any, ...], adjacency: str, backward: bool, reach: float, step: float) -> Atoms:
    """Return atoms of one release; ``backward``: Q has the unit, else P. Under replace-one every pair is symmetric."""
    kind, replace, clear = key[0], adjacency == REPLACE, (np.ones(1), np.zeros(1))
    shift = max((2.0 if replace and kind != "poisson" else 1.0) / key[-1], LEAST_SHIFT) * (1 + 4 * U)
    if kind == "laplace" and not (replace and key[1] < 1):
        return laplace_atoms(key[1], 1 / shift, step, backward=backward)
    if kind == "gaussian":
        p, q = (np.ones(1), np.array([shift])), clear
    elif kind == "mixture" and not replace:
        p, q = mixture_weights(key), clear
    elif kind == "poisson" or (kind == "fixed" and replace):
        p, q = (np.array([1 - key[1], key[1]]), np.array([0.0, shift])), clear
        if kind == "poisson" and replace:
            q = (p[0], -p[1])
    else:
        raise RefusedError(f"no claim is made about {kind} releases of this sampling under {adjacency}")
    if p[1].max() > MOST_SHIFT:
        raise RefusedError("the noise is next to none")
    if backward:
        p, q = (q[0], -q[1]), (p[0], -p[1])
    found = mixture_atoms(p, q, reach, step)
    return symmetric_atoms(found) if kind == "fixed" else found


def mixture_weights(key: tuple[Any, ...]) -> tuple[Array, Array]:
    """Return weights that sum to 1, and shifts; all but the smallest shift's weight are rounded up: this costs more."""
    order = np.argsort(key[1], kind="stable")
    shifts, weights = np.array(key[1])[order] / key[3] * (1 + 4 * U), np.array(key[2])[order]
    weights[1:] *= 1 + 1e-11 * max(10, len(weights))
    weights[0] = max(0.0, 1 - float(weights[1:].sum())) if len(weights) > 1 else 1.0
    shifts[-1] = max(shifts[-1], LEAST_SHIFT)
    kept = weights > 0
    return weights[kept] / max(1.0, float(weights.sum())), shifts[kept]


# --- composition -----------------------------------------------------------------------------------------------------
@dataclass
class Sum:
    """Sum of independent losses: atoms with counts. ln M(t) = sum_i n_i ln sum_j masses_ij e^(t losses_ij)."""

    parts: list[tuple[int, Atoms]]

    def tilted(self, t: float) -> tuple[float, float, list[Array]]:
        """Return ln M(t) rounded up, and standard deviation and laws of the parts under masses e^(t loss) / M(t)."""
        log_moment, variance, laws = 0.0, 0.0, []
        for count, one in self.parts:
            logs = np.log(np.maximum(one.masses, 1e-300))
            exponents = t * one.losses + logs
            top = float(exponents.max())
            law = np.exp(exponents - top)
            total = float(law.sum())
            law /= total
            centre = float((law * one.losses).sum())
            seen = law > 1e-30
            rounding = 16 * U * float((np.abs(t * one.losses[seen]) + np.abs(logs[seen])).max() + 1)
            log_moment += count * (top + math.log(total) + rounding)
            variance += count * float((law * (one.losses - centre) ** 2).sum())
            laws.append(law)
        return log_moment, math.sqrt(variance), laws


def renyi(losses: Sum, t: float) -> float:
    """Return ln M(t) t^t / (1 + t)^(1 + t), so that delta(epsilon) <= e^(this - t epsilon)."""
    return losses.tilted(t)[0] + t * math.log(t) - (1 + t) * math.log1p(t)


def best_tilt(losses: Sum, delta: float) -> float:
    """Return t > 0 that nearly minimises the epsilon of :func:`renyi` at delta."""

    def bound(log_t: float) -> float:
        return (renyi(losses, math.exp(log_t)) - math.log(delta)) / math.exp(log_t)

    scale = -math.log(max(losses.tilted(0.0)[1], 1e-200))
    tried = np.linspace(scale - 4, scale + 9, 27)
    best = int(np.argmin([bound(each) for each in tried]))
    low, high = tried[max(best - 1, 0)], tried[min(best + 1, 26)]
    for _ in range(6):
        one, two = low + (high - low) * 0.382, low + (high - low) * 0.618
        low, high = (low, two) if bound(one) < bound(two) else (one, high)
    return math.exp((low + high) / 2)


def on_grid(one: Atoms, h: float) -> Atoms:
    """Move every atom to the two nearest multiples of h, as :func:`split_cells` moves the mass of cells."""
    below = np.floor(one.losses / h)
    k = (below - below.min()).astype(np.int64)
    slack = 16 * U * (1 + np.abs(one.losses) / h)
    share = np.minimum(np.expm1(-np.clip(one.losses - below * h, 0.0, h)) / math.expm1(-h) + slack, 1.0)
    masses = np.bincount(k, one.masses * np.minimum(1 - share + 2 * slack, 1.0), k.max() + 2)
    masses += np.bincount(k + 1, one.masses * share, k.max() + 2)
    kept = masses > 0
    return Atoms(
        (np.flatnonzero(kept) + below.min()) * h, np.asarray(masses[kept] * (1 + 1e-13), float), one.lost
    )


def power(base: Any, exponent: int) -> Any:
    """Return base^exponent by repeated squaring: a relative error of at most 4 exponent U."""
    half = power(base * base, exponent // 2) if exponent > 1 else 1.0
    return half * base if exponent % 2 else half


def compose(raw: Sum, t: float, fine: float, most: float) -> tuple[Callable[[float], float], float, float]:
    """Compose by one FFT of the tilted laws, on a grid of about ``fine`` standard deviations of one release.

    The window is [low, top). Chernoff's bound at other tilts gives the mass above it, which is added to delta. The FFT
    folds the mass below into the window, which only adds. With tilted laws x_i of counts n_i, N points and a relative
    error rho of the FFT, the l1 error is at most sqrt(N) (rho (sum_i n_i |x_i|_2 + 2) + 4 n U).

    Returns:
        An upper bound on delta(epsilon), valid from an epsilon on; this epsilon; and a starting point for the search.
    """
    n = sum(count for count, _ in raw.parts)
    # Rounding every loss up by h raises epsilon, which is below ``most``, by n h: a grid finer than that is of no use.
    spread = raw.tilted(t)[1] / math.sqrt(n)
    h = fine * max(min(spread, most / 20 if most > 0 else spread / 50), 1e-3 * most / n)
    h = max(h, *(float(np.ptp(one.losses)) / MOST_POINTS for _, one in raw.parts), 1e-290)
    gridded = Sum([(count, on_grid(one, h)) for count, one in raw.parts])
    log_moment, spread, laws = gridded.tilted(t)
    tilts = [2.0**j / max(spread, h) for j in range(-2, 7)]
    above = [(t + s, gridded.tilted(t + s)[0]) for s in tilts]
    high = min((moment - log_moment + 18) / (s - t) for s, moment in above)
    low = max((log_moment - gridded.tilted(t - s)[0] - 18) / s for s in tilts)
    points = 1 << max(4, math.ceil(math.log2(max(high - low, h) / h + 3)))
    if points > MOST_POINTS:
        return compose(raw, t, 2 * fine, most)
    first = math.floor(low / h)
    rho, norms, product = 16 * math.log2(points) * U, 0.0, np.ones(points // 2 + 1, complex)
    for (count, one), law in zip(gridded.parts, laws, strict=True):
        folded = np.bincount(np.rint(one.losses / h).astype(np.int64) % points, law, points)
        norms += count * float(np.linalg.norm(folded))
        product *= power(np.fft.rfft(folded), count)
    composed = np.maximum(np.roll(np.fft.irfft(product, points), -(first % points)), 0.0)
    error = (
        math.sqrt(points) * (rho * (norms + 2) + 4 * n * U) * math.exp(n * rho * math.sqrt(points)) + 1e-280
    )
    beyond = math.exp(min(0.0, *(moment - s * (first + points) * h for s, moment in above)))
    extra = (math.fsum(count * one.lost for count, one in raw.parts) + beyond) * (1 + 1e-12)
    losses = (np.arange(points) + first) * h
    losses += 4 * U * np.abs(losses)

    def delta(epsilon: float) -> float:
        start = int(np.searchsorted(losses, epsilon))
        over, exponent = losses[start:] - epsilon, log_moment - t * epsilon
        inner = float((composed[start:] * np.exp(-t * over) * -np.expm1(-over)).sum())
        return math.exp(exponent) * (inner * (1 + 1e-9) + error) + extra if exponent < MOST_LOG else math.inf

    return delta, float(losses[0]), log_moment / t


# --- epsilon ---------------------------------------------------------------------------------------------------------
def apart(epsilon: float, distance: float) -> float:
    """Return (1 + e^epsilon) d, the delta of a statistical distance d."""
    return (1 + math.exp(min(epsilon, MOST_LOG))) * distance if distance else 0.0


def smallest(
    delta: Callable[[float], float], target: float, distance: float, low: float, high: float
) -> float:
    """Return epsilon >= low with delta(epsilon) + (1 + e^epsilon) d <= target; infinity if there is none.

    ``delta`` falls and the second term rises with epsilon, so epsilon rises to the least solution from below.
    """
    found = low
    while (left := target - apart(found, distance)) > 0 and delta(found) > left:
        below, above = found, max(found, high) + 1e-9
        while delta(above) > left and above < 1e9:
            below, above = above, 2 * above
        if above >= 1e9:
            return math.inf
        while above - below > 1e-5 * above:
            middle = (below + above) / 2
            below, above = (middle, above) if delta(middle) > left else (below, middle)
        found = above
    return found if left > 0 else math.inf


def composed_epsilon(raw: Callable[[float], Sum], distance: float, target: float) -> float:
    """Refine grids and cells until epsilon of one direction hardly falls; every step is a bound."""
    best, step, fine, t = math.inf, 1 / 64, 0.2, 0.0
    for _ in range(7):
        losses = raw(step)
        alone = sum(
            n * (one.lost + float((one.masses * -np.expm1(-np.maximum(one.losses, 0))).sum()))
            for n, one in losses.parts
        )
        if alone * (1 + 1e-9) + apart(0.0, distance) <= target:
            return 0.0
        t = t or best_tilt(losses, target)  # any tilt gives a bound: finer cells do not need another
        for _ in range(40):
            most = min((renyi(losses, t) - math.log(target)) / t, 4 * best)
            shown, least, guess = compose(losses, t, fine, most)
            start = max(0.0, least)
            if start == 0 or shown(start) + apart(start, distance) > target:
                break
            t /= 2  # epsilon lies below the window: tilt less
        found = smallest(shown, target, distance, start, guess - math.log(target) / t)
        if found == 0 or (found > best * (1 - CLOSE) and fine <= 0.05):
            return min(found, best)
        best, step, fine = min(found, best), step / 2, fine / 2
    return best


def renyi_epsilon(losses: Sum, rho: float, distance: float, target: float) -> float:
    """Return epsilon by Renyi divergences, for releases that are rho-zCDP beside others."""
    tilts = np.exp(np.linspace(math.log(1e-3), math.log(1e5), 400))
    moments = np.array([renyi(losses, float(t)) for t in tilts]) + rho * tilts * (tilts + 1)
    lost = math.fsum(count * one.lost for count, one in losses.parts)

    def delta(epsilon: float) -> float:
        return math.exp(min(float((moments - tilts * epsilon).min()), 1.0)) + lost

    return smallest(delta, target, distance, 0.0, 1.0)


_SUMS = ("gaussian", "concentrated", "nearby", "grid")  # events that add up to one number


def epsilon_of(event: Any, delta: float, adjacency: str) -> float:
    """Return an upper bound on the epsilon of an event (JSON) at ``delta``; infinite if nothing is guaranteed."""
    if adjacency not in (ADD_OR_REMOVE, REPLACE) or not LEAST_DELTA <= delta < 1:
        raise RefusedError(f"no claim is made about adjacency {adjacency!r} at delta {delta!r}")
    factor, rest, sums = 2.0 if adjacency == REPLACE else 1.0, expand(event), dict.fromkeys(_SUMS, 0.0)
    for (kind, *_, value), count in list(rest.items()):
        if kind == "no_guarantee":
            return math.inf
        if kind in _SUMS:
            del rest[(kind, value)]
            sums[kind] += (
                count * (value if kind in ("nearby", "grid") else (factor / value) ** 2) * (1 + 1e-14)
            )
    grid, distance, rho, mu = (
        sums["grid"],
        sums["nearby"],
        sums["concentrated"] / 2,
        math.sqrt(sums["gaussian"]),
    )
    target = delta * math.exp(-min(grid, MOST_LOG)) * (1 - 1e-14)
    if target < LEAST_DELTA or apart(0.0, distance) > target:
        return math.inf
    if mu > 200 and not (rest or rho or distance):
        # P(loss > mu^2 / 2 + mu x) < e^(-x^2 / 2) / 2 is within 1 % here.
        return mu * mu / 2 + mu * math.sqrt(2 * math.log(1 / target)) + grid
    if mu:
        rest[("gaussian", factor / mu)] = 1  # Gaussian releases compose to one
    # A whole number, so that other counts and other deltas find the same atoms again.
    reach = math.ceil(math.sqrt(2 * math.log(1e5 * (sum(rest.values()) + 1) / target)))
    found = 0.0
    symmetric = all(key[0] == "gaussian" or key[:2] == ("laplace", 1.0) for key in rest)
    for backward in (False,) if symmetric or adjacency == REPLACE else (False, True):

        def raw(step: float, backward: bool = backward) -> Sum:
            return Sum([(n, atoms_of(key, adjacency, backward, reach, step)) for key, n in rest.items()])

        if rho:
            found = max(found, renyi_epsilon(raw(1 / 64), rho, distance, target))
        elif rest:
            found = max(found, composed_epsilon(raw, distance, target))
    return (found + grid) * (1 + 1e-12)
