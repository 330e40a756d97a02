"""One round, as the data sees it: sampler, local training, bound, sum per silo, channel, protection, denoiser, server.

    population -> local -> bound -> sum per silo -> channel -> protection -> denoiser -> server -> model t+1

The privacy event of the round is charged to the ledger by the run, before :func:`play_round` is called.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

import numpy as np
from jaxtyping import Float32, Float64
from torch import Tensor

from fedveil.engine.attempts import NO_RETRY, RetryPolicy
from fedveil.engine.communication_cost import CommunicationCost
from fedveil.engine.coordinator_side import coordinate
from fedveil.engine.parties import Parties
from fedveil.engine.setting import Setting
from fedveil.engine.turn import Turn
from fedveil.engine.workload import Trained, Workload
from fedveil.local.trainer import Progress
from fedveil.protection.driver import Dropouts
from fedveil.randomness import ExperimentRandomness, PrivacyRandomness


@dataclass(frozen=True, kw_only=True)
class RoundDiagnostics(Trained):
    """What a simulation may show of a round; computed from private data and covered by no guarantee.

    Attributes:
        bytes_up: what all silos or clients sent to the server, all attempts together; None where nobody counts.
        communication_cost: what the messages of a channel cost beside the same in float32; None where there are none.
        attempts: how often the round was begun, under a protection.
        summed: how many silos the sum is over, under a protection.
    """

    bytes_up: int | None = None
    communication_cost: CommunicationCost | None = None
    attempts: int | None = None
    summed: int | None = None


def play_round(
    setting: Setting,
    model: Float32[Tensor, " d"],
    round_number: int,
    experiment: ExperimentRandomness,
    privacy: PrivacyRandomness,
    progress: Progress | None = None,
    parties: Parties | None = None,
    retry: RetryPolicy = NO_RETRY,
    measured: bool = True,
) -> tuple[Float32[Tensor, " d"], RoundDiagnostics]:
    """Play one round from the global model; return the next one and what a simulation may show of the round.

    Args:
        setting: the method at work.
        model: (d,) the global model.
        round_number: counts from 1.
        experiment: of the experiment's seed.
        privacy: for sampling and noise.
        progress: called between chunks of local training.
        parties: those of the run; None: new ones that send everything in the open, whatever the method's protection.
        retry: what happens when silos vanish, where a protocol aggregates.
        measured: whether a channel's messages are compared with what they could cost at least, which takes long.
    """
    parties = Parties.in_the_open(setting) if parties is None else parties
    turn = Turn(
        setting=replace(setting, method=setting.method.at_round(round_number)),
        model=model,
        round_number=round_number,
        experiment=experiment,
        privacy=privacy,
        progress=progress,
        measured=measured,
    )
    work = parties.workload(turn)

    def play(
        attempt: int, cohort: tuple[int, ...], absent: Dropouts
    ) -> tuple[Float64[np.ndarray, " d"], int]:
        drawn = work.begin(attempt)
        round_id = (round_number, attempt)
        result, summed = parties.driver.play(round_id, work.senders(cohort), drawn, work.give, absent)
        return work.total(result), summed

    everybody = tuple(range(parties.driver.agreement.clients))
    (total, summed), attempts = retry.play(round_number, everybody, play)
    after = coordinate(
        turn.setting.method,
        model,
        total,
        n_silos=setting.cohort.n_silos,
        n_users=setting.n_users,
        drawn=None if work.drawn is None else int(work.drawn.sum()),
        shapes=setting.shapes,
        round_number=round_number,
        privacy=privacy,
        summed=summed,
    )
    return after, _shown(work, parties, round_number, attempts=attempts, summed=summed)


def _shown(
    work: Workload, parties: Parties, round_number: int, *, attempts: int, summed: int
) -> RoundDiagnostics:
    """Return what a simulation may show of a round that has come to its end."""
    trained, transcript = asdict(work.trained()), parties.transcript
    if transcript is not None:
        sent = transcript.bytes_up(round_number)
        return RoundDiagnostics(**trained, bytes_up=sent, attempts=attempts, summed=summed)
    sent_open = sum(cost.bytes for cost in work.costs) if work.costs else None
    return RoundDiagnostics(
        **trained, bytes_up=sent_open, communication_cost=CommunicationCost.of(work.costs)
    )
