"""Opens a run as its coordinator: from its folder, new or interrupted, to the party that plays it.

What fails on the way gives the run's ledger back: the process goes on, and shall open the folder again.
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
    """Return the record of a coordinator's run.

    Args:
        folder: the run folder, new or of a run that was interrupted.
        membership: the federation.
        identity: the coordinator's long-term key.

    Raises:
        RunFolderError: a damaged folder.
    """
    return RunRecord(folder, identify(folder), membership, identity)


def open_training(
    prepared: Prepared, record: RunRecord, heads: SeenHeads, observer: Observer
) -> CoordinatorParty[Outcome]:
    """Return the coordinator of an experiment's training.

    Args:
        prepared: the experiment; its population is the coordinator's own share: a public test table.
        record: of the run.
        heads: the ends of the silos' ledgers, over all runs.
        observer: who is told how the run goes on.

    Raises:
        CompositionError: a method that does not run between institutions.
        ProtocolError: a letter of its protocol would be longer than any party reads.
        RunFolderError: a damaged folder, or another process at work in it.
    """
    check_deployable(prepared)
    phase = phase_of_training(prepared, record.folder)
    with ExitStack() as opened:
        rounds = TrainingRounds(prepared, record.folder, observer, record, phase)
        opened.callback(rounds.close)
        offered = public_text(prepared.experiment, record.membership.silos)
        party = CoordinatorParty(rounds=rounds, offered=offered, record=record, heads=heads)
        opened.pop_all()
    return party


def open_release(
    due: DueRelease[EndingT], document: Experiment | TableDocument, record: RunRecord, heads: SeenHeads
) -> CoordinatorParty[EndingT]:
    """Return the coordinator of a release.

    Args:
        due: the release.
        document: that asks for it.
        record: of the run.
        heads: the ends of the silos' ledgers, over all runs.

    Raises:
        ProtocolError: a letter of its protocol would be longer than any party reads.
        RunFolderError: another process at work in the folder.
    """
    with ExitStack() as opened:
        ledger = opened.enter_context(Ledger(record.folder / "ledger.jsonl", unit=UNIT))
        rounds = ReleaseRounds(due, ledger, record)
        offered = public_text(document, record.membership.silos)
        party = CoordinatorParty(rounds=rounds, offered=offered, record=record, heads=heads)
        opened.pop_all()
    return party
