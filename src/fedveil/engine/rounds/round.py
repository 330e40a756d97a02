"""One round, as the data sees it: sampler, local training, bound, sum per silo, channel, protection, denoiser, server.

    population -> local -> bound -> sum per silo -> channel -> protection -> denoiser -> server -> model t+1

The privacy event of the round is charged to the ledger by the run, before :func:`play_round` is called.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float32, Float64
from torch import Tensor

from fedveil.engine.rounds.attempts import NO_RETRY, RetryPolicy
from fedveil.engine.rounds.communication_cost import CommunicationCost
from fedveil.engine.rounds.coordinator_side import coordinate
from fedveil.engine.rounds.parties import Parties
from fedveil.engine.rounds.turn import Turn
from fedveil.engine.rounds.workload import Trained, Workload
from fedveil.protection.driver import Dropouts
from fedveil.server.optimizers import State


@dataclass(frozen=True, kw_only=True)
class RoundDiagnostics(Trained):
    """What a simulation may show of a round; computed from private data and covered by no guarantee.

    Attributes:
        bytes_up: what all silos or clients sent to the server, in all attempts since the run was begun or resumed;
            None where nobody counts.
        communication_cost: what the messages of a channel cost beside the same in float32; None where there are none.
        attempts: how often the round was begun, under a protection.
        summed: how many silos the sum is over, under a protection.
    """

    bytes_up: int | None = None
    communication_cost: CommunicationCost | None = None
    attempts: int | None = None
    summed: int | None = None


def play_round(
    turn: Turn, parties: Parties | None = None, retry: RetryPolicy = NO_RETRY
) -> tuple[Float32[Tensor, " d"], State, RoundDiagnostics]:
    """Play one round; return the next global model, the optimiser's next state, and what a simulation may show.

    Args:
        turn: what the round begins with; its method is that of round 1.
        parties: those of the run; None: new ones that send everything in the open, whatever the method's protection.
        retry: what happens when silos vanish, where a protocol aggregates.
    """
    setting, number = turn.setting, turn.round_number
    parties = Parties.in_the_open(setting) if parties is None else parties
    turn = replace(turn, setting=replace(setting, method=setting.method.at_round(number, turn.state)))
    work = parties.workload(turn)

    def play(
        attempt: int, cohort: tuple[int, ...], absent: Dropouts
    ) -> tuple[Float64[np.ndarray, " d"], int]:
        drawn = work.begin(attempt)
        result, summed = parties.driver.play(
            (number, attempt), work.senders(cohort), drawn, work.give, absent
        )
        return parties.agreed.vector(result), summed

    everybody = tuple(range(parties.agreed.clients))
    (total, summed), attempts = retry.play(number, everybody, play)
    took_part = None if work.drawn is None else int(work.drawn.sum())
    after, state = coordinate(turn, total, n_silos=setting.cohort.n_silos, summed=summed, drawn=took_part)
    return after, state, _shown(work, parties, number, attempts=attempts, summed=summed)


def _shown(
    work: Workload, parties: Parties, round_number: int, *, attempts: int, summed: int
) -> RoundDiagnostics:
    """Return what a simulation may show of a round that has come to its end."""
    trained, transcript = vars(work.trained()), parties.transcript
    if transcript is not None:
        sent = transcript.bytes_up(round_number)
        return RoundDiagnostics(**trained, bytes_up=sent, attempts=attempts, summed=summed)
    sent_open = sum(cost.bytes for cost in work.costs) if work.costs else None
    return RoundDiagnostics(
        **trained, bytes_up=sent_open, communication_cost=CommunicationCost.of(work.costs)
    )
