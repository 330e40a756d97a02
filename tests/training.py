"""Small cohorts and tasks that the tests of local training share."""

import numpy as np
import torch

from fedveil.data.records import Affine, Groups, Records
from fedveil.randomness import ExperimentRandomness
from fedveil.training.dpsgd import RecordBatch, RecordSums
from fedveil.training.losses import load_loss
from fedveil.training.models import build_model
from fedveil.training.task import Task
from fedveil.training.trainer import Cohort


def task_of(model: str, input_shape: tuple[int, ...] = (6,), n_outputs: int = 3) -> Task:
    """Build a shipped model with its usual loss and a fixed initial state."""
    return Task(
        model=build_model(
            model, input_shape=input_shape, n_outputs=n_outputs, randomness=ExperimentRandomness(1)
        ),
        loss=load_loss("cross_entropy"),
    )


def cohort_of(
    sizes: list[int], input_shape: tuple[int, ...] = (6,), n_classes: int = 3, n_silos: int = 2, seed: int = 0
) -> Cohort:
    """Make one contribution per size (0 allowed), user i in silo i mod n_silos, with Gaussian features."""
    rng = np.random.default_rng(seed)
    n = max(1, sum(sizes))
    size = np.array(sizes, dtype=np.int64)
    user = np.arange(len(sizes), dtype=np.int32)
    records = Records(
        features=rng.normal(size=(n, *input_shape)).astype(np.float32),
        targets=rng.integers(0, n_classes, n).astype(np.int64),
        silo=np.zeros(n, dtype=np.int32),
        user=np.zeros(n, dtype=np.int32),
    )
    groups = Groups(
        order=rng.permutation(n).astype(np.int64),
        start=np.cumsum(size) - size,
        size=size,
        silo=(user % n_silos).astype(np.int32),
        user=user,
    )
    return Cohort.from_records(
        records, groups=groups, n_silos=n_silos, scale=Affine(), device=torch.device("cpu")
    )


def gradient_sum(
    sums: RecordSums, model: torch.Tensor, rows: torch.Tensor, seeds: torch.Tensor
) -> torch.Tensor:
    """Return the sum of the clipped gradients of some records at one model."""
    return sums.gradient_sums(model[None], [RecordBatch(rows=rows, seeds=seeds)])[0]


def everyone(cohort: Cohort) -> tuple[torch.Tensor, torch.Tensor]:
    """Return every member of a cohort, with weight 1."""
    count = len(cohort.groups)
    return torch.arange(count), torch.ones(count, dtype=torch.float64)
