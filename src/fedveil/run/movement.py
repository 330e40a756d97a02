"""Measure how far a run, its noise and its users can move the model, from public numbers.

Let the server take plain steps x_s = x_{s-1} + eta (mean_s + noise_s) and change nothing else. Then after t rounds

    model = ||x_t - x_0||,    noise = eta sqrt(d sum_s nu_s^2),    most = eta sum_s C_s n_s / divisor,

where nu_s is the standard deviation of the noise on a coordinate of the mean. C_s n_s is the sum of the updates of
all n_s participants if they agree and have length C_s. All three are public; :mod:`fedveil.run.advice` reads them.
"""

from __future__ import annotations

import math

from jaxtyping import Float32
from torch import Tensor

from fedveil.methods.method import Method, sum_noise_std
from fedveil.run.folder.run_folder import Checkpoint, Row
from fedveil.run.setup import Prepared


def clip_at(method: Method) -> float | None:
    """Return the bound of an update, in the update's unit; None if updates are not bounded.

    It is a function of earlier releases, so it is public.
    """
    return method.bound.longest if method.bound.bounded else None


def movement(
    prepared: Prepared, last: Checkpoint, model: Float32[Tensor, " d"], summed: int | None = None
) -> Row | None:
    """Return the movement of the model up to the round that leads from a checkpoint to a model.

    Args:
        prepared: the experiment that runs.
        last: the checkpoint before the round.
        model: (d,) float32 global model after the round.
        summed: number of silos in the sum; None: all.

    Returns:
        The row's ``movement``; None if the server's steps are not plain, or the noise on the mean is not public.
    """
    number, people = last.round + 1, prepared.population
    method = prepared.method.at_round(number, last.state)
    std, rate = sum_noise_std(method, people.n_silos, summed), method.server.plain_rate
    plain = rate is not None and not method.denoiser.changes and method.denominator == "expected"
    before = last.row.get("movement")
    # Without the movement of the round before, the sums over rounds stay unknown for the rest of the run.
    if std is None or rate is None or not plain or (last.round > 0 and before is None):
        return None
    begun = before or {"noise": 0.0, "most": 0.0}
    # One unit of the sum moves the model by `step`: learning rate times clip unit over the divisor of the mean.
    step = rate * method.bound.unit / method.divisor(people.n_users, people.n_silos, summed)
    most = None
    if method.contribution.by_user and method.bound.bounded and begun["most"] is not None:
        longest = method.bound.longest / method.bound.unit
        # C_s n_s with the expected number of participants n_s = q |U|.
        most = begun["most"] + step * longest * method.sampler.rate * people.n_users
    parameters = len(model)
    return {
        "parameters": parameters,
        "model": float((model.double().cpu() - prepared.task.initial().double().cpu()).norm()),
        # noise^2 adds up over rounds: each adds (step std)^2 on each of d coordinates.
        "noise": math.hypot(begun["noise"], step * std * math.sqrt(parameters)),
        "most": most,
    }
