"""A method at work on a population: what stays the same from round to round."""

from __future__ import annotations

from dataclasses import dataclass, replace

from jaxtyping import Float64
from torch import Tensor

from fedveil.local.distributed import DistributedTrainer, SplitTrainer
from fedveil.local.steps import LocalSgd
from fedveil.local.trainer import Cohort, Trainer
from fedveil.methods.method import Method


@dataclass(frozen=True, kw_only=True, eq=False)
class Setting:
    """A method at work on a population: what stays the same from round to round."""

    method: Method
    trainer: Trainer
    cohort: Cohort
    weights: Float64[Tensor, " m"]
    n_users: int
    shapes: tuple[tuple[int, ...], ...]


def trainer_of(setting: Setting, round_number: int) -> Trainer:
    """Return the trainer with this round's learning rate."""
    trainer = setting.trainer
    if isinstance(trainer, DistributedTrainer):
        return replace(trainer, inner=_at_round(trainer.inner, round_number))
    return _at_round(trainer, round_number) if isinstance(trainer, SplitTrainer) else trainer


def _at_round(trainer: SplitTrainer, round_number: int) -> SplitTrainer:
    if not isinstance(trainer.local, LocalSgd) or trainer.local.decay == 1:
        return trainer
    return replace(trainer, local=trainer.local.at_round(round_number))
