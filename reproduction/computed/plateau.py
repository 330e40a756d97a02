"""CEPAM's rows under the optimiser of the authors' program, which is kept from round to round.

Each client has an optimiser of its own for the whole run: its momentum goes on in the next round, from the next global
model, and its rate falls tenfold when its mean loss over a round's steps has not been below the least so far (by one in
10,000) for more than ten rounds. fedveil's clients begin every round afresh, as the paper's algorithm has it.

The program begins at the model that PyTorch draws after its seed, 1234 unless another is asked for, and after the split
into training and validation images.

What a row does to an update is its error alone, in units of the update's norm: subtractive dither of step q errs by the
uniform law on (-q/2, q/2), whatever it quantises, and CEPAM by the law of its noise, so that it has no row of its own.

The authors' program decodes with radii R' and dithers V' that it draws anew, on a lattice whose cell is s = 0.001. In
one dimension it sends M = Q((x/R - V) / s) and decodes s R' (M + V') = x R'/R - R' V up to s: the update times a gain
of mean E[R] E[1/R], plus noise R' V of half the standard deviation that was asked for. In two and three dimensions it
divides by s before it subtracts V, and accepts the first V: the gain remains and the noise is gone. The generator of
V and V' starts at the client's own seed in every round, so that a client's dithers are the same in all rounds.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.functional import cross_entropy

from fedveil.data.catalogue.data_set import store
from fedveil.data.catalogue.mnist import CANONICAL_RECORDS, MNIST_CENTRED, read_idx
from fedveil.run.config.experiment import parse
from fedveil.run.config.study import Selection, study_documents
from fedveil.run.releases.records import evaluate
from fedveil.run.setup import Prepared, prepare
from fedveil.training.task import Task
from reproduction.results import Values

_ROUNDS, _STEPS, _RATE, _MOMENTUM = 80, 15, 0.01, 0.5
_PATIENCE, _FACTOR, _THRESHOLD = 10, 0.1, 1e-4
_SEED, _IMAGES = 1234, 60_000
_NOISE = 0.1

_CELL = 0.001
"""Cell of the authors' lattice, in units of the radius."""

Updates = Float[np.ndarray, "clients d"]
Error = Callable[[np.random.Generator, Updates], Updates]
"""Draws what a row adds to updates of norm 1."""
Radii = Callable[[np.random.Generator, int, tuple[int, int]], Float[np.ndarray, "clients n"]]
"""Draws the radii of sub-vectors of so many coordinates."""


def _uniform(step: float) -> Error:
    return lambda drawn, updates: drawn.uniform(-step / 2, step / 2, updates.shape)


def _both(one: Error, other: Error) -> Error:
    return lambda drawn, updates: one(drawn, updates) + other(drawn, updates)


def _gaussian(drawn: np.random.Generator, updates: Updates) -> Updates:
    return drawn.normal(0.0, _NOISE, updates.shape)


def _laplace(drawn: np.random.Generator, updates: Updates) -> Updates:
    return drawn.laplace(0.0, _NOISE, updates.shape)


def _gaussian_radii(drawn: np.random.Generator, size: int, shape: tuple[int, int]) -> Updates:
    return np.asarray(_NOISE * np.sqrt(drawn.chisquare(size + 2, shape)))


def _laplace_radii(drawn: np.random.Generator, size: int, shape: tuple[int, int]) -> Updates:
    return np.asarray(_NOISE * drawn.gamma(size + 1, 1.0, shape))


def decode_as_program(radii: Radii, size: int, *, repeated: bool = False) -> Error:
    """Return the error of the authors' program on sub-vectors of ``size`` coordinates.

    Args:
        radii: draws the radii.
        size: of a sub-vector.
        repeated: a client's dithers are those of the first round in every round, as in the program.
    """

    def error(drawn: np.random.Generator, updates: Updates) -> Updates:
        dithers = np.random.default_rng(_SEED) if repeated else drawn
        sent, decoded = (_radii(radii, drawn, size, updates) for _ in range(2))
        if size > 1:
            message = np.rint(updates / sent / _CELL - _dither(dithers, updates))
            return np.asarray(decoded * _CELL * message - updates)
        message = np.rint((updates / sent - _dither(dithers, updates)) / _CELL)
        return np.asarray(decoded * _CELL * (message + _dither(dithers, updates)) - updates)

    return error


