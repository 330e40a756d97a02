"""Load parameters from a file: a public model to start from, or some of its layers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import nn

from fedveil.errors import ModelError
from fedveil.files import LARGEST_FILE, read_content


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
            known = ", ".join(dict.fromkeys(name.rpartition(".")[0] for name in parameters))
            raise ModelError(f"model.initial_layers: no layer '{layer}' with parameters; there are: {known}")
    for name, parameter in parameters.items():
        if layers is not None and not any(name.startswith(f"{layer}.") for layer in layers):
            continue
        if name not in stored or stored[name].shape != parameter.shape:
            found = tuple(stored[name].shape) if name in stored else "missing"
            raise ModelError(
                f"model.initial: {path}: tensor '{name}' is {found}, the model needs {tuple(parameter.shape)}; "
                "name the layers that fit in model.initial_layers"
            )
        if not bool(torch.isfinite(stored[name]).all()):
            raise ModelError(f"model.initial: {path}: tensor '{name}' has a NaN or an infinity")
        with torch.no_grad():
            parameter.copy_(stored[name])
