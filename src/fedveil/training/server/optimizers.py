"""Step the global model from x_t to x_{t+1} with the mean update: the server's optimisers.

With Delta_t the denoised mean update of round t, and eta the server's learning rate:

=========  ==========================================================================  =======================
optimiser  step                                                                        reference
=========  ==========================================================================  =======================
ServerSgd  u_t = mu u_{t-1} + Delta_t,  x_{t+1} = x_t + eta u_t                        Hsu et al. 2019, FedAvgM
FedAdam    m_t, v_t moving averages,    x_{t+1} = x_t + eta m_t / (sqrt(v_t) + tau)    Reddi et al. 2021
FedYogi    the same, v_t controlled by sign                                            Reddi et al. 2021
=========  ==========================================================================  =======================

The learning rate of each may follow a schedule over the rounds (:mod:`fedveil.training.server.optimizers`).

Privacy: a step reads the model, the released mean and its own state. The state begins with the model and depends on
released means alone. A step reads no record and no random number. So models and states are post-processing of values
that the noise already covers, however many rounds the state remembers. No optimiser costs privacy (Dwork and Roth
2014, Proposition 2.1).

Reproducibility: steps are float64 operations that IEEE 754 rounds correctly (+ - * / sqrt), one by one and never
fused. Parties that make the same step on different machines therefore get the same bits.
docs/theory/server-optimisers.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Final, Literal, TypeAlias

import torch
from jaxtyping import Float32, Float64
from pydantic import Field
from torch import Tensor

from fedveil.arguments import explain_arguments_as
from fedveil.config_keys import LearningRate, composed_field
from fedveil.errors import CompositionError, ConfigError, ModelError
from fedveil.privacy.row_norms import is_finite
from fedveil.stage import Sensitivity, Stage, duty, redefined

# --- schedules ----------------------------------------------------------------------------------------------
# Define how the server's learning rate changes over the rounds: public factors with mean 1.
#
# With t the round, T the last one and u_t = (t - 1/2) / T:
#
# ========  ========================  ==========================================
# schedule  eta_t / eta               over the rounds
# ========  ========================  ==========================================
# constant  1                         stays
# linear    2 (1 - u_t)               from nearly 2 eta down to nearly 0
# cosine    1 + cos(pi u_t)           the same, flat at both ends
# ========  ========================  ==========================================
#
# The factors add up to T over the T rounds. A schedule therefore changes when a model moves, and not how far it can
# move. It reads only the number of the round: no record, no random number, and no result of the run.


Schedule: TypeAlias = Literal["constant", "linear", "cosine"]

# Taylor coefficients of sin(pi v / 2), highest power first (v^21 ... v). math.sin and math.cos are not correctly
# rounded, and their last bit depends on the C library.
_SINE: Final[tuple[float, ...]] = tuple(
    (-1) ** k * (math.pi / 2) ** (2 * k + 1) / math.factorial(2 * k + 1) for k in range(10, -1, -1)
)


def factor(schedule: Schedule, number: int, rounds: int) -> float:
    """Return eta_t / eta; 0 after the last round.

    Only operations that IEEE 754 rounds correctly are used, so that parties that make the same step agree on every
    bit.

    Args:
        schedule: its name.
        number: t, from 1.
        rounds: T >= 1.

    >>> [factor("linear", number, 4) for number in (1, 2, 3, 4)]
    [1.75, 1.25, 0.75, 0.25]
    >>> sum(factor("cosine", number, 4) for number in (1, 2, 3, 4))
    4.0
    """
    if schedule == "constant":
        return 1.0
    remaining = max(0.0, 1.0 - (number - 0.5) / rounds)
    if schedule == "linear":
        return 2.0 * remaining
    sine = _sine_of_quarters(remaining)  # 1 + cos(pi u) = 2 cos(pi u / 2)^2 = 2 sin(pi (1 - u) / 2)^2
    return 2.0 * (sine * sine)


def _sine_of_quarters(v: float) -> float:
    """Return sin(pi v / 2) for v in [0, 1], within 1e-15."""
    value = _SINE[0]
    for coefficient in _SINE[1:]:
        value = value * (v * v) + coefficient
    return value * v


# --- optimisers ---------------------------------------------------------------------------------------------


State: TypeAlias = Mapping[str, Tensor]
"""The state of an optimiser between rounds: tensors by name, on the CPU; saved with every checkpoint."""

STATELESS: Final[State] = {}

Model: TypeAlias = Float32[Tensor, " d"]
"""A global model."""
Vector: TypeAlias = Float64[Tensor, " d"]
"""A mean of updates, or a function of means."""
Rate: TypeAlias = Annotated[
    LearningRate, Field(description="eta, the server's learning rate"), composed_field()
]
"""The experiment's ``server.learning_rate``; a stage that is built in Python receives it as an argument."""


