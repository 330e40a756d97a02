import numpy as np
import torch
from opacus import PrivacyEngine
from sklearn.model_selection import GroupKFold
from torch.utils.data import DataLoader, TensorDataset

X, y, user, silo = np.load("records.npz").values()
features, targets = torch.from_numpy(X), torch.from_numpy(y)
engine, scores = PrivacyEngine(), []
for train, test in GroupKFold(3).split(X, y, user):
    loader = DataLoader(TensorDataset(features[train], targets[train]), batch_size=64)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=2.5, max_grad_norm=0.5
    )
    for _ in range(10):
        for some, theirs in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(some), theirs).backward()
            optimizer.step()
    scores.append((model(features[test]).argmax(1) == targets[test]).float().mean())
print(f"epsilon {engine.get_epsilon(1e-4):.2f} for a record, accuracy {np.mean(scores):.3f}")
