"""One round, as the data sees it: sampler, local training, bound, sum per silo, channel, protection, denoiser, server.

    population -> local -> bound -> sum per silo -> channel -> protection -> denoiser -> server -> model t+1

The privacy event of the round is charged to the ledger by the run, before :func:`play_round` is called.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int64
from torch import Tensor

from fedveil.engine.attempts import IMPATIENT, Patience
from fedveil.engine.coordinator_side import coordinate
from fedveil.engine.partial import PartlyEncryptedSum
from fedveil.engine.parties import Parties
from fedveil.engine.seat import Seat
from fedveil.engine.silo_side import local_sums, members_of
from fedveil.engine.uplink import Uplink
from fedveil.engine.workload import Trained, Turn
from fedveil.local.trainer import Progress, Sums
from fedveil.methods.stages import ClientContribution
from fedveil.protection.driver import Absent
from fedveil.randomness import ExperimentRandomness, PrivacyRandomness


@dataclass(frozen=True, kw_only=True)
class RoundDiagnostics(Trained):
    """What a simulation may show of a round; computed from private data and covered by no guarantee.

    Attributes:
        bytes_up: what all silos or clients sent to the server, all attempts together; None where nobody counts.
        uplink: what the messages of a channel cost beside the same in float32; None where there are none.
        attempts: how often the round was begun, under a protection.
        summed: how many silos the sum is over, under a protection.
    """

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
    parties: Parties | PartlyEncryptedSum | None = None,
    patience: Patience = IMPATIENT,
    measured: bool = True,
) -> tuple[Float32[Tensor, " d"], RoundDiagnostics]:
    """Play one round from the global model; return the next one and what a simulation may show of the round.

    Args:
        seat: the method at work.
        model: (d,) the global model.
        round_number: counts from 1.
        experiment: of the experiment's seed.
        privacy: for sampling and noise.
        progress: called between chunks of local training.
        parties: those of the run; None: new ones that send everything in the open, whatever the method's protection.
        patience: what happens when silos vanish, where a protocol aggregates.
        measured: whether a channel's messages are compared with what they could cost at least, which takes long.
    """
    parties = Parties.in_the_open(seat) if parties is None else parties
    turn = Turn(
        seat=replace(seat, method=seat.method.at_round(round_number)),
        model=model,
        round_number=round_number,
        experiment=experiment,
        privacy=privacy,
        progress=progress,
        measured=measured,
    )
    gathered = (
        _encrypt(turn, parties)
        if isinstance(parties, PartlyEncryptedSum)
        else _gather(turn, parties, patience)
    )
    after = coordinate(
        turn.seat.method,
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
    shown = gathered.shown
    if parties.transcript is not None:
        shown = replace(shown, bytes_up=parties.transcript.bytes_up(round_number))
    return after, shown


def _gather(turn: Turn, parties: Parties, patience: Patience) -> _Gathered:
    """Play the attempts at a round until one comes to its end."""
    work = parties.workload(turn)

    def play(attempt: int, cohort: tuple[int, ...], absent: Absent) -> tuple[Float64[np.ndarray, " d"], int]:
        drawn = work.begin(attempt)
        moment = (turn.round_number, attempt)
        result, summed = parties.driver.play(moment, work.senders(cohort), drawn, work.give, absent)
        return work.total(result), summed

    everybody = tuple(range(parties.driver.agreement.clients))
    (total, summed), attempts = patience.play(turn.round_number, everybody, play)
    protected = parties.transcript is not None
    shown = RoundDiagnostics(
        **asdict(work.trained()),
        bytes_up=sum(cost.bytes for cost in work.costs) if work.costs else None,
        uplink=Uplink.of(work.costs),
        attempts=attempts if protected else None,
        summed=summed if protected else None,
    )
    return _Gathered(total=total, summed=summed, drawn=_count(work.drawn), shown=shown)


@dataclass(frozen=True, eq=False)
class _Trained:
    """Who took part, in users and in contributions, and the silos' sums of their updates."""

    drawn: Bool[np.ndarray, " users"] | None
    members: Int64[Tensor, " m"]
    sums: Sums

    def diagnosed(self, seat: Seat) -> RoundDiagnostics:
        """Return what a simulation may show of the training."""
        return _diagnose(seat, self.members, self.sums.norms, self.sums.nonfinite)


def _train(turn: Turn, attempt: int = 0) -> _Trained:
    """Draw, and train who was drawn."""
    drawn = turn.draw(attempt)
    members = members_of(turn.seat.cohort.groups, drawn)
    sums = local_sums(turn.seat, turn.model, members, turn.round_number, turn.experiment, turn.progress)
    return _Trained(drawn, members, sums)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Gathered:
    """The sum that the server learned, over how many silos, and what a simulation may show."""

    total: Float64[np.ndarray, " d"]
    summed: int
    drawn: int | None
    shown: RoundDiagnostics


def _encrypt(turn: Turn, aggregation: PartlyEncryptedSum) -> _Gathered:
    """Train, and have the messages of all silos, or of the drawn clients, divided, encrypted in part and added up."""
    seat, trained = turn.seat, _train(turn)
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
    return RoundDiagnostics(**asdict(Trained.of(seat, members, lengths, nonfinite)))
