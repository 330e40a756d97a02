"""Keep a silo's sums of its last rounds, for channels that correlate noise over rounds.

A message of such a channel contains parts of the sums of earlier rounds. These sums are private and carry no noise,
so they stay in memory and are never written to a file. After a resume, the process trains them again from the
models with which those rounds began, which are released and stored in the checkpoint. Local training is a function
of the model, the records and the experiment's seed, so the sums have the same bits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float32, Float64
from torch import Tensor

from fedveil.methods.capabilities import memory_of
from fedveil.methods.server_state import reader_state, with_clip

if TYPE_CHECKING:
    from fedveil.run.rounds.round_context import RoundContext


class SumHistory:
    """All silos' sums of the last rounds of one run, by round number."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Float32[Tensor, " d"], Float64[Tensor, "silos length"]]] = {}

    def __len__(self) -> int:
        """Return the number of rounds whose sums are known."""
        return len(self._kept)

    def keep(self, turn: RoundContext, sums: Float64[Tensor, "silos length"]) -> None:
        """Store a round's sums with its starting model, and drop the sums that no later round needs."""
        memory, number = memory_of(turn.setting.method.channel), turn.round_number
        self._kept = {one: kept for one, kept in self._kept.items() if number - memory < one < number}
        if memory:
            self._kept[number] = turn.model, sums

    def earlier_sums(self, turn: RoundContext) -> list[Float64[Tensor, "silos length"]]:
        """Return the sums of earlier rounds that this round's messages contain, newest first.

        Unknown sums are trained again. Rounds that follow a schedule sample no users, so the participants are the
        same.
        """
        method, stream = turn.setting.method, reader_state(turn.state)
        found = []
        for back in range(1, min(memory_of(method.channel), turn.round_number - 1) + 1):
            number, model = turn.round_number - back, stream["models"][back - 1]
            kept = self._kept.get(number)
            # A stored sum is reused only if its round began with this very model.
            if kept is None or not torch.equal(kept[0].cpu(), model):
                played = with_clip(method, float(stream["units"][back - 1]))
                setting, start = replace(turn.setting, method=played), model.to(turn.model.device)
                again = replace(turn, setting=setting, model=start, state={}, round_number=number)
                job = again.sum_job(None)
                kept = model, again.trainer.sums(job, again.progress).with_clip_marks(job).total
            found.append(kept[1])
        return found
