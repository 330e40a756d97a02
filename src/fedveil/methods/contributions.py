"""Define contributions, the unit of training and clipping, and the sensitivity of a round to one unit."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from fedveil.config_keys import Count
from fedveil.data.records import Groups
from fedveil.errors import CompositionError
from fedveil.methods.capabilities import (
    ClientSender,
    count_colluding,
    count_senders,
    nominal_multiplier,
    sends_bytes,
)
from fedveil.methods.weights import Weights
from fedveil.privacy.accounting import make_accountant
from fedveil.privacy.events import Adjacency, GaussianEvent, SelfComposedEvent
from fedveil.stage import Published, Sensitivity, Stage, duty


class Contribution(Stage):
    """Unit of training and clipping; derives the l2 sensitivity of a round, in the unit of the update.

    Attributes:
        per: extent of one contribution: a silo, a (silo, user) pair, a client or a record.
        unit: the protected unit.
        drawn_alone: whether a sender stands for one unit, so that it receives only its own sampling flag.
    """

    per: ClassVar[Literal["silo", "pair", "client", "record"]]
    unit: ClassVar[Literal["user", "client"]] = "user"
    drawn_alone: ClassVar[bool] = False

    @property
    def by_user(self) -> bool:
        """Return whether a contribution belongs to one user or client, who may be sampled."""
        return self.per in ("pair", "client")

    @property
    def has_single_contribution(self) -> bool:
        """Return whether a sender's message holds a single contribution."""
        return self.per in ("silo", "client")

    def refuses(self, method: Any) -> Iterable[str]:
        """Refuse a divisor "actual" without clients, and records unless they are contributions of DP-SGD."""
        if method.denominator == "actual" and self.per != "client":
            yield "only a mean over clients can be divided by how many took part"
        if self.per == "record" and sends_bytes(method.channel):
            yield "DP-SGD has its noise inside the silos; the noise of a channel would come on top of it"
        if (self.per == "record") != method.local.own_noise:
            yield "records are contributions of DP-SGD, and of DP-SGD only (LocalDpSgd)"

    def sensitivity(self, method: Any, public: Any) -> Sensitivity:
        """Return the sensitivity of the sum, and of all messages taken together.

        Args:
            method: the composition.
            public: the federation's public facts.

        Raises:
            PrivacyError: the sampler assumes another number of users than the federation has.
        """
        n, norm = self.n_senders(method, public), method.bound.norm
        method.sampler.check_among(public.n_users)
        total, messages = self.lengths(norm, n, method.weights)
        bounded, replaced = method.bound.bounded, method.sampler.adjacency is Adjacency.REPLACE_ONE
        largest = self.largest_message(norm, n, public.n_users, method.weights) if bounded else 0.0
        return Sensitivity(
            unit=self.unit,
            total=total,
            messages=messages,
            even=self.spread_evenly(method.weights),
            reweighs=method.weights.by_records,
            weight=method.weights.description,
            # A message moves from one end of its ball to the other: 2 B. Accountants double a replace-one sensitivity
            # already.
            reach=largest * (1 if replaced else 2),
            largest=largest,
            ballots=self.ballots(n),
            n_senders=n,
            n_silos=public.n_silos,
            noise=method.channel.message_std(n),
            bound=method.bound,
            group=self.group,
            records=public.silo_records,
            together=max(1, count_colluding(method.channel)),
            divided=method.protection.divides,
        )

    @property
    def group(self) -> int:
        """Largest number of contributions of one unit, if the method limits it."""
        return 1

    def n_senders(self, method: Any, public: Any) -> int:
        """Return the number of messages in a round."""
        count: int = count_senders(method.channel, public.n_silos)
        return count

    @duty
    def lengths(self, norm: float, n: int, weights: Weights) -> tuple[float, float]:
        """Return the l2 sensitivities of the sum, and of all messages together."""
        return math.inf, math.inf

    def limit_weights(
        self, computed: Float[Tensor, " m"], groups: Groups, n_silos: int, weights: Weights
    ) -> Float64[Tensor, " m"]:
        """Return weights for which :meth:`lengths` holds, whatever their class computed; here w in [0, 1].

        Valid weights are returned bit by bit. NaN counts as 0. A weight that is too large is cut and never refused,
        because a refusal would depend on private records.

        Args:
            computed: (m,) weights of the contributions.
            groups: the contributions.
            n_silos: |S|.
            weights: the stage that computed them.
        """
        return computed.double().nan_to_num(nan=0.0).clamp(0.0, 1.0)

    def divisor(self, rate: float, n_users: int, n_silos: int, summed: int) -> float:
        """Return the divisor that makes a mean update of the sum; here the number of silos in the sum.

        Args:
            rate: probability that a user takes part.
            n_users: |U|.
            n_silos: |S|.
            summed: number of silos in the sum.
        """
        return float(summed)

    def spread_evenly(self, weights: Weights) -> bool:
        """Return whether every sender carries at most the same share of one unit's change."""
        return False

    def largest_message(self, norm: float, n: int, n_users: int, weights: Weights) -> float:
        """Return the largest l2 norm of a message before its noise."""
        return norm

    def ballots(self, n: int) -> int:
        """Return the number of senders whose ballots one unit can change."""
        return n


