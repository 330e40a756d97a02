"""The sum of one release of statistics over all silos, in one process: bounded, weighted, and under its protection."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float64

from fedveil.engine.aggregation import MaskedRange
from fedveil.engine.weighting import WeightingRange
from fedveil.methods.method import Method
from fedveil.methods.sending import Sender
from fedveil.population.columns import ColumnTable
from fedveil.privacy.bounds import FixedVector
from fedveil.protection.driver import Driver
from fedveil.protection.open_sums import OpenSums
from fedveil.protection.weighted_sums import WeightedGiven
from fedveil.protection.weighting_silo import SEED_BYTES
from fedveil.randomness import PrivacyRandomness
from fedveil.statistics.local import LocalStep, silo_sums


def noisy_sum(
    method: Method, step: LocalStep, table: ColumnTable, privacy: PrivacyRandomness, number: int = 1
) -> Float64[np.ndarray, " d"]:
    """Return the sum of all silos' messages, as the server learns it under the method's protection.

    Args:
        method: the composition of the statistic.
        step: its local step.
        table: the records of all silos.
        privacy: where noise and keys come from.
        number: which release this is, so that repeatable noise is not that of another one.
    """
    n_silos = len(table.silo_names)
    if method.protection.weighs:
        return _privately_weighted(method, step, table, privacy, number)
    assert isinstance(method.bound, FixedVector)
    sums = silo_sums(step, table, method.weights.of(table.pairs(), n_silos, table.n_users), method.bound)

    def message(silo: int) -> Float64[np.ndarray, " d"]:
        return method.channel.send(sums[silo], _sender(method, silo, n_silos, privacy, number)).numbers

    everybody = tuple(range(n_silos))
    if not method.protection.masks:
        open_sums = Driver(OpenSums(clients=n_silos, length=step.length), kinds=method.kinds)
        return open_sums.play((1, 0), everybody, None, message)[0]
    masked = MaskedRange.of(method, n_silos=n_silos, n_users=table.n_users, length=step.length)
    driver = Driver(masked.protocol(privacy), kinds=method.kinds)
    units, _ = driver.play((1, 0), everybody, None, lambda silo: masked.units(message(silo)))
    return masked.vector(units)


def _sender(method: Method, silo: int, n_silos: int, privacy: PrivacyRandomness, number: int) -> Sender:
    return Sender(number=silo, senders=n_silos, round=number, grid=method.bound.grid, privacy=privacy)


def _privately_weighted(
    method: Method, step: LocalStep, table: ColumnTable, privacy: PrivacyRandomness, number: int
) -> Float64[np.ndarray, " d"]:
    """Return the sum weighted under encryption: a person's counts stay with her silos."""
    n_silos, groups = len(table.silo_names), table.pairs()
    agreed = WeightingRange.of(
        method, groups, n_silos=n_silos, n_users=table.n_users, length=step.length, rounds=1
    )
    assert isinstance(method.bound, FixedVector)
    bound = method.bound

    def given(silo: int) -> WeightedGiven:
        rows = np.concatenate(
            [np.zeros((0, step.length)), *_own_vectors(step, table, groups.silo == silo, bound)]
        )
        nothing = np.zeros(step.length)
        share = method.channel.send(nothing, _sender(method, silo, n_silos, privacy, number)).numbers
        dither = privacy.stream("dither", number, silo, 0).uint64(SEED_BYTES // 8).tobytes()
        return agreed.given(rows, share, dither)

    driver = Driver(agreed.protocol(privacy), kinds=method.kinds)
    units, _ = driver.play((1, 0), tuple(range(n_silos)), None, given)
    return agreed.vector(units)


def _own_vectors(
    step: LocalStep, table: ColumnTable, own: np.ndarray, bound: FixedVector
) -> list[Float64[np.ndarray, "m d"]]:
    """Return a silo's people's vectors of weight 1, multiples of the grid, in blocks."""
    condensed, _, mixed = step.pairs(table)
    found = []
    for _, vectors in step.vectors(condensed, mixed[np.flatnonzero(own)]):
        weights = torch.ones(len(vectors), dtype=torch.float64)
        found.append(bound.quantize_(vectors, bound.norms(vectors), weights).numpy() * bound.grid)
    return found
