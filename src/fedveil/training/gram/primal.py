"""Train linear models in plain batches, for contributions with more records than features.

The Gram matrix of such a contribution would be larger than its records. Several contributions are trained in one
batch. A step is two batched matrix products and reads only the records of its batch. Shapes follow from a
contribution's own number of records and from public facts (:mod:`fedveil.training.shapes`).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float32, Int64
from torch import Tensor

from fedveil.training.counters import batch_order
from fedveil.training.gram.layout import GramPlan, split_linear
from fedveil.training.local_algorithms import LocalState
from fedveil.training.shapes import padded_sizes, round_up_slots
from fedveil.training.steps import LocalSgd, project_
from fedveil.training.task import Task

_CHUNK_BYTES = 64 << 20


def train_primal(
    task: Task, sgd: LocalSgd, plan: GramPlan, start: Float32[Tensor, "d"], seeds: Int64[Tensor, "m"]
) -> Iterator[tuple[Int64[Tensor, "g"], Float32[Tensor, "g d"]]]:
    """Yield the contributions of a plan that are not trained in the span, with their updates."""
    sizes = plan.sizes[plan.primal]
    widths = padded_sizes(sizes, 4, 4)
    if sgd.batch_size is not None:
        widths = np.where(sizes > sgd.batch_size, sgd.batch_size, widths)
    for width in np.unique(widths).tolist():
        left = plan.primal[widths == width]
        left = left[np.argsort(-plan.sizes[left], kind="stable")]
        record_bytes = 4 * plan.cohort.features[0].numel() * width
        count = round_up_slots(max(1, _CHUNK_BYTES // (3 * record_bytes + 16 * len(start))), width)
        for first in range(0, len(left), count):
            chosen = torch.from_numpy(left[first : first + count])
            filled = torch.cat([chosen, chosen[-1:].expand(round_up_slots(len(chosen), width) - len(chosen))])
            chunk = _Chunk(chosen=filled, seeds=seeds[filled], width=width)
            yield chosen, _train(task, sgd, plan, start, chunk)[: len(chosen)]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Chunk:
    """Contributions of a plan by descending size, their seeds, and the padded records of a step."""

    chosen: Int64[Tensor, "g"]
    seeds: Int64[Tensor, "g"]
    width: int


def _train(
    task: Task, sgd: LocalSgd, plan: GramPlan, start: Float32[Tensor, "d"], chunk: _Chunk
) -> Float32[Tensor, "g d"]:
    """Return the updates of the contributions of a chunk."""
    chosen, seeds, width = chunk.chosen, chunk.seeds, chunk.width
    cohort = plan.cohort
    sizes = torch.from_numpy(plan.sizes)[chosen]
    firsts = torch.from_numpy(cohort.groups.start[plan.members])[chosen].unsqueeze(-1)
    table = torch.from_numpy(cohort.groups.order)
    longest = -(-int(sizes[0]) // width) * width
    present = torch.arange(longest) < sizes.unsqueeze(-1)
    deltas = start.new_zeros(len(chosen), len(start))
    velocity, gradient = torch.zeros_like(deltas), torch.zeros_like(deltas)
    for epoch in range(sgd.epochs):
        order = batch_order(seeds, sizes, epoch, sgd.batch_size)
        order = torch.nn.functional.pad(order, (0, longest - order.shape[1]))
        records = table[firsts + torch.where(present, order, 0)]
        for first in range(0, longest, width):
            active = int((sizes > first).sum())
            rows = round_up_slots(active, width)
            features, targets = cohort.batch(records[:rows, first : first + width])
            mask = present[:rows, first : first + width].to(start.device)
            model = start + deltas[:rows]
            _write_gradient(task, model, features.flatten(2), targets, mask, gradient[:rows])
            if sgd.algorithm.changes:
                changed = sgd.algorithm.slope(gradient[:rows], model, LocalState(start=start))
                gradient[:rows] = changed
            # v <- mu v + grad + lambda w; Delta <- Delta - eta v. The update is kept, not the model, so its low bits
            # survive.
            velocity[:active].mul_(sgd.momentum).add_(gradient[:active])
            if sgd.weight_decay:
                velocity[:active].add_(model[:active], alpha=sgd.weight_decay)
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
    """Write the gradient of the mean loss of g batches, each at its own model, into ``gradient``."""
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
