"""Send silos' sums through a quantiser whose compression error is the share of the noise (LRSUQ)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float64

from fedveil.errors import CompositionError
from fedveil.methods.channels import Channel, refuses_clients, refuses_unbounded
from fedveil.methods.gaussian_shares import GaussianShares
from fedveil.methods.message_encoding import (
    KEY_REASON,
    OF_LAYERS,
    CodedMessage,
    EncodedMessage,
    Sender,
    encode_layered,
    layered_codec,
)
from fedveil.privacy.claims import Claim, Reveals, no_guarantee
from fedveil.quantization.laws import GaussianLaw
from fedveil.quantization.streams import KeyedStreams
from fedveil.stage import Sensitivity, redefined


@dataclass(frozen=True, kw_only=True)
class LayeredShares(Channel):
    """Channel whose quantisation error is the silo's share of the noise.

    LRSUQ (CEPAM, Section III; docs/theory/lrsuq.md): the server decodes sum + N(0, share std^2 I), exactly and
    independently of the sum. So the sum over all silos has the same law as with :class:`GaussianShares`. The server
    needs the key of every message and therefore learns more than the decoded value: it is trusted.

    Attributes:
        shares: the noise, and how the silos share it.
        lattice: lattice of the quantiser; None sends every block in the cheapest way (``gaussian_channel``).
    """

    content: ClassVar[Reveals] = Reveals.KEYED
    sends_bytes: ClassVar[bool] = True
    noise_known: ClassVar[bool] = True

    shares: GaussianShares
    lattice: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if redefined(self.shares, "send"):
            raise CompositionError(
                f"{type(self.shares).__name__} defines send(), and here the compression error of a message is the "
                "noise, so that no share is sent: take GaussianShares"
            )
        if self.shares.step:
            raise CompositionError(
                "the compression error of a message is its noise, so that no sum is rounded after it: give shares "
                "without a step"
            )
        if self.shares.noise_multiplier == 0:
            raise CompositionError(
                "the channel's compression error is its noise: noise_multiplier = 0 leaves it nothing to compress "
                "with; give a noise_multiplier above 0, or send the sums as they are"
            )

    def refuses(self, method: Any) -> Iterable[str]:
        yield from refuses_unbounded(method)
        yield from refuses_clients(method)
        yield from super().refuses(method)

    def noise_std(self, n: int, summed: int) -> float:
        return self.shares.noise_std(n, summed)

    def claims(self, sensitivity: Sensitivity) -> tuple[Claim, ...]:
        """Claim the claims of the shares, and nothing against a party that holds the key of a message.

        The key reveals the latent of every sub-vector, hence a ball that contains the sum: no noise of unbounded
        support is left. The spreads of blocks, their encoding, and the length of the message depend on the sum as
        well.
        """
        # The shares' claims about single messages do not carry over: here a reader of a message also holds its key.
        shares = (claim for claim in self.shares.claims(sensitivity) if Reveals.MESSAGE not in claim.covers)
        return (*shares, no_guarantee(KEY_REASON, unless=Reveals.COUNTS))

    def mechanisms(self, sensitivity: Sensitivity) -> tuple[str, ...]:
        return self.shares.describe_shares(
            sensitivity, "the compression error of each silo's message (LRSUQ) adds Gaussian noise"
        )

    def uncovered_facts(self, method: Any) -> tuple[str, ...]:
        """Return the assumptions behind a layered quantiser, which no epsilon covers."""
        return (*OF_LAYERS, *self.shares.uncovered_facts(method))

    @property
    def colluding_silos(self) -> int:
        return self.shares.colluding_silos

    def nominal(self) -> float:
        """Return sigma."""
        return self.shares.nominal()

    def message_std(self, n: int) -> float:
        return self.shares.share_std(n)

    def _law(self, n_silos: int) -> GaussianLaw:
        """Return the law of the compression error of each of ``n_silos`` silos."""
        return GaussianLaw(std=self.shares.share_std(n_silos))

    def send(self, total: Float64[np.ndarray, " d"], at: Sender) -> EncodedMessage:
        """Return a silo's sum of clipped contributions as one byte string."""
        return encode_layered(total, at, self._law(at.senders), self.lattice)

    def decode(self, coded: CodedMessage, *, senders: int, length: int) -> Float64[np.ndarray, " d"]:
        """Decode one silo's sum of ``length`` parameters, including its share of the noise.

        Raises:
            ChannelError: another channel's message, another length, or altered bytes.
        """
        codec = layered_codec(self._law(senders), self.lattice)
        return codec.decode(coded.message, KeyedStreams(coded.key), length=length)
