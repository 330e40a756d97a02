"""A method is a value: the stages of one round, from who takes part to what the server does with the sum.

What cannot combine is refused when the value is built, with the reason, by the stage that knows it: a method asks each
of its stages in turn. What the composition guarantees is derived from
it by :func:`fedveil.methods.derive.derive`, never stated beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np
from jaxtyping import Float32, Float64
from torch import Tensor

from fedveil.config_keys import is_number, make_plain
from fedveil.data.records import Groups, Population
from fedveil.errors import CompositionError
from fedveil.methods.channels import Channel
from fedveil.methods.contributions import Contribution
from fedveil.methods.no_protection import NO_PROTECTION
from fedveil.methods.own_classes import check_classes
from fedveil.methods.protection_stage import ProtectionStage
from fedveil.methods.weights import Weights
from fedveil.privacy.bounds import Bound
from fedveil.privacy.claims import Reveals, Role, Sent
from fedveil.privacy.sampling import Sampler
from fedveil.privacy.statement import show_at_least
from fedveil.protocols.session_messages import SETUP, RoundClip
from fedveil.stage import ClosedForm, Sensitivity, answers
from fedveil.statistics.local_vectors import PersonVector
from fedveil.training.server.averages import LAST, Average
from fedveil.training.server.denoise import NO_DENOISER, Denoiser
from fedveil.training.server.optimizers import STATELESS, Optimizer, State
from fedveil.training.steps import LocalDpSgd, LocalGradient, LocalSgd


@dataclass(frozen=True, kw_only=True)
class Method:
    """One round, stage by stage; a frozen value that can be compared, printed and recombined.

    With Delta_i the update of contribution i (``local``), w_i its weight and clip the ``bound``, silo s sends
    ``channel( sum_{i in s} w_i clip(Delta_i) )`` and the server adds the silos' messages up, divides by
    :meth:`divisor`, estimates what lies under the noise (``denoiser``) and applies ``server``.

    Attributes:
        name: what reports call it.
        contribution: what is trained and bounded: a silo, a (silo, user) pair, a client, a record.
        sampler: which users (or clients) take part in a round.
        local: what one contribution computes.
        bound: the l2 bound of one contribution's update (l1 for clients that send Laplace noise).
        weights: how contributions enter their silo's sum.
        channel: what a silo does to its sum before it leaves, or the server to the sum of all.
        protection: what hides a single silo's message from the server.
        denoiser: the server's estimate of the mean under its noise: post-processing, at no privacy cost.
        server: what happens to the mean of the sums.
        average: which model the run releases, of those that its rounds end with.
        denominator: "expected" divides by how many take part in expectation; "actual" by how many did, which is
            private and not covered by the guarantee: for reproduction only.
        noise_decay: the factor by which the noise falls from round to round.
        calibrated_to: whom a target epsilon is about: readers of the models, or the server, which sees every message;
            nobody where the noise bounds no unit, so that no accountant can find it.
        closed_form: the published theorem that finds the noise for a target epsilon, where there is one.
        public_counts: what rests on numbers of records that count as public, in words for the statement; where there is
            any, they are among the public facts.
        released: what readers read, in words.
    """

    name: str
    contribution: Contribution
    sampler: Sampler
    local: LocalSgd | LocalGradient | LocalDpSgd | PersonVector
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
                f"{self.name}: {type(self.channel).__name__}, given as channel, says that a message tells "
                f"{self.channel.content.value}; content is one of {', '.join(one.name for one in _CONTENTS)}"
            )
        for field in _REFUSING:
            for reason in getattr(self, field).refuses(self):
                raise CompositionError(f"{self.name}: {reason}")

    # --- what it sends and shows -------------------------------------------------------------------------------

    @property
    def parties(self) -> tuple[Role, ...]:
        """The lines of a statement besides its readers': the server, one sender, and coalitions of a protocol."""
        return Role.SERVER, Role.SILO, *self.protection.parties

    def sends(self) -> tuple[Sent, ...]:
        """Return every message of the setup and of a round, and who reads it."""
        clip = (Sent(RoundClip, Role.SILO),) if self.bound.extra else ()
        weights = self.weights.sends() if self.shows_counts else ()
        return (*SETUP, *clip, *weights, *self.protection.sends(self))

    @property
    def kinds(self) -> frozenset[type]:
        """What may be sent at all: the classes of :meth:`sends`."""
        return frozenset(one.kind for one in self.sends())

    @property
    def shows_counts(self) -> bool:
        """Whether silos and server are sent how many records each user has: weights by records in the open."""
        return bool(self.weights.sends()) and not self.protection.weighs

    @property
    def draws(self) -> bool:
        """Whether who takes part in a round is drawn, so that silos or clients must be told."""
        return self.sampler.samples and self.sampler.rate < 1

    @property
    def noise_known(self) -> bool:
        """Whether the size of the noise on the sum is a public number: that of DP-SGD inside the silos is not."""
        return self.channel.noise_known and not self.local.own_noise

    def noise_std(self, n_silos: int, summed: int | None = None) -> float | None:
        """Return the standard deviation, per coordinate, of the noise on the sum; None if unknown.

        Args:
            n_silos: |S|.
            summed: how many silos the sum is over; None: all.
        """
        if not self.noise_known:
            return None
        return self.channel.noise_std(n_silos, n_silos if summed is None else summed)

    @property
    def uncovered_facts(self) -> tuple[str, ...]:
        """What of the composition itself depends on private data although no event accounts for it."""
        if self.denominator == "expected" or self.sampler.fixed_size:
            return ()
        return (
            "the number of clients drawn in each round, by which the sum is divided (method.denominator = 'actual'): "
            "it is private under Poisson sampling",
        )

    def mechanisms(self, moves: Sensitivity) -> tuple[str, ...]:
        """Return how the noise changes from round to round, in words."""
        if self.noise_decay == 1 or not self.channel.mechanisms(moves):
            return ()
        return (
            "the noise named above is that of the first round; from round to round its standard deviation is "
            f"multiplied by {show_at_least(self.noise_decay)}",
        )

    # --- one round ---------------------------------------------------------------------------------------------

    def at_round(self, number: int, state: State = STATELESS) -> Method:
        """Return the method with the noise and the bound of a round, given what the server remembers before it."""
        bound = self.bound.at_state(_unnamed(_BOUND, state))
        if self.noise_decay == 1:
            return self if bound is self.bound else replace(self, bound=bound)
        return replace(self, bound=bound, channel=self.channel.scaled_noise(self.noise_decay ** (number - 1)))

    def clip_at(self, state: State) -> float | None:
        """Return C_t of the next round, given what the server remembers; None where the clip does not move."""
        return self.bound.at_state(_unnamed(_BOUND, state)).unit if self.bound.extra else None

    def clipped_to(self, length: float) -> Method:
        """Return the method in a round whose C_t another party says."""
        return replace(self, bound=self.bound.measured_in(length))

    @property
    def local_bound(self) -> Bound:
        """The bound that is enforced in local training: none where parts are bounded once the partition is known."""
        return self.protection.local_bound(self.bound)

    def compute_weights(self, groups: Groups, population: Population) -> Float64[Tensor, " m"]:
        """Return the weight of each contribution that one party has, within what the moves of a unit are taken for."""
        found = self.weights.for_population(groups, population)
        return self.contribution.limit_weights(found, groups, population.n_silos, self.weights)

    def divisor(self, n_silos: int, n_users: int) -> float:
        """Return what the sum is divided by; public numbers only, so that it reveals nothing.

        |S| where every silo contributes once; q |U| |S| for (silo, user) pairs and q |U| for clients: the expected
        number of users who take part, never the number who did.
        """
        return self.contribution.divisor(self.sampler.rate, n_silos, n_users)

    # --- what is remembered from round to round ----------------------------------------------------------------

    def init(self, model: Float32[Tensor, " d"]) -> State:
        """Return what the server remembers before the first round: the states of its stages, by stage and name."""
        average, bound = self.average.init(model), self.bound.init()
        stream = self.channel.init(model, len(model) + self.bound.extra)
        return {
            **self.server.init(model),
            **_named(_AVERAGE, average),
            **_named(_BOUND, bound),
            **_named(_STREAM, stream),
        }

    def initial_reader_state(self, model: Float32[Tensor, " d"]) -> State:
        """Return what a silo remembers before the first round: it decodes nothing, so its totals have no numbers."""
        return _named(_STREAM, self.channel.init(model, 0))

    def decode_sum(
        self, total: Float64[np.ndarray, " length"], model: Float32[Tensor, " d"], state: State
    ) -> tuple[Float64[np.ndarray, " length"], State]:
        """Return the round's own sum of what was received, and what the channel's reader remembers after it."""
        found, kept = self.channel.decode_sum(total, self.stream_of(state), model, self.bound.unit)
        return found, _named(_STREAM, kept)

    def stream_of(self, state: State) -> Mapping[str, Tensor]:
        """Return what the channel's reader remembers."""
        return _unnamed(_STREAM, state)

    def next_state(
        self,
        model: Float32[Tensor, " d"],
        server: State,
        marks: Float64[Tensor, " extra"],
        users: float,
        state: State,
    ) -> State:
        """Return what the server remembers after a step.

        Args:
            model: (d,) the next global model.
            server: the server optimiser's own next state.
            marks: the released sums of what the bound adds beside the updates.
            users: how many take part in expectation.
            state: what :meth:`init` or the step before returned.
        """
        average = self.average.update(model, _unnamed(_AVERAGE, state))
        bound = self.bound.next_state(marks, users, _unnamed(_BOUND, state))
        return {**server, **_named(_AVERAGE, average), **_named(_BOUND, bound)}

    def model_of(self, model: Float32[Tensor, " d"], state: State) -> Float32[Tensor, " d"]:
        """Return the run's model after a round: the global model, or the average that is released instead."""
        return self.average.released_model(model, _unnamed(_AVERAGE, state))


_AVERAGE: Final = "average."
_BOUND: Final = "clip."
_STREAM: Final = "stream."


def _named(stage: str, state: Mapping[str, Tensor]) -> State:
    return {stage + name: value for name, value in state.items()}


def _unnamed(stage: str, state: State) -> State:
    return {name.removeprefix(stage): value for name, value in state.items() if name.startswith(stage)}


_CONTENTS: Final = (Reveals.MESSAGE, Reveals.EXACT, Reveals.KEYED, Reveals.UNDECLARED)
"""What a channel may say that its messages tell: whatever it does, they tell no less than a noisy message."""

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
"""What every stage must define for itself; local steps where they have noise of their own."""

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
"""The order in which stages are asked what they refuse; the first reason is told."""
