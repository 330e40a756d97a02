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
from typing import Final

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
from fedveil.privacy.noise import DiscreteGaussian, grid_for
from fedveil.randomness import BitSource

_KEY_BYTES: Final = 32
_SCALE: Final = struct.Struct("<d")


@dataclass(frozen=True)
class SiloContribution:
    """A silo's whole table is one contribution: adding or removing a user changes it, but it never goes away."""


@dataclass(frozen=True)
class SiloUserContribution:
    """Each (silo, user) pair is one contribution: adding or removing a user adds or removes it."""


@dataclass(frozen=True)
class ClientContribution:
    """Each client, a silo that holds one user, is one contribution: cross-device learning.

    Clients are many, so their updates go into one sum; what a silo would send alone is not kept.
    """


@dataclass(frozen=True)
class RecordContribution:
    """Each record is one contribution inside DP-SGD; a user keeps at most ``per_user`` records over all silos."""

    per_user: int

    def __post_init__(self) -> None:
        if self.per_user < 1:
            raise CompositionError(f"group size k = {self.per_user}: a user keeps at least 1 record")


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

    def of(self, groups: Groups, n_silos: int, n_users: int) -> Float64[Tensor, " m"]:
        """Return the weight of each contribution."""
        if self is Weights.ONE:
            return torch.ones(len(groups.size), dtype=torch.float64)
        if self is Weights.UNIFORM:
            return torch.full((len(groups.size),), 1.0 / n_silos, dtype=torch.float64)
        totals = np.bincount(groups.user, weights=groups.size, minlength=n_users)
        return torch.from_numpy(groups.size / totals[groups.user])


@dataclass(frozen=True)
class Identity:
    """The silo's sum travels as it is."""


@dataclass(frozen=True, kw_only=True)
class GaussianShares:
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
class LayeredShares:
    """Every silo's sum travels through a quantiser whose error is the silo's share of the noise.

    LRSUQ (CEPAM, Section III; docs/theory/lrsuq.md): what the server decodes is sum + N(0, share std^2 I), exactly,
    independent of the sum. So the sum of all silos has the law that :class:`GaussianShares` gives it.
    The server needs the key of every message and so learns more of a sum than its decoded value: it is trusted.

    Attributes:
        shares: the noise, and how the silos share it.
        lattice: of the quantiser; None sends every block in the cheapest way (``gaussian_channel``).
    """

    shares: GaussianShares
    lattice: str | None = None

    def __post_init__(self) -> None:
        if self.shares.noise_multiplier == 0:
            raise CompositionError(
                "the channel's compression error is its noise: noise_multiplier = 0 leaves it nothing to compress "
                "with; give a noise_multiplier above 0, or send the sums as they are"
            )

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
class CentralGaussian:
    """A server that is trusted with the sum adds noise to it, once: std = noise_multiplier * scale per coordinate.

    Attributes:
        noise_multiplier: sigma, in units of scale.
        scale: what the noise is measured in, same unit as the update: the bound of one contribution.
    """

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
