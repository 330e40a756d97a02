"""Result of a regression, as stored in ``inference.json``: all noisy vectors, and the estimates from them.

Coefficients, intervals and the thetas in between are functions of this file, so reading it again costs nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
from pydantic import TypeAdapter

from fedveil.data.schema import Schema
from fedveil.errors import RunFolderError
from fedveil.statistics.inference.design import Design
from fedveil.statistics.inference.equation import Equation, Shares, Sums
from fedveil.statistics.inference.families import Family
from fedveil.statistics.inference.newton import (
    Effect,
    Estimate,
    Identified,
    covariance,
    effect,
    estimate,
    has_converged,
    identify,
    next_theta,
)
from fedveil.statistics.inference.request import Inference
from fedveil.statistics.result import NoisySum, NoisySums, figures_json, read_figures, restoring

# --- schedule -----------------------------------------------------------------------------------------------
# How the budget is split: three releases, each gradient and curvature, the last one with the spread of the scores.
#
# Shares are of mu^2 = sum of 1 / multiplier^2, and public. The first release finds the neighbourhood, the second one is
# a second equation close by, the last one carries what intervals are made of, all at one theta: a curvature taken from
# an earlier theta gives widths that are 7 to 11 % short. As all three equations count towards the estimate
# (:mod:`fedveil.statistics.inference.newton`), the first two need not be small.


@dataclass(frozen=True, kw_only=True)
class Part:
    """One release.

    Attributes:
        share: share of mu^2.
        shares: within it.
    """

    share: float
    shares: Shares

    def multiplier(self, total: float) -> float:
        """Return the release's noise multiplier where one release of everything would have ``total``."""
        return total / math.sqrt(self.share)


def _parts(*releases: Shares) -> tuple[Part, ...]:
    """Return releases whose shares are of the whole."""
    parts = []
    for shares in releases:
        share = shares.gradient + shares.curvature + shares.spread
        within = Shares(
            gradient=shares.gradient / share, curvature=shares.curvature / share, spread=shares.spread / share
        )
        parts.append(Part(share=share, shares=within))
    return tuple(parts)


_STEADY: Final = _parts(
    Shares(gradient=0.08, curvature=0.05),
    Shares(gradient=0.20, curvature=0.07),
    Shares(gradient=0.37, curvature=0.15, spread=0.08),
)
_EXPONENTIAL: Final = _parts(
    Shares(gradient=0.06, curvature=0.05),
    Shares(gradient=0.14, curvature=0.10),
    Shares(gradient=0.33, curvature=0.24, spread=0.08),
)


def schedule(family: Family) -> tuple[Part, ...]:
    """Return the releases of a family; more for the curvature where it is small beside its noise."""
    return _EXPONENTIAL if family.exponential else _STEADY


# --- regression ---------------------------------------------------------------------------------------------


_LEAST_BOUND: Final = 1.5
FILE: Final = "inference.json"
TOO_FEW: Final = (
    "too few people or events for this budget: the curvature of the equation is too close to its noise for intervals "
    "to hold; a larger epsilon, more people, or fewer columns and categories would do"
)
TOO_FEW_HERE: Final = "too few people or events"
"""Text shown for a coefficient without an interval if others have one."""
TOO_FAR: Final = (
    "three steps have not come near enough to the solution for intervals to hold: give a first guess that is nearer "
    "(inference.centre for linear, inference.rate for survival), centres and scales nearer to the data "
    "(inference.scale), or a larger epsilon"
)
_REQUEST: Final[TypeAdapter[Inference]] = TypeAdapter(Inference)


