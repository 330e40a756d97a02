"""Build the channels that an experiment may request by name, from the channel that a method has."""

from __future__ import annotations

import math
from typing import Annotated, Any, cast

from fedveil.config_keys import composed_field
from fedveil.errors import CompositionError
from fedveil.methods.capabilities import GridShares, ServerNoise, round_strengths
from fedveil.methods.channels import Channel
from fedveil.methods.client_messages import ClientMessages, Form, Layered
from fedveil.methods.gaussian_shares import WordBits
from fedveil.methods.keys import Lattice, Users
from fedveil.methods.layered_shares import LayeredShares
from fedveil.privacy.sampling import Sampler
from fedveil.stage import redefined

Of = Annotated[Any, composed_field()]
"""Method for which the channel is built."""


def additive(*, method: Of, word_bits: WordBits = "auto") -> Channel:
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


def lrsuq(*, method: Of, n_users: Users, lattice: Lattice | None = None) -> Channel:
    """LRSUQ: send bytes whose compression error is the sender's share of the noise (docs/theory/lrsuq.md).

    Silos' shares of a Gaussian noise become the error of their messages. The noise of a trusted server becomes the
    error of the sampled clients' messages.

    Raises:
        CompositionError: neither silos nor the server add noise to a sum.
    """
    own: Any = method.channel
    if isinstance(own, ServerNoise):
        return through_messages(own, method.sampler, n_users, Layered(lattice=lattice))
    if not isinstance(own, GridShares):
        raise CompositionError(
            f"{method.name}: channel.name = 'lrsuq' makes shares of Gaussian noise, but in this method neither silos "
            "nor the server add any to a sum; use uldp-naive, uldp-sgd, uldp-avg, uldp-avg-w, dp-fed or dp-fed-ls, or "
            "cepam-gaussian as it is"
        )
    if round_strengths(own) != (1.0,):
        raise CompositionError(
            f"{method.name}: channel.name = 'lrsuq' makes the compression error of a message its noise, and correlated "
            "noise sends sums of several rounds in one: leave one of the two out"
        )
    shares: Any = own
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
