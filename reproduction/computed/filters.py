"""Filters of noisy updates over rounds, and Laplacian smoothing over coordinates, beside an average of the models.

A softmax regression; user u's update Delta_u is clipped to C, and the released mean of a round is

    y_t = sum_u clip(Delta_u(theta_t), C) / U + nu xi_t,   nu = z C / U,   theta_{t+1} = theta_t + eta F(y_1 .. y_t).

Filters F read released values alone. DiSK takes the updates at theta_t + gamma (theta_t - theta_{t-1}) with
gamma = (1 - kappa) / kappa, which makes its two messages one. All filters of a seed see the same noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

import numpy as np
import torch
from jaxtyping import Bool, Float64, Int64

from fedveil.data.allocation import Allocation
from fedveil.data.catalogue import load
from fedveil.privacy.accountant import gaussian_epsilon
from fedveil.training.server.denoise import smooth
from reproduction.results import Values

_ROUNDS, _CLIP, _STEPS, _RATE, _DELTA = 30, 1.0, 5, 1.0, 1e-5
_EPSILON: Final = 4.87
_BETA: Final = 0.8

Vector = Float64[np.ndarray, " d"]


@dataclass(frozen=True, kw_only=True)
class Images:
    """Images of users, and test images.

    Attributes:
        features: (users, longest, p) pixels with a constant; zeros beyond a user's images.
        labels: (users, longest, classes) one-hot labels; zeros beyond a user's images.
        test: (m, p) pixels with a constant.
        truth: (m,) labels.
    """

    features: Float64[np.ndarray, "users longest p"]
    labels: Float64[np.ndarray, "users longest classes"]
    test: Float64[np.ndarray, "m p"]
    truth: Int64[np.ndarray, " m"]

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the coefficients, (classes, p)."""
        return self.labels.shape[2], self.features.shape[2]

    def mean_update(self, model: Vector) -> Vector:
        """Return the mean of the users' clipped updates: full-batch steps from ``model``."""
        local = np.repeat(model.reshape(1, *self.shape), len(self.features), axis=0)
        count = np.maximum(1.0, self.labels.sum(axis=(1, 2)))[:, None, None]
        for _ in range(_STEPS):
            logits = self.features @ local.transpose(0, 2, 1)
            odds = np.exp(logits - logits.max(axis=2, keepdims=True))
            error = odds / odds.sum(axis=2, keepdims=True) - self.labels
            error *= self.labels.sum(axis=2, keepdims=True)
            local -= _RATE * (error / count).transpose(0, 2, 1) @ self.features
        moved = local.reshape(len(local), -1) - model
        lengths = np.linalg.norm(moved, axis=1)
        mean: Vector = (moved / np.maximum(1.0, lengths / _CLIP)[:, None]).mean(axis=0)
        return mean

    def accuracy(self, model: Vector) -> float:
        """Return the share of test images whose class is right."""
        return float(((self.test @ model.reshape(self.shape).T).argmax(axis=1) == self.truth).mean())


@dataclass
class Filter:
    """State of a filter of the released means.

    Attributes:
        estimate: returns the step's direction from the filter and y_t.
        look_ahead: gamma, how far along the last step the updates are taken.
        shape: shape of the coefficients.
        noise: nu.
        mean: filtered mean of the rounds before; None before the first.
        variance, drift: of the scalar Kalman filter, per coordinate.
    """

    estimate: Callable[[Filter, Vector], Vector]
    look_ahead: float = 0.0
    shape: tuple[int, int] = (1, 1)
    noise: float = 0.0
    mean: Vector | None = None
    variance: float = 0.0
    drift: float = field(default=0.0)


def momentum(kappa: float) -> Callable[[Filter, Vector], Vector]:
    """Return g_t = (1 - kappa) g_{t-1} + kappa y_t: a Kalman filter with the constant gain kappa."""

    def estimate(state: Filter, y: Vector) -> Vector:
        state.mean = y if state.mean is None else (1 - kappa) * state.mean + kappa * y
        return state.mean

    return estimate


def kalman(state: Filter, y: Vector) -> Vector:
    """Return the scalar Kalman estimate of a random walk; its drift is estimated from released values, nu is known."""
    before = np.zeros_like(y) if state.mean is None else state.mean
    spread = max(float(((y - before) ** 2).mean()) - state.noise**2 - state.variance, 0.0)
    state.drift = spread if state.mean is None else 0.7 * state.drift + 0.3 * spread
    ahead = state.variance + state.drift
    gain = ahead / (ahead + state.noise**2)
    state.variance = (1 - gain) * ahead
    state.mean = before + gain * (y - before)
    return state.mean


def low_pass(share: float) -> Callable[[Filter, Vector], Vector]:
    """Return a mask of the lowest frequencies of the coefficients' cycle."""

    def estimate(state: Filter, y: Vector) -> Vector:
        spectrum = np.fft.rfft(y)
        spectrum[math.ceil(share * len(spectrum)) :] = 0
        kept: Vector = np.fft.irfft(spectrum, n=len(y))
        return kept

    return estimate


def laplacian(sigma: float) -> Callable[[Filter, Vector], Vector]:
    """Return Laplacian smoothing over coordinates."""
    return lambda state, y: smooth(torch.from_numpy(y), sigma).numpy()


