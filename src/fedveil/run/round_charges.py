"""Charge the attempts at a round: check the budget and append to the ledger before the attempt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fedveil.errors import BudgetError
from fedveil.privacy.ledger import Ledger
from fedveil.privacy.statement import show_epsilon
from fedveil.protocols.errors import SiloVanished
from fedveil.randomness import ExperimentRandomness
from fedveil.run.folder.documents import SCHEMA_VERSION, FailedAttempt, read_lines
from fedveil.run.folder.run_folder import RunFolder
from fedveil.run.releases.release import Release
from fedveil.run.releases.side_releases import read_spent_budget
from fedveil.run.rounds.retries import DropoutSimulation, RetryPolicy
from fedveil.run.run_budget import reserved_releases
from fedveil.run.setup import Prepared

_ATTEMPTS: Final = "attempts.jsonl"


def over_budget(
    prepared: Prepared, number: int, charges: int | None = None, beside: Sequence[Release] | None = None
) -> str | None:
    """Return the reason why a round exceeds the budget; None if the budget allows it.

    Args:
        prepared: the experiment that runs.
        number: the round.
        charges: number of round charges in the ledger, including this round's; None: one per round.
        beside: the side releases, repeated as often as they are or will be charged; None: each once.
    """
    again = 0 if charges is None else charges - number
    needed = prepared.over_budget(number, prepared.side_releases if beside is None else beside, again)
    if needed is None:
        return None
    budget = prepared.experiment.privacy.budget
    return (
        f"round {number} would bring epsilon to {show_epsilon(needed)}, above the budget of {budget:g}; "
        f"the model after round {number - 1} is kept"
    )


class RoundCharges:
    """Charges of one round: one, plus one for every failed attempt that may have released its sum.

    These attempts are recorded on disk first, so that a resumed run counts them.

    Attributes:
        failed: number of attempts at the round that failed before the run was resumed.

    Args:
        prepared: the experiment that runs.
        folder: the run folder.
        ledger: the ledger of the run.
        number: the round.
    """

    def __init__(self, prepared: Prepared, folder: RunFolder, ledger: Ledger, number: int) -> None:
        self._prepared, self._folder, self._ledger, self._number = prepared, folder, ledger, number
        # Failed attempts of earlier processes, which `record` wrote.
        before = [row for row in read_lines(folder / _ATTEMPTS, FailedAttempt)[0] if row.round == number]
        self.failed, self._released = len(before), sum(row.may_have_released for row in before)
        # An attempt with fresh noise is another release. A charge from before the resume is spent, because nothing
        # shows that nobody saw its result. Noise from a known seed repeats the same release, which is already paid.
        self._spent_before = self._charged - self._released if prepared.secure else 0

    @property
    def _charged(self) -> int:
        """Number of charges of this round in the ledger."""
        return sum(entry.round == self._number for entry in self._ledger.entries)

    def pay(self) -> None:
        """Charge the next attempt, unless an earlier charge of this process has released nothing.

        Raises:
            BudgetError: the charge would exceed the budget.
        """
        charged, prepared, number = self._charged, self._prepared, self._number
        # One charge is still unspent: the attempt that it paid for failed before its sum was opened.
        if charged > self._spent_before + self._released:
            return
        charges = read_spent_budget(self._ledger, prepared.experiment.name, ()).charges
        beside = reserved_releases(prepared, self._folder, self._ledger, repeatable=not prepared.secure)
        reason = over_budget(prepared, number, charges + 1, beside)
        if reason:
            raise BudgetError(reason)
        # A unit changes the sum of a repeated round once more, so `again` charges at least strength 1.
        event = prepared.guarantee.event_at_round(prepared.guarantee.event, number, again=charged > 0)
        self._ledger.charge(run=prepared.experiment.name, round=number, attempt=charged, event=event)

    def record(self, attempt: int, vanished: SiloVanished) -> None:
        """Record a failed attempt in ``attempts.jsonl``."""
        silos, may_have_released = list(vanished.silos), vanished.may_have_released
        row = {
            "round": self._number,
            "attempt": attempt,
            "silos": silos,
            "may_have_released": may_have_released,
        }
        # On disk before the next attempt is charged, so that a crash between the two cannot hide a release.
        self._folder.append(_ATTEMPTS, {"schema_version": SCHEMA_VERSION, **row})
        self._released += may_have_released


def retry_policy(prepared: Prepared, folder: RunFolder, ledger: Ledger, number: int) -> RetryPolicy:
    """Return the rule for vanished silos in a round, which charges every attempt to the ledger."""
    charges, protection = RoundCharges(prepared, folder, ledger, number), prepared.method.protection
    rule, missing, rate = protection.on_dropout, protection.max_dropouts, protection.dropout_rate
    randomness = ExperimentRandomness(prepared.experiment.seed)
    return RetryPolicy(
        on_dropout=rule,
        waits=rule == "recover" or not missing,
        # The noise shares are sized so that the sum of |S| - max_dropouts silos carries the full noise.
        least=prepared.population.n_silos - missing,
        absences=DropoutSimulation(rate=rate, randomness=randomness) if rate else None,
        failed=charges.failed,
        record=charges.record,
        pay=charges.pay,
    )
