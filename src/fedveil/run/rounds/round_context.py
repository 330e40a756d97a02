"""Hold a method applied to a population, the state at the start of a round, and the sums of earlier rounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

import numpy as np
import torch
from jaxtyping import Bool, Float32, Float64, Int64
from torch import Tensor

from fedveil.errors import CompositionError, ModelError
from fedveil.methods.capabilities import ServerNoise, memory_of
from fedveil.methods.message_encoding import Sender
from fedveil.methods.method import (
    Method,
    begin_state,
    decode_sum,
    message_length,
    next_state,
    optimizer_state,
    reader_state,
    released_model,
    sum_noise_std,
    training_bound,
    with_clip,
)
from fedveil.privacy.bounds import Bound
from fedveil.privacy.row_norms import is_finite
from fedveil.privacy.sampling import is_due
from fedveil.randomness import ExperimentRandomness, PrivacyRandomness
from fedveil.registry import is_own
from fedveil.training.server.optimizers import State, check_state, check_tensor
from fedveil.training.trainer import Cohort, Progress, Trainer, TrainJob


class SumHistory:
    """All silos' sums of the last rounds of one run, by round number, for channels whose messages contain them.

    These sums are private and carry no noise, so they stay in memory and are never written to a file. After a resume,
    the process trains them again from the models with which those rounds began, which are released and stored in the
    checkpoint. Local training is a function of the model, the records and the experiment's seed, so the sums have the
    same bits.
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Float32[Tensor, " d"], Float64[Tensor, "silos length"]]] = {}

    def __len__(self) -> int:
        """Return the number of rounds whose sums are known."""
        return len(self._kept)

    def keep(self, context: RoundContext, sums: Float64[Tensor, "silos length"]) -> None:
        """Store a round's sums with its starting model, and drop the sums that no later round needs."""
        memory, number = memory_of(context.setting.method.channel), context.round_number
        self._kept = {
            earlier: stored for earlier, stored in self._kept.items() if number - memory < earlier < number
        }
        if memory:
            self._kept[number] = context.model, sums

    def earlier_sums(self, context: RoundContext) -> list[Float64[Tensor, "silos length"]]:
        """Return the sums of earlier rounds that this round's messages contain, newest first.

        Unknown sums are trained again. Rounds that follow a schedule sample no users, so the participants are the
        same.
        """
        method, stream = context.setting.method, reader_state(context.state)
        history = []
        for back in range(1, min(memory_of(method.channel), context.round_number - 1) + 1):
            number, model = context.round_number - back, stream["models"][back - 1]
            stored = self._kept.get(number)
            # A stored sum is reused only if its round began with this very model.
            if stored is None or not torch.equal(stored[0].cpu(), model):
                earlier_method = with_clip(method, float(stream["units"][back - 1]))
                setting, start = (
                    replace(context.setting, method=earlier_method),
                    model.to(context.model.device),
                )
                again = replace(context, setting=setting, model=start, state={}, round_number=number)
                job = again.sum_job(None)
                stored = model, again.trainer.sums(job, again.progress).with_clip_marks(job).total
            history.append(stored[1])
        return history


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingSetup:
    """A method applied to a population, the same for every round.

    Attributes:
        method: the composition, as in round 1.
        trainer: executes the method's local training.
        cohort: all contributions with their records.
        weights: (m,) float64 weights of the contributions in their silos' sums.
        n_users: |U|.
        shapes: shapes of the model's parameters.
    """

    method: Method
    trainer: Trainer
    cohort: Cohort
    weights: Float64[Tensor, " m"]
    n_users: int
    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class RoundContext:
    """State at the start of a round.

    Attributes:
        setting: the method and population, as in round 1.
        model: (d,) float32 global model.
        state: state of the server's stages, tensors by name.
        round_number: counts from 1.
        experiment: randomness of the experiment's seed.
        privacy: randomness of sampling and noise.
        progress: called between chunks of local training.
        measured: whether message costs include their information limit, which takes long to compute.
        past: the silos' sums of earlier rounds, for channels whose messages contain parts of them.
    """

    setting: TrainingSetup
    model: Float32[Tensor, " d"]
    state: State = field(default_factory=dict)
    round_number: int
    experiment: ExperimentRandomness
    privacy: PrivacyRandomness
    progress: Progress | None = None
    measured: bool = True
    past: SumHistory = field(default_factory=SumHistory)

    @cached_property
    def method(self) -> Method:
        """The method with the noise and the bound of this round."""
        return self.setting.method.at_round(self.round_number, self.state)

    @property
    def length(self) -> int:
        """Length of a message in numbers: the update's d, plus the numbers that the bound adds."""
        return message_length(self.method, len(self.model))

    @property
    def trainer(self) -> Trainer:
        """The trainer with this round's learning rate."""
        return self.setting.trainer.at_round(self.round_number)

    def job(
        self, members: Int64[Tensor, " m"], bound: Bound, weights: Float64[Tensor, " m"] | None = None
    ) -> TrainJob:
        """Return the training job of these contributions in this round.

        Args:
            members: (m,) indices of the contributions.
            bound: the bound of each update.
            weights: (m,) float64 weights in the silos' sums; None: all 1.
        """
        weights = torch.ones(len(members), dtype=torch.float64) if weights is None else weights
        path = ("round", self.round_number)
        return TrainJob(self.model, self.setting.cohort, members, weights, bound, self.experiment, path)

    def members(self, sampled_users: Bool[np.ndarray, " users"] | None) -> Int64[Tensor, " m"]:
        """Return the indices of the contributions that take part in the round.

        These have a positive weight and, if users are sampled, belong to a sampled user. If users take part by a
        schedule, it must be their turn in this round.

        Args:
            sampled_users: (|U|,) flags of the sampled users; None: all.
        """
        setting, groups = self.setting, self.setting.cohort.groups
        period, takes_part = self.method.sampler.period, setting.weights.numpy() > 0
        if sampled_users is not None:
            takes_part &= sampled_users[groups.user]
        if period > 1:
            key = groups.user if groups.key is None else groups.key
            takes_part &= is_due(key, groups.silo, period, self.round_number)
        return torch.from_numpy(np.flatnonzero(takes_part))

    def sum_job(self, sampled_users: Bool[np.ndarray, " users"] | None) -> TrainJob:
        """Return the training job whose result is every silo's bounded, weighted sum."""
        members = self.members(sampled_users)
        return self.job(members, training_bound(self.method), self.setting.weights[members])

    def draw(self, attempt: int) -> Bool[np.ndarray, " users"] | None:
        """Sample the participants of an attempt."""
        return draw_users(self.method, self.setting.n_users, self.privacy, self.round_number, attempt)

    def sender(self, number: int, attempt: int) -> Sender:
        """Return the public facts about a silo or client that its channel needs."""
        setting = self.setting
        return Sender(
            number=number,
            senders=setting.cohort.n_silos,
            round=self.round_number,
            attempt=attempt,
            grid=self.method.bound.grid,
            privacy=self.privacy,
            measured=self.measured,
        )


