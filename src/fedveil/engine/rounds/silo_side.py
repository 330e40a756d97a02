"""A silo's part of a round before its channel: train the users it holds, and bound what each contributes.

The same functions serve a simulation, which plays all silos, and a silo of a federation.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from fedveil.engine.rounds.setting import Setting
from fedveil.engine.rounds.turn import Turn
from fedveil.privacy.schedule import due
from fedveil.protection.weighting.silo import SEED_BYTES

_CHUNK_ELEMENTS = 1 << 24  # contributions that are trained apart are copied in blocks of 128 MiB


def members_of(
    setting: Setting, drawn: Bool[np.ndarray, " users"] | None, number: int
) -> Int64[Tensor, " m"]:
    """Return the indices of the contributions that take part: those of weight of the drawn users, or of all.

    Where users take part by a schedule, those whose turn it is in the round of this number.
    """
    groups, period = setting.cohort.groups, setting.method.sampler.period
    takes_part = setting.weights.numpy() > 0
    if drawn is not None:
        takes_part &= drawn[groups.user]
    if period > 1:
        takes_part &= due(groups.user if groups.key is None else groups.key, groups.silo, period, number)
    return torch.from_numpy(np.flatnonzero(takes_part))


def trained_sums(turn: Turn) -> Float64[Tensor, "silos length"]:
    """Return what every silo's sum was in a round that drew nobody."""
    members = members_of(turn.setting, None, turn.round_number)
    job = turn.job(members, turn.setting.method.local_bound, turn.setting.weights[members])
    return turn.trainer.sums(job, turn.progress).marked(job).total


class WeightedTraining:
    """The silos' side of a round under private weighting: every contribution by itself, with weight 1.

    Every silo trains all users it has records of: it is not told who was drawn.

    Args:
        turn: what the round begins with; every silo counts alike in its progress.
        attempt: how often this round was begun before.
    """

    def __init__(self, turn: Turn, attempt: int = 0) -> None:
        self._turn, self._attempt = turn, attempt
        self._trainer = turn.trainer
        self.norms = torch.full((len(turn.setting.cohort.groups),), torch.nan, dtype=torch.float64)

    def share(self, silo: int) -> Float64[np.ndarray, " d"]:
        """Return a silo's share of the noise."""
        nothing = np.zeros(self._turn.length)
        return self._turn.setting.method.channel.send(nothing, self._turn.sender(silo, self._attempt)).numbers

    def dither(self, silo: int) -> bytes:
        """Return the 32-byte key of a silo's share of the remainders modulo C."""
        source = self._turn.privacy.stream("dither", self._turn.round_number, silo, self._attempt)
        return source.uint64(SEED_BYTES // 8).tobytes()

    def contributions(self, silo: int) -> Float64[np.ndarray, "m d"]:
        """Return the clipped updates of a silo's users, ascending, multiples of the bound's grid."""
        turn, cohort = self._turn, self._turn.setting.cohort
        members = torch.from_numpy(np.flatnonzero(cohort.groups.silo == silo))
        rows = np.empty((len(members), turn.length))
        size = max(1, _CHUNK_ELEMENTS // turn.length)
        for first in range(0, len(members), size):
            chunk = members[first : first + size]
            job = turn.job(chunk, turn.setting.method.bound).apart()
            sums = self._trainer.sums(job).marked(job)
            rows[first : first + size] = sums.total.cpu().numpy()
            self.norms[chunk] = sums.norms.cpu()
            if turn.progress is not None:
                done = round(1000 * (silo + (first + len(chunk)) / len(members)))
                turn.progress(done, 1000 * cohort.n_silos)
        return rows
