"""Provide models by name: the networks of published experiments, or any ``package.module:factory``.

=============  ============================================================  =======================
name           network                                                       parameters
=============  ============================================================  =======================
linear         affine: linear, logistic, softmax or Cox regression           14 Heart, 40 TcgaBrca
whitened-      a linear model in a basis that the method newton finds        (p + 1)(p + 1 + k)
 linear
whitened-      the same, of the mean count e^f; for newton with a cap        (p + 1)(p + 2)
 rates
whitened-      the same, of a log hazard, with four baseline hazards; for    (p + 1)(p + 2) + 4
 hazards       newton with a horizon
boosted-trees  960 oblivious trees of depth 3; grown by the method of the    7,680 + 15 a feature
               same name
mlp            Linear(features, 32)-ReLU-Linear(32, outputs)                 25,450 (MNIST)
mlp_32_16      Linear(features, 32)-ReLU-Linear(32, 16)-ReLU-Linear          25,818 (MNIST)
mlp_groupnorm  5 x [Linear(30)-ReLU-GroupNorm], dropout after the last four  5,012 (Creditcard)
cnn            2 x [5x5 convolution-maxpool-ReLU], dropout, 50 hidden units  21,840 (MNIST)
cnn_6          the same with 6 channels each, without dropout                6,422 (MNIST)
svhn_cnn       2 x [5x5 convolution, maxpool], affine 384, 192               3,431,754 (SVHN)
resnet_small   three residual blocks of 16, 32, 64 channels, GroupNorm       78,378 (Imagenette)
 _groupnorm
resnet18       eight residual blocks of 64 to 512 channels, GroupNorm        11,181,642 (Imagenette)
 _groupnorm
lstm           embedding 8, two LSTM layers of 256, last step                820,450 (Shakespeare)
lstm_10        the same, on the last 10 characters                           820,450 (Shakespeare)
=============  ============================================================  =======================
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias, cast

import torch
from torch import nn

from fedveil.errors import ModelError
from fedveil.randomness import ExperimentRandomness
from fedveil.sanitize import sanitize
from fedveil.training.copying import unwrap
from fedveil.training.newton import whitened_hazards, whitened_linear, whitened_rates
from fedveil.training.trees import boosted_trees
from fedveil.training.validation import validate_behaviour, validate_layers
from fedveil.user_code import import_object

# --- resnet --------------------------------------------------------------------------------------------------------
# Residual networks for images (He et al. 2016), with GroupNorm (Wu and He 2018) instead of BatchNorm. BatchNorm would
# mix records and keep statistics of them outside the update. GroupNorm normalises every record separately and has the
# same parameters: a scale and a shift per channel.

_CHANNELS_PER_GROUP = 16


def _norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(max(1, channels // _CHANNELS_PER_GROUP), channels)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut, which is a 1x1 convolution if the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            _norm(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            _norm(outputs),
        )
        self.around: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.around = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), _norm(outputs))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return (b, outputs, height / stride, width / stride) for (b, inputs, height, width)."""
        return torch.relu(self.body(images) + self.around(images))


def _blocks(widths: tuple[int, ...], each: int) -> list[nn.Module]:
    blocks: list[nn.Module] = []
    inputs = widths[0]
    for stage, width in enumerate(widths):
        for number in range(each):
            blocks.append(BasicBlock(inputs, width, 2 if stage and number == 0 else 1))
            inputs = width
    return blocks


def _check(name: str, input_shape: tuple[int, ...]) -> int:
    if len(input_shape) != 3 or min(input_shape[1:]) < 32:
        raise ModelError(
            f"model {name} takes images (channels, height, width) of at least 32 x 32, not {input_shape}"
        )
    return input_shape[0]


def resnet18_groupnorm(input_shape: tuple[int, ...], n_outputs: int) -> nn.Module:
    """Build ResNet-18: four stages of two blocks with 64 to 512 channels.

    It has 11,181,642 parameters for 3 colours and 10 classes.
    """
    channels = _check("resnet18_groupnorm", input_shape)
    return nn.Sequential(
        nn.Conv2d(channels, 64, 7, 2, padding=3, bias=False),
        _norm(64),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, padding=1),
        *_blocks((64, 128, 256, 512), 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(512, n_outputs),
    )