def draw_users(
    method: Method, n_users: int, privacy: PrivacyRandomness, round_number: int, attempt: int = 0
) -> Bool[np.ndarray, " users"] | None:
    """Sample the users (or clients) of an attempt at a round; None if contributions are whole silos.

    Args:
        method: its sampler draws.
        n_users: |U|.
        privacy: source of the sample.
        round_number: counts from 1.
        attempt: counts from 0.

    Returns:
        (|U|,) bool flags.
    """
    if not method.contribution.by_user:
        return None
    # The stream's name must be unique per attempt: a repeated attempt needs a fresh sample (see `CohortInputs`).
    path = ("participants", round_number, *(("attempt", attempt) if attempt else ()))
    return method.sampler.checked_draw(n_users, privacy.stream(*path))


# --- next model ---


def next_model(
    context: RoundContext,
    aggregate: Float64[np.ndarray, " d"],
    *,
    n_silos: int,
    summed: int,
    n_sampled: int | None = None,
) -> tuple[Float32[Tensor, " d"], State]:
    """Compute the next model: a trusted server's noise, the mean, the denoiser and the server's step.

        y   <- the sum, with the noise of a trusted server             ServerNoise.release
        y   <- y minus its terms of earlier rounds                     Method.decode_sum, if the channel has memory
        m   <- y / |S|, or q |U|, in the unit of the clip              Method.divisor
        m~  <- estimate of m without its noise                         Denoiser.estimate
        w   <- w + eta_g m~, or another optimiser's step               Optimizer.step

    Args:
        context: the state at the start of the round; its randomness is the server's, for the noise of a trusted server.
        aggregate: (d + extra,) float64 sum of all silos' messages: updates, then the numbers that the bound adds.
        n_silos: |S|.
        summed: number of silos in the sum; the mean is over those.
        n_sampled: number of sampled users or clients; only a method with the "actual" denominator reads it.

    Returns:
        (d,) float32 next model, and the next state of the server's stages.

    Raises:
        ModelError: a sum, a next model or a next state is not finite, so that nothing can be released.
    """
    setting, method = context.setting, context.method
    noise = context.privacy.stream("noise", context.round_number)
    # y: release adds noise only for a trusted server; otherwise the senders' messages carry it already.
    if isinstance(method.channel, ServerNoise):
        aggregate = method.channel.release(aggregate, method.bound.grid, noise)
    aggregate, stream = decode_sum(method, aggregate, context.model, context.state)
    # m = y / divisor: |S|, or q |U|, or the actual number of senders.
    divisor = method.divisor(setting.n_users, n_silos, summed)
    if method.denominator == "actual":
        assert n_sampled is not None
        # An empty sample sums to noise alone; dividing by 1 keeps the step finite.
        divisor = float(max(1, n_sampled))
    bound, length = method.bound, method.local.message_length(len(context.model))
    # The sum is in the bound's unit (see `RoundContext.method`): multiply by `unit` to return to the model's.
    noise_std = (sum_noise_std(method, n_silos, summed) or 0.0) / divisor * bound.unit
    noisy = torch.from_numpy(aggregate[:length] / divisor).mul_(bound.unit)
    # Denoisers smooth within a parameter's shape; sums of statistics are one vector.
    shapes = setting.shapes if length == len(context.model) else ((length,),)
    after, server = server_step(method, noisy, noise_std, shapes, context.model, context.state)
    marks = torch.from_numpy(aggregate[length:])
    state = next_state(method, after, server, marks, method.sampler.rate * setting.n_users, context.state)
    state = {**state, **stream}
    # Checked before the release, because `RunFolder.read_checkpoint` refuses a model that is not finite.
    if not all(map(is_finite, (after, *state.values()))):
        raise ModelError(
            "the next model has a NaN or an infinity: the messages were too long; give the method a clip bound, or "
            "lower server.learning_rate"
        )
    return after, state


