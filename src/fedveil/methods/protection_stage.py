"""Define protections as stages of a method: their parties, their messages and their claims.

The default is no protection: the server can read every message, in the clear or sealed for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, Literal, TypeAlias

import numpy as np
from jaxtyping import Float64

from fedveil.data.records import Groups
from fedveil.errors import ChannelError, CompositionError, ProtocolError
from fedveil.methods.capabilities import GridShares, ServerNoise, sends_bytes
from fedveil.methods.guarantee import PublicFacts
from fedveil.methods.message_encoding import CodedMessage
from fedveil.privacy.bounds import Bound
from fedveil.privacy.claims import Claim, Role, Sent
from fedveil.protocols.plaintext_sums import PlaintextSums, PlaintextVector
from fedveil.protocols.protocol import ProtocolSpec
from fedveil.protocols.sealed_sums import SealedMessage, SealedSums, SealingKey
from fedveil.protocols.session_messages import (
    GlobalModel,
    ProtocolMessage,
    RoundTask,
    SampledFlag,
    SampledUsers,
)
from fedveil.stage import Sensitivity, Stage, duty

Sends: TypeAlias = tuple[Sent, ...]
UP: Final = Role.SERVER
"""Reader of a sender's messages."""
DOWN: Final = Role.SILO
"""Reader of the server's messages."""
OF_KEYS: Final = "a break of X25519, ChaCha20 or SHA-256, on which masks and sealed messages rely"
"""Assumption behind masks, which no epsilon covers."""
OF_SUMS: Final = (
    "departures of the server from its protocol: where it sends senders another sum than that of their messages to "
    "decrypt, it learns who accepts it"
)
"""Attack by a server that lets the senders decrypt a sum other than that of their messages."""


class ProtectionStage(Stage):
    """Protection of a sender's message, with the defaults of a protection that hides nothing.

    Attributes:
        parties: coalitions named in a statement, besides the server alone and one sender alone.
        weighs: whether weights by records are computed without showing record counts.
        agrees: whether senders agree on public numbers before the run, including the grid of their messages.
        masks: whether messages are masked whole numbers, of which the server learns only the sum.
        divides: whether messages have two parts, one of them encrypted under a key that the senders share.
        protects: whether the stage hides anything, so that no other protection may replace it.
        on_dropout: reaction to a sender that drops out of a round: end the run, retry the round, or recover its
            masks.
        max_dropouts: most senders that may be missing from a sum.
        dropout_rate: in a simulation, probability that a sender drops out of an attempt at a round.
    """

    parties: ClassVar[tuple[Role, ...]] = ()
    weighs: ClassVar[bool] = False
    agrees: ClassVar[bool] = True
    masks: ClassVar[bool] = False
    divides: ClassVar[bool] = False
    protects: ClassVar[bool] = True

    @property
    def on_dropout(self) -> Literal["end", "retry", "recover"]:
        """Reaction to a dropout: "end", unless the protection overrides it."""
        return "end"

    @property
    def max_dropouts(self) -> int:
        """Most senders that may be missing from a sum: 0."""
        return 0

    @property
    def dropout_rate(self) -> float:
        """Probability of a simulated dropout: 0."""
        return 0.0

    def apply_to(self, method: Any, n_users: int) -> Any:
        """Return a method under this protection, with its noise placed and sized as the protection needs it.

        Args:
            method: the composition, unprotected or with the protection that its builder gives it.
            n_users: |U|.

        Raises:
            CompositionError: the method already has another protection.
        """
        own = method.protection
        if own.protects and own != self:
            raise CompositionError(
                f"{method.name} brings its own protection ({type(own).__name__}); remove protection.name, or take the "
                "method that it is a variant of"
            )
        channel = method.channel
        if isinstance(channel, GridShares):
            channel = channel.sized_for_dropouts(self.max_dropouts)
        return replace(method, channel=channel, protection=self)

    @duty
    def make_protocol_spec(
        self, method: Any, public: PublicFacts, known_groups: Groups, rounds: int
    ) -> ProtocolSpec[Any, Any]:
        """Return the protocol spec on which the parties of a run agree before any training.

        Args:
            method: the composition.
            public: the public facts, including the number of coordinates of a message.
            known_groups: the (silo, user) pairs that the caller knows: all, those of one silo, or none.
            rounds: number of rounds.
        """
        raise NotImplementedError

    @property
    def draws_blindly(self) -> bool:
        """Return whether users are sampled without the server learning the sample (oblivious transfer)."""
        return False

    def local_bound(self, bound: Bound) -> Bound:
        """Return the bound that local training enforces, given the method's bound."""
        return bound

    def largest_bound(self, bound: Bound) -> float:
        """Return the largest bound of any part of a contribution, given the method's bound."""
        return bound.largest

    def adjust_sensitivity(self, sensitivity: Sensitivity, method: Any, public: Any) -> Sensitivity:
        """Return the sensitivity of the round under the protection."""
        return sensitivity

    def claims(self, claims: Iterable[Claim], sensitivity: Sensitivity) -> tuple[Claim, ...]:
        """Return the claims of a round under the protection, given the claims of the messages' noise."""
        return tuple(claims)

    def grid_loss(self, loss: float, sensitivity: Sensitivity) -> float:
        """Return the epsilon loss of the noise's grid per coordinate, given the loss without the protection."""
        return loss

    @duty
    def sends(self, method: Any) -> Sends:
        """Return every message of the setup and of a round, with its readers."""
        raise NotImplementedError