def resnet_small_groupnorm(input_shape: tuple[int, ...], n_outputs: int) -> nn.Module:
    """Build a small residual network for one core.

    It reads patches of 4 x 4 pixels and has three stages of one block.

    The stages have 16, 32 and 64 channels.
    """
    channels = _check("resnet_small_groupnorm", input_shape)
    return nn.Sequential(
        nn.Conv2d(channels, 16, 4, 4, bias=False),
        _norm(16),
        nn.ReLU(),
        *_blocks((16, 32, 64), 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, n_outputs),
    )


# --- models ------------------------------------------------------------

Shape: TypeAlias = tuple[int, ...]
ModelFactory: TypeAlias = Callable[[Shape, int], nn.Module]
"""``factory(input_shape, n_outputs)`` returns a new model for records of ``input_shape``."""


def linear(input_shape: Shape, n_outputs: int) -> nn.Module:
    """Build one affine map of the flattened features: linear, logistic, softmax or Cox regression."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), n_outputs))


def mlp(input_shape: Shape, n_outputs: int) -> nn.Module:
    """Build a network with one hidden layer of 32 rectified units."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(math.prod(input_shape), 32), nn.ReLU(), nn.Linear(32, n_outputs)
    )


def mlp_32_16(input_shape: Shape, n_outputs: int) -> nn.Module:
    """Build a network with hidden layers of 32 and 16 rectified units: the MLP of CEPAM."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(math.prod(input_shape), 32),
        nn.ReLU(),
        nn.Linear(32, 16),
        nn.ReLU(),
        nn.Linear(16, n_outputs),
    )


def mlp_groupnorm(input_shape: Shape, n_outputs: int) -> nn.Module:
    """Build five hidden layers of 30 units, each normalised per record: the Creditcard network of ULDP-FL."""
    width = 30
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(math.prod(input_shape), width), nn.ReLU()]
    layers.append(nn.GroupNorm(1, width))
    for _ in range(4):
        layers += [nn.Linear(width, width), nn.ReLU(), nn.GroupNorm(1, width), nn.Dropout(0.5)]
    return nn.Sequential(*layers, nn.Linear(width, n_outputs))


def cnn(input_shape: Shape, n_outputs: int) -> nn.Module:
    """Build two convolutions and two affine layers: the MNIST network of ULDP-FL.

    Takes images (height, width) or (channels, height, width) of at least 16 x 16.
    """
    image = _image("cnn", input_shape)
    height, width = _after_two_poolings(image)
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


def cnn_6(input_shape: Shape, n_outputs: int) -> nn.Module:
    """Build two convolutions of 6 channels and two affine layers: the CNN of CEPAM.

    Takes images as :func:`cnn` does.
    """
    image = _image("cnn_6", input_shape)
    height, width = _after_two_poolings(image)
    return nn.Sequential(
        nn.Flatten(),
        nn.Unflatten(1, image),
        nn.Conv2d(image[0], 6, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(6, 6, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(6 * height * width, 50),
        nn.ReLU(),
        nn.Linear(50, n_outputs),
    )


def _image(name: str, input_shape: Shape) -> Shape:
    """Return (channels, height, width) of an image that two 5x5 convolutions with pooling can process.

    A flat record of s * s features is taken as an image of side s.

    Raises:
        ModelError: another shape, or an image of fewer than 16 x 16 pixels.
    """
    if len(input_shape) == 1 and math.isqrt(input_shape[0]) ** 2 == input_shape[0]:
        side = math.isqrt(input_shape[0])
        input_shape = (side, side)
    image = (1, *input_shape) if len(input_shape) == 2 else input_shape
    if len(image) != 3 or min(image[1:]) < 16:
        raise ModelError(
            f"model {name} takes images (height, width) or (channels, height, width) of at least 16 x 16, "
            f"not {input_shape}"
        )
    return image


def _after_two_poolings(image: Shape) -> tuple[int, int]:
    """Return height and width after two 5x5 convolutions, each followed by 2x2 pooling."""
    height, width = (((side - 4) // 2 - 4) // 2 for side in image[1:])
    return height, width


class ChannelNorm(nn.Module):
    """``torch.nn.LocalResponseNorm(4)`` in a third of its time on a CPU, equal up to float32 rounding.

    With x_c channel c of one position, out_c = x_c / (1 + 10^-4 / 4 (x_{c-2}^2 + ... + x_{c+1}^2))^(3/4). PyTorch
    averages by three-dimensional pooling, which is slower than adding four shifted views. It takes a real power,
    which is slower than two square roots.
    """

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the normalised images, with the shape (b, channels, height, width) of the input."""
        channels = images.shape[1]
        squares = nn.functional.pad(images * images, (0, 0, 0, 0, 2, 1))
        total = squares[:, :channels]
        for shift in range(1, 4):
            total = total + squares[:, shift : shift + channels]
        # s^(-3/4) = s^(-1/2) * sqrt(s^(-1/2)).
        root = torch.rsqrt(1 + 1e-4 / 4 * total)
        return images * root * root.sqrt()


