"""Test once, before any charge, that a model has gradients on which a contribution's bound can rely.

Training computes gradients by the loop's autograd or by ``torch.func.vmap``. Outputs do not show what a model does in
its backward pass: a sparse gradient, a gradient scaled by how often a record's words occur in the batch, random
numbers, or a custom ``torch.autograd.Function``. So one gradient of made-up records is computed in both ways. No
private record is read, and the consequence (a refusal, or the loop instead of vmap) is public.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Bool, Float32, Int64
from torch import Tensor

from fedveil.errors import FedveilError, ModelError
from fedveil.sanitize import sanitize
from fedveil.training.batch_independence import made_up_targets
from fedveil.training.counters import seed_names
from fedveil.training.loop import BatchGradient
from fedveil.training.shapes import single_threaded
from fedveil.training.state_leak_check import check_unchanged
from fedveil.training.task import Task
from fedveil.training.trainer import Cohort
from fedveil.training.vectorized import BatchedGradients, VmapTrainer, without_fallback_warnings

_WIDTH = 4  # records of the trial's batch
_LIKE_NUMBERS = {"float32": 1e-3, "bfloat16": 0.1}
"""The relative difference of two gradients that rounding explains, by the precision of a run."""
_NEGLIGIBLE = 0.1
"""Share of the whole gradient's norm that is added to a parameter's own before the comparison.

Normalisation layers make the gradients of earlier layers small by cancellation, and rounding is relative to the terms
that cancel: on ``svhn_cnn`` loop and vmap differ by 3 % of the first layer's gradient, which is 1e-5 of the whole."""


def validate_gradient(task: Task, cohort: Cohort) -> None:
    """Compute gradients of made-up records as the loop does, and refuse a model without usable gradients.

    Args:
        task: model and loss.
        cohort: gives the shape of a record and the device.

    Raises:
        ModelError: the backward pass fails, gives sparse or non-finite numbers, reaches no parameter, draws
            random numbers, writes to the model, or gives a record another gradient if other records are in its batch.
    """
    features, targets = _records(cohort)
    start = task.initial().to(cohort.device)
    seed = torch.zeros((), dtype=torch.int64)
    with (
        _explained(task, features),
        single_threaded(),
        torch.random.fork_rng(devices=[]),
        check_unchanged(task),
    ):
        loop = BatchGradient(task, cohort.device, _WIDTH)
        gradient = loop.evaluate(start, features, targets, seed)
        again = loop.evaluate(start, features, targets, seed)
        everyone = torch.ones(2, dtype=torch.bool, device=cohort.device)
        # The same two records with and without neighbours: a gradient that reads the batch (scale_grad_by_freq)
        # differs.
        alone = _masked(task, start, features[:2], targets[:2], everyone, seed)
        beside = torch.arange(_WIDTH, device=cohort.device) < 2
        together = _masked(task, start, features, targets, beside, seed)
    if not gradient.isfinite().all():
        raise ModelError(
            "the gradient of the model is not finite for made-up records of ordinary size: look at its initial "
            "parameters, and at roots, logarithms and divisions"
        )
    if not _alike(task, gradient, again):
        raise ModelError(
            "two gradients of the same records differ: a backward pass of the model draws random numbers or keeps a "
            "state; use torch.nn.Dropout layers, whose masks are drawn per contribution"
        )
    if not _alike(task, alone, together):
        raise ModelError(
            "the gradient of a record changes with the other records of its batch: give embeddings "
            "scale_grad_by_freq=False, decide nothing by a whole batch, and let a backward pass of your own treat each "
            "row by itself"
        )


def batches_like_loop(task: Task, cohort: Cohort) -> bool:
    """Return whether ``torch.func.vmap`` can batch the gradient of a task, and gives the loop's gradient.

    vmap fails on data-dependent control flow, on writes to tensors that are not batched, and on custom autograd
    functions without a vmap rule. The comparison finds vmap rules that compute something else.

    Args:
        task: a task that :func:`validate_gradient` accepts.
        cohort: gives the shape of a record and the device.
    """
    gradients, loop = (
        BatchedGradients.for_task(task, cohort.device),
        BatchGradient(task, cohort.device, _WIDTH),
    )
    batch, models = _two_slots(cohort), _two_models(task, cohort)
    try:
        with single_threaded(), without_fallback_warnings(), torch.random.fork_rng(devices=[]):
            results = (
                (
                    models[:1].expand(2, -1),
                    gradients.at_shared_model(task.layout.unflatten(models[0]), *batch),
                ),
                (models, gradients.at_own_models(task.layout.unflatten(models), *batch)),
            )
    except Exception:  # any error of the model's code under vmap; the loop runs this code without vmap
        return False
    for at, slopes in results:
        flat = torch.cat([slope.reshape(2, -1) for slope in slopes.values()], 1)
        for slot, (features, targets, mask, seed) in enumerate(zip(*batch, strict=True)):
            if not _alike(task, loop.evaluate(at[slot], features[mask], targets[mask], seed), flat[slot]):
                return False
    return True


