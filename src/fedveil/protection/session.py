"""Whole rounds in one process: carries bytes between the state machines and records every message."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from jaxtyping import Int64

from fedveil.crypto.agreement import RUN_BYTES, Moment
from fedveil.crypto.keys import IdentityKey
from fedveil.protection.messages import SERVER
from fedveil.protection.secure_aggregation import AggregationPlan, AggregationServer, AggregationSilo
from fedveil.protection.transcript import Transcript


class SiloParty(Protocol):
    """A silo's state machine."""

    def receive(self, data: bytes) -> list[bytes]:
        """Read a message of the server; return the answers."""
        ...


class ServerParty(Protocol):
    """A server's state machine."""

    def receive(self, sender: int, data: bytes) -> list[tuple[int, bytes]]:
        """Read a message of a silo; return pairs of recipient and bytes."""
        ...


class Post:
    """Carries messages until nobody has anything more to say.

    Args:
        server: the server's state machine.
        silos: the silos', by number.
        transcript: where every message is recorded.
    """

    def __init__(self, server: ServerParty, silos: Sequence[SiloParty], transcript: Transcript) -> None:
        self._server, self._silos, self._transcript = server, silos, transcript

    def to_server(self, sender: int, data: bytes) -> None:
        """Deliver a silo's message, and whatever follows from it."""
        waiting = [(sender, SERVER, data)]
        while waiting:
            source, target, content = waiting.pop(0)
            self._transcript.record(content)
            if target == SERVER:
                waiting += [(SERVER, silo, reply) for silo, reply in self._server.receive(source, content)]
            else:
                waiting += [(target, SERVER, reply) for reply in self._silos[target].receive(content)]

    def to_silos(self, messages: list[tuple[int, bytes]]) -> None:
        """Deliver the server's messages, and whatever follows from them."""
        for silo, data in messages:
            self._transcript.record(data)
            for reply in self._silos[silo].receive(data):
                self.to_server(silo, reply)


class AggregationSession:
    """All parties of a run under secure aggregation, in one process.

    Args:
        silos: how many silos.
        length: d, coordinates of a vector.
        limit: largest absolute value of a silo's coordinate, noise included, in grid units.

    Raises:
        ProtocolError: the sums would not fit.
    """

    def __init__(self, *, silos: int, length: int, limit: int) -> None:
        self.plan = AggregationPlan(run=os.urandom(RUN_BYTES), silos=silos, length=length, limit=limit)
        self.transcript = Transcript()
        identities = [IdentityKey.generate() for _ in range(silos)]
        roster = tuple(identity.public for identity in identities)
        self._silos = [
            AggregationSilo(self.plan, index=index, identity=identity, roster=roster)
            for index, identity in enumerate(identities)
        ]
        self._server = AggregationServer(self.plan)
        self._post = Post(self._server, self._silos, self.transcript)
        for silo in self._silos:
            self._post.to_server(silo.index, silo.announce())

    def aggregate(
        self, round_number: int, units: Mapping[int, Int64[np.ndarray, " d"]], *, attempt: int = 0
    ) -> Int64[np.ndarray, " d"]:
        """Return the sum over the silos that are there, as the server learns it.

        Args:
            round_number: counts from 1; each pair of round and attempt can be played once.
            units: per silo its (d,) vector with its share of the noise, in grid units.
            attempt: how often this round was begun before.

        Raises:
            ProtocolError: fewer than two silos, a value above the limit, or a moment that was played before.
        """
        cohort = tuple(sorted(units))
        moment = Moment(run=self.plan.run, round=round_number, attempt=attempt)
        self._post.to_silos(self._server.begin(moment, cohort))
        for silo in cohort:
            self._post.to_server(silo, self._silos[silo].contribute(units[silo]))
        return self._server.result()
