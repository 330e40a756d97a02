"""The spectrum of the mean update of DP-Fed-LS's Figure 1, and the two paths of its Figure S14."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from fedveil.run.config.experiment import Experiment, parse, parse_assignment
from fedveil.run.config.study import Selection, study_documents
from fedveil.run.folder.run_folder import Row, RunFolder
from fedveil.run.loop import NullObserver
from fedveil.run.setup import prepare
from fedveil.run.training_run import run
from fedveil.training.server.denoise import smooth, spectrum
from reproduction.results import Values

_ROUNDS: Final = (1, 5, 20)
_LOW: Final = 16
"""The lowest 1/16 of the frequencies is where the page looks for the signal."""


@dataclass
class _Updates(NullObserver):
    """Keeps by how much the model moved in the rounds that are shown."""

    moved: dict[int, Float[Tensor, " d"]] = field(default_factory=dict)
    _last: Float[Tensor, " d"] | None = None

    def on_run_start(self, folder: Path, experiment: Experiment, done: int) -> None:
        """Note where the run is; its initial model is not there yet."""
        self._folder = RunFolder.open(folder)[0]

    def training(self, round_number: int, done: int, total: int) -> None:
        """Look at the initial model."""
        if self._last is None:
            self._last = self._model()

    def on_round_end(self, row: Row) -> None:
        """Look at the model after a round."""
        model = self._model()
        assert self._last is not None, "every round trains"
        if row["round"] in _ROUNDS:
            self.moved[row["round"]] = model - self._last
        self._last = model

    def _model(self) -> Float[Tensor, " d"]:
        checkpoint = self._folder.read_checkpoint()
        assert checkpoint is not None, "round 0 is written before the first one trains"
        return checkpoint.model


def figure_1(seed: int) -> Iterator[tuple[str, Values]]:
    """Slopes of the spectra of the mean update without noise, at two layers, and of noise alone.

    The slope is that of the least-squares line through the logarithms of the bands' magnitudes and frequencies: zero is
    flat, as noise is, and -s is a fall like frequency^-s.
    """
    laid_over = (parse_assignment("method.noise_multiplier=0"), parse_assignment("method.clip=1000.0"))
    chosen = Selection(
        scenarios=("network-uniform",),
        variants=("sigma0",),
        overrides=(*laid_over, {"seed": seed, "rounds": max(_ROUNDS)}),
    )
    (document,) = study_documents("denoisers-mnist", chosen)
    prepared, updates = prepare(parse(document, "figure 1")), _Updates()
    with tempfile.TemporaryDirectory() as folder:
        run(prepared, Path(folder), updates)
    kernels = {
        name: tuple(tensor.shape)
        for name, tensor in prepared.task.layout.unflatten(updates.moved[1]).items()
        if tensor.ndim > 1
    }
    shown = {
        "first convolution": next(name for name, shape in kernels.items() if len(shape) == 4),
        "first dense layer": next(name for name, shape in kernels.items() if len(shape) == 2),
    }
    for said, name in shown.items():
        for number, moved in updates.moved.items():
            yield f"{said}, round {number}", _falls(prepared.task.layout.unflatten(moved)[name].flatten())
        drawn = np.random.default_rng(seed).standard_normal(math.prod(kernels[name]))
        yield f"{said}, Gaussian noise", _falls(torch.from_numpy(drawn))


def _falls(vector: Float[Tensor, " d"]) -> Values:
    """Return the slope of a vector's spectrum, and the share of its square that lies at the lowest frequencies."""
    found = spectrum(vector)
    slope, _ = np.polyfit(np.log(found.frequencies), np.log(found.magnitudes), 1)
    power = torch.fft.rfft(vector.double()).abs().square()[1:]
    low = power[: math.ceil(len(power) / _LOW)].sum() / power.sum()
    return {"slope": float(slope), "lowest sixteenth": float(low)}


def figure_s14(seed: int) -> Iterator[tuple[str, Values]]:
    """Length of the path of a linear classifier in the plane, over 100 noisy steps, plain and smoothed.

    On two coordinates smoothing leaves the mean and divides the difference by 1 + 4 sigma; the classes lie along the
    mean, at (-1, -1) and (1, 1), so all that the difference holds is noise.
    """
    drawn = np.random.default_rng(seed)
    labels = np.repeat([1.0, 0.0], 100)
    points = drawn.standard_normal((200, 2)) / 2 + np.where(labels == 1, -1.0, 1.0)[:, None]
    noise = 0.3 * drawn.standard_normal((100, 2))
    for name, smoothing in (("gradient descent", 0.0), ("smoothed, sigma 1", 1.0)):
        path = _path(points, labels, noise, smoothing)
        steps = np.diff(path, axis=0)
        yield (
            name,
            {
                "across": float(np.abs(steps[:, 0] - steps[:, 1]).sum() / math.sqrt(2)),
                "along": float(np.abs(steps.sum(axis=1)).sum() / math.sqrt(2)),
                "length": float(np.linalg.norm(steps, axis=1).sum()),
            },
        )


def _path(
    points: Float64[np.ndarray, "n 2"],
    labels: Float64[np.ndarray, " n"],
    noise: Float64[np.ndarray, "steps 2"],
    smoothing: float,
) -> Float64[np.ndarray, "steps_1 2"]:
    """Return the weights of y = sigmoid(w x) before the first and after every step of 0.1."""
    found = [np.zeros(2)]
    for added in noise:
        residual = 1 / (1 + np.exp(-points @ found[-1])) - labels
        gradient = torch.from_numpy(residual @ points / len(points) + added)
        found.append(found[-1] - 0.1 * smooth(gradient, smoothing).numpy())
    return np.array(found)
