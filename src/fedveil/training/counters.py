"""Counter-based randomness: a random word is a hash of what it is for, whoever else is computed.

Batches and dropout masks of a contribution are functions of (experiment seed, round, silo, user, counters)
and of nothing else. That is why every trainer, any chunk size and any number of processes train a
contribution in the same way, and why removing one user changes no other user's update.

The hash is the finaliser of MurmurHash3 as tuned in SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), a
bijection of 64-bit words that passes the usual statistical batteries on counters. It is not cryptographic:
experiment randomness is not secret.
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
_GOLDEN: Final = _signed(0x9E3779B97F4A7C15)
_FIRST: Final = _signed(0xBF58476D1CE4E5B9)
_SECOND: Final = _signed(0x94D049BB133111EB)


def mix(words: Tensor) -> Tensor:
    """Hash int64 words of any shape, seen as 64 bits, one by one; products wrap modulo 2^64."""
    words = words + _GOLDEN
    words.bitwise_xor_(_shifted(words, 30)).mul_(_FIRST)
    words.bitwise_xor_(_shifted(words, 27)).mul_(_SECOND)
    return words.bitwise_xor_(_shifted(words, 31))


def _shifted(words: Tensor, bits: int) -> Tensor:
    """Shift right without sign, which torch's >> on int64 does not."""
    return (words >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def mix_scalar(number: int) -> int:
    """Hash one int64 word, as :func:`mix` does; a dozen kernels for one number take longer than the rest of a hash.

    >>> mix_scalar(-1) == int(mix(torch.tensor(-1)))
    True
    """
    word = (number + _GOLDEN) & _WORD
    word = (word ^ word >> 30) * _FIRST & _WORD
    word = (word ^ word >> 27) * _SECOND & _WORD
    return _signed(word ^ word >> 31)


def derive(seeds: Tensor, counter: Tensor | int) -> Tensor:
    """Return the words of (seed, counter): independent-looking for distinct pairs; shapes broadcast."""
    return mix(seeds ^ (mix_scalar(counter) if isinstance(counter, int) else mix(counter.to(seeds.device))))


def contribution_seeds(
    groups: Groups,
    members: Int64[Tensor, " m"],
    randomness: ExperimentRandomness,
    path: tuple[str | int, ...],
) -> Int64[Tensor, " m"]:
    """Return one seed per member: a function of the experiment's seed, the path, the silo and the key (or number)."""
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
    """Return the order in which an epoch (one for all, or one each) visits the records of each contribution.

    Row i starts with a permutation of 0 .. sizes[i]-1 and ends with padding. The permutation sorts one random word per
    record; a contribution that fits into one batch keeps the order of its table, since one batch has no order.
    """
    longest = int(sizes.max())
    positions = torch.arange(longest)
    if batch_size is None or longest <= batch_size:
        return positions.expand(len(sizes), longest)
    words = derive(derive(seeds, epoch)[:, None], positions)
    words = torch.where(sizes[:, None] > batch_size, words, positions)
    words = torch.where(positions < sizes[:, None], words, torch.iinfo(torch.int64).max)
    return words.argsort(dim=1, stable=True)


def step_seeds(seeds: Int64[Tensor, " b"], epoch: int, batch: int) -> Int64[Tensor, " b"]:
    """Return the dropout seed of every contribution at one of its own steps; batches use other words.

    A step is named by its epoch and its batch within the epoch: contributions that are trained together
    need not have equally many batches in an epoch.
    """
    return derive(derive(derive(seeds, -1), epoch), batch)
