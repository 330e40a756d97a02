"""Cross-validation by users: every user is held out once, and trained on in all other folds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from jaxtyping import Bool
from torch import nn

from fedveil.api.budget import Budget, Charge, joint_epsilon, note_fit
from fedveil.api.frame import Frame
from fedveil.api.objective import Objective
from fedveil.api.result import Result
from fedveil.api.training import TrainingArguments, play
from fedveil.arguments import explain_arguments
from fedveil.config_keys import whole_argument
from fedveil.data.records import Population
from fedveil.data.splits import fold_of_user
from fedveil.errors import ConfigError
from fedveil.files import as_path
from fedveil.privacy.statement import show_epsilon
from fedveil.run.setup import Prepared

_WHERE: Final = "fedveil.cross_validate"


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class CrossValidation(Frame):
    """Metrics of every fold on the users that it held out: exact figures of private records.

    Attributes:
        epsilon: of the models of all folds together, for one user.
        delta: of :attr:`epsilon`.
        results: the result of every fold.
    """

    epsilon: float
    delta: float
    results: tuple[Result, ...]

    @property
    def mean(self) -> dict[str, float | None]:
        """Mean of every metric over the folds; None if it is not defined in one of them."""
        found: dict[str, float | None] = {}
        for name in self.results[0].metrics:
            values = [one.metrics[name] for one in self.results]
            known = [value for value in values if value is not None]
            found[name] = float(np.mean(known)) if len(known) == len(values) else None
        return found


@explain_arguments
def cross_validate(
    model: nn.Module | str,
    people: Population,
    *,
    folds: int = 5,
    epsilon: float,
    delta: float = 1e-5,
    folder: str | Path = "runs/cross-validation",
    **arguments: Any,
) -> CrossValidation:
    """Train once per fold on all users but those of the fold, and test on these; all fits stay within one epsilon.

    **Claim.** The models of all folds are together (epsilon, delta)-differentially private for one user. The fold of a
    user follows from the user's id and ``seed`` alone, so adding or removing a user changes the records of the other
    k - 1 fits, and of none else: k - 1 events are composed, not k. Not covered: the metrics, which are exact figures of
    the held-out records, and any choice that is made by them.

    Args:
        model: as of :func:`fedveil.train`; every fold begins with the same model.
        people: the population; its own test records are left out.
        folds: k, at least 2.
        epsilon: of all folds together.
        delta: of the guarantee.
        folder: parent of the run folders.
        arguments: other keyword arguments of :func:`fedveil.train`.

    Raises:
        ConfigError: an argument is wrong, or the method protects something else than a user.
        FedveilError: as :func:`fedveil.train`.
    """
    folds = whole_argument(f"{_WHERE}: folds", folds, 2)
    if not isinstance(people, Population):
        raise ConfigError(f"{_WHERE}: people: a population is needed, not {type(people).__name__}")
    if folds > people.n_users:
        raise ConfigError(f"{_WHERE}: folds must be at most the {people.n_users} users, not {folds}")
    seed = whole_argument(f"{_WHERE}: seed", arguments.get("seed", 0))
    keys = people.train.key
    fold = fold_of_user(people.train.user.astype(np.int64) if keys is None else keys, folds, seed)
    # Every user is in k - 1 fits, so k - 1 charges share the budget. The last fold is admitted beside all earlier ones
    # but the cheapest: its users are in all of these but one.
    budget = Budget(epsilon, fits=folds - 1, delta=delta)
    parent, results = as_path(folder, f"{_WHERE}: folder"), list[Result]()
    charges = list[Charge]()
    prepared: Prepared  # of the last admitted fold
    for number in range(folds):
        own = _without_fold(people, fold == number, number + 1, folds)
        given = {**arguments, "delta": delta, "name": f"{arguments.get('name', 'fold')}-{number + 1}"}
        learned = list[Objective]()

        def prepare(
            spends: float, own: Population = own, given: Any = given, learned: Any = learned
        ) -> Prepared:
            prepared, objective = TrainingArguments.bind(_WHERE, given | {"epsilon": spends}).prepare(
                model, own
            )
            if prepared.guarantee.unit != "user":
                raise ConfigError(
                    f"{_WHERE}: folds are by users, and the method protects a {prepared.guarantee.unit}; take a method "
                    "that protects users"
                )
            learned.append(objective)
            return prepared

        spent = budget if number < folds - 1 else budget.without_cheapest(prepared.accountant)
        prepared, charge = spent.admit(prepare)
        note_fit(prepared, charge, budget)
        results.append(play(prepared, learned[-1], parent))
        # The statement includes attempts at rounds that were repeated.
        charges.append(replace(charge, event=results[-1].statement.event))
    # A user of fold j is in all fits but the j-th.
    together = max(
        joint_epsilon([one for at, one in enumerate(charges) if at != number], prepared.accountant, delta)
        for number in range(folds)
    )
    rows = tuple({"fold": at + 1, **one.metrics, "rounds": one.rounds} for at, one in enumerate(results))
    told = (
        f"the models of all {folds} folds together protect each user with epsilon {show_epsilon(together)} at delta "
        f"{delta:g}; the metrics are exact figures of held-out records, and no guarantee covers them or a choice "
        "by them"
    )
    return CrossValidation(
        rows=rows, notes=(told,), private=True, epsilon=together, delta=delta, results=tuple(results)
    )


def _without_fold(people: Population, held_out: Bool[np.ndarray, "n"], number: int, folds: int) -> Population:
    """Return the population with the users of one fold held out for testing."""
    train, rows = people.train, np.arange(len(people.train))
    aside = rows[held_out]
    return replace(
        people,
        train=train.select(rows[~held_out]),
        test_features=train.features[aside],
        test_targets=train.targets[aside],
        test_weights=None,
        test_rows=None,
        public_test=False,
        source=None,
        notes=(
            *people.notes,
            f"Fold {number} of {folds}: its users, chosen by their ids alone, are held out for testing.",
        ),
    )
