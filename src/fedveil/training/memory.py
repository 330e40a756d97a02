"""Limit how many records and models are computed at once, from public facts alone.

The facts are the shape of a record and the layers of the model. Limits that depend on private records would change
the rounding of other users' updates.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.func import functional_call

from fedveil.training.task import Task
from fedveil.training.trainer import Cohort

LARGEST_BATCH: Final = 4 << 30
"""Default of the bytes that a separately trained batch may take; graphics cards have 8 GiB and more."""


def records_at_once(task: Task, cohort: Cohort, memory: int) -> int:
    """Return the number of records of one batch whose gradient fits into ``memory`` bytes, at least 1."""
    return max(1, memory // (4 * floats_per_record(task, cohort)))


def rows_in_memory(task: Task, cohort: Cohort, memory: int) -> int:
    """Return the number of one-record contributions, at least 1, that fit into ``memory`` bytes."""
    # 4 bytes per number; parameters, gradients and a temporary for each are 4 numbers per parameter.
    return max(1, memory // (4 * (4 * task.dimension + floats_per_record(task, cohort))))


def floats_per_record(task: Task, cohort: Cohort) -> int:
    """Return an estimate of the float32 numbers that one record takes while its gradient is computed.

    It counts the record's features and, twice, the outputs of the layers: once for the forward pass, once for the
    backward pass.
    """
    counted = 0

    def count(module: torch.nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        nonlocal counted
        several = output if isinstance(output, tuple) else (output,)
        counted += sum(one.numel() for one in several if isinstance(one, Tensor))

    hooks = [
        layer.register_forward_hook(count) for layer in task.model.modules() if not any(layer.children())
    ]
    own = task.initial().device
    made_up = torch.zeros(1, *cohort.features.shape[1:], device=own)
    try:
        with torch.no_grad():
            functional_call(task.model, task.constants(own), (made_up,))
    finally:
        for hook in hooks:
            hook.remove()
    return int(made_up.numel() + 2 * counted)
