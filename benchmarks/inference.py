"""Coverage of regressions' intervals under a budget: of all runs, of those that are shown, by coefficient; statsmodels.

Every cell of the table in docs/theory/inference.md: people with 1 + Poisson(2) records each (survival: 1 or 2) in one
or two of five silos, whose targets are correlated by .4. Noise is that of one central Gaussian on the sums, which is
what shares of silos add up to (``benchmarks.statistics``). Nominal coverage is 95 %. Every simulation has a seed of its
own, its number, so that more of them go on where fewer ended, and cells of one family and size have the same people:
statsmodels is beside the first of them. ``fedveil bench inference`` plays 1,000 simulations a cell, about half an hour
of one core; ``python -m benchmarks.inference 1000 FOLDER`` keeps every cell in a folder as soon as it is played, and
goes on where it was stopped.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import statsmodels.api as sm
from scipy.optimize import brentq
from statsmodels.tools.sm_exceptions import SpecificationWarning

from benchmarks.harness import Row, report
from benchmarks.regressions import Made, made, released
from fedveil.files import replace_file
from fedveil.privacy.accountant import gaussian_epsilon
from fedveil.statistics.inference.newton import covariance
from fedveil.statistics.intervals import NORMAL_95

SIMULATIONS: Final = 1000
LEAST, MOST = 93.0, 97.6
"""Coverage, in percent, that every cell is held to; three standard errors of a cell come on top."""
MOST_ERROR: Final = {"logistic": 0.15, "linear": 0.06}
"""Error that 1,000 people at epsilon 1 are held to."""


@dataclass(frozen=True)
class Cell:
    """One cell of the table."""

    family: str
    n_users: int
    epsilon: float
    overlap: float
    keys: dict[str, Any]

    @property
    def label(self) -> str:
        """What it is of."""
        covariates = self.keys.get("covariates")
        family = self.family if covariates is None else f"{self.family} with {covariates} covariates"
        return f"{family}, N = {self.n_users}, epsilon {self.epsilon:g}, overlap {self.overlap:g}"


def cells() -> Iterator[Cell]:
    """Yield the cells that have intervals; fewer people or events are refused (docs/theory/inference.md)."""
    for overlap in (0.0, 0.5):
        for n_users, epsilon in itertools.product((1000, 5000), (1.0, 3.0)):
            yield Cell("logistic", n_users, epsilon, overlap, {})
            yield Cell("linear", n_users, epsilon, overlap, {"cut": 2.0})
        three, five = (
            {"covariates": 3, "grid": (0.0, 2.0, 5.0)},
            {"covariates": 5, "grid": (0.0, 1.5, 3.0, 5.0)},
        )
        for n_users, epsilon in ((1000, 3.0), (5000, 1.0), (5000, 3.0)):
            yield Cell("survival", n_users, epsilon, overlap, three)
        for epsilon in (1.0, 3.0):
            yield Cell("survival", 5000, epsilon, overlap, five)
    yield Cell("poisson", 5000, 1.0, 0.5, {"cap": 4})


def mu_of(epsilon: float) -> float:
    """Return the strength of Gaussian releases with this epsilon at delta 1e-5."""
    return float(brentq(lambda mu: gaussian_epsilon(mu, 1e-5) - epsilon, 1e-3, 10))


@dataclass(frozen=True)
class Coverage:
    """What simulations of a cell gave.

    Attributes:
        errors: (runs, d) of every coefficient.
        reach: (runs, d) half the width of its interval.
        naive: (runs, d) whether the one without the noise did.
        shown: (runs,) whether intervals are shown.
    """

    errors: np.ndarray
    reach: np.ndarray
    naive: np.ndarray
    shown: np.ndarray

    @property
    def held(self) -> np.ndarray:
        """(runs, d) whether an interval held the truth."""
        return np.asarray(np.abs(self.errors) < self.reach)

    @property
    def rmse(self) -> float:
        """Of all coefficients."""
        return float(np.sqrt(np.mean(self.errors**2)))

    @property
    def all(self) -> float:
        """Coverage in percent of all runs, also of those that are not shown."""
        return 100 * float(self.held.mean())

    @property
    def given_shown(self) -> float:
        """Coverage in percent of the runs that are shown."""
        return 100 * float(self.held[self.shown].mean()) if self.shown.any() else math.nan

    @property
    def spread(self) -> float:
        """Three standard errors in percent: runs are independent, and coefficients of a run nearly so."""
        return 300 * math.sqrt(0.95 * 0.05 / self.held.size)

    @property
    def by_coefficient(self) -> np.ndarray:
        """Coverage in percent of every coefficient."""
        return np.asarray(100 * self.held.mean(axis=0))


def simulate(cell: Cell, runs: Iterable[int]) -> Coverage:
    """Play simulations of a cell, by their numbers."""
    mu, found = mu_of(cell.epsilon), []
    for number in runs:
        rng = np.random.default_rng(number)
        one = made(cell.family, cell.n_users, cell.overlap, rng, **cell.keys)
        fitted = released(one, mu, rng)
        known, unit = covariance(fitted.estimate, fitted.sums[-1]), fitted.family.unit
        error, reach = fitted.estimate.theta * unit - one.truth, known.reach * unit
        naive = NORMAL_95 * np.sqrt(np.diag(known.whole - known.noise)) * unit
        found.append((error, reach, np.abs(error) < naive, np.array(fitted.has_intervals)))
    return Coverage(*map(np.array, zip(*found, strict=True)))


def beside(cell: Cell, runs: Iterable[int]) -> tuple[float, float]:
    """Return coverage in percent and error of statsmodels on the records of the same simulations, without noise."""
    found = []
    for number in runs:
        one = made(cell.family, cell.n_users, cell.overlap, np.random.default_rng(number), **cell.keys)
        found.append(_fitted_by_statsmodels(cell.family, one))
    errors, held = map(np.array, zip(*found, strict=True))
    return 100 * float(held.mean()), float(np.sqrt(np.mean(errors**2)))


_PEERS: Final = {
    "logistic": sm.families.Binomial,
    "linear": sm.families.Gaussian,
    "poisson": sm.families.Poisson,
}


def _fitted_by_statsmodels(family: str, one: Made) -> tuple[np.ndarray, np.ndarray]:
    """Return errors, and which intervals hold, of a regression with people as clusters."""
    table = one.table
    columns = [table.numbers(name).values for name in table.columns if name.startswith("x")]
    design = np.column_stack((np.ones(len(table)), *columns))
    target = table.columns["y"].values
    counts = np.bincount(table.user, minlength=table.n_users)[table.user]
    model = sm.GLM(target, design, family=_PEERS[family](), var_weights=1 / counts)
    with warnings.catch_warnings():  # weights are frequencies to it, clusters take no notice
        warnings.simplefilter("ignore", SpecificationWarning)
        fit = model.fit(cov_type="cluster", cov_kwds={"groups": table.user})
    error = np.asarray(fit.params) - one.truth
    return error, np.abs(error) < NORMAL_95 * np.asarray(fit.bse)


def rows(quick: bool) -> Iterator[Row]:
    """Simulate every cell; quick takes a few runs of two of them."""
    yield from simulated(itertools.islice(cells(), 2) if quick else cells(), 12 if quick else SIMULATIONS)


def smallest() -> Iterator[Row]:
    """Simulate one cell of two families once."""
    grid = {"covariates": 3, "grid": (0.0, 2.0, 5.0)}
    two = (Cell("linear", 1000, 9.0, 0.5, {"cut": 2.0}), Cell("survival", 1000, 9.0, 0.5, grid))
    yield from simulated(two, 1)


def simulated(asked: Iterable[Cell], runs: int, folder: Path | None = None) -> Iterator[Row]:
    """Simulate cells so many times each; what a folder has of them is taken from there, and what it lacks put there."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    peers = set()
    for number, cell in enumerate(asked):
        people = (cell.family, cell.n_users)
        first = cell.family in _PEERS and people not in peers
        peers.add(people)
        kept = None if folder is None else folder / f"{number:02}.json"
        if kept is not None and kept.exists():
            yield from (Row(**one) for one in json.loads(kept.read_text(encoding="utf-8")))
            continue
        found = simulate(cell, range(runs))
        rows = list(told(cell, found, beside(cell, range(runs)) if first else (None, None)))
        if kept is not None:
            replace_file(kept, json.dumps([asdict(row) for row in rows]).encode())
        yield from rows


