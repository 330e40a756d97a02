"""Models by name: the networks of the published experiments, or any ``package.module:factory``.

=============  ============================================================  =======================
name           network                                                       parameters
=============  ============================================================  =======================
linear         affine: linear, logistic, softmax or Cox regression           14 Heart, 40 TcgaBrca
mlp            Linear(features, 32)-ReLU-Linear(32, outputs)                 25,450 (MNIST)
mlp_groupnorm  5 x [Linear(30)-ReLU-GroupNorm], dropout after the last four  5,012 (Creditcard)
cnn            2 x [5x5 convolution-maxpool-ReLU], dropout, 50 hidden units  21,840 (MNIST)
=============  ============================================================  =======================
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import TypeAlias, cast

import torch
from torch import nn

from fedveil.errors import ModelError
from fedveil.local.losses import import_object
from fedveil.local.validate import validate_behaviour, validate_layers
from fedveil.randomness import ExperimentRandomness

Shape: TypeAlias = tuple[int, ...]
ModelFactory: TypeAlias = Callable[[Shape, int], nn.Module]
"""``factory(input_shape, n_outputs)`` returns a fresh model for records of ``input_shape``."""


def linear(input_shape: Shape, n_outputs: int) -> nn.Module:
    """One affine map of the flattened features: linear, logistic, softmax and Cox regression."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), n_outputs))


def mlp(input_shape: Shape, n_outputs: int) -> nn.Module:
    """One hidden layer of 32 rectified units."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(math.prod(input_shape), 32), nn.ReLU(), nn.Linear(32, n_outputs)
    )


def mlp_groupnorm(input_shape: Shape, n_outputs: int) -> nn.Module:
    """Five hidden layers of 30 units, each normalised per record: the Creditcard network of ULDP-FL."""
    width = 30
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(math.prod(input_shape), width), nn.ReLU()]
    layers.append(nn.GroupNorm(1, width))
    for _ in range(4):
        layers += [nn.Linear(width, width), nn.ReLU(), nn.GroupNorm(1, width), nn.Dropout(0.5)]
    return nn.Sequential(*layers, nn.Linear(width, n_outputs))


def cnn(input_shape: Shape, n_outputs: int) -> nn.Module:
    """Two convolutions and two affine layers: the MNIST network of ULDP-FL.

    Takes images (height, width) or (channels, height, width) of at least 16 x 16.
    """
    if len(input_shape) == 1 and math.isqrt(input_shape[0]) ** 2 == input_shape[0]:
        side = math.isqrt(input_shape[0])
        input_shape = (side, side)
    image = (1, *input_shape) if len(input_shape) == 2 else input_shape
    if len(image) != 3 or min(image[1:]) < 16:
        raise ModelError(
            "model cnn takes images (height, width) or (channels, height, width) of at least 16 x 16, "
            f"not {input_shape}"
        )
    height, width = (((side - 4) // 2 - 4) // 2 for side in image[1:])
    return nn.Sequential(
        nn.Flatten(),
        nn.Unflatten(1, image),
        nn.Conv2d(image[0], 10, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(10, 20, 5),
        nn.Dropout2d(0.5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(20 * height * width, 50),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(50, n_outputs),
    )


MODELS: dict[str, ModelFactory] = {"linear": linear, "mlp": mlp, "mlp_groupnorm": mlp_groupnorm, "cnn": cnn}
"""The shipped models by name."""


def build_model(
    name: str, *, input_shape: Shape, n_outputs: int, randomness: ExperimentRandomness
) -> nn.Module:
    """Build a model with seeded initial parameters and check that it can be trained.

    Args:
        name: a name of :data:`MODELS`, or ``package.module:factory`` where ``factory(input_shape,
            n_outputs)``, or ``factory()``, returns a module for float32 records of ``input_shape``.
        input_shape: shape of one record's features.
        n_outputs: numbers the model gives per record (classes, or 1).
        randomness: the initial parameters depend on its seed and on ``name`` alone; torch's global random
            state is left as it was.

    Raises:
        ConfigError: an unknown name; says which there are.
        ModelError: a factory that returns no module, or a model that mixes records.
    """
    factory = MODELS[name] if name in MODELS else _imported(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(randomness.integer("model", name))
        model = factory(input_shape, n_outputs)
        made_up = torch.randn(4, *input_shape)
    if not isinstance(model, nn.Module):
        raise ModelError(f"model {name}: the factory returned {type(model).__name__}, not a torch.nn.Module")
    validate_layers(model)
    validate_behaviour(model, made_up)
    return model


def _imported(path: str) -> ModelFactory:
    found = import_object(path, "model", MODELS)
    if not callable(found):
        raise ModelError(f"model {path} is a {type(found).__name__}; it must be a factory of modules")
    if not inspect.signature(found).parameters:
        return lambda input_shape, n_outputs: cast(nn.Module, found())
    return cast(ModelFactory, found)
