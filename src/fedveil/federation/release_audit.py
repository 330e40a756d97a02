"""Check what a release of statistics or a regression left: its ledger and its statement. Nobody has signed them.

Claim: the ledger is one chain, the statement's event is what it charged, and no epsilon in it is below what that costs.
Not shown: that nothing was changed by who could make ledger and statement anew. Between institutions silos sign the
round of a release as it is played, and the coordinator checks it; the signatures are not kept, and no silo signs what
is stated. ``tests/test_federation_releases.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from fedveil.checks import Check, Verification, tried
from fedveil.engine.release_document import INFERENCE, STATISTICS
from fedveil.errors import FedveilError
from fedveil.federation.run_audit import RecordedRun, epsilons
from fedveil.federation.run_record import files_of

DOCUMENTS: Final = (STATISTICS, INFERENCE)
"""What a release's folder has, and no other."""

_UNSIGNED: Final = (
    "the folder of a release of statistics or of a regression: nobody has signed it; between institutions silos sign "
    "its rounds as they are played, and the signatures are not kept"
)


def verify_release(path: Path) -> Verification:
    """Check the folder of a release; a failure is a check that fails, never an error.

    Args:
        path: the folder.
    """
    checks: Sequence[Check]
    try:
        run = RecordedRun(files_of(path))
    except FedveilError as error:
        checks = (Check(name="files", outcome="fails", detail=str(error)),)
    else:
        checks = (tried("ledger", run.ledger), tried("statement", run.statement), *epsilons(run))
    unsigned = Check(name="signatures", outcome="unchecked", detail=_UNSIGNED)
    return Verification(path=path, checks=(*checks, unsigned))
