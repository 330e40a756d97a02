"""Provide dropout whose mask is a function of (contribution seed, step, layer, position) alone.

The dropout of PyTorch reads one global random stream. The mask of a contribution would then depend on the order of
computation, and a vectorised trainer could not agree with a loop. Here entry j of layer l's mask at one step is

    keep_j = [ hash(seed, l, j) >= p 2^53 ],    output = input * keep / (1 - p),

where the hash is taken to 53 bits and the seed is the contribution's seed for that step. P(keep) = 1 - p to within
2^-53. Position j counts entries record by record, so padding at the end of a batch changes no mask of the records
before it.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

from fedveil.errors import ModelError
from fedveil.training.copying import named_layers
from fedveil.training.counters import derive

_LOWEST: Final = -(1 << 63)
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


class SeededDropout(nn.Module):
    """Dropout of single entries, or of whole channels, under the seed in the buffer ``seed``.

    Args:
        p: probability of dropping, in [0, 1].
        layer: number of the layer in its model; layers with different numbers have independent masks.
        channels: drop (record, channel) planes, as ``nn.Dropout2d`` does, instead of single entries.
    """

    seed: Tensor

    def __init__(self, p: float, layer: int, channels: bool) -> None:
        super().__init__()
        self.p = p
        self.layer = layer
        self.channels = channels
        self.register_buffer("seed", torch.zeros((), dtype=torch.int64), persistent=False)

    def extra_repr(self) -> str:
        """Describe the layer in a printed model."""
        return f"p={self.p}, layer={self.layer}, channels={self.channels}"

    def forward(self, inputs: Tensor) -> Tensor:
        """Drop entries of (n, ...) inputs in training mode; pass them through in evaluation mode."""
        if not self.training or self.p == 0:
            return inputs
        if self.p == 1:
            return torch.zeros_like(inputs)
        shape = inputs.shape[:2] + (1,) * (inputs.dim() - 2) if self.channels else inputs.shape
        position = torch.arange(shape.numel(), device=inputs.device).reshape(shape)
        words = derive(derive(self.seed, self.layer), position)
        # Compare the first 53 bits of a word with p 2^53. int64 is signed, so both sides are shifted down by 2^63.
        keep = words.bitwise_xor_(_LOWEST) >= (int(self.p * (1 << 53)) << 11) + _LOWEST
        return inputs * (keep.to(inputs.dtype) / (1 - self.p))


def with_seeded_dropout(model: nn.Module) -> nn.Module:
    """Replace torch's dropout layers inside a model, in place, and return the model (or its replacement).

    Raises:
        ModelError: a dropout layer of a derived class, with its own ``forward``, or with hooks: the replacement
            would ignore these.
    """
    if isinstance(model, _DROPOUTS):
        return _seeded(model, 0)
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in named_layers(parent)
        if isinstance(child, _DROPOUTS)
    ]
    for layer, (parent, name, child) in enumerate(found):
        setattr(parent, name, _seeded(child, layer))
    return model


def _seeded(dropout: nn.Module, layer: int) -> SeededDropout:
    assert isinstance(dropout, _DROPOUTS)
    hooks = any(value for name, value in vars(dropout).items() if name.endswith("_hooks"))
    if type(dropout) not in _DROPOUTS or "forward" in vars(dropout) or hooks:
        raise ModelError(
            f"the dropout layer {type(dropout).__name__} has code of its own (a derived class, a forward or hooks), "
            "which is ignored where its mask is drawn per contribution: use torch.nn.Dropout as it is"
        )
    seeded = SeededDropout(dropout.p, layer, channels=not isinstance(dropout, nn.Dropout))
    return seeded.train(dropout.training)


def seed_names(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the buffers that hold a model's dropout seeds."""
    return tuple(
        f"{name}.seed" if name else "seed"
        for name, module in model.named_modules()
        if isinstance(module, SeededDropout)
    )
