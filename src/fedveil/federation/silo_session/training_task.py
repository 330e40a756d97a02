"""Task of a silo in training rounds: weights, updates, and the server's step if the silos make it.

Claim: a silo trains a round only with the weights that its guarantee assumes. Uniform weights are exactly 1/|S|, and
constant weights are 1. Main-silo weights are 1 or 0 by the file of main silos that the run names (0 without it).
Weights by records are n_su / N_u in [0, 1], from the totals of this session. Enforced by
:meth:`SiloTrainingTask.event`, the only source of the charged event, before anything is trained.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Bool, Float32, Float64, Int64
from torch import Tensor

from fedveil.errors import OwnRecordsError
from fedveil.federation.cpu_quota import Deadline
from fedveil.federation.errors import RefusalError
from fedveil.federation.session_plan import MODEL, UNIT, RoundStartState, SessionPlan
from fedveil.federation.silo_session.round_inputs import SiloRoundContext, as_tensor
from fedveil.federation.silo_session.statement_check import SiloCharges, check_training
from fedveil.federation.silo_session.task import SiloTask
from fedveil.federation.store import RoundRecord, Tensors
from fedveil.methods.capabilities import memory_of
from fedveil.methods.method import contribution_weights, shows_counts
from fedveil.methods.server_state import (
    begin_reader_state,
    begin_state,
    decode_sum,
    released_model,
    with_clip,
)
from fedveil.privacy.events import Event
from fedveil.protocols.refusals import Code
from fedveil.protocols.session_messages import Finalize, RunPart
from fedveil.run.rounds.client_inputs import RoundInputs, make_round_inputs
from fedveil.run.rounds.round_context import SumHistory, next_model
from fedveil.run.setup import Prepared
from fedveil.training.server.optimizers import State, matching

_WEIGHTS: Final = "weights"
"""Name of the silo's weights in the record of a round whose noise enters other rounds too."""
_RECORDS: Final = "records"
"""Name, in the same record, of the digest of the silo's records and their users' keys; never sent."""
_STATE: Final = "state."
"""Prefix of the optimiser's tensors in the record of a round."""


def training_plan(prepared: Prepared, phase: RunPart | None = None) -> SessionPlan:
    """Return the plan of a training session."""
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
    """Return the event of all training rounds in a silo's ledger.

    Args:
        prepared: the experiment as the silo holds it.
        event: event of one round at strength 1, without the grid of its noise.
    """
    return prepared.guarantee.after_rounds(event, prepared.experiment.rounds)


