"""CEPAM's plain baseline under the optimiser of the authors' program, which is kept from round to round.

Each client has an optimiser of its own for the whole run: its momentum goes on in the next round, from the next global
model, and its rate falls tenfold when its mean loss over a round's steps has not been below the least so far (by one in
10,000) for more than ten rounds. fedveil's clients begin every round afresh, as the paper's algorithm has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.functional import cross_entropy

from fedveil.engine.experiments.experiment import parse
from fedveil.engine.experiments.study import Selection, study_documents
from fedveil.engine.releases.run_evaluation import evaluate
from fedveil.engine.setup import Prepared, prepare
from fedveil.reproduction.results import Values

_ROUNDS, _STEPS, _RATE, _MOMENTUM = 80, 15, 0.01, 0.5
_PATIENCE, _FACTOR, _THRESHOLD = 10, 0.1, 1e-4


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What a client keeps from round to round."""

    momentum: bool
    schedule: bool

    def __str__(self) -> str:
        """Return it in words."""
        kept = [name for name, has in (("momentum", self.momentum), ("falling rate", self.schedule)) if has]
        return " and ".join(kept) + " kept" if kept else "nothing kept"


class Plateau:
    """The rates of all clients, each falling tenfold when its own loss stalls."""

    def __init__(self, clients: int) -> None:
        self.rates = torch.full((clients, 1), _RATE)
        self._least = torch.full((clients,), torch.inf)
        self._stalled = torch.zeros(clients, dtype=torch.int64)

    def step(self, losses: Float[Tensor, " clients"]) -> None:
        """Take the mean losses of a round."""
        better = losses < self._least * (1 - _THRESHOLD)
        self._least = torch.where(better, losses, self._least)
        self._stalled = torch.where(better, 0, self._stalled + 1)
        falls = self._stalled > _PATIENCE
        self.rates[falls] *= _FACTOR
        self._stalled[falls] = 0


def cepam_plateau(seed: int) -> Iterator[tuple[str, Values]]:
    """Plain FL of Table I, with and without what the authors' optimiser keeps."""
    for scenario in ("mlp", "cnn"):
        chosen = Selection(scenarios=(scenario,), variants=("fl",), overrides=({"seed": seed},))
        (document,) = study_documents("table-1-cepam-mnist", chosen)
        prepared = prepare(parse(document, scenario))
        for kept in (
            Kept(momentum=False, schedule=False),
            Kept(momentum=False, schedule=True),
            Kept(momentum=True, schedule=False),
            Kept(momentum=True, schedule=True),
        ):
            yield f"{scenario}: {kept}", _play(prepared, kept, np.random.default_rng(seed))


def _play(prepared: Prepared, kept: Kept, drawn: np.random.Generator) -> Values:
    """Play FedAvg over all clients at once; return the accuracy after the last round and how many rates fell."""
    task, population = prepared.task, prepared.population
    features = torch.from_numpy(population.scale.apply(np.asarray(population.train.features)))
    targets = torch.from_numpy(population.train.targets)
    groups = population.train.by_silo_user()
    clients = [groups.members(number) for number in range(len(groups))]

    def loss(vector: Tensor, image: Tensor, label: Tensor) -> Tensor:
        outputs = functional_call(task.model, task.layout.unflatten(vector), (image[None],))
        return cross_entropy(outputs, label[None])

    step = vmap(grad_and_value(loss))
    model, plateau = task.initial(), Plateau(len(clients))
    velocity = torch.zeros(len(clients), task.dimension)
    values: Values = {}
    for number in range(1, _ROUNDS + 1):
        rows = torch.from_numpy(np.stack([drawn.choice(own, _STEPS, replace=False) for own in clients]))
        local, losses = model.expand(len(clients), -1).clone(), torch.zeros(len(clients))
        if not kept.momentum:
            velocity.zero_()
        for at in range(_STEPS):
            gradient, found = step(local, features[rows[:, at]], targets[rows[:, at]])
            velocity = _MOMENTUM * velocity + gradient
            local -= plateau.rates * velocity
            losses += found / _STEPS
        model = local.mean(0)
        if kept.schedule:
            plateau.step(losses)
        if number in (10, 20, 40, _ROUNDS):
            test = evaluate(prepared, model)
            assert test is not None, "nothing here is released instead"
            values[f"round {number}"] = test["accuracy"]
    fell = float((plateau.rates < _RATE).sum())
    return {"accuracy": values.pop(f"round {_ROUNDS}"), **values, "rates that fell": fell}
