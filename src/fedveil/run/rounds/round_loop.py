"""Play one round in the order of its stages, from the sampler to the server's step.

    population -> local -> bound -> sum per silo    RoundInputs.begin: samples, trains, bounds and adds
      -> channel -> protection                      LocalDriver.play: takes each sender's message in turn, adds them
      -> denoiser -> server -> model t+1            next_model: the mean, its estimate without noise, and the step

A :class:`RoundContext` is the state at the start of the round: the model and the
:class:`~.training_setup.TrainingSetup`, which is a method applied to a population. :class:`SimulatedParties` carry
out the method's protocol, and a :class:`~.client_inputs.RoundInputs` computes their contributions. A run charges the
privacy event of an attempt before it calls :func:`play_attempt` (:mod:`fedveil.run.loop`).
"""

from __future__ import annotations

from jaxtyping import Float32
from torch import Tensor

from fedveil.protocols.driver import NOBODY, Dropouts
from fedveil.run.loop import Played
from fedveil.run.rounds.client_inputs import RoundInputs
from fedveil.run.rounds.diagnostics import RoundDiagnostics
from fedveil.run.rounds.next_model import next_model
from fedveil.run.rounds.round_context import RoundContext
from fedveil.run.rounds.simulated_parties import SimulatedParties
from fedveil.training.server.optimizers import State


def play_attempt(
    work: RoundInputs, parties: SimulatedParties, attempt: int, cohort: tuple[int, ...], absent: Dropouts
) -> Played:
    """Play one attempt at a round, up to the sum.

    Args:
        work: inputs of all parties to the round.
        parties: the parties of the run.
        attempt: number of the attempt; sampling and noise derive from it.
        cohort: the silos that begin the attempt.
        absent: simulated dropouts.

    Raises:
        SiloVanished: silos vanished, and the protocol cannot proceed without them.
    """
    number = work.turn.round_number
    # A repeated attempt samples and trains anew here if the method samples users.
    drawn = work.begin(attempt)
    result, summed = parties.driver.play(
        (number, attempt), work.senders(cohort), drawn, work.client_input, absent
    )
    sent = work.costs if parties.transcript is None else parties.transcript
    return Played(
        total=parties.protocol_spec.decode_sum(result),
        summed=summed,
        drawn=None if work.drawn is None else int(work.drawn.sum()),
        diagnostics=RoundDiagnostics.of_round(
            number, work.training_diagnostics(), sent, attempts=attempt + 1, summed=summed
        ),
    )


def play_round(
    turn: RoundContext, parties: SimulatedParties | None = None
) -> tuple[Float32[Tensor, " d"], State, RoundDiagnostics]:
    """Play one round without a run folder, and without a charge.

    Args:
        turn: the context of the round.
        parties: the parties of the run; None: new parties that send plaintext sums, even if the method has a
            protection.

    Returns:
        (d,) float32 next global model, the next state of the server's stages, and the diagnostics of a simulation.
    """
    parties = SimulatedParties.in_the_open(turn.setting) if parties is None else parties
    everybody = tuple(range(parties.protocol_spec.clients))
    played = play_attempt(parties.workload(turn), parties, 0, everybody, NOBODY)
    assert played.total is not None
    assert played.diagnostics is not None
    n_silos = turn.setting.cohort.n_silos
    after, state = next_model(turn, played.total, n_silos=n_silos, summed=played.summed, drawn=played.drawn)
    return after, state, played.diagnostics
