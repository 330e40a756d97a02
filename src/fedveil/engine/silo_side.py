"""A silo's part of a round: train the users it holds, bound and add up, and send the sum through the channel.

The same functions serve a simulation, which plays all silos, and a silo of a federation.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float32, Float64, Int64
from torch import Tensor

from fedveil.engine.clients import ClientTraining
from fedveil.engine.setting import Setting, trainer_of
from fedveil.local.trainer import Progress, Sums
from fedveil.methods.client_messages import ClientMessages
from fedveil.methods.layered_shares import LayeredShares
from fedveil.methods.method import Method
from fedveil.methods.sending import Sender, Transmission
from fedveil.population.records import Groups
from fedveil.protection.weighting_silo import SEED_BYTES
from fedveil.randomness import ExperimentRandomness, PrivacyRandomness

_CHUNK_ELEMENTS = 1 << 24  # contributions that are trained apart are copied in blocks of 128 MiB


def members_of(groups: Groups, drawn: Bool[np.ndarray, " users"] | None) -> Int64[Tensor, " m"]:
    """Return the indices of the contributions that take part: those of the drawn users, or all."""
    if drawn is None:
        return torch.arange(len(groups))
    return torch.from_numpy(np.flatnonzero(drawn[groups.user]))


def local_sums(
    setting: Setting,
    model: Float32[Tensor, " d"],
    members: Int64[Tensor, " m"],
    round_number: int,
    experiment: ExperimentRandomness,
    progress: Progress | None = None,
) -> Sums:
    """Train the members from the global model; return each silo's bounded, weighted sum of updates.

    Args:
        setting: the method at work on all silos' records, or on those of the silos this process has.
        model: (d,) the global model.
        members: indices into the seat's groups.
        round_number: counts from 1; names the batches.
        experiment: of the experiment's seed.
        progress: called between chunks.
    """
    path = ("round", round_number)
    weights, bound = setting.weights[members], setting.method.local_bound
    trainer = trainer_of(setting, round_number)
    return trainer.sums(model, setting.cohort, members, weights, bound, experiment, path, progress)


class WeightedTraining:
    """The silos' side of a round under private weighting: every contribution by itself, with weight 1.

    Every silo trains all users it has records of: it is not told who was drawn.

    Args:
        setting: the method at work.
        model: (d,) the global model.
        round_number: counts from 1.
        experiment: of the experiment's seed.
        privacy: for the silos' shares of the noise.
        progress: called between chunks; every silo counts alike.
        attempt: how often this round was begun before.
    """

    def __init__(
        self,
        setting: Setting,
        model: Float32[Tensor, " d"],
        round_number: int,
        experiment: ExperimentRandomness,
        privacy: PrivacyRandomness,
        progress: Progress | None = None,
        attempt: int = 0,
    ) -> None:
        self._attempt = attempt
        self._seat, self._model, self._round = setting, model, round_number
        self._experiment, self._privacy, self._progress = experiment, privacy, progress
        self._trainer = trainer_of(setting, round_number)
        self.norms = torch.full((len(setting.cohort.groups),), torch.nan, dtype=torch.float64)

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

    Raises:
        CompositionError: a channel that neither makes a message nor says that sums travel as they are.
    """
    if isinstance(method.channel, LayeredShares):
        source = privacy.stream("channel", round_number, silo)
        sent = method.channel.transmit(
            total, n_silos=n_silos, silo=silo, round_number=round_number, source=source
        )
        return SiloMessage(vector=sent.received, sent=sent)
    at = Sender(
        number=silo,
        senders=n_silos,
        round=round_number,
        attempt=attempt,
        grid=method.bound.grid,
        privacy=privacy,
    )
    return SiloMessage(vector=method.channel.send(total, at).numbers)


def client_message(
    setting: Setting,
    model: Float32[Tensor, " d"],
    *,
    client: int,
    round_number: int,
    experiment: ExperimentRandomness,
    privacy: PrivacyRandomness,
) -> SiloMessage:
    """Train one client, and pass its bounded update through its channel; zeros if it has no records.

    Args:
        setting: a method whose clients send messages of their own.
        model: (d,) the global model.
        client: its number.
        round_number: counts from 1.
        experiment: of the experiment's seed.
        privacy: the client's own randomness.
    """
    channel = setting.method.channel
    assert isinstance(channel, ClientMessages)
    training = ClientTraining(
        trainer=trainer_of(setting, round_number),
        cohort=setting.cohort,
        bound=setting.method.bound,
        model=model,
        round_number=round_number,
        experiment=experiment,
    )
    member = torch.from_numpy(np.flatnonzero(setting.cohort.groups.user == client))
    update = training.updates(member)[0][0] if len(member) else np.zeros(len(model))
    source = privacy.stream("channel", round_number, client)
    sent = channel.transmit(
        update, grid=setting.method.bound.grid, client=client, round_number=round_number, source=source
    )
    return SiloMessage(vector=sent.received, sent=sent)
