"""Budget of several fits over the same people: what they may spend together, and what was spent."""

from __future__ import annotations

import json
import math
import os
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from jaxtyping import Int64
from scipy.optimize import brentq

from fedveil.arguments import explain_arguments, stacklevel_of_caller
from fedveil.config_keys import is_finite, is_number, plain, whole_argument
from fedveil.errors import BudgetError, ConfigError, FedveilError, RunFolderError, show_argument
from fedveil.files import as_path, check_schema_version, parse_json, reading, writing
from fedveil.line_log import LineLog
from fedveil.privacy.accountant import Accountant, cached_epsilon, gaussian_delta, gaussian_epsilon
from fedveil.privacy.claims import Role
from fedveil.privacy.events import Event, NoGuarantee, atoms, compose, event_from_json
from fedveil.privacy.statement import Statement, show_epsilon
from fedveil.run.setup import Prepared

_SCHEMA_VERSION: Final = 2
_TRIES: Final = 12
_LESS: Final = 0.93
"""Factor between two tries of a fit's epsilon, where the Gaussian rule gives too much."""
_MARGIN: Final = 0.999
"""Of the Gaussian rule's epsilon: room for the tolerance of the calibration and for the grids of the noise."""


@dataclass(frozen=True, kw_only=True)
class Charge:
    """Privacy event that one fit releases.

    Attributes:
        event: the privacy event of all its rounds.
        protects: the protected unit, and the neighbouring data sets that the guarantee compares.
        is_fit: whether the charge is of a fit; otherwise it is what a fit released beyond its plan.
    """

    event: Event
    protects: tuple[str, str]
    is_fit: bool = True

    def to_json(self) -> dict[str, Any]:
        """Return the charge as JSON."""
        return {"event": self.event.to_json(), "protects": list(self.protects), "is_fit": self.is_fit}

    @classmethod
    def from_json(cls, data: Any) -> Charge:
        """Return the charge of :meth:`to_json`."""
        unit, adjacency = data["protects"]
        return cls(
            event=event_from_json(data["event"]),
            protects=(str(unit), str(adjacency)),
            is_fit=bool(data["is_fit"]),
        )

    @classmethod
    def of_run(cls, prepared: Prepared) -> Charge:
        """Return the charge of a prepared run, against readers of its models.

        Noise from a known seed hides nothing: anybody can subtract it.
        """
        event = prepared.learned_event(Role.READER, prepared.experiment.rounds, prepared.side_releases)
        if not prepared.secure:
            event = NoGuarantee(reason="noise from a known seed (privacy.insecure_seed)")
        guarantee = prepared.guarantee
        return cls(event=event, protects=(guarantee.unit, guarantee.adjacency.value))


