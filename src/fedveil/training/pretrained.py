"""Start from a public pretrained model: load its parameters, and treat its BatchNorm layers as constants.

In training mode BatchNorm normalises each record by the other records of its batch, and updates running statistics that
no clip bounds. :class:`FrozenNorm` does neither. It computes

    y = (x - mean) / sqrt(var + eps) * weight + bias

with running statistics that never change, in training mode as in evaluation mode. So the output for a record depends
on that record alone. The statistics are part of the initial model and count as public, like its other values.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor, nn

from fedveil.errors import ModelError
from fedveil.files import LARGEST_FILE, read_content
from fedveil.training.copying import named_layers


@dataclass(frozen=True, eq=False)
class PublicModel:
    """A model file, read once, so that the statement describes the same bytes that training starts from.

    Attributes:
        path: path of the file, for errors.
        content: the bytes of a safetensors file.
    """

    path: Path
    content: bytes

    @classmethod
    def read(cls, path: Path) -> PublicModel:
        """Read a file.

        Raises:
            ModelError: the file is missing or is not a regular file.
        """
        return cls(path, read_content(path, ModelError, largest=LARGEST_FILE))

    @property
    def sha256(self) -> str:
        """SHA-256 of the file, in hexadecimal digits."""
        return hashlib.sha256(self.content).hexdigest()


def take_parameters(model: nn.Module, public: PublicModel, layers: Sequence[str] | None = None) -> None:
    """Overwrite parameters of a model with those of a safetensors file; other parameters stay unchanged.

    Args:
        model: changed in place.
        public: tensors by the names of ``model.named_parameters()``, such as a run's ``model.safetensors``.
        layers: names of sub-modules ("0", "lstm", "block.1") whose parameters are taken; None takes all parameters.

    Raises:
        ModelError: not a safetensors file, a layer that the model does not have, or a tensor that is missing in
            the file, has another shape, or is not finite.
    """
    path = public.path
    try:
        stored = load(public.content)
    except (ValueError, KeyError, SafetensorError) as error:
        raise ModelError(f"model.initial: {path} cannot be read as a safetensors file: {error}") from None
    parameters = dict(model.named_parameters())
    for layer in layers or ():
        if not any(name.startswith(f"{layer}.") for name in parameters):
            existing = ", ".join(dict.fromkeys(name.rpartition(".")[0] for name in parameters))
            raise ModelError(
                f"model.initial_layers: no layer '{layer}' with parameters; there are: {existing}"
            )
    for name, parameter in parameters.items():
        if layers is not None and not any(name.startswith(f"{layer}.") for layer in layers):
            continue
        if name not in stored or stored[name].shape != parameter.shape:
            actual = tuple(stored[name].shape) if name in stored else "missing"
            raise ModelError(
                f"model.initial: {path}: tensor '{name}' is {actual}, the model needs {tuple(parameter.shape)}; "
                "name the layers that fit in model.initial_layers"
            )
        if not bool(torch.isfinite(stored[name]).all()):
            raise ModelError(f"model.initial: {path}: tensor '{name}' has a NaN or an infinity")
        with torch.no_grad():
            parameter.copy_(stored[name])


# --- frozen batch normalisation ---

NORMS: Final = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
"""Classes of layers that can be frozen."""


def frozen_norm_refusal(norm: nn.Module) -> str | None:
    """Return why the statistics of a BatchNorm layer cannot be treated as constants; None if they can."""
    if type(norm) not in NORMS or "forward" in vars(norm) or _has_hooks(norm):
        return "has code of its own (another class, a forward or hooks)"
    assert isinstance(norm, NORMS)
    if norm.running_mean is None or norm.running_var is None:
        return "keeps no running statistics"
    if any(parameter.requires_grad for parameter in norm.parameters()):
        return "has parameters that are trained"
    return "is in training mode" if norm.training else None


def with_frozen_norms(model: nn.Module) -> nn.Module:
    """Replace each BatchNorm layer that is in evaluation mode and not trained by a :class:`FrozenNorm`.

    Returns:
        The model, changed in place; its replacement if the model is itself such a layer.
    """
    if isinstance(model, NORMS) and frozen_norm_refusal(model) is None:
        return FrozenNorm(model)
    for parent in list(model.modules()):
        for name, child in named_layers(parent):
            if isinstance(child, NORMS) and frozen_norm_refusal(child) is None:
                setattr(parent, name, FrozenNorm(child))
    return model


class FrozenNorm(nn.Module):
    """A BatchNorm layer that computes with constant statistics, with the same names of parameters and buffers.

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
