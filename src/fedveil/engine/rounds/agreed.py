"""What the parties of a run agree on before any training: public numbers, the protocol they make, and what it takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from jaxtyping import Float32, Float64
from torch import Tensor

from fedveil.engine.rounds.turn import Turn
from fedveil.engine.rounds.workload import OwnMessages, SiloSums, Workload
from fedveil.errors import CompositionError
from fedveil.methods.method import Method
from fedveil.methods.sending import Coded
from fedveil.protection.errors import ProtocolError
from fedveil.protection.open_sums import OpenSums
from fedveil.protection.protocol import Agreement
from fedveil.protection.sealed_sums import SealedSums
from fedveil.quantization.errors import ChannelError
from fedveil.randomness import PrivacyRandomness


class Agreed(Protocol):
    """What the parties of a run agree on before any training."""

    def protocol(self, privacy: PrivacyRandomness) -> Agreement[Any, Any]:
        """Return the protocol that these numbers make.

        Args:
            privacy: for noise that is drawn in the middle of a round.
        """
        ...

    def workload(self, turn: Turn, initial: Float32[Tensor, " d"]) -> Workload:
        """Return what the parties contribute to a round, as the protocol takes it.

        Args:
            turn: what the round begins with.
            initial: (d,) the model before the first round.
        """
        ...

    def vector(self, result: Any) -> Float64[np.ndarray, " d"]:
        """Return the sum that a result of the protocol stands for, in the unit of the update."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class OpenRange:
    """Vectors as they are, or a channel's bytes sealed for the server.

    Attributes:
        method: the composition.
        clients: how many silos or clients send.
        length: d, coordinates of a vector.
    """

    method: Method
    clients: int
    length: int

    def protocol(self, privacy: PrivacyRandomness) -> Agreement[Any, Any]:
        """Return the protocol: every message is read by itself."""
        if not self.method.channel.coded:
            return OpenSums(clients=self.clients, length=self.length)
        return SealedSums(clients=self.clients, length=self.length, decode=self._decode)

    def workload(self, turn: Turn, initial: Float32[Tensor, " d"]) -> Workload:
        """Return the silos' sums, or the clients' own messages."""
        return OwnMessages(turn) if self.method.channel.by_clients else SiloSums(turn)

    def vector(self, result: Float64[np.ndarray, " d"]) -> Float64[np.ndarray, " d"]:
        """Return the sum as it is."""
        return result

    def _decode(self, given: bytes, round_number: int) -> Float64[np.ndarray, " d"]:
        channel = self.method.at_round(round_number).channel
        try:
            return channel.decode(Coded.from_bytes(given), senders=self.clients, length=self.length)
        except (ChannelError, CompositionError) as error:
            raise ProtocolError(f"its message was refused: {error}") from error
