"""Parameters from a file: a public model to start from, or some of its layers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from fedveil.errors import ModelError
from fedveil.files import check_file


def take_parameters(model: nn.Module, path: Path, layers: Sequence[str] | None = None) -> None:
    """Overwrite parameters of a model with those of a safetensors file; the other parameters stay.

    Args:
        model: changed in place.
        path: tensors by the names of ``model.named_parameters()``, such as a run's ``model.safetensors``.
        layers: names of sub-modules ("0", "lstm", "block.1") whose parameters are taken; None takes all of them.

    Raises:
        ModelError: the file is missing or no safetensors file, a layer that the model does not have, a tensor that is
            missing in the file, has another shape, or is not finite.
    """
    check_file(path, ModelError)
    try:
        stored = load_file(path)
    except (OSError, ValueError, SafetensorError) as error:
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
