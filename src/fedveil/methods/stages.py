"""The stages a method is composed of, where they are not a room of their own.

Contributions (what is trained and bounded), weights (how contributions enter the sum) and the channels: additive
noise, which ties the exact noise laws of ``privacy`` to the grid on which contributions are summed, and quantisers
whose error is that noise.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Final, Literal

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from fedveil.channel.codec import Channel as Codec
from fedveil.channel.codec import gaussian_channel
from fedveil.channel.errors import ChannelError
from fedveil.channel.information import information_limit
from fedveil.channel.lattices import lattice
from fedveil.channel.laws import GaussianLaw
from fedveil.channel.quantizers import LayeredQuantizer
from fedveil.channel.streams import KeyedStreams, update_key
from fedveil.errors import CompositionError
from fedveil.population.records import Groups
from fedveil.privacy.accounting import make_accountant
from fedveil.privacy.bounds import Unbounded
from fedveil.privacy.claims import Claim, Role, Sent, Tells, covering, unprotected
from fedveil.privacy.events import Event, GaussianEvent, NoGuarantee, SelfComposedEvent
from fedveil.privacy.fixed_size import published_epsilon
from fedveil.privacy.noise import DiscreteGaussian, grid_for
from fedveil.protection.parts import Counts, Totals
from fedveil.randomness import BitSource
from fedveil.stage import Moves, Published, Source, Stage

KEY_REASON: Final = (
    "the key of a message bounds the error of every parameter, and blocks' spreads depend on the sum"
)
OF_LAYERS: Final = (
    "messages must travel encrypted: their length and the spreads in them depend on private sums, and so "
    "do the message sizes and information limits in metrics.jsonl",
    "the channel's noise has its law in real numbers; it is computed in float64 from 52-bit uniforms of a ChaCha20 "
    "stream under a fresh key, and epsilon covers neither the rounding nor a broken cipher",
)
"""What no epsilon over a layered quantiser covers."""

_KEY_BYTES: Final = 32
_SCALE: Final = struct.Struct("<d")


class _Contributions(Stage):
    """What is trained and bounded, and how far one unit moves what its senders send; l2, in the unit of the update.

    Attributes:
        unit: who is protected as a whole.
        drawn_alone: whether a sender stands for one unit, and so is told its own draw alone.
    """

    unit: ClassVar[Literal["user", "client"]] = "user"
    drawn_alone: ClassVar[bool] = False

    def moves(self, method: Any, public: Any) -> Moves:
        """Return how far one unit moves the sum, and all messages one by one.

        Args:
            method: the composition.
            public: the federation's public facts.
        """
        n, bounded = self.n_senders(method, public), not isinstance(method.bound, Unbounded)
        norm = method.bound.norm if bounded else math.inf
        total, messages = self.lengths(norm, n, method.weights)
        return Moves(
            unit=self.unit,
            total=total,
            messages=messages,
            even=self.spread_evenly(method.weights),
            reweighs=method.weights is Weights.BY_RECORDS,
            reach=self.largest_message(norm, n, public.n_users, method.weights)
            * (1 if method.sampler.replaces else 2)
            if bounded
            else 0.0,
            ballots=self.ballots(n),
            n_senders=n,
            noise=method.channel.message_std(n),
            bound=method.bound,
            group=self.group,
            records=public.silo_records,
        )

    @property
    def group(self) -> int:
        """How many contributions are one unit's, where that is limited."""
        return 1

    def n_senders(self, method: Any, public: Any) -> int:
        """Return how many messages a round has."""
        found: int = method.channel.n_senders(public.n_silos)
        return found

    def lengths(self, norm: float, n: int, weights: Weights) -> tuple[float, float]:
        """Return the l2 moves of the sum, and of all messages together."""
        return norm, norm

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
class SiloContribution(_Contributions):
    """A silo's whole table is one contribution: adding or removing a user changes it, but it never goes away.

    Every silo's update may move from anywhere to anywhere in the ball of radius C: the sum moves by 2 C |S|. (Theorem
    1 of ULDP-FL counts C |S|, as if a silo's update were absent without the user.)
    """

    def lengths(self, norm: float, n: int, weights: Weights) -> tuple[float, float]:
        """Return (2 C |S|, 2 C sqrt(|S|))."""
        return 2.0 * norm * n, 2.0 * norm * math.sqrt(n)

    def spread_evenly(self, weights: Weights) -> bool:
        """Return True: every silo's update may move by 2 C and no further."""
        return True

    def published(self, method: Any, public: Any) -> tuple[Published, ...]:
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
class SiloUserContribution(_Contributions):
    """Each (silo, user) pair is one contribution: adding or removing a user adds or removes it.

    The weights of a user sum to at most 1 over the silos, so the sum moves by at most C.
    """

    def lengths(self, norm: float, n: int, weights: Weights) -> tuple[float, float]:
        """Return (C, C), or (C, C / sqrt(|S|)) where every silo has the weight 1/|S|."""
        return norm, norm / math.sqrt(n) if weights is Weights.UNIFORM else norm

    def spread_evenly(self, weights: Weights) -> bool:
        """Return whether every silo has the same weight."""
        return weights is Weights.UNIFORM

    def largest_message(self, norm: float, n: int, n_users: int, weights: Weights) -> float:
        """Return |U| w C: all users may be in one silo."""
        return n_users * (1 / n if weights is Weights.UNIFORM else 1.0) * norm


