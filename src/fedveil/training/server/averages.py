"""Choose the model that a run releases: the last one, or an average over the models of its rounds.

With x_t the global model after round t and T the last round:

=======  ==================================================================================  ====================
average  the run's model                                                                     reference
=======  ==================================================================================  ====================
Last     x_T
Tail     mean of x_t over t > T - ceil(share T)                                              Polyak and Juditsky
Ema      e_t = e_{t-1} + max(1/(t - s), 1 - beta) (x_t - e_{t-1}), t > s                      the same, exponential
=======  ==================================================================================  ====================

Silos train from x_t, whatever model the run releases. An average is a function of released models, so it costs no
privacy (Dwork and Roth 2014, Proposition 2.1). Not claimed: a free choice between averages by a metric on these data.
That choice is a release of its own, and no average makes it. docs/theory/server-optimisers.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from jaxtyping import Float32
from pydantic import Field
from torch import Tensor

from fedveil.config_keys import composed_field
from fedveil.stage import Sensitivity, Stage, duty
from fedveil.training.server.optimizers import STATELESS, State

Rounds = Annotated[int | None, composed_field()]
"""T, the number of rounds; the experiment sets it."""


class Average(Stage):
    """A rule for the model that a run releases; an immutable value, with its state passed separately."""

    def refuses(self, method: Any) -> Iterable[str]:
        """Refuse to average if the method trains no model."""
        if method.released != "models" and self != LAST:
            yield f"{type(self).__name__} averages models, and this method releases {method.released}"

    @duty
    def init(self, model: Float32[Tensor, " d"]) -> State:
        """Return the state before the first round; names, shapes and dtypes stay the same afterwards."""
        raise NotImplementedError

    @duty
    def update(self, model: Float32[Tensor, " d"], state: State) -> State:
        """Return the state after a round.

        Args:
            model: (d,) x_t, the global model after the round.
            state: the result of :meth:`init` or of the previous round; not modified.

        Guarantees: equal bits in give equal bits out, on every machine; only the arguments are read.
        """
        raise NotImplementedError

    @duty
    def released_model(self, model: Float32[Tensor, " d"], state: State) -> Float32[Tensor, " d"]:
        """Return the run's model if the round of this state is its last."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Last(Average):
    """The last global model."""

    def init(self, model: Float32[Tensor, " d"]) -> State:
        return STATELESS

    def update(self, model: Float32[Tensor, " d"], state: State) -> State:
        return STATELESS

    def released_model(self, model: Float32[Tensor, " d"], state: State) -> Float32[Tensor, " d"]:
        return model


class _Mean(Average):
    """A mean of models that moves towards each model by a weight w: m <- m + w (x - m), in float64."""

    def init(self, model: Float32[Tensor, " d"]) -> State:
        """Return m_0 = 0, which the first weight of 1 replaces, and the round number 0."""
        return {
            "mean": torch.zeros(len(model), dtype=torch.float64),
            "round": torch.zeros(1, dtype=torch.int64),
        }

    def update(self, model: Float32[Tensor, " d"], state: State) -> State:
        """Return the mean that includes this round's model, and the number of this round."""
        number = int(state["round"]) + 1
        weight = self._weight(number)
        mean = state["mean"]
        # m + 1 (x - m) would round; the first model of a mean is taken as it is.
        if weight == 1:
            mean = model.cpu().double()
        elif weight > 0:
            mean = mean + weight * (model.cpu().double() - mean)
        return {"mean": mean, "round": torch.tensor([number], dtype=torch.int64)}

    def released_model(self, model: Float32[Tensor, " d"], state: State) -> Float32[Tensor, " d"]:
        """Return the mean in float32, or the last model if the mean contains no model yet."""
        number = int(state["round"])
        if number == 0 or self._weight(number) == 0:
            return model
        return state["mean"].float().to(model.device)

    def _weight(self, number: int) -> float:
        """Return the weight of the model of round ``number``, from 1 on."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Ema(_Mean):
    """Exponential average e_t = e_{t-1} + max(1/(t - s), 1 - beta) (x_t - e_{t-1}) from round s + 1 on.

    At first it is a plain mean. Noise of single rounds averages out over about 1 / (1 - beta) rounds. The average lags
    behind a model that still changes by the same number of rounds.

    Args:
        beta: weight of the previous average, in [0, 1).
        skip: s, number of first rounds whose models do not count; a run that ends earlier releases its last model.

    Raises:
        CompositionError: a weight or a number of rounds outside this range.
    """

    beta: Annotated[float, Field(ge=0, lt=1, description="weight of the average before")] = 0.8
    skip: Annotated[int, Field(ge=0, description="number of first rounds whose models do not count")] = 0

    def mechanisms(self, sensitivity: Sensitivity) -> tuple[str, ...]:
        since = f" from round {self.skip + 1} on" if self.skip else ""
        return (_free(f"an exponential average of its models{since}, beta {self.beta:g}"),)

    def _weight(self, number: int) -> float:
        return max(1.0 / (number - self.skip), 1.0 - self.beta) if number > self.skip else 0.0


@dataclass(frozen=True, kw_only=True)
class Tail(_Mean):
    """Mean of the models of the last rounds, t > T - ceil(share T).

    A run that ends earlier releases the mean of its models in the tail, or its last model if the tail contains none.

    Args:
        share: share of the rounds whose models are averaged, in (0, 1].
        rounds: T.

    Raises:
        CompositionError: a share outside this range.
    """

    share: Annotated[float, Field(gt=0, le=1, description="share of the rounds whose models count")] = 0.5
    rounds: Rounds = None

    def refuses(self, method: Any) -> Iterable[str]:
        """Refuse an unknown number of rounds, in addition to the refusals of all averages."""
        yield from super().refuses(method)
        if self.rounds is None:
            yield "Tail averages the last rounds of a run, and the number of rounds is not given: give rounds"

    def mechanisms(self, sensitivity: Sensitivity) -> tuple[str, ...]:
        return (_free(f"the mean of its models over the last {self.share:g} of the rounds"),)

    def _weight(self, number: int) -> float:
        assert self.rounds is not None, "refused by the method"
        # Position in the tail, from 1: weight 1/position gives the running mean. round(..., 9) removes float noise, so
        # that 0.07 * 100 has the ceiling 7, not 8.
        position = number - (self.rounds - math.ceil(round(self.share * self.rounds, 9)))
        return 1.0 / position if position > 0 else 0.0


LAST = Last()
"""Default average of a method."""


def _free(key: str) -> str:
    return f"the run releases {key}: post-processing of released models, at no privacy cost"
