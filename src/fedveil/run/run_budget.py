"""Decide whether a run's budget allows a charge.

    needed = charged rounds + one more, if a round is due
           + every side release, as often as it was charged
           + every side release that is not released yet, if it will be charged (again)

Charges are counted from the ledger, and releases from the run folder's files. Thus a file that was lost after its
charge needs budget for another charge.
"""

from __future__ import annotations

from collections import Counter

from fedveil.privacy.ledger import Ledger
from fedveil.run.folder.run_folder import RunFolder
from fedveil.run.releases.preprocessing import read_preprocessed
from fedveil.run.releases.release import Release
from fedveil.run.releases.side_releases import read_spent_budget
from fedveil.run.setup import Prepared
from fedveil.statistics.evaluation.result import read_evaluated


def reserved_releases(
    prepared: Prepared, folder: RunFolder, ledger: Ledger, *, repeatable: bool
) -> tuple[Release, ...]:
    """Return the side releases, repeated as often as they are or will be charged.

    Args:
        prepared: the experiment that runs.
        folder: its files show which side releases are made.
        ledger: shows how often each was charged.
        repeatable: whether a release that was charged but not made needs no second charge (its noise is from a
            seed).

    Raises:
        RunFolderError: a file of a release is damaged.
    """
    charged = read_spent_budget(ledger, prepared.experiment.name, prepared.side_releases).beside
    refined = read_preprocessed(folder.path)
    lacking = prepared.releases_before_training[0 if refined is None else len(refined.made) :]
    if read_evaluated(folder.path) is None:
        lacking += prepared.releases_after_training
    paid = {one.name for one in charged} if repeatable else set[str]()
    return (*charged, *(one for one in lacking if one.name not in paid))


def release_over_budget(
    prepared: Prepared, folder: RunFolder, ledger: Ledger, *, repeatable: bool, round_repeatable: bool | None
) -> float | None:
    """Return the epsilon that a run needs for its next side release if it exceeds the budget; else None.

    Args:
        prepared, folder, ledger, repeatable: as in :func:`reserved_releases`.
        round_repeatable: the same for the next round, whose cost is reserved, because without a round the release
            would serve no purpose. None: no round follows.
    """
    if prepared.experiment.privacy.budget is None:
        return None
    name = prepared.experiment.name
    charged = Counter(entry.round for entry in ledger.entries if entry.run == name)
    checkpoint = folder.read_checkpoint()
    rounds, charges = 0 if checkpoint is None else checkpoint.round, charged.total()
    if round_repeatable is not None and rounds < prepared.experiment.rounds:
        rounds += 1
        # A charged round that is not in the checkpoint is played again: without a new charge only if its noise
        # repeats.
        charges += not (round_repeatable and charged[rounds])
    beside = reserved_releases(prepared, folder, ledger, repeatable=repeatable)
    return prepared.over_budget(rounds, beside, max(0, charges - rounds))
