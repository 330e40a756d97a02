"""Define a method: the stages of one round, from the sample of participants to the server's step.

A method asks each of its stages in turn whether the composition is valid. An invalid one is refused when the value is
built, with the reason of the stage that refuses. :func:`fedveil.methods.derive.derive` derives the guarantee from the
composition; no method states its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, Final, Literal, get_type_hints

import numpy as np
from jaxtyping import Float32, Float64
from torch import Tensor

from fedveil.config_keys import is_number, make_plain
from fedveil.data.records import Groups, Population
from fedveil.errors import CompositionError
from fedveil.methods.capabilities import StatefulNoise
from fedveil.methods.channels import Channel
from fedveil.methods.contributions import Contribution
from fedveil.methods.protection_stage import NO_PROTECTION, ProtectionStage
from fedveil.methods.weights import Weights
from fedveil.privacy.bounds import Bound, check_enforced
from fedveil.privacy.claims import Reveals, Role, Sent
from fedveil.privacy.sampling import Sampler
from fedveil.privacy.statement import show_at_least
from fedveil.protocols.session_messages import SETUP, RoundClip
from fedveil.registry import is_own
from fedveil.stage import ClosedForm, Sensitivity, answers, ignored, redefined
from fedveil.statistics.local_vectors import PersonVector
from fedveil.training.record_sums import RecordSums
from fedveil.training.server.averages import LAST, Average
from fedveil.training.server.denoise import NO_DENOISER, Denoiser
from fedveil.training.server.optimizers import STATELESS, Optimizer, State, check_state, check_tensor
from fedveil.training.steps import LocalDpSgd, LocalGradient, LocalSgd, check_computed

# --- classes of other packages ------------------------------------------------------------------------------
# Check stages whose classes other packages define: refuse members that a run would ignore.
#
# Most stages do their work in methods, so a class of another package can replace them. Some are read by their fields
# instead: trainers compute local steps, kernels enforce bounds. Others are read by fields in some compositions only. If
# a class defines a member that the composition does not use, a run would behave like the parent class under another
# name.


_PARTITIONS: Final = ("silo", "pair", "client", "record")
"""Kinds of contributions into which the engine divides records."""


def check_classes(method: Method, duties: Mapping[str, tuple[str, ...]]) -> None:
    """Check that a run uses everything that classes of other packages define for the stages of a method.

    Args:
        method: the composition.
        duties: methods that the stage of each field must override.

    Raises:
        CompositionError: names the stage, its class, and the members that would be ignored.
    """
    if method.released == "models" and not (method.local.sums_records and is_own(type(method.local))):
        check_computed(method.local)
        algorithm = getattr(method.local, "algorithm", None)  # single gradients and DP-SGD have none
        if reason := ignored(algorithm, ("slope",)) if algorithm is not None else "":
            raise CompositionError(
                f"{type(algorithm).__name__}, given as local algorithm, {reason}: redefine slope(), or take the parent "
                "class itself"
            )
    check_enforced(method.bound)
    if reason := ignored(method, ()):
        raise CompositionError(
            f"{type(method).__name__}, a class of methods, {reason}: a run uses the stages of a Method; redefine these"
        )
    for field, names in duties.items():
        reason = "" if field == "local" else ignored(getattr(method, field), names)
        if reason:
            raise CompositionError(
                f"{type(getattr(method, field)).__name__}, given as {field}, {reason}: redefine a method that the "
                "parent class is used through, or take the parent class itself"
            )
    reason = _unused_draw(method) or _other_partition(method) or _unused_estimate(method.denoiser)
    if reason := reason or _unused_scores(method):
        raise CompositionError(reason)


def _unused_draw(method: Method) -> str:
    if method.contribution.by_user or not redefined(method.sampler, "draw"):
        return ""
    return (
        f"{type(method.sampler).__name__}, given as sampler, defines draw(), and nobody is drawn where a contribution "
        f"is that of a {method.contribution.per}: take Everyone()"
    )


def _other_partition(method: Method) -> str:
    per = method.contribution.per
    if per in _PARTITIONS:
        return ""
    return (
        f"{type(method.contribution).__name__}, given as contribution, says per = {per!r}: records are divided by "
        f"{', '.join(_PARTITIONS)}; take one of these"
    )


def _unused_estimate(denoiser: Denoiser) -> str:
    if not redefined(denoiser, "estimate"):
        return ""
    name = type(denoiser).__name__
    if not denoiser.changes and not redefined(denoiser, "changes"):
        return (
            f"{name}, given as denoiser, defines estimate() and inherits changes = False: set changes = True"
        )
    if type(denoiser).resolve is not Denoiser.resolve and not redefined(denoiser, "resolve"):
        return (
            f"{name}, given as denoiser, defines estimate(), and the resolve() that it inherits puts another "
            "denoiser in its place: define resolve() too, or derive from Denoiser"
        )
    return ""


def _unused_scores(method: Method) -> str:
    if not redefined(method.weights, "scores") or redefined(method.weights, "for_groups"):
        return ""
    return (
        f"{type(method.weights).__name__}, given as weights, defines scores() alone, from which weights are computed "
        "where no party has all counts: define for_groups() too, for all other runs"
    )


# --- method -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Method:
    """One round, stage by stage; a frozen value that can be compared, printed and recombined.

    Delta_i is the update of contribution i (``local``), w_i its weight and clip the ``bound``. Silo s sends
    ``channel( sum_{i in s} w_i clip(Delta_i) )``. The server adds the messages of the silos, divides by
    :meth:`divisor`, estimates the mean under the noise (``denoiser``) and applies ``server``.

    Attributes:
        name: name in reports.
        contribution: the unit of training and clipping: a silo, a (silo, user) pair, a client or a record.
        sampler: selects the users or clients of a round.
        local: local computation of one contribution.
        bound: l2 bound of one contribution's update (l1 for clients that send Laplace noise).
        weights: weights of the contributions in their silo's sum.
        channel: operation of a silo on its sum before it leaves the silo, or of the server on the sum of all.
        protection: hides the message of a single silo from the server.
        denoiser: the server's estimate of the mean under its noise: post-processing, at no privacy cost.
        server: the server's optimiser, which steps by the mean of the sums.
        average: selects the released model among the models of all rounds.
        denominator: "expected" divides by the expected number of participants. "actual" divides by their real number,
            which is private and not covered by the guarantee: for reproduction only.
        noise_decay: factor by which the noise's standard deviation decays from round to round.
        calibrated_to: party of a target epsilon: readers of the models, or the server, which sees every message.
            "nobody" if the noise bounds no unit, so that no accountant can calibrate it.
        closed_form: published theorem that calibrates the noise to a target epsilon; None without one.
        public_counts: results that depend on record counts which count as public, as sentences for the statement. If
            there are any, the counts are part of the public facts.
        released: kind of results that readers see.
    """

    name: str
    contribution: Contribution
    sampler: Sampler
    local: LocalSgd | LocalGradient | LocalDpSgd | RecordSums | PersonVector
    bound: Bound
    weights: Weights
    channel: Channel
    server: Optimizer
    protection: ProtectionStage = NO_PROTECTION
    denoiser: Denoiser = NO_DENOISER
    average: Average = LAST
    denominator: Literal["expected", "actual"] = "expected"
    noise_decay: float = 1.0
    calibrated_to: Literal["readers", "server", "nobody"] = "readers"
    closed_form: ClosedForm | None = None
    public_counts: tuple[str, ...] = ()
    released: Literal["models", "statistics"] = "models"

    def __post_init__(self) -> None:
        make_plain(self)
        if not is_number(self.noise_decay):
            raise CompositionError(f"{self.name}: noise_decay = {self.noise_decay!r}: a number is needed")
        for field, names in _DUTIES.items():
            # Only local steps with noise of their own (DP-SGD) must claim an event.
            if field == "local" and not getattr(self.local, "own_noise", False):
                continue
            stage = getattr(self, field)
            for name in names:
                if not answers(stage, name):
                    raise CompositionError(
                        f"{self.name}: {type(stage).__name__}, given as {field}, does not define {name}(), which "
                        "every such stage must answer for itself"
                    )
        try:
            check_classes(self, _DUTIES)
        except CompositionError as error:
            raise CompositionError(f"{self.name}: {error}") from None
        if self.channel.content not in _CONTENTS:
            raise CompositionError(
                f"{self.name}: {type(self.channel).__name__}, given as channel, declares that a message reveals "
                f"{self.channel.content.value}; content is one of {', '.join(content.name for content in _CONTENTS)}"
            )
        for field in _REFUSING:
            for reason in getattr(self, field).refuses(self):
                raise CompositionError(f"{self.name}: {reason}")

    # --- messages and public facts --------------------------------------------------------------------------

    def sends(self) -> tuple[Sent, ...]:
        """Return every message of the setup and of a round, with its readers."""
        # An adaptive bound is known only when its round begins, so silos receive it with the round.
        clip = (Sent(RoundClip, Role.SILO),) if self.bound.extra else ()
        weights = self.weights.sends() if shows_counts(self) else ()
        return (*SETUP, *clip, *weights, *self.protection.sends(self))

    @property
    def draws(self) -> bool:
        """Return whether participants of a round are sampled, so that silos or clients must be told."""
        return self.sampler.samples and self.sampler.rate < 1

    @property
    def noise_known(self) -> bool:
        """Return whether the size of the noise on the sum is a public number; False for DP-SGD inside the silos."""
        return self.channel.noise_known and not self.local.own_noise

    @property
    def uncovered_facts(self) -> tuple[str, ...]:
        """Outputs of the composition itself that depend on private data although no event accounts for them."""
        if self.denominator == "expected" or self.sampler.fixed_size:
            return ()
        return (
            "the number of clients drawn in each round, by which the sum is divided (method.denominator = 'actual'): "
            "it is private under Poisson sampling",
        )

    def mechanisms(self, moves: Sensitivity) -> tuple[str, ...]:
        """Return sentences on the decay of the noise from round to round."""
        if self.noise_decay == 1 or not self.channel.mechanisms(moves):
            return ()
        return (
            "the noise named above is that of the first round; from round to round its standard deviation is "
            f"multiplied by {show_at_least(self.noise_decay)}",
        )

    def at_round(self, number: int, state: State = STATELESS) -> Method:
        """Return the method with the noise and bound of round ``number``, given the server's state before it.

        sigma_t = sigma_1 ``noise_decay``^(t-1).
        """
        bound = self.bound.at_state(stage_state(BOUND, state))
        if self.noise_decay == 1:
            return self if bound is self.bound else replace(self, bound=bound)
        # sigma_t = sigma_1 noise_decay^(t-1)
        channel: Any = self.channel  # it supports noise decay, or the composition was refused
        return replace(self, bound=bound, channel=channel.scaled_noise(self.noise_decay ** (number - 1)))

    def divisor(self, n_users: int, n_silos: int, summed: int | None = None) -> float:
        """Return the divisor that makes a mean update of the sum; it uses public numbers only, so it reveals nothing.

        The divisor is |S| if every silo contributes once, and q |U| for (silo, user) pairs and for clients: the mean
        is over users. With public weights of clients it is the sum of the weights. It is an expected number, never
        the real one: dividing by a private number breaks the sensitivity bound.

        Args:
            n_users: |U|.
            n_silos: |S|.
            summed: number of silos in the sum; None for all. The mean is over those.
        """
        divisor = self.contribution.divisor(
            self.sampler.rate, n_users, n_silos, n_silos if summed is None else summed
        )
        return divisor * self.weights.mean


BOUND: Final = "clip."
"""Prefix of the tensors of an adaptive bound in the server's state."""