class Optimizer(Stage):
    """Rule that steps the global model by the mean update.

    A rule is an immutable value; its state is passed separately.

    Attributes:
        steps_models: whether it returns the next model of a run; False if it returns the released sum itself.
        reads: kind of the vectors whose mean it reads.
    """

    steps_models: ClassVar[bool] = True
    reads: ClassVar[str] = "updates"

    def refuses(self, method: Any) -> Iterable[str]:
        """Refuse an optimiser of models if the method releases no models, and the reverse."""
        if self.steps_models != (method.released == "models"):
            yield (
                f"{type(self).__name__} {'steps from model to model' if self.steps_models else 'releases sums'}, and "
                f"this method releases {method.released}"
            )
        elif self.steps_models and self.reads != method.local.sends:
            yield (
                f"{type(self).__name__} steps by the mean of {self.reads}, and the local stage sends "
                f"{method.local.sends}"
            )

    @property
    def plain_rate(self) -> float | None:
        """Learning rate eta if the step is x_{t+1} = x_t + eta Delta_t and nothing else; otherwise None."""
        return None

    def at_rate(self, learning_rate: float) -> Optimizer:
        """Return the same optimiser with another learning rate.

        Raises:
            CompositionError: the optimiser has no learning rate.
        """
        raise CompositionError(f"{type(self).__name__} has no learning rate to be found")

    def at_noise(self, noise_std: float) -> Optimizer:
        """Return the optimiser of a round whose mean has noise of this standard deviation per number; here the same."""
        return self

    @duty
    def init(self, model: Model) -> State:
        """Return the state before the first round; names, shapes and dtypes stay the same afterwards."""
        raise NotImplementedError

    @duty
    def step(self, model: Model, mean: Vector, state: State) -> tuple[Model, State]:
        """Return the next global model and state; the arguments are not modified.

        Args:
            model: (d,) the global model x_t.
            mean: (d,) the mean update Delta_t, in the unit of an update.
            state: the result of :meth:`init` or of the previous step.

        Guarantees: equal bits in give equal bits out, on every machine; only the arguments are read.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class _Scheduled(Optimizer):
    """An optimiser whose learning rate may change over the rounds: eta_t = eta f(t, T).

    With a schedule that is not constant, its state counts rounds.

    Attributes:
        schedule: f, a schedule of :mod:`fedveil.training.server.optimizers`.
        rounds: T; the experiment sets it.
    """

    schedule: Annotated[
        Schedule,
        Field(description="of the learning rate over the rounds; each has the given rate as its mean"),
    ] = field(default="constant", kw_only=True)
    rounds: Annotated[int | None, composed_field()] = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        """Set ``rounds`` to None if no schedule reads it, so that optimisers with equal steps are equal."""
        super().__post_init__()
        if self.schedule == "constant":
            object.__setattr__(self, "rounds", None)

    def refuses(self, method: Any) -> Iterable[str]:
        """Refuse a schedule over an unknown number of rounds, in addition to the refusals of all optimisers."""
        yield from super().refuses(method)
        if self.schedule != "constant" and self.rounds is None:
            yield (
                f"{type(self).__name__}: schedule = '{self.schedule}' falls until the last round, and the number of "
                "rounds is not given: give rounds"
            )

    def mechanisms(self, sensitivity: Sensitivity) -> tuple[str, ...]:
        if self.schedule == "constant":
            return ()
        return (_free(f"a learning rate on a {self.schedule} schedule over {self.rounds} rounds"),)

    def at_rate(self, learning_rate: float) -> Optimizer:
        return replace(self, learning_rate=learning_rate)  # type: ignore[call-arg]

    def _begun(self) -> dict[str, Tensor]:
        """Return the schedule's state before the first round; empty for a constant rate."""
        return {} if self.schedule == "constant" else {"round": torch.zeros(1, dtype=torch.int64)}

    def _rate(self, base: float, state: State) -> tuple[float, dict[str, Tensor]]:
        """Return the learning rate of the next round, and the schedule's state after it."""
        if self.schedule == "constant":
            return base, {}
        assert self.rounds is not None, "refused by the method"
        number = int(state["round"]) + 1
        return base * factor(self.schedule, number, self.rounds), {
            "round": torch.tensor([number], dtype=torch.int64)
        }


