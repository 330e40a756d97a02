"""One round of private federated averaging in pfl 0.6, for ``benchmarks.simulation``.

Runs alone, in an interpreter that has pfl (whose pins do not go with fedveil's): ``python peer.py linear 1000 3``
prints the CPU seconds of every round as JSON. Imports nothing of fedveil; the folder holds nothing else, because a
script's folder is the first in which Python looks for modules.
"""

import json
import resource
import sys
import time

import numpy as np
import torch
from networks import network
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from pfl.privacy.gaussian_mechanism import GaussianMechanism
from pfl.privacy.privacy_mechanism import CentrallyAppliedPrivacyMechanism

RECORDS, COHORT, EPOCHS, BATCH = 50, 50, 5, 10


class Classifier(torch.nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.network = network(name)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.network(features)

    def loss(self, features: torch.Tensor, targets: torch.Tensor, eval: bool = False) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self(features), targets)

    def metrics(
        self, features: torch.Tensor, targets: torch.Tensor, eval: bool = False
    ) -> dict[str, Weighted]:
        return {"loss": Weighted(self.loss(features, targets).item() * len(features), len(features))}


class Clock(TrainingProcessCallback):
    def __init__(self) -> None:
        self.last, self.rounds = time.process_time(), []

    def on_train_begin(self, *, model: object) -> Metrics:
        self.last = time.process_time()
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: object, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        now = time.process_time()
        self.rounds.append(now - self.last)
        self.last = now
        return False, Metrics()


def main() -> None:
    name, clients, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (clients * RECORDS, 1, 28, 28), dtype=np.uint8)
    labels = random.integers(0, 10, clients * RECORDS)

    def user(number: int) -> Dataset:
        rows = slice(number * RECORDS, (number + 1) * RECORDS)
        features = torch.from_numpy(pixels[rows]).float().div_(255)
        return Dataset(raw_data=[features, torch.from_numpy(labels[rows])])

    data = FederatedDataset(user, get_user_sampler("random", range(clients)))
    module = Classifier(name)
    model = PyTorchModel(
        model=module,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(module.parameters(), 1.0),
    )
    noise = CentrallyAppliedPrivacyMechanism(GaussianMechanism(clipping_bound=0.3, relative_noise_stddev=1.0))
    clock = Clock()
    FederatedAveraging().run(
        backend=SimulatedBackend(training_data=data, val_data=data, postprocessors=[noise]),
        model=model,
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=10**9,
            train_cohort_size=COHORT,
            val_cohort_size=0,
        ),
        model_train_params=NNTrainHyperParams(
            local_num_epochs=EPOCHS, local_learning_rate=0.1, local_batch_size=BATCH
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=None),
        callbacks=[clock],
    )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(
        json.dumps(
            {
                "rounds": clock.rounds,
                "peak_kib": peak,
                "parameters": sum(p.numel() for p in module.parameters()),
            }
        )
    )


if __name__ == "__main__":
    main()
