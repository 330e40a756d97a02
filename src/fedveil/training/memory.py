"""How many records and models are computed at once: by public facts alone, a record's shape and a model's layers."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.func import functional_call

from fedveil.training.task import Task
from fedveil.training.trainer import Cohort

LARGEST_BATCH: Final = 4 << 30
"""Bytes that a batch which is trained by itself may take where nobody says: graphics cards have 8 GiB and more."""


def records_at_once(task: Task, cohort: Cohort, memory: int) -> int:
    """Return how many records of one batch fit into this many bytes while its gradient is computed, at least 1."""
    return max(1, memory // (4 * floats_per_record(task, cohort)))


def rows_in_memory(task: Task, cohort: Cohort, memory: int) -> int:
    """Return how many contributions of one record each fit into this many bytes, at least 1."""
    return max(1, memory // (4 * (4 * task.dimension + floats_per_record(task, cohort))))


def floats_per_record(task: Task, cohort: Cohort) -> int:
    """Return about how many numbers one record of a batch takes while its gradient is computed.

    Counts its features and, twice, the outputs of the layers: once for the forward pass, once for the backward.
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