@dataclass(frozen=True)
class SiloContribution(Contribution):
    """Contribution of a silo's whole table; removing a user changes it but does not remove it.

    The update of every silo may change from any point to any other in the ball of radius C. So the sum changes by up
    to 2 C |S|. Theorem 1 of ULDP-FL counts C |S|, as if a silo's update were absent without the user.
    """

    per: ClassVar[Literal["silo"]] = "silo"

    def lengths(self, norm: float, n: int, weights: Weights) -> tuple[float, float]:
        """Return (2 C |S|, 2 C sqrt(|S|))."""
        # n changes of length 2 C: parallel in the sum, orthogonal (one block each) in the vector of all messages.
        return 2.0 * norm * n, 2.0 * norm * math.sqrt(n)

    def spread_evenly(self, weights: Weights) -> bool:
        """Return True: the update of every silo changes by at most 2 C."""
        return True

    def published_figures(self, method: Any, public: Any) -> tuple[Published, ...]:
        """Return the figure of Theorem 1 of ULDP-FL."""
        multiplier = nominal_multiplier(method.channel)
        if multiplier == 0:
            return ()

        def theorem_1(rounds: int, delta: float) -> float:
            event = SelfComposedEvent(event=GaussianEvent(noise_multiplier=multiplier), count=rounds)
            return make_accountant("rdp").epsilon(event, delta)

        gap = "it counts C|S| as the sensitivity, but a silo's clipped update can move by 2C"
        return (Published(name="Theorem 1 of ULDP-FL", gap=gap, epsilon=theorem_1),)


@dataclass(frozen=True)
class SiloUserContribution(Contribution):
    """Contribution of one (silo, user) pair; adding or removing a user adds or removes its pairs.

    The weights of a user sum to at most 1 over the silos, so the sum changes by at most C (ULDP-FL, Theorem 3).
    :meth:`limit_weights` enforces this if the weights of all silos are in one process. Between institutions, each
    silo limits only its own weights.
    """

    per: ClassVar[Literal["pair"]] = "pair"

    def divisor(self, rate: float, n_users: int, n_silos: int, summed: int) -> float:
        """Return q |U|, or the share of it that the silos in the sum have of all silos."""
        return rate * n_users * summed / n_silos

    def lengths(self, norm: float, n: int, weights: Weights) -> tuple[float, float]:
        """Return (C, C), or (C, C / sqrt(|S|)) where every silo has the weight 1/|S|."""
        # With w = 1/|S|, the |S| messages change by C/|S| each: together by sqrt(|S|) C/|S|. Other weights may put
        # all into one message.
        return norm, norm / math.sqrt(n) if weights.uniform else norm

    def limit_weights(
        self, computed: Float[Tensor, " m"], groups: Groups, n_silos: int, weights: Weights
    ) -> Float64[Tensor, " m"]:
        """Return weights in [0, 1], or [0, 1/|S|] if uniform, that sum to at most 1 for each user.

        The sums may exceed 1 by |S| 2^-52 in float64, as those of weights by records do. If the weights of a user sum
        to more, they are divided by their sum. No other user's weights change.
        """
        # The margin |S| 2^-52 covers the rounding of |S| float64 divisions and additions, so valid weights pass
        # unchanged.
        limited = super().limit_weights(computed, groups, n_silos, weights)
        if weights.uniform:
            limited = limited.clamp(max=1.0 / n_silos)
        sums = np.bincount(groups.user, weights=limited.numpy())
        over = np.where(sums > 1 + n_silos * 2.0**-52, sums, 1.0)
        return limited / torch.from_numpy(over[groups.user])

    def spread_evenly(self, weights: Weights) -> bool:
        """Return whether every silo has the same weight."""
        return weights.uniform

    def largest_message(self, norm: float, n: int, n_users: int, weights: Weights) -> float:
        """Return |U| w C: all users may be in one silo."""
        return n_users * (1 / n if weights.uniform else 1.0) * norm


@dataclass(frozen=True)
class ClientContribution(Contribution):
    """Contribution of one client, a silo that holds one user: cross-device learning.

    Clients are many, so their updates are added to one sum, and single updates are not kept. Adding or removing a
    client changes the sum by one clipped update: C. Replacing it changes the sum by 2 C; accountants count that
    factor.
    """

    per: ClassVar[Literal["client"]] = "client"
    unit: ClassVar[Literal["user", "client"]] = "client"
    drawn_alone: ClassVar[bool] = True

    def n_senders(self, method: Any, public: Any) -> int:
        """Return the number of messages in a round: one per sampled client.

        Raises:
            CompositionError: clients add their own noise, and the channel counts the noise of another number of
                clients.
        """
        counted, drawn = super().n_senders(method, public), method.sampler.size
        n_sending = public.n_users if drawn is None else drawn
        if isinstance(method.channel, ClientSender) and counted != n_sending:
            raise CompositionError(
                f"{method.name} counts the noise of {counted} clients, and {n_sending} send in a round: compose it for "
                f"n_users = {public.n_users}"
            )
        return counted

    def lengths(self, norm: float, n: int, weights: Weights) -> tuple[float, float]:
        """Return (C, C): a single message changes."""
        return norm, norm

    def divisor(self, rate: float, n_users: int, n_silos: int, summed: int) -> float:
        """Return q |U|."""
        return rate * n_users

    def ballots(self, n: int) -> int:
        """Return 1: a client's own ballot."""
        return 1


@dataclass(frozen=True)
class RecordContribution(Contribution):
    """Contribution of one record inside DP-SGD; a user keeps at most ``per_user`` records over all silos."""

    per: ClassVar[Literal["record"]] = "record"

    per_user: Count

    def lengths(self, norm: float, n: int, weights: Weights) -> tuple[float, float]:
        """Return (C, C): the sensitivity of one DP-SGD step to one record, to which that step's noise refers."""
        return norm, norm

    @property
    def group(self) -> int:
        """Largest number of records of one user."""
        return self.per_user