@dataclass(frozen=True, kw_only=True, eq=False)
class FittedRegression:
    """A regression, with as many of its releases as were made.

    Attributes:
        name: name of the run.
        request: what was asked for.
        schema: what the columns are.
        silos: names of all silos.
        releases: in order.
    """

    name: str
    request: Inference
    schema: Schema
    silos: tuple[str, ...]
    releases: NoisySums = ()

    @cached_property
    def family(self) -> Family:
        """Return the equation that is solved."""
        return self.request.equation(self.schema)

    @cached_property
    def design(self) -> Design:
        """Return the covariates."""
        return self.request.design(self.schema)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """Return the releases of a whole regression."""
        return schedule(self.family)

    def equation(self, place: int) -> Equation:
        """Return a release's local step: at the theta that follows from those before it, or else at the start.

        Raises:
            ConfigError: a request that does not fit its schema.
        """
        before = self.sums[:place]
        request, family, design = self.request, self.family, self.design
        at = next_theta(family, before) if before else family.start(len(design.names))
        return Equation(
            family=family,
            design=design,
            bound=request.bound or max(_LEAST_BOUND, family.usual * design.length),
            theta=tuple(float(value) for value in at),
            shares=self.parts[place].shares,
            combine=request.combine,
            order=request.order,
        )

    def with_release(self, noisy: NoisySum) -> FittedRegression:
        """Return the regression with one more release."""
        return replace(self, releases=(*self.releases, noisy))

    @cached_property
    def sums(self) -> tuple[Sums, ...]:
        """Return the sums of all releases, each at the theta computed from the releases before it."""
        if not self.releases:
            return ()
        before, last = replace(self, releases=self.releases[:-1]), self.releases[-1]
        at = before.equation(len(before.releases))
        return (*before.sums, at.sums(last.vector, last.std))

    @cached_property
    def estimate(self) -> Estimate:
        """Return the estimate of all releases."""
        return estimate(self.sums)

    @cached_property
    def identified(self) -> Identified:
        """Return the estimate of the coefficients that the releases identify."""
        return identify(self.sums, self.family.least)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all coefficients."""
        return (*self.family.leading, *self.design.names)

    @cached_property
    def hidden_reason(self) -> str | None:
        """Why there are no intervals; None where there are.

        Curvatures too close to their noise, or a last release too far from the estimate.
        """
        identified = self.identified
        if not identified.enough or len(identified.lost) == len(self.names):
            return TOO_FEW
        return None if has_converged(self.family, identified.releases, identified.estimate) else TOO_FAR

    @property
    def has_intervals(self) -> bool:
        """Return whether the estimate has intervals."""
        return self.hidden_reason is None

    @property
    def lost(self) -> tuple[str, ...]:
        """Names of the coefficients without an interval, where others have one."""
        return (
            tuple(self.names[index] for index in sorted(self.identified.lost)) if self.has_intervals else ()
        )

    @cached_property
    def effects(self) -> tuple[Effect, ...]:
        """Return all coefficients with an interval, in units of their columns; empty if no interval would hold."""
        if not self.has_intervals:
            return ()
        family, design, identified = self.family, self.design, self.identified
        solved = identified.estimate
        uncertainty = covariance(solved, identified.releases[-1])
        figures = np.stack(
            (solved.theta, np.diag(uncertainty.whole), np.diag(uncertainty.noise), uncertainty.freedom),
            axis=1,
        )
        units = (*(1.0 for _ in family.leading), *(1 / unit for unit in design.units))
        return tuple(
            effect(
                self.names[index],
                (float(value), float(variance), float(noise), float(freedom)),
                units[index] * family.unit,
                origin=family.origin if index < len(family.leading) else 0.0,
                multiplies=family.multiplies,
            )
            for index, (value, variance, noise, freedom) in zip(identified.solved, figures, strict=True)
            if index not in identified.lost
        )

    def to_json(self) -> dict[str, Any]:
        """Return the regression as JSON."""
        return figures_json(
            self.name,
            self.request,
            (
                {"theta": sums.theta.tolist()} | noisy.to_json()
                for noisy, sums in zip(self.releases, self.sums, strict=True)
            ),
            noise={"law": "discrete Gaussian"},
            coefficients=list(self.names),
            silos=list(self.silos),
            schema=self.schema.model_dump(mode="json", exclude_none=True),
        )

    @classmethod
    def from_json(cls, data: Any, origin: object) -> FittedRegression:
        """Return the regression of a document.

        Raises:
            RunFolderError: another version, or no regression, or one whose numbers do not follow from each other.
        """
        with restoring(data, origin):
            fitted = cls(
                name=str(data["name"]),
                request=_REQUEST.validate_python(data["request"]),
                schema=Schema.model_validate(data["schema"]),
                silos=tuple(str(name) for name in data["silos"]),
            )
            if not 0 < len(data["releases"]) <= len(fitted.parts):
                raise RunFolderError(
                    f"{origin} is damaged: {len(data['releases'])} of {len(fitted.parts)} releases"
                )
            for table in data["releases"]:
                own, theta = fitted.equation(len(fitted.releases)), np.array(table["theta"])
                if theta.shape != (own.width,) or not np.allclose(theta, own.theta, rtol=1e-6, atol=1e-9):
                    raise RunFolderError(
                        f"{origin} is damaged: its coefficients do not follow from what was released"
                    )
                fitted = fitted.with_release(NoisySum.from_json(table, own.length, origin))
            return fitted


def read_fitted(folder: Path) -> FittedRegression:
    """Return what a run folder released.

    Raises:
        RunFolderError: it has no regression, a damaged one, or one that was killed between its releases.
    """
    fitted = read_begun(folder)
    n_made, parts = len(fitted.releases), len(fitted.parts)
    if n_made < parts:
        raise RunFolderError(
            f"{folder}: {n_made} of {parts} releases are made; `fedveil resume {folder}` makes the others"
        )
    return fitted


def read_begun(folder: Path) -> FittedRegression:
    """Return what a run folder released so far.

    Raises:
        RunFolderError: it has no regression, or a damaged one.
    """
    fitted = read_figures(folder / FILE, FittedRegression)
    if fitted is None:
        raise RunFolderError(f"{folder}: no run of `fedveil infer`: it has no {FILE}")
    return fitted
