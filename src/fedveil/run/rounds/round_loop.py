"""One round in the order of its stages: sampler, local training, bound, sum per silo, channel, protection, server.

    population -> local -> bound -> sum per silo      RoundInputs.begin: draws the participants, trains, bounds and adds
      -> channel -> protection                        LocalDriver.play: takes each sender's message in turn, adds them
      -> denoiser -> server -> model t+1              next_model: the mean, its estimate without noise, and the step

A :class:`RoundContext` is what the round begins with: the model and the :class:`~.training_setup.TrainingSetup`,
which is a method with a population. :class:`SimulatedParties` carry out the method's protocol, and a
:class:`~.client_inputs.RoundInputs` computes their contributions. The run charges the round's privacy event to the
ledger before it calls
:func:`play_round`.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float32, Float64
from torch import Tensor

from fedveil.protocols.driver import Dropouts
from fedveil.run.rounds.diagnostics import RoundDiagnostics
from fedveil.run.rounds.next_model import next_model
from fedveil.run.rounds.retries import NO_RETRY, RetryPolicy
from fedveil.run.rounds.round_context import RoundContext
from fedveil.run.rounds.simulated_parties import SimulatedParties
from fedveil.training.server.optimizers import State


def play_round(
    turn: RoundContext, parties: SimulatedParties | None = None, retry: RetryPolicy = NO_RETRY
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

    def attempt(
        tried: int, cohort: tuple[int, ...], absent: Dropouts
    ) -> tuple[Float64[np.ndarray, " d"], int]:
        drawn = work.begin(tried)
        result, summed = parties.driver.play(
            (number, tried), work.senders(cohort), drawn, work.client_input, absent
        )
        return parties.protocol_spec.decode_sum(result), summed

    everybody = tuple(range(parties.protocol_spec.clients))
    (total, summed), attempts = retry.play(number, everybody, attempt)
    took_part = None if work.drawn is None else int(work.drawn.sum())
    after, state = next_model(turn, total, n_silos=setting.cohort.n_silos, summed=summed, drawn=took_part)
    sent = work.costs if parties.transcript is None else parties.transcript
    shown = RoundDiagnostics.of_round(
        number, work.training_diagnostics(), sent, attempts=attempts, summed=summed
    )
    return after, state, shown
