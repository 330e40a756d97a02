"""One round, as the data sees it: sampler, local training, bound, sum per silo, channel, protection, denoiser, server.

    population -> local -> bound -> sum per silo -> channel -> protection -> denoiser -> server -> model t+1

The privacy event of the round is charged to the ledger by the run, before :func:`play_round` is called.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Float32, Float64, Int64
from torch import Tensor

from fedveil.engine.aggregation import PLAIN_SUM, PlainSum, SecureSum
from fedveil.engine.attempts import IMPATIENT, Patience
from fedveil.engine.clients import ClientTraining, send_updates
from fedveil.engine.coordinator_side import coordinate, draw_users
from fedveil.engine.partial import PartlyEncryptedSum
from fedveil.engine.seat import Seat, trainer_of
from fedveil.engine.silo_side import SiloMessage, WeightedTraining, local_sums, members_of, silo_message
from fedveil.engine.uplink import Uplink
from fedveil.engine.weighting import WeightedSum
from fedveil.local.trainer import Progress, Sums
from fedveil.methods.client_messages import ClientMessages
from fedveil.methods.stages import (
    ClientContribution,
    MessageCost,
)
from fedveil.privacy.sampling import Everyone
from fedveil.protection.session import Absent
from fedveil.randomness import ExperimentRandomness, PrivacyRandomness

_QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)


@dataclass(frozen=True, kw_only=True)
class RoundDiagnostics:
    """What a simulation may show of a round; computed from private data and covered by no guarantee.

    Attributes:
        participants: users who took part (silos where a contribution is a silo).
        contributions: contributions that were trained.
        nonfinite: contributions whose update was not finite and counted as zero.
        norms: quantiles 0, .1, .25, .5, .75, .9, 1 of the finite updates' l2 norms before clipping.
        clipped: the fraction of finite updates that the bound shortened.
        bytes_up: what all silos or clients sent to the server, all attempts together; None where nobody counts.
        uplink: what the messages of a channel cost beside the same in float32; None where there are none.
        attempts: how often the round was begun, under a protocol.
        summed: how many silos the sum is over, under a protocol.
    """

    participants: int
    contributions: int
    nonfinite: int
    norms: tuple[float, ...] | None
    clipped: float | None
    bytes_up: int | None = None
    uplink: Uplink | None = None
    attempts: int | None = None
    summed: int | None = None


def play_round(
    seat: Seat,
    model: Float32[Tensor, " d"],
    round_number: int,
    experiment: ExperimentRandomness,
    privacy: PrivacyRandomness,
    progress: Progress | None = None,
    aggregation: PlainSum | SecureSum | WeightedSum | PartlyEncryptedSum = PLAIN_SUM,
    patience: Patience = IMPATIENT,
) -> tuple[Float32[Tensor, " d"], RoundDiagnostics]:
    """Play one round from the global model; return the next one and what a simulation may show of the round.

    Args:
        seat: the method at work.
        model: (d,) the global model.
        round_number: counts from 1.
        experiment: of the experiment's seed.
        privacy: for sampling and noise.
        progress: called between chunks of local training.
        aggregation: how the silos' messages, or under private weighting their contributions, become a sum.
        patience: what happens when silos vanish, where a protocol aggregates.
    """
    seat = replace(seat, method=seat.method.at_round(round_number))
    turn = _Turn(seat, model, round_number, experiment, privacy, progress)
    if isinstance(aggregation, WeightedSum):
        gathered = _weigh(turn, aggregation, patience)
    elif isinstance(aggregation, PartlyEncryptedSum):
        gathered = _encrypt(turn, aggregation)
    elif isinstance(seat.method.channel, ClientMessages):
        gathered = _collect(turn, seat.method.channel)
    else:
        gathered = _add_up(turn, aggregation, patience)
    after = coordinate(
        seat.method,
        model,
        gathered.total,
        n_silos=seat.cohort.n_silos,
        n_users=seat.n_users,
        drawn=gathered.drawn,
        shapes=seat.shapes,
        round_number=round_number,
        privacy=privacy,
        summed=gathered.summed,
    )
    if isinstance(aggregation, PlainSum):
        sent = sum(cost.bytes for cost in gathered.costs) if gathered.costs else None
    else:
        sent = aggregation.transcript.bytes_up(round_number)
    return after, replace(gathered.shown, bytes_up=sent, uplink=Uplink.of(gathered.costs))


@dataclass(frozen=True)
class _Turn:
    """What a round begins with; the arguments of :func:`play_round`."""

    seat: Seat
    model: Float32[Tensor, " d"]
    round_number: int
    experiment: ExperimentRandomness
    privacy: PrivacyRandomness
    progress: Progress | None

    def draw(self, attempt: int = 0) -> Bool[np.ndarray, " users"] | None:
        """Draw who takes part in an attempt at the round."""
        return draw_users(self.seat.method, self.seat.n_users, self.privacy, self.round_number, attempt)

    def train(self, attempt: int = 0) -> _Trained:
        """Draw, and train who was drawn."""
        drawn = self.draw(attempt)
        members = members_of(self.seat.cohort.groups, drawn)
        sums = local_sums(self.seat, self.model, members, self.round_number, self.experiment, self.progress)
        return _Trained(drawn, members, sums)


@dataclass(frozen=True, eq=False)
class _Trained:
    """Who took part, in users and in contributions, and the silos' sums of their updates."""

    drawn: Bool[np.ndarray, " users"] | None
    members: Int64[Tensor, " m"]
    sums: Sums

    def diagnosed(self, seat: Seat) -> RoundDiagnostics:
        """Return what a simulation may show of the training."""
        return _diagnose(seat, self.members, self.sums.norms, self.sums.nonfinite)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Gathered:
    """The sum that the server learned, over how many silos, what a simulation may show, and messages' costs."""

    total: Float64[np.ndarray, " d"]
    summed: int
    drawn: int | None
    shown: RoundDiagnostics
    costs: Sequence[MessageCost] = ()


