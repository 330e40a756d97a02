"""Send every message to the server readably: in the clear, or sealed for the server (the default)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
from jaxtyping import Float64

from fedveil.data.records import Groups
from fedveil.errors import ChannelError, CompositionError, ProtocolError
from fedveil.methods.capabilities import sends_bytes
from fedveil.methods.guarantee import PublicFacts
from fedveil.methods.message_encoding import CodedMessage
from fedveil.methods.protection_stage import DOWN, UP, ProtectionStage, Sends, plain_round
from fedveil.privacy.claims import Sent
from fedveil.protocols.plaintext_sums import PlaintextSums, PlaintextVector
from fedveil.protocols.protocol import ProtocolSpec
from fedveil.protocols.sealed_sums import SealedMessage, SealedSums, SealingKey
from fedveil.protocols.session_messages import ProtocolMessage


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
        self, method: Any, public: PublicFacts, own: Groups, rounds: int
    ) -> ProtocolSpec[Any, Any]:
        """Return the protocol of readable messages."""
        return open_sums(method, clients=public.n_silos, length=public.length)


NO_PROTECTION: Final = NoProtection()
"""Default protection of a method."""


def open_sums(method: Any, *, clients: int, length: int) -> ProtocolSpec[Any, Any]:
    """Return the protocol of messages that the server reads one by one: vectors or sealed bytes."""

    def decode(given: bytes, round_number: int) -> Float64[np.ndarray, " d"]:
        try:
            channel = method.at_round(round_number).channel
            found: np.ndarray = channel.decode(CodedMessage.from_bytes(given), senders=clients, length=length)
        except (ChannelError, CompositionError) as error:
            raise ProtocolError(f"its message was refused: {error}") from error
        return found

    if sends_bytes(method.channel):
        return SealedSums(clients=clients, length=length, decode=decode)
    return PlaintextSums(clients=clients, length=length)
