"""Words of masked messages: bytes, mask CPU, and the accuracy that rounding after the noise costs.

Peers are words of 64 bits, the same runs without rounding. Runs of a seed draw the same noise.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import numpy as np

from benchmarks.harness import Row, cpu_seconds
from benchmarks.price import trained
from fedveil.crypto.masks import apply_masks_
from fedveil.methods.gaussian_shares import GaussianShares
from fedveil.privacy.bounds import Clip
from fedveil.privacy.rounding import LEAST_STEPS
from fedveil.protocols.secure_aggregation import AggregationPlan
from fedveil.run.config.experiment import parse
from fedveil.run.populations import PopulationCache
from fedveil.run.releases.records import evaluate
from fedveil.run.setup import prepare

_SILOS: Final = 20
_SEEDS: Final = range(100, 116)
_MORE_SEEDS: Final = range(200, 264)
_DRAWS: Final = 4_000_000
_DIGITS: Final[dict[str, Any]] = {
    "name": "words",
    "rounds": 30,
    "evaluate_every": 30,
    "data": {"name": "digits", "n_users": 100, "n_silos": 5, "allocation": {"law": "zipf"}},
    "model": {"name": "linear"},
    "method": {"name": "uldp-avg-w", "clip": 1.0, "noise_multiplier": 5.0},
    "local": {"learning_rate": 0.1, "epochs": 10},
    "server": {"learning_rate": 1.0},
    "protection": {"name": "secure-aggregation"},
}


def rows(quick: bool) -> Iterator[Row]:
    """Compare words of 16 bits with words of 64: sizes, masks of 10^6 parameters, variance, and paired seeds.

    The goal for accuracy is judged on 16 (quick: 4) pairs; 64 further pairs show the difference more precisely.
    """
    for users, silos in ((100, 5), (1_000, 5), (10_000, 5), (1_000, 50), (10_000, 50), (10_000, 1_000)):
        yield _bytes(users, silos)
    yield _masks(10**6, repeats=9)
    yield _variance(_DRAWS)
    for steps in (None, LEAST_STEPS):
        yield _accuracy(_SEEDS[:4] if quick else _SEEDS, steps, rounds=30)
    if not quick:
        yield replace(_accuracy(_MORE_SEEDS, LEAST_STEPS, rounds=30), target=None, met=None)


def smallest() -> Iterator[Row]:
    """Compare one size, masks of a thousand parameters, and two seeds of one round."""
    yield _bytes(100, 5)
    yield _masks(1_000, repeats=1)
    yield _variance(1_000)
    yield _accuracy(_SEEDS[:2], LEAST_STEPS, rounds=1)


def _bytes(users: int, silos: int) -> Row:
    """Bytes of a masked word at noise multiplier 5; the target is a quarter for up to 10^4 users in 50 silos."""
    bound = Clip(norm=1.0)
    shares = GaussianShares(noise_multiplier=5.0, scale=1.0, users=users)
    channel = shares.sized_for_words(silos, bound, masked=True)
    limit = channel.largest_sum(silos, bound) or 2**62
    ours = AggregationPlan(clients=silos, length=1, limit=limit, sum_limit=limit).word_bytes
    target = 4.0 if users <= 10_000 and silos <= 50 else None
    return Row(
        case=f"word of {users:,} users in {silos:,} silos, a share of {channel.share_std(silos) / channel.step:.3g} "
        "steps; peer: without rounding",
        unit="bytes a parameter",
        ours=float(ours),
        peer=8.0,
        ratio=8 / ours,
        target=target,
        met=None if target is None else 8 / ours >= target,
    )


def _masks(length: int, repeats: int) -> Row:
    keys = [(os.urandom(32), True) for _ in range(_SILOS)]
    short, long = np.zeros(length, dtype="<u2"), np.zeros(length, dtype="<u8")
    ours, peer = cpu_seconds(
        lambda: apply_masks_(short, keys), lambda: apply_masks_(long, keys), repeats=repeats
    )
    return Row(
        case=f"masks of one of {_SILOS} silos, {length:,} words of 16 bits; peer: words of 64 bits",
        unit="CPU s",
        ours=ours,
        peer=peer,
        ratio=peer / ours,
        target=3.0,
        met=peer >= 3 * ours,
    )


def _variance(draws: int) -> Row:
    """Variance of the noise in the sum of 5 silos' rounded messages; 1 / (12 r^2) is expected of uniform roundings."""
    drawn = np.random.default_rng(0)
    shares = drawn.normal(0.0, LEAST_STEPS, (5, draws)) + drawn.uniform(-0.5, 0.5, (5, 1))
    rounded = np.floor(shares + 0.5).sum(axis=0)
    return Row(
        case=f"noise of the sum of 5 silos, a share of {LEAST_STEPS:g} steps, {draws:,} draws: variance added by "
        f"rounding (expected {1 / (12 * LEAST_STEPS**2):.2%}, standard error {np.sqrt(2 / draws):.2%})",
        unit="%",
        ours=100 * float(rounded.var() / (5 * LEAST_STEPS**2) - 1),
    )


def _accuracy(seeds: range, steps: float | None, rounds: int) -> Row:
    """Mean paired difference of accuracy; the target is at most one standard error of it.

    Args:
        seeds: seeds of the pairs.
        steps: steps of a share; None for those of the words that the run takes.
        rounds: number of rounds.
    """
    populations, found = PopulationCache(), []
    for seed in seeds:
        secret = {"privacy": {"insecure_seed": seed}}  # both runs of a pair draw the same noise
        document = _DIGITS | secret | {"seed": seed, "rounds": rounds, "evaluate_every": rounds}
        prepared = prepare(parse(document, "words"), populations)
        shares: Any = prepared.method.channel
        step = shares.step if steps is None else shares.share_std(5) / steps
        # The coarse grid is a multiple of the noise's: a power of two is, and it is at most the step asked for.
        step = step if steps is None else 2.0 ** np.floor(np.log2(step))
        accuracies = []
        for each in (step, 0.0):
            method = replace(prepared.method, channel=replace(shares, step=float(each)))
            setting = replace(prepared.setting, method=method)
            played = replace(prepared, setting=setting)
            metrics = evaluate(played, trained(played))
            assert metrics is not None, "the preset releases no metric"
            accuracies.append(metrics["accuracy"] or 0.0)
        found.append(accuracies[0] - accuracies[1])
    mean, error = float(np.mean(found)), float(np.std(found, ddof=1) / np.sqrt(len(found)))
    actual = shares.share_std(5) / step
    return Row(
        case=f"digits, 100 users, 5 silos, {rounds} rounds, {len(found)} seeds: accuracy with a share of "
        f"{actual:.3g} steps minus without rounding (standard error {error:.2g})",
        unit="accuracy",
        ours=mean,
        target=-error,
        met=mean >= -error,
    )
