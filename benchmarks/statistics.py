"""Statistics that count people: noise against one central Gaussian, error of codes, coverage of curves."""

from __future__ import annotations

import json
import math
import os
import subprocess
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from lifelines import KaplanMeierFitter
from scipy.stats import ks_2samp

from benchmarks import evaluation, evaluation_targets
from benchmarks.harness import Row, at_most
from fedveil.data.allocation import Allocation
from fedveil.data.catalogue import load
from fedveil.data.columns import ColumnTable, Numbers
from fedveil.methods.guarantee import PublicFacts
from fedveil.methods.message_encoding import Sender
from fedveil.methods.method import Method
from fedveil.methods.secure_aggregation import SecureAggregation
from fedveil.methods.statistic import statistic
from fedveil.methods.weights import Weights
from fedveil.privacy.bounds import FixedVector
from fedveil.randomness import PrivacyRandomness
from fedveil.statistics.blocks import Block, Layout, OneHot
from fedveil.statistics.cells import Bins
from fedveil.statistics.intervals import NORMAL_95
from fedveil.statistics.local_vectors import LocalStatistic, silo_sums
from fedveil.statistics.strategy import Kind, Strategy
from fedveil.statistics.survival import curve

_MULTIPLIERS = {0.5: 7.03, 1.0: 3.73, 3.0: 1.39}
"""Noise multipliers of one Gaussian release at delta 1e-5, by epsilon."""


def rows(quick: bool) -> Iterator[Row]:
    """Measure all of it; quick takes a third of the simulations and a tenth of the people."""
    yield from _codes()
    yield from _against_central(60 if quick else 200)
    yield from _curves(100 if quick else 300)
    yield from _against_opendp(20 if quick else 200)
    yield from evaluation.rows(quick)
    yield from evaluation_targets.rows(quick)


def smallest() -> Iterator[Row]:
    """Release over the smallest data set twice, and draw one curve of few people."""
    yield next(_codes())
    yield from _against_central(2, (("heart_disease", 20),))
    yield from _curves(1, (1000,))


def _codes() -> Iterator[Row]:
    """Noise of leading sums under each strategy, in standard deviations."""
    for size, target in ((64, 2.2), (256, 2.7), (1024, 3.1)):
        for kind, most in (("flat", math.sqrt(size)), ("prefix", target + 0.05)):
            strategy = Strategy(kind, size)  # type: ignore[arg-type]
            sums = np.tril(np.ones((size, size)))
            found = float(np.sqrt(np.einsum("jk,kl,jl->j", sums, strategy.covariance, sums).mean()))
            yield at_most(f"{kind}, {size} bins: noise of leading sums, rms", "sd", found, most)


def _against_central(
    repeats: int,
    data: Sequence[tuple[str, int]] = (("heart_disease", 300), ("creditcard", 2000), ("tcga_brca", 400)),
) -> Iterator[Row]:
    """Root mean square error of histograms over silos, over that of one central discrete Gaussian."""
    for name, users in data:
        population = load(name, allocation=Allocation(), n_users=users)
        features = population.train.features.reshape(len(population.train), -1)[:, :4].astype(np.float64)
        names = tuple(f"x{place}" for place in range(features.shape[1]))
        table = ColumnTable(
            columns={
                one: Numbers(values=features[:, place], state=np.zeros(len(features), dtype=np.int8))
                for place, one in enumerate(names)
            },
            silo=population.train.silo,
            user=population.train.user,
            n_users=users,
            silo_names=population.silo_names,
        )
        step, n_silos = LocalStatistic(layout=histograms(names, 24, "flat")), population.n_silos
        for epsilon in (0.5, 3.0):
            method = _method(step, n_silos, users, _MULTIPLIERS[epsilon])
            weights = Weights.BY_RECORDS.for_groups(table.pairs(), n_silos, users)
            sums = silo_sums(step, table, weights, FixedVector(norm=1.0, step=method.bound.grid))
            exact = sums.sum(axis=0)
            seeds = range(round(1000 * epsilon), round(1000 * epsilon) + repeats)  # others for each epsilon
            errors = [_sum(method, sums, seed) - exact for seed in seeds]
            ratio = float(np.sqrt(np.mean(np.square(errors)))) / _MULTIPLIERS[epsilon]
            yield at_most(f"{name}, epsilon {epsilon:g}: error over central", "times", ratio, 1.02)


