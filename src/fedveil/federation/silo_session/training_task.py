"""A silo's work in rounds of training: its weights, its updates, and the server's step where the silos make it.

Claim: a silo trains a round only with the weights of which its guarantee speaks: exactly 1/|S| where they are uniform,
1 where they are one, 1 or 0 by the file of main silos that the run names (0 without it), n_su / N_u in [0, 1] from the
totals of this session where they are by records. Enforced by :meth:`SiloTrainingTask.event`, which is the one way to
the event that is charged, before anything is trained.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Bool, Float32, Float64, Int64
from torch import Tensor

from fedveil.federation.cpu_quota import Deadline
from fedveil.federation.errors import RefusalError
from fedveil.federation.session_plan import MODEL, UNIT, RoundStartState, SessionPlan
from fedveil.federation.silo_session.round_inputs import SiloRoundContext, as_tensor
from fedveil.federation.silo_session.statement_check import SiloCharges, check_training
from fedveil.federation.silo_session.task import SiloTask
from fedveil.federation.store import RoundRecord, Tensors
from fedveil.privacy.events import Event, on_grid
from fedveil.protocols.errors import OwnRecordsError
from fedveil.protocols.refusals import Code
from fedveil.protocols.session_messages import Finalize, RunPart
from fedveil.run.rounds.client_inputs import RoundInputs, make_round_inputs
from fedveil.run.rounds.next_model import next_model
from fedveil.run.rounds.sum_history import SumHistory
from fedveil.run.setup import Prepared
from fedveil.training.server.optimizers import State, matching

_WEIGHTS: Final = "weights"
"""The name of the silo's weights in what is kept of a round whose noise is in others too."""
_RECORDS: Final = "records"
"""The name of the digest of its records and their users' keys in the same; no message carries it."""
_STATE: Final = "state."
"""Before the names of the optimiser's tensors in what is kept of a round."""


def training_plan(prepared: Prepared, phase: RunPart | None = None) -> SessionPlan:
    """Return what a session of an experiment's training plays."""
    return SessionPlan(
        method=prepared.method,
        protocol_spec=prepared.protocol_spec,
        rounds=prepared.experiment.rounds,
        n_users=prepared.population.n_users,
        dimension=prepared.task.dimension,
        privacy=prepared.experiment.privacy.randomness(),
        phase=phase,
    )


def training_event(prepared: Prepared, event: Event) -> Event:
    """Return what a silo's ledger would count of all rounds of training.

    Args:
        prepared: the experiment as the silo holds it.
        event: what is counted of a round of strength 1, but for the grid of its noise.
    """
    guarantee, rounds = prepared.guarantee, prepared.experiment.rounds
    return on_grid(guarantee.after_rounds(event, rounds), guarantee.grid_loss_after(rounds, prepared.length))


