"""The end of a round: the sum of the silos' messages becomes the next model.

The coordinator computes it; under partial encryption each silo computes it for itself.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float32, Float64
from torch import Tensor

from fedveil.errors import ModelError
from fedveil.run.rounds.round_context import RoundContext
from fedveil.training.server.optimizers import State


def next_model(
    turn: RoundContext,
    aggregate: Float64[np.ndarray, " d"],
    *,
    n_silos: int,
    summed: int,
    drawn: int | None = None,
) -> tuple[Float32[Tensor, " d"], State]:
    """Return the next model: after a trusted server's noise, the mean, the denoiser and the server's step.

        y   <- the sum, with the noise of a trusted server             Channel.release
        y   <- y less what it has of the rounds before                 Method.decoded, where noise is correlated
        m   <- y / |S|, or q |U| |S|, in the unit of the clip          Method.divisor
        m~  <- what lies under the noise of m                          Denoiser.estimate
        w   <- w + eta_g m~, or another optimiser's step               Optimizer.step

    Args:
        turn: what the round began with; its randomness is the server's own, for the noise of a trusted server.
        aggregate: (d,) the sum of all silos' messages, with what the bound adds beside the updates.
        n_silos: |S|.
        summed: how many silos the sum is over; the mean is over those.
        drawn: how many users or clients were drawn; only a method with the "actual" denominator reads it.

    Returns:
        (d,) the next model, and the next state of the server's stages.

    Raises:
        ModelError: a sum, a next model or a next state that is not finite; there is nothing to release.
    """
    setting, method = turn.setting, turn.method
    noise = turn.privacy.stream("noise", turn.round_number)
    aggregate = method.channel.release(aggregate, method.bound.grid, noise)
    aggregate, stream = method.decode_sum(aggregate, turn.model, turn.state)
    divisor = method.divisor(summed, setting.n_users)
    if method.denominator == "actual":
        assert drawn is not None
        divisor = float(max(1, drawn))
    bound, dimension = method.bound, len(turn.model)
    noise_std = (method.noise_std(n_silos, summed) or 0.0) / divisor * bound.unit
    noisy = torch.from_numpy(aggregate[:dimension] / divisor) * bound.unit
    mean = method.denoiser.estimate(noisy, noise_std, setting.shapes)
    marks = torch.from_numpy(aggregate[dimension:])
    after, server = method.server.step(turn.model, mean, turn.state)
    state = method.next_state(after, server, marks, method.sampler.rate * setting.n_users, turn.state)
    state = {**state, **stream}
    if not all(bool(value.isfinite().all()) for value in (after, *state.values())):
        raise ModelError(
            "the next model has a NaN or an infinity: the messages were too long; give the method a clip bound, or "
            "lower the server's learning rate (method.learning_rate or server.optimizer.learning_rate)"
        )
    return after, state
