"""Choose the device of local training: the requested one, or the faster one under ``auto``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

import torch

from fedveil.errors import ConfigError, ModelError
from fedveil.run.config.experiment import Device
from fedveil.training.dpsgd import DpSgdTrainer
from fedveil.training.record_sums import RecordSumsTrainer
from fedveil.training.trainer import Cohort, PartitionedTrainer
from fedveil.training.trainer_choice import is_batch_independent

AnyTrainer: TypeAlias = PartitionedTrainer | DpSgdTrainer | RecordSumsTrainer
Machines: TypeAlias = Literal["this", "several"]


def place_on_device(
    wanted: Device,
    cohort_on: Callable[[torch.device], Cohort],
    trainer_of: Callable[[Cohort], AnyTrainer],
    has_cuda: bool | None = None,
) -> tuple[Cohort, AnyTrainer]:
    """Return the records on the chosen device, and their trainer.

    ``auto`` takes a CUDA device if one is available, with one exception. For some models the CPU trains
    contributions in one batch and the CUDA device cannot, because its kernels round one contribution by the others.
    Trained one by one, a small model is many times slower on CUDA, so the CPU is used. Models that train one by one
    on both devices use CUDA.

    Args:
        wanted: the experiment's ``trainer.device``.
        cohort_on: puts the records on a device.
        trainer_of: chooses the trainer of these records, from public facts only.
        has_cuda: whether this machine has a CUDA device; None: ask PyTorch.

    Raises:
        ConfigError: a CUDA device is requested and none is available.
        ModelError: no trainer of the requested name can train the model on any candidate device.
    """
    available = torch.cuda.is_available() if has_cuda is None else has_cuda
    if wanted == "cuda" and not available:
        raise ConfigError("trainer.device = cuda: no CUDA device is available here; use auto or cpu")
    devices = ["cuda", "cpu"] if wanted == "auto" and available else [wanted.replace("auto", "cpu")]
    found: list[tuple[Cohort, AnyTrainer]] = []
    for device in devices:
        cohort = cohort_on(torch.device(device))
        try:
            trainer = trainer_of(cohort)
        except ModelError:
            # Another device may still work, or already did; raise only if no device is left.
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
    """Return sentences about rounding in batches, for the statement's list of uncovered conditions.

    The batch-independence of a contribution is not tested on every device and kernel. Several parties sign one
    text, so with several machines the sentence depends on no single machine.

    Args:
        name: requested name of the trainer.
        machines: where the run trains.
        trainer: the trainer that was chosen here.
        device: the device of the trainer.
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