FILTERS: Final[dict[str, Callable[[], Filter]]] = {
    "no filter": lambda: Filter(lambda state, y: y),
    "momentum, kappa .4": lambda: Filter(momentum(0.4)),
    "momentum, kappa .7": lambda: Filter(momentum(0.7)),
    "DiSK, kappa .4": lambda: Filter(momentum(0.4), look_ahead=1.5),
    "DiSK, kappa .7": lambda: Filter(momentum(0.7), look_ahead=3 / 7),
    "Kalman gain from nu": lambda: Filter(kalman),
    "FFT, half of the frequencies": lambda: Filter(low_pass(0.5)),
    "Laplacian, sigma .25": lambda: Filter(laplacian(0.25)),
}


def filters_over_time(seed: int) -> Iterator[tuple[str, Values]]:
    """Digits of 100 users: every filter with an exponential average of the models, and the last model without."""
    yield from _played("digits", _digits(seed), seed, tuple(FILTERS))


def smoothing_threshold(seed: int) -> Iterator[tuple[str, Values]]:
    """Smoothing between ratios .2 and .5 on images that did not set the rule's threshold of .5."""
    names = ("no filter", "Laplacian, sigma .25")
    for data in ("svhn_subset", "imagenette_subset"):
        for users in (100, 200):
            yield from _played(f"{data}, {users} users", _edges(data, users, seed), seed, names)


def _played(title: str, images: Images, seed: int, names: tuple[str, ...]) -> Iterator[tuple[str, Values]]:
    found, ratio = {}, 0.0
    for name in names:
        found[name], ratio = play(images, FILTERS[name](), seed)
    plain = found["no filter"][1]
    for name, (last, average) in found.items():
        yield (
            f"{title}: {name}",
            {"gain": average - plain, "accuracy": average, "gain, last model": last - plain, "rho": ratio},
        )


def play(images: Images, state: Filter, seed: int) -> tuple[tuple[float, float], float]:
    """Return the accuracies of the last and of the averaged model, and rho = sqrt(d / T) z / U."""
    users, size = len(images.features), math.prod(images.shape)
    multiplier = _least_noise()
    ratio = math.sqrt(size / _ROUNDS) * multiplier / users
    rate, state.noise, state.shape = min(3.0, 0.25 / ratio), multiplier * _CLIP / users, images.shape
    noise = np.random.default_rng((seed, 1))
    model = before = average = np.zeros(size)
    for number in range(1, _ROUNDS + 1):
        y = images.mean_update(model + state.look_ahead * (model - before))
        direction = state.estimate(state, y + state.noise * noise.standard_normal(size))
        before, model = model, model + rate * direction
        average = average + max(1 / number, 1 - _BETA) * (model - average)
    return (images.accuracy(model), images.accuracy(average)), ratio


def _least_noise() -> float:
    """Return z with which T Gaussian releases cost the target epsilon."""
    low, high = 0.1, 100.0
    for _ in range(60):
        middle = (low + high) / 2
        enough = gaussian_epsilon(math.sqrt(_ROUNDS) / middle, _DELTA) <= _EPSILON
        low, high = (low, middle) if enough else (middle, high)
    return high


# --- data ---------------------------------------------------------------------------------------------------


def _digits(seed: int) -> Images:
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    return _dealt(pixels / 16, labels.astype(np.int64), 100, 360, seed)


def _edges(name: str, users: int, seed: int) -> Images:
    pixels, labels = _edge_maps(name)
    return _dealt(pixels, labels, users, len(labels) // 3, seed)


@lru_cache
def _edge_maps(name: str) -> tuple[Float64[np.ndarray, "n 256"], Int64[np.ndarray, " n"]]:
    """Return edge maps of grey images, of which pixels alone teach a linear model little.

    Slopes to the left, right, top and bottom are averaged over 8 x 8 cells, and scaled by channel and cell.
    """
    train = load(name, allocation=Allocation(law="uniform"), n_users=100, n_silos=5).train
    grey = np.asarray(train.features, dtype=np.float64)[:6000].mean(axis=1)
    down, right = np.gradient(grey, axis=(1, 2))
    maps = np.stack([np.maximum(0, one) for one in (down, -down, right, -right)], axis=1)
    side = maps.shape[-1] // 8
    cells = maps.reshape(len(maps), 4, 8, side, 8, side).mean(axis=(3, 5)).reshape(len(maps), -1)
    labels = np.asarray(train.targets, dtype=np.int64).reshape(-1)[:6000]
    return (cells - cells.mean(axis=0)) / (16 * cells.std(axis=0)), labels


def _dealt(
    pixels: Float64[np.ndarray, "n p"], labels: Int64[np.ndarray, " n"], users: int, tests: int, seed: int
) -> Images:
    """Deal shuffled images to users at random, keeping some for tests."""
    drawn = np.random.default_rng((seed, 0))
    order = drawn.permutation(len(pixels))
    pixels = np.append(pixels[order], np.full((len(pixels), 1), 0.25), axis=1)
    labels = labels[order]
    owner = drawn.integers(users, size=len(pixels) - tests)
    held: list[Bool[np.ndarray, " n"]] = [np.flatnonzero(owner == user) + tests for user in range(users)]
    longest, classes = max(map(len, held)), int(labels.max()) + 1
    features = np.zeros((users, longest, pixels.shape[1]))
    targets = np.zeros((users, longest, classes))
    for user, mine in enumerate(held):
        features[user, : len(mine)] = pixels[mine]
        targets[user, np.arange(len(mine)), labels[mine]] = 1
    return Images(features=features, labels=targets, test=pixels[:tests], truth=labels[:tests])
