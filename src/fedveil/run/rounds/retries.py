"""Attempts at a round: what a run does when silos vanish in the middle of it.

An attempt whose silos vanish before the sum is opened has revealed only masked numbers. It costs no budget and is
repeated under fresh keys and with fresh noise. A later failure may have released the sum: the attempt is recorded on
disk and charged before the round is repeated. This holds within one process; a run that ended during an attempt is
charged again when it is resumed, whether or not the sum was opened.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, TypeVar

from fedveil.protocols.driver import NOBODY, Dropouts
from fedveil.protocols.errors import ProtocolError, SiloVanished
from fedveil.randomness import ExperimentRandomness

OnMissing = Literal["end", "retry", "recover"]

MOST_ATTEMPTS: Final = 10
"""Attempts at one round; then the run ends, and may be resumed."""

_T = TypeVar("_T")


def _keep_no_record(attempt: int, vanished: SiloVanished) -> None:
    """The default of a policy without a run folder."""


def _pay_nothing() -> None:
    """The default of a policy without a ledger."""


@dataclass(frozen=True, kw_only=True)
class DropoutSimulation:
    """Which silos vanish, in a simulation: each in every attempt with a probability, independent of all data.

    Half of them vanish before they send their vector, half after it.

    Attributes:
        rate: the probability.
        randomness: of the experiment's seed.
    """

    rate: float
    randomness: ExperimentRandomness

    def draw_dropouts(self, round_number: int, attempt: int, cohort: tuple[int, ...]) -> Dropouts:
        """Return who vanishes of a cohort in an attempt."""
        random = self.randomness.numpy("absences", round_number, attempt)
        gone = [silo for silo in cohort if random.random() < self.rate]
        early = frozenset(silo for silo in gone if random.random() < 0.5)
        return Dropouts(before_input=early, before_reveal=frozenset(gone) - early)


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """The rule for vanished silos.

    Attributes:
        on_dropout: "end" ends the run; "retry" repeats the round; "recover" has the protocol go on without them, and
            repeats the round if too few are left.
        waits: whether a repeated round is played with all silos again, once they are back; else with the rest.
        least: the fewest silos of a sum.
        absences: who vanishes, where that is simulated.
        failed: attempts at the round that failed before the run was resumed.
        record: told of every attempt that failed, before anything else happens.
        pay: called before an attempt; refuses one that is not paid for.
    """

    on_dropout: OnMissing
    waits: bool
    least: int
    absences: DropoutSimulation | None = None
    failed: int = 0
    record: Callable[[int, SiloVanished], None] = _keep_no_record
    pay: Callable[[], None] = _pay_nothing

    def play(
        self,
        round_number: int,
        silos: tuple[int, ...],
        attempt: Callable[[int, tuple[int, ...], Dropouts], _T],
    ) -> tuple[_T, int]:
        """Return what an attempt at the round gave that came to its end, and how many it took with those that failed.

        Args:
            round_number: counts from 1.
            silos: all silos.
            attempt: plays an attempt: its number, who begins it, and who of them vanishes. No two attempts at a round
                have one number, a resume between them or not: users and noise are drawn by it.

        Raises:
            SiloVanished: the rule is to end.
            ProtocolError: too few silos are left, or too many attempts failed.
            BudgetError: another attempt is beyond the budget.
        """
        cohort = silos
        for number in range(self.failed, self.failed + MOST_ATTEMPTS):
            self.pay()
            absent = (
                NOBODY if self.absences is None else self.absences.draw_dropouts(round_number, number, cohort)
            )
            try:
                return attempt(number, cohort, absent), number + 1
            except SiloVanished as vanished:
                self.record(number, vanished)
                if self.on_dropout == "end":
                    raise
                if self.waits:
                    continue
                cohort = tuple(silo for silo in cohort if silo not in vanished.silos)
                if len(cohort) < self.least:
                    raise ProtocolError(
                        f"round {round_number}: {len(cohort)} silos are left and {self.least} are needed, because the "
                        "shares of the noise are sized for so many; `fedveil resume` repeats the round with all"
                    ) from vanished
        raise ProtocolError(
            f"round {round_number}: silos vanished in each of {MOST_ATTEMPTS} attempts; `fedveil resume` goes on from "
            "the last complete round when they are back"
        )


NO_RETRY: Final = RetryPolicy(on_dropout="end", waits=True, least=2)
"""Every silo is there, or the round ends."""
