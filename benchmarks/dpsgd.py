"""DP-SGD in four silos of 180 records, batches of 4: CPU seconds against Opacus, which trains one silo at a time.

Both clip single records, add Gaussian noise and take every record into a batch by a coin of its own. Ours draws secure
randomness, samples noise on a grid exactly, and adds whole numbers; Opacus is run as it comes, from torch's generator.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator

import numpy as np
import torch
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer
from torch import nn

from benchmarks.harness import Row, cpu_seconds
from fedveil.data.records import Affine, Records
from fedveil.privacy.bounds import Clip
from fedveil.privacy.noise import grid_gaussian
from fedveil.randomness import ExperimentRandomness, PrivacyRandomness
from fedveil.training.dpsgd import DpSgdTrainer
from fedveil.training.losses import load_loss
from fedveil.training.steps import LocalDpSgd
from fedveil.training.task import Task
from fedveil.training.trainer import Cohort, TrainJob

SILOS, RECORDS, FEATURES, BATCH = 4, 180, 13, 4
CLIP, NOISE, RATE = 0.1, 5.0, 0.001
MODELS = {
    "logistic regression": nn.Linear(FEATURES, 1),
    "network of 64 hidden units": nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, 1)),
}


def rows(quick: bool) -> Iterator[Row]:
    """A round of every model, in all silos; the ratio is how many times less CPU time ours takes."""
    yield from compared(5 if quick else 25)


def smallest() -> Iterator[Row]:
    """One pass over few records."""
    yield from compared(1, records=8, repeats=1)


def compared(epochs: int, records: int = RECORDS, repeats: int = 3) -> Iterator[Row]:
    """Some epochs over the records of every silo."""
    warnings.filterwarnings("ignore", module="opacus")
    features = np.random.default_rng(0).normal(size=(SILOS * records, FEATURES)).astype(np.float32)
    targets = (features[:, 0] > 0).astype(np.float32)
    torch.set_num_threads(1)
    for name, model in MODELS.items():
        ours, peer = cpu_seconds(
            _ours(model, features, targets, epochs),
            lambda model=model: _opacus(model, features, targets, epochs),  # type: ignore[misc]
            repeats=repeats,
        )
        yield Row(
            case=f"{name}: {epochs} epochs in {SILOS} silos; peer: Opacus",
            unit="CPU s",
            ours=ours,
            peer=peer,
            ratio=peer / ours,
        )


def _ours(model: nn.Module, features: np.ndarray, targets: np.ndarray, epochs: int) -> Callable[[], object]:
    silo = np.arange(len(features), dtype=np.int32) % SILOS
    records = Records(
        features=features, targets=targets, silo=silo, user=np.arange(len(silo), dtype=np.int32)
    )
    cohort = Cohort.from_records(
        records, groups=records.by_silo(SILOS), n_silos=SILOS, scale=Affine(), device=torch.device("cpu")
    )
    task = Task(model=model, loss=load_loss("binary_cross_entropy"))
    local = LocalDpSgd(learning_rate=RATE, epochs=epochs, batch_size=BATCH, noise_multiplier=NOISE)
    trainer = DpSgdTrainer(task=task, local=local, noise=grid_gaussian, privacy=PrivacyRandomness.system())
    job = TrainJob(
        task.initial(),
        cohort,
        torch.arange(SILOS),
        torch.ones(SILOS, dtype=torch.float64),
        Clip(norm=CLIP),
        ExperimentRandomness(0),
        ("round", 1),
    )
    return lambda: trainer.sums(job)


def _opacus(model: nn.Module, features: np.ndarray, targets: np.ndarray, epochs: int) -> None:
    records = len(features) // SILOS
    steps = epochs * -(-records // BATCH)
    for silo in range(SILOS):
        mine = torch.from_numpy(features[silo::SILOS]), torch.from_numpy(targets[silo::SILOS])
        private = GradSampleModule(copy.deepcopy(model))
        optimizer = DPOptimizer(
            torch.optim.SGD(private.parameters(), lr=RATE),
            noise_multiplier=NOISE,
            max_grad_norm=CLIP,
            expected_batch_size=BATCH,
        )
        for _ in range(steps):
            joined = torch.rand(records) < BATCH / records
            if not joined.any():
                continue
            optimizer.zero_grad()
            outputs = private(mine[0][joined])[:, 0]
            nn.functional.binary_cross_entropy_with_logits(outputs, mine[1][joined]).backward()
            optimizer.step()
