"""Play the parties of training, of one release, or of a whole document of releases in this process.

One round, in the order of its stages:

    population -> local -> bound -> sum per silo    RoundInputs.begin: samples, trains, bounds and adds
      -> channel -> protection                      LocalDriver.play: takes each sender's message in turn, adds them
      -> denoiser -> server -> model t+1            next_model: the mean, its estimate without noise, and the step

A :class:`~.rounds.round_context.RoundContext` is the state at the start of the round. A run charges the privacy event
of an attempt before its parties play it (:mod:`fedveil.run.loop`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch
from jaxtyping import Float32
from torch import Tensor

from fedveil.data.memory_tables import TableFile
from fedveil.errors import SiloVanished
from fedveil.methods.capabilities import ClientSender
from fedveil.methods.method import message_kinds, message_length
from fedveil.methods.protection_stage import open_sums
from fedveil.protocols.driver import NOBODY, Dropouts, LocalDriver, Transcript
from fedveil.protocols.protocol import ProtocolSpec
from fedveil.run.folder.run_folder import RunFolder
from fedveil.run.journal import Attempt
from fedveil.run.loop import Played, play_part
from fedveil.run.process_group import require_one_process
from fedveil.run.releases.release import ReleasePart, noisy_sum
from fedveil.run.releases.series import PreparedReleases, read_records
from fedveil.run.rounds.client_inputs import RoundInputs, make_round_inputs
from fedveil.run.rounds.diagnostics import RoundDiagnostics
from fedveil.run.rounds.retries import DropoutRule
from fedveil.run.rounds.round_context import RoundContext, SumHistory, TrainingSetup, next_model
from fedveil.run.steps.document import DocumentParts
from fedveil.run.steps.training import TrainingPart
from fedveil.training.heap import keep_freed_memory
from fedveil.training.server.optimizers import State

TRANSCRIPT: Final = "transcript.jsonl"


@dataclass(frozen=True, kw_only=True, eq=False)
class SimulatedParties:
    """All parties of one run; their keys serve no other run.

    Attributes:
        driver: plays the protocol, and lists every message if the method has a protection.
        initial: (d,) the model before the first round.
        past: the silos' sums of earlier rounds.
    """

    driver: LocalDriver[Any, Any]
    initial: Float32[Tensor, " d"]
    past: SumHistory = field(default_factory=SumHistory)

    @property
    def protocol_spec(self) -> ProtocolSpec[Any, Any]:
        """The public parameters that all parties share."""
        return self.driver.agreement

    @property
    def transcript(self) -> Transcript | None:
        """The list of all protocol messages; None for plaintext sums and messages sealed for the server."""
        return self.driver.transcript

    def workload(self, context: RoundContext) -> RoundInputs:
        """Return the inputs of all parties to a round."""
        return make_round_inputs(replace(context, past=self.past), self.protocol_spec, self.initial)

    @classmethod
    def in_the_open(cls, setting: TrainingSetup) -> SimulatedParties:
        """Return parties without a protection, even if the method has one.

        They send plaintext vectors, or a channel's bytes sealed for the server. Clients without their own messages
        send one message, the sum of all clients. Sums on a grid are exact, so the result has the same bits as the
        protected sum.

        Args:
            setting: the method and population of the run.
        """
        clients = (
            setting.n_users if isinstance(setting.method.channel, ClientSender) else setting.cohort.n_silos
        )
        dimension = sum(math.prod(shape) for shape in setting.shapes)
        length = message_length(setting.method, dimension)
        agreed = open_sums(setting.method, clients=clients, length=length)
        return cls(driver=LocalDriver(agreed), initial=torch.zeros(dimension))


def play_attempt(
    work: RoundInputs, parties: SimulatedParties, attempt: int, cohort: tuple[int, ...], absent: Dropouts
) -> Played:
    """Play one attempt at a round, up to the sum.

    Args:
        work: inputs of all parties to the round.
        parties: the parties of the run.
        attempt: number of the attempt; sampling and noise derive from it.
        cohort: the silos that begin the attempt.
        absent: simulated dropouts.

    Raises:
        SiloVanished: silos vanished, and the protocol cannot proceed without them.
    """
    number = work.context.round_number
    # A repeated attempt samples and trains anew here if the method samples users.
    drawn = work.begin(attempt)
    result, summed = parties.driver.play(
        (number, attempt), work.senders(cohort), drawn, work.client_input, absent
    )
    sent = work.costs if parties.transcript is None else parties.transcript
    return Played(
        total=parties.protocol_spec.decode_sum(result),
        summed=summed,
        n_sampled=None if work.drawn is None else int(work.drawn.sum()),
        diagnostics=RoundDiagnostics.of_round(
            number, work.training_diagnostics(), sent, attempts=attempt + 1, summed=summed
        ),
    )


@keep_freed_memory()
def play_round(
    context: RoundContext, parties: SimulatedParties | None = None
) -> tuple[Float32[Tensor, " d"], State, RoundDiagnostics]:
    """Play one round without a run folder, and without a charge.

    Args:
        context: the state at the start of the round.
        parties: the parties of the run; None: new parties that send plaintext sums, even if the method has a
            protection.

    Returns:
        (d,) float32 next global model, the next state of the server's stages, and the diagnostics of a simulation.
    """
    parties = SimulatedParties.in_the_open(context.setting) if parties is None else parties
    everybody = tuple(range(parties.protocol_spec.clients))
    result = play_attempt(parties.workload(context), parties, 0, everybody, NOBODY)
    assert result.total is not None
    assert result.diagnostics is not None
    n_silos = context.setting.cohort.n_silos
    after, state = next_model(
        context, result.total, n_silos=n_silos, summed=result.summed, n_sampled=result.n_sampled
    )
    return after, state, result.diagnostics


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

    def play(self, attempt: Attempt) -> Played:
        """Play an attempt at the next round; all silos begin the first one of this process."""
        context = self._part.context
        assert context is not None
        number = context.round_number
        if self._work is None or self._work.context.round_number != number:
            self._work = self._parties.workload(context)
            self._cohort = tuple(range(self._parties.protocol_spec.clients))
        absent = NOBODY
        if self._rule.absences is not None:
            absent = self._rule.absences.draw_dropouts(number, attempt.number, self._cohort)
        result = play_attempt(self._work, self._parties, attempt.number, self._cohort, absent)
        if self._messages is not None:
            self._folder.append(TRANSCRIPT, *(line.to_json() for line in self._messages.take()))
        return result

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
        noisy = noisy_sum(planned, self._records, self._part.privacy)
        return Played(total=noisy.vector, summed=planned.public.n_silos)

    def prepare_retry(self, vanished: SiloVanished) -> None:
        """End the run: no dropouts are simulated in a release."""
        raise vanished


# --- the releases of a document ---


def make_releases(prepared: PreparedReleases, parent: Path, files: Sequence[TableFile] | None = None) -> Path:
    """Make all releases in a new folder under ``parent``, and return the folder.

    Args:
        prepared: the releases.
        parent: the folder in which the run folder is created.
        files: the tables; None: the files that the document names.

    Raises:
        FedveilError: the tables are wrong, or the ledger cannot be written. Nothing more is released then.
    """
    require_one_process(prepared.document.name)
    records = read_records(prepared, files)  # before the folder exists: wrong tables leave none
    folder = RunFolder.create(parent, prepared.document)
    _play(DocumentParts(prepared, folder, records=lambda: records))
    return folder.path


def resume_releases(prepared: PreparedReleases, path: Path) -> None:
    """Make the releases that a folder lacks; if it lacks none, only write the statement again.

    Raises:
        FedveilError: as :func:`make_releases`, or a damaged folder.
    """
    require_one_process(prepared.document.name)
    _play(DocumentParts(prepared, RunFolder(path)))


def _play(document: DocumentParts) -> None:
    with document:
        for part in document.parts():
            play_part(part, ReleaseParties(part))
        document.conclude(None)
