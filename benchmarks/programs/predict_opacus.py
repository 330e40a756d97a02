import numpy as np
import torch
from opacus import PrivacyEngine
from torch.utils.data import DataLoader, TensorDataset

X, y, user, silo = np.load("records.npz").values()
features, targets = torch.from_numpy(X), torch.from_numpy(y)
loader = DataLoader(TensorDataset(features[100:], targets[100:]), batch_size=64)
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
engine = PrivacyEngine()
private, optimizer, loader = engine.make_private_with_epsilon(
    module=model,
    optimizer=optimizer,
    data_loader=loader,
    target_epsilon=4.0,
    target_delta=1e-4,
    epochs=10,
    max_grad_norm=0.5,
)
for _ in range(10):
    for some, theirs in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(private(some), theirs).backward()
        optimizer.step()
torch.save({"model": private._module.state_dict(), "epsilon": float(engine.get_epsilon(1e-4))}, "model.pt")

saved = torch.load("model.pt", weights_only=True)
model = torch.nn.Linear(3, 2)
model.load_state_dict(saved["model"])
right = model(features[:100]).argmax(1) == targets[:100]
print(f"epsilon {saved['epsilon']:.2f} for a record, accuracy {right.float().mean():.3f}")
