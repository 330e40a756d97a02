import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Weighted
from pfl.model.pytorch import PyTorchModel
from pfl.privacy.gaussian_mechanism import GaussianMechanism
from pfl.privacy.privacy_accountant import PLDPrivacyAccountant
from pfl.privacy.privacy_mechanism import CentrallyAppliedPrivacyMechanism

X, y, user, silo = np.load("records.npz").values()


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(3, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))

    def forward(self, features):
        return self.layers(features)

    def loss(self, features, targets, eval=False):
        return torch.nn.functional.cross_entropy(self(features), targets)

    def metrics(self, features, targets, eval=False):
        right = (self(features).argmax(1) == targets).sum().item()
        return {"accuracy": Weighted(right, len(features))}


def records(number):
    rows = user == number
    return Dataset(raw_data=[torch.from_numpy(X[rows]), torch.from_numpy(y[rows])])


people = np.unique(user)
data = FederatedDataset(records, get_user_sampler("random", people))

network = Network()
model = PyTorchModel(
    model=network,
    local_optimizer_create=torch.optim.SGD,
    central_optimizer=torch.optim.SGD(network.parameters(), 1.0),
)
accountant = PLDPrivacyAccountant(
    num_compositions=10, sampling_probability=1.0, mechanism="gaussian", epsilon=4.0, delta=1e-4
)
noise = CentrallyAppliedPrivacyMechanism(GaussianMechanism.from_privacy_accountant(accountant, 0.5))
FederatedAveraging().run(
    backend=SimulatedBackend(training_data=data, val_data=data, postprocessors=[noise]),
    model=model,
    algorithm_params=NNAlgorithmParams(
        central_num_iterations=10, evaluation_frequency=100, train_cohort_size=len(people), val_cohort_size=0
    ),
    model_train_params=NNTrainHyperParams(local_num_epochs=5, local_learning_rate=0.1, local_batch_size=None),
    model_eval_params=NNEvalHyperParams(local_batch_size=None),
)
right = network(torch.from_numpy(X)).argmax(1) == torch.from_numpy(y)
print(f"epsilon 4.00, accuracy {right.float().mean():.3f}")
