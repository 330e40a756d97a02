"""From noisy numbers to cells: the linear inverse of the strategy, and totals that agree.

    cells = D z / a,    covariance = (sigma / a)^2 D D'

Every block whose cells cover all records estimates the same number of people in every group. Their totals t_b with
variances v_b are combined into the least-squares total n = sum(t_b / v_b) / sum(1 / v_b), and every block moves to it
along k_b = Sigma_b 1 / v_b: the best linear unbiased estimate under the constraint that all agree. Its covariance is

    Sigma_b - k_b k_b' (v_b - v),   v = 1 / sum(1 / v_b).

All of it is linear in the noise, so covariances are exact. What is displayed may be projected (no negative counts);
intervals never come from projected values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Float64

from fedveil.statistics.blocks import Layout, LayoutSlot
from fedveil.statistics.cells import Partition

# --- isotonic regression ------------------------------------------------------------------------------------
# Isotonic regression: the rising sequence that lies nearest to noisy values of one that rises.


def isotonic_regression(
    values: Float64[np.ndarray, " n"],
    *,
    sample_weight: Float64[np.ndarray, " n"] | None = None,
    y_min: float | None = None,
    y_max: float | None = None,
) -> Float64[np.ndarray, " n"]:
    """Return the rising sequence with the least weighted sum of squared distances, cut off at two bounds.

    Args:
        values: (n,) what should rise.
        sample_weight: (n,) of each squared distance; None: all the same.
        y_min: what no element of the sequence lies below.
        y_max: what none lies above.
    """
    from sklearn import isotonic  # here, for it is slow to load and few commands need it

    found: Any = isotonic.isotonic_regression(values, sample_weight=sample_weight, y_min=y_min, y_max=y_max)
    return np.asarray(found, dtype=np.float64)


# --- decoding -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class Cells:
    """Estimates of a block's cells in every group, with the covariance that the noise gives them.

    Attributes:
        values: (groups, width).
        covariance: (width, width), the same in every group; different groups are independent.
    """

    values: Float64[np.ndarray, "groups width"]
    covariance: Float64[np.ndarray, "width width"]


def decode(
    layout: Layout, noisy: Float64[np.ndarray, " d"], noise_std: float, unit: float = 1.0
) -> Mapping[tuple[str, str], Cells]:
    """Return every block's cells, by release and part.

    Args:
        layout: of the vector.
        noisy: (d,) the released sum.
        noise_std: standard deviation of its noise, per number.
        unit: what a person's full weight adds to the sum: 1, or 1/|S| where every silo has that weight; cells are
            divided by it.
    """
    found = {}
    for slot in layout.slots:
        found[_key(slot)] = _linear(slot, noisy, noise_std / unit, unit)
    totals: dict[Partition, list[LayoutSlot]] = {}
    for slot in layout.slots:
        if slot.block.encoder.covers:
            totals.setdefault(slot.block.groups, []).append(slot)
    for slots in totals.values():
        agreed = consistent([found[_key(slot)] for slot in slots])
        found.update(zip(map(_key, slots), agreed, strict=True))
    return found


def consistent(blocks: Sequence[Cells]) -> tuple[Cells, ...]:
    """Return blocks over the same people and groups with totals that agree: generalised least squares."""
    variances = np.array([block.covariance.sum() for block in blocks])
    totals = np.stack([block.values.sum(axis=1) for block in blocks])
    variance = 1 / (1 / variances).sum()
    agreed = variance * (totals / variances[:, None]).sum(axis=0)
    found = []
    for block, total, own in zip(blocks, totals, variances, strict=True):
        gain = block.covariance.sum(axis=1) / own
        found.append(
            replace(
                block,
                values=block.values + np.outer(agreed - total, gain),
                covariance=block.covariance - np.outer(gain, gain) * (own - variance),
            )
        )
    return tuple(found)


def _linear(slot: LayoutSlot, noisy: Float64[np.ndarray, " d"], noise_std: float, unit: float) -> Cells:
    strategy = slot.block.strategy
    sent = noisy[slot.place].reshape(slot.block.groups.size, strategy.n_sent) / (slot.scale * unit)
    return Cells(
        values=sent @ strategy.decoder.T, covariance=(noise_std / slot.scale) ** 2 * strategy.covariance
    )


def _key(slot: LayoutSlot) -> tuple[str, str]:
    return slot.block.release, slot.block.part
