"""Opens a run as its coordinator: from its folder, new or interrupted, to the party that plays it."""

from __future__ import annotations

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


def open_training(
    *,
    prepared: Prepared,
    membership: Membership,
    identity: IdentityKey,
    folder: RunFolder,
    heads: HeadsSeen,
    observer: Observer,
) -> CoordinatorParty[Outcome]:
    """Return the coordinator of an experiment's training.

    Args:
        prepared: the experiment; its population is the coordinator's own share: a public test table.
        membership: the federation.
        identity: the coordinator's long-term key.
        folder: the run folder, new or of a run that was interrupted.
        heads: the ends of the silos' ledgers, over all runs.
        observer: who is told how the run goes on.

    Raises:
        CompositionError: a method that does not run between institutions.
        ProtocolError: a letter of its protocol would be longer than any party reads.
        RunFolderError: a damaged folder, or another process at work in it.
    """
    check_deployable(prepared)
    record = RunRecord(folder, identify(folder), membership, identity)
    return CoordinatorParty(
        rounds=Rounds(prepared, folder, observer, record, phase_of_training(prepared, folder)),
        offered=as_silos_see(prepared.experiment, membership.silos),
        membership=membership,
        identity=identity,
        record=record,
        heads=heads,
    )


def open_release(
    *,
    due: DueRelease[EndingT],
    document: Experiment | TableDocument,
    membership: Membership,
    identity: IdentityKey,
    folder: RunFolder,
    heads: HeadsSeen,
) -> CoordinatorParty[EndingT]:
    """Return the coordinator of a release.

    Args:
        due: the release.
        document: that asks for it.
        membership: the federation.
        identity: the coordinator's long-term key.
        folder: the run folder, new or of a run that was interrupted.
        heads: the ends of the silos' ledgers, over all runs.

    Raises:
        ProtocolError: a letter of its protocol would be longer than any party reads.
        RunFolderError: a damaged folder, or another process at work in it.
    """
    record = RunRecord(folder, identify(folder), membership, identity)
    ledger = Ledger(folder / "ledger.jsonl", unit=UNIT)
    return CoordinatorParty(
        rounds=ReleaseRounds(due, ledger, record),
        offered=as_silos_see(document, membership.silos),
        membership=membership,
        identity=identity,
        record=record,
        heads=heads,
    )
