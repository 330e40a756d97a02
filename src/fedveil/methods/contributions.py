"""Contributions: what is trained and bounded, and how far one unit moves what its senders send."""

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
from fedveil.methods.weights import Weights
from fedveil.privacy.accounting import make_accountant
from fedveil.privacy.events import Adjacency, GaussianEvent, SelfComposedEvent
from fedveil.stage import Published, Sensitivity, Stage, duty


class Contribution(Stage):
    """What is trained and bounded, and how far one unit moves what its senders send; l2, in the unit of the update.

    Attributes:
        per: what makes one contribution: a silo, a (silo, user) pair, a client or a record.
        unit: who is protected as a whole.
        drawn_alone: whether a sender stands for one unit, and so is told its own draw alone.
    """

    per: ClassVar[Literal["silo", "pair", "client", "record"]]
    unit: ClassVar[Literal["user", "client"]] = "user"
    drawn_alone: ClassVar[bool] = False

    @property
    def by_user(self) -> bool:
        """Whether a contribution is one user's, who may be drawn or not."""
        return self.per in ("pair", "client")

    @property
    def has_single_contribution(self) -> bool:
        """Whether a sender's message holds one contribution."""
        return self.per in ("silo", "client")

    def refuses(self, method: Any) -> Iterable[str]:
        """Refuse means over who took part where nobody is counted, and records without DP-SGD or DP-SGD without."""
        if method.denominator == "actual" and self.per != "client":
            yield "only a mean over clients can be divided by how many took part"
        if self.per == "record" and method.channel.sends_bytes:
            yield "DP-SGD has its noise inside the silos; the noise of a channel would come on top of it"
        if (self.per == "record") != method.local.own_noise:
            yield "records are contributions of DP-SGD, and of DP-SGD only (LocalDpSgd)"

    def sensitivity(self, method: Any, public: Any) -> Sensitivity:
        """Return how far one unit moves the sum, and all messages one by one.

        Args:
            method: the composition.
            public: the federation's public facts.

        Raises:
            PrivacyError: users are drawn from another number of them than there are.
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
            reach=largest * (1 if replaced else 2),
            largest=largest,
            ballots=self.ballots(n),
            n_senders=n,
            n_silos=public.n_silos,
            noise=method.channel.message_std(n),
            bound=method.bound,
            group=self.group,
            records=public.silo_records,
            together=max(1, method.channel.colluding_silos),
            divided=method.protection.divides,
        )

    @property
    def group(self) -> int:
        """How many contributions are one unit's, where that is limited."""
        return 1

    def n_senders(self, method: Any, public: Any) -> int:
        """Return how many messages a round has."""
        found: int = method.channel.n_senders(public.n_silos)
        return found

    @duty
    def lengths(self, norm: float, n: int, weights: Weights) -> tuple[float, float]:
        """Return the l2 moves of the sum, and of all messages together."""
        return math.inf, math.inf

    def limit_weights(
        self, found: Float[Tensor, " m"], groups: Groups, n_silos: int, weights: Weights
    ) -> Float64[Tensor, " m"]:
        """Return weights for which :meth:`lengths` holds, whatever their class computed: here w in [0, 1].

        Weights that are so already come back bit by bit. What is no number counts as 0. A weight too large is cut and
        never refused: whether a run goes on would tell of records.

        Args:
            found: of each contribution.
            groups: the contributions.
            n_silos: |S|.
            weights: that computed them.
        """
        return found.double().nan_to_num(nan=0.0).clamp(0.0, 1.0)

    def divisor(self, rate: float, n_silos: int, n_users: int) -> float:
        """Return what the sum is divided by: how many contributions of weight 1 are expected; here |S|.

        Args:
            rate: the probability that a user takes part.
            n_silos: |S|, those that are there.
            n_users: |U|.
        """
        return float(n_silos)

    def spread_evenly(self, weights: Weights) -> bool:
        """Return whether no sender carries more of one unit than another may."""
        return False

    def largest_message(self, norm: float, n: int, n_users: int, weights: Weights) -> float:
        """Return the largest l2 norm of a message before its noise."""
        return norm

    def ballots(self, n: int) -> int:
        """Return how many senders' ballots one unit can change."""
        return n