def stage_state(prefix: str, state: State) -> State:
    """Return the state of one stage, without its prefix, from the server's state."""
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def parties_of(method: Method) -> tuple[Role, ...]:
    """Return the parties of the statement other than readers: server, one sender, coalitions of the protocol."""
    return Role.SERVER, Role.SILO, *method.protection.parties


def message_kinds(method: Method) -> frozenset[type]:
    """Return the message classes that a method may send, as in :meth:`Method.sends`."""
    return frozenset(message.kind for message in method.sends())


def shows_counts(method: Method) -> bool:
    """Return whether silos and server receive each user's record counts, for unprotected weights by records."""
    return bool(method.weights.sends()) and not method.protection.weighs


def sum_noise_std(method: Method, n_silos: int, summed: int | None = None) -> float | None:
    """Return the standard deviation, per coordinate, of the noise on the sum; None if unknown.

    Args:
        method: the method.
        n_silos: |S|.
        summed: number of silos in the sum; None for all.
    """
    if not method.noise_known:
        return None
    return method.channel.noise_std(n_silos, n_silos if summed is None else summed)


def message_length(method: Method, dimension: int) -> int:
    """Return the length of a message in numbers, for a model of d parameters."""
    length: int = method.local.message_length(dimension) + method.bound.extra
    return length


