"""Opens a run as its coordinator: from its folder, new or interrupted, to the party that plays it."""

from __future__ import annotations

from fedveil.crypto.keys import IdentityKey
from fedveil.engine.folder import RunFolder
from fedveil.engine.release_run import PreparedReleases
from fedveil.engine.run import Observer, Outcome
from fedveil.engine.setup import Prepared
from fedveil.federation.coordinator import CoordinatorParty
from fedveil.federation.deployable import check_deployable
from fedveil.federation.document import as_silos_see
from fedveil.federation.heads import HeadsSeen
from fedveil.federation.membership import Membership
from fedveil.federation.release_rounds import ReleaseEnding, ReleaseRounds
from fedveil.federation.rounds import Rounds, identify
from fedveil.federation.run_record import RunRecord


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
        rounds=Rounds(prepared, folder, observer, record),
        offered=as_silos_see(prepared.experiment, membership.silos),
        membership=membership,
        identity=identity,
        record=record,
        heads=heads,
    )


def open_release(
    *,
    prepared: PreparedReleases,
    membership: Membership,
    identity: IdentityKey,
    folder: RunFolder,
    heads: HeadsSeen,
) -> CoordinatorParty[ReleaseEnding]:
    """Return the coordinator of the next release of a document.

    Args:
        prepared: the document's releases; one at least is not made.
        membership: the federation.
        identity: the coordinator's long-term key.
        folder: the run folder, new or of a run that was interrupted.
        heads: the ends of the silos' ledgers, over all runs.

    Raises:
        ProtocolError: a letter of its protocol would be longer than any party reads.
        RunFolderError: a damaged folder, or another process at work in it.
    """
    return CoordinatorParty(
        rounds=ReleaseRounds(prepared, folder),
        offered=as_silos_see(prepared.document, membership.silos),
        membership=membership,
        identity=identity,
        record=RunRecord(folder, identify(folder), membership, identity),
        heads=heads,
    )
