"""Plain batched training of linear models, for contributions with more records than features.

Their Gram matrix would be larger than their records. Several are trained side by side; a step is two batched matrix
products, and only the records of the batch are read.
"""

from collections.abc import Iterator

import numpy as np
import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from fedveil.local.counters import batch_order
from fedveil.local.span_plan import Plan
from fedveil.local.steps import LocalSgd
from fedveil.local.task import Task

_CHUNK_BYTES = 64 << 20


def train_primal(
    task: Task, sgd: LocalSgd, plan: Plan, start: Float32[Tensor, "d"], seeds: Int64[Tensor, "m"]
) -> Iterator[tuple[Int64[Tensor, "g"], Float32[Tensor, "g d"]]]:
    """Yield contributions of a plan that are not trained in the span, and their updates, largest first."""
    left = plan.primal[np.argsort(-plan.sizes[plan.primal], kind="stable")]
    while len(left):
        longest = int(plan.sizes[left[0]])
        record_bytes = 4 * plan.cohort.features[0].numel() * min(longest, sgd.batch_size or longest)
        count = max(1, _CHUNK_BYTES // (3 * record_bytes + 16 * len(start)))
        chosen, left = torch.from_numpy(left[:count]), left[count:]
        yield chosen, _train(task, sgd, plan, chosen, start, seeds[chosen])


def _train(
    task: Task,
    sgd: LocalSgd,
    plan: Plan,
    chosen: Int64[Tensor, "g"],
    start: Float32[Tensor, "d"],
    seeds: Int64[Tensor, "g"],
) -> Float32[Tensor, "g d"]:
    """Return the updates of contributions with sizes descending, padded to the largest."""
    cohort, device = plan.cohort, start.device
    sizes = torch.from_numpy(plan.sizes)[chosen]
    firsts = torch.from_numpy(cohort.groups.start[plan.members])[chosen].unsqueeze(-1)
    table = torch.from_numpy(cohort.groups.order)
    longest = int(sizes[0])
    batch_size = min(sgd.batch_size or longest, longest)
    deltas = start.new_zeros(len(chosen), len(start))
    velocity = torch.zeros_like(deltas)
    for epoch in range(sgd.epochs):
        order = batch_order(seeds, sizes, epoch, sgd.batch_size)
        for first in range(0, longest, batch_size):
            active = int((sizes > first).sum())
            batch = order[:active, first : first + batch_size]
            present = torch.arange(first, first + batch.shape[1]) < sizes[:active].unsqueeze(-1)
            features, targets = cohort.batch(table[firsts[:active] + torch.where(present, batch, 0)])
            mask = present.to(device)
            model = start + deltas[:active]
            gradient = _gradient(task, model, features.flatten(2), targets, mask)
            velocity[:active].mul_(sgd.momentum).add_(gradient).add_(model, alpha=sgd.weight_decay)
            deltas[:active].sub_(velocity[:active], alpha=sgd.learning_rate)
    return deltas


def _gradient(
    task: Task,
    models: Float32[Tensor, "g d"],
    features: Float32[Tensor, "g b p"],
    targets: Tensor,
    mask: Tensor,
) -> Float32[Tensor, "g d"]:
    """Return the gradient of the mean loss of g batches, each at its own model."""
    named = {name.rpartition(".")[2]: view for name, view in task.layout.unflatten(models).items()}
    outputs = named["weight"] @ features.mT
    if "bias" in named:
        outputs += named["bias"].unsqueeze(-1)
    slopes = torch.where(mask.unsqueeze(-2), task.loss.slopes(outputs, targets, mask), 0)
    slopes = slopes / mask.sum(-1).clamp(min=1)[:, None, None]
    gradient = torch.empty_like(models)
    parts = {name.rpartition(".")[2]: view for name, view in task.layout.unflatten(gradient).items()}
    parts["weight"].copy_(slopes @ features)
    if "bias" in parts:
        parts["bias"].copy_(slopes.sum(-1))
    return gradient
