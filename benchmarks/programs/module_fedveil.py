import numpy as np
import torch

import fedveil as fv

X, y, user, silo = np.load("records.npz").values()
people = fv.population(
    X, y, user=user, silo=silo, n_users=100, silos=[0, 1, 2], task="classification", classes=[0, 1]
)
model = torch.nn.Sequential(torch.nn.Linear(3, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
result = fv.train(model, people, epsilon=4.0, delta=1e-4)
print(result.statement.sentences()[0], result.metrics)