@dataclass(frozen=True)
class ClientContribution(_Contributions):
    """Each client, a silo that holds one user, is one contribution: cross-device learning.

    Clients are many, so their updates go into one sum; what a silo would send alone is not kept. One clipped update
    comes or goes: C. (Replacing it moves the sum by 2 C, which accountants count.)
    """

    unit: ClassVar[Literal["user", "client"]] = "client"
    drawn_alone: ClassVar[bool] = True

    def ballots(self, n: int) -> int:
        """Return 1: a client's own."""
        return 1


@dataclass(frozen=True)
class RecordContribution(_Contributions):
    """Each record is one contribution inside DP-SGD; a user keeps at most ``per_user`` records over all silos."""

    per_user: int

    def __post_init__(self) -> None:
        if self.per_user < 1:
            raise CompositionError(f"group size k = {self.per_user}: a user keeps at least 1 record")

    @property
    def group(self) -> int:
        """How many records are one user's."""
        return self.per_user


Contribution = SiloContribution | SiloUserContribution | ClientContribution | RecordContribution


class Weights(Enum):
    """The weight of a contribution in its silo's sum. For pairs, the weights of one user sum to at most 1.

    ONE: w = 1 (FedAVG, ULDP-NAIVE, DP-Fed: the server divides by the number of silos or of clients).
    UNIFORM: w_{s,u} = 1/|S| (ULDP-AVG); the share of a silo where the user has no record is lost.
    BY_RECORDS: w_{s,u} = n_{s,u}/N_u (ULDP-AVG-w).
    """

    ONE = "1"
    UNIFORM = "1/|S|"
    BY_RECORDS = "n_su/N_u"

    def sends(self) -> tuple[Sent, ...]:
        """Return the messages by which silos learn the weights in the open: counts go up, totals come back."""
        if self is not Weights.BY_RECORDS:
            return ()
        return Sent(Counts, Role.SERVER), Sent(Totals, Role.SILO)

    def of(self, groups: Groups, n_silos: int, n_users: int) -> Float64[Tensor, " m"]:
        """Return the weight of each contribution."""
        if self is Weights.ONE:
            return torch.ones(len(groups.size), dtype=torch.float64)
        if self is Weights.UNIFORM:
            return torch.full((len(groups.size),), 1.0 / n_silos, dtype=torch.float64)
        totals = np.bincount(groups.user, weights=groups.size, minlength=n_users)
        return torch.from_numpy(groups.size / totals[groups.user])


class Channel(Source):
    """What a sender does to its sum before it leaves, or the server to the sum of all.

    Attributes:
        content: what a message tells whoever reads it.
        coded: whether a message is bytes that travel sealed, with a key of their own, and not numbers.
    """

    @property
    def content(self) -> Tells:
        """What a message tells whoever reads it; a channel that does not say tells UNDECLARED."""
        return Tells.UNDECLARED

    @property
    def coded(self) -> bool:
        """Whether a message is bytes."""
        return False

    @property
    def colluding(self) -> int:
        """How many senders may pool what they know without weakening the noise against them."""
        return 0

    def n_senders(self, n_silos: int) -> int:
        """Return how many messages a round has."""
        return n_silos

    def nominal(self) -> float:
        """Return the noise multiplier of the sum that senders share, in units of the scale; 0 where they share none."""
        return 0.0

    def message_std(self, n: int) -> float:
        """Return the standard deviation of the noise of one of ``n`` messages, where it is Gaussian; 0 otherwise."""
        return 0.0


