"""Train linear models in the span of their records: the Gram trainer (``trainer.name = "span"``).

The updates of a model of one linear layer are combinations of its records. After any number of epochs of SGD, with
mini-batches, momentum and weight decay, W = c W0 + A^T X. So steps, norms and clipping need only the n x n Gram
matrix K of a contribution's n records, whose size does not grow with the number of features. The clipped sum of all
contributions is one matrix product. Features are read twice per round, for the first logits and for that product:

    pass 1   Z0 = X W0^T for all records                                    Rows.logits
    steps    A, c of every contribution from K, Z0                          gram/steps.py
    bound    norms from K, A, Z0; coefficients                              products.coefficients
    pass 2   total of each silo = sum_i coefficient_i (A_i^T X_i + (c_i - 1) W0)

Gram matrices do not change while the same contributions take part, and are kept as long as they fit the memory. A
contribution with far more records than features is trained without them (:mod:`fedveil.training.gram.trainer`).
docs/theory/gram-trainer.md proves the bound and lists the differences from the other trainers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Float, Float32, Float64, Int64
from torch import Tensor
from torch.nn import functional

from fedveil.errors import ModelError
from fedveil.privacy.bounds import Bound
from fedveil.training.counters import batch_order
from fedveil.training.gram.layout import (
    GramPlan,
    Grams,
    Layout,
    LinearViews,
    linear_layer,
    single_blocks,
    split_linear,
)
from fedveil.training.gram.products import Gram, Lengths, coefficients, counts, round_to_grid
from fedveil.training.gram.steps import (
    Stack,
    Step,
    Trained,
    product,
    span_terms,
    supports_gram,
    train_batches,
    train_full_batch,
)
from fedveil.training.heap import keep_freed_memory
from fedveil.training.local_algorithms import direction
from fedveil.training.losses import Loss
from fedveil.training.record_sums import SiloSums
from fedveil.training.shapes import padded_sizes, round_up_slots, single_threaded
from fedveil.training.state_leak_check import check_algorithm_unchanged, check_loss_unchanged
from fedveil.training.steps import LocalSgd, as_sgd, project_
from fedveil.training.task import Task
from fedveil.training.trainer import (
    Cohort,
    PartitionedTrainer,
    Progress,
    ProgressMonitor,
    Sums,
    TrainJob,
    partition_by_key,
    steps_per_member,
)

# --- primal contributions -----------------------------------------------------------------------------------
# Train linear models in plain batches, for contributions with more records than features.
#
# The Gram matrix of such a contribution would be larger than its records. Several contributions are trained in one
# batch. A step is two batched matrix products and reads only the records of its batch. Shapes follow from a
# contribution's own number of records and from public facts (:mod:`fedveil.training.shapes`).


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
        members = plan.primal[widths == width]
        members = members[np.argsort(-plan.sizes[members], kind="stable")]
        record_bytes = 4 * plan.cohort.features[0].numel() * width
        count = round_up_slots(max(1, _CHUNK_BYTES // (3 * record_bytes + 16 * len(start))), width)
        for first in range(0, len(members), count):
            chosen = torch.from_numpy(members[first : first + count])
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
    on_device = present.to(start.device)
    steps = [
        Step.from_batch(int((sizes > first).sum()), slice(first, first + width), on_device)
        for first in range(0, longest, width)
    ]
    deltas = start.new_zeros(len(chosen), len(start))
    velocity, gradient, models = (torch.zeros_like(deltas) for _ in range(3))
    # Views of every row, made once. A step reads and writes a prefix of them.
    read, written = split_linear(task, models), split_linear(task, gradient)
    for epoch in range(sgd.epochs):
        order = batch_order(seeds, sizes, epoch, sgd.batch_size)
        order = torch.nn.functional.pad(order, (0, longest - order.shape[1]))
        records = table[firsts + torch.where(present, order, 0)]
        for step in steps:
            active, rows = step.active, len(step.present)
            features, targets = cohort.batch(records[:rows, step.batch])
            model = torch.add(start, deltas[:rows], out=models[:rows])
            _write_gradient(
                task.loss, step, _first(read, rows), features.flatten(2), targets, _first(written, rows)
            )
            if sgd.algorithm.changes:
                gradient[:rows] = direction(sgd.algorithm, gradient[:rows], model, start)
            # v <- mu v + grad + lambda w; Delta <- Delta - eta v. The update is kept, not the model, so its low bits
            # survive.
            velocity[:active].mul_(sgd.momentum).add_(gradient[:active])
            if sgd.weight_decay:
                velocity[:active].add_(model[:active], alpha=sgd.weight_decay)
            deltas[:active].sub_(velocity[:active], alpha=sgd.learning_rate)
            if sgd.projection is not None:
                project_(deltas[:active], None, sgd.projection)
    return deltas


def _first(
    layer: LinearViews, rows: int
) -> tuple[Float32[Tensor, "rows k p"], Float32[Tensor, "rows k"] | None]:
    """Return the views of the first models."""
    weight, bias = layer
    return weight[:rows], None if bias is None else bias[:rows]


def _write_gradient(
    loss: Loss,
    step: Step,
    models: LinearViews,
    features: Float32[Tensor, "g b p"],
    targets: Tensor,
    gradients: LinearViews,
) -> None:
    """Write the gradients of the mean loss of g batches, each at its own model, into ``gradients``."""
    (weight, bias), (weight_gradient, bias_gradient) = models, gradients
    outputs = weight @ features.mT
    if bias is not None:
        outputs += bias.unsqueeze(-1)
    present = step.present.unsqueeze(1)
    slopes = torch.where(present, loss.slopes(outputs, targets, step.present), 0) * step.rates
    weight_gradient.copy_(slopes @ features)
    if bias_gradient is not None:
        bias_gradient.copy_(slopes.sum(-1))


# --- trainer ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class GramTrainer(PartitionedTrainer):
    """Trainer of linear models in the span of their records.

    It implements :class:`~fedveil.training.trainer.Trainer`.

    Args:
        task: a model that :func:`linear_layer` recognises, with any loss.
        local: the local steps of each contribution.
        memory: bytes of Gram matrices that are kept between rounds.

    Raises:
        ModelError: the model is not one linear layer, or the steps end early, or they are projected and have
            momentum.
    """

    name: ClassVar[str] = "gram"

    memory: int = 256 << 20
    # The trainers of all rounds share this list, so that Gram matrices survive a round.
    _last: list[GramPlan] = field(default_factory=list, repr=False, compare=False)

    def __post_init__(self) -> None:
        if linear_layer(self.task.model) is None:
            raise ModelError('trainer "gram" is for models that are one trainable nn.Linear; use "auto"')
        if not supports_gram(as_sgd(self.local)):
            raise ModelError(
                'trainer "gram" neither stops a pass early (local.steps), nor projects steps with momentum, nor runs '
                'local algorithms whose slope is not a linear combination of gradient, model and start; use "auto"'
            )

    def partition(self, job: TrainJob, rank: int, world: int) -> Int64[Tensor, " share"]:
        """Return :func:`partition_by_key`, because each process rounds the total of its share."""
        return partition_by_key(job, rank, world)

    @torch.no_grad()
    @keep_freed_memory()
    def sums(self, job: TrainJob, progress: Progress | None = None) -> Sums:
        """Return the bounded sums; see :meth:`fedveil.training.trainer.Trainer.sums`.

        Raises:
            ModelError: an l1 bound, because Gram matrices give l2 norms only.
        """
        if job.bound.order != 2:
            raise ModelError('trainer "gram" knows l2 norms alone, and the bound is l1; use "vmap"')
        job = job.on_device()
        # The model itself is never called, so only the loss and the local algorithm can keep state.
        with (
            single_threaded(),
            check_loss_unchanged(self.task.loss),
            check_algorithm_unchanged(self.local, job.start),
        ):
            return self._sums(job, progress)

    def _sums(self, job: TrainJob, progress: Progress | None) -> Sums:
        cohort, members = job.cohort, job.members.cpu()
        # A silo's records must be adjacent in a fixed order: its total is one product, rounded once.
        ascending = torch.from_numpy(np.lexsort((members.numpy(), cohort.sum_rows[members.numpy()])))
        ordered = replace(job, members=members).subset(ascending)
        plan = self._plan(cohort, ordered.members.numpy())
        training = _Training(self.task, as_sgd(self.local), plan, job.start, ordered.seeds)
        steps = steps_per_member(self.local, cohort, ordered.members)
        to_do = int(steps.sum())
        watch = ProgressMonitor(progress, to_do)
        for finished in training.run():
            watch.add_steps(int(steps[finished].sum()))
        total, norms = training.bounded_sums(job.bound, ordered.weights)
        for chosen, deltas in training.primal():
            primal = SiloSums(cohort.n_silos, self.task.dimension, job.bound, cohort.device)
            silos = cohort.silos(ordered.members[chosen])
            norms[chosen] = primal.add_(deltas, ordered.weights[chosen], silos)
            total += primal.total()
            watch.add_steps(int(steps[chosen].sum()))
        returned = torch.empty_like(norms)
        returned[ascending] = norms
        return Sums(total=total, norms=returned, nonfinite=int(norms.isnan().sum()), steps=to_do)

    def _plan(self, cohort: Cohort, members: Int64[np.ndarray, "m"]) -> GramPlan:
        """Return the plan of the last round if it fits the same contributions, else a new plan."""
        if not (self._last and self._last[0].fits(cohort, members)):
            layer = linear_layer(self.task.model)
            assert layer is not None
            self._last[:] = [
                GramPlan.build(
                    cohort,
                    members,
                    bias=layer.bias is not None,
                    batch_size=as_sgd(self.local).batch_size,
                    by_row=self.task.loss.by_row and as_sgd(self.local).projection is None,
                    memory=self.memory,
                )
            ]
        return self._last[0]


class _Training:
    """One round of the contributions of a plan: their coefficients and the terms of their lengths."""

    def __init__(
        self,
        task: Task,
        sgd: LocalSgd,
        plan: GramPlan,
        start: Float32[Tensor, "d"],
        seeds: Int64[Tensor, "m"],
    ) -> None:
        self._task, self._loss, self._sgd, self._plan = task, task.loss, sgd, plan
        self._start, self._seeds = start, seeds
        weight, bias = split_linear(task, start)
        self._logits: Float[Tensor, "r_plus_1 k"] = plan.rows.logits(
            weight.double() if span_terms(sgd).moves_start else weight, bias
        )
        targets = plan.cohort.targets[torch.from_numpy(plan.rows.index).to(plan.cohort.targets.device)]
        self._targets = torch.cat([targets, targets[:1]]).to(plan.cohort.device)
        sizes = torch.from_numpy(np.append(plan.sizes, 0)).to(plan.cohort.device)
        self._rates = torch.where(plan.owner < 0, 0, 1 / sizes[plan.owner].float())
        self._coefficients = torch.zeros(self._logits.shape, dtype=torch.float32, device=start.device)
        self._square = torch.zeros(len(plan.owner), dtype=torch.float64, device=start.device)
        self._mass = torch.zeros_like(self._square)
        self._shrink = torch.zeros(len(plan.members), dtype=torch.float64, device=start.device)

    def run(self) -> Iterator[Int64[np.ndarray, "g"]]:
        """Train every contribution, and yield the finished ones."""
        plan = self._plan
        for layout in plan.blocks:
            spoilt = self._train_blocks(layout, plan.grams(layout))
            # An overflow spoils the finite contributions of its block (0 * inf = NaN), so each is trained again in a
            # block of the same width: products of one shape give the bits that it would have had among finite ones.
            for alone in single_blocks(spoilt, plan.held, _REDONE_ENTRIES):
                self._train_blocks(alone, plan.compute_grams(alone))
            yield layout.members
        for layout in plan.stacks:
            self._train_stack(layout, plan.grams(layout))
            yield layout.members

    def primal(self) -> Iterator[tuple[Int64[Tensor, "g"], Float32[Tensor, "g d"]]]:
        """Yield the contributions that are not trained in the span, with their updates."""
        return train_primal(self._task, self._sgd, self._plan, self._start, self._seeds)

    def _train_blocks(self, layout: Layout, grams: Grams) -> Int64[np.ndarray, "g"]:
        """Train contributions that share blocks, and return the members of blocks that are not finite."""
        records = torch.from_numpy(layout.records)
        logits = self._logits[records].mT.float().contiguous()
        trained = train_full_batch(
            self._loss, self._sgd, grams.rounded, logits, self._targets[records], self._rates[records]
        )
        self._store(layout, trained, grams.exact)
        finite = trained.coefficients.isfinite().flatten(1).all(1).cpu().numpy()
        spoilt: Int64[np.ndarray, g] = layout.members[~finite[layout.setting]]
        return spoilt

    def _train_stack(self, layout: Layout, grams: Grams) -> None:
        """Train contributions that have one row each."""
        records = torch.from_numpy(layout.records)
        logits = self._logits[records].mT.float().contiguous()
        padding = len(records) - len(layout.members)
        sizes = torch.from_numpy(np.pad(self._plan.sizes[layout.members], (0, padding)))
        seeds = functional.pad(self._seeds[torch.from_numpy(layout.members)], (0, padding))
        trained = train_batches(
            self._loss,
            self._sgd,
            grams.rounded,
            logits,
            self._targets[records],
            Stack(
                sizes=sizes,
                seeds=seeds,
                step=layout.step,
                tile=layout.tile,
                start_norm=float(self._start.double().norm()),
            ),
        )
        self._store(layout, trained, grams.exact)

    def _store(self, layout: Layout, trained: Trained, grams: list[Gram]) -> None:
        """Store the coefficients of each record and its terms of the length of the update."""
        records = torch.from_numpy(layout.records)
        self._coefficients[records] = trained.coefficients.mT
        self._shrink[torch.from_numpy(layout.members)] = trained.shrink[torch.from_numpy(layout.setting)]
        for rows, products in grams:
            read = records[rows, : products.shape[1]]
            exact = trained.coefficients[rows, :, : products.shape[1]].double()
            # ||Delta||^2 = (c - 1)^2 ||W0||^2 + sum over records of [2 (c - 1) <a_r, z0_r> + <a_r, (A K)_r>]; the
            # second term exists only with weight decay (c != 1).
            square = _over_outputs(exact * product(exact, products))
            if span_terms(self._sgd).moves_start:
                square += 2 * trained.shrink[rows, None] * _over_outputs(exact * self._logits[read].mT)
            self._square[read] = square
            self._mass[read] = _over_outputs(exact.square()).sqrt() * products.diagonal(dim1=1, dim2=2).sqrt()

    def _lengths(self) -> Lengths:
        """Return the computed length of every update, with its error terms."""
        plan, start = self._plan, self._start.double().norm()
        owner = plan.owner[:-1]
        square = (self._shrink * start).square().index_add_(0, owner, self._square[:-1])
        mass = (self._shrink.abs() * start).index_add_(0, owner, self._mass[:-1])
        outputs = self._logits.shape[1]
        sizes = torch.from_numpy(plan.sizes).to(start.device).double()
        return Lengths(square=square, mass=mass, terms=len(self._start) + sizes * (outputs + 1) + 16.0)

    def bounded_sums(
        self, bound: Bound, weights: Float64[Tensor, "m"]
    ) -> tuple[Float64[Tensor, "silos d"], Float64[Tensor, "m"]]:
        """Return the bounded sum of each silo and the norm of each update.

        Returns:
            The sums, (silos, d) float64, and the norms before the bound, (m,) float64.
        """
        plan, lengths = self._plan, self._lengths()
        factors = coefficients(bound, lengths, weights, len(self._start))
        owner = plan.owner[:-1]
        factor = factors[owner].unsqueeze(-1)
        rows = torch.where(factor > 0, self._coefficients[:-1].double() * factor, 0)
        counted = counts(bound, weights, len(self._start))
        of_record = counted[owner].cpu().numpy()
        dropped = bool(lengths.norms.isnan().any())
        total = torch.zeros(
            plan.cohort.n_silos, len(self._start), dtype=torch.float64, device=self._start.device
        )
        for silo, first, last in plan.silo_ranges:
            members = slice(int(owner[first]), int(owner[last - 1]) + 1)
            chosen = first + np.flatnonzero(of_record[first:last])
            if not len(chosen):
                continue
            exact = plan.rows.weighted_sum(rows, chosen, dropped)
            if span_terms(self._sgd).moves_start:
                shrunk = torch.where(factors > 0, factors * self._shrink, 0)[members][counted[members]]
                exact += shrunk.sum() * self._start.double()
            total[silo] = round_to_grid(bound, exact, float(weights[members].sum()))
        return total, lengths.norms


def _over_outputs(values: Float64[Tensor, "g k n"]) -> Float64[Tensor, "g n"]:
    """Sum over the outputs, first to last.

    The order of torch's sum would depend on the position of a record in its row.
    """
    return values.cumsum(1)[:, -1]


_REDONE_ENTRIES = 1 << 20
