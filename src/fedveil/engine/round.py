"""One round, as the data sees it: sampler, local training, bound, sum per silo, channel, protection, denoiser, server.

    population -> local -> bound -> sum per silo -> channel -> protection -> denoiser -> server -> model t+1

The privacy event of the round is charged to the ledger by the run, before :func:`play_round` is called.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float32, Float64
from torch import Tensor

from fedveil.engine.aggregation import SecureSum
from fedveil.local.distributed import DistributedTrainer, SplitTrainer
from fedveil.local.steps import LocalSgd
from fedveil.local.trainer import Cohort, Progress, Sums, Trainer
from fedveil.methods.method import Method
from fedveil.methods.stages import (
    CentralGaussian,
    ClientContribution,
    GaussianShares,
    LayeredShares,
    SiloUserContribution,
    Transmission,
)
from fedveil.randomness import ExperimentRandomness, PrivacyRandomness

_QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)


@dataclass(frozen=True, kw_only=True)
class Uplink:
    """What the messages of all silos cost in a round, where a channel makes bytes of them.

    Attributes:
        bytes: length of all messages, headers and tags included.
        float32_bytes: length of the same sums in float32.
        bits_per_parameter: bits of the messages over parameters sent.
        limit: information limit of the same sums, bits a parameter, mean over silos.
        ratio: bits_per_parameter over limit; None where the limit is 0.
    """

    bytes: int
    float32_bytes: int
    bits_per_parameter: float
    limit: float
    ratio: float | None

    @classmethod
    def of(cls, sent: list[Transmission]) -> Uplink:
        """Add up the messages of a round, at least one."""
        parameters = sum(len(one.received) for one in sent)
        length = sum(one.message_bytes for one in sent)
        limit = float(np.mean([one.limit for one in sent]))
        bits = 8 * length / parameters
        return cls(
            bytes=length,
            float32_bytes=4 * parameters,
            bits_per_parameter=bits,
            limit=limit,
            ratio=bits / limit if limit > 0 else None,
        )


@dataclass(frozen=True, kw_only=True)
class RoundDiagnostics:
    """What a simulation may show of a round; computed from private data and covered by no guarantee.

    Attributes:
        participants: users who took part (silos where a contribution is a silo).
        contributions: contributions that were trained.
        nonfinite: contributions whose update was not finite and counted as zero.
        norms: quantiles 0, .1, .25, .5, .75, .9, 1 of the finite updates' l2 norms before clipping.
        clipped: the fraction of finite updates that the bound shortened.
        uplink: what the silos' messages cost; None where no channel makes bytes of them.
    """

    participants: int
    contributions: int
    nonfinite: int
    norms: tuple[float, ...] | None
    clipped: float | None
    uplink: Uplink | None = None


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
    secure_sum: SecureSum | None = None,
) -> tuple[Float32[Tensor, " d"], RoundDiagnostics]:
    """Play one round from the global model; return the next one and what a simulation may show of the round.

    With ``secure_sum`` the silos' messages are added up by the byte protocol, to the same sum.
    """
    method, cohort = seat.method, seat.cohort
    drawn, taking_part = _taking_part(seat, privacy, round_number)
    members = torch.from_numpy(np.flatnonzero(taking_part))
    sums = _trainer_of(seat, round_number).sums(
        model,
        cohort,
        members,
        seat.weights[members],
        method.bound,
        experiment,
        ("round", round_number),
        progress,
    )
    aggregate = np.zeros(len(model))
    messages: list[np.ndarray] = []
    sent: list[Transmission] = []
    for silo in range(cohort.n_silos):
        total = sums.total[silo].cpu().numpy()
        if isinstance(method.channel, GaussianShares):
            source = privacy.stream("noise", round_number, silo)
            total = method.channel.transmit(total, method.bound.grid, cohort.n_silos, source)
        if isinstance(method.channel, LayeredShares):
            source = privacy.stream("channel", round_number, silo)
            sent.append(
                method.channel.transmit(
                    total, n_silos=cohort.n_silos, silo=silo, round_number=round_number, source=source
                )
            )
            total = sent[-1].received
        if secure_sum is None:
            aggregate += total
        else:
            messages.append(total)
    if secure_sum is not None:
        aggregate = secure_sum.total(round_number, messages)
    if isinstance(method.channel, CentralGaussian):
        source = privacy.stream("noise", round_number)
        aggregate = method.channel.release(aggregate, method.bound.grid, source)
    divisor = method.divisor(cohort.n_silos, seat.n_users)
    if method.denominator == "actual":
        divisor = float(max(1, drawn))
    noise_std = (method.noise_std(cohort.n_silos) or 0.0) / divisor
    mean = method.denoiser.estimate(torch.from_numpy(aggregate / divisor), noise_std, seat.shapes)
    diagnostics = replace(_diagnose(seat, taking_part, sums), uplink=Uplink.of(sent) if sent else None)
    return method.server.step(model, mean), diagnostics


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


def _taking_part(seat: Seat, privacy: PrivacyRandomness, round_number: int) -> tuple[int, np.ndarray]:
    """Return how many were drawn, and which contributions take part: those of the drawn users."""
    groups = seat.cohort.groups
    if not isinstance(seat.method.contribution, SiloUserContribution | ClientContribution):
        return len(groups), np.ones(len(groups), dtype=bool)
    drawn = seat.method.sampler.draw(seat.n_users, privacy.stream("participants", round_number))
    return int(drawn.sum()), np.asarray(drawn[groups.user])


def _diagnose(seat: Seat, taking_part: np.ndarray, sums: Sums) -> RoundDiagnostics:
    users = seat.cohort.groups.user[taking_part]
    norms = sums.norms[torch.isfinite(sums.norms)].cpu()
    clipped = seat.method.bound.clipped(norms)
    return RoundDiagnostics(
        participants=len(np.unique(users)) if (users >= 0).all() else len(users),
        contributions=len(users),
        nonfinite=sums.nonfinite,
        norms=tuple(np.quantile(norms.numpy(), _QUANTILES).tolist()) if len(norms) else None,
        clipped=float(clipped.double().mean()) if len(norms) else None,
    )
