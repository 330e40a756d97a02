"""Sums of statistics: a million people with a record each, and masks of 50 silos; 1,000 numbers of eight histograms."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import torch

from benchmarks.harness import Row, at_most, compared, cpu_seconds
from benchmarks.statistics import histograms
from fedveil.data.columns import ColumnTable, Numbers
from fedveil.methods.guarantee import PublicFacts
from fedveil.methods.message_encoding import Sender
from fedveil.methods.method import message_kinds
from fedveil.methods.secure_aggregation import SecureAggregation
from fedveil.methods.statistic import statistic
from fedveil.methods.weights import Weights
from fedveil.privacy.bounds import FixedVector
from fedveil.protocols.driver import LocalDriver
from fedveil.protocols.masked_sums import MaskedSumSpec
from fedveil.randomness import PrivacyRandomness
from fedveil.run.releases.release import Release, noisy_sum
from fedveil.statistics.local_vectors import LocalStatistic, silo_sums

_NAMES: Final = tuple(f"x{place}" for place in range(8))


def rows(quick: bool) -> Iterator[Row]:
    """Measure each three times; quick sums a tenth of the people and scales."""
    yield from _summed(100_000 if quick else 1_000_000)
    yield _masked(LocalStatistic(layout=histograms(_NAMES, 121, "flat")), 50)


def smallest() -> Iterator[Row]:
    """Sum a thousand people, and mask the sums of three silos."""
    yield from _summed(1_000)
    yield _masked(LocalStatistic(layout=histograms(_NAMES, 4, "flat")), 3)


def _summed(n: int) -> Iterator[Row]:
    """Sum n people, and scale to a million."""
    layout, table = histograms(_NAMES, 121, "flat"), _people(n, 5)
    weights = torch.full((n,), 0.2, dtype=torch.float64)
    bound = FixedVector(norm=1.0, step=2.0**-29)
    (seconds,) = cpu_seconds(
        lambda: silo_sums(LocalStatistic(layout=layout), table, weights, bound), repeats=3
    )
    case = f"10^6 records, {layout.length} numbers" + (f", from {n:,}" if n < 10**6 else "")
    yield at_most(case, "CPU s", seconds * 10**6 / n, 5.0)


def _masked(step: LocalStatistic, n_silos: int) -> Row:
    """Compare a release of silos with 20 people each with a round of training whose updates are zeros of its length."""
    table, privacy = _people(20 * n_silos, n_silos), PrivacyRandomness.insecure(0)
    public = PublicFacts(n_silos=n_silos, n_users=table.n_users, dimension=step.length)
    method = statistic(
        local=step,
        public=public,
        weights=Weights.UNIFORM,
        noise_multiplier=1.0,
        protection=SecureAggregation(),
    )
    release = Release(method=method, step=step, public=public)
    agreed = release.protocol_spec(table.pairs())
    assert isinstance(agreed, MaskedSumSpec)

    def give(silo: int) -> object:
        at = Sender(number=silo, senders=n_silos, round=1, grid=release.bound.grid, privacy=privacy)
        return agreed.units(method.channel.send(np.zeros(step.length), at).numbers)

    def round_of_zeros() -> object:
        driver: LocalDriver[Any, Any] = LocalDriver(agreed, kinds=message_kinds(method))
        return driver.play((1, 0), tuple(range(n_silos)), None, give)

    ours, theirs = cpu_seconds(lambda: noisy_sum(release, table, privacy), round_of_zeros, repeats=3)
    case = f"{n_silos} silos masked, {step.length} numbers; peer: a round of as many parameters"
    return compared(case, "releases a CPU second", 1 / ours, 1 / theirs, 0.8)


def _people(n: int, n_silos: int) -> ColumnTable:
    """Return people with a record each, in silos at random."""
    rng = np.random.default_rng(0)
    return ColumnTable(
        columns={
            name: Numbers(values=rng.uniform(-1, 1, n), state=np.zeros(n, dtype=np.int8)) for name in _NAMES
        },
        silo=rng.integers(0, n_silos, n).astype(np.int32),
        user=np.arange(n, dtype=np.int32),
        n_users=n,
        silo_names=tuple(f"silo {place}" for place in range(n_silos)),
    )