@dataclass(frozen=True)
class Identity(Channel):
    """The silo's sum travels as it is."""

    @property
    def content(self) -> Tells:
        """What a message tells."""
        return Tells.EXACT

    def claims(self, moves: Moves) -> tuple[Claim, ...]:
        """Claim nothing."""
        if math.isinf(moves.total):
            return (unprotected("contributions are not bounded and no noise is added"),)
        return (unprotected(NO_NOISE),)

    def grid_loss(self, moves: Moves) -> float:
        """Return 0: there is no noise."""
        return 0.0


NO_NOISE: Final = "no noise is added to the sums"


@dataclass(frozen=True, kw_only=True)
class GaussianShares(Channel):
    """Every silo adds its share of one Gaussian noise to its sum (ULDP-FL, Algorithms 1 and 3).

    The shares of all silos together have standard deviation ``noise_multiplier * scale``:
    share std = noise_multiplier * scale / sqrt(|S| - colluding_silos - missing_silos). Against silos that pool what
    they know of their own shares, and in a sum that lacks some, the shares of the others still add up to it.

    Attributes:
        noise_multiplier: sigma, in units of scale.
        scale: what the noise is measured in, same unit as the update (C for ULDP-AVG, |S| C for ULDP-NAIVE).
        colluding_silos: how many silos may pool their knowledge without weakening the noise against them.
        missing_silos: how many silos may be missing from a sum, with their shares, without weakening it.
    """

    @property
    def content(self) -> Tells:
        """What a message tells."""
        return Tells.MESSAGE

    noise_multiplier: float
    scale: float
    colluding_silos: int = 0
    missing_silos: int = 0

    def __post_init__(self) -> None:
        if not (self.noise_multiplier >= 0 and math.isfinite(self.noise_multiplier)):
            raise CompositionError(
                f"noise_multiplier = {self.noise_multiplier}: a finite number >= 0 is needed"
            )

    def share_std(self, n_silos: int) -> float:
        """Return the standard deviation of one silo's share per coordinate."""
        honest = n_silos - self.colluding_silos - self.missing_silos
        if honest < 1:
            raise CompositionError(
                f"colluding_silos = {self.colluding_silos} and missing_silos = {self.missing_silos} of {n_silos} "
                "silos: at least one silo must be honest and there"
            )
        return self.noise_multiplier * self.scale / math.sqrt(honest)

    @property
    def colluding(self) -> int:
        """How many silos."""
        return self.colluding_silos

    def nominal(self) -> float:
        """Return sigma."""
        return self.noise_multiplier

    def message_std(self, n: int) -> float:
        """Return the standard deviation of one share."""
        return self.share_std(n)

    def claims(self, moves: Moves) -> tuple[Claim, ...]:
        """Claim all shares for the sum, one for a message, and the others' against silos that pool what they know.

        A coalition of c silos knows its own shares. What a user holds in the others is guaranteed to her
        (:meth:`~fedveil.stage.Moves.pooled`), under the noise of the honest ones that are there.
        """
        if self.noise_multiplier == 0:
            return (unprotected(NO_NOISE),)
        n, share = moves.n_senders, self.share_std(moves.n_senders)
        coalition = max(1, self.colluding_silos)
        single = min(share / moves.messages, self._nominal(moves).noise_multiplier)
        honest = n - self.colluding_silos - self.missing_silos
        unknown = n - self.missing_silos - coalition
        pooled: Event = NoGuarantee(reason="no share of the noise is left")
        singly = pooled
        if unknown > 0:
            left = share / moves.pooled(unknown, coalition, honest)
            pooled, singly = (
                GaussianEvent(noise_multiplier=left),
                GaussianEvent(noise_multiplier=min(left, single)),
            )
        return (
            Claim(covering(Tells.SUM), self._nominal(moves)),
            Claim(covering(Tells.SUM, Tells.MESSAGE), GaussianEvent(noise_multiplier=single)),
            Claim(covering(Tells.SUM, Tells.OWN), pooled, amplified=not moves.reweighs),
            Claim(covering(Tells.SUM, Tells.OWN, Tells.MESSAGE), singly, amplified=not moves.reweighs),
        )

    def _nominal(self, moves: Moves) -> GaussianEvent:
        """Return the event of the sum for whoever knows no share."""
        return GaussianEvent(noise_multiplier=self.noise_multiplier * self.scale / moves.total)

    def grid_loss(self, moves: Moves) -> float:
        """Return what the grid of all shares costs a coordinate."""
        if self.noise_multiplier == 0:
            return 0.0
        return (
            2
            * moves.n_senders
            * grid_law(self.share_std(moves.n_senders), moves.bound.grid).log_ratio_to_gaussian
        )

    def mechanisms(self, moves: Moves) -> tuple[str, ...]:
        """Return the sensitivity and the shares."""
        return self.told(moves, "discrete Gaussian shares")

    def told(self, moves: Moves, law: str) -> tuple[str, ...]:
        """Return the sensitivity and the shares, whose law has a name."""
        if self.noise_multiplier == 0:
            return ()
        n = moves.n_senders
        return (
            f"every round: the sum over {n} silos moves by at most {moves.total:g} (l2) with one user; {law} of std "
            f"{self.share_std(n):g} per silo, noise multiplier {self._nominal(moves).noise_multiplier:g} of the sum",
        )

    def message_grid(self, grid: float, n_silos: int) -> float:
        """Return the step of what a silo sends: a power of two that divides the contributions' grid."""
        return grid if self.noise_multiplier == 0 else grid_law(self.share_std(n_silos), grid).grid

    def transmit(
        self, total: Float64[np.ndarray, " d"], grid: float, n_silos: int, source: BitSource
    ) -> Float64[np.ndarray, " d"]:
        """Add one silo's share: exact discrete Gaussian noise on the grid of the contributions.

        Args:
            total: the silo's sum of clipped contributions, multiples of grid.
            grid: the step on which contributions were rounded, same unit as the update.
            n_silos: |S|.
            source: the silo's privacy randomness for this round.
        """
        if self.noise_multiplier == 0:
            return total
        noisy: np.ndarray = total + grid_gaussian(len(total), self.share_std(n_silos), grid, source)
        return noisy


