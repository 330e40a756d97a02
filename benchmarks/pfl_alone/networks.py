"""The networks of the simulation benchmark, the same for fedveil and pfl."""

from torch import nn


def network(name: str) -> nn.Sequential:
    """Return logistic regression 784-10, or a CNN of about 18,000 parameters, for (1, 28, 28) images."""
    if name == "linear":
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    return nn.Sequential(
        nn.Conv2d(1, 16, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(800, 16),
        nn.ReLU(),
        nn.Linear(16, 10),
    )
