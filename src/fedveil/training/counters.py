"""Generate counter-based randomness: each random word is a hash of its purpose alone.

Batches and dropout masks of a contribution are functions of (experiment seed, round, silo, user, counters) alone.
Therefore every trainer, any chunk size and any number of processes train a contribution in the same way, and removing
one user changes no other user's update.

The hash is the finaliser of MurmurHash3 as tuned in SplitMix64 (Steele, Lea and Flood, OOPSLA 2014). It is a
bijection of 64-bit words that passes the usual statistical batteries on counters. Not claimed: cryptographic
strength, because experiment randomness is not secret.
"""

from __future__ import annotations

from typing import Final

import torch
from jaxtyping import Int64
from torch import Tensor

from fedveil.data.records import Groups
from fedveil.randomness import ExperimentRandomness


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
