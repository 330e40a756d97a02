"""Plain batched training of linear models, for contributions with more records than features.

Their Gram matrix would be larger than their records. Several are trained side by side; a step is two batched
matrix products, and only the records of the batch are read.
"""

from collections.abc import Iterator

import numpy as np
import torch
from jaxtyping import Bool, Float32, Int64
from torch import Tensor

from fedveil.local.counters import batch_order
from fedveil.local.projection import project_
from fedveil.local.span_plan import Plan, split_linear
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
    cohort = plan.cohort
    sizes = torch.from_numpy(plan.sizes)[chosen]
    firsts = torch.from_numpy(cohort.groups.start[plan.members])[chosen].unsqueeze(-1)
    table = torch.from_numpy(cohort.groups.order)
    longest = int(sizes[0])
    batch_size = min(sgd.batch_size or longest, longest)
    present = torch.arange(longest) < sizes.unsqueeze(-1)
    deltas = start.new_zeros(len(chosen), len(start))
    velocity, gradient = torch.zeros_like(deltas), torch.zeros_like(deltas)
    for epoch in range(sgd.epochs):
        order = torch.where(present, batch_order(seeds, sizes, epoch, sgd.batch_size), 0)
        records = table[firsts + order]
        for first in range(0, longest, batch_size):
            active = int((sizes > first).sum())
            features, targets = cohort.batch(records[:active, first : first + batch_size])
            mask = present[:active, first : first + batch_size].to(start.device)
            model = start + deltas[:active]
            _write_gradient(task, model, features.flatten(2), targets, mask, gradient[:active])
            velocity[:active].mul_(sgd.momentum).add_(gradient[:active])
            if sgd.weight_decay:
                velocity[:active].add_(model, alpha=sgd.weight_decay)
            deltas[:active].sub_(velocity[:active], alpha=sgd.learning_rate)
            if sgd.projection is not None:
                project_(deltas[:active], None, sgd.projection)
    return deltas


def _write_gradient(
    task: Task,
    models: Float32[Tensor, "g d"],
    features: Float32[Tensor, "g b p"],
    targets: Tensor,
    mask: Bool[Tensor, "g b"],
    gradient: Float32[Tensor, "g d"],
) -> None:
    """Write the gradient of the mean loss of g batches, each at its own model."""
    weight, bias = split_linear(task, models)
    outputs = weight @ features.mT
    if bias is not None:
        outputs += bias.unsqueeze(-1)
    rates = (mask / mask.sum(-1, keepdim=True).clamp(min=1)).unsqueeze(1)
    slopes = torch.where(mask.unsqueeze(1), task.loss.slopes(outputs, targets, mask), 0) * rates
    weight_gradient, bias_gradient = split_linear(task, gradient)
    weight_gradient.copy_(slopes @ features)
    if bias_gradient is not None:
        bias_gradient.copy_(slopes.sum(-1))