class SiloTrainingTask(SiloTask):
    """Task of a silo in training rounds.

    Args:
        prepared: the experiment as the silo holds it.
        event: event of one round in the silo's ledger.
        seconds: time limit of a round's training.
        phase: the part of the run; None: the run is training without releases.
        whole: event and number of charges of the whole run; None: those of this training.
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
        if not shows_counts(prepared.method):
            self._promised = contribution_weights(
                prepared.method, prepared.setting.cohort.groups, prepared.population
            )
        rounds = prepared.experiment.rounds
        self.whole, self.rounds = (training_event(prepared, event), rounds) if whole is None else whole
        self._past = SumHistory()

    def event(self, number: int, *, again: bool) -> Event:
        """Return the event of a round, after checking that the weights are those of the guarantee.

        Raises:
            RefusalError: the weights differ, or are unknown because the users' totals have not arrived.
        """
        # Exact equality: the sensitivity in the event is computed from these very weights.
        if self._promised is None or not torch.equal(self.prepared.setting.weights, self._promised):
            raise RefusalError(Code.WEIGHTS)
        return self.prepared.guarantee.event_at_round(self._event, number, again=again)

    def workload(
        self,
        number: int,
        start: RoundStartState,
        drawn: Bool[np.ndarray, " users"] | None,
        before: Tensors,
    ) -> RoundInputs:
        """Return the inputs of the silo to a round: training, and its message or contributions.

        A session that begins in the middle of a stream repeats the training of the earlier rounds that enter its
        messages. The time limit grows by one round's limit for each of them.
        """
        # _past holds the sums of rounds trained in this session; if empty, up to `memory` earlier rounds are trained
        # again.
        rounds = 1 if self._past else min(number, 1 + memory_of(self.prepared.method.channel))
        turn = SiloRoundContext.from_instructions(self.prepared, number, start, drawn, self.plan.privacy)
        turn = replace(turn, state=_state(before), past=self._past, progress=Deadline(rounds * self._seconds))
        return make_round_inputs(turn, self.plan.protocol_spec, self.prepared.task.initial())

    def scores(self) -> Int64[np.ndarray, " users"]:
        """Return the score of every user in this silo, (|U|,) int64: the number of records, or a power of it."""
        share = self.prepared.population
        counts = np.bincount(share.train.user, minlength=share.n_users).astype(np.int64)
        return self.prepared.method.weights.scores(counts, share.n_silos)

    def compute_weights(self, totals: Int64[np.ndarray, " users"]) -> None:
        """Compute the weights n_su^p / sum_s n_su^p from the total scores sum_s n_su^p of all users.

        Args:
            totals: (|U|,) sums of the scores n_su^p over all silos.

        Raises:
            RefusalError: the totals have another number of users.
            OwnRecordsError: a weight would exceed 1.
        """
        prepared, users, silos = self.prepared, self.plan.n_users, self.prepared.population.n_silos
        if len(totals) != users:
            raise RefusalError(Code.USERS, len(totals), users)
        groups = prepared.setting.cohort.groups
        scores = prepared.method.weights.scores(groups.size, silos)
        held = totals[groups.user]
        # A total below the silo's own score is false: the weight would exceed 1, and the contribution its bound.
        if (held < scores).any():
            raise OwnRecordsError("a user has fewer records over all silos than in this one")
        self._promised = torch.from_numpy(scores / held)
        setting = replace(prepared.setting, weights=self._promised.clone())
        self.prepared = replace(prepared, setting=setting)

    def check_statement(self, closing: Finalize, own: SiloCharges) -> None:
        """Check the run's statement against its terms and the silo's charges."""
        check_training(self.prepared, closing, own)

    def state_after(self, last: RoundRecord | None) -> Tensors:
        """Return the state that the silo must carry into the next round.

        Raises:
            RefusalError: the next round does not continue from the last one.
        """
        method = self.prepared.method
        if method.protection.divides:
            return self._own_model(last)
        return {} if method.sampler.period == 1 else self._stream(last)

    # --- where a user's rounds belong together -----------------------------------------------------------------

    def _stream(self, last: RoundRecord | None) -> Tensors:
        """Return the state of a stream of rounds, and check the facts that must not change.

        The state holds the starts of the earlier rounds whose parts enter the next message. The guarantee covers a
        stream of rounds: a round is charged for its addition to the earlier ones. Therefore a user's weights are the
        same in all rounds, and so are the records, which are trained again. The users' keys are constant too: they
        determine the rounds in which a user takes part. Another key could place a user in two rounds of one period.

        Raises:
            RefusalError: the weights, the records here, or their users' keys differ from those of the earlier rounds.
        """
        method, weights = self.prepared.method, self.prepared.setting.weights.cpu().numpy()
        digest = np.frombuffer(bytes.fromhex(self.prepared.population.train.sha256), dtype=np.uint8)
        stays = {_WEIGHTS: weights, _RECORDS: digest}
        if last is None:
            return {**stays, **_named(begin_reader_state(method, self.prepared.task.initial()))}
        if not np.array_equal(weights, last.before[_WEIGHTS]):
            raise RefusalError(Code.WEIGHTS)
        if not np.array_equal(digest, last.before[_RECORDS]):
            raise RefusalError(Code.RECORDS)
        # With an empty sum, decode_sum only advances the reader's state from the start of the last round.
        played, model = with_clip(method, float(last.before[UNIT][0])), as_tensor(last.before[MODEL])
        _, state = decode_sum(played, np.zeros(0), model, _state(last.before))
        return {**stays, **_named(state)}

    # --- where the silos alone have the models -----------------------------------------------------------------

    def _own_model(self, last: RoundRecord | None) -> Tensors:
        """Return model and optimiser's state for the next round: initial, or from the end of the last round.

        Raises:
            RefusalError: the sum of the last round has not arrived, so that round is still to be played.
        """
        initial, method = self.prepared.task.initial().cpu(), self.prepared.method
        if last is None:
            return _kept(initial, begin_state(method, initial))
        if MODEL not in last.after:
            raise RefusalError(Code.UNENDED, last.round)
        after = last.after[MODEL]
        if len(after) != len(initial):
            raise RefusalError(Code.OTHER_LENGTH, last.round, len(after), len(initial))
        if not matching(begin_state(method, as_tensor(after)), _state(last.after)):
            raise RefusalError(Code.OTHER_SERVER, last.round)
        return last.after

    def step(self, record: RoundRecord, result: Any) -> tuple[Tensors, dict[str, Tensor]]:
        """Make the server's step from the sum; return the state to persist, and the model's tensors."""
        prepared, model = self.prepared, as_tensor(record.before[MODEL])
        turn = prepared.round_context(record.round, model, _state(record.before), self.plan.privacy)
        silos = prepared.population.n_silos
        total = prepared.protocol_spec.decode_sum(result)
        made, state = next_model(turn, total, n_silos=silos, summed=silos, drawn=self.plan.n_users)
        return _kept(made, state), prepared.task.state(released_model(prepared.method, made, state))


def _kept(model: Float32[Tensor, " d"], state: State) -> Tensors:
    """Return a model and its optimiser's state as persisted tensors."""
    return {MODEL: model.cpu().numpy(), **_named(state)}


def _named(state: State) -> Tensors:
    return {_STATE + name: value.cpu().numpy() for name, value in state.items()}


def _state(kept: Tensors) -> State:
    """Return the optimiser's state in persisted tensors."""
    return {
        name.removeprefix(_STATE): torch.from_numpy(value.copy())
        for name, value in kept.items()
        if name.startswith(_STATE)
    }