def svhn_cnn(input_shape: Shape, n_outputs: int) -> nn.Module:
    """Build two convolutions (64, 128 channels) and three affine layers: the SVHN network of DP-Fed-LS.

    It has the published initial state: normal weights of standard deviation 1e-4 (convolutions), 0.04 (hidden affine
    layers) and 1/192 (last layer). Biases are zero, except 0.1 in the second convolution and the hidden affine
    layers. Takes images (channels, height, width).
    """
    if len(input_shape) != 3:
        raise ModelError(f"model svhn_cnn takes images (channels, height, width), not {input_shape}")
    channels, height, width = input_shape
    side = [math.ceil(math.ceil(length / 2) / 2) for length in (height, width)]
    model = nn.Sequential(
        nn.Conv2d(channels, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, padding=1),
        ChannelNorm(),
        nn.Conv2d(64, 128, 5, padding=2),
        nn.ReLU(),
        ChannelNorm(),
        nn.MaxPool2d(3, 2, padding=1),
        nn.Flatten(),
        nn.Linear(128 * side[0] * side[1], 384),
        nn.ReLU(),
        nn.Linear(384, 192),
        nn.ReLU(),
        nn.Linear(192, n_outputs),
    )
    # (index of the layer in the sequence, standard deviation of its weights, its bias).
    states = ((0, 1e-4, 0.0), (4, 1e-4, 0.1), (9, 0.04, 0.1), (11, 0.04, 0.1), (13, 1 / 192, 0.0))
    for number, std, bias in states:
        layer = model[number]
        assert isinstance(layer, nn.Conv2d | nn.Linear)
        assert layer.bias is not None
        nn.init.normal_(layer.weight, std=std)
        nn.init.constant_(layer.bias, bias)
    return model


class NextCharacter(nn.Module):
    """Embedding of characters, two LSTM layers, and a classifier of the last step.

    Args:
        n_characters: number of different characters, of inputs and outputs.
        last: number of characters at the end of a record that are read; None reads all.
    """

    def __init__(self, n_characters: int, last: int | None = None) -> None:
        super().__init__()
        self.last = last
        self.embedding = nn.Embedding(n_characters, 8)
        self.lstm = nn.LSTM(8, 256, num_layers=2, batch_first=True)
        self.classifier = nn.Linear(256, n_characters)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        """Return (b, characters) logits for (b, length) character numbers.

        The numbers are stored as float32, like all features.
        """
        read = codes if self.last is None else codes[:, -self.last :]
        # A made-up record of the trials holds any float32 number, so numbers outside the alphabet must not fail.
        numbers = read.long().clamp(0, self.embedding.num_embeddings - 1)
        states, _ = self.lstm(self.embedding(numbers))
        logits: torch.Tensor = self.classifier(states[:, -1])
        return logits


def lstm(input_shape: Shape, n_outputs: int) -> nn.Module:
    """Build the Shakespeare network of DP-Fed-LS: characters in, the next character out."""
    if len(input_shape) != 1:
        raise ModelError(f"model lstm takes sequences (length,) of character numbers, not {input_shape}")
    return NextCharacter(n_outputs)


def lstm_10(input_shape: Shape, n_outputs: int) -> nn.Module:
    """Build :func:`lstm` with the same parameters, on the last 10 characters alone.

    It costs an eighth of 80 characters.
    """
    if len(input_shape) != 1:
        raise ModelError(f"model lstm_10 takes sequences (length,) of character numbers, not {input_shape}")
    return NextCharacter(n_outputs, last=10)


