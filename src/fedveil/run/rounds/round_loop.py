"""Play one round in the order of its stages, from the sampler to the server's step.

    population -> local -> bound -> sum per silo    RoundInputs.begin: samples, trains, bounds and adds
      -> channel -> protection                      LocalDriver.play: takes each sender's message in turn, adds them
      -> denoiser -> server -> model t+1            next_model: the mean, its estimate without noise, and the step

A :class:`RoundContext` is the state at the start of the round: the model and the
:class:`~.training_setup.TrainingSetup`, which is a method applied to a population. :class:`SimulatedParties` carry
out the method's protocol, and a :class:`~.client_inputs.RoundInputs` computes their contributions. The run charges
the round's privacy event to the ledger before it calls :func:`play_round`.
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
    """Play one round.

    Args:
        turn: the context of the round.
        parties: the parties of the run; None: new parties that send plaintext sums, even if the method has a
            protection.
        retry: rule for silos that vanish during the protocol.

    Returns:
        (d,) float32 next global model, the next state of the server's stages, and the diagnostics of a simulation.
    """
    setting, number = turn.setting, turn.round_number
    parties = SimulatedParties.in_the_open(setting) if parties is None else parties
    work = parties.workload(turn)

    def attempt(
        tried: int, cohort: tuple[int, ...], absent: Dropouts
    ) -> tuple[Float64[np.ndarray, " d"], int]:
        # A repeated attempt samples and trains anew here if the method samples users.
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