@dataclass(frozen=True, kw_only=True)
class MessageCost:
    """What one message of a silo or client cost.

    Attributes:
        parameters: how many it holds.
        bytes: length of the whole message.
        limit: the information limit of :func:`~fedveil.channel.information.information_limit`, bits a parameter; None
            where the message is not compressed to its noise.
        acceptance: share of the quantiser's draws that were accepted; None where nothing is drawn.
    """

    parameters: int
    bytes: int
    limit: float | None = None
    acceptance: float | None = None


@dataclass(frozen=True, kw_only=True)
class Coded:
    """A message of a channel of bytes, and what its receiver needs to decode it.

    Attributes:
        key: 32 bytes, of this message alone; who holds it learns more than the decoded value.
        message: what the codec made.
        scale: what its noise is measured in, where that is the sender's own (CEPAM by norm); None: a public number.
    """

    key: bytes
    message: bytes
    scale: float | None = None

    def to_bytes(self) -> bytes:
        """Return key, scale (float64, NaN for a public one) and message as one byte string, to be sealed."""
        return self.key + _SCALE.pack(math.nan if self.scale is None else self.scale) + self.message

    @classmethod
    def from_bytes(cls, data: bytes) -> Coded:
        """Return the message of :meth:`to_bytes`.

        Raises:
            ChannelError: too short.
        """
        start = _KEY_BYTES + _SCALE.size
        if len(data) < start:
            raise ChannelError(f"a coded message has at least {start} bytes, this one {len(data)}")
        (scale,) = _SCALE.unpack_from(data, _KEY_BYTES)
        return cls(key=data[:_KEY_BYTES], message=data[start:], scale=None if math.isnan(scale) else scale)


@dataclass(frozen=True, kw_only=True, eq=False)
class Sending:
    """One message before it is received: numbers, or what a codec made of them.

    Attributes:
        cost: of the message.
        values: the numbers, where the channel sends numbers.
        coded: the message as it travels, where the channel makes bytes of it.
    """

    cost: MessageCost
    values: Float64[np.ndarray, " d"] | None = None
    coded: Coded | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Transmission:
    """One message, sent and received.

    Attributes:
        received: the sum or update plus its noise, as the server decoded it.
        cost: of the message.
        coded: the message as it travels, where the channel makes bytes of it.
    """

    received: Float64[np.ndarray, " d"]
    cost: MessageCost
    coded: Coded | None = None


