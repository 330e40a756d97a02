"""Batch normalisation of a pretrained layer whose statistics are constants.

In training mode BatchNorm normalises a record by the others of its batch and updates running statistics outside the
bounded update. A frozen layer does neither: it computes

    y = (x - mean) / sqrt(var + eps) * weight + bias

with its running statistics, which never change, whatever mode the model is in. So each record is computed by itself.
The statistics are part of the model that is handed over and count as public, like its other initial values.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

from fedveil.training.copying import named_layers

NORMS: Final = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def frozen_norm_refusal(norm: nn.Module) -> str | None:
    """Return why a BatchNorm layer cannot be treated as a constant during training; None if it can."""
    if type(norm) not in NORMS or "forward" in vars(norm) or _has_hooks(norm):
        return "has code of its own (another class, a forward or hooks)"
    assert isinstance(norm, NORMS)
    if norm.running_mean is None or norm.running_var is None:
        return "keeps no running statistics"
    if any(one.requires_grad for one in norm.parameters()):
        return "has parameters that are trained"
    return "is in training mode" if norm.training else None


def with_frozen_norms(model: nn.Module) -> nn.Module:
    """Replace frozen BatchNorm layers inside a model, in place, and return the model (or its replacement)."""
    if isinstance(model, NORMS) and frozen_norm_refusal(model) is None:
        return FrozenNorm(model)
    for parent in list(model.modules()):
        for name, child in named_layers(parent):
            if isinstance(child, NORMS) and frozen_norm_refusal(child) is None:
                setattr(parent, name, FrozenNorm(child))
    return model


class FrozenNorm(nn.Module):
    """A BatchNorm layer in evaluation mode, under the same names of parameters and buffers.

    Args:
        norm: a layer that :func:`frozen_norm_refusal` accepts.
    """

    running_mean: Tensor
    running_var: Tensor
    weight: Tensor
    bias: Tensor

    def __init__(self, norm: nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d) -> None:
        super().__init__()
        self.eps = norm.eps
        for name, parameter in norm.named_parameters():
            self.register_parameter(name, parameter)
        for name, buffer in norm.named_buffers():
            self.register_buffer(name, buffer)
        self.has_scale = norm.affine

    def forward(self, inputs: Tensor) -> Tensor:
        """Normalise each channel of (n, channels, ...) inputs by the constants."""
        scale = torch.rsqrt(self.running_var + self.eps)
        if self.has_scale:
            scale = scale * self.weight
        shift = -self.running_mean * scale
        if self.has_scale:
            shift = shift + self.bias
        shape = (-1, *(1,) * (inputs.dim() - 2))
        return inputs * scale.reshape(shape) + shift.reshape(shape)


def _has_hooks(module: nn.Module) -> bool:
    return any(value for name, value in vars(module).items() if name.endswith("_hooks"))
