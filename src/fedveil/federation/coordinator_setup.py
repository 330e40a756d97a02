"""Constructors of a coordinator for training or for a release, from a new or interrupted run folder.

Every constructor closes the run's ledger if a later step fails: the process continues, and must be able to open the
folder again.
"""

from __future__ import annotations

from contextlib import ExitStack

from fedveil.crypto.keys import IdentityKey
from fedveil.federation.audit.run_record import RunRecord
from fedveil.federation.canonical_document import public_text
from fedveil.federation.coordinator import CoordinatorParty
from fedveil.federation.deployable import check_deployable
from fedveil.federation.ledger_heads import SeenHeads
from fedveil.federation.membership import Membership
from fedveil.federation.release_rounds import DueRelease, ReleaseRounds
from fedveil.federation.run_schedule import phase_of_training
from fedveil.federation.session_plan import EndingT
from fedveil.federation.silo_ledger import UNIT
from fedveil.federation.training_rounds import TrainingRounds, identify
from fedveil.privacy.ledger import Ledger
from fedveil.run.config.experiment import Experiment
from fedveil.run.config.release_document import TableDocument
from fedveil.run.folder.run_folder import RunFolder
from fedveil.run.observer import Observer
from fedveil.run.setup import Prepared
from fedveil.run.training_run import Outcome


def open_run_record(folder: RunFolder, membership: Membership, identity: IdentityKey) -> RunRecord:
    """Open the signature record of a coordinator's run.

    Args:
        folder: the run folder, new or of an interrupted run.
        membership: the federation.
        identity: long-term key of the coordinator.

    Raises:
        RunFolderError: the folder is damaged.
    """
    return RunRecord(folder, identify(folder), membership, identity)


def open_training(
    prepared: Prepared, record: RunRecord, heads: SeenHeads, observer: Observer
) -> CoordinatorParty[Outcome]:
    """Create the coordinator of an experiment's training.

    Args:
        prepared: the experiment, over the coordinator's own population (a public test table).
        record: record of the run.
        heads: ledger heads of the silos, over all runs.
        observer: receives the progress of the run.

    Raises:
        CompositionError: the method does not run between institutions.
        ProtocolError: a message of the protocol would be longer than any party reads.
        RunFolderError: the folder is damaged, or another process works in it.
    """
    check_deployable(prepared)
    phase = phase_of_training(prepared, record.folder)
    with ExitStack() as opened:
        rounds = TrainingRounds(prepared, record.folder, observer, record, phase)
        # pop_all() below disarms the callback on success: the party then owns the ledger.
        opened.callback(rounds.close)
        offered = public_text(prepared.experiment, record.membership.silos)
        party = CoordinatorParty(rounds=rounds, offered=offered, record=record, heads=heads)
        opened.pop_all()
    return party


def open_release(
    due: DueRelease[EndingT], document: Experiment | TableDocument, record: RunRecord, heads: SeenHeads
) -> CoordinatorParty[EndingT]:
    """Create the coordinator of a release.

    Args:
        due: the release.
        document: the document that requests the release.
        record: record of the run.
        heads: ledger heads of the silos, over all runs.

    Raises:
        ProtocolError: a message of the protocol would be longer than any party reads.
        RunFolderError: another process works in the folder.
    """
    with ExitStack() as opened:
        ledger = opened.enter_context(Ledger(record.folder / "ledger.jsonl", unit=UNIT))
        rounds = ReleaseRounds(due, ledger, record)
        offered = public_text(document, record.membership.silos)
        party = CoordinatorParty(rounds=rounds, offered=offered, record=record, heads=heads)
        opened.pop_all()
    return party
