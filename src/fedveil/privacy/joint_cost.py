"""Compute the joint privacy cost of several runs over the same population.

**Claim.** The combined releases of all runs are (epsilon, delta)-DP, with the epsilon of the composition of all
ledgers' charges. The charges of every run hold whatever was released before (adaptive composition).

Runs over other people only make the figure larger than necessary.

A unit must be the same in all runs. Ids of tables ensure this. Users of a catalogue data set are made by its
allocation, so runs on it have a joint epsilon only if the allocation is the same. Several catalogue data sets contain
the same records (all variants of MNIST), so runs on two of them have no joint epsilon.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedveil.errors import ConfigError, RunFolderError
from fedveil.files import folders_with, read_json, read_toml, reading
from fedveil.privacy.accountant import cached_epsilon, is_large_delta, load_event_types
from fedveil.privacy.accounting import make_accountant
from fedveil.privacy.events import Event, atoms, compose
from fedveil.privacy.ledger import read_entries
from fedveil.privacy.statement import Statement, show_delta, show_epsilon


@dataclass(frozen=True, kw_only=True)
class JointCost:
    """Joint privacy cost of several runs.

    Attributes:
        runs: folder, number of charges, and epsilon of every run (None: nothing is guaranteed).
        epsilon: epsilon of all runs together; None if one of them guarantees nothing.
        delta: the largest change of a probability in addition to the factor e^epsilon.
        accountant: name of the accountant that bounded epsilon.
        unit: the protected unit.
        units: the smallest declared number of units of a run; None: no run declares one.
        by_ids: whether the runs share units only if ids in their tables name the same persons; no run folder shows
            this.
    """

    runs: tuple[tuple[Path, int, float | None], ...]
    epsilon: float | None
    delta: float
    accountant: str
    unit: str
    by_ids: bool
    units: int | None = None

    @property
    def promise(self) -> str | None:
        """Joint guarantee in words; None if nothing is guaranteed."""
        if self.epsilon is None:
            return None
        promise = (
            f"each {self.unit} is protected with epsilon {show_epsilon(self.epsilon)} at delta "
            f"{show_delta(self.delta)} (accountant {self.accountant})"
        )
        if self.units is not None and is_large_delta(self.delta, self.units):
            promise += f", which promises nothing to any one {self.unit}: delta is not below 1 / {self.units}"
        return f"{promise}, if an id names the same person in all of them" if self.by_ids else promise


def joint_cost(folders: Sequence[Path], delta: float | None = None, accountant: str = "pld") -> JointCost:
    """Compute the joint privacy cost of runs.

    Args:
        folders: run folders; a folder that is given twice counts once.
        delta: delta of the figure; default: the delta of the runs, if it is the same in all.
        accountant: name of the accountant that bounds epsilon.

    Raises:
        ConfigError: no folder; runs of different deltas, units or adjacencies, or of different users of the
            catalogue.
        RunFolderError: a folder without a complete ledger and a statement of exactly these charges.
        PrivacyError: a charge that the accountant has no bound for.
    """
    if not folders:
        raise ConfigError("name the run folders whose cost is summed")
    paths = list(dict.fromkeys(folder.resolve() for folder in folders))
    statements = [_statement(path) for path in paths]
    kinds = {(statement.unit, statement.adjacency) for statement in statements}
    if len(kinds) > 1:
        unit_list = ", ".join(sorted(f"{unit} ({adjacency.value})" for unit, adjacency in kinds))
        raise ConfigError(f"the runs protect different things, so no one epsilon covers them: {unit_list}")
    by_ids = _some_by_ids(paths, statements) and len(paths) > 1
    deltas = {statement.delta for statement in statements}
    if delta is None and len(deltas) > 1:
        raise ConfigError(
            f"the runs have deltas {', '.join(f'{value:g}' for value in sorted(deltas))}; give --delta"
        )
    at = delta if delta is not None else deltas.pop()
    if not 0 < at < 1:
        raise ConfigError(f"--delta must lie between 0 and 1, not at {at:g}")
    charges: Counter[Event] = Counter()
    runs, guaranteed = [], True
    for path, statement in zip(paths, statements, strict=True):
        entries = read_entries(path / "ledger.jsonl")
        own: Counter[Event] = Counter()
        for entry in entries:
            own.update(atoms(entry.event))
        # The ledger is ahead of the statement if the run was resumed and has not ended yet.
        if own != atoms(statement.event):
            raise RunFolderError(
                f"{path}: its ledger has other charges than its statement; end the run (fedveil resume) first"
            )
        charges += own
        guaranteed &= statement.epsilon is not None
        runs.append((path, len(entries), statement.epsilon))
    unit, adjacency = kinds.pop()
    judge = make_accountant(accountant, adjacency)
    return JointCost(
        runs=tuple(runs),
        epsilon=cached_epsilon(judge, compose(charges), at) if guaranteed else None,
        delta=at,
        accountant=judge.name,
        unit=unit,
        by_ids=by_ids,
        units=min((statement.units for statement in statements if statement.units is not None), default=None),
    )


def _statement(folder: Path) -> Statement:
    path = folder / "privacy.json"
    if not path.exists():
        hint = folders_with(folder, path.name)
        raise RunFolderError(f"{folder}: no folder of a run that ended: it has no privacy.json{hint}")
    document = read_json(path, RunFolderError)
    load_event_types(document)
    return Statement.from_json(document)


def _some_by_ids(folders: Sequence[Path], statements: Sequence[Statement]) -> bool:
    """Return whether ids identify the users of any run; all catalogue runs must share one allocation.

    Raises:
        ConfigError: catalogue runs with different data sets, seeds or allocations; or a training run without an
            experiment, so that its users are unknown.
    """
    allocations: list[dict[str, Any]] = []
    for folder, statement in zip(folders, statements, strict=True):
        path = folder / "experiment.toml"
        if statement.released == "statistics" and not path.exists():
            continue  # statistics of tables alone, without an experiment
        document = read_toml(path)
        with reading(path, RunFolderError):
            data = document.get("data", {})
            if ":" in data.get("name", ":"):  # tables or Python data: records have ids
                continue
            own = {key: data.get(key) for key in ("name", "n_users", "allocation")}
            allocations.append({**own, "seed": data.get("seed", document.get("seed"))})
    if any(own != allocations[0] for own in allocations):
        names = " and ".join(sorted({repr(own["name"]) for own in allocations}))
        raise ConfigError(
            f"the runs allot the records of {names} to users in different ways, so a user of one run is not a user of "
            "another, and no one epsilon covers them; give all of them one data.name, data.seed, data.n_users and "
            "data.allocation"
        )
    return len(allocations) < len(folders)
