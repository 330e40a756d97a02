"""One round, as the data sees it: sampler, local training, bound, sum per silo, channel, protection, denoiser, server.

    population -> local -> bound -> sum per silo -> channel -> protection -> denoiser -> server -> model t+1

The privacy event of the round is charged to the ledger by the run, before :func:`play_round` is called.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Float32, Float64, Int64
from torch import Tensor

from fedveil.engine.aggregation import PLAIN_SUM, PlainSum, SecureSum
from fedveil.engine.attempts import IMPATIENT, Patience
from fedveil.engine.clients import ClientTraining, send_updates
from fedveil.engine.partial import PartlyEncryptedSum
from fedveil.engine.uplink import Uplink
from fedveil.engine.weighting import SiloInput, WeightedSum
from fedveil.local.distributed import DistributedTrainer, SplitTrainer
from fedveil.local.steps import LocalSgd
from fedveil.local.trainer import Cohort, Progress, Sums, Trainer
from fedveil.methods.client_messages import ClientMessages
from fedveil.methods.method import Method
from fedveil.methods.stages import (
    CentralGaussian,
    ClientContribution,
    GaussianShares,
    LayeredShares,
    MessageCost,
    SiloUserContribution,
    Transmission,
)
from fedveil.population.records import Groups
from fedveil.privacy.sampling import Everyone
from fedveil.protection.session import Absent
from fedveil.protection.weighting_silo import SEED_BYTES
from fedveil.randomness import ExperimentRandomness, PrivacyRandomness

_CHUNK_ELEMENTS = 1 << 24  # contributions that are trained apart are copied in blocks of 128 MiB
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


@dataclass(frozen=True, kw_only=True, eq=False)
class Seat:
    """A method at work on a population: what stays the same from round to round."""

    method: Method
    trainer: Trainer
    cohort: Cohort
    weights: Float64[Tensor, " m"]
    n_users: int
    shapes: tuple[tuple[int, ...], ...]


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
        trainer=_trainer_of(seat, number),
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


def draw_users(
    method: Method, n_users: int, privacy: PrivacyRandomness, round_number: int, attempt: int = 0
) -> Bool[np.ndarray, " users"] | None:
    """Return which users (or clients) take part in an attempt at a round; None where contributions are whole silos."""
    if not isinstance(method.contribution, SiloUserContribution | ClientContribution):
        return None
    path = ("participants", round_number, *(("attempt", attempt) if attempt else ()))
    return method.sampler.draw(n_users, privacy.stream(*path))


def members_of(groups: Groups, drawn: Bool[np.ndarray, " users"] | None) -> Int64[Tensor, " m"]:
    """Return the indices of the contributions that take part: those of the drawn users, or all."""
    if drawn is None:
        return torch.arange(len(groups))
    return torch.from_numpy(np.flatnonzero(drawn[groups.user]))


def local_sums(
    seat: Seat,
    model: Float32[Tensor, " d"],
    members: Int64[Tensor, " m"],
    round_number: int,
    experiment: ExperimentRandomness,
    progress: Progress | None = None,
) -> Sums:
    """Train the members from the global model; return each silo's bounded, weighted sum of updates.

    Args:
        seat: the method at work on all silos' records, or on those of the silos this process has.
        model: (d,) the global model.
        members: indices into the seat's groups.
        round_number: counts from 1; names the batches.
        experiment: of the experiment's seed.
        progress: called between chunks.
    """
    path = ("round", round_number)
    weights, bound = seat.weights[members], seat.method.local_bound
    trainer = _trainer_of(seat, round_number)
    return trainer.sums(model, seat.cohort, members, weights, bound, experiment, path, progress)


class WeightedTraining:
    """The silos' side of a round under private weighting: every contribution by itself, with weight 1.

    Every silo trains all users it has records of: it is not told who was drawn.

    Args:
        seat: the method at work.
        model: (d,) the global model.
        round_number: counts from 1.
        experiment: of the experiment's seed.
        privacy: for the silos' shares of the noise.
        progress: called between chunks; every silo counts alike.
        attempt: how often this round was begun before.
    """

    def __init__(
        self,
        seat: Seat,
        model: Float32[Tensor, " d"],
        round_number: int,
        experiment: ExperimentRandomness,
        privacy: PrivacyRandomness,
        progress: Progress | None = None,
        attempt: int = 0,
    ) -> None:
        self._attempt = attempt
        self._seat, self._model, self._round = seat, model, round_number
        self._experiment, self._privacy, self._progress = experiment, privacy, progress
        self._trainer = _trainer_of(seat, round_number)
        self.norms = torch.full((len(seat.cohort.groups),), torch.nan, dtype=torch.float64)

    def silos(self) -> Iterator[SiloInput]:
        """Yield each silo's contributions and share of the noise; one silo's are in memory at a time."""
        for silo in range(self._seat.cohort.n_silos):
            yield self.contributions(silo), self.share(silo)

    def share(self, silo: int) -> Float64[np.ndarray, " d"]:
        """Return a silo's share of the noise."""
        return silo_message(
            self._seat.method,
            np.zeros(len(self._model)),
            n_silos=self._seat.cohort.n_silos,
            silo=silo,
            round_number=self._round,
            privacy=self._privacy,
            attempt=self._attempt,
        ).vector

    def dither(self, silo: int) -> bytes:
        """Return the 32-byte key of a silo's share of the remainders modulo C."""
        source = self._privacy.stream("dither", self._round, silo, self._attempt)
        return source.uint64(SEED_BYTES // 8).tobytes()

    def contributions(self, silo: int) -> Float64[np.ndarray, "m d"]:
        """Return the clipped updates of a silo's users, ascending, multiples of the bound's grid."""
        cohort = self._seat.cohort
        members = torch.from_numpy(np.flatnonzero(cohort.groups.silo == silo))
        rows = np.empty((len(members), len(self._model)))
        size = max(1, _CHUNK_ELEMENTS // len(self._model))
        for first in range(0, len(members), size):
            chunk = members[first : first + size]
            sums = self._trainer.sums(
                self._model,
                cohort.apart(chunk),
                chunk,
                torch.ones(len(chunk), dtype=torch.float64),
                self._seat.method.bound,
                self._experiment,
                ("round", self._round),
            )
            rows[first : first + size] = sums.total.cpu().numpy()
            self.norms[chunk] = sums.norms.cpu()
            if self._progress is not None:
                done = round(1000 * (silo + (first + len(chunk)) / len(members)))
                self._progress(done, 1000 * cohort.n_silos)
        return rows


@dataclass(frozen=True, kw_only=True, eq=False)
class SiloMessage:
    """What a silo sends in a round.

    Attributes:
        vector: (d,) its sum after the channel, as the server decodes it.
        sent: what it cost, where the channel makes bytes of it.
    """

    vector: Float64[np.ndarray, " d"]
    sent: Transmission | None = None


def silo_message(
    method: Method,
    total: Float64[np.ndarray, " d"],
    *,
    n_silos: int,
    silo: int,
    round_number: int,
    privacy: PrivacyRandomness,
    attempt: int = 0,
) -> SiloMessage:
    """Pass one silo's sum through the method's channel.

    Args:
        method: the composition.
        total: (d,) the silo's bounded, weighted sum.
        n_silos: |S|.
        silo: the silo's number.
        round_number: counts from 1.
        privacy: the silo's own randomness, for its share of the noise.
        attempt: how often this round was begun before; every attempt has noise of its own.
    """
    if isinstance(method.channel, GaussianShares):
        source = privacy.stream("noise", round_number, silo, *(("attempt", attempt) if attempt else ()))
        return SiloMessage(vector=method.channel.transmit(total, method.bound.grid, n_silos, source))
    if isinstance(method.channel, LayeredShares):
        source = privacy.stream("channel", round_number, silo)
        sent = method.channel.transmit(
            total, n_silos=n_silos, silo=silo, round_number=round_number, source=source
        )
        return SiloMessage(vector=sent.received, sent=sent)
    return SiloMessage(vector=total)


def client_message(
    seat: Seat,
    model: Float32[Tensor, " d"],
    *,
    client: int,
    round_number: int,
    experiment: ExperimentRandomness,
    privacy: PrivacyRandomness,
) -> SiloMessage:
    """Train one client, and pass its bounded update through its channel; zeros if it has no records.

    Args:
        seat: a method whose clients send messages of their own.
        model: (d,) the global model.
        client: its number.
        round_number: counts from 1.
        experiment: of the experiment's seed.
        privacy: the client's own randomness.
    """
    channel = seat.method.channel
    assert isinstance(channel, ClientMessages)
    training = ClientTraining(
        trainer=_trainer_of(seat, round_number),
        cohort=seat.cohort,
        bound=seat.method.bound,
        model=model,
        round_number=round_number,
        experiment=experiment,
    )
    member = torch.from_numpy(np.flatnonzero(seat.cohort.groups.user == client))
    update = training.updates(member)[0][0] if len(member) else np.zeros(len(model))
    source = privacy.stream("channel", round_number, client)
    sent = channel.transmit(
        update, grid=seat.method.bound.grid, client=client, round_number=round_number, source=source
    )
    return SiloMessage(vector=sent.received, sent=sent)


def coordinate(
    method: Method,
    model: Float32[Tensor, " d"],
    aggregate: Float64[np.ndarray, " d"],
    *,
    n_silos: int,
    n_users: int,
    drawn: int | None,
    shapes: tuple[tuple[int, ...], ...],
    round_number: int,
    privacy: PrivacyRandomness,
    summed: int | None = None,
) -> Float32[Tensor, " d"]:
    """Do the coordinator's part of a round: its noise, the mean, the denoiser and the server's step.

    Args:
        method: the composition.
        model: (d,) the global model.
        aggregate: (d,) the sum of all silos' messages.
        n_silos: |S|.
        n_users: |U|.
        drawn: how many users or clients were drawn; only a method with the "actual" denominator reads it.
        shapes: the model's tensors, for denoisers that smooth each by itself.
        round_number: counts from 1.
        privacy: the server's own randomness, for the noise of a trusted server.
        summed: how many silos the sum is over, if some are missing; the mean is over those that are there.
    """
    present = n_silos if summed is None else summed
    if isinstance(method.channel, CentralGaussian):
        source = privacy.stream("noise", round_number)
        aggregate = method.channel.release(aggregate, method.bound.grid, source)
    divisor = method.divisor(present, n_users)
    if method.denominator == "actual":
        assert drawn is not None
        divisor = float(max(1, drawn))
    noise_std = (method.noise_std(n_silos, present) or 0.0) / divisor
    mean = method.denoiser.estimate(torch.from_numpy(aggregate / divisor), noise_std, shapes)
    return method.server.step(model, mean)


def _trainer_of(seat: Seat, round_number: int) -> Trainer:
    """Return the trainer with this round's learning rate."""
    trainer = seat.trainer
    if isinstance(trainer, DistributedTrainer):
        return replace(trainer, inner=_at_round(trainer.inner, round_number))
    return _at_round(trainer, round_number) if isinstance(trainer, SplitTrainer) else trainer


def _at_round(trainer: SplitTrainer, round_number: int) -> SplitTrainer:
    if not isinstance(trainer.local, LocalSgd) or trainer.local.decay == 1:
        return trainer
    return replace(trainer, local=trainer.local.at_round(round_number))


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