def decode_anew(radii: Radii) -> Error:
    """Return the error in one dimension on the paper's lattice, of cell 2R, where both ends draw for themselves."""

    def error(drawn: np.random.Generator, updates: Updates) -> Updates:
        sent, decoded = (2 * _radii(radii, drawn, 1, updates) for _ in range(2))
        message = np.rint(updates / sent - _dither(drawn, updates))
        return np.asarray(decoded * (message + _dither(drawn, updates)) - updates)

    return error


def _radii(radii: Radii, drawn: np.random.Generator, size: int, updates: Updates) -> Updates:
    """Draw a radius for every sub-vector, and repeat it for its coordinates."""
    clients, d = updates.shape
    return np.repeat(radii(drawn, size, (clients, -(-d // size))), size, axis=1)[:, :d]


def _dither(drawn: np.random.Generator, updates: Updates) -> Updates:
    return drawn.uniform(-0.5, 0.5, updates.shape)


ROWS: Final[dict[str, Error | None]] = {
    "fl": None,
    "fl-sdq": _uniform(0.25),
    "fl-gaussian, the law of cepam-1 to -3": _gaussian,
    "fl-gaussian-sdq": _both(_gaussian, _uniform(_NOISE)),
    "fl-sdq of Table II": _uniform(0.2),
    "fl-laplace, the law of cepam": _laplace,
    "fl-laplace-sdq": _both(_laplace, _uniform(_NOISE)),
}
"""The rows of Tables I and II; steps as in the presets."""

PROGRAM: Final[dict[str, Error]] = {
    "cepam-1": decode_as_program(_gaussian_radii, 1),
    "cepam-1, dithers repeated": decode_as_program(_gaussian_radii, 1, repeated=True),
    "cepam-2": decode_as_program(_gaussian_radii, 2),
    "cepam-3": decode_as_program(_gaussian_radii, 3),
    "cepam of Table II": decode_as_program(_laplace_radii, 1),
    "cepam-1 on the paper's lattice, decoded anew": decode_anew(_gaussian_radii),
}
"""CEPAM's rows as the authors' program decodes them."""


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What a client keeps from round to round."""

    momentum: bool
    schedule: bool
    rate: float = _MOMENTUM
    """Of the momentum."""
    halved: bool = False
    """The rate of all clients is halved when validation accuracy has stalled for ten rounds, as the text has it."""

    def __str__(self) -> str:
        """Return it in words."""
        kept = [name for name, has in (("momentum", self.momentum), ("falling rate", self.schedule)) if has]
        return " and ".join(kept) + " kept" if kept else "nothing kept"


class Plateau:
    """The rates of all clients; each falls by ``factor`` when its own loss stalls for more than ``patience`` rounds."""

    def __init__(self, clients: int, factor: float = _FACTOR, patience: int = _PATIENCE) -> None:
        self._factor, self._patience = factor, patience
        self.rates = torch.full((clients, 1), _RATE)
        self._least = torch.full((clients,), torch.inf)
        self._stalled = torch.zeros(clients, dtype=torch.int64)

    def step(self, losses: Float[Tensor, " clients"]) -> None:
        """Take the mean losses of a round."""
        better = losses < self._least * (1 - _THRESHOLD)
        self._least = torch.where(better, losses, self._least)
        self._stalled = torch.where(better, 0, self._stalled + 1)
        falls = self._stalled > self._patience
        self.rates[falls] *= self._factor
        self._stalled[falls] = 0


def cepam_plateau(seed: int) -> Iterator[tuple[str, Values]]:
    """Plain FL of Table I, with and without what the authors' optimiser keeps, and from the program's own model."""
    for network in ("mlp", "cnn"):
        prepared = _prepared(network, seed)
        for kept in (
            Kept(momentum=False, schedule=False),
            Kept(momentum=False, schedule=True),
            Kept(momentum=True, schedule=False),
            Kept(momentum=True, schedule=True),
        ):
            first = prepared.task.initial()
            yield f"{network}: {kept}", _play(prepared, kept, first, None, np.random.default_rng(seed))
        first = first_model(prepared.task, _SEED)
        yield (
            f"{network}: {kept}, from the program's first model",
            _play(prepared, kept, first, None, np.random.default_rng(seed)),
        )


def cepam_schedule(seed: int) -> Iterator[tuple[str, Values]]:
    """The rows of Tables I and II with all that the authors' optimiser keeps."""
    kept = Kept(momentum=True, schedule=True)
    for network in ("mlp", "cnn"):
        prepared = _prepared(network, seed)
        for name, error in ROWS.items():
            drawn = np.random.default_rng(seed)
            yield f"{network}: {name}", _play(prepared, kept, prepared.task.initial(), error, drawn)


def cepam_program(seed: int) -> Iterator[tuple[str, Values]]:
    """CEPAM's rows as the authors' program decodes them; plain FL with the momentum and the rates of the text."""
    kept = Kept(momentum=True, schedule=True)
    for network in ("mlp", "cnn"):
        prepared = _prepared(network, seed)
        first = prepared.task.initial()
        for name, error in PROGRAM.items():
            yield f"{network}: {name}", _play(prepared, kept, first, error, np.random.default_rng(seed))
        for name, other in (
            ("fl, momentum 0.9", replace(kept, rate=0.9)),
            ("fl, rate halved on validation", replace(kept, halved=True)),
            ("fl, momentum 0.9, rate halved on validation", replace(kept, rate=0.9, halved=True)),
        ):
            yield f"{network}: {name}", _play(prepared, other, first, None, np.random.default_rng(seed))


def _validated(prepared: Prepared) -> Prepared:
    """Return the run with the published validation images, which no client holds, in place of the test images."""
    images, labels = (read_idx(store(None).path(file)) for file in MNIST_CENTRED.variants[0][:2])
    population = replace(
        prepared.population,
        test_features=images[CANONICAL_RECORDS:, None],
        test_targets=labels[CANONICAL_RECORDS:].astype(np.int64),
    )
    return replace(prepared, population=population)


def _prepared(network: str, seed: int) -> Prepared:
    chosen = Selection(scenarios=(network,), variants=("fl",), overrides=({"seed": seed},))
    (document,) = study_documents("table-1-cepam-mnist", chosen)
    return prepare(parse(document, network))


def first_model(task: Task, seed: int) -> Float[Tensor, " d"]:
    """Return the model that PyTorch draws by its defaults, layer by layer, after a seed and the split of the images."""
    model = copy.deepcopy(task.model)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        torch.randperm(_IMAGES)
        for module in model.modules():
            if isinstance(module, torch.nn.Linear | torch.nn.Conv2d):
                module.reset_parameters()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def _play(
    prepared: Prepared, kept: Kept, first: Tensor, error: Error | None, drawn: np.random.Generator
) -> Values:
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
    model, plateau = first, Plateau(len(clients), 0.5, 9) if kept.halved else Plateau(len(clients))
    validated = _validated(prepared) if kept.halved else prepared
    velocity = torch.zeros(len(clients), task.dimension)
    values: Values = {}
    for number in range(1, _ROUNDS + 1):
        rows = torch.from_numpy(np.stack([drawn.choice(own, _STEPS, replace=False) for own in clients]))
        local, losses = model.expand(len(clients), -1).clone(), torch.zeros(len(clients))
        if not kept.momentum:
            velocity.zero_()
        for at in range(_STEPS):
            gradient, found = step(local, features[rows[:, at]], targets[rows[:, at]])
            velocity = kept.rate * velocity + gradient
            local -= plateau.rates * velocity
            losses += found / _STEPS
        if error is not None:
            update = local - model
            norm = update.norm(dim=1, keepdim=True)
            local += norm * torch.from_numpy(error(drawn, (update / norm).double().numpy())).float()
        model = local.mean(0)
        if kept.halved:
            validation = evaluate(validated, model)
            assert validation is not None, "nothing here is released instead"
            accuracy = validation["accuracy"]
            assert accuracy is not None, "there are validation images"
            losses = torch.full((len(clients),), 1 - accuracy)
        if kept.schedule:
            plateau.step(losses)
        if number in (10, 20, 40, _ROUNDS):
            test = evaluate(prepared, model)
            assert test is not None, "nothing here is released instead"
            values[f"round {number}"] = test["accuracy"]
    fell = float((plateau.rates < _RATE).sum())
    return {"accuracy": values.pop(f"round {_ROUNDS}"), **values, "rates that fell": fell}