def training_bound(method: Method) -> Bound:
    """Return the bound that local training enforces; Unbounded if the parts are clipped once the partition is known."""
    return method.protection.local_bound(method.bound)


def contribution_weights(method: Method, groups: Groups, population: Population) -> Float64[Tensor, " m"]:
    """Return the weights of one party's contributions, limited so that the sensitivity bound holds.

    Args:
        method: the method.
        groups: the (m,) contributions.
        population: the population, or the part of it that the party has.

    Returns:
        (m,) float64 weights.
    """
    weights = method.weights.for_population(groups, population)
    return method.contribution.limit_weights(weights, groups, population.n_silos, method.weights)


_CONTENTS: Final = (Reveals.MESSAGE, Reveals.EXACT, Reveals.KEYED, Reveals.UNDECLARED)
"""Contents that a channel may declare; none reveals less than a noisy message."""

_DUTIES: Final[Mapping[str, tuple[str, ...]]] = {
    "sampler": ("draw", "amplify", "refuses"),
    "channel": ("claims", "refuses"),
    "protection": ("sends", "make_protocol_spec", "claims", "refuses"),
    "denoiser": ("estimate", "refuses"),
    "weights": ("for_groups", "refuses"),
    "contribution": ("lengths", "divisor", "refuses"),
    "server": ("init", "step"),
    "average": ("init", "update", "released_model", "refuses"),
    "local": ("claims",),
}
"""Methods that each field's stage must override; local steps only if they have their own noise."""

