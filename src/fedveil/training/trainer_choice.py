"""Choose the trainer of a model: the fastest that can train it, from public facts alone.

The choice depends on the declared model, loss, local steps, bound and number of users, on the shape of a record, and
on trials of this machine's kernels with made-up records. It never depends on the number of records, of contributions,
or of users with records. A choice that did would change the training of all users when one user joins or leaves.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

import torch
from torch import nn

from fedveil.arguments import stacklevel_of_caller
from fedveil.errors import ConfigError, ModelError
from fedveil.privacy.bounds import Bound
from fedveil.training.batch_independence import (
    is_gradient_batch_independent,
    is_training_batch_independent,
    trial_memory,
)
from fedveil.training.dpsgd import RECORD_MEMORY, record_slots
from fedveil.training.gram.layout import linear_layer
from fedveil.training.gram.products import MOST_WEIGHT
from fedveil.training.gram.steps import supports_gram
from fedveil.training.gram.trainer import GramTrainer
from fedveil.training.local_algorithms import check_rows
from fedveil.training.loop import LoopTrainer
from fedveil.training.steps import LocalStep, as_sgd, check_computed
from fedveil.training.task import Task
from fedveil.training.trainer import Cohort, PartitionedTrainer
from fedveil.training.validate_gradient import batches_like_loop, try_compiled, validate_gradient
from fedveil.training.vectorized import VmapTrainer

# --- matrix products of a CPU -------------------------------------------------------------------------------
# Check whether Intel's oneMKL is in its reproducible mode.
#
# PyTorch on x86 computes its matrix products with oneMKL.
#
# Outside this mode, the last bits of a product may depend on the memory addresses of its arrays, and so on the slot of
# a contribution in a batch. ``import fedveil`` requests the mode (``MKL_CBWR``), but the library reads the variable
# only at the first product of a process. This module asks the library for its mode.


HOW_TO_ASK: Final = (
    "Intel's oneMKL is not in its reproducible mode, in which where an array lies in memory rounds no product: a "
    "matrix product was computed before `import fedveil`, or MKL_CBWR is set to OFF; import fedveil first, or start "
    "Python with MKL_CBWR=AUTO"
)
_GETTERS: Final = ("mkl_serv_cbwr_get", "MKL_CBWR_Get")
"""Getter of the library inside PyTorch's own wheels, and of a separately installed one."""
_BRANCH, _OFF = 1, 1
"""``MKL_CBWR_BRANCH``: asks for the selected code path; ``MKL_CBWR_BRANCH_OFF``: no reproducible path."""


def rounds_by_place() -> bool:
    """Return whether oneMKL reports that its reproducible mode is off.

    The answer is False if PyTorch uses another library.

    A library without the getter gives False, too: the trials of :mod:`fedveil.training.batch_independence` alone
    judge it.
    """
    if not torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
        return False
    folder = Path(torch.__file__).parent / "lib"
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib", "torch_cpu.dll"):
        try:
            library = ctypes.CDLL(str(folder / name))
        except OSError:
            continue
        for getter in _GETTERS:
            if hasattr(library, getter):
                return int(getattr(library, getter)(_BRANCH)) == _OFF
    return False


# --- choice -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TrainerOptions:
    """Options of the execution of local training.

    Args:
        name: the trainer; all trainers give the same sums.
        memory: bytes that a chunk may take; None selects the fastest size.
        compile: compile the gradients of the vmap trainer.
        tried: try this machine's kernels for batch independence; False in a process that never trains.
    """

    name: str = "auto"
    memory: int | None = None
    compile: bool = False
    tried: bool = True