class SiloTrainingTask(SiloTask):
    """A silo's work in rounds of training.

    Args:
        prepared: the experiment as the silo holds it.
        event: what its ledger counts of a round.
        seconds: that the training of a round may take.
        phase: which part of a run it is; None: all of one that does nothing else.
        whole: what its ledger would count of the whole run, and how many charges that is; None: of this training alone.
    """

    def __init__(
        self,
        prepared: Prepared,
        event: Event,
        seconds: float,
        phase: RunPart | None = None,
        *,
        whole: tuple[Event, int] | None = None,
    ) -> None:
        self.prepared, self._seconds = prepared, seconds
        self.plan = training_plan(prepared, phase)
        self._event = event
        self._promised: Float64[Tensor, " m"] | None = None
        if not prepared.method.shows_counts:
            self._promised = prepared.method.compute_weights(
                prepared.setting.cohort.groups, prepared.population
            )
        rounds = prepared.experiment.rounds
        self.whole, self.rounds = (training_event(prepared, event), rounds) if whole is None else whole
        self._past = SumHistory()

    def event(self, number: int, *, again: bool) -> Event:
        """Return what a round is charged as, if it is trained with the weights of its guarantee.

        Raises:
            RefusalError: other weights, or none yet: not all users' totals are known.
        """
        if self._promised is None or not torch.equal(self.prepared.setting.weights, self._promised):
            raise RefusalError(Code.WEIGHTS)
        guarantee = self.prepared.guarantee
        loss = guarantee.grid_loss_after(1, self.prepared.length)
        return on_grid(guarantee.event_at_round(self._event, number, again=again), loss)

    def workload(
        self,
        number: int,
        start: RoundStartState,
        drawn: Bool[np.ndarray, " users"] | None,
        before: Tensors,
    ) -> RoundInputs:
        """Return what trains, and makes the silo's message or its contributions.

        A session that begins in the middle of a stream trains the rounds again that it sends parts of: they take as
        long, each, as a round may.
        """
        rounds = 1 if self._past else min(number, 1 + self.prepared.method.channel.memory)
        turn = SiloRoundContext.from_instructions(self.prepared, number, start, drawn, self.plan.privacy)
        turn = replace(turn, state=_state(before), past=self._past, progress=Deadline(rounds * self._seconds))
        return make_round_inputs(turn, self.plan.protocol_spec, self.prepared.task.initial())

    def scores(self) -> Int64[np.ndarray, " users"]:
        """Return (|U|,) what weighs every user's records here: their number, or a power of it."""
        share = self.prepared.population
        counts = np.bincount(share.train.user, minlength=share.n_users).astype(np.int64)
        return self.prepared.method.weights.scores(counts, share.n_silos)

    def compute_weights(self, totals: Int64[np.ndarray, " users"]) -> None:
        """Take the weights n_su^p / sum_s n_su^p from what the scores n_su^p of every user sum to over all silos.

        Raises:
            RefusalError: totals of another number of users.
            OwnRecordsError: a weight above 1.
        """
        prepared, users, silos = self.prepared, self.plan.n_users, self.prepared.population.n_silos
        if len(totals) != users:
            raise RefusalError(Code.USERS, len(totals), users)
        groups = prepared.setting.cohort.groups
        scores = prepared.method.weights.scores(groups.size, silos)
        held = totals[groups.user]
        if (held < scores).any():
            raise OwnRecordsError("a user has fewer records over all silos than in this one")
        self._promised = torch.from_numpy(scores / held)
        setting = replace(prepared.setting, weights=self._promised.clone())
        self.prepared = replace(prepared, setting=setting)

    def check_statement(self, closing: Finalize, own: SiloCharges) -> None:
        """Return if a run states what its terms give, and charges what the silo's ledger shows."""
        check_training(self.prepared, closing, own)

    def state_after(self, last: RoundRecord | None) -> Tensors:
        """Return what a silo itself has to know of the rounds before the next one.

        Raises:
            RefusalError: the next round does not go on from the last one.
        """
        method = self.prepared.method
        if method.protection.divides:
            return self._own_model(last)
        return {} if method.sampler.period == 1 else self._stream(last)

    # --- where a user's rounds belong together -----------------------------------------------------------------

    def _stream(self, last: RoundRecord | None) -> Tensors:
        """Return how the rounds before the next one began that its message has parts of, and what must stay as it was.

        The guarantee is about a stream: a round is charged for what it adds to those before. So a user's weights are
        the same in all of them, and so are the records, which are trained again, and the key, from which follow the
        rounds that the user takes part in: under another key that could be two rounds of a period.

        Raises:
            RefusalError: the weights, or the records here or whose they are, are others than in the rounds before.
        """
        method, weights = self.prepared.method, self.prepared.setting.weights.cpu().numpy()
        digest = np.frombuffer(bytes.fromhex(self.prepared.population.train.sha256), dtype=np.uint8)
        stays = {_WEIGHTS: weights, _RECORDS: digest}
        if last is None:
            return {**stays, **_named(method.initial_reader_state(self.prepared.task.initial()))}
        if not np.array_equal(weights, last.before[_WEIGHTS]):
            raise RefusalError(Code.WEIGHTS)
        if not np.array_equal(digest, last.before[_RECORDS]):
            raise RefusalError(Code.RECORDS)
        played, model = method.clipped_to(float(last.before[UNIT][0])), as_tensor(last.before[MODEL])
        _, state = played.decode_sum(np.zeros(0), model, _state(last.before))
        return {**stays, **_named(state)}

    # --- where the silos alone have the models -----------------------------------------------------------------

    def _own_model(self, last: RoundRecord | None) -> Tensors:
        """Return what the next round begins with, model and optimiser's state: the first, or those of the last round.

        Raises:
            RefusalError: the sum of that round has not arrived here, so it is still the round to play.
        """
        initial, method = self.prepared.task.initial().cpu(), self.prepared.method
        if last is None:
            return _kept(initial, method.init(initial))
        if MODEL not in last.after:
            raise RefusalError(Code.UNENDED, last.round)
        after = last.after[MODEL]
        if len(after) != len(initial):
            raise RefusalError(Code.OTHER_LENGTH, last.round, len(after), len(initial))
        if not matching(method, as_tensor(after), _state(last.after)):
            raise RefusalError(Code.OTHER_SERVER, last.round)
        return last.after

    def step(self, record: RoundRecord, result: Any) -> tuple[Tensors, dict[str, Tensor]]:
        """Make the server's step from the sum; return what to keep of it, and the model's tensors."""
        prepared, model = self.prepared, as_tensor(record.before[MODEL])
        turn = prepared.round_context(record.round, model, _state(record.before), self.plan.privacy)
        silos = prepared.population.n_silos
        total = prepared.protocol_spec.decode_sum(result)
        made, state = next_model(turn, total, n_silos=silos, summed=silos, drawn=self.plan.n_users)
        return _kept(made, state), prepared.task.state(prepared.method.model_of(made, state))


def _kept(model: Float32[Tensor, " d"], state: State) -> Tensors:
    """Return what a silo keeps of a model and of its optimiser's state, by name."""
    return {MODEL: model.cpu().numpy(), **_named(state)}


def _named(state: State) -> Tensors:
    return {_STATE + name: value.cpu().numpy() for name, value in state.items()}


def _state(kept: Tensors) -> State:
    """Return the optimiser's state of what was kept."""
    return {
        name.removeprefix(_STATE): torch.from_numpy(value.copy())
        for name, value in kept.items()
        if name.startswith(_STATE)
    }
