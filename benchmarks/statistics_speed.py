"""Sums of statistics: CPU seconds for a million people with a record each, 1,000 numbers of eight histograms."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from benchmarks.harness import Row, at_most, cpu_seconds
from benchmarks.statistics import histograms
from fedveil.population.columns import ColumnTable, Numbers
from fedveil.privacy.bounds import FixedVector
from fedveil.statistics.local import LocalStatistic, silo_sums


def rows(quick: bool) -> Iterator[Row]:
    """Measure it three times; quick sums a tenth of the people and scales."""
    n = 100_000 if quick else 1_000_000
    rng, names = np.random.default_rng(0), tuple(f"x{place}" for place in range(8))
    layout = histograms(names, 121, "flat")
    table = ColumnTable(
        columns={
            name: Numbers(values=rng.uniform(-1, 1, n), state=np.zeros(n, dtype=np.int8)) for name in names
        },
        silo=rng.integers(0, 5, n).astype(np.int32),
        user=np.arange(n, dtype=np.int32),
        n_users=n,
        silo_names=("a", "b", "c", "d", "e"),
    )
    weights = torch.full((n,), 0.2, dtype=torch.float64)
    bound = FixedVector(norm=1.0, step=2.0**-29)
    (seconds,) = cpu_seconds(
        lambda: silo_sums(LocalStatistic(layout=layout), table, weights, bound), repeats=3
    )
    case = f"10^6 records, {layout.length} numbers" + (f", from {n:,}" if n < 10**6 else "")
    yield at_most(case, "CPU s", seconds * 10**6 / n, 5.0)
