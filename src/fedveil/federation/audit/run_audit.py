"""Check what a run left: who signed what of every round, one chain, and the statement that the recorded events give.

A run is an experiment, with what is released beside its rounds, or a document of releases.

Claim: of the files that a run's end lists, no byte is changed unnoticed by who lacks the coordinator's key. No round of
any part is changed, put in, or taken out before the last by who lacks the keys of as many silos as a round needs, the
coordinator included; where all silos have signed the end, the statement charges every round that an honest one gave
anything to, and none of them has given anything since. Released numbers are those of the record: silos are told those
of every release but the last, and sign them with the next round; the last stands in the record's last line, and of a
run an honest silo signs one such line. What the numbers are of follows from the signed terms and the agreed schema
(:mod:`~.released_files`). Not so what the coordinator wrote there before: it can leave out the line of a
round of training that it ended, and must state its charge, which an exported ledger shows; or write another last
release, or last model, than the sum gave. Condition: the membership is the right one, which its founder's seal shows to
whoever has the charter. It shows who agreed to what: not that a silo trained honestly (:data:`NOT_CHECKABLE`).
``tests/test_run_audit.py`` and ``tests/test_parts_audit.py`` flip bytes of every file.
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
    "other parties": "epsilon against server and silos, and published figures: only silos recompute them",
    "after the end": "that a silo that signed the end of the run, but departs from the protocol, sent nothing since",
    "other releases": "what else was, or will be, released from the same records: other runs add to epsilon",
}
"""What no file can show, by the name of its row."""


def verify_run(path: Path, charter: Path | None = None, ledgers: Sequence[Path] = ()) -> Verification:
    """Check a run folder; a failure is a check that fails, never an error.

    Args:
        path: the folder.
        charter: of the federation, as whoever checks was handed it; None: the founder's seal is not checked.
        ledgers: that silos of the run exported.
    """
    found: list[Check] = []
    try:
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
    """Compute the epsilons of a statement again; nothing where there is none."""
    try:
        return tuple(check_epsilons(run.read_statement))
    except FedveilError:  # said already
        return ()