@dataclass(frozen=True, kw_only=True)
class LayeredShares(Channel):
    """Every silo's sum travels through a quantiser whose error is the silo's share of the noise.

    LRSUQ (CEPAM, Section III; docs/theory/lrsuq.md): what the server decodes is sum + N(0, share std^2 I), exactly,
    independent of the sum. So the sum of all silos has the law that :class:`GaussianShares` gives it.
    The server needs the key of every message and so learns more of a sum than its decoded value: it is trusted.

    Attributes:
        shares: the noise, and how the silos share it.
        lattice: of the quantiser; None sends every block in the cheapest way (``gaussian_channel``).
    """

    @property
    def content(self) -> Tells:
        """What a message tells."""
        return Tells.KEYED

    @property
    def coded(self) -> bool:
        """Whether a message is bytes: it is."""
        return True

    shares: GaussianShares
    lattice: str | None = None

    def __post_init__(self) -> None:
        if self.shares.noise_multiplier == 0:
            raise CompositionError(
                "the channel's compression error is its noise: noise_multiplier = 0 leaves it nothing to compress "
                "with; give a noise_multiplier above 0, or send the sums as they are"
            )

    def claims(self, moves: Moves) -> tuple[Claim, ...]:
        """Claim what the shares claim, and nothing against whoever holds the key of a message.

        The key shows the latent of every sub-vector, hence a ball in which the sum lies: no noise of unbounded
        support is left. The spreads of blocks, how they were sent, and the length of the message depend on the sum as
        well.
        """
        shares = (claim for claim in self.shares.claims(moves) if Tells.MESSAGE not in claim.covers)
        return (*shares, unprotected(KEY_REASON, unless=Tells.COUNTS))

    def grid_loss(self, moves: Moves) -> float:
        """Return 0: the noise has its law in real numbers."""
        return 0.0

    def mechanisms(self, moves: Moves) -> tuple[str, ...]:
        """Return the sensitivity and the shares."""
        return self.shares.told(
            moves, "Gaussian shares, each the compression error of a silo's message (LRSUQ),"
        )

    def uncovered(self, method: Any) -> tuple[str, ...]:
        """Return what no epsilon over a layered quantiser covers."""
        return OF_LAYERS

    @property
    def colluding(self) -> int:
        """How many silos."""
        return self.shares.colluding

    def nominal(self) -> float:
        """Return sigma."""
        return self.shares.nominal()

    def message_std(self, n: int) -> float:
        """Return the standard deviation of one share."""
        return self.shares.share_std(n)

    def codec(self, n_silos: int) -> Codec:
        """Return the channel of bytes that each of ``n_silos`` silos uses."""
        std = self.shares.share_std(n_silos)
        if self.lattice is None:
            return gaussian_channel(std)
        return Codec(quantizer=LayeredQuantizer(law=GaussianLaw(std=std), lattice=lattice(self.lattice)))

    def encode(
        self,
        total: Float64[np.ndarray, " d"],
        *,
        n_silos: int,
        silo: int,
        round_number: int,
        source: BitSource,
        measured: bool = True,
    ) -> Sending:
        """Return one silo's sum as one byte string.

        Args:
            total: the silo's sum of clipped contributions.
            n_silos: |S|.
            silo: index of the silo.
            round_number: the round of the sum.
            source: privacy randomness of this silo and round. It stands for the key agreement of silo and server:
                the secret is drawn from it for each attempt at a round, so attempts never share a key.
            measured: whether the cost says what the message could cost at least, which takes longer than to encode it.

        Raises:
            UpdateError: a parameter of the sum above 2^30 times the share's standard deviation.
        """
        secret = source.uint64(4).astype("<u8").tobytes()
        key = update_key(secret, run="one process", client=silo, round_number=round_number)
        sent = self.codec(n_silos).send(total, KeyedStreams(key))
        law = GaussianLaw(std=self.shares.share_std(n_silos))
        cost = MessageCost(
            parameters=len(total),
            bytes=len(sent.message),
            limit=information_limit(total, law) if measured else None,
            acceptance=sent.accepted / sent.drawn,
        )
        return Sending(cost=cost, coded=Coded(key=key, message=sent.message))

    def transmit(
        self,
        total: Float64[np.ndarray, " d"],
        *,
        n_silos: int,
        silo: int,
        round_number: int,
        source: BitSource,
    ) -> Transmission:
        """Send one silo's sum as one byte string, and decode it from the bytes as the server does.

        Arguments and errors are those of :meth:`encode`.
        """
        sending = self.encode(total, n_silos=n_silos, silo=silo, round_number=round_number, source=source)
        coded = sending.coded
        assert coded is not None
        received = self.receive(coded, n_silos=n_silos, length=len(total))
        return Transmission(received=received, cost=sending.cost, coded=coded)

    def receive(self, coded: Coded, *, n_silos: int, length: int) -> Float64[np.ndarray, " d"]:
        """Decode one silo's sum of ``length`` parameters, plus its share of the noise.

        Raises:
            ChannelError: another channel's message, another length, or bytes that were altered.
        """
        return self.codec(n_silos).decode(coded.message, KeyedStreams(coded.key), length=length)


