"""Parameters from a file: a public model to start from, or some of its layers."""

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
    """A model's file, read once: what is stated of it is of the bytes that training begins with.

    Attributes:
        path: where it lay, for errors.
        content: a safetensors file.
    """

    path: Path
    content: bytes

    @classmethod
    def read(cls, path: Path) -> PublicModel:
        """Read a file.

        Raises:
            ModelError: missing, or no file.
        """
        return cls(path, read_content(path, ModelError, largest=LARGEST_FILE))

    @property
    def sha256(self) -> str:
        """The SHA-256 of the file, in hexadecimal digits."""
        return hashlib.sha256(self.content).hexdigest()


def take_parameters(model: nn.Module, public: PublicModel, layers: Sequence[str] | None = None) -> None:
    """Overwrite parameters of a model with those of a safetensors file; the other parameters stay.

    Args:
        model: changed in place.
        public: tensors by the names of ``model.named_parameters()``, such as a run's ``model.safetensors``.
        layers: names of sub-modules ("0", "lstm", "block.1") whose parameters are taken; None takes all of them.

    Raises:
        ModelError: no safetensors file, a layer that the model does not have, a tensor that is missing in the file, has
            another shape, or is not finite.
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
