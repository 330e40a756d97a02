"""Generate counter-based randomness: each random word is a hash of its purpose alone.

Batches and dropout masks of a contribution are functions of (experiment seed, round, silo, user, counters) alone.
Therefore every trainer, any chunk size and any number of processes train a contribution in the same way, and removing
one user changes no other user's update.

The hash is the finaliser of MurmurHash3 as tuned in SplitMix64 (Steele, Lea and Flood, OOPSLA 2014). It is a
bijection of 64-bit words that passes the usual statistical batteries on counters. Not claimed: cryptographic
strength, because experiment randomness is not secret.

**Dropout.** PyTorch's reads one global random stream. The mask of a contribution would then depend on the order of
computation, and a vectorised trainer could not agree with a loop. Here entry j of layer l's mask at one step is

    keep_j = [ hash(seed, l, j) >= p 2^53 ],    output = input * keep / (1 - p),

where the hash is taken to 53 bits and the seed is the contribution's seed for that step. P(keep) = 1 - p to within
2^-53. Position j counts entries record by record, so padding at the end of a batch changes no mask of the records
before it.
"""

from __future__ import annotations

from typing import Final

import torch
from jaxtyping import Int64
from torch import Tensor, nn

from fedveil.data.records import Groups
from fedveil.errors import ModelError
from fedveil.randomness import ExperimentRandomness
from fedveil.training.copying import named_layers


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


_WORD: Final = (1 << 64) - 1
# Constants of SplitMix64: the increment is 2^64 divided by the golden ratio, and the two multipliers are Stafford's
# variant 13 of the MurmurHash3 finaliser. They are written as int64, the only 64-bit integer type of PyTorch kernels.
_GOLDEN: Final = _signed(0x9E3779B97F4A7C15)
_FIRST: Final = _signed(0xBF58476D1CE4E5B9)
_SECOND: Final = _signed(0x94D049BB133111EB)


def mix(words: Tensor) -> Tensor:
    """Hash int64 words of any shape, one by one, as 64-bit words; products wrap modulo 2^64."""
    words = words + _GOLDEN
    words.bitwise_xor_(_shifted(words, 30)).mul_(_FIRST)
    words.bitwise_xor_(_shifted(words, 27)).mul_(_SECOND)
    return words.bitwise_xor_(_shifted(words, 31))


def _shifted(words: Tensor, bits: int) -> Tensor:
    """Shift right and fill with zeros; ``>>`` of PyTorch on int64 copies the sign bit."""
    return (words >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def mix_scalar(number: int) -> int:
    """Hash one int64 word, with the result of :func:`mix`.

    For a single number, a dozen tensor kernels take longer than the rest of a hash.

    >>> mix_scalar(-1) == int(mix(torch.tensor(-1)))
    True
    """
    word = (number + _GOLDEN) & _WORD
    word = (word ^ word >> 30) * _FIRST & _WORD
    word = (word ^ word >> 27) * _SECOND & _WORD
    return _signed(word ^ word >> 31)


def derive(seeds: Tensor, counter: Tensor | int) -> Tensor:
    """Return the hash of each pair (seed, counter); shapes broadcast.

    Distinct pairs give words that look independent.
    """
    return mix(seeds ^ (mix_scalar(counter) if isinstance(counter, int) else mix(counter.to(seeds.device))))


def contribution_seeds(
    groups: Groups,
    members: Int64[Tensor, " m"],
    randomness: ExperimentRandomness,
    path: tuple[str | int, ...],
) -> Int64[Tensor, " m"]:
    """Return one int64 seed per member: a hash of the experiment seed, the path, the silo and the user.

    A user enters by its key, or by its number if the groups have no keys.
    """
    chosen = members.cpu().numpy()
    silo = torch.from_numpy(groups.silo[chosen]).long()
    user = torch.from_numpy((groups.user if groups.key is None else groups.key)[chosen]).long()
    base = torch.full_like(silo, randomness.integer("local", *path))
    return derive(derive(base, silo), user)


def batch_order(
    seeds: Int64[Tensor, " b"],
    sizes: Int64[Tensor, " b"],
    epoch: int | Int64[Tensor, " b"],
    batch_size: int | None,
) -> Int64[Tensor, "b longest"]:
    """Return the order in which an epoch visits the records of each contribution.

    Row i starts with a permutation of 0 .. sizes[i]-1 and ends with padding. The permutation sorts one random word
    per record. A contribution that fits into one batch keeps the order of its table, because one batch has no order.

    Args:
        seeds: (b,) seed of each contribution.
        sizes: (b,) number of records of each.
        epoch: one epoch for all contributions, or one for each.
        batch_size: records per step; None takes all records.
    """
    longest = int(sizes.max())
    positions = torch.arange(longest)
    if batch_size is None or longest <= batch_size:
        return positions.expand(len(sizes), longest)
    words = derive(derive(seeds, epoch)[:, None], positions)
    words = torch.where(sizes[:, None] > batch_size, words, positions)
    # Padding gets the largest word and sorts last; the sort is stable, so equal words keep a defined order.
    words = torch.where(positions < sizes[:, None], words, torch.iinfo(torch.int64).max)
    return words.argsort(dim=1, stable=True)


def step_seeds(seeds: Int64[Tensor, " b"], epoch: int, batch: int) -> Int64[Tensor, " b"]:
    """Return the dropout seed of every contribution at one step; :func:`batch_order` uses other words.

    A step is named by its epoch and its batch within the epoch, because contributions in one batch may have different
    numbers of batches per epoch.
    """
    # batch_order derives from (seed, epoch) with epoch >= 0, so the counter -1 separates masks from orders.
    return derive(derive(derive(seeds, -1), epoch), batch)


# --- dropout ---

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
    dropouts = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in named_layers(parent)
        if isinstance(child, _DROPOUTS)
    ]
    for layer, (parent, name, child) in enumerate(dropouts):
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
