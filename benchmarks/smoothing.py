"""Laplacian smoothing of one long vector against a real FFT and its inverse, the least that it can cost."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.harness import Row, cpu_seconds
from fedveil.training.server.denoise import smooth

_MOST_TIMES_TRANSFORMS = 2.0


def rows(quick: bool) -> Iterator[Row]:
    """Smooth float32 vectors of 10^6 (and 10^8) values; the target is at most twice the two transforms."""
    yield from compared([(10**6, 5)] if quick else [(10**6, 5), (10**8, 2)])


def smallest() -> Iterator[Row]:
    """Smooth a thousand values."""
    yield from compared([(1_000, 1)])


def compared(sizes: list[tuple[int, int]]) -> Iterator[Row]:
    """Smooth vectors of these sizes, each so many times."""
    for size, repeats in sizes:
        values = torch.randn(size)
        ours, peer = cpu_seconds(
            lambda values=values: smooth(values, 1.0),  # type: ignore[misc]
            lambda values=values: torch.fft.irfft(torch.fft.rfft(values), n=len(values)),  # type: ignore[misc]
            repeats=repeats,
        )
        yield Row(
            case=f"smooth {size:,} float32 values; peer: rfft and irfft",
            unit="CPU s",
            ours=ours,
            peer=peer,
            ratio=ours / peer,
            target=_MOST_TIMES_TRANSFORMS,
            met=ours <= _MOST_TIMES_TRANSFORMS * peer,
        )