MODELS: dict[str, ModelFactory] = {
    "linear": linear,
    "whitened-linear": whitened_linear,
    "whitened-rates": whitened_rates,
    "whitened-hazards": whitened_hazards,
    "boosted-trees": boosted_trees,
    "mlp": mlp,
    "mlp_32_16": mlp_32_16,
    "mlp_groupnorm": mlp_groupnorm,
    "cnn": cnn,
    "cnn_6": cnn_6,
    "svhn_cnn": svhn_cnn,
    "lstm": lstm,
    "lstm_10": lstm_10,
    "resnet_small_groupnorm": resnet_small_groupnorm,
    "resnet18_groupnorm": resnet18_groupnorm,
}
"""The built-in models by name."""


def start_at_zero(model: nn.Module) -> None:
    """Set all parameters of a model to zero, in place: an initial model that depends on no seed.

    Raises:
        ModelError: a model of several layers; its hidden units would all stay equal.
    """
    weighing = [layer for layer in model.modules() if any(True for _ in layer.parameters(recurse=False))]
    if len(weighing) != 1 or type(weighing[0]) is not nn.Linear:
        raise ModelError(
            "model.start = 'zeros': hidden units that start at zero stay alike; only a model of one linear layer may, "
            "take 'seed'"
        )
    for parameter in model.parameters():
        nn.init.zeros_(parameter)


def start_output_at_zero(model: nn.Module) -> None:
    """Set the parameters of a model's last layer with parameters to zero, in place: all outputs begin at zero.

    The layer is the last in the order of the module. The others keep their values, so hidden units differ.
    """
    weighing = [layer for layer in model.modules() if any(True for _ in layer.parameters(recurse=False))]
    for parameter in weighing[-1].parameters(recurse=False) if weighing else ():
        nn.init.zeros_(parameter)


STARTS: Final[Mapping[str, Callable[[nn.Module], None]]] = {
    "seed": lambda model: None,
    "zeros": start_at_zero,
    "zero-output": start_output_at_zero,
}
"""Changes of a model's seeded parameters before training, by the word for them."""


def build_model(
    name: str, *, input_shape: Shape, n_outputs: int, randomness: ExperimentRandomness
) -> nn.Module:
    """Build a model with seeded initial parameters and check that it can be trained.

    Args:
        name: a name of :data:`MODELS`, or ``package.module:factory``, where ``factory(input_shape, n_outputs)``
            or ``factory()`` returns a module for float32 records of ``input_shape``.
        input_shape: shape of one record's features.
        n_outputs: numbers that the model returns per record (number of classes, or 1).
        randomness: the initial parameters depend only on its seed and on ``name``; torch's global random state is
            restored.

    Raises:
        ConfigError: an unknown name; the error lists the known names.
        ModelError: a factory that returns no module, or a model that mixes records.
    """
    factory = MODELS[name] if name in MODELS else _imported(name)
    with torch.random.fork_rng(devices=[]):
        # Only the CPU generator is seeded: torch.manual_seed would change those of CUDA devices, too.
        torch.default_generator.manual_seed(randomness.integer("model", name))
        model = (
            factory(input_shape, n_outputs)
            if name in MODELS
            else _built(name, factory, input_shape, n_outputs)
        )
        made_up = torch.randn(4, *input_shape)
    if not isinstance(model, nn.Module):
        raise ModelError(f"model {name}: the factory returned {type(model).__name__}, not a torch.nn.Module")
    model = unwrap(model)
    validate_layers(model)
    validate_behaviour(model, made_up)
    return model


def _built(name: str, factory: ModelFactory, input_shape: Shape, n_outputs: int) -> object:
    """Call a third-party factory with public numbers alone, so that its error messages reveal no record.

    Raises:
        ModelError: the factory fails.
    """
    try:
        return factory(input_shape, n_outputs)
    except Exception as error:
        raise ModelError(
            f"model {name}: the factory failed for records of shape {tuple(input_shape)} and {n_outputs} outputs "
            f"({type(error).__name__}: {sanitize(str(error))})"
        ) from error


def _imported(path: str) -> ModelFactory:
    factory = import_object(path, "model", MODELS)
    if not callable(factory):
        raise ModelError(f"model {path} is a {type(factory).__name__}; it must be a factory of modules")
    if not inspect.signature(factory).parameters:
        return lambda input_shape, n_outputs: cast(nn.Module, factory())
    return cast(ModelFactory, factory)
