"""The channel of silos whose share of the noise is the compression error of their message (LRSUQ)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from jaxtyping import Float64

from fedveil.errors import CompositionError
from fedveil.methods.channels import Channel, GaussianShares, refuses_clients, refuses_unbounded
from fedveil.methods.sending import Coded, MessageCost, Sender, Sending, Transmission
from fedveil.privacy.claims import Claim, Tells, unprotected
from fedveil.quantization.codec import Codec, gaussian_channel
from fedveil.quantization.information import information_limit
from fedveil.quantization.lattices import lattice
from fedveil.quantization.laws import GaussianLaw
from fedveil.quantization.quantizers import LayeredQuantizer
from fedveil.quantization.streams import KeyedStreams, update_key
from fedveil.randomness import BitSource
from fedveil.stage import Moves

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
        super().__post_init__()
        if self.shares.noise_multiplier == 0:
            raise CompositionError(
                "the channel's compression error is its noise: noise_multiplier = 0 leaves it nothing to compress "
                "with; give a noise_multiplier above 0, or send the sums as they are"
            )

    def refuses(self, method: Any) -> Iterable[str]:
        """Refuse noise on unbounded contributions, and clients."""
        yield from refuses_unbounded(method)
        yield from refuses_clients(method)
        yield from super().refuses(method)

    @property
    def noise_known(self) -> bool:
        """True."""
        return True

    def noise_std(self, n: int, summed: int) -> float:
        """Return the noise of so many shares."""
        return self.shares.noise_std(n, summed)

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

    def send(self, total: Float64[np.ndarray, " d"], at: Sender) -> Sending:
        """Return a silo's sum as one byte string."""
        return self.encode(
            total,
            n_silos=at.senders,
            silo=at.number,
            round_number=at.round,
            source=at.source("channel"),
            measured=at.measured,
        )

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
        assert sending.cost is not None
        received = self.decode(coded, senders=n_silos, length=len(total))
        return Transmission(received=received, cost=sending.cost, coded=coded)

    def decode(self, coded: Coded, *, senders: int, length: int) -> Float64[np.ndarray, " d"]:
        """Decode one silo's sum of ``length`` parameters, plus its share of the noise.

        Raises:
            ChannelError: another channel's message, another length, or bytes that were altered.
        """
        return self.codec(senders).decode(coded.message, KeyedStreams(coded.key), length=length)
