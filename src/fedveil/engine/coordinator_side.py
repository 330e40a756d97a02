"""The coordinator's part of a round: draw who takes part, and turn the sum of the silos' messages into a model."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Bool, Float32, Float64
from torch import Tensor

from fedveil.errors import ModelError
from fedveil.methods.method import Method
from fedveil.randomness import PrivacyRandomness


def draw_users(
    method: Method, n_users: int, privacy: PrivacyRandomness, round_number: int, attempt: int = 0
) -> Bool[np.ndarray, " users"] | None:
    """Return which users (or clients) take part in an attempt at a round; None where contributions are whole silos."""
    if not method.contribution.by_user:
        return None
    path = ("participants", round_number, *(("attempt", attempt) if attempt else ()))
    return method.sampler.draw(n_users, privacy.stream(*path))


def coordinate(
    method: Method,
    model: Float32[Tensor, " d"],
    aggregate: Float64[np.ndarray, " d"],
    *,
    n_silos: int,
    n_users: int,
    drawn: int | None,
    shapes: tuple[tuple[int, ...], ...],
    round_number: int,
    privacy: PrivacyRandomness,
    summed: int | None = None,
) -> Float32[Tensor, " d"]:
    """Do the coordinator's part of a round: its noise, the mean, the denoiser and the server's step.

    Args:
        method: the composition.
        model: (d,) the global model.
        aggregate: (d,) the sum of all silos' messages.
        n_silos: |S|.
        n_users: |U|.
        drawn: how many users or clients were drawn; only a method with the "actual" denominator reads it.
        shapes: the model's tensors, for denoisers that smooth each by itself.
        round_number: counts from 1.
        privacy: the server's own randomness, for the noise of a trusted server.
        summed: how many silos the sum is over, if some are missing; the mean is over those that are there.

    Raises:
        ModelError: a sum or a next model that is not finite; there is nothing to release.
    """
    present = n_silos if summed is None else summed
    noise = privacy.stream("noise", round_number)
    aggregate = method.channel.release(aggregate, method.bound.grid, noise)
    divisor = method.divisor(present, n_users)
    if method.denominator == "actual":
        assert drawn is not None
        divisor = float(max(1, drawn))
    noise_std = (method.noise_std(n_silos, present) or 0.0) / divisor
    mean = method.denoiser.estimate(torch.from_numpy(aggregate / divisor), noise_std, shapes)
    after = method.server.step(model, mean)
    if not bool(after.isfinite().all()):
        raise ModelError(
            "the next model has a NaN or an infinity: the messages were too long; give the method a clip bound, or "
            "lower method.learning_rate"
        )
    return after
