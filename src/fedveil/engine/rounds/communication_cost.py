"""What the messages of a round cost to send."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedveil.methods.sending import MessageCost


@dataclass(frozen=True, kw_only=True)
class CommunicationCost:
    """What the messages of all silos or clients cost in a round, where a channel counts them.

    Attributes:
        float32_bytes: length of the same sums in float32.
        bits_per_parameter: bits of the messages over parameters sent.
        limit: information limit of the same sums, bits a parameter, mean over messages; None where messages are not
            compressed to their noise.
        ratio: bits_per_parameter over limit; None where the limit is 0 or None.
        acceptance: share of the quantisers' draws that were accepted, mean over messages; None where none are drawn.
    """

    float32_bytes: int
    bits_per_parameter: float
    limit: float | None
    ratio: float | None
    acceptance: float | None

    @classmethod
    def of(cls, costs: Sequence[MessageCost]) -> CommunicationCost | None:
        """Add up the messages of a round; None where there are none."""
        if not costs:
            return None
        parameters = sum(cost.parameters for cost in costs)
        limits = [cost.limit for cost in costs if cost.limit is not None]
        accepted = [cost.acceptance for cost in costs if cost.acceptance is not None]
        limit = float(np.mean(limits)) if limits else None
        bits = 8 * sum(cost.bytes for cost in costs) / parameters
        return cls(
            float32_bytes=4 * parameters,
            bits_per_parameter=bits,
            limit=limit,
            ratio=bits / limit if limit else None,
            acceptance=float(np.mean(accepted)) if accepted else None,
        )
