"""Training of linear models in the span of their records: CPU time of one thread, bounds and sums included.

The peer, in the same run, is the plain PyTorch loop that most frameworks run (``load_state_dict``,
``torch.optim.SGD``, clip, add), on as many of the same contributions as a few seconds take. Rates are local
steps per second. Cases of real data need their files in the folder that FEDVEIL_DATA names, and are left out
where those are missing.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch.nn import functional

from benchmarks.harness import Row, at_most, compared, cpu_seconds
from fedveil.local.loop import steps_per_member
from fedveil.local.losses import load_loss
from fedveil.local.models import build_model
from fedveil.local.span import SpanTrainer
from fedveil.local.steps import LocalSgd
from fedveil.local.task import Task
from fedveil.local.trainer import Cohort
from fedveil.population.catalogue import Allocation, catalogue, load
from fedveil.population.records import Affine, Records
from fedveil.privacy.bounds import Clip
from fedveil.randomness import ExperimentRandomness

PAIRS = 2_000
SILOS = 5
CLIP = Clip(norm=0.1)


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


def _plain_logistic(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.binary_cross_entropy_with_logits(outputs[:, 0], targets.float())


def _plain_cox(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    order = targets[:, 1].argsort(descending=True, stable=True)
    scores, event = outputs[order, 0], targets[order, 0]
    return (event * (scores.logcumsumexp(0) - scores)).mean()


PLAIN_LOSSES = {
    "cross_entropy": functional.cross_entropy,
    "binary_cross_entropy": _plain_logistic,
    "cox": _plain_cox,
}


def rows(quick: bool) -> Iterator[Row]:
    """Yield the synthetic cases, then the published settings; ``quick`` leaves out MNIST."""
    torch.set_num_threads(1)
    repeats = 3 if quick else 7
    cohort = synthetic()
    task = _task("cross_entropy", 10, (28, 28))
    for epochs, target, sample in ((2, 40.0, 200), (50, 300.0, 20)):
        ours, peer = _rates(task, LocalSgd(learning_rate=0.1, epochs=epochs), cohort, sample, repeats)
        named = f"softmax regression 784 to 10, {PAIRS:,} pairs, {epochs} epochs"
        yield compared(named, "steps/s", ours, peer, target)
    present = {entry.name for entry in catalogue() if entry.present}
    for case in PUBLISHED:
        if case.name not in present or (quick and case.name == "mnist"):
            continue
        population = load(case.name, n_users=case.users, allocation=Allocation(law="zipf"))
        records = population.train
        cohort = Cohort.of(
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


def synthetic() -> Cohort:
    """Return image-shaped records of 2,000 (silo, user) pairs, 1 + Poisson(5) each."""
    rng = np.random.default_rng(0)
    user = np.repeat(np.arange(PAIRS, dtype=np.int32), 1 + rng.poisson(5, PAIRS))
    records = Records(
        features=rng.normal(size=(len(user), 28, 28)).astype(np.float32),
        targets=rng.integers(0, 10, len(user)),
        silo=user % np.int32(SILOS),
        user=user,
    )
    return Cohort.of(
        records, groups=records.by_silo_user(), n_silos=SILOS, scale=Affine(), device=torch.device("cpu")
    )


def _task(loss: str, outputs: int, shape: tuple[int, ...]) -> Task:
    model = build_model("linear", input_shape=shape, n_outputs=outputs, randomness=ExperimentRandomness(0))
    return Task(model=model, loss=load_loss(loss))


def _rates(task: Task, local: LocalSgd, cohort: Cohort, sample: int, repeats: int) -> tuple[float, float]:
    """Return local steps per CPU second: of a whole round, and of the loop over a sample of contributions."""
    everybody = torch.arange(len(cohort.groups))
    chosen = torch.from_numpy(np.random.default_rng(1).permutation(len(everybody))[:sample])
    seconds = cpu_seconds(
        partial(
            SpanTrainer(task=task, local=local).sums,
            task.initial(),
            cohort,
            everybody,
            torch.ones(len(everybody), dtype=torch.float64),
            CLIP,
            ExperimentRandomness(0),
            ("round", 1),
        ),
        plain_loop(task, local, cohort, chosen),
        repeats=repeats,
    )
    ours, peer = (int(steps_per_member(local, cohort, who).sum()) for who in (everybody, chosen))
    return ours / seconds[0], peer / seconds[1]


def plain_loop(task: Task, local: LocalSgd, cohort: Cohort, members: torch.Tensor) -> Callable[[], object]:
    """Return plain PyTorch code for these contributions: one module, one optimiser each, sums per silo."""
    loss = PLAIN_LOSSES[task.loss.name]
    network = copy.deepcopy(task.model)
    start = copy.deepcopy(network.state_dict())
    first = torch.nn.utils.parameters_to_vector(network.parameters()).detach().clone()

    def one_round() -> object:
        totals = torch.zeros(cohort.n_silos, len(first))
        for member in members.tolist():
            features, targets = cohort.batch(torch.from_numpy(cohort.groups.members(member)))
            network.load_state_dict(start)
            optimizer = torch.optim.SGD(network.parameters(), lr=local.learning_rate)
            for _ in range(local.epochs):
                for batch in torch.randperm(len(features)).split(local.batch_size or len(features)):
                    optimizer.zero_grad()
                    loss(network(features[batch]), targets[batch]).backward()
                    optimizer.step()
            with torch.no_grad():
                delta = torch.nn.utils.parameters_to_vector(network.parameters()) - first
                silo = cohort.groups.silo[member]
                totals[silo] += delta * min(1.0, CLIP.norm / max(float(delta.norm()), 1e-12))
        return totals

    return one_round
