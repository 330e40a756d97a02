"""A protection that hides nothing: it plays a protocol of open sums, so that a transcript lists every message."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fedveil.engine.workload import SiloSums
from fedveil.methods.protection_stage import ProtectionStage, Sends, plain_round
from fedveil.privacy.claims import Role, Sent
from fedveil.protection.open_sums import OpenSums, OpenVector


@dataclass(frozen=True)
class Witnessed(ProtectionStage):
    """The server receives every silo's message as it is, and every one of them is listed."""

    def refuses(self, method: Any) -> Iterable[str]:
        """Refuse clients, and messages that are bytes: open sums add up what silos send."""
        if method.contribution.per == "client" or method.channel.coded:
            yield "witnessed sums are those of silos that send numbers"

    def sends(self, method: Any) -> Sends:
        """Return the messages of a round, and who reads each: nothing is hidden from the server."""
        return (*plain_round(method), Sent(OpenVector, Role.SERVER))

    def agree(self, method: Any, public: Any) -> "Agreed":
        """Return the numbers of the protocol."""
        return Agreed(silos=public.n_silos, length=public.dimension)


@dataclass(frozen=True, kw_only=True)
class Agreed:
    """What the parties agree on: how many silos there are, and how long a message is."""

    silos: int
    length: int

    def protocol(self, privacy: Any) -> OpenSums:
        """Return the protocol: its two ends give and take bytes."""
        return OpenSums(clients=self.silos, length=self.length)

    def workload(self, turn: Any, initial: Any) -> SiloSums:
        """Return what the silos put into a round: their sums after the channel."""
        return SiloSums(turn)

    def vector(self, result: Any) -> Any:
        """Return the sum as it is."""
        return result
