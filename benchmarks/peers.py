"""What local training is compared with: the plain PyTorch loop that most frameworks run, on the same contributions."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import torch
from torch.nn import functional

from fedveil.data.records import Affine, Records
from fedveil.privacy.bounds import Clip
from fedveil.training.steps import LocalSgd
from fedveil.training.task import Task
from fedveil.training.trainer import Cohort

SILOS = 5
CLIP = Clip(norm=0.1)


def _plain_logistic(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.binary_cross_entropy_with_logits(outputs[:, 0], targets.float())


def _plain_cox(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    order = targets[:, 1].argsort(descending=True, stable=True)
    scores, event = outputs[order, 0], targets[order, 0]
    return (event * (scores.logcumsumexp(0) - scores)).mean()


PLAIN_LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "cross_entropy": functional.cross_entropy,
    "binary_cross_entropy": _plain_logistic,
    "cox": _plain_cox,
}


def synthetic(pairs: int) -> Cohort:
    """Return image-shaped records of this many (silo, user) pairs, 1 + Poisson(5) each."""
    rng = np.random.default_rng(0)
    user = np.repeat(np.arange(pairs, dtype=np.int32), 1 + rng.poisson(5, pairs))
    records = Records(
        features=rng.normal(size=(len(user), 28, 28)).astype(np.float32),
        targets=rng.integers(0, 10, len(user)),
        silo=user % np.int32(SILOS),
        user=user,
    )
    return Cohort.from_records(
        records, groups=records.by_silo_user(), n_silos=SILOS, scale=Affine(), device=torch.device("cpu")
    )


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