def choose_trainer(
    task: Task,
    local: LocalStep,
    options: TrainerOptions | None = None,
    *,
    cohort: Cohort | None = None,
    bound: Bound | None = None,
    users: int | None = None,
) -> PartitionedTrainer:
    """Return the requested trainer; ``auto`` selects gram for linear models, else vmap, else the loop.

    Args:
        task: model and loss.
        local: the local steps of each contribution.
        options: the trainer and its options; None means ``auto``.
        cohort: gives the shape of a record, so that the model can be tried on made-up records. The trials find
            every model that vmap cannot batch, and kernels that round one contribution depending on others. Without a
            cohort, only the recurrent layers of PyTorch are known not to batch.
        bound: an l1 bound excludes gram from ``auto``. If it bounds, vmap and gram must be batch-independent.
        users: |U|, which bounds the weights of a silo. The rounding of gram is proved for up to 838,860 users.

    Raises:
        ConfigError: an unknown name, or local steps of a class that trainers do not know.
        ModelError: a model whose gradients cannot be bounded
            (:func:`fedveil.training.validate_gradient.validate_gradient`); ``gram`` for a model that is not linear,
            for projected steps with momentum, under an l1 bound, in bfloat16, or for more users than its bound is
            proved for; ``vmap`` for a model that it cannot batch; ``vmap`` or ``gram`` under a bound, on a machine
            whose kernels let a contribution depend on its batch neighbours; gradients that PyTorch cannot compile.
    """
    check_computed(local)
    if as_sgd(local).algorithm.changes:
        check_rows(as_sgd(local).algorithm)
    options = TrainerOptions() if options is None else options
    name = options.name
    bounds = bound is not None and bound.bounded
    too_many = bounds and users is not None and users > MOST_WEIGHT
    if cohort is not None:
        validate_gradient(task, cohort)
    if name == "auto":
        trainer = _fastest(task, local, options, cohort, bound, gram=not too_many)
        return _compiled(trainer, cohort) if cohort is not None and options.tried else trainer
    if name not in _TRAINERS:
        raise ConfigError(f"no trainer is called {name!r}; use auto, loop, vmap or gram")
    if name == "gram" and too_many:
        raise ModelError(
            f"trainer.name = 'gram': its bound is proved for up to {MOST_WEIGHT} users, and {users} are declared; "
            "use 'vmap' or 'loop' (or 'auto')"
        )
    if name == "gram" and bound is not None and bound.order != 2:
        raise ModelError(
            "trainer.name = 'gram' knows l2 norms alone, and the bound is l1; use 'vmap' (or 'auto')"
        )
    if name == "gram" and task.precision != "float32":
        raise ModelError(
            f"trainer.precision = '{task.precision}': gram computes in float32; use 'vmap' or 'loop' (or 'auto')"
        )
    if name == "vmap" and cohort is not None and not batches_like_loop(task, cohort):
        raise ModelError(
            "trainer.name = 'vmap': vmap cannot batch this model, or gives it other gradients than the loop; use "
            "'loop' (or 'auto')"
        )
    trainer = _made(name, task, local, options)
    if cohort is None or not options.tried:
        return trainer
    if bounds:
        _check_alone(trainer, cohort, options)
    return _compiled(trainer, cohort)


def _check_alone(trainer: PartitionedTrainer, cohort: Cohort, options: TrainerOptions) -> None:
    """Refuse a trainer that was asked for by name and fails its trial, or whose trial exceeds the memory."""
    if trainer.name == "gram" and not _fits_trial(trainer, cohort, options):
        raise ModelError(
            f"trainer.name = 'gram': the trial of its kernels with {trainer.task.dimension} parameters takes "
            f"{_trial_memory(trainer, cohort) >> 20} MiB; set trainer.memory_mb to as much, or use 'auto'"
        )
    if not _leaves_alone(trainer, cohort):
        reason = f"; {HOW_TO_ASK}" if rounds_by_place() else ""
        raise ModelError(_NOT_ALONE.format(trainer.name) + reason)


def is_batch_independent(name: str) -> bool:
    """Return whether the trainer with this name declares that it computes each contribution separately.

    All other names give False: ``auto`` may choose any trainer, and a trainer without a declaration counts as one
    that batches.
    """
    return name in _TRAINERS and not _TRAINERS[name].side_by_side


def can_vectorise_records(
    task: Task, cohort: Cohort, memory: int = RECORD_MEMORY, *, tried: bool = True
) -> bool:
    """Return whether DP-SGD may compute the gradients of several records in one batch.

    Otherwise it computes one at a time.

    Args:
        task: model and loss.
        cohort: gives the shape of a record.
        memory: bytes that the gradients of a chunk may take.
        tried: try this machine's kernels; without a trial the answer is False.

    Raises:
        ModelError: vmap cannot batch the model, so no gradients of single records exist.
    """
    validate_gradient(task, cohort)
    if not batches_like_loop(task, cohort):
        raise ModelError(
            "DP-SGD clips gradients of single records, which vmap cannot compute for this model, or computes otherwise "
            "than the loop; use a method that bounds contributions (uldp-avg, uldp-sgd)"
        )
    if not tried:
        return False
    slots = record_slots(task, cohort, memory)
    return _placed_anywhere(cohort) and (
        slots == 1 or is_gradient_batch_independent(task, cohort, {1: slots})
    )


