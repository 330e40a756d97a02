"""Opens a run as its coordinator: from its folder, new or interrupted, to the party that plays it.

What fails on the way gives the run's ledger back: the process goes on, and shall open the folder again.
"""

from __future__ import annotations

from contextlib import ExitStack

from fedveil.crypto.keys import IdentityKey
from fedveil.engine.experiments.experiment import Experiment
from fedveil.engine.experiments.release_document import TableDocument
from fedveil.engine.observer import Observer
from fedveil.engine.run import Outcome
from fedveil.engine.run_folder.folder import RunFolder
from fedveil.engine.setup import Prepared
from fedveil.federation.audit.run_record import RunRecord
from fedveil.federation.coordinator import CoordinatorParty
from fedveil.federation.deployable import check_deployable
from fedveil.federation.document import as_silos_see
from fedveil.federation.heads import HeadsSeen
from fedveil.federation.membership import Membership
from fedveil.federation.parts_due import phase_of_training
from fedveil.federation.release_rounds import DueRelease, ReleaseRounds
from fedveil.federation.rounds import Rounds, identify
from fedveil.federation.session_plan import EndingT
from fedveil.federation.silo_ledger import UNIT
from fedveil.privacy.ledger import Ledger


def record_of(folder: RunFolder, membership: Membership, identity: IdentityKey) -> RunRecord:
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
    prepared: Prepared, record: RunRecord, heads: HeadsSeen, observer: Observer
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
        rounds = Rounds(prepared, record.folder, observer, record, phase)
        opened.callback(rounds.close)
        offered = as_silos_see(prepared.experiment, record.membership.silos)
        party = CoordinatorParty(rounds=rounds, offered=offered, record=record, heads=heads)
        opened.pop_all()
    return party


def open_release(
    due: DueRelease[EndingT], document: Experiment | TableDocument, record: RunRecord, heads: HeadsSeen
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
        offered = as_silos_see(document, record.membership.silos)
        party = CoordinatorParty(rounds=rounds, offered=offered, record=record, heads=heads)
        opened.pop_all()
    return party
