"""The steps of span training: everything that happens between the Gram matrices and the coefficients.

With records X (n, p + 1) and start W0, the model of a contribution is at any time W = c W0 + A^T X, and its momentum
V = e W0 + B^T X, for a scalar c, e and coefficients A, B (n, k). One step of SGD with momentum mu, decay lambda and
rate eta, G being the slopes of the mean loss of the batch (zero for records outside it), is

    e <- mu e + lambda c,        c <- c - eta e
    B <- mu B + G + lambda A,    A <- A - eta B

and the logits that G needs are Z = c Z0 + K A with Z0 = X W0^T and K = X X^T. Here A and Z are stored class by
class, (contributions, k, n), so that Z = c Z0 + A K.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float32, Float64, Int64, Shaped
from torch import Tensor

from fedveil.local.counters import batch_order
from fedveil.local.losses import Loss
from fedveil.local.steps import LocalSgd


@dataclass(frozen=True, kw_only=True, eq=False)
class Trained:
    """Where training ended: W_Q = c W0 + A^T X for each of g contributions.

    Args:
        coefficients: A, class by class.
        shrink: c - 1, exactly 0 without weight decay.
    """

    coefficients: Float32[Tensor, "g k n"]
    shrink: Float64[Tensor, "g"]


def train_full_batch(
    loss: Loss,
    sgd: LocalSgd,
    grams: Float32[Tensor, "g n n"],
    logits: Float32[Tensor, "g k n"],
    targets: Shaped[Tensor, "g n *target"],
    rates: Float32[Tensor, "g n"],
) -> Trained:
    """Train blocks of contributions whose every step uses all of their records.

    A block holds several contributions: its Gram matrix is block-diagonal, and a separable loss couples records
    through it alone. A contribution that overflows may spoil its block, never another block.

    Args:
        loss: a separable loss.
        sgd: rate, epochs, momentum, decay; its batch size is at least every contribution's size.
        grams: K of every block, zero between contributions.
        logits: Z0, zero for padding.
        targets: of every record; any valid target for padding.
        rates: 1 / size of the record's contribution, 0 for padding.
    """
    present = rates > 0
    weight = rates.unsqueeze(-2)
    coefficients = torch.zeros_like(logits)
    velocity = torch.zeros_like(logits) if sgd.momentum else None
    scale, drift = 1.0, 0.0
    outputs = logits
    for epoch in range(sgd.epochs):
        if epoch:
            outputs = torch.baddbmm(logits, coefficients, grams, beta=scale)
        slopes = loss.slopes(outputs, targets, present).mul_(weight)
        _descend(sgd, coefficients, velocity, slopes)
        drift = sgd.momentum * drift + sgd.weight_decay * scale
        scale -= sgd.learning_rate * drift
    shrink = torch.full((len(logits),), scale - 1, dtype=torch.float64, device=logits.device)
    return Trained(coefficients=coefficients, shrink=shrink)


def train_batches(
    loss: Loss,
    sgd: LocalSgd,
    grams: Float32[Tensor, "g n n"],
    logits: Float32[Tensor, "g k n"],
    targets: Shaped[Tensor, "g n *target"],
    sizes: Int64[Tensor, "g"],
    seeds: Int64[Tensor, "g"],
) -> Trained:
    """Train contributions side by side, padded to the largest, in the batches every trainer takes.

    Each epoch the Gram matrices are permuted into the epoch's order, so that a batch is a slice; with sizes descending,
    contributions that still have a batch left are a prefix.

    Args:
        loss: any loss.
        sgd: rate, epochs, batch size, momentum, decay.
        grams: K, zero for padding.
        logits: Z0, zero for padding.
        targets: any valid target for padding.
        sizes: n of each contribution, descending, at least 1.
        seeds: of each contribution's batches.
    """
    count, _, longest = logits.shape
    device = logits.device
    batch_size = min(sgd.batch_size or longest, longest)
    shuffles = batch_size < longest
    present = torch.arange(longest, device=device) < sizes.to(device).unsqueeze(-1)
    steps = _Steps.of(sizes, batch_size)
    rates = torch.stack([1 / part.sum(-1).clamp(min=1) for part in present.split(batch_size, -1)])
    coefficients = torch.zeros_like(logits)
    velocity = torch.zeros_like(logits) if sgd.momentum else None
    scale = torch.ones(count, 1, 1, dtype=torch.float64, device=device)
    drift = torch.zeros_like(scale)
    epoch_grams, epoch_logits, epoch_targets = grams, logits, targets
    order = back = torch.empty(0)
    for epoch in range(sgd.epochs):
        if shuffles:
            order = batch_order(seeds, sizes, epoch, sgd.batch_size).to(device)
            back = order.argsort(-1)
            epoch_grams = _permuted(_permuted(grams, order).mT, order)
            epoch_logits = _permuted(logits, order)
            epoch_targets = targets[torch.arange(count, device=device).unsqueeze(-1), order]
            coefficients = _permuted(coefficients, order)
            velocity = None if velocity is None else _permuted(velocity, order)
        for step, (active, first, last) in enumerate(steps.bounds):
            outputs = epoch_logits[:active, :, first:last]
            if sgd.weight_decay:
                outputs = outputs * scale[:active].float()
            if epoch or step:
                outputs = torch.baddbmm(outputs, coefficients[:active], epoch_grams[:active, :, first:last])
            mask = present[:active, first:last]
            slopes = loss.slopes(outputs, epoch_targets[:active, first:last], mask)
            slopes = slopes * (mask * rates[step, :active].unsqueeze(-1)).unsqueeze(-2)
            _descend(
                sgd,
                coefficients[:active],
                None if velocity is None else velocity[:active],
                slopes,
                slice(first, last),
            )
            if sgd.weight_decay:
                drift[:active] = sgd.momentum * drift[:active] + sgd.weight_decay * scale[:active]
                scale[:active] -= sgd.learning_rate * drift[:active]
        if shuffles:
            coefficients = _permuted(coefficients, back)
            velocity = None if velocity is None else _permuted(velocity, back)
    return Trained(coefficients=coefficients, shrink=scale[:, 0, 0] - 1)


@dataclass(frozen=True, kw_only=True)
class _Steps:
    """The steps of one epoch: how many contributions are active, and which slice of each is the batch."""

    bounds: list[tuple[int, int, int]]

    @classmethod
    def of(cls, sizes: Int64[Tensor, "g"], batch_size: int) -> "_Steps":
        longest = int(sizes[0])
        firsts = range(0, longest, batch_size)
        return cls(
            bounds=[(int((sizes > first).sum()), first, min(first + batch_size, longest)) for first in firsts]
        )


def _descend(
    sgd: LocalSgd,
    coefficients: Float32[Tensor, "g k n"],
    velocity: Float32[Tensor, "g k n"] | None,
    slopes: Float32[Tensor, "g k b"],
    batch: slice = slice(None),
) -> None:
    """Take one step, in place; ``slopes`` belong to the records of ``batch``."""
    if velocity is None:
        if sgd.weight_decay:
            coefficients.mul_(1 - sgd.learning_rate * sgd.weight_decay)
        coefficients[..., batch].sub_(slopes, alpha=sgd.learning_rate)
        return
    velocity.mul_(sgd.momentum)
    if sgd.weight_decay:
        velocity.add_(coefficients, alpha=sgd.weight_decay)
    velocity[..., batch].add_(slopes)
    coefficients.sub_(velocity, alpha=sgd.learning_rate)


def _permuted(values: Float[Tensor, "g k n"], order: Int64[Tensor, "g n"]) -> Float[Tensor, "g k n"]:
    """Reorder the last axis of each contribution."""
    return values.gather(-1, order.unsqueeze(-2).expand(values.shape))
