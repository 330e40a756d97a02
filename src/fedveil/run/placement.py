"""Where local training computes: on the device that is asked for, or on the one that ``auto`` finds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

import torch

from fedveil.errors import ConfigError, ModelError
from fedveil.run.config.experiment import Device
from fedveil.training.dpsgd import DpSgdTrainer
from fedveil.training.trainer import Cohort, PartitionedTrainer
from fedveil.training.trainer_choice import is_batch_independent

AnyTrainer: TypeAlias = PartitionedTrainer | DpSgdTrainer
Machines: TypeAlias = Literal["this", "several"]


def place_on_device(
    wanted: Device, cohort_on: Callable[[torch.device], Cohort], trainer_of: Callable[[Cohort], AnyTrainer]
) -> tuple[Cohort, AnyTrainer]:
    """Return the records on the device that computes, and their trainer.

    ``auto`` is a CUDA device where there is one, but for a model whose contributions the CPU trains side by side and
    the CUDA device does not, because its kernels round one contribution by others: one after the other, a small model
    is trained many times slower there. Models that are trained one by one everywhere go to the device.

    Args:
        wanted: what the experiment says.
        cohort_on: puts the records on a device.
        trainer_of: chooses the trainer of these records, by public facts alone.

    Raises:
        ConfigError: a CUDA device is asked for, and there is none.
        ModelError: no trainer of this name trains the model on the device.
    """
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise ConfigError("trainer.device = cuda: no CUDA device is available here; use auto or cpu")
    devices = ["cuda", "cpu"] if wanted == "auto" and available else [wanted.replace("auto", "cpu")]
    found: list[tuple[Cohort, AnyTrainer]] = []
    for device in devices:
        cohort = cohort_on(torch.device(device))
        try:
            trainer = trainer_of(cohort)
        except ModelError:
            if device != devices[-1] or found:
                continue
            raise
        if trainer.side_by_side:
            return cohort, trainer
        found.append((cohort, trainer))
    return found[0]


def batching_caveats(
    name: str, machines: Machines, trainer: AnyTrainer, device: torch.device
) -> tuple[str, ...]:
    """Name what batching leaves open: that others beside a contribution do not round it was not tried everywhere.

    Several parties sign one text, so it says nothing of a machine that another need not be like.

    Args:
        name: of the trainer, as it is asked for.
        machines: where it trains.
        trainer: the one that was chosen here.
        device: where it computes.
    """
    if machines == "several":
        if is_batch_independent(name):
            return ()
        who, where = "a silo's ", "on a CUDA device or by compiled kernels, where it has them"
    elif not trainer.side_by_side or (device.type == "cpu" and not trainer.has_generated_kernels):
        return ()
    else:
        who, where = "", "by compiled kernels" if trainer.has_generated_kernels else "on a CUDA device"
    return (
        f"rounding in {who}training in batches {where}: the last digits of one contribution may depend on the "
        "contributions computed in the same batch, and training can amplify such a difference to any size; no bound "
        "covers it (trainer.name = 'loop' computes each contribution by itself)",
    )
