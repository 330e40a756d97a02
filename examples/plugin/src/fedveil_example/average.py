"""An average: which model a run releases."""

from dataclasses import dataclass

from torch import Tensor

from fedveil.config_keys import Fraction
from fedveil.training.server.averages import Average
from fedveil.training.server.optimizers import State


@dataclass(frozen=True, kw_only=True)
class Halfway(Average):
    """Releases a model between the last two: x_{t-1} + part (x_t - x_{t-1}).

    Attributes:
        part: of the last step.
    """

    part: Fraction = 0.5

    def init(self, model: Tensor) -> State:
        """Return the model before the first round, twice."""
        return {"before": model.clone(), "last": model.clone()}

    def update(self, model: Tensor, state: State) -> State:
        """Return the last two models."""
        return {"before": state["last"], "last": model.clone()}

    def released_model(self, model: Tensor, state: State) -> Tensor:
        """Return the model between them."""
        return state["before"] + self.part * (state["last"] - state["before"])