def try_compiled(trainer: VmapTrainer, cohort: Cohort) -> None:
    """Compile the gradients of a trainer for one batch shape, and compare them with the uncompiled ones.

    Raises:
        ModelError: PyTorch cannot compile them on this machine, or the compiled gradients differ.
    """
    shapes = trainer.batch_shapes(cohort)
    if not shapes:
        return
    task, width = trainer.task, max(shapes)
    slots = shapes[width]
    batch = _batch(cohort, slots, width)
    models = task.initial().to(cohort.device).repeat(slots, 1)
    plain, compiled = (
        BatchedGradients.for_task(task, cohort.device, compile=enabled) for enabled in (False, True)
    )
    named = task.layout.unflatten
    try:
        with single_threaded(), without_fallback_warnings():
            results = [
                torch.cat([slope.reshape(slots, -1) for slope in slopes.values()], 1)
                for variant in (plain, compiled)
                for slopes in (
                    variant.at_shared_model(named(models[0]), *batch),
                    variant.at_own_models(named(models), *batch),
                )
            ]
    except Exception as error:
        raise ModelError(
            f"trainer.compile = true: PyTorch cannot compile the gradients of this model on this machine "
            f"({type(error).__name__}: {sanitize(str(error))}); install a C++ compiler, or set trainer.compile = false"
        ) from error
    if not all(
        _alike(task, reference[0], other[0])
        for reference, other in zip(results[:2], results[2:], strict=True)
    ):
        raise ModelError(
            "trainer.compile = true: the compiled gradients of this model differ from those of the loop by more than "
            "rounding; set trainer.compile = false"
        )


@contextmanager
def _explained(task: Task, features: Tensor) -> Iterator[None]:
    """Turn an error of a model's backward pass on made-up records into a refusal."""
    try:
        yield
    except FedveilError:
        raise
    except Exception as error:
        shape = tuple(features.shape[1:])
        hint = ""
        if "does not require grad" in str(error):
            hint = "no parameter that is trained reaches the loss (torch.no_grad, detach): "
        raise ModelError(
            f"the gradient of the loss {task.loss.name} fails on made-up records of shape {shape}: {hint}"
            f"{type(error).__name__}: {sanitize(str(error))}"
        ) from error


def _masked(
    task: Task,
    model: Float32[Tensor, " d"],
    features: Tensor,
    targets: Tensor,
    mask: Bool[Tensor, " n"],
    seed: Int64[Tensor, ""],
) -> Float32[Tensor, " d"]:
    """Return the gradient of the mean loss of the records with mask 1, by autograd."""
    with torch.enable_grad():
        leaf = model.detach().clone().requires_grad_()
        state = task.layout.unflatten(leaf) | task.constants(model.device)
        state |= dict.fromkeys(seed_names(task.model), seed.to(model.device))
        loss = task.loss(task.outputs(state, features), targets, mask)
    return torch.autograd.grad(loss, leaf)[0]


def _alike(task: Task, gradient: Float32[Tensor, " d"], other: Float32[Tensor, " d"]) -> bool:
    """Return whether two gradients differ by rounding only, parameter by parameter; NaN equals nothing."""
    most = _LIKE_NUMBERS[task.precision]
    # Per parameter: a wrong gradient of a small layer would vanish in the norm of the whole model.
    floor = _NEGLIGIBLE * gradient.norm()
    named = zip(task.layout.unflatten(gradient).values(), task.layout.unflatten(other).values(), strict=True)
    return all(
        bool((tensor - other_tensor).norm() <= most * (tensor.norm() + floor))
        for tensor, other_tensor in named
    )


def _records(cohort: Cohort) -> tuple[Tensor, Tensor]:
    """Return made-up records with the record shape of the cohort."""
    features, targets, _, _ = _batch(cohort, 1, _WIDTH)
    return features[0], targets[0]


def _batch(cohort: Cohort, slots: int, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return features, targets, mask and seeds of made-up contributions."""
    generator = torch.Generator().manual_seed(slots)
    shape, kind = cohort.features.shape[1:], cohort.targets
    return (
        torch.randn(slots, width, *shape, generator=generator).to(cohort.device),
        made_up_targets(slots * width, kind).reshape(slots, width, *kind.shape[1:]).to(cohort.device),
        torch.ones(slots, width, dtype=torch.bool, device=cohort.device),
        torch.arange(slots, device=cohort.device),
    )


def _two_slots(cohort: Cohort) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return two made-up contributions; the first has one record less and is padded by its last record.

    Training pads in the same way.
    """
    features, targets, mask, seeds = _batch(cohort, 2, _WIDTH)
    for column in (features, targets):
        column[0, -1] = column[0, -2]
    mask[0, -1] = False
    return features, targets, mask, seeds


def _two_models(task: Task, cohort: Cohort) -> Float32[Tensor, "2 d"]:
    """Return the initial model and a second model near it."""
    start = task.initial()
    moved = start + torch.randn(len(start), generator=torch.Generator().manual_seed(0)) / len(start) ** 0.5
    return torch.stack([start, moved]).to(cohort.device)
