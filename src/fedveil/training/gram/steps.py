"""Compute the steps of Gram training, from Gram matrices to coefficients.

With records X (n, p + 1) and start W0, the model of a contribution is at any time W = c W0 + A^T X, and its momentum
V = e W0 + B^T X, for scalars c, e and coefficients A, B (n, k). Consider one step of SGD with momentum mu, decay
lambda and rate eta. Let G be the slopes of the mean loss of the batch (zero for records outside it). The step is

    e <- mu e + lambda c,        c <- c - eta e
    B <- mu B + G + lambda A,    A <- A - eta B

A local algorithm whose direction is a G + b w + s w_t takes a G for G, adds b to lambda in both lines, and adds s to e
(:func:`span_terms`). G depends on the logits Z = c Z0 + K A with Z0 = X W0^T and K = X X^T. The code stores A and Z
class by class, (contributions, k, n), so that Z = c Z0 + A K.

A projection (:class:`Ball`) needs the length of the update U = (c - 1) W0 + A^T X after every step,

    ||U||^2 = (c - 1)^2 ||W0||^2 + 2 (c - 1) <A, Z0> + <A, A K>.

A step that changes the coefficients of b records updates both inner products at the cost of their b x b Gram matrix
alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import cycle, repeat
from typing import Final, NamedTuple

import torch
from jaxtyping import Bool, Float, Float32, Float64, Int64, Shaped
from torch import Tensor

from fedveil.training.counters import batch_order
from fedveil.training.local_algorithms import linear_combination
from fedveil.training.losses import Loss
from fedveil.training.shapes import round_up_slots
from fedveil.training.steps import LocalSgd

_BATCH_ELEMENTS: Final = 2**16  # logits that are reordered in one call; they fit a core's cache
_ORDER_ELEMENTS: Final = 2**18  # batch orders drawn in one call: 2 MB of int64


@dataclass(frozen=True, kw_only=True, eq=False)
class Trained:
    """The end of training: W_Q = c W0 + A^T X for each of g contributions.

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

    A block holds several contributions. Its Gram matrix is block-diagonal, and with a separable loss only this matrix
    couples records. A contribution that overflows may spoil its block, and never another block.

    Args:
        loss: a separable loss.
        sgd: rate, epochs, momentum, decay; its batch size is at least every contribution's size.
        grams: K of every block, zero between contributions.
        logits: Z0, zero for padding.
        targets: targets of every record; any valid target for padding.
        rates: 1 / size of the record's contribution, 0 for padding.
    """
    present, terms = rates > 0, span_terms(sgd)
    weight = rates.unsqueeze(-2) if terms.gradient == 1 else rates.unsqueeze(-2) * terms.gradient
    coefficients = torch.zeros_like(logits)
    velocity = torch.zeros_like(logits) if sgd.momentum else None
    scale, drift = 1.0, 0.0
    outputs, started = logits, duplicate_single_output(logits)
    for epoch in range(sgd.epochs):
        if epoch:
            outputs = product(coefficients, grams, started, scale)
        slopes = loss.slopes(outputs, targets, present).mul_(weight)
        _descend(sgd, coefficients, velocity, slopes, None)
        # e <- mu e + lambda c; c <- c - eta e: drift is e and scale is c.
        drift = sgd.momentum * drift + terms.decay * scale + terms.start
        scale -= sgd.learning_rate * drift
    shrink = torch.full((len(logits),), scale - 1, dtype=torch.float64, device=logits.device)
    return Trained(coefficients=coefficients, shrink=shrink)


def product(
    coefficients: Float[Tensor, "g k n"],
    grams: Float[Tensor, "g n n"],
    logits: Float[Tensor, "g k2 n"] | None = None,
    scale: float = 1.0,
) -> Float[Tensor, "g k n"]:
    """Return A K, or c Z0 + A K, of blocks that several contributions share.

    A single output is computed twice, as two outputs. The product of one row and a matrix has its own kernel, whose
    order of addition depends on the position of a contribution in the block.

    Args:
        coefficients: A.
        grams: K.
        logits: Z0 as :func:`duplicate_single_output` returns it; None leaves the first term out.
        scale: c.
    """
    outputs, coefficients = coefficients.shape[1], duplicate_single_output(coefficients)
    if logits is None:
        computed = torch.bmm(coefficients, grams)
    else:
        computed = torch.baddbmm(logits, coefficients, grams, beta=scale)
    return computed[:, :outputs].contiguous()


def duplicate_single_output(values: Float[Tensor, "g k n"]) -> Float[Tensor, "g k2 n"]:
    """Return the values of a single output twice, and those of several outputs unchanged."""
    return torch.cat([values, values], 1) if values.shape[1] == 1 else values


@dataclass(frozen=True, kw_only=True, eq=False)
class Stack:
    """Contributions that are trained in one batch, one per row.

    Args:
        sizes: n of each contribution, descending; 0 for rows of padding.
        seeds: seeds of each contribution's batches.
        step: number of records that a step reads, padding included.
        tile: length of the products; divides the width of the rows.
        start_norm: ||W0||; only a projection with weight decay reads it.
    """

    sizes: Int64[Tensor, "g"]
    seeds: Int64[Tensor, "g"]
    step: int
    tile: int
    start_norm: float


def train_batches(
    loss: Loss,
    sgd: LocalSgd,
    grams: Float32[Tensor, "g n n"],
    logits: Float32[Tensor, "g k n"],
    targets: Shaped[Tensor, "g n *target"],
    stack: Stack,
) -> Trained:
    """Train contributions in one batch of rows, with the mini-batches of every other trainer.

    Rows are padded to the largest contribution.

    A step reads only the rows of K of its batches. With descending sizes, the contributions that still have a batch
    left are a prefix. A product is added up over tiles, so that neither its shapes nor its order of addition depend
    on the largest contribution.

    Args:
        loss: any loss.
        sgd: rate, epochs, batch size, momentum, decay.
        grams: K, zero for padding.
        logits: Z0, zero for padding.
        targets: any valid target for padding.
        stack: the contributions.
    """
    count, _, longest = logits.shape
    device, sizes, terms = logits.device, stack.sizes, span_terms(sgd)
    present = torch.arange(longest, device=device) < sizes.to(device).unsqueeze(-1)
    steps = [
        Step.from_batch(int((sizes > first).sum()), slice(first, first + stack.step), present)
        for first in range(0, int(sizes[0]), stack.step)
    ]
    coefficients = torch.zeros_like(logits)
    velocity = torch.zeros_like(logits) if sgd.momentum else None
    scale = torch.ones(count, 1, 1, dtype=torch.float64, device=device)
    drift = torch.zeros_like(scale)
    ball = None if sgd.projection is None else Ball(sgd, count, stack.start_norm, device)
    all_rows = grams.flatten(0, 1)
    moved = [(coefficients[: step.present.shape[0]], coefficients[: step.active]) for step in steps]
    turns = zip(cycle(zip(steps, moved, strict=True)), _batches(sgd, stack, logits, targets), strict=False)
    for (step, (own, moving)), batch in turns:
        active, n_rows = step.active, own.shape[0]
        started = batch.logits[:n_rows]
        batch_logits = started * scale[:n_rows].float() if terms.moves_start else started
        read = all_rows.index_select(0, batch.rows[:n_rows].flatten()).view(n_rows, -1, longest)
        # Z = c Z0 + A K at the records of the batch.
        learned = _tiled(own, read, stack.tile)
        batch_logits = batch_logits + learned
        slopes = loss.slopes(batch_logits, batch.targets[:n_rows], step.present)
        slopes = slopes.mul_(step.rates if terms.gradient == 1 else step.rates * terms.gradient)
        # The ball needs A K before the step, so it is updated before the coefficients are.
        if ball is not None:
            among = read.gather(-1, batch.places[:n_rows, :1].expand(-1, read.shape[1], -1))
            ball.step(slopes, learned, among, started, active)
        gathered = None if velocity is None else velocity[:active]
        _descend(sgd, moving, gathered, slopes[:active], batch.places[:active])
        if terms.moves_start:
            drift[:active] = sgd.momentum * drift[:active] + terms.decay * scale[:active] + terms.start
            scale[:active] -= sgd.learning_rate * drift[:active]
        if ball is not None:
            ball.project_(moving, scale[:active])
    return Trained(coefficients=coefficients, shrink=scale[:, 0, 0] - 1)


def _tiled(
    coefficients: Float32[Tensor, "g k n"], grams: Float32[Tensor, "g b n"], tile: int
) -> Float32[Tensor, "g k b"]:
    """Return A K at the records of a batch, added up over products of one shape.

    ``grams`` are the rows of K at these records.

    Beyond a contribution's last record its tiles hold zeros, and add exact zeros.
    """
    if coefficients.shape[2] == tile:
        return torch.bmm(coefficients, grams.mT)
    total = torch.bmm(coefficients[:, :, :tile], grams[:, :, :tile].mT)
    for first in range(tile, coefficients.shape[2], tile):
        columns = slice(first, first + tile)
        total.add_(torch.bmm(coefficients[:, :, columns], grams[:, :, columns].mT))
    return total


class _Batch(NamedTuple):
    """Records of one step: rows in the table, logits Z0, targets, and positions in their row."""

    rows: Int64[Tensor, "g b"]
    logits: Float32[Tensor, "g k b"]
    targets: Tensor
    places: Int64[Tensor, "g k b"]


def _batches(
    sgd: LocalSgd, stack: Stack, logits: Float32[Tensor, "g k n"], targets: Shaped[Tensor, "g n *target"]
) -> Iterator[_Batch]:
    """Yield the batches of all epochs.

    If an epoch is one batch, its order has no effect, and every epoch yields the same batch.
    """
    steps = -(-int(stack.sizes[0]) // stack.step)
    if steps == 1:
        (orders,) = _orders(replace(sgd, epochs=1), stack, logits)
        for batch in _in_order(orders, logits, targets, stack.step, steps):
            yield from repeat(batch, sgd.epochs)
        return
    for orders in _orders(sgd, stack, logits):
        yield from _in_order(orders, logits, targets, stack.step, steps)


def _in_order(
    orders: Int64[Tensor, "epochs g n"],
    logits: Float32[Tensor, "g k n"],
    targets: Shaped[Tensor, "g n *target"],
    step: int,
    steps: int,
) -> Iterator[_Batch]:
    """Yield the batches of some epochs, whose records are reordered in one call."""
    epochs, (count, outputs, longest) = len(orders), logits.shape
    cut = orders[:, :, : steps * step].reshape(epochs, count, steps, step).transpose(1, 2)
    read = cut.reshape(epochs * steps, count, step)
    rows = torch.arange(count, device=logits.device).unsqueeze(-1) * longest + read
    places = read.unsqueeze(2).expand(-1, -1, outputs, -1)
    started = logits.expand(len(read), -1, -1, -1).gather(-1, places)
    chosen = targets.flatten(0, 1)[rows]
    yield from map(_Batch, rows.unbind(), started.unbind(), chosen.unbind(), places.unbind())


def _orders(
    sgd: LocalSgd, stack: Stack, logits: Float32[Tensor, "g k n"]
) -> Iterator[Int64[Tensor, "epochs g n"]]:
    """Yield the batch orders of all epochs, some epochs at a time, as memory and caches allow."""
    count, _, longest = logits.shape
    sorted_together = max(1, _ORDER_ELEMENTS // (count * longest))
    read_together = max(1, _BATCH_ELEMENTS // logits.numel())
    for first in range(0, sgd.epochs, sorted_together):
        epochs = torch.arange(first, min(first + sorted_together, sgd.epochs)).repeat_interleave(count)
        times = len(epochs) // count
        orders = batch_order(stack.seeds.repeat(times), stack.sizes.repeat(times), epochs, sgd.batch_size)
        padding = torch.arange(orders.shape[1], longest).expand(len(orders), -1)
        whole_rows = torch.cat([orders, padding], 1).to(logits.device).view(times, count, longest)
        yield from torch.split(whole_rows, read_together)


class SpanTerms(NamedTuple):
    """The direction a G + (lambda + b) w + s w_t of a step: a, lambda + b and s."""

    gradient: float
    decay: float
    start: float

    @property
    def moves_start(self) -> bool:
        """Return whether the factor c of W0 leaves 1: at c = 1 it moves by lambda + b + s."""
        return self.decay + self.start != 0


def span_terms(sgd: LocalSgd) -> SpanTerms:
    """Return the terms of a step's direction, from weight decay and the local algorithm."""
    if not sgd.algorithm.changes:
        return SpanTerms(1.0, sgd.weight_decay, 0.0)
    combination = linear_combination(sgd.algorithm)
    return SpanTerms(combination.gradient, sgd.weight_decay + combination.model, combination.start)


