"""Keep the server's state between rounds: the states of a method's stages, by stage and name.

The optimiser, the average, an adaptive bound and the reader of stateful noise each own a state, and see their own
alone. A checkpoint stores all of them in one mapping of tensors, whose names begin with the stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np
from jaxtyping import Float32, Float64
from torch import Tensor

from fedveil.methods.capabilities import StatefulNoise
from fedveil.methods.method import BOUND, Method, message_length, stage_state
from fedveil.training.server.optimizers import State

_AVERAGE: Final = "average."
_STREAM: Final = "stream."


def begin_state(method: Method, model: Float32[Tensor, " d"]) -> State:
    """Return the server's state before the first round."""
    return {
        **method.server.init(model),
        **_named(_AVERAGE, method.average.init(model)),
        **_named(BOUND, method.bound.init()),
        **_named(_STREAM, _begin_reader(method.channel, model, message_length(method, len(model)))),
    }


def begin_reader_state(method: Method, model: Float32[Tensor, " d"]) -> State:
    """Return a silo's state before the first round; it decodes no sums, so they have length 0."""
    return _named(_STREAM, _begin_reader(method.channel, model, 0))


def reader_state(state: State) -> Mapping[str, Tensor]:
    """Return the state of the channel's reader, without its prefix."""
    return stage_state(_STREAM, state)


def clip_of_round(method: Method, state: State) -> float | None:
    """Return the clip C_t of the next round, given the server's state; None if the clip is constant."""
    return method.bound.at_state(stage_state(BOUND, state)).unit if method.bound.extra else None


def with_clip(method: Method, length: float) -> Method:
    """Return the method of a round whose clip C_t another party has sent."""
    return replace(method, bound=method.bound.measured_in(length))


def decode_sum(
    method: Method, total: Float64[np.ndarray, " length"], model: Float32[Tensor, " d"], state: State
) -> tuple[Float64[np.ndarray, " length"], State]:
    """Return the round's own sum of the received total, and the channel reader's state after it.

    Args:
        method: the method of the round.
        total: (length,) float64 sum of all messages.
        model: (d,) float32 model at the start of the round.
        state: the server's state before the round.
    """
    if not isinstance(method.channel, StatefulNoise):
        return total, {}
    found, kept = method.channel.decode_sum(total, reader_state(state), model, method.bound.unit)
    return found, _named(_STREAM, kept)


def next_state(
    method: Method,
    model: Float32[Tensor, " d"],
    server: State,
    marks: Float64[Tensor, " extra"],
    users: float,
    state: State,
) -> State:
    """Return the server's state after a step.

    Args:
        method: the method of the round.
        model: (d,) the next global model.
        server: next state of the server optimiser.
        marks: released sums of the extra coordinates that the bound adds to the updates.
        users: expected number of participants.
        state: the state before, from :func:`begin_state` or the previous step.
    """
    average = method.average.update(model, stage_state(_AVERAGE, state))
    bound = method.bound.next_state(marks, users, stage_state(BOUND, state))
    return {**server, **_named(_AVERAGE, average), **_named(BOUND, bound)}


def released_model(method: Method, model: Float32[Tensor, " d"], state: State) -> Float32[Tensor, " d"]:
    """Return the run's model after a round: the global model, or the average released instead."""
    return method.average.released_model(model, stage_state(_AVERAGE, state))


def _begin_reader(channel: Any, model: Float32[Tensor, " d"], length: int) -> Mapping[str, Tensor]:
    return channel.init(model, length) if isinstance(channel, StatefulNoise) else {}


def _named(stage: str, state: Mapping[str, Tensor]) -> State:
    return {stage + name: value for name, value in state.items()}