def masking_obstacle(method: Any) -> str:
    """Return why a method's messages cannot be masked: they are no whole numbers with their noise."""
    if not method.bound.bounded:
        return "unbounded updates lie on no grid and in no range; give the method a clip bound and GaussianShares"
    if method.local.own_noise:
        return (
            "DP-SGD inside the silos ends in floating-point models, which masks over whole numbers do not fit"
        )
    if isinstance(method.channel, ServerNoise):
        return (
            "its noise is added by a server that is trusted with every update; silos must add GaussianShares"
        )
    return (
        "silos must send whole numbers on one grid with their share of the noise (GaussianShares), not messages that "
        "the server decodes one by one"
    )


def plain_round(method: Any) -> Sends:
    """Return the messages of an unprotected round: model, task and the sample, if there is one."""
    messages = [Sent(GlobalModel, Role.SILO), Sent(RoundTask, Role.SILO)]
    if method.draws:
        # A client learns its own flag only; a silo must know which of its users to train.
        messages.append(Sent(SampledFlag if method.contribution.drawn_alone else SampledUsers, Role.SILO))
    return tuple(messages)


# --- no protection ---


@dataclass(frozen=True)
class NoProtection(ProtectionStage):
    """No protection: the server receives the message of every silo and can read it."""

    agrees: ClassVar[bool] = False
    protects: ClassVar[bool] = False

    def apply_to(self, method: Any, n_users: int) -> Any:
        """Return the method unchanged, with its own protection if it has one."""
        return method

    def sends(self, method: Any) -> Sends:
        """Return the messages of a round: models to the silos, sums to the server, in the clear or sealed."""
        if not sends_bytes(method.channel):
            return (*plain_round(method), Sent(ProtocolMessage, UP), Sent(PlaintextVector, UP))
        # Byte messages contain their key, so they travel sealed for the server.
        relayed = (Sent(ProtocolMessage, UP | DOWN), Sent(SealingKey, UP | DOWN), Sent(SealedMessage, UP))
        return (*plain_round(method), *relayed)

    def make_protocol_spec(
        self, method: Any, public: PublicFacts, known_groups: Groups, rounds: int
    ) -> ProtocolSpec[Any, Any]:
        """Return the protocol of readable messages."""
        return open_sums(method, clients=public.n_silos, length=public.length)


NO_PROTECTION: Final = NoProtection()
"""Default protection of a method."""


def open_sums(method: Any, *, clients: int, length: int) -> ProtocolSpec[Any, Any]:
    """Return the protocol of messages that the server reads one by one: vectors or sealed bytes."""

    def decode(content: bytes, round_number: int) -> Float64[np.ndarray, " d"]:
        try:
            channel = method.at_round(round_number).channel
            vector: np.ndarray = channel.decode(
                CodedMessage.from_bytes(content), senders=clients, length=length
            )
        except (ChannelError, CompositionError) as error:
            raise ProtocolError(f"its message was refused: {error}") from error
        return vector

    if sends_bytes(method.channel):
        return SealedSums(clients=clients, length=length, decode=decode)
    return PlaintextSums(clients=clients, length=length)