@explain_arguments
class Budget:
    """Joint privacy budget of several fits over the same people; every copy of an estimator shares it.

    ``scikit-learn`` copies an estimator for every fold and every point of a grid. A copied number would be spent once
    by each copy. A budget is not copied: ``clone``, ``copy.copy`` and ``copy.deepcopy`` return it.

    **Claim.** All fits that a budget admitted are together (epsilon, delta)-differentially private for one user.
    Before a fit begins, the events of all earlier fits and of those that are left (each as the one that begins) are
    composed by the run's accountant, and a fit that would exceed epsilon is refused. The charge is written before the
    fit trains, so a fit that fails has spent it. A fit that repeats attempts at rounds, as after dropouts, stops before
    the round that would take it above its own plan; so does the folder of an interrupted fit that is resumed. Not
    covered: fits and releases outside the budget, and scores of the fitted models on private records.

    Args:
        epsilon: epsilon of all fits together.
        fits: number of fits; a further one is refused. A search with ``refit=True`` needs one more than its folds and
            points.
        delta: delta of the guarantee; well below 1 / n_users.
        file: file of the charges, which several processes share (``n_jobs``). Without one, the budget cannot leave
            this process. An existing file is continued; it must have been begun with the same numbers.

    Raises:
        ConfigError: a number outside its range; a file of another budget.
        RunFolderError: the file is damaged, or cannot be read or written.

    >>> budget = Budget(3.0, fits=3)
    >>> round(budget.each, 2), budget
    (1.62, Budget(epsilon=3, fits=3, delta=1e-05, used=0))
    """

    def __init__(
        self, epsilon: float, *, fits: int = 1, delta: float = 1e-5, file: str | Path | None = None
    ) -> None:
        self.epsilon, self.delta = plain(epsilon), plain(delta)
        self.fits = whole_argument("fedveil.Budget: fits", fits, 1)
        if not is_finite(self.epsilon) or self.epsilon <= 0:
            raise ConfigError(
                f"fedveil.Budget: epsilon must be a number above 0, not {show_argument(epsilon)}"
            )
        if not is_number(self.delta) or not 0 < self.delta < 1:
            raise ConfigError(f"fedveil.Budget: delta must lie between 0 and 1, not {show_argument(delta)}")
        self.file = None if file is None else as_path(file, "fedveil.Budget: file").absolute()
        self._charges: list[Charge] = []
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._seen: list[bytes] = []
        if self.file is not None:
            with self._charged():
                pass  # writes the head of a new file, or checks that of an existing one

    def __repr__(self) -> str:
        return f"Budget(epsilon={self.epsilon:g}, fits={self.fits}, delta={self.delta:g}, used={self.used})"

    def __sklearn_clone__(self) -> Budget:
        return self

    def __copy__(self) -> Budget:
        return self

    def __deepcopy__(self, memo: object) -> Budget:
        return self

    def __reduce__(self) -> Any:
        """Refuse to leave the process without a file: a copy elsewhere would be a second budget."""
        if self.file is None:
            raise ConfigError(
                "fedveil.Budget: only a budget with a file can be handed to another process (n_jobs) or saved: its "
                "copy would be a second budget over the same people. Give file=, or n_jobs=1"
            )
        return _open_budget, (self.epsilon, self.fits, self.delta, self.file)

    @property
    def each(self) -> float:
        """Epsilon of one fit if all release Gaussian noise: mu / sqrt(fits) for the mu of the whole budget.

        Fits whose events compose differently (sampled users) get less, so that all stay within the budget.
        """
        whole = _mu_of(self.epsilon, self.delta)
        return gaussian_epsilon(whole / math.sqrt(self.fits), self.delta)

    @property
    def used(self) -> int:
        """Number of fits that were charged."""
        with self._charged() as charges:
            return sum(charge.is_fit for charge in charges)

    def admit(self, prepare: Callable[[float], Prepared]) -> tuple[Prepared, Charge]:
        """Prepare one fit within the budget, and charge it; the charge is stored before this returns.

        The returned run stops before the round that would take it above its plan.

        Args:
            prepare: returns a run that is ready to be played, for the epsilon of this run alone.

        Raises:
            BudgetError: all fits are spent, or no epsilon was found with which all fits stay within the budget.
            FedveilError: as ``prepare``; nothing is charged then.
        """
        with self._charged() as charges:
            remaining = self.fits - sum(charge.is_fit for charge in charges)
            if remaining < 1:
                raise BudgetError(
                    f"the budget of epsilon {self.epsilon:g} is for {self.fits} fits, and all are spent; one more "
                    "would take the same people above it"
                )
            epsilon = _MARGIN * self.each
            for _ in range(_TRIES):
                prepared = prepare(epsilon)
                charge = Charge.of_run(prepared)
                if any(earlier.protects != charge.protects for earlier in charges):
                    raise BudgetError(
                        "fedveil.Budget: earlier fits protect another unit, or compare other neighbouring data sets, "
                        "so no one epsilon covers all; give methods of one kind a budget of their own"
                    )
                together = joint_epsilon([*charges, *[charge] * remaining], prepared.accountant, self.delta)
                if together <= self.epsilon:
                    self._add(charges, charge)
                    return _stopped_at_plan(prepared), charge
                epsilon *= _LESS
        raise BudgetError(
            f"fedveil.Budget: no epsilon was found with which {remaining} more fits stay within {self.epsilon:g}; fits "
            "that spent more than planned have used it, the method adds no noise, or its noise comes from a known seed "
            "(privacy.insecure_seed)"
        )

    def without_cheapest(self, accountant: Accountant) -> Budget:
        """Return a budget, without a file, of all charges but the cheapest: of people whom one fit did not read.

        Args:
            accountant: compares the charges.
        """
        reduced = Budget(self.epsilon, fits=self.fits, delta=self.delta)
        with self._charged() as charges:
            counted = sorted(charges, key=lambda charge: joint_epsilon([charge], accountant, self.delta))[1:]
        reduced._charges = counted
        return reduced

    def settle(self, charge: Charge, statement: Statement) -> None:
        """Charge what a fit released beyond its plan: attempts at rounds that were repeated."""
        planned, released = atoms(charge.event), atoms(statement.event)
        beyond = released - planned
        if beyond:
            with self._charged() as charges:
                self._add(charges, replace(charge, event=compose(beyond), is_fit=False))

    @contextmanager
    def _charged(self) -> Iterator[list[Charge]]:
        """Hold the lock of the budget, and yield the charges so far."""
        with self._lock:
            if self.file is None:
                # A forked process has a copy that nobody pickled: it would be a second budget.
                if os.getpid() != self._process:
                    raise ConfigError(
                        "fedveil.Budget: a budget without a file cannot be spent in a forked process: its copy would "
                        "be a second budget over the same people. Give file="
                    )
                yield self._charges
                return
            self._log = LineLog(self.file)
            with writing(self.file, RunFolderError):
                self._log.lock(wait=True)
            with closing(self._log):
                lines, torn = self._log.read()
                if lines[: len(self._seen)] != self._seen:
                    raise RunFolderError(
                        f"{self.file} (fedveil.Budget): charges that this process has seen are missing from the file; "
                        "restore it, or begin a budget of other people with another file"
                    )
                self._seen = lines
                charges = self._read(lines, torn)
                if not lines:
                    self._append(self._head())
                yield charges

    def _head(self) -> dict[str, Any]:
        return {
            "schema_version": _SCHEMA_VERSION,
            "epsilon": self.epsilon,
            "delta": self.delta,
            "fits": self.fits,
        }

    def _read(self, lines: Sequence[bytes], torn: bytes) -> list[Charge]:
        """Return the charges of a file.

        Raises:
            ConfigError: the file is of another budget.
            RunFolderError: another version wrote the file, or a line is damaged; a torn line may be a charge.
        """
        location = f"{self.file} (fedveil.Budget)"
        if torn:
            raise RunFolderError(f"{location} is damaged: its last line is not complete, and may be a charge")
        head, *rows = [parse_json(line, location, RunFolderError) for line in lines] or [self._head()]
        if check_schema_version(head, location, _SCHEMA_VERSION) != self._head():
            raise ConfigError(f"{location} was begun with other numbers; give those, or another file")
        with reading(location, RunFolderError):
            return [Charge.from_json(row) for row in rows]

    def _add(self, charges: list[Charge], charge: Charge) -> None:
        """Store a charge; on disk, if the budget has a file."""
        if self.file is not None:
            self._append(charge.to_json())
        charges.append(charge)

    def _append(self, document: dict[str, Any]) -> None:
        with writing(self.file, RunFolderError):
            line = json.dumps(document).encode()
            self._log.append(line)
            self._seen.append(line)


