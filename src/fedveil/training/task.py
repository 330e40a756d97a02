"""Define a task: a model, its loss and its metrics, and the model as one vector.

Methods, noise and protocols see a model only as a float32 vector w of d trainable parameters, in the order of
``model.named_parameters()``. Only this file converts between the vector and named tensors.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from jaxtyping import Float, Float32
from torch import Tensor, nn
from torch.func import functional_call

from fedveil.errors import ModelError
from fedveil.training.copying import copy_module, unwrap
from fedveil.training.counters import with_seeded_dropout
from fedveil.training.losses import Loss, Metric
from fedveil.training.pretrained import with_frozen_norms
from fedveil.training.validation import validate_layers

Precision: TypeAlias = Literal["float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Position of each trainable parameter in the vector: names, shapes, offsets, in the model's order."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    offsets: tuple[int, ...]
    dimension: int

    @classmethod
    def from_model(cls, model: nn.Module) -> Layout:
        """Read the layout of a model's trainable parameters."""
        trainable = [(name, p.shape) for name, p in model.named_parameters() if p.requires_grad]
        ends, end = [], 0
        for _, shape in trainable:
            ends.append(end)
            end += math.prod(shape)
        return cls(
            names=tuple(name for name, _ in trainable),
            shapes=tuple(shape for _, shape in trainable),
            offsets=tuple(ends),
            dimension=end,
        )

    def unflatten(self, vectors: Float[Tensor, "*batch d"]) -> dict[str, Tensor]:
        """Return the named parameters as views of the vectors, each (*batch, *shape), without copying.

        Writing to a view writes to the vectors.
        """
        return {
            name: vectors[..., offset : offset + math.prod(shape)].view((*vectors.shape[:-1], *shape))
            for name, shape, offset in zip(self.names, self.shapes, self.offsets, strict=True)
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """A model with its loss and its metrics.

    Args:
        model: any module whose output for a record depends on that record alone. It is copied; dropout layers of
            the copy draw their masks from a seed per contribution (see :mod:`fedveil.training.counters`), and frozen
            BatchNorm layers become constants (:mod:`fedveil.training.pretrained`).
        loss: ``loss(outputs, targets, mask)``, the mean over the records whose mask is 1.
        metrics: ``metric(outputs, targets, weights)`` by its name in reports.
        precision: the precision in which layers compute during training; see :meth:`outputs`.

    Attributes:
        cache: cache of trainers, from round to round, under keys of their own. It holds ways to compute (compiled
            or traced functions) and never a number of a record.

    Frozen parameters (``requires_grad=False``) and buffers are constants and are not part of the vector.

    Raises:
        ModelError: a layer that mixes records (the error names a replacement), a parameter that is not float32,
            no trainable parameter, or a model that cannot be copied.
    """

    model: nn.Module
    loss: Loss
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    precision: Precision = "float32"
    layout: Layout = field(init=False)
    cache: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        model = unwrap(self.model)
        validate_layers(model)
        # A module may override parameters(). The layout uses named_parameters(), so other lists would train other
        # numbers.
        if [*map(id, model.parameters())] != [id(parameter) for _, parameter in model.named_parameters()]:
            raise ModelError(
                "the model's parameters() are others than its named_parameters(), which are trained: define neither; "
                "requires_grad_(False) freezes a parameter"
            )
        layout = Layout.from_model(model)
        if layout.dimension == 0:
            raise ModelError("the model has no trainable parameter")
        object.__setattr__(self, "model", with_seeded_dropout(with_frozen_norms(copy_module(model))).train())
        object.__setattr__(self, "layout", layout)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for another process that trains: it compiles its own functions, and measures nothing."""
        return {**vars(self), "cache": {}, "metrics": {}}

    @property
    def dimension(self) -> int:
        """d, the number of trainable parameters."""
        return self.layout.dimension

    def initial(self) -> Float32[Tensor, " d"]:
        """Return the model's parameters as one vector (a copy, on the model's device)."""
        trainable = [p.detach().reshape(-1) for p in self.model.parameters() if p.requires_grad]
        return torch.cat(trainable)

    def constants(self, device: torch.device) -> dict[str, Tensor]:
        """Return the buffers and frozen parameters by name, on a device; the vector does not contain them."""
        frozen = {name: p.detach() for name, p in self.model.named_parameters() if not p.requires_grad}
        return {name: value.to(device) for name, value in (frozen | dict(self.model.named_buffers())).items()}

    def state(self, vector: Float32[Tensor, " d"]) -> dict[str, Tensor]:
        """Return the named tensors to save as a model file, under the parameter names of the caller's module."""
        return {name: value.detach().clone() for name, value in self.layout.unflatten(vector).items()}

    def outputs(
        self, state: Mapping[str, Tensor], features: Float[Tensor, "n *shape"]
    ) -> Float32[Tensor, "n *outputs"]:
        """Return the model's outputs for n records with these named tensors, in training precision.

        Under bfloat16, PyTorch's autocast chooses the layers that compute with 8 significant bits. Parameters,
        outputs, the loss and therefore every update stay float32. The bound applies to the update as computed,
        whatever the precision of the layers.
        """
        low = self.precision != "float32"
        # cache_enabled=False: a cached cast of a parameter would survive into a later call with other parameters.
        with torch.autocast(features.device.type, torch.bfloat16, enabled=low, cache_enabled=False):
            outputs: Tensor = functional_call(self.model, dict(state), (features,))
        return outputs.float() if low else outputs

    @torch.no_grad()
    def predict(
        self,
        vector: Float32[Tensor, " d"],
        features: Float32[Tensor, " n *shape"],
        batch_size: int = 1024,
    ) -> Float32[Tensor, " n *outputs"]:
        """Return the outputs of the model w for n records, in evaluation mode (no dropout) and float32.

        Records are processed in batches of ``batch_size``.
        """
        constants = self.constants(vector.device)
        parameters = self.layout.unflatten(vector)
        self.model.eval()
        try:
            outputs = [
                functional_call(self.model, (parameters, constants), (batch.to(vector.device),))
                for batch in torch.split(features, batch_size)
            ]
        finally:
            self.model.train()
        return torch.cat(outputs)
