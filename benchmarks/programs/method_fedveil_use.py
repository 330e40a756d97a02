import numpy as np
import torch

import fedveil as fv

X, y, user, silo = np.load("records.npz").values()
people = fv.population(
    X, y, user=user, silo=silo, n_users=100, silos=[0, 1, 2], task="classification", classes=[0, 1]
)
model = torch.nn.Sequential(torch.nn.Linear(3, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
method = fv.method("by-records", clip=0.5, epochs=5)
result = fv.train(model, people, method=method, epsilon=4.0, delta=1e-4, rounds=10, server_learning_rate=2.0)
print(result.statement.sentences()[0], result.metrics)