def _stopped_at_plan(prepared: Prepared) -> Prepared:
    """Return a run that stops before the round that would take its epsilon above that of its planned rounds."""
    privacy = prepared.experiment.privacy
    planned = prepared.epsilon_with(Role.READER, prepared.experiment.rounds, prepared.side_releases)
    least = planned if privacy.budget is None else min(planned, privacy.budget)
    privacy = privacy.model_copy(update={"budget": least})
    return replace(prepared, experiment=prepared.experiment.model_copy(update={"privacy": privacy}))


def _open_budget(epsilon: float, fits: int, delta: float, file: Path) -> Budget:
    """Return the budget of a file in another process.

    Raises:
        RunFolderError: the file is gone, and with it what was spent.
    """
    if not file.exists():
        raise RunFolderError(f"{file} (fedveil.Budget) is missing, and with it the spent budget; restore it")
    return Budget(epsilon, fits=fits, delta=delta, file=file)


def joint_epsilon(charges: Sequence[Charge], accountant: Accountant, delta: float) -> float:
    """Return the epsilon of several fits together."""
    whole: Counter[Event] = Counter()
    for charge in charges:
        whole.update(atoms(charge.event))
    return cached_epsilon(accountant, compose(whole), delta)


def _mu_of(epsilon: float, delta: float) -> float:
    """Return the strength mu of Gaussian noise that costs epsilon at delta."""
    highest = 1.0
    while gaussian_delta(highest, epsilon) < delta:
        highest *= 2
    return float(brentq(lambda mu: gaussian_delta(mu, epsilon) - delta, 0.0, highest, xtol=1e-13))


# --- fits outside a budget --------------------------------------------------------------------------------------------
# An estimator does not know whether its caller fits once or in a loop. So the process keeps the seed keys of the users
# of every fit, in memory alone, and a fit that shares users with earlier ones says what all cost together.


@dataclass(frozen=True, kw_only=True, eq=False)
class _Fit:
    """One fit of this process: the keys of its users, its charge, and the budget that admitted it."""

    users: Int64[np.ndarray, "users"]
    charge: Charge
    budget: Budget | None


_FITS: Final[list[_Fit]] = []


def forget_fits() -> None:
    """Forget the fits of this process: for one that goes on with other people under the same ids."""
    _FITS.clear()


def _is_same(budget: Budget | None, other: Budget | None) -> bool:
    """Return whether two fits are counted by one budget."""
    if budget is None or other is None:
        return False
    return budget is other or (budget.file is not None and budget.file == other.file)


def note_fit(prepared: Prepared, charge: Charge, budget: Budget | None = None) -> None:
    """Note a fit, and warn if users of it were in earlier fits of this process that no common budget counts.

    Warns:
        UserWarning: with the epsilon of all these fits together. It reaches the caller, who holds the records.
    """
    keys = prepared.population.train.key
    users = np.unique(prepared.population.train.user.astype(np.int64) if keys is None else keys)
    earlier_fits = [
        fit
        for fit in _FITS
        if not _is_same(fit.budget, budget)
        and fit.charge.protects == charge.protects
        and len(np.intersect1d(fit.users, users))
    ]
    _FITS.append(_Fit(users=users, charge=charge, budget=budget))
    if not earlier_fits:
        return
    delta = prepared.experiment.privacy.delta
    try:
        together = joint_epsilon([*(fit.charge for fit in earlier_fits), charge], prepared.accountant, delta)
        cost = f"together they cost epsilon {show_epsilon(together)} at delta {delta:g}"
    except FedveilError:  # events of another kind, which this fit's accountant does not support
        cost = "no one accountant counts them together"
    warnings.warn(
        f"user ids of this fit were in {len(earlier_fits)} earlier fits of this process: {cost}. "
        "fedveil.Budget(epsilon, fits=) bounds what all fits spend",
        stacklevel=stacklevel_of_caller(),
    )
