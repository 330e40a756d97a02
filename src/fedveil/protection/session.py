"""Whole rounds in one process: carries bytes between the state machines and records every message."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np
from jaxtyping import Bool, Float64, Int64

from fedveil.crypto.agreement import Moment
from fedveil.crypto.keys import IdentityKey
from fedveil.protection.driver import NOBODY, Absent
from fedveil.protection.errors import SiloVanished
from fedveil.protection.messages import SERVER
from fedveil.protection.private_weighting import Contributions, Evaluator, KeyHolder
from fedveil.protection.transcript import Transcript
from fedveil.protection.weighting_plan import WeightingPlan
from fedveil.protection.weighting_server import WeightingServer
from fedveil.protection.weighting_silo import WeightingSilo


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

    Attributes:
        gone: silos that have vanished: what is sent to them is not answered.

    Args:
        server: the server's state machine.
        silos: the silos', by number.
        transcript: where every message is recorded.
    """

    def __init__(self, server: ServerParty, silos: Sequence[SiloParty], transcript: Transcript) -> None:
        self._server, self._silos, self._transcript = server, silos, transcript
        self.gone: set[int] = set()

    def to_server(self, sender: int, data: bytes) -> None:
        """Deliver a silo's message, and whatever follows from it."""
        waiting = [(sender, SERVER, data)]
        while waiting:
            source, target, content = waiting.pop(0)
            self._transcript.record(content)
            if target == SERVER:
                waiting += [(SERVER, silo, reply) for silo, reply in self._server.receive(source, content)]
            else:
                waiting += [(target, SERVER, reply) for reply in self._answers(target, content)]

    def to_silos(self, messages: list[tuple[int, bytes]]) -> None:
        """Deliver the server's messages, and whatever follows from them."""
        for silo, data in messages:
            self._transcript.record(data)
            for reply in self._answers(silo, data):
                self.to_server(silo, reply)

    def _answers(self, silo: int, data: bytes) -> list[bytes]:
        return [] if silo in self.gone else self._silos[silo].receive(data)


class WeightingSession:
    """All parties of a run under private weighting, in one process; the setup is played at once.

    Args:
        plan: what all parties agree on.
        counts: (|S|, |U|) n_{s,u}; row s is given to silo s alone.
        holder: the cipher's key holder, for the server.
        evaluator: makes the cipher's evaluator, for each silo.

    Raises:
        ProtocolError: counts that the plan does not allow, naming the silo.
    """

    def __init__(
        self,
        plan: WeightingPlan,
        counts: Int64[np.ndarray, "silos users"],
        *,
        holder: KeyHolder,
        evaluator: Callable[[WeightingPlan, bytes], Evaluator],
    ) -> None:
        self.plan = plan
        self.transcript = Transcript()
        identities = [IdentityKey.generate() for _ in range(plan.silos)]
        roster = tuple(identity.public for identity in identities)
        self.silos = tuple(
            WeightingSilo(
                plan, index=index, identity=identity, roster=roster, counts=row, evaluator=evaluator
            )
            for index, (identity, row) in enumerate(zip(identities, counts, strict=True))
        )
        self.server = WeightingServer(plan, holder)
        self._post = Post(self.server, self.silos, self.transcript)
        for silo in self.silos:
            self._post.to_server(silo.index, silo.announce())

    def aggregate(
        self,
        round_number: int,
        inputs: Iterable[tuple[Contributions, Int64[np.ndarray, " d"]]],
        *,
        drawn: Bool[np.ndarray, " users"] | None = None,
        attempt: int = 0,
        absent: Absent = NOBODY,
        dither: Callable[[int], bytes | None] = lambda silo: None,
    ) -> Float64[np.ndarray, " d"]:
        """Return sum_s ( sum_u n_{s,u}/N_u y_{s,u} + z_s ) over the drawn users, in grid units.

        Args:
            round_number: counts from 1; each pair of round and attempt can be played once.
            inputs: per silo the (m, d) clipped contributions of its :attr:`WeightingSilo.members`, weight 1, and its
                (d,) exact integer noise share; taken one silo at a time.
            drawn: (|U|,) who takes part, if the plan has the server draw users.
            attempt: how often this round was begun before.
            absent: which silos vanish on the way.
            dither: per silo the key of its share of the remainders modulo C; None: a new one.

        Raises:
            SiloVanished: a silo did not answer.
            ProtocolError: values the plan does not allow, a moment played before, or a sum that fails its check.
        """
        moment = Moment(run=self.plan.run, round=round_number, attempt=attempt)
        self._post.gone = set()
        self._post.to_silos(self.server.begin(moment, drawn))
        for silo, (units, share) in zip(self.silos, inputs, strict=True):
            if silo.index not in absent.before_input:
                encrypted = silo.contribute(units, share, dither(silo.index))
                self._post.gone |= {silo.index} & absent.before_reveal
                self._post.to_server(silo.index, encrypted)
        if missing := self.server.missing:
            raise SiloVanished(missing, may_have_released=self.server.may_have_released)
        return self.server.result()
