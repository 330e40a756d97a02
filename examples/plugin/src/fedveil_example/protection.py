"""A protection that hides nothing: it plays a protocol of open sums, so that a transcript lists every message."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fedveil.methods.capabilities import sends_bytes
from fedveil.methods.protection_stage import ProtectionStage, Sends, plain_round
from fedveil.privacy.claims import Role, Sent
from fedveil.protocols.plaintext_sums import PlaintextSums, PlaintextVector


@dataclass(frozen=True)
class Witnessed(ProtectionStage):
    """The server receives every silo's message as it is, and every one of them is listed."""

    def refuses(self, method: Any) -> Iterable[str]:
        """Refuse clients, and messages that are bytes: open sums add up what silos send."""
        if method.contribution.per == "client" or sends_bytes(method.channel):
            yield "witnessed sums are those of silos that send numbers"

    def sends(self, method: Any) -> Sends:
        """Return the messages of a round, and who reads each: nothing is hidden from the server."""
        return (*plain_round(method), Sent(PlaintextVector, Role.SERVER))

    def make_protocol_spec(self, method: Any, public: Any, known_groups: Any, rounds: int) -> PlaintextSums:
        """Return what the parties agree on: the protocol, what silos put into a round of it, and what comes of that."""
        return PlaintextSums(clients=public.n_silos, length=public.length)