def told(cell: Cell, found: Coverage, peer: tuple[float | None, float | None]) -> Iterator[Row]:
    """Yield the rows of a cell.

    Args:
        cell: which.
        found: its simulations.
        peer: coverage and error of statsmodels; None where it stands beside another cell of the same people.
    """
    coverage, error = peer
    for what, ours, theirs in (
        ("coverage; peer: statsmodels without noise", found.all, coverage),
        ("coverage of runs that are shown", found.given_shown, None),
    ):
        met = LEAST - found.spread <= ours <= MOST + found.spread
        yield Row(case=f"{cell.label}: {what}", unit="%", ours=ours, peer=theirs, met=met)
    one = 400 * math.sqrt(0.95 * 0.05 / len(found.held))  # the worst of d draws
    least = float(found.by_coefficient.min())
    yield Row(
        case=f"{cell.label}: coverage of the worst coefficient",
        unit="%",
        ours=least,
        met=least >= LEAST - one,
    )
    shown = 100 * float(found.shown.mean())
    yield Row(case=f"{cell.label}: with intervals, of {len(found.held)} runs", unit="%", ours=shown)
    width = float(2 * found.reach[found.shown].mean()) if found.shown.any() else math.nan
    yield Row(case=f"{cell.label}: width of intervals that are shown, mean", unit="", ours=width)
    case = f"{cell.label}: error; peer: statsmodels without noise"
    most = MOST_ERROR.get(cell.family) if (cell.n_users, cell.epsilon) == (1000, 1.0) else None
    fits = None if most is None else found.rmse <= most
    yield Row(case=case, unit="rmse", ours=found.rmse, peer=error, target=most, met=fits)


if __name__ == "__main__":
    place = Path(sys.argv[2]) if len(sys.argv) > 2 else None
    print(json.dumps(report("inference", simulated(cells(), int(sys.argv[1]), place), quick=False), indent=1))