def supports_gram(sgd: LocalSgd) -> bool:
    """Return whether the Gram trainer can take these steps.

    It takes local algorithms whose direction is a linear combination of gradient, model and start.
    It takes whole passes, and projected steps only without momentum. Momentum changes the coefficients of every
    record in each step, so the inner products of :class:`Ball` would need the whole Gram matrix. A pass that stops
    early would leave most of a Gram matrix unused.
    """
    plain = sgd.steps is None and (sgd.projection is None or sgd.momentum == 0)
    return plain and sgd.algorithm.in_span


class Ball:
    """Ball of radius L around the start, for projected steps without momentum.

    It keeps the two inner products of the module docstring.
    """

    def __init__(self, sgd: LocalSgd, count: int, start_norm: float, device: torch.device) -> None:
        assert sgd.projection is not None
        assert supports_gram(sgd)
        self._rate, self._radius, self._start_norm = sgd.learning_rate, sgd.projection, start_norm
        self._kept = 1 - sgd.learning_rate * span_terms(sgd).decay
        self._with_start = torch.zeros(count, dtype=torch.float64, device=device)  # <A, Z0>
        self._with_self = torch.zeros_like(self._with_start)  # <A, A K>

    def step(
        self,
        slopes: Float32[Tensor, "g k b"],
        products: Float32[Tensor, "g k b"],
        grams: Float32[Tensor, "g b b"],
        logits: Float[Tensor, "g k b"],
        active: int,
    ) -> None:
        """Update the products for the step A <- (1 - eta lambda) A - eta G.

        Args:
            slopes: G at the records of the batch.
            products: A K at the batch, before the step.
            grams: K among the records of the batch.
            logits: Z0 at the batch.
            active: number of contributions that take the step; later rows do not change.
        """
        decay_factor, rate = self._kept, self._rate
        moves = slopes.double().mul_(-rate)
        met = torch.stack([products, torch.bmm(slopes, grams), logits])
        crossed, squared, started = (met * moves).sum((2, 3))[:, :active]
        with_self, with_start = self._with_self[:active], self._with_start[:active]
        # With s = 1 - eta lambda, `moves` = -eta G and A' = s A + moves:
        #     <A', Z0> = s <A, Z0> - eta <G, Z0>
        #     <A', A' K> = s^2 <A, A K> - 2 s eta <G, A K> + eta^2 <G, G K>
        with_self.mul_(decay_factor**2).add_(crossed.mul_(2 * decay_factor)).sub_(squared.mul_(rate))
        with_start.mul_(decay_factor).add_(started)

    def project_(self, coefficients: Float32[Tensor, "g k n"], scale: Float64[Tensor, "g 1 1"]) -> None:
        """Scale updates outside the ball back to its surface."""
        active = len(coefficients)
        with_start, with_self = self._with_start[:active], self._with_self[:active]
        shrink = scale.sub_(1)[:, 0, 0]
        # ||U||^2 = (c - 1)^2 ||W0||^2 + 2 (c - 1) <A, Z0> + <A, A K>.
        square = (shrink * self._start_norm).square_().add_(2 * shrink * with_start).add_(with_self)
        factor = (self._radius / square.clamp_(min=0).sqrt_()).clamp_(max=1.0)
        by_row = factor[:, None, None]
        coefficients.mul_(by_row.float())
        scale.mul_(by_row).add_(1)
        with_start.mul_(factor)
        with_self.mul_(factor.square_())


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """One step of an epoch.

    Args:
        active: number of contributions that have a batch left.
        batch: its records, in the order of the epoch.
        present: (rows, b) which of them are not padding; rows beyond ``active`` fill up a multiple of kernel shapes.
        rates: (rows, 1, b) 1 / size of the batch, 0 for padding.
    """

    active: int
    batch: slice
    present: Bool[Tensor, "rows b"]
    rates: Float32[Tensor, "rows 1 b"]

    @classmethod
    def from_batch(cls, active: int, batch: slice, present: Bool[Tensor, "g n"]) -> "Step":
        width = len(range(*batch.indices(present.shape[1])))
        chosen = present[: round_up_slots(active, width), batch].contiguous()
        rates = (chosen.float() / chosen.sum(-1, keepdim=True).clamp(min=1)).unsqueeze(1)
        return cls(active=active, batch=batch, present=chosen, rates=rates)


def _descend(
    sgd: LocalSgd,
    coefficients: Float32[Tensor, "g k n"],
    velocity: Float32[Tensor, "g k n"] | None,
    slopes: Float32[Tensor, "g k b"],
    places: Int64[Tensor, "g k b"] | None,
) -> None:
    """Take one step of SGD on the coefficients, in place.

    ``slopes`` belong to the records at ``places``; None means all records.
    """
    decay = span_terms(sgd).decay
    # Without momentum, A <- (1 - eta lambda) A - eta G; with momentum, B <- mu B + G + lambda A and A <- A - eta B.
    if velocity is None:
        if decay:
            coefficients.mul_(1 - sgd.learning_rate * decay)
        if places is None:
            coefficients.sub_(slopes, alpha=sgd.learning_rate)
        else:
            coefficients.scatter_add_(-1, places, slopes.mul_(-sgd.learning_rate))
        return
    velocity.mul_(sgd.momentum)
    if decay:
        velocity.add_(coefficients, alpha=decay)
    if places is None:
        velocity.add_(slopes)
    else:
        velocity.scatter_add_(-1, places, slopes)
    coefficients.sub_(velocity, alpha=sgd.learning_rate)
