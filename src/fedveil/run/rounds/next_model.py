"""Turn the sum of the silos' messages into the next global model, at the end of a round.

The coordinator computes it; under partial encryption each silo computes it for itself.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float32, Float64
from torch import Tensor

from fedveil.errors import ModelError
from fedveil.methods.capabilities import ServerNoise
from fedveil.methods.method import sum_noise_std
from fedveil.methods.server_state import decode_sum, next_state
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
    """Compute the next model: a trusted server's noise, the mean, the denoiser and the server's step.

        y   <- the sum, with the noise of a trusted server             ServerNoise.release
        y   <- y minus its terms of earlier rounds                     Method.decode_sum, if the channel has memory
        m   <- y / |S|, or q |U|, in the unit of the clip              Method.divisor
        m~  <- estimate of m without its noise                         Denoiser.estimate
        w   <- w + eta_g m~, or another optimiser's step               Optimizer.step

    Args:
        turn: the context of the round; its randomness is the server's, for the noise of a trusted server.
        aggregate: (d + extra,) float64 sum of all silos' messages: updates, then the numbers that the bound adds.
        n_silos: |S|.
        summed: number of silos in the sum; the mean is over those.
        drawn: number of sampled users or clients; only a method with the "actual" denominator reads it.

    Returns:
        (d,) float32 next model, and the next state of the server's stages.

    Raises:
        ModelError: a sum, a next model or a next state is not finite, so that nothing can be released.
    """
    setting, method = turn.setting, turn.method
    noise = turn.privacy.stream("noise", turn.round_number)
    # y: release adds noise only for a trusted server; otherwise the senders' messages carry it already.
    if isinstance(method.channel, ServerNoise):
        aggregate = method.channel.release(aggregate, method.bound.grid, noise)
    aggregate, stream = decode_sum(method, aggregate, turn.model, turn.state)
    # m = y / divisor: |S|, or q |U|, or the actual number of senders.
    divisor = method.divisor(setting.n_users, n_silos, summed)
    if method.denominator == "actual":
        assert drawn is not None
        # An empty sample sums to noise alone; dividing by 1 keeps the step finite.
        divisor = float(max(1, drawn))
    bound, length = method.bound, method.local.message_length(len(turn.model))
    # The sum is in the bound's unit (see `RoundContext.method`): multiply by `unit` to return to the model's.
    noise_std = (sum_noise_std(method, n_silos, summed) or 0.0) / divisor * bound.unit
    noisy = torch.from_numpy(aggregate[:length] / divisor) * bound.unit
    # Denoisers smooth within a parameter's shape; sums of statistics are one vector.
    shapes = setting.shapes if length == len(turn.model) else ((length,),)
    mean = method.denoiser.estimate(noisy, noise_std, shapes)
    marks = torch.from_numpy(aggregate[length:])
    after, server = method.server.at_noise(noise_std).step(turn.model, mean, turn.state)
    state = next_state(method, after, server, marks, method.sampler.rate * setting.n_users, turn.state)
    state = {**state, **stream}
    # Checked before the release, because `RunFolder.read_checkpoint` refuses a model that is not finite.
    if not all(bool(value.isfinite().all()) for value in (after, *state.values())):
        raise ModelError(
            "the next model has a NaN or an infinity: the messages were too long; give the method a clip bound, or "
            "lower server.learning_rate"
        )
    return after, state
