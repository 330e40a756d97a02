"""One round, as the data sees it: sampler, local training, bound, sum per silo, channel, protection, denoiser, server.

    population -> local -> bound -> sum per silo      Workload.begin: who takes part is drawn, trained and bounded
      -> channel -> protection                        Driver.play: every sender's message when its turn comes; their sum
      -> denoiser -> server -> model t+1              next_model: the mean, what lies under its noise, and the step

A :class:`Turn` is what the round begins with: the model, and the :class:`~.setting.Setting`, a method at work on a
population. :class:`SimulatedParties` play the method's protocol; their :class:`~.workload.Workload` is what they
put in. The privacy event of the round is charged to the ledger by the run, before :func:`play_round` is called.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float32, Float64
from torch import Tensor

from fedveil.engine.rounds.attempts import NO_RETRY, RetryPolicy
from fedveil.engine.rounds.diagnostics import RoundDiagnostics
from fedveil.engine.rounds.next_model import next_model
from fedveil.engine.rounds.simulated_parties import SimulatedParties
from fedveil.engine.rounds.turn import Turn
from fedveil.protection.driver import Dropouts
from fedveil.server.optimizers import State


def play_round(
    turn: Turn, parties: SimulatedParties | None = None, retry: RetryPolicy = NO_RETRY
) -> tuple[Float32[Tensor, " d"], State, RoundDiagnostics]:
    """Play one round; return the next global model, the optimiser's next state, and what a simulation may show.

    Args:
        turn: what the round begins with.
        parties: those of the run; None: new ones that send everything in the open, whatever the method's protection.
        retry: what happens when silos vanish, where a protocol aggregates.
    """
    setting, number = turn.setting, turn.round_number
    parties = SimulatedParties.in_the_open(setting) if parties is None else parties
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
    after, state = next_model(turn, total, n_silos=setting.cohort.n_silos, summed=summed, drawn=took_part)
    sent = work.costs if parties.transcript is None else parties.transcript
    shown = RoundDiagnostics.of_round(number, work.trained(), sent, attempts=attempts, summed=summed)
    return after, state, shown