@explain_arguments_as("Sgd")
@dataclass(frozen=True)
class ServerSgd(_Scheduled):
    """Plain step along the mean update, or heavy-ball momentum (FedAvgM: Hsu, Qi and Brown 2019).

    With momentum mu, u_0 = 0 and no dampening, as ``torch.optim.SGD`` with the gradient -Delta:

        u_t = mu u_{t-1} + Delta_t,    x_{t+1} = x_t + eta u_t,    Nesterov: x_{t+1} = x_t + eta (Delta_t + mu u_t)

    In the long run a mean counts 1 / (1 - mu) times, so eta should be smaller by the factor 1 - mu than without
    momentum.

    Args:
        learning_rate: eta > 0, in mean updates.
        momentum: mu in [0, 1); 0 keeps no state.
        nesterov: look ahead; needs momentum.

    Raises:
        ConfigError: a value outside these ranges.

    >>> half = ServerSgd(1.0, momentum=0.5)
    >>> model, mean = torch.zeros(1), torch.ones(1, dtype=torch.float64)
    >>> model, state = half.step(model, mean, half.init(model))
    >>> half.step(model, mean, state)[0]
    tensor([2.5000])
    """

    learning_rate: Rate = 1.0
    momentum: Annotated[float, Field(ge=0, lt=1, description="mu, weight of the means before")] = 0.0
    nesterov: Annotated[bool, Field(description="look ahead along the momentum")] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and not self.momentum:
            raise ConfigError("nesterov: looks along the momentum; give momentum above 0")

    @property
    def plain_rate(self) -> float | None:
        """Learning rate of a plain step; None with momentum, a schedule or an overridden ``step``."""
        plain = not self.momentum and self.schedule == "constant" and not redefined(self, "step")
        return self.learning_rate if plain else None

    def mechanisms(self, sensitivity: Sensitivity) -> tuple[str, ...]:
        if not self.momentum:
            return super().mechanisms(sensitivity)
        how = "Nesterov momentum" if self.nesterov else "momentum"
        return (_free(f"{how} {self.momentum:g}"), *super().mechanisms(sensitivity))

    def init(self, model: Model) -> State:
        """Return u_0 = 0; without momentum, no tensor."""
        return self._begun() | ({"momentum": _zeros(model)} if self.momentum else {})

    def step(self, model: Model, mean: Vector, state: State) -> tuple[Model, State]:
        """Return the next global model, computed in float64 and stored in float32, and u_t."""
        rate, counted = self._rate(self.learning_rate, state)
        if not self.momentum:
            return _moved(model, rate * mean), counted
        speed = self.momentum * state["momentum"] + mean
        along = mean + self.momentum * speed if self.nesterov else speed
        return _moved(model, rate * along), counted | {"momentum": speed}


@dataclass(frozen=True)
class _Adaptive(_Scheduled):
    """The common step of FedAdam and FedYogi (Reddi et al. 2021, Algorithm 2).

        m_t = beta1 m_{t-1} + (1 - beta1) Delta_t,    x_{t+1} = x_t + eta m_t / (sqrt(v_t) + tau)

    with m_0 = 0 and v_0 = tau^2, the smallest value that the paper allows. As in the paper's Algorithm 2, and unlike
    Adam, the averages have no bias correction, so the first steps are shorter.

    Reference: S. Reddi et al., "Adaptive federated optimization", ICLR 2021.
    """

    learning_rate: Rate
    beta1: Annotated[float, Field(ge=0, lt=1, description="weight of the means before")] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1, description="weight of their squares")] = 0.99
    tau: Annotated[
        float, Field(gt=0, allow_inf_nan=False, description="adaptivity: larger is closer to plain steps")
    ] = 1e-3

    def mechanisms(self, sensitivity: Sensitivity) -> tuple[str, ...]:
        return (
            _free(f"{type(self).__name__}, beta1 {self.beta1:g}, beta2 {self.beta2:g}, tau {self.tau:g}"),
            *super().mechanisms(sensitivity),
        )

    def init(self, model: Model) -> State:
        """Return m_0 = 0 and v_0 = tau^2."""
        return self._begun() | {
            "mean": _zeros(model),
            "square": torch.full_like(_zeros(model), self.tau**2),
        }

    def step(self, model: Model, mean: Vector, state: State) -> tuple[Model, State]:
        """Return the next global model, computed in float64 and stored in float32, with m_t and v_t."""
        # m_t = beta1 m_{t-1} + (1 - beta1) Delta_t; v_t from Delta_t^2; x_{t+1} = x_t + eta m_t / (sqrt(v_t) + tau).
        first = self.beta1 * state["mean"] + (1 - self.beta1) * mean
        second = self._second(state["square"], mean * mean)
        rate, counted = self._rate(self.learning_rate, state)
        along = rate * first / (second.sqrt() + self.tau)
        return _moved(model, along), counted | {"mean": first, "square": second}

    def _second(self, before: Vector, square: Vector) -> Vector:
        """Return v_t from v_{t-1} and Delta_t^2."""
        raise NotImplementedError


