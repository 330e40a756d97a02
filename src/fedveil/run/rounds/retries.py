"""Repeat a round when silos vanish in the middle of it.

If silos vanish before the sum is opened, the attempt has revealed only masked numbers. It costs no budget and is
repeated under fresh keys and with fresh noise. A later failure may have released the sum: the attempt is recorded
on disk and charged before the round is repeated. This holds within one process. A run that ended during an attempt
is charged again when it is resumed, whether or not the sum was opened.
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
    """Record nothing: the default of a policy without a run folder."""


def _pay_nothing() -> None:
    """Charge nothing: the default of a policy without a ledger."""


@dataclass(frozen=True, kw_only=True)
class DropoutSimulation:
    """Simulated dropouts: each silo vanishes in each attempt with a fixed probability.

    The probability is independent of all data. Half of the dropouts vanish before they send their vector, half
    after it.

    Attributes:
        rate: the probability.
        randomness: randomness of the experiment's seed.
    """

    rate: float
    randomness: ExperimentRandomness

    def draw_dropouts(self, round_number: int, attempt: int, cohort: tuple[int, ...]) -> Dropouts:
        """Return the silos of a cohort that vanish in an attempt."""
        random = self.randomness.numpy("absences", round_number, attempt)
        gone = [silo for silo in cohort if random.random() < self.rate]
        early = frozenset(silo for silo in gone if random.random() < 0.5)
        return Dropouts(before_input=early, before_reveal=frozenset(gone) - early)


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """Rule for silos that vanish during a round.

    Attributes:
        on_dropout: "end" ends the run; "retry" repeats the round; "recover" lets the protocol proceed without the
            vanished silos, and repeats the round if too few are left.
        waits: whether a repeated round waits for all silos; else it proceeds with the remaining ones.
        least: smallest number of silos in a sum.
        absences: simulated dropouts; None if none are simulated.
        failed: number of attempts at the round that failed before the run was resumed.
        record: called with every failed attempt, before anything else happens.
        pay: called before an attempt; refuses an attempt that is not paid for.
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
        """Play attempts at a round until one completes; return its result and the number of attempts.

        The number includes failed attempts before a resume.

        Args:
            round_number: counts from 1.
            silos: all silos.
            attempt: plays an attempt with its number, the silos that begin it, and the simulated dropouts. Attempt
                numbers of a round are unique, also across a resume: sampling and noise derive from them.

        Raises:
            SiloVanished: the rule is to end.
            ProtocolError: too few silos are left, or too many attempts failed.
            BudgetError: another attempt exceeds the budget.
        """
        cohort = silos
        # Numbers continue after a resume, because sampling and noise derive from them.
        for number in range(self.failed, self.failed + MOST_ATTEMPTS):
            self.pay()
            absent = (
                NOBODY if self.absences is None else self.absences.draw_dropouts(round_number, number, cohort)
            )
            try:
                return attempt(number, cohort, absent), number + 1
            except SiloVanished as vanished:
                # Recorded first: a resumed run must count this attempt as a possible release.
                self.record(number, vanished)
                if self.on_dropout == "end":
                    raise
                if self.waits:
                    continue
                cohort = tuple(silo for silo in cohort if silo not in vanished.silos)
                # Fewer silos would add less noise than the guarantee needs: each share is sized for `least` silos.
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
"""Policy without retries: every silo answers, or the round ends."""
