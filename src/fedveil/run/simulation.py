"""The parties of a run, all in this process: those of training, and those of one release."""

from __future__ import annotations

from typing import Any, Final

from fedveil.methods.method import message_kinds
from fedveil.protocols.driver import NOBODY, LocalDriver
from fedveil.protocols.errors import SiloVanished
from fedveil.protocols.transcript import Transcript
from fedveil.run.journal import Attempt
from fedveil.run.loop import Played
from fedveil.run.releases.release import noisy_sum
from fedveil.run.rounds.client_inputs import RoundInputs
from fedveil.run.rounds.retries import DropoutRule
from fedveil.run.rounds.round_loop import play_attempt
from fedveil.run.rounds.simulated_parties import SimulatedParties
from fedveil.run.steps.release import ReleasePart
from fedveil.run.steps.training import TrainingPart

TRANSCRIPT: Final = "transcript.jsonl"


class TrainingParties:
    """All parties of a run's training. Their cryptographic keys, if any, are fresh for each process.

    Args:
        part: the rounds that they play. If the run folder has a transcript, every protocol message is appended to it.
    """

    def __init__(self, part: TrainingPart) -> None:
        prepared, folder = part.prepared, part.journal.folder
        method = prepared.method
        messages = Transcript() if method.protection.agrees else None
        driver: LocalDriver[Any, Any] = LocalDriver(
            prepared.protocol_spec, messages, message_kinds(method), part.privacy
        )
        self._part, self._folder = part, folder
        self._parties = SimulatedParties(driver=driver, initial=prepared.task.initial())
        self._rule = DropoutRule.of_protection(
            method.protection, prepared.population.n_silos, prepared.experiment.seed
        )
        self._work: RoundInputs | None = None
        self._cohort: tuple[int, ...] = ()
        self._messages = messages if (folder / TRANSCRIPT).exists() else None
        if self._messages is not None:
            folder.drop_torn_line(TRANSCRIPT)

    def play(self, attempt: Attempt) -> Played:
        """Play an attempt at the next round; all silos begin the first one of this process."""
        turn = self._part.turn
        assert turn is not None
        number = turn.round_number
        if self._work is None or self._work.turn.round_number != number:
            self._work = self._parties.workload(turn)
            self._cohort = tuple(range(self._parties.protocol_spec.clients))
        absent = NOBODY
        if self._rule.absences is not None:
            absent = self._rule.absences.draw_dropouts(number, attempt.number, self._cohort)
        played = play_attempt(self._work, self._parties, attempt.number, self._cohort, absent)
        if self._messages is not None:
            self._folder.append(TRANSCRIPT, *(line.to_json() for line in self._messages.take()))
        return played

    def prepare_retry(self, vanished: SiloVanished) -> None:
        """Choose the silos of the next attempt by the rule of the protection.

        Raises:
            SiloVanished: the rule is to end.
            ProtocolError: too few silos are left, or too many attempts failed.
        """
        step, number = self._part.step, self._part.number
        assert step is not None
        self._cohort = self._rule.next_cohort(number, step.tries, self._cohort, vanished)


class ReleaseParties:
    """All parties of one release.

    Args:
        part: the release. Its records are read here, before it is charged.
    """

    def __init__(self, part: ReleasePart) -> None:
        self._part, self._records = part, part.records()

    def play(self, attempt: Attempt) -> Played:
        """Return the noisy sum of all silos' records."""
        planned = self._part.planned
        made = noisy_sum(planned, self._records, self._part.privacy)
        return Played(total=made.vector, summed=planned.public.n_silos)

    def prepare_retry(self, vanished: SiloVanished) -> None:
        """End the run: no dropouts are simulated in a release."""
        raise vanished
