"""The sums of a silo's last rounds, which it sends parts of again where noise is correlated over rounds.

They are private and carry no noise: they are in memory alone, and in no file. A process that does not have them, since
a run was resumed, trains them again from the models that these rounds began with, which are released and stand in the
checkpoint; local training is a function of the model, the records and the experiment's seed, so they are the same bits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float32, Float64
from torch import Tensor

if TYPE_CHECKING:
    from fedveil.run.rounds.round_context import RoundContext


class SumHistory:
    """Every silo's sums of the last rounds of one run, by the round's number."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Float32[Tensor, " d"], Float64[Tensor, "silos length"]]] = {}

    def __len__(self) -> int:
        """Return of how many rounds the sums are known."""
        return len(self._kept)

    def keep(self, turn: RoundContext, sums: Float64[Tensor, "silos length"]) -> None:
        """Keep a round's sums with the model that it began with, and forget those that no round needs any more."""
        memory, number = turn.setting.method.channel.memory, turn.round_number
        self._kept = {one: kept for one, kept in self._kept.items() if number - memory < one < number}
        if memory:
            self._kept[number] = turn.model, sums

    def earlier_sums(self, turn: RoundContext) -> list[Float64[Tensor, "silos length"]]:
        """Return the sums of the rounds before a turn that its messages have parts of, newest first.

        Those that are not known are trained again; rounds that follow a schedule draw nobody.
        """
        method, stream = turn.setting.method, turn.setting.method.stream_of(turn.state)
        found = []
        for back in range(1, min(method.channel.memory, turn.round_number - 1) + 1):
            number, model = turn.round_number - back, stream["models"][back - 1]
            kept = self._kept.get(number)
            if kept is None or not torch.equal(kept[0].cpu(), model):
                played = method.clipped_to(float(stream["units"][back - 1]))
                setting, start = replace(turn.setting, method=played), model.to(turn.model.device)
                again = replace(turn, setting=setting, model=start, state={}, round_number=number)
                job = again.sum_job(None)
                kept = model, again.trainer.sums(job, again.progress).with_clip_marks(job).total
            found.append(kept[1])
        return found