@explain_arguments_as("Adam")
@dataclass(frozen=True)
class FedAdam(_Adaptive):
    """Adaptive step m_t / (sqrt(v_t) + tau) with v_t = beta2 v_{t-1} + (1 - beta2) Delta_t^2.

    The step is m_t = beta1 m_{t-1} + (1 - beta1) Delta_t, x_{t+1} = x_t + eta m_t / (sqrt(v_t) + tau), with m_0 = 0,
    v_0 = tau^2 and no bias correction (Reddi et al. 2021, Algorithm 2). v_t contains the noise of the mean. If the
    noise is larger than the signal, every coordinate is divided by about the noise's standard deviation.

    Args:
        learning_rate: eta > 0, in the unit of a parameter: a coordinate moves by about eta in a round.
        beta1: weight of the previous average of means, in [0, 1).
        beta2: weight of the previous average of squares, in [0, 1).
        tau: > 0, in the unit of an update.

    Raises:
        ConfigError: a value outside these ranges.
    """

    def _second(self, before: Vector, square: Vector) -> Vector:
        return self.beta2 * before + (1 - self.beta2) * square


@explain_arguments_as("Yogi")
@dataclass(frozen=True)
class FedYogi(_Adaptive):
    """FedAdam with v_t = v_{t-1} - (1 - beta2) Delta_t^2 sign(v_{t-1} - Delta_t^2).

    v_t rises as fast as in FedAdam and decreases more slowly after a large mean (Reddi et al. 2021, Algorithm 2;
    Zaheer et al. 2018). It never falls below 0. Arguments and errors are those of :class:`FedAdam`.
    """

    def _second(self, before: Vector, square: Vector) -> Vector:
        return before - (1 - self.beta2) * square * (before - square).sign()


def matching(fresh: State, state: Any) -> bool:
    """Return whether a stored state fits the state with which a server begins.

    Names, shapes and dtypes must be equal, and all values finite.
    """
    return set(fresh) == set(state) and all(
        (value.dtype, value.shape) == (state[name].dtype, state[name].shape) and is_finite(state[name])
        for name, value in fresh.items()
    )


# --- what a stage of another package returns ---
# A model of another type would be written as a checkpoint that no run reads; a shorter one would end the run after its
# charge, far from the stage that returned it.


def check_tensor(stage: Stage, role: str, what: str, found: Any, like: Tensor) -> Tensor:
    """Return what a stage of the server returned, without a gradient, if it fits.

    Args:
        stage: the stage, of any package.
        role: its role in words.
        what: the method and its result, for the error.
        found: what it returned.
        like: a tensor of the type, shape and device that are needed.

    Raises:
        ModelError: names the class of the stage, and what is needed.
    """
    if not isinstance(found, Tensor) or found.layout != torch.strided or _form(found) != _form(like):
        raise ModelError(
            f"{type(stage).__name__}, given as {role}: {what} is {_in_words(found)}; {_in_words(like)} is needed"
        )
    return found.detach()


def check_state(stage: Stage, role: str, what: str, found: Any, before: State) -> State:
    """Return a stage's next state if it has the names, shapes and types of the state before.

    Args as for :func:`check_tensor`.

    Raises:
        ModelError: names the class of the stage, and the tensor that differs. A checkpoint with it is not read again.
    """
    where = f"{type(stage).__name__}, given as {role}: {what}"
    if not isinstance(found, Mapping):
        raise ModelError(f"{where} is a value of {type(found).__name__}; a dict of tensors is needed")
    if other := sorted(map(str, set(found) ^ set(before))):
        raise ModelError(
            f"{where} has the tensors {', '.join(map(str, found)) or 'none'}, and init() has "
            f"{', '.join(before) or 'none'}: {other[0]} is in one of them alone"
        )
    return {
        name: check_tensor(stage, role, f"{what}, '{name}',", found[name], tensor)
        for name, tensor in before.items()
    }


def _form(tensor: Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.shape, tensor.device


def _in_words(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"a value of {type(value).__name__}"
    kind = "tensor" if value.layout == torch.strided else "sparse tensor"
    return f"a {kind} of {value.dtype}, of shape {tuple(value.shape)}, on {value.device}"


def _free(description: str) -> str:
    return f"the server's step uses {description}: post-processing of the released mean, at no privacy cost"


def _zeros(model: Model) -> Vector:
    return torch.zeros(len(model), dtype=torch.float64)


def _moved(model: Model, along: Vector) -> Model:
    return model.to(torch.float64, copy=True).add_(along).to(torch.float32)
