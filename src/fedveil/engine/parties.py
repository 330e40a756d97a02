"""The parties of a simulated run, all in this process: the driver that plays them, and what they contribute."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from jaxtyping import Float32, Float64
from torch import Tensor

from fedveil.engine.setting import Setting
from fedveil.engine.turn import Turn
from fedveil.engine.workload import CodedSums, OwnMessages, SiloSums, Workload
from fedveil.errors import CompositionError
from fedveil.methods.client_messages import ClientMessages
from fedveil.methods.layered_shares import LayeredShares
from fedveil.methods.sending import Coded
from fedveil.protection.driver import Driver
from fedveil.protection.errors import ProtocolError
from fedveil.protection.open_sums import OpenSums
from fedveil.protection.protocol import Agreement
from fedveil.protection.sealed_sums import SealedSums
from fedveil.protection.transcript import Transcript
from fedveil.quantization.errors import ChannelError


class Agreed(Protocol):
    """What the parties of a run under a protection agree on before any training."""

    def protocol(self) -> Agreement[Any, Any]:
        """Return the protocol that these numbers make."""
        ...

    def workload(self, turn: Turn, initial: Float32[Tensor, " d"]) -> Workload:
        """Return what the parties contribute to a round, as the protocol takes it.

        Args:
            turn: what the round begins with.
            initial: (d,) the model before the first round.
        """
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Parties:
    """All parties of a run; their keys serve no other.

    Attributes:
        driver: plays the protocol; it lists every message where the method has a protection.
        workload: what the parties contribute to a round.
    """

    driver: Driver[Any, Any]
    workload: Callable[[Turn], Workload]

    @property
    def transcript(self) -> Transcript | None:
        """What has passed between the parties; None where everything is in the open or sealed for the server."""
        return self.driver.transcript

    @classmethod
    def of(
        cls, agreed: Agreed, initial: Float32[Tensor, " d"], kinds: Collection[type] | None = None
    ) -> Parties:
        """Return the parties of a run under a protection.

        Args:
            agreed: what they agree on.
            initial: (d,) the model before the first round.
            kinds: the messages that the method lists; None: any.
        """
        driver = Driver(agreed.protocol(), Transcript(), kinds)
        return cls(driver=driver, workload=lambda turn: agreed.workload(turn, initial))

    @classmethod
    def in_the_open(cls, setting: Setting) -> Parties:
        """Return the parties of a run without a protection: vectors as they are, or a channel's bytes sealed.

        Clients without messages of their own send one, the sum of all: exact sums on a grid make it the same bits.
        """
        channel, n_silos = setting.method.channel, setting.cohort.n_silos
        length = sum(math.prod(shape) for shape in setting.shapes)
        if isinstance(channel, LayeredShares):
            shares = channel

            def decode(coded: Coded) -> Float64[np.ndarray, " d"]:
                return shares.receive(coded, n_silos=n_silos, length=length)

            return cls(driver=Driver(_sealed(n_silos, length, decode)), workload=CodedSums)
        if not isinstance(channel, ClientMessages):
            return cls(driver=Driver(OpenSums(clients=n_silos, length=length)), workload=SiloSums)
        if not channel.coded:
            return cls(driver=Driver(OpenSums(clients=setting.n_users, length=length)), workload=OwnMessages)
        messages = channel

        def decode_one(coded: Coded) -> Float64[np.ndarray, " d"]:
            return messages.receive(coded, length=length)

        return cls(driver=Driver(_sealed(setting.n_users, length, decode_one)), workload=OwnMessages)


def _sealed(clients: int, length: int, decode: Callable[[Coded], Float64[np.ndarray, " d"]]) -> SealedSums:
    """Return the protocol of a codec's messages."""

    def vector(given: bytes) -> Float64[np.ndarray, " d"]:
        try:
            return decode(Coded.from_bytes(given))
        except (ChannelError, CompositionError) as error:
            raise ProtocolError(f"its message was refused: {error}") from error

    return SealedSums(clients=clients, length=length, decode=vector)
