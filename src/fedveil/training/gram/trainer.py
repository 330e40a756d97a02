"""The trainer of linear models: contributions learn in the span of their records.

A model that is one linear layer only ever moves along its records: after any number of epochs of SGD, with
mini-batches, momentum and weight decay, W = c W0 + A^T X. So steps, norms and clipping need the n x n Gram matrix of a
contribution's n records and nothing that grows with the number of features; and the clipped sum of all contributions is
one matrix product. Features are read twice a round, for the first logits and for that product.

    pass 1   Z0 = X W0^T for all records                                    span_features
    steps    A, c of every contribution from K, Z0                          span_steps
    bound    norms from K, A, Z0; coefficients                              span_sums
    pass 2   total of each silo = sum_i coefficient_i (A_i^T X_i + (c_i - 1) W0)

Gram matrices do not change while the same contributions take part, and are kept as long as they fit the memory. A
contribution with far more records than features is trained the plain way (:mod:`fedveil.training.gram.primal`).
docs/theory/span-training.md proves the bound and says what differs from the other trainers.
"""

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
from fedveil.training.gram.layout import GramPlan, Grams, Layout, linear_layer, single_blocks, split_linear
from fedveil.training.gram.primal import train_primal
from fedveil.training.gram.products import Gram, Lengths, coefficients, counts, round_to_grid
from fedveil.training.gram.steps import (
    Stack,
    Trained,
    product,
    supports_gram,
    train_batches,
    train_full_batch,
)
from fedveil.training.shapes import single_threaded
from fedveil.training.silo_sums import SiloSums
from fedveil.training.state_leak_check import check_loss_unchanged
from fedveil.training.steps import LocalSgd, as_sgd
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


@dataclass(frozen=True, kw_only=True)
class GramTrainer(PartitionedTrainer):
    """Trains linear models in the span of their records; implements :class:`~fedveil.training.trainer.Trainer`.

    Args:
        task: a model that :func:`linear_layer` recognises, with any loss.
        local: what each contribution computes.
        memory: bytes of Gram matrices that are kept between rounds.

    Raises:
        ModelError: the model is not one linear layer, the steps are projected and have momentum, or they end early.
    """

    name: ClassVar[str] = "gram"

    memory: int = 256 << 20
    _last: list[GramPlan] = field(
        default_factory=list, repr=False, compare=False
    )  # the trainers of all rounds share it

    def __post_init__(self) -> None:
        if linear_layer(self.task.model) is None:
            raise ModelError('trainer "gram" is for models that are one trainable nn.Linear; use "auto"')
        if not supports_gram(as_sgd(self.local)):
            raise ModelError(
                'trainer "gram" neither stops a pass early (local.steps) nor projects steps with momentum; use "auto"'
            )

    def partition(self, job: TrainJob, rank: int, world: int) -> Int64[Tensor, " share"]:
        """Return :func:`partition_by_key`: each process rounds the total of its share."""
        return partition_by_key(job, rank, world)

    @torch.no_grad()
    def sums(self, job: TrainJob, progress: Progress | None = None) -> Sums:
        """Return the bounded sums; see :meth:`fedveil.training.trainer.Trainer.sums`.

        Raises:
            ModelError: an l1 bound: the Gram matrices tell l2 norms alone.
        """
        if job.bound.order != 2:
            raise ModelError('trainer "gram" knows l2 norms alone, and the bound is l1; use "vmap"')
        with single_threaded(), check_loss_unchanged(self.task.loss):  # a linear model is never called
            return self._sums(job.on_device(), progress)

    def _sums(self, job: TrainJob, progress: Progress | None) -> Sums:
        cohort, members = job.cohort, job.members.cpu()
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
        """Return the plan of the last round if it is for the same contributions, else a new one."""
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
    """One round of the contributions of a plan: their coefficients, and what is known of their lengths."""

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
            weight.double() if sgd.weight_decay else weight, bias
        )
        targets = plan.cohort.targets[torch.from_numpy(plan.rows.index).to(plan.cohort.targets.device)]
        self._targets = torch.cat([targets, targets[:1]]).to(plan.cohort.device)
        sizes = torch.from_numpy(np.append(plan.sizes, 0)).to(plan.cohort.device)
        self._rates = torch.where(plan.owner < 0, 0, 1 / sizes[plan.owner]).float()
        self._coefficients = torch.zeros(self._logits.shape, dtype=torch.float32, device=start.device)
        self._square = torch.zeros(len(plan.owner), dtype=torch.float64, device=start.device)
        self._mass = torch.zeros_like(self._square)
        self._shrink = torch.zeros(len(plan.members), dtype=torch.float64, device=start.device)

    def run(self) -> Iterator[Int64[np.ndarray, "g"]]:
        """Train every contribution; yield which are finished."""
        plan = self._plan
        for layout in plan.blocks:
            spoilt = self._train_blocks(layout, plan.grams(layout))
            # Products of one shape: what is trained again gets the update that it would have had beside finite ones.
            for alone in single_blocks(spoilt, plan.held, _REDONE_ENTRIES):
                self._train_blocks(alone, plan.compute_grams(alone))
            yield layout.members
        for layout in plan.stacks:
            self._train_stack(layout, plan.grams(layout))
            yield layout.members

    def primal(self) -> Iterator[tuple[Int64[Tensor, "g"], Float32[Tensor, "g d"]]]:
        """Yield contributions that are not trained in the span, and their updates."""
        return train_primal(self._task, self._sgd, self._plan, self._start, self._seeds)

    def _train_blocks(self, layout: Layout, grams: Grams) -> Int64[np.ndarray, "g"]:
        """Train contributions that share blocks; return those of blocks that are not finite."""
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
        """Train contributions that have a row each."""
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
        """Keep the coefficients of each record and its part in the length of the update."""
        records = torch.from_numpy(layout.records)
        self._coefficients[records] = trained.coefficients.mT
        self._shrink[torch.from_numpy(layout.members)] = trained.shrink[torch.from_numpy(layout.setting)]
        for rows, products in grams:
            read = records[rows, : products.shape[1]]
            exact = trained.coefficients[rows, :, : products.shape[1]].double()
            square = _over_outputs(exact * product(exact, products))
            if self._sgd.weight_decay:
                square += 2 * trained.shrink[rows, None] * _over_outputs(exact * self._logits[read].mT)
            self._square[read] = square
            self._mass[read] = _over_outputs(exact.square()).sqrt() * products.diagonal(dim1=1, dim2=2).sqrt()

    def _lengths(self) -> Lengths:
        """Return what is known of the length of every update."""
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
        """Return the bounded sum of each silo and the norm of each update."""
        plan, lengths = self._plan, self._lengths()
        factors = coefficients(bound, lengths, weights, len(self._start))
        owner = plan.owner[:-1]
        factor = factors[owner].unsqueeze(-1)
        rows = torch.where(factor > 0, self._coefficients[:-1].double() * factor, 0)
        taken = counts(bound, weights, len(self._start))
        of_record = taken[owner].cpu().numpy()
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
            if self._sgd.weight_decay:
                shrunk = torch.where(factors > 0, factors * self._shrink, 0)[members][taken[members]]
                exact += shrunk.sum() * self._start.double()
            total[silo] = round_to_grid(bound, exact, float(weights[members].sum()))
        return total, lengths.norms


def _over_outputs(values: Float64[Tensor, "g k n"]) -> Float64[Tensor, "g n"]:
    """Sum over the outputs, first to last: the order of torch's sum depends on where in its row a record lies."""
    return values.cumsum(1)[:, -1]


_REDONE_ENTRIES = 1 << 20
