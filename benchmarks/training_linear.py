"""Training of linear models in the span of their records: CPU time of one thread, bounds and sums included.

The peer, in the same run, is the plain PyTorch loop that most frameworks run (``load_state_dict``,
``torch.optim.SGD``, clip, add), on as many of the same contributions as a few seconds take. Rates are local
steps per second. Cases of real data need their files in the folder that FEDVEIL_DATA names, and are left out
where those are missing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from benchmarks.harness import Row, at_most, compared, cpu_seconds
from benchmarks.peers import CLIP, plain_loop, synthetic
from fedveil.data.catalogue import Allocation, catalogue, load
from fedveil.randomness import ExperimentRandomness
from fedveil.training.gram.trainer import GramTrainer
from fedveil.training.losses import load_loss
from fedveil.training.models import build_model
from fedveil.training.steps import LocalSgd
from fedveil.training.task import Task
from fedveil.training.trainer import Cohort, TrainJob, steps_per_member

PAIRS = 2_000


@dataclass(frozen=True, kw_only=True)
class Published:
    """A setting of ULDP-FL's experiments with zipf allocation and 50 local epochs.

    Args:
        name: of the data set.
        users: |U|.
        loss: of its linear model.
        outputs: of its linear model.
        local: rate and batch size of the paper.
        cpu_seconds: what a round may cost.
    """

    name: str
    users: int
    loss: str
    outputs: int
    local: LocalSgd
    cpu_seconds: float


HEART = LocalSgd(learning_rate=0.001, epochs=50, batch_size=4)
TCGA = LocalSgd(learning_rate=0.001, epochs=50, batch_size=8)
MNIST = LocalSgd(learning_rate=0.01, epochs=50, batch_size=64)
PUBLISHED = [
    Published(
        name="heart_disease", users=50, loss="binary_cross_entropy", outputs=1, local=HEART, cpu_seconds=0.1
    ),
    Published(name="tcga_brca", users=50, loss="cox", outputs=1, local=TCGA, cpu_seconds=0.3),
    *(
        Published(name="mnist", users=users, loss="cross_entropy", outputs=10, local=MNIST, cpu_seconds=60.0)
        for users in (1_000, 3_000, 10_000)
    ),
]


def rows(quick: bool) -> Iterator[Row]:
    """Yield the synthetic cases, then the published settings; ``quick`` leaves out MNIST."""
    torch.set_num_threads(1)
    yield from _synthetic(PAIRS, ((2, 40.0, 200), (50, 300.0, 20)), 3 if quick else 7)
    present = {entry.name for entry in catalogue() if entry.present}
    for case in PUBLISHED:
        if case.name not in present or (quick and case.name == "mnist"):
            continue
        population = load(case.name, n_users=case.users, allocation=Allocation(law="zipf"))
        records = population.train
        cohort = Cohort.from_records(
            records,
            groups=records.by_silo_user(),
            n_silos=population.n_silos,
            scale=population.scale,
            device=torch.device("cpu"),
        )
        task = _task(case.loss, case.outputs, records.features.shape[1:])
        named = f"{case.name}, {case.users:,} users, Q = {case.local.epochs}"
        ours, peer = _rates(task, case.local, cohort, 10, 3)
        yield compared(named, "steps/s", ours, peer, None)
        steps = int(steps_per_member(case.local, cohort, torch.arange(len(cohort.groups))).sum())
        yield at_most(f"{named}: a round", "CPU-s", steps / ours, case.cpu_seconds)


def smallest() -> Iterator[Row]:
    """Yield a synthetic case of few pairs."""
    yield from _synthetic(4, ((2, 40.0, 2),), 1)


def _synthetic(pairs: int, cases: Sequence[tuple[int, float, int]], repeats: int) -> Iterator[Row]:
    """Yield the rates of a softmax regression for (epochs, target, sample of the peer)."""
    cohort, task = synthetic(pairs), _task("cross_entropy", 10, (28, 28))
    for epochs, target, sample in cases:
        ours, peer = _rates(task, LocalSgd(learning_rate=0.1, epochs=epochs), cohort, sample, repeats)
        named = f"softmax regression 784 to 10, {pairs:,} pairs, {epochs} epochs"
        yield compared(named, "steps/s", ours, peer, target)


def _task(loss: str, outputs: int, shape: tuple[int, ...]) -> Task:
    model = build_model("linear", input_shape=shape, n_outputs=outputs, randomness=ExperimentRandomness(0))
    return Task(model=model, loss=load_loss(loss))


def _rates(task: Task, local: LocalSgd, cohort: Cohort, sample: int, repeats: int) -> tuple[float, float]:
    """Return local steps per CPU second: of a whole round, and of the loop over a sample of contributions."""
    everybody = torch.arange(len(cohort.groups))
    chosen = torch.from_numpy(np.random.default_rng(1).permutation(len(everybody))[:sample])
    ones = torch.ones(len(everybody), dtype=torch.float64)
    job = TrainJob(task.initial(), cohort, everybody, ones, CLIP, ExperimentRandomness(0), ("round", 1))
    seconds = cpu_seconds(
        partial(GramTrainer(task=task, local=local).sums, job),
        plain_loop(task, local, cohort, chosen),
        repeats=repeats,
    )
    ours, peer = (int(steps_per_member(local, cohort, who).sum()) for who in (everybody, chosen))
    return ours / seconds[0], peer / seconds[1]