def server_step(
    method: Method,
    noisy: Float64[Tensor, " length"],
    noise_std: float,
    shapes: Sequence[tuple[int, ...]],
    model: Float32[Tensor, " d"],
    state: State,
) -> tuple[Float32[Tensor, " d"], State]:
    """Return the next model and the optimiser's next state from a noisy mean: the denoiser, then the server's step.

    Args:
        method: the method of the round.
        noisy: (length,) the mean with its noise, in the unit of an update.
        noise_std: standard deviation of the noise in each coordinate, same unit.
        shapes: shapes of the tensors that the mean holds.
        model: (d,) the model before.
        state: the server's state before.

    Raises:
        ModelError: the denoiser or the optimiser returns no tensor of the needed type and shape; names its class.
    """
    mean = method.denoiser.estimate(noisy, noise_std, shapes)
    if isinstance(mean, Tensor) and mean.is_floating_point():
        mean = mean.to(torch.float64)
    mean = check_tensor(method.denoiser, "denoiser", "estimate()", mean, noisy)
    server = method.server.at_noise(noise_std)
    result = server.step(model, mean, state)
    if not server.steps_models:
        return result
    where = "server optimizer"
    if not isinstance(result, tuple) or len(result) != _MODEL_AND_STATE:
        raise ModelError(
            f"{type(server).__name__}, given as {where}: step() is no pair of a model and a state"
        )
    after = check_tensor(server, where, "the model of step()", result[0], model)
    own_state = optimizer_state(result[1]) if isinstance(result[1], Mapping) else result[1]
    return after, check_state(server, where, "the state of step()", own_state, optimizer_state(state))


_MODEL_AND_STATE: Final = 2


def try_server_stages(
    method: Method,
    initial: Callable[[], Float32[Tensor, " d"]],
    length: int,
    shapes: Sequence[tuple[int, ...]],
) -> None:
    """Try a denoiser, an optimiser and an average of another package on made-up means before anything is charged.

    Args:
        method: the composition.
        initial: returns the (d,) initial model.
        length: length of a message.
        shapes: shapes of the model's parameters.

    Raises:
        CompositionError: a stage returns no tensor of the needed type and shape, or numbers that are not finite;
            writes to what it is given; or returns something else when it is asked again. Names its class.
    """
    stages = {"denoiser": method.denoiser, "server optimizer": method.server, "average": method.average}
    foreign = [
        f"{type(stage).__name__}, given as {role}"
        for role, stage in stages.items()
        if not is_own(type(stage))
    ]
    if not foreign or not method.server.steps_models:
        return
    names, model = "; ".join(foreign), initial()
    made_up = torch.linspace(-1.0, 1.0, length, dtype=torch.float64)
    parts = shapes if length == len(model) else ((length,),)

    def two_rounds() -> list[Tensor]:
        """Return the models and states after each of two rounds."""
        at, state, outputs = model.clone(), begin_state(method, model.clone()), list[Tensor]()
        for number in (1, 2):
            round_method = method.at_round(number, state)
            arguments = (made_up.clone(), at, *state.values())
            copies = [argument.clone() for argument in arguments]
            after, server = server_step(round_method, arguments[0], 1.0, parts, at, state)
            marks = torch.zeros(round_method.bound.extra, dtype=torch.float64)
            then = next_state(round_method, after, server, marks, 1.0, state)
            released = released_model(round_method, after, then)
            if not all(map(is_finite, (after, released, *then.values()))):
                raise CompositionError(
                    f"{names}: a model or a state has a NaN or an infinity after a mean in [-1, 1]"
                )
            if not all(map(torch.equal, arguments, copies)):
                raise CompositionError(
                    f"{names}: writes to the mean, the model or the state that it is given"
                )
            # Stateful noise is decoded before the step; its state is not tried.
            at, state = after, {**state, **then}
            outputs += [tensor.clone() for tensor in (after, released, *then.values())]
        return outputs

    try:
        first, again = two_rounds(), two_rounds()
    except ModelError as error:
        raise CompositionError(str(error)) from None
    if not all(map(torch.equal, first, again)):
        raise CompositionError(f"{names}: equal means gave another model or state when they were tried again")
