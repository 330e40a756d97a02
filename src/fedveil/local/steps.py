"""What one contribution computes from the model it is given: local training as a value.

=================  ====================================================================================
step               update Delta of a contribution with records D, from the model w
=================  ====================================================================================
LocalSgd           w_Q - w after Q epochs of mini-batch SGD on D (ULDP-AVG, FedAVG)
LocalGradient      -(gradient of the mean loss over D at w) (ULDP-SGD)
=================  ====================================================================================

Both are an update in the sense of a model difference: the server ADDS the aggregate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

from fedveil.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class LocalSgd:
    """Q epochs of mini-batch SGD; the update is Delta = w_end - w_start.

    Each epoch visits the records in a fresh order, in batches of ``batch_size``; the last batch may be
    smaller and its loss is the mean over the records it has. With momentum mu and weight decay lambda, as in
    ``torch.optim.SGD``:

        v <- mu v + (grad + lambda w),    w <- w - learning_rate v,    v starting at 0 in every contribution.

    Args:
        learning_rate: local rate eta_l > 0.
        epochs: Q >= 1.
        batch_size: records per step; None takes all records of the contribution.
        momentum: mu in [0, 1).
        weight_decay: lambda >= 0.

    Raises:
        ConfigError: a value outside these ranges.
    """

    learning_rate: float
    epochs: int
    batch_size: int | None = None
    momentum: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            raise ConfigError(f"local learning_rate must be a positive number, not {self.learning_rate}")
        if self.epochs < 1:
            raise ConfigError(f"local epochs must be at least 1, not {self.epochs}")
        if self.batch_size is not None and self.batch_size < 1:
            raise ConfigError(
                f"local batch_size must be at least 1 (or absent for all records), not {self.batch_size}"
            )
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"local momentum must be in [0, 1), not {self.momentum}")
        if not (math.isfinite(self.weight_decay) and self.weight_decay >= 0):
            raise ConfigError(f"local weight_decay must be a number >= 0, not {self.weight_decay}")


@dataclass(frozen=True, kw_only=True)
class LocalGradient:
    """One gradient: Delta = -grad of the mean loss over all records of the contribution.

    The same as one full-batch step of rate 1, so the trainers know only :class:`LocalSgd`.
    """

    def as_sgd(self) -> LocalSgd:
        """Return the full-batch step of rate 1 whose update is this one."""
        return LocalSgd(learning_rate=1.0, epochs=1)


LocalStep: TypeAlias = LocalSgd | LocalGradient


def as_sgd(local: LocalStep) -> LocalSgd:
    """Return the SGD that computes this local step's update."""
    return local.as_sgd() if isinstance(local, LocalGradient) else local
