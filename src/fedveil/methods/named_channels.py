"""Build the channels that an experiment may request by name: LRSUQ, or the method's own channel."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, cast

import numpy as np
from jaxtyping import Float64

from fedveil.config_keys import composed_field
from fedveil.errors import CompositionError
from fedveil.methods.capabilities import GridShares, ServerNoise, round_strengths
from fedveil.methods.channels import Channel, refuses_clients, refuses_unbounded
from fedveil.methods.client_messages import ClientMessages, Form, Layered
from fedveil.methods.gaussian_shares import GaussianShares, WordBits
from fedveil.methods.keys import Lattice, Users
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
from fedveil.privacy.sampling import Sampler
from fedveil.quantization.laws import GaussianLaw
from fedveil.quantization.streams import KeyedStreams
from fedveil.stage import Sensitivity, redefined

# --- quantisation error as the silo's share of the noise ---


@dataclass(frozen=True, kw_only=True)
class LayeredShares(Channel):
    """Channel whose quantisation error is the silo's share of the noise.

    LRSUQ, the layered randomised subtractive quantiser (CEPAM, Section III; docs/theory/lrsuq.md): the server decodes
    sum + N(0, share std^2 I), exactly, with an error that is independent of the sum. So the sum over all silos has the
    same law as with :class:`GaussianShares`. To decode, the server needs the key of every message. The key reveals more
    than the decoded value, so the server must be trusted.

    Attributes:
        shares: the noise, and how the silos share it.
        lattice: lattice of the quantiser; None chooses the encoding with the fewest bits for every block.
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
        """Return the shares' claims about the sum, and no guarantee against a party that holds the key of a message.

        The key reveals the latent variable of every sub-vector, and with it a ball that contains the sum: the remaining
        error has bounded support. The spreads of blocks, their encoding, and the length of the message also depend on
        the sum.
        """
        # The shares' claims about single messages are dropped: here a reader of a message also holds its key.
        shares = (claim for claim in self.shares.claims(sensitivity) if Reveals.MESSAGE not in claim.covers)
        return (*shares, no_guarantee(KEY_REASON, unless=Reveals.COUNTS))

    def mechanisms(self, sensitivity: Sensitivity) -> tuple[str, ...]:
        return self.shares.describe_shares(
            sensitivity, "the compression error of each silo's message (LRSUQ) adds Gaussian noise"
        )

    def uncovered_facts(self, method: Any) -> tuple[str, ...]:
        """Return the assumptions of a layered quantiser, which no epsilon covers."""
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

    def send(self, total: Float64[np.ndarray, " d"], sender: Sender) -> EncodedMessage:
        """Return a silo's sum of clipped contributions as one byte string."""
        return encode_layered(total, sender, self._law(sender.senders), self.lattice)

    def decode(self, coded: CodedMessage, *, senders: int, length: int) -> Float64[np.ndarray, " d"]:
        """Decode one silo's sum of ``length`` parameters, including its share of the noise.

        Raises:
            ChannelError: another channel's message, another length, or altered bytes.
        """
        codec = layered_codec(self._law(senders), self.lattice)
        return codec.decode(coded.message, KeyedStreams(coded.key), length=length)


# --- channels by name ---

ComposedMethod = Annotated[Any, composed_field()]
"""Method for which the channel is built; composition passes it, and it is no configuration key."""


def additive(*, method: ComposedMethod, word_bits: WordBits = "auto") -> Channel:
    """Additive: send sums, or clients' messages, in the method's own form.

    Raises:
        CompositionError: ``word_bits`` for messages without shares of Gaussian noise.
    """
    channel: Channel = method.channel
    if word_bits == "auto":
        return channel
    if not isinstance(channel, GridShares):
        raise CompositionError(
            f"channel.word_bits = {word_bits}: silos round their sums after their shares of Gaussian noise, and the "
            f"messages of {method.name} have none; remove the key"
        )
    return cast(Channel, channel.with_word_bits(word_bits))


def lrsuq(*, method: ComposedMethod, n_users: Users, lattice: Lattice | None = None) -> Channel:
    """LRSUQ: send bytes whose compression error is the sender's share of the noise (docs/theory/lrsuq.md).

    If silos add shares of a Gaussian noise, each share becomes the error of the silo's message. If a trusted server
    adds the noise, it becomes the error of the sampled clients' messages.

    Raises:
        CompositionError: neither silos nor the server add noise to a sum, or the noise is correlated over rounds.
    """
    channel: Any = method.channel
    if isinstance(channel, ServerNoise):
        return through_messages(channel, method.sampler, n_users, Layered(lattice=lattice))
    if not isinstance(channel, GridShares):
        raise CompositionError(
            f"{method.name}: channel.name = 'lrsuq' makes shares of Gaussian noise, but in this method neither silos "
            "nor the server add any to a sum; use uldp-naive, uldp-sgd, uldp-avg, uldp-avg-w, dp-fed or dp-fed-ls, or "
            "cepam-gaussian as it is"
        )
    # Without correlated noise, the noise of a round is in that round's sum alone.
    if round_strengths(channel) != (1.0,):
        raise CompositionError(
            f"{method.name}: channel.name = 'lrsuq' makes the compression error of a message its noise, and correlated "
            "noise sends sums of several rounds in one: leave one of the two out"
        )
    shares: Any = channel
    return LayeredShares(shares=shares, lattice=lattice)


def through_messages(central: Any, sampler: Sampler, n_users: int, form: Form) -> ClientMessages:
    """Return the channel in which clients' messages carry the noise that a trusted server would add.

    m clients send in a round, each with N(0, (central.std)^2 / m I). The sum of these m independent Gaussians has the
    law of the server's noise.

    Args:
        central: a channel whose noise the server adds (:class:`~fedveil.methods.capabilities.ServerNoise`).
        sampler: sampler of the method.
        n_users: |U|.
        form: encoding of an update.

    Raises:
        CompositionError: clients are sampled independently, so that m is random.
    """
    if redefined(central, "release"):
        raise CompositionError(
            f"{type(central).__name__} defines release(), and here the clients' messages carry the noise, so that the "
            "server adds none: take CentralGaussian"
        )
    if not sampler.fixed_size:
        raise CompositionError(
            "the clients' messages share one noise, so their number must be fixed and public, but Poisson sampling "
            "draws a random and private number: a share of the expected number would give the sum a noise that "
            "tells how many took part; use client_sampling = 'uniform'"
        )
    if central.noise_multiplier == 0:
        raise CompositionError(
            "noise_multiplier = 0 leaves the clients' messages nothing to carry: the noise of the server becomes "
            "theirs; give a noise_multiplier above 0"
        )
    senders = n_users if sampler.size is None else sampler.size
    return ClientMessages(
        senders=senders,
        noise="gaussian",
        noise_multiplier=central.noise_multiplier / math.sqrt(senders),
        bound=central.scale,
        form=form,
    )