@dataclass(frozen=True)
class SiloContribution(Contribution):
    """A silo's whole table is one contribution: adding or removing a user changes it, but it never goes away.

    Every silo's update may move from anywhere to anywhere in the ball of radius C: the sum moves by 2 C |S|. (Theorem
    1 of ULDP-FL counts C |S|, as if a silo's update were absent without the user.)
    """

    per: ClassVar[Literal["silo"]] = "silo"

    def lengths(self, norm: float, n: int, weights: Weights) -> tuple[float, float]:
        """Return (2 C |S|, 2 C sqrt(|S|))."""
        return 2.0 * norm * n, 2.0 * norm * math.sqrt(n)

    def spread_evenly(self, weights: Weights) -> bool:
        """Return True: every silo's update may move by 2 C and no further."""
        return True

    def published_figures(self, method: Any, public: Any) -> tuple[Published, ...]:
        """Return the figure of Theorem 1 of ULDP-FL."""
        multiplier = method.channel.nominal()
        if multiplier == 0:
            return ()

        def theorem_1(rounds: int, delta: float) -> float:
            event = SelfComposedEvent(event=GaussianEvent(noise_multiplier=multiplier), count=rounds)
            return make_accountant("rdp").epsilon(event, delta)

        gap = "it counts C|S| as the sensitivity, but a silo's clipped update can move by 2C"
        return (Published(name="Theorem 1 of ULDP-FL", gap=gap, epsilon=theorem_1),)


@dataclass(frozen=True)
class SiloUserContribution(Contribution):
    """Each (silo, user) pair is one contribution: adding or removing a user adds or removes it.

    The weights of a user sum to at most 1 over the silos, so the sum moves by at most C. :meth:`limit_weights` sees
    to it where the weights of all silos are in one process; between institutions each silo limits its own share
    alone.
    """

    per: ClassVar[Literal["pair"]] = "pair"

    def divisor(self, rate: float, n_silos: int, n_users: int) -> float:
        """Return q |U| |S|."""
        return rate * n_users * n_silos

    def lengths(self, norm: float, n: int, weights: Weights) -> tuple[float, float]:
        """Return (C, C), or (C, C / sqrt(|S|)) where every silo has the weight 1/|S|."""
        return norm, norm / math.sqrt(n) if weights.uniform else norm

    def limit_weights(
        self, found: Float[Tensor, " m"], groups: Groups, n_silos: int, weights: Weights
    ) -> Float64[Tensor, " m"]:
        """Return weights in [0, 1], or [0, 1/|S|] where all are to have that, of which a user's sum to at most 1.

        To 1 + |S| 2^-52 in float64, as weights by records do. Weights of a user that sum to more are divided by their
        sum; nobody else's change.
        """
        kept = super().limit_weights(found, groups, n_silos, weights)
        if weights.uniform:
            kept = kept.clamp(max=1.0 / n_silos)
        sums = np.bincount(groups.user, weights=kept.numpy())
        over = np.where(sums > 1 + n_silos * 2.0**-52, sums, 1.0)
        return kept / torch.from_numpy(over[groups.user])

    def spread_evenly(self, weights: Weights) -> bool:
        """Return whether every silo has the same weight."""
        return weights.uniform

    def largest_message(self, norm: float, n: int, n_users: int, weights: Weights) -> float:
        """Return |U| w C: all users may be in one silo."""
        return n_users * (1 / n if weights.uniform else 1.0) * norm


@dataclass(frozen=True)
class ClientContribution(Contribution):
    """Each client, a silo that holds one user, is one contribution: cross-device learning.

    Clients are many, so their updates go into one sum; what a silo would send alone is not kept. One clipped update
    comes or goes: C. (Replacing it moves the sum by 2 C, which accountants count.)
    """

    per: ClassVar[Literal["client"]] = "client"
    unit: ClassVar[Literal["user", "client"]] = "client"
    drawn_alone: ClassVar[bool] = True

    def n_senders(self, method: Any, public: Any) -> int:
        """Return how many messages a round has: one of every client that is drawn.

        Raises:
            CompositionError: clients add noise of their own, and the channel counts that of others.
        """
        found, drawn = super().n_senders(method, public), method.sampler.size
        there = public.n_users if drawn is None else drawn
        if method.channel.by_clients and found != there:
            raise CompositionError(
                f"{method.name} counts the noise of {found} clients, and {there} send in a round: compose it for "
                f"n_users = {public.n_users}"
            )
        return found

    def lengths(self, norm: float, n: int, weights: Weights) -> tuple[float, float]:
        """Return (C, C): of all messages one moves."""
        return norm, norm

    def divisor(self, rate: float, n_silos: int, n_users: int) -> float:
        """Return q |U|."""
        return rate * n_users

    def ballots(self, n: int) -> int:
        """Return 1: a client's own."""
        return 1


@dataclass(frozen=True)
class RecordContribution(Contribution):
    """Each record is one contribution inside DP-SGD; a user keeps at most ``per_user`` records over all silos."""

    per: ClassVar[Literal["record"]] = "record"

    per_user: Count

    def lengths(self, norm: float, n: int, weights: Weights) -> tuple[float, float]:
        """Return (C, C): what one record moves a step of DP-SGD, whose noise claims for all of them."""
        return norm, norm

    @property
    def group(self) -> int:
        """How many records are one user's."""
        return self.per_user
