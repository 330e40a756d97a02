"""How far a run has moved its model, and how far its noise and its people could: released models and public numbers.

With the plain steps x_s = x_{s-1} + eta (mean_s + noise_s) of a server that changes nothing else, after t rounds

    model = ||x_t - x_0||,    noise = eta sqrt(d sum_s nu_s^2),    most = eta sum_s C_s n_s / divisor,

where nu_s is the standard deviation of the noise on a coordinate of the mean, and C_s n_s what the updates of all who
take part, of length C_s, sum up to if they agree. All three are public; :mod:`fedveil.run.advice` reads them.
"""

from __future__ import annotations

import math

from jaxtyping import Float32
from torch import Tensor

from fedveil.methods.method import Method
from fedveil.run.folder.run_folder import Checkpoint, Row
from fedveil.run.setup import Prepared


def clip_at(method: Method) -> float | None:
    """Return the bound of an update, in its own unit; a function of what was released before."""
    return method.bound.longest if method.bound.bounded else None


def movement(
    prepared: Prepared, last: Checkpoint, model: Float32[Tensor, " d"], summed: int | None = None
) -> Row | None:
    """Return the movement up to a round that leads from a checkpoint to a model.

    Args:
        prepared: what runs.
        last: the checkpoint before the round.
        model: (d,) the global model after it.
        summed: how many silos the sum is over; None: all.

    Returns:
        The line's ``movement``; None where steps are not plain, or the noise on the mean is not a public number.
    """
    number, people = last.round + 1, prepared.population
    method = prepared.method.at_round(number, last.state)
    std, rate = method.noise_std(people.n_silos, summed), method.server.plain_rate
    plain = rate is not None and not method.denoiser.changes and method.denominator == "expected"
    before = last.row.get("movement")
    if std is None or rate is None or not plain or (last.round > 0 and before is None):
        return None
    begun = before or {"noise": 0.0, "most": 0.0}
    step = (
        rate
        * method.bound.unit
        / method.divisor(people.n_silos if summed is None else summed, people.n_users)
    )
    most = None
    if method.contribution.by_user and method.bound.bounded and begun["most"] is not None:
        longest = method.bound.longest / method.bound.unit
        most = begun["most"] + step * longest * method.sampler.rate * people.n_users
    parameters = len(model)
    return {
        "parameters": parameters,
        "model": float((model.double().cpu() - prepared.task.initial().double().cpu()).norm()),
        "noise": math.hypot(begun["noise"], step * std * math.sqrt(parameters)),
        "most": most,
    }
