"""Open the session of one part of a run at the coordinator."""

from __future__ import annotations

from fedveil.data.records import empty_groups
from fedveil.federation.audit.run_record import RunRecord
from fedveil.federation.canonical_document import public_text
from fedveil.federation.coordinator import CoordinatorParty
from fedveil.federation.deployable import check_deployable
from fedveil.federation.ledger_heads import SeenHeads
from fedveil.federation.session_plan import SessionPlan
from fedveil.federation.silo_session.release_task import release_plan
from fedveil.federation.silo_session.training_task import training_plan
from fedveil.protocols.session_messages import RunPart
from fedveil.run.loop import EndingT, Part, RunParts
from fedveil.run.steps.release import ReleasePart
from fedveil.run.steps.training import TrainingPart


def open_session(
    run: RunParts[EndingT], part: Part, record: RunRecord, heads: SeenHeads
) -> CoordinatorParty[EndingT]:
    """Return the coordinator's state machine for a part of a run.

    If that fails, the run's ledger is closed: the process continues, and must be able to open the folder again.

    Args:
        run: all parts of the run.
        part: the next part.
        record: record of the run; also the run's witness.
        heads: ledger heads of the silos, over all runs.

    Raises:
        CompositionError: the method does not run between institutions.
        ProtocolError: a message of the protocol would be longer than any party reads.
        RunFolderError: the folder is damaged.
    """
    try:
        plan, offered = _plan(part), public_text(run.document, record.membership.silos)
        return CoordinatorParty(run=run, part=part, plan=plan, offered=offered, record=record, heads=heads)
    except BaseException:
        run.close()
        raise


def _plan(part: Part) -> SessionPlan:
    """Return the plan of a part's session."""
    phase = RunPart(name=part.name, released=tuple((one.std, one.vector) for one in part.before))
    if isinstance(part, ReleasePart):
        return release_plan(part.planned, empty_groups(), part.privacy, phase, len(part.model))
    assert isinstance(part, TrainingPart)
    check_deployable(part.prepared)
    return training_plan(part.prepared, phase if part.prepared.side_releases else None)
