"""Whether a run's budget allows a charge: what the ledger has, and what is not released and will be charged.

    needed = charged rounds + one more, where one is due
           + every release beside the rounds as often as it was charged
           + every one of them that is not released, where it will be charged (again)

What was charged is counted from the ledger, and what is released from the run folder's files, so that a file that is
lost after its charge needs room for another one.
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
    """Return the releases beside the rounds as often as they are, or will be, charged.

    Args:
        prepared: what runs.
        folder: says which of them are released.
        ledger: says how often each was charged.
        repeatable: whether a release that was charged and is not released is made again without another charge.

    Raises:
        RunFolderError: a damaged file of a release.
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
    """Return the epsilon that a run needs for its next release beside the rounds if it exceeds the budget; else None.

    Args:
        prepared, folder, ledger, repeatable: as of :func:`reserved_releases`.
        round_repeatable: the same of the next round, for which room is reserved: without it the release would serve
            nothing. None: no round follows.
    """
    if prepared.experiment.privacy.budget is None:
        return None
    name = prepared.experiment.name
    charged = Counter(entry.round for entry in ledger.entries if entry.run == name)
    checkpoint = folder.read_checkpoint()
    rounds, charges = 0 if checkpoint is None else checkpoint.round, charged.total()
    if round_repeatable is not None and rounds < prepared.experiment.rounds:
        rounds += 1
        charges += not (round_repeatable and charged[rounds])
    beside = reserved_releases(prepared, folder, ledger, repeatable=repeatable)
    return prepared.over_budget(rounds, beside, max(0, charges - rounds))
