import pandas as pd
import torch
from opacus import PrivacyEngine
from torch.utils.data import DataLoader, TensorDataset

table = pd.read_csv("table.csv")
rows = torch.randperm(len(table))
train, test = rows[: len(rows) * 4 // 5], rows[len(rows) * 4 // 5 :]
features = torch.tensor(table[["age", "pressure", "sugar"]].to_numpy(), dtype=torch.float32)
targets = torch.tensor(table["ill"].to_numpy())
loader = DataLoader(TensorDataset(features[train], targets[train]), batch_size=64)
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
engine = PrivacyEngine()
model, optimizer, loader = engine.make_private_with_epsilon(
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
        torch.nn.functional.cross_entropy(model(some), theirs).backward()
        optimizer.step()
right = model(features[test]).argmax(1) == targets[test]
print(f"epsilon {engine.get_epsilon(1e-4):.2f} for a record, accuracy {right.float().mean():.3f}")