@dataclass(frozen=True, kw_only=True)
class CentralGaussian(Channel):
    """A server that is trusted with the sum adds noise to it, once: std = noise_multiplier * scale per coordinate.

    Attributes:
        noise_multiplier: sigma, in units of scale.
        scale: what the noise is measured in, same unit as the update: the bound of one contribution.
    """

    @property
    def content(self) -> Tells:
        """What a message tells."""
        return Tells.EXACT

    noise_multiplier: float
    scale: float

    def __post_init__(self) -> None:
        if not (self.noise_multiplier >= 0 and math.isfinite(self.noise_multiplier)):
            raise CompositionError(
                f"noise_multiplier = {self.noise_multiplier}: a finite number >= 0 is needed"
            )

    @property
    def std(self) -> float:
        """Standard deviation of the noise on the sum, per coordinate."""
        return self.noise_multiplier * self.scale

    def claims(self, moves: Moves) -> tuple[Claim, ...]:
        """Claim the noise for whoever sees the sum after it, and nothing against the server, which adds it."""
        if self.noise_multiplier == 0:
            return (unprotected(NO_NOISE),)
        event = GaussianEvent(noise_multiplier=self.std / moves.total)
        return (
            Claim(covering(Tells.SUM, Tells.OWN), event),
            unprotected("the server adds the noise itself: it is trusted"),
        )

    def grid_loss(self, moves: Moves) -> float:
        """Return what the grid of the noise costs a coordinate."""
        return (
            2 * grid_law(self.std, moves.bound.grid).log_ratio_to_gaussian if self.noise_multiplier else 0.0
        )

    def mechanisms(self, moves: Moves) -> tuple[str, ...]:
        """Return the sensitivity and the noise."""
        if self.noise_multiplier == 0:
            return ()
        return (
            f"every round: one {moves.unit} moves the sum by at most {moves.total:g} (l2) when it comes or goes, by "
            f"twice that when it is replaced; the server adds discrete Gaussian noise of std {self.std:g}, "
            f"{self.std / moves.total:g} times the bound of one contribution",
        )

    def published(self, method: Any, public: Any) -> tuple[Published, ...]:
        """Return the budget that Tables 3 and 6 of DP-Fed-LS print, if clients are drawn as they were there."""
        if self.noise_multiplier == 0 or not method.sampler.replaces:
            return ()
        rate, multiplier = method.sampler.rate, self.std / method.bound.norm

        def tables(rounds: int, delta: float) -> float:
            return published_epsilon(rate, multiplier, rounds, delta)

        gap = "replacing a client moves the sum by 2L, as Theorem 1 says, but the tables take L"
        return (Published(name="Tables 3 and 6 of DP-Fed-LS (sensitivity L)", gap=gap, epsilon=tables),)

    def release(
        self, total: Float64[np.ndarray, " d"], grid: float, source: BitSource
    ) -> Float64[np.ndarray, " d"]:
        """Return the sum with exact discrete Gaussian noise on the grid of the contributions."""
        if self.noise_multiplier == 0:
            return total
        noisy: np.ndarray = total + grid_gaussian(len(total), self.std, grid, source)
        return noisy


def grid_gaussian(dimension: int, std: float, grid: float, source: BitSource) -> Float64[np.ndarray, " d"]:
    """Return exact discrete Gaussian noise, one value a coordinate, on a grid that divides the contributions'."""
    return grid_law(std, grid).sample((dimension,), source)


def grid_law(std: float, grid: float) -> DiscreteGaussian:
    """Return the noise law for sums on this grid: so fine that it is Gaussian for every accountant."""
    return DiscreteGaussian(std=std, grid=grid_for(std, at_most=grid))