def _add_up(turn: _Turn, aggregation: PlainSum | SecureSum, patience: Patience) -> _Gathered:
    """Train, send every silo's sum through the channel, and add the messages up.

    An attempt that failed may have released its sum, so the next one has users of its own: two noisy sums over one
    sample would tell more of it than the two rounds they are charged as.
    """
    seat, number = turn.seat, turn.round_number
    silos = tuple(range(seat.cohort.n_silos))
    trained = turn.train()

    def message(silo: int, attempt: int = 0) -> SiloMessage:
        return silo_message(
            seat.method,
            trained.sums.total[silo].cpu().numpy(),
            n_silos=len(silos),
            silo=silo,
            round_number=number,
            privacy=turn.privacy,
            attempt=attempt,
        )

    if isinstance(aggregation, SecureSum):

        def play(
            attempt: int, cohort: tuple[int, ...], absent: Absent
        ) -> tuple[Float64[np.ndarray, " d"], int]:
            nonlocal trained
            if attempt and not isinstance(seat.method.sampler, Everyone):
                trained = turn.train(attempt)
            vectors = {silo: message(silo, attempt).vector for silo in cohort}
            return aggregation.attempt(number, attempt, vectors, absent)

        (total, summed), attempts = patience.play(number, silos, play)
        shown = replace(trained.diagnosed(seat), attempts=attempts, summed=summed)
        return _Gathered(total=total, summed=summed, drawn=_count(trained.drawn), shown=shown)
    messages = [message(silo) for silo in silos]
    total = aggregation.total(number, [message.vector for message in messages])
    costs = [message.sent.cost for message in messages if message.sent is not None]
    shown, drawn = trained.diagnosed(seat), _count(trained.drawn)
    return _Gathered(total=total, summed=len(silos), drawn=drawn, shown=shown, costs=costs)


def _collect(turn: _Turn, channel: ClientMessages) -> _Gathered:
    """Train, and add up the messages that the drawn clients send."""
    seat, number, drawn = turn.seat, turn.round_number, turn.draw()
    assert drawn is not None
    training = ClientTraining(
        trainer=trainer_of(seat, number),
        cohort=seat.cohort,
        bound=seat.method.bound,
        model=turn.model,
        round_number=number,
        experiment=turn.experiment,
        progress=turn.progress,
    )
    sent = send_updates(channel, training, drawn, turn.privacy)
    shown = _diagnose(seat, sent.members, sent.norms, int(sent.norms.isnan().sum()))
    summed, count = seat.cohort.n_silos, _count(drawn)
    return _Gathered(total=sent.aggregate, summed=summed, drawn=count, shown=shown, costs=sent.costs)


def _weigh(turn: _Turn, aggregation: WeightedSum, patience: Patience) -> _Gathered:
    """Train, and have the contributions weighted and added up under encryption."""
    seat, number = turn.seat, turn.round_number

    def play(
        attempt: int, cohort: tuple[int, ...], absent: Absent
    ) -> tuple[Float64[np.ndarray, " d"], Float64[Tensor, " m"], int | None]:
        training = WeightedTraining(
            seat, turn.model, number, turn.experiment, turn.privacy, turn.progress, attempt=attempt
        )
        drawn = turn.draw(attempt)
        total = aggregation.total(
            number, training.silos(), drawn, attempt=attempt, absent=absent, dither=training.dither
        )
        return total, training.norms, _count(drawn)

    n_silos = seat.cohort.n_silos
    (total, norms, drawn), attempts = patience.play(number, tuple(range(n_silos)), play)
    shown = _diagnose(seat, torch.arange(len(seat.cohort.groups)), norms, int(norms.isnan().sum()))
    shown = replace(shown, attempts=attempts, summed=n_silos)
    return _Gathered(total=total, summed=n_silos, drawn=drawn, shown=shown)


def _encrypt(turn: _Turn, aggregation: PartlyEncryptedSum) -> _Gathered:
    """Train, and have the messages of all silos, or of the drawn clients, divided, encrypted in part and added up."""
    seat, trained = turn.seat, turn.train()
    senders = np.arange(seat.cohort.n_silos)
    if trained.drawn is not None and isinstance(seat.method.contribution, ClientContribution):
        senders = np.flatnonzero(trained.drawn)
    messages = {int(silo): trained.sums.total[int(silo)].cpu().numpy() for silo in senders}
    total = aggregation.total(turn.round_number, messages, turn.model, turn.privacy)
    shown = replace(trained.diagnosed(seat), summed=len(messages))
    return _Gathered(total=total, summed=len(messages), drawn=_count(trained.drawn), shown=shown)


def _count(drawn: Bool[np.ndarray, " users"] | None) -> int | None:
    """Return how many were drawn; None where nobody is."""
    return None if drawn is None else int(drawn.sum())


def _diagnose(
    seat: Seat, members: Int64[Tensor, " m"], lengths: Float64[Tensor, " k"], nonfinite: int
) -> RoundDiagnostics:
    users = seat.cohort.groups.user[members.numpy()]
    norms = lengths[torch.isfinite(lengths)].cpu()
    clipped = seat.method.local_bound.clipped(norms)
    return RoundDiagnostics(
        participants=len(np.unique(users)) if (users >= 0).all() else len(users),
        contributions=len(users),
        nonfinite=nonfinite,
        norms=tuple(np.quantile(norms.numpy(), _QUANTILES).tolist()) if len(norms) else None,
        clipped=float(clipped.double().mean()) if len(norms) else None,
    )
