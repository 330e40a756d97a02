"""Repeat a round when silos vanish in the middle of it: simulated dropouts, and the rule for the next attempt.

If silos vanish before the sum is opened, the attempt has revealed only masked numbers. It costs no budget and is
repeated under fresh keys and with fresh noise. A later failure may have released the sum, and the next attempt is
charged (:mod:`fedveil.run.journal`). This holds within one process. A run that ended during an attempt is charged
again when it is resumed, whether or not the sum was opened.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, Self

from fedveil.errors import ProtocolError, SiloVanished
from fedveil.methods.protection_stage import ProtectionStage
from fedveil.protocols.driver import Dropouts
from fedveil.randomness import ExperimentRandomness

OnMissing = Literal["end", "retry", "recover"]

MOST_ATTEMPTS: Final = 10
"""Attempts at one round; then the run ends, and may be resumed."""


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
class DropoutRule:
    """Rule for silos that vanish during a round.

    Attributes:
        on_dropout: "end" ends the run; "retry" repeats the round; "recover" lets the protocol proceed without the
            vanished silos, and repeats the round if too few are left.
        waits: whether a repeated round waits for all silos; else it proceeds with the remaining ones.
        least: smallest number of silos in a sum.
        absences: simulated dropouts; None if none are simulated.
    """

    on_dropout: OnMissing
    waits: bool
    least: int
    absences: DropoutSimulation | None = None

    @classmethod
    def of_protection(cls, protection: ProtectionStage, n_silos: int, seed: int) -> Self:
        """Return the rule of a protection among ``n_silos`` silos, with the dropouts of the experiment's seed."""
        rule, missing, rate = protection.on_dropout, protection.max_dropouts, protection.dropout_rate
        return cls(
            on_dropout=rule,
            waits=rule == "recover" or not missing,
            # The noise shares are sized so that the sum of |S| - max_dropouts silos carries the full noise.
            least=n_silos - missing,
            absences=DropoutSimulation(rate=rate, randomness=ExperimentRandomness(seed)) if rate else None,
        )

    def next_cohort(
        self, round_number: int, tries: int, cohort: tuple[int, ...], vanished: SiloVanished
    ) -> tuple[int, ...]:
        """Return the silos of the next attempt at a round.

        Args:
            round_number: counts from 1.
            tries: number of attempts of this process.
            cohort: silos of the last attempt.
            vanished: names the silos that vanished.

        Raises:
            SiloVanished: the rule is to end.
            ProtocolError: too few silos are left, or too many attempts failed.
        """
        if self.on_dropout == "end":
            raise vanished
        if not self.waits:
            cohort = tuple(silo for silo in cohort if silo not in vanished.silos)
            # Fewer silos would add less noise than the guarantee needs: each share is sized for `least` silos.
            if len(cohort) < self.least:
                raise ProtocolError(
                    f"round {round_number}: {len(cohort)} silos are left and {self.least} are needed, because the "
                    "shares of the noise are sized for so many; `fedveil resume` repeats the round with all"
                ) from vanished
        if tries >= MOST_ATTEMPTS:
            raise ProtocolError(
                f"round {round_number}: silos vanished in each of {MOST_ATTEMPTS} attempts; `fedveil resume` goes on "
                "from the last complete round when they are back"
            )
        return cohort
