"""Verify a run folder: signatures, the chain of its record, and the statement from recorded events.

A run is an experiment, with or without side releases, or a document of releases.

Claim: without the coordinator's key, no byte of the files listed at the run's end can be changed unnoticed. Without
the keys of a quorum of silos and of the coordinator, no round of any part can be changed, inserted, or removed before
the last. If all silos have signed the end, the statement charges every round with a contribution of an honest silo,
and no honest silo has contributed since.

Released numbers are those of the record. Silos receive the numbers of every release but the last, and sign them with
the next round. The last release stands in the record's last line, and an honest silo signs one such line per run. The
meaning of the numbers follows from the signed terms and the agreed schema (:mod:`~.released_files`).

Not claimed: that the coordinator wrote the right numbers into the record first. It can omit the line of a training
round that it ended; it must state the charge of that round, which an exported ledger shows. It can write a last
release, or last model, that differs from the sum. Not claimed: that a silo trained honestly (:data:`NOT_CHECKABLE`);
the check shows which parties agreed to which data. Condition: the membership is the right one, which the founder's
signature shows to a reader with the charter. ``tests/test_run_audit.py`` and ``tests/test_parts_audit.py`` flip bytes
of every file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from fedveil.checks import Check, Verification, not_checkable, run_check
from fedveil.errors import FedveilError
from fedveil.federation.audit.recorded_run import RecordedRun
from fedveil.federation.audit.run_record import files_of
from fedveil.federation.canonical_document import EXPERIMENT
from fedveil.privacy.statement import check_epsilons

NOT_CHECKABLE: Final = {
    "training": "that each silo trained as the method says, drew its noise, and sent what it signed for",
    "server's steps": "that each model is the server's step from the sums: the sums are not kept",
    "released numbers": "that they are the sums: no silo sees a sum; silos sign what they are told of earlier releases",
    "averages": "that an average of models that was evaluated is the average of the rounds' models",
    "events": "that each recorded event is what its round really released",
    "other parties": "that server and silos saw only the recorded events, and published figures",
    "second opinion": "epsilon by an independent program: `python verifier/verify.py PATH`, in the source repository",
    "after the end": "that a silo that signed the end of the run, but departs from the protocol, sent nothing since",
    "other releases": "what else was, or will be, released from the same records: other runs add to epsilon",
}
"""Facts that no file can show, by the name of their row."""


def verify_run(path: Path, charter: Path | None = None, ledgers: Sequence[Path] = ()) -> Verification:
    """Verify a run folder; a failure becomes a check that fails, never an error.

    Args:
        path: the folder.
        charter: charter of the federation, from a trusted source; None: the founder's signature is not checked.
        ledgers: ledgers exported by silos of the run.
    """
    found: list[Check] = []
    try:
        # Read once: every check sees the same bytes, even if the folder changes meanwhile.
        files = files_of(path)
    except FedveilError as error:
        found.append(Check(name="files", outcome="fails", detail=str(error)))
    else:
        run = RecordedRun(files)
        found.append(run_check("experiment", run.same_document))
        found.append(run_check("ledger", run.ledger))
        found.append(run_check("statement", run.statement))
        found.extend(epsilons(run))
        found.extend(run.check_signatures(charter, whole=True))
        if EXPERIMENT in files:
            found.append(run_check("model", run.model))
        found.extend(run_check(f"ledger {one}", lambda one=one: run.in_ledger(one)) for one in ledgers)  # type: ignore[misc]
    return Verification(path=path, checks=(*found, *not_checkable(NOT_CHECKABLE)))


def epsilons(run: RecordedRun) -> Sequence[Check]:
    """Compute the epsilons of a run's statement again; empty if it has no readable statement."""
    try:
        return tuple(check_epsilons(run.read_statement))
    except FedveilError:  # the statement check reports it
        return ()
