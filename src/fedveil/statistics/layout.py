"""The vector of a release: its blocks one after the other, each scaled so that one person's vector has norm 1 at most.

Block b has vectors of norm at most c_b and d_b numbers whose errors count lambda_b each. Sent as a_b v_b with
sum (a_b c_b)^2 = 1, its numbers have noise sigma / a_b. The sum of lambda_b d_b (sigma / a_b)^2 is least for

    share_b = (a_b c_b)^2 = c_b sqrt(lambda_b d_b) / sum of the same,

which is as good as separate releases that split mu^2 = sigma^-2, in one exchange and for one charge.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from fedveil.errors import ConfigError
from fedveil.statistics.blocks import Block

MOST_NUMBERS: Final = 8192
"""Numbers of one release: whoever reads it holds the covariance of its cells, 512 MiB of so many."""


@dataclass(frozen=True, kw_only=True)
class LayoutSlot:
    """A block's place in the vector.

    Attributes:
        block: what it is.
        start: of its numbers in the vector.
        share: of the squared norm, and so of mu^2.
    """

    block: Block
    start: int
    share: float

    @property
    def scale(self) -> float:
        """a_b, what the block's numbers are multiplied by."""
        return math.sqrt(self.share) / self.block.norm

    @property
    def place(self) -> slice:
        """Return the slice of the vector that holds the numbers."""
        return slice(self.start, self.start + self.block.length)


@dataclass(frozen=True)
class Layout:
    """The blocks of a release with their shares; public, and the same for every silo.

    Raises:
        ConfigError: no block, more than 8,192 numbers, or a weight that is not above 0.
    """

    blocks: tuple[Block, ...]

    def __post_init__(self) -> None:
        """Refuse a vector without numbers, and blocks that nobody weighs."""
        if not self.blocks:
            raise ConfigError("statistics.release: nothing is asked for")
        if self.length > MOST_NUMBERS:
            many = max(self.blocks, key=lambda block: block.length)
            raise ConfigError(
                f"statistics.release.{many.release}: {many.length} of {self.length} numbers; a release takes "
                f"at most {MOST_NUMBERS}: ask for fewer columns, categories, bins or groups"
            )
        for block in self.blocks:
            if not (math.isfinite(block.weight) and block.weight > 0):
                raise ConfigError(f"statistics.release.{block.release}.weight: must be above 0")

    @cached_property
    def slots(self) -> tuple[LayoutSlot, ...]:
        """Return the blocks with their places and shares, in order."""
        demand = [block.norm * math.sqrt(block.weight * block.length) for block in self.blocks]
        total, start, found = math.fsum(demand), 0, []
        for block, wanted in zip(self.blocks, demand, strict=True):
            found.append(LayoutSlot(block=block, start=start, share=wanted / total))
            start += block.length
        return tuple(found)

    @property
    def length(self) -> int:
        """d, how many numbers are sent."""
        return sum(block.length for block in self.blocks)

    @property
    def norm(self) -> float:
        """Return the largest l2 norm of one person's vector: 1."""
        return math.sqrt(math.fsum((slot.scale * slot.block.norm) ** 2 for slot in self.slots))

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the columns that are read, each once."""
        return tuple(dict.fromkeys(name for block in self.blocks for name in block.columns))

    def slots_of(self, release: str) -> Sequence[LayoutSlot]:
        """Return the parts of one release."""
        return tuple(slot for slot in self.slots if slot.block.release == release)
