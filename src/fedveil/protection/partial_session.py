"""Whole rounds of partial encryption in one process; all that passes between the parties is bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64, Int64

from fedveil.crypto.agreement import Moment
from fedveil.crypto.keys import IdentityKey
from fedveil.protection.errors import ProtocolError
from fedveil.protection.partial_encryption import PartialSilo
from fedveil.protection.partial_plan import PartialPlan
from fedveil.protection.partial_server import PartialServer
from fedveil.protection.session import Post
from fedveil.protection.transcript import Transcript

Parts = tuple[Int64[np.ndarray, " c"], Int64[np.ndarray, " h"]]
Split = Callable[[int, Bool[np.ndarray, " d"]], Parts]
"""Gives a silo's coordinates outside and inside the partition, ascending, in grid units, with their noise."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PartialResult:
    """What every silo of a cohort has after a round.

    Attributes:
        partition: (d,) which coordinates were encrypted.
        clear: (d - k,) the sum of the others, ascending, in grid units.
        hidden: (k,) the sum of those, ascending, in grid units.
    """

    partition: Bool[np.ndarray, " d"]
    clear: Int64[np.ndarray, " c"]
    hidden: Int64[np.ndarray, " h"]


class PartialSession:
    """All parties of a run under partial encryption; the setup is played at once.

    Args:
        plan: what all parties agree on.
        workers: processes in which silos encrypt; None: in this one.
    """

    def __init__(self, plan: PartialPlan, workers: Executor | None = None) -> None:
        self.plan = plan
        self.transcript = Transcript()
        identities = [IdentityKey.generate() for _ in range(plan.silos)]
        roster = tuple(identity.public for identity in identities)
        self.silos = tuple(
            PartialSilo(plan, index=index, identity=identity, roster=roster, workers=workers)
            for index, identity in enumerate(identities)
        )
        self.server = PartialServer(plan)
        self._post = Post(self.server, self.silos, self.transcript)
        for silo in self.silos:
            self._post.to_server(silo.index, silo.announce())

    def aggregate(
        self,
        round_number: int,
        values: Mapping[int, Float64[np.ndarray, " d"]],
        split: Split,
        *,
        vote_noise: Callable[[int], Int64[np.ndarray, " d"]] | None = None,
        attempt: int = 0,
    ) -> PartialResult:
        """Play a round; return what its silos have at the end.

        Args:
            round_number: counts from 1; each pair of round and attempt can be played once.
            values: per silo of the cohort what it votes by, or, where nobody votes, values that are the same for all.
            split: each silo's two parts, once the partition is known.
            vote_noise: each silo's share of the noise on the counts of votes, if they have noise.
            attempt: how often this round was begun before.

        Raises:
            ProtocolError: fewer than two silos, parts that the plan does not allow, a moment that was played before, or
                silos that do not end with the same sum.
        """
        cohort = tuple(sorted(values))
        moment = Moment(run=self.plan.run, round=round_number, attempt=attempt)
        self._post.to_silos(self.server.begin(moment, cohort))
        for silo in cohort:
            noise = None if vote_noise is None else vote_noise(silo)
            for data in self.silos[silo].propose(values[silo], noise):
                self._post.to_server(silo, data)
        partition = self.silos[cohort[0]].partition
        for silo in cohort:
            clear, hidden = split(silo, self.silos[silo].partition)
            self._post.to_server(silo, self.silos[silo].contribute(clear, hidden))
        clear, hidden = self.silos[cohort[0]].result()
        for silo in cohort[1:]:
            other = self.silos[silo].result()
            if not (np.array_equal(other[0], clear) and np.array_equal(other[1], hidden)):
                raise ProtocolError("ends with another sum than the first silo of its cohort", silo=silo)
        return PartialResult(partition=partition, clear=clear, hidden=hidden)