def _against_opendp(repeats: int) -> Iterator[Row]:
    """The noise of five silos' shares beside OpenDP's discrete Gaussian.

    FEDVEIL_OPENDP_PYTHON names an interpreter that has it (a virtual environment with ``pip install opendp==0.16.0``);
    without one there is no row.
    """
    python = os.environ.get("FEDVEIL_OPENDP_PYTHON")
    if python is None:
        return
    step = LocalStatistic(layout=histograms(("x",), 24, "flat"))
    script = str(Path(__file__).with_name("opendp_peer.py"))
    for epsilon, multiplier in _MULTIPLIERS.items():
        method = _method(step, 5, 1000, multiplier)
        ours = np.concatenate([_sum(method, np.zeros((5, step.length)), seed) for seed in range(repeats)])
        command = [python, script, str(multiplier), str(step.length), str(repeats)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        theirs = np.ravel(json.loads(done.stdout))
        own, peer = (float(np.sqrt(np.mean(one**2))) for one in (ours, theirs))
        case, most = f"noise of five silos, epsilon {epsilon:g}", 1.02 * multiplier
        met = own <= most * (1 + 4 / math.sqrt(2 * len(ours)))
        yield Row(case=f"{case}; peer: OpenDP", unit="sd", ours=own, peer=peer, target=most, met=met)
        same = float(ks_2samp(ours, theirs).pvalue)
        yield Row(case=f"{case}: Kolmogorov-Smirnov with OpenDP's", unit="p", ours=same, met=same > 1e-3)


def _sum(method: Method, sums: np.ndarray, seed: int) -> np.ndarray:
    """Return the sum of all silos' noisy messages."""
    privacy = PrivacyRandomness.insecure(seed)
    messages = [
        method.channel.send(
            own, Sender(number=silo, senders=len(sums), round=1, grid=method.bound.grid, privacy=privacy)
        ).numbers
        for silo, own in enumerate(sums)
    ]
    return np.sum(messages, axis=0)


def _method(step: LocalStatistic, n_silos: int, n_users: int, multiplier: float) -> Method:
    return statistic(
        local=step,
        public=PublicFacts(n_silos=n_silos, n_users=n_users),
        weights=Weights.UNIFORM,
        noise_multiplier=multiplier,
        protection=SecureAggregation(),
    )


def histograms(names: tuple[str, ...], bins: int, kind: Kind) -> Layout:
    edges = tuple(np.linspace(-1, 1, bins + 1).tolist())
    return Layout(
        tuple(
            Block(release=name, part="cells", encoder=OneHot(Bins(name, edges)), kind=kind) for name in names
        )
    )


def _curves(simulations: int, people: Sequence[int] = (1000, 5000)) -> Iterator[Row]:
    """Coverage of Kaplan-Meier curves, pointwise and as a band; errors beside those of lifelines on the same people."""
    grid = tuple(np.linspace(0, 5, 13).tolist())
    truth = np.exp(-((np.array(grid[1:]) / 6.5) ** 1.2))
    strategy = Strategy("prefix", len(grid))
    for n in people:
        for epsilon, multiplier in _MULTIPLIERS.items():
            rng, sd = np.random.default_rng(n), multiplier * math.sqrt(2)
            inside, at, errors, peers = 0, [], [], []
            for _ in range(simulations):
                left, happened = _people(rng, n)
                exits, events = _counts(left, happened, grid)
                noisy = strategy.decoder @ (strategy.matrix @ exits + sd * rng.normal(size=len(grid)))
                found = curve(
                    (noisy, sd**2 * strategy.covariance),
                    (events + sd * rng.normal(size=len(grid) - 1), sd**2 * np.eye(len(grid) - 1)),
                    grid,
                    1.0,
                )
                k = len(found.grid)
                low, high = found.band()
                inside += bool(((low <= truth[:k]) & (truth[:k] <= high)).all())
                points = [found.point(place) for place in range(k)]
                at += [
                    one.low <= true <= one.high
                    for one, true in zip(points, truth, strict=False)
                    if one is not None
                ]
                errors.append(found.falling - truth[:k])
                peer = KaplanMeierFitter().fit(left, happened)
                peers.append(peer.survival_function_at_times(np.array(grid[1:]) - 1e-9).to_numpy() - truth)
            case = f"Kaplan-Meier, N = {n}, epsilon {epsilon:g}"
            spread = NORMAL_95 * math.sqrt(0.95 * 0.05 / simulations)
            off = abs(inside / simulations - 0.95)
            yield Row(case=f"{case}: band", unit="share", ours=inside / simulations, met=off <= 0.02 + spread)
            yield Row(case=f"{case}: points", unit="share", ours=float(np.mean(at)))
            ours, theirs = (float(np.sqrt(np.mean(np.concatenate(one) ** 2))) for one in (errors, peers))
            yield Row(case=f"{case}: error; peer: lifelines", unit="rms", ours=ours, peer=theirs)


def _people(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return Weibull times under uniform censoring, and which ended with the event."""
    time, censored = 6.5 * rng.weibull(1.2, n), np.minimum(5.0, 1 + 4.8 * rng.random(n))
    return np.minimum(time, censored), time <= censored


def _counts(left: np.ndarray, happened: np.ndarray, grid: tuple[float, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return exits by interval, last first and with those beyond, and events by interval."""
    inside = [(low < left) & (left <= high) & (left < grid[-1]) for low, high in pairwise(grid)]
    exits = [int(one.sum()) for one in inside]
    events = [int((one & happened).sum()) for one in inside]
    return np.array([len(left) - sum(exits), *reversed(exits)]), np.array(events)