_REFUSING: Final = (
    "sampler",
    "channel",
    "protection",
    "denoiser",
    "weights",
    "contribution",
    "local",
    "bound",
    "server",
    "average",
)
"""Order in which stages are asked for refusals; the first reason is reported."""


# --- variants of a builder ---

Builder = Callable[..., Method]


def variant_of(base: Callable[..., object], **fixed: object) -> Callable[[Builder], Builder]:
    """Make a builder from a function that changes the method of another builder, or uses common keys.

    Args:
        base: the other builder, or a dataclass whose fields are keys; its keys are the variant's too.
        fixed: keys of ``base`` that the variant does not have, with their values.

    Returns:
        A decorator of a function that takes the result of ``base``. The function's keyword arguments are the
            variant's own keys. In the signature they stand after the base's keys without a default, and before those
            with one.
    """

    def decorate(change: Builder) -> Builder:
        plain, *own = inspect.signature(change).parameters.values()
        base_parameters = [
            parameter
            for parameter in inspect.signature(base).parameters.values()
            if parameter.name not in fixed
        ]
        needed = [parameter for parameter in (*base_parameters, *own) if parameter.default is parameter.empty]
        optional = [
            parameter for parameter in (*own, *base_parameters) if parameter.default is not parameter.empty
        ]

        @wraps(change)
        def build(**keys: object) -> Method:
            changed = {
                parameter.name: keys.pop(parameter.name) for parameter in own if parameter.name in keys
            }
            return change(base(**fixed, **keys), **changed)

        hints = get_type_hints(base, include_extras=True) | get_type_hints(change, include_extras=True)
        build.__annotations__ = {
            name: hint for name, hint in hints.items() if name not in (plain.name, *fixed)
        }
        build.__signature__ = inspect.Signature(needed + optional)  # type: ignore[attr-defined]
        return build

    return decorate


# --- the server's state between rounds ---
# The optimiser, the average, an adaptive bound and the reader of stateful noise each own a state, and see their own
# alone. A checkpoint stores all of them in one mapping of tensors, whose names begin with the stage.


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
    decoded, channel_state = method.channel.decode_sum(total, reader_state(state), model, method.bound.unit)
    return decoded, _named(_STREAM, channel_state)


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
    before = stage_state(_AVERAGE, state)
    average = method.average.update(model, before)
    average = check_state(method.average, "average", "the state of update()", average, before)
    bound = method.bound.next_state(marks, users, stage_state(BOUND, state))
    return {**server, **_named(_AVERAGE, average), **_named(BOUND, bound)}


def optimizer_state(state: State) -> State:
    """Return the state of the server's optimiser from the server's state."""
    prefixes = (_AVERAGE, BOUND, _STREAM)
    return {name: value for name, value in state.items() if not name.startswith(prefixes)}


def released_model(method: Method, model: Float32[Tensor, " d"], state: State) -> Float32[Tensor, " d"]:
    """Return the run's model after a round: the global model, or the average released instead."""
    released = method.average.released_model(model, stage_state(_AVERAGE, state))
    return check_tensor(method.average, "average", "released_model()", released, model)


def _begin_reader(channel: Any, model: Float32[Tensor, " d"], length: int) -> Mapping[str, Tensor]:
    return channel.init(model, length) if isinstance(channel, StatefulNoise) else {}


def _named(stage: str, state: Mapping[str, Tensor]) -> State:
    return {stage + name: value for name, value in state.items()}
