"""Clip and noise a silo's updates, and account for them over all jobs: what the filter does without NVFlare.

Claim: with M the list of all updates that :meth:`SiloAccount.release` returned, for two data sets D and D' of ONE silo
that differ in any way, P(M(D) in A) <= e^epsilon P(M(D') in A) + delta for every set A. The unit of privacy is the
silo, such as a hospital: all records that it holds. The server is not trusted: noise is added before anything leaves.

Why it holds, and where:

* An update has l2 norm at most C as stored (:class:`~fedveil.privacy.bounds.Clip`), so that another data set moves it
  by at most 2 C (:data:`ADJACENCY`). The noise is exact and discrete
  (:class:`~fedveil.privacy.noise.DiscreteGaussian`); the charged event contains the loss of its grid.
* An update is charged durably before its noise is drawn, and is not returned if that failed.
* The site's operator makes the empty ledger, once. A ledger that is missing is one that was lost: nothing is released.

Not claimed: :data:`UNCOVERED`, which is part of the statement.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import numpy as np
import torch
from jaxtyping import Float32, Float64
from torch import Tensor

from fedveil.errors import IntegrityError, PrivacyError, RunFolderError
from fedveil.files import read_json, replace_file, writing
from fedveil.line_log import LineLog
from fedveil.privacy.accounting import make_accountant
from fedveil.privacy.bounds import Clip
from fedveil.privacy.claims import Role
from fedveil.privacy.events import Adjacency, ComposedEvent, Event, GaussianEvent, GridEvent, atoms
from fedveil.privacy.ledger import Budget, Ledger
from fedveil.privacy.noise import grid_law
from fedveil.privacy.statement import Party, Statement, StatementBuilder, show_noise
from fedveil.randomness import PrivacyRandomness

LEDGER: Final = "ledger.jsonl"
STATEMENT: Final = "privacy.json"
"""Files in the filter's folder: the charges, and what they guarantee."""

UNCOVERED: Final = (
    "whether the site answers a task, when, and with which return code",
    "whatever else the job's code sends: metrics, events, streams, logs, files, or a result of code that avoids the "
    "filter; a job with custom code runs as the same user as the filter",
    "what the silo released otherwise, before or beside these updates",
    "a patient with records at several silos: each silo's epsilon counts, and they add up",
)

UNIT: Final = "silo"
ADJACENCY: Final = Adjacency.REPLACE_ONE
_LOCK: Final = "lock"
_LEAST_NOISE: Final = 2.0**-10
"""Least noise multiplier: sums of update and noise are exact in float64 from 2^-22 on; less hides nothing anyway."""


class SiloAccount:
    """Clip, noise and budget of a silo's updates.

    Args:
        clip: C, l2 norm of an update, in the unit of the parameters.
        noise_multiplier: z, at least 2^-10; the noise has the standard deviation z C in every coordinate.
        epsilon: budget over all updates.
        delta: delta of the budget.

    Raises:
        PrivacyError: a number outside its domain.
    """

    def __init__(self, *, clip: float, noise_multiplier: float, epsilon: float, delta: float) -> None:
        self._clip = Clip(norm=clip)
        self._event = GaussianEvent(noise_multiplier=noise_multiplier)
        if noise_multiplier < _LEAST_NOISE:
            raise PrivacyError(f"noise_multiplier = {noise_multiplier}: must be at least 2^-10")
        self._law = grid_law(noise_multiplier * clip, self._clip.grid)
        self._budget = Budget(epsilon=epsilon, delta=delta, accountant=make_accountant("pld", ADJACENCY))

    def release(
        self, folder: Path, job: str, update: Float32[Tensor, "1 d"]
    ) -> tuple[Float64[np.ndarray, " d"], Statement]:
        """Return clip(update) + N(0, (z C)^2 I), after it was charged, and the statement of all charges.

        Several jobs of a site, each a process, take turns. An update with NaN or infinity becomes zero.

        Args:
            folder: folder of ledger and statement; has an empty ledger at first.
            job: name of the job.
            update: one row; overwritten.

        Raises:
            BudgetError: the charge would exceed the budget; nothing is written.
            IntegrityError: the ledger is missing or damaged, or lacks charges that the statement has.
            RunFolderError: a file cannot be read or written.
        """
        grid = GridEvent(loss=2 * update.numel() * self._law.log_ratio_to_gaussian)
        event = ComposedEvent(events=(self._event, grid))
        turn = LineLog(folder / _LOCK)
        try:
            with writing(folder / _LOCK, RunFolderError):
                turn.lock(wait=True)
            statement = self._charge(folder, job, event)
        finally:
            turn.close()
        units = self._clip.quantize_(update, self._clip.norms(update), torch.ones(1, dtype=torch.float64))
        noise = self._law.sample((update.shape[1],), PrivacyRandomness.system().stream("update"))
        return np.asarray(units[0].double().numpy() * self._clip.grid + noise), statement

    def _charge(self, folder: Path, job: str, event: Event) -> Statement:
        """Write a charge and the statement of all charges, and return it when both are on disk."""
        if not (folder / LEDGER).exists():
            raise IntegrityError(
                f"{folder / LEDGER}: no such file: put back the ledger as it was last; only before the first update "
                "of this silo, make it as an empty file"
            )
        with Ledger(folder / LEDGER, unit=UNIT, adjacency=ADJACENCY) as ledger:
            path = folder / STATEMENT
            if path.exists():
                ledger.require_stated(Statement.from_json(read_json(path, RunFolderError), path).event, path)
            number = 1 + sum(entry.run == job for entry in ledger.entries)
            ledger.charge(run=job, round=number, attempt=0, event=event, budget=self._budget)
            statement = _state_privacy(ledger.spent_event(), self._budget)
        document = json.dumps(statement.to_json(), indent=2, allow_nan=False) + "\n"
        with writing(path, RunFolderError):
            replace_file(path, document.encode())
        return statement


def _state_privacy(spent: Event, budget: Budget) -> Statement:
    """Return the statement of all charges.

    Args:
        spent: composition of all charges, which are Gaussian releases on grids.
        budget: whose delta the statement is at.
    """
    server = Party(
        role=Role.SERVER,
        party="NVFlare's server, and whoever sees the updates on their way",
        sees="each noisy update of this silo",
    )
    builder = StatementBuilder(
        unit=UNIT, adjacency=ADJACENCY, delta=budget.delta, accountant=budget.accountant, units=None
    )
    return builder.build(
        spent,
        lambda _role: spent,
        (server,),
        mechanisms=tuple(
            f"{number} updates of this silo, each clipped to an l2 norm C, with discrete Gaussian noise of "
            f"{show_noise(event.noise_multiplier)} C on every coordinate before it leaves"
            for event, number in atoms(spent).items()
            if isinstance(event, GaussianEvent)
        ),
        randomness="the operating system's generator",
        uncovered=UNCOVERED,
    )