_TRAINERS: Final[Mapping[str, type[PartitionedTrainer]]] = MappingProxyType(
    {trainer.name: trainer for trainer in (GramTrainer, VmapTrainer, LoopTrainer)}
)
_NOT_ALONE: Final = (
    "trainer.name = {!r}: on this machine the update of one contribution depends on those computed beside it, so "
    "bounding each bounds nothing; use 'loop' (or 'auto')"
)
_WIDEST: Final = 256  # largest batch size that is tried with the Gram trainer
_EPOCHS: Final = 2  # epochs of a trial
_TRIAL_MEMORY: Final = 256 << 20  # default of the bytes of the Gram trainer's trial


def _made(name: str, task: Task, local: LocalStep, options: TrainerOptions) -> PartitionedTrainer:
    return _TRAINERS[name](task=task, local=local).configured(memory=options.memory, compile=options.compile)


def _fastest(
    task: Task,
    local: LocalStep,
    options: TrainerOptions,
    cohort: Cohort | None,
    bound: Bound | None,
    *,
    gram: bool,
) -> PartitionedTrainer:
    if (
        gram
        and linear_layer(task.model) is not None
        and task.precision == "float32"
        and supports_gram(as_sgd(local))
        and (bound is None or bound.order == 2)
    ):
        trainer = _made("gram", task, local, options)
        if cohort is None or (
            _fits_trial(trainer, cohort, options)
            and (task.loss.in_closed_form or batches_like_loop(task, cohort))
            and (not options.tried or _leaves_alone(trainer, cohort))
        ):
            return trainer
    loop = _made("loop", task, local, options)
    if any(isinstance(module, nn.RNNBase) for module in task.model.modules()):
        return loop
    trainer = _made("vmap", task, local, options)
    if cohort is None or (
        batches_like_loop(task, cohort) and (not options.tried or _leaves_alone(trainer, cohort))
    ):
        return trainer
    return loop


def _leaves_alone(trainer: PartitionedTrainer, cohort: Cohort) -> bool:
    """Return whether a trainer's updates are batch-independent, as far as the trials show."""
    if not trainer.side_by_side:
        return True
    if not _placed_anywhere(cohort):
        return False
    if isinstance(trainer, VmapTrainer):
        shapes, fixed = trainer.batch_shapes(cohort), trainer.has_fixed_slots(cohort)
        return is_gradient_batch_independent(trainer.task, cohort, shapes, fixed=fixed)
    sgd = as_sgd(trainer.local)
    few_epochs = replace(trainer, local=replace(sgd, epochs=min(sgd.epochs, _EPOCHS)))
    return is_training_batch_independent(few_epochs, trainer.task.initial(), cohort, _tried_batch(trainer))


def _tried_batch(trainer: PartitionedTrainer) -> int | None:
    """Return the batch size with which the Gram trainer is tried."""
    batch_size = as_sgd(trainer.local).batch_size
    return batch_size if batch_size is not None and batch_size <= _WIDEST else None


def _trial_memory(trainer: PartitionedTrainer, cohort: Cohort) -> int:
    return trial_memory(trainer.task.dimension, cohort, _tried_batch(trainer))


def _fits_trial(trainer: PartitionedTrainer, cohort: Cohort, options: TrainerOptions) -> bool:
    """Return whether the trial of the Gram trainer fits the memory: it holds the updates of its contributions."""
    return _trial_memory(trainer, cohort) <= (_TRIAL_MEMORY if options.memory is None else options.memory)


def _placed_anywhere(cohort: Cohort) -> bool:
    """Return whether matrix products may be batched.

    They may not if their library rounds by the address of an array.
    """
    if cohort.device.type == "cpu" and rounds_by_place():
        warnings.warn(
            f"{HOW_TO_ASK}. Until then contributions are trained one by one, which is slower",
            stacklevel=stacklevel_of_caller(),
        )
        return False
    return True


def _compiled(trainer: PartitionedTrainer, cohort: Cohort) -> PartitionedTrainer:
    """Return the trainer, after compiling its gradients once if it compiles any.

    A compiler may be missing, so the first compilation is tried before training.
    """
    if isinstance(trainer, VmapTrainer) and trainer.compile:
        try_compiled(trainer, cohort)
    return trainer
