"""What the attempts at a round are charged: checked against the budget, and in the ledger before anything is played."""

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
    """Return why a round may not be played, None if the budget allows it.

    Args:
        prepared: what runs.
        number: the round.
        charges: how often the ledger will have been charged with it; None: once a round.
        beside: the releases beside the rounds, as often as they are or will be charged; None: each once.
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
    """The charges of one round: one, and one more for every attempt that may have released its sum before it failed.

    Those attempts are listed on disk first, so that a resumed run counts them too.

    Attributes:
        failed: attempts at the round that failed before the run was resumed.

    Args:
        prepared: what runs.
        folder: of the run.
        ledger: of the run.
        number: the round.
    """

    def __init__(self, prepared: Prepared, folder: RunFolder, ledger: Ledger, number: int) -> None:
        self._prepared, self._folder, self._ledger, self._number = prepared, folder, ledger, number
        before = [row for row in read_lines(folder / _ATTEMPTS, FailedAttempt)[0] if row.round == number]
        self.failed, self._released = len(before), sum(row.may_have_released for row in before)
        # Fresh noise is another release: what was charged before now is spent, whoever says that nobody saw it.
        self._spent_before = self._charged - self._released if prepared.secure else 0

    @property
    def _charged(self) -> int:
        return sum(entry.round == self._number for entry in self._ledger.entries)

    def pay(self) -> None:
        """Charge the next attempt, unless one that was charged has released nothing.

        Raises:
            BudgetError: it is beyond the budget.
        """
        charged, prepared, number = self._charged, self._prepared, self._number
        if charged > self._spent_before + self._released:
            return
        charges = read_spent_budget(self._ledger, prepared.experiment.name, ()).charges
        beside = reserved_releases(prepared, self._folder, self._ledger, repeatable=not prepared.secure)
        reason = over_budget(prepared, number, charges + 1, beside)
        if reason:
            raise BudgetError(reason)
        event = prepared.guarantee.event_at_round(prepared.guarantee.event, number, again=charged > 0)
        self._ledger.charge(run=prepared.experiment.name, round=number, attempt=charged, event=event)

    def record(self, attempt: int, vanished: SiloVanished) -> None:
        """Write down that an attempt failed."""
        silos, may_have_released = list(vanished.silos), vanished.may_have_released
        row = {
            "round": self._number,
            "attempt": attempt,
            "silos": silos,
            "may_have_released": may_have_released,
        }
        self._folder.append(_ATTEMPTS, {"schema_version": SCHEMA_VERSION, **row})
        self._released += may_have_released


def retry_policy(prepared: Prepared, folder: RunFolder, ledger: Ledger, number: int) -> RetryPolicy:
    """Return what happens in a round when silos vanish, with every attempt paid for in the ledger."""
    charges, protection = RoundCharges(prepared, folder, ledger, number), prepared.method.protection
    rule, missing, rate = protection.on_dropout, protection.max_dropouts, protection.dropout_rate
    randomness = ExperimentRandomness(prepared.experiment.seed)
    return RetryPolicy(
        on_dropout=rule,
        waits=rule == "recover" or not missing,
        least=prepared.population.n_silos - missing,
        absences=DropoutSimulation(rate=rate, randomness=randomness) if rate else None,
        failed=charges.failed,
        record=charges.record,
        pay=charges.pay,
    )
