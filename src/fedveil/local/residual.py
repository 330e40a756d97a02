"""Residual networks (He et al. 2016) with GroupNorm (Wu and He 2018) in the place of BatchNorm, for images.

BatchNorm would mix records and keep statistics of them outside the update; GroupNorm normalises every record by itself
and has the same parameters, a scale and a shift per channel.
"""

from __future__ import annotations

import torch
from torch import nn

from fedveil.errors import ModelError

_CHANNELS_PER_GROUP = 16


def _norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(max(1, channels // _CHANNELS_PER_GROUP), channels)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions around which the input goes, by a 1x1 convolution where its shape changes."""

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
    """ResNet-18: four stages of two blocks, 64 to 512 channels; 11,181,642 parameters for 3 colours, 10 classes."""
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
    """A small one for one core: a patch of 4 x 4 pixels in, three stages of one block, 16 to 64 channels."""
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
