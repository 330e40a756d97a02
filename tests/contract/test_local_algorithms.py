"""The contract of every local algorithm. A new one joins with one line in ALGORITHMS.

An algorithm changes the direction of a local step and no privacy event, because its update is clipped last. So every
member is compared with a plain loop, trained beside others and alone, and its updates are bounded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

import fedveil as fv
from fedveil.errors import CompositionError, ConfigError, FedveilError, ModelError
from fedveil.methods.uldp import uldp_avg
from fedveil.privacy.bounds import Bound, Clip, Unbounded
from fedveil.randomness import ExperimentRandomness
from fedveil.registry import names
from fedveil.run.config.experiment import merge, parse, parse_assignment
from fedveil.run.loop import NullObserver
from fedveil.run.setup import prepare
from fedveil.run.training_run import run
from fedveil.training.counters import batch_order
from fedveil.training.gram.trainer import GramTrainer
from fedveil.training.local_algorithms import (
    PLAIN,
    FedProx,
    LocalAlgorithm,
    PlainSgd,
    check_rows,
    linear_combination,
)
from fedveil.training.loop import LoopTrainer
from fedveil.training.state_leak_check import check_algorithm_unchanged
from fedveil.training.steps import LocalSgd
from fedveil.training.task import Task
from fedveil.training.trainer import Cohort, PartitionedTrainer, TrainJob
from fedveil.training.trainer_choice import TrainerOptions, choose_trainer
from fedveil.training.vectorized import VmapTrainer
from tests.contract.plugin_members import plugin_members
from tests.contract.test_samplers import load_example
from tests.training import cohort_of, everyone, task_of

Normalised = load_example("local_algorithm").Normalised


@dataclass(frozen=True, kw_only=True)
class Halved(LocalAlgorithm):
    """Half the gradient, with a pull that is not towards the start: every factor of the span."""

    in_span: ClassVar[bool] = True

    def slope(self, gradient: Tensor, at: Tensor, start: Tensor) -> Tensor:
        return 0.5 * gradient + 0.25 * at - 0.125 * start


ALGORITHMS: dict[str, LocalAlgorithm] = {
    "sgd": PlainSgd(),
    "fedprox": FedProx(mu=0.7),
    "fedprox 0": FedProx(mu=0.0),
    "normalised, of the example package": Normalised(),
    "every factor of the span": Halved(),
    **plugin_members("local_algorithms"),
}
algorithms = pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS.keys())
STEPS: dict[str, dict[str, Any]] = {
    "whole": {"epochs": 3},
    "batches": {"epochs": 2, "batch_size": 3},
    "momentum and decay": {"epochs": 3, "momentum": 0.5, "weight_decay": 0.1},
    "batches, momentum and decay": {"epochs": 2, "batch_size": 3, "momentum": 0.5, "weight_decay": 0.1},
    "projected": {"epochs": 2, "batch_size": 3, "projection": 0.05},
}
steps = pytest.mark.parametrize("keys", STEPS.values(), ids=STEPS.keys())
SIZES = [7, 1, 4, 0, 12, 5]
EMPTY = 3


@cache
def linear() -> Task:
    """Return softmax regression of 6 features and 3 classes."""
    return task_of("linear")


def test_every_registered_member_is_here() -> None:
    assert set(names("local_algorithms")) <= set(ALGORITHMS)


def local_of(algorithm: LocalAlgorithm, **keys: Any) -> LocalSgd:
    return LocalSgd(**{"learning_rate": 0.2, **keys}, algorithm=algorithm)


def job_of(
    trainer: PartitionedTrainer, cohort: Cohort, bound: Bound, members: Tensor | None = None
) -> TrainJob:
    """The job of some members."""
    everybody, weights = everyone(cohort)
    chosen = everybody if members is None else members
    return TrainJob(
        trainer.task.initial(),
        cohort,
        chosen,
        weights[chosen],
        bound,
        ExperimentRandomness(5),
        ("round", 1),
    )


def updates(trainer: PartitionedTrainer, cohort: Cohort, members: Tensor | None = None) -> Tensor:
    """Every update by itself, not bounded."""
    return trainer.sums(job_of(trainer, cohort, Unbounded(), members).per_contribution()).total


def plain_loop(
    algorithm: LocalAlgorithm, local: LocalSgd, cohort: Cohort, job: TrainJob, at: int
) -> np.ndarray:
    """The update of one contribution in float64, by softmax regression written out: weights (3, 6), then biases."""
    records = cohort.groups.members(int(job.members[at]))
    features, targets = cohort.features.double().numpy(), cohort.targets.numpy()
    start, seed = job.start.double(), job.seeds[at : at + 1]
    model, velocity = start.clone(), torch.zeros_like(start)
    for epoch in range(local.epochs):
        order = batch_order(seed, torch.tensor([len(records)]), epoch, local.batch_size)[0].numpy()
        size = local.batch_size or len(records)
        for first in range(0, len(records), size):
            rows = records[order[first : first + size]]
            weight, bias = model[:18].view(3, 6).numpy(), model[18:].numpy()
            logits = features[rows] @ weight.T + bias
            chance = np.exp(logits - logits.max(1, keepdims=True))
            chance /= chance.sum(1, keepdims=True)
            chance[np.arange(len(rows)), targets[rows]] -= 1
            chance /= len(rows)
            gradient = torch.from_numpy(np.concatenate([(chance.T @ features[rows]).ravel(), chance.sum(0)]))
            direction = algorithm.slope(gradient[None], model[None], start)[0] + local.weight_decay * model
            velocity = local.momentum * velocity + direction
            model = model - local.learning_rate * velocity
            if local.projection is not None:
                moved = model - start
                model = start + moved / max(1.0, float(moved.norm()) / local.projection)
    return (model - start).numpy()


def trainers_of(local: LocalSgd) -> dict[str, PartitionedTrainer]:
    """Every trainer that takes these steps."""
    task = linear()
    found: dict[str, PartitionedTrainer] = {
        "loop": LoopTrainer(task=task, local=local),
        "vmap": VmapTrainer(task=task, local=local),
    }
    if local.algorithm.in_span and not (local.projection and local.momentum):
        found["gram"] = GramTrainer(task=task, local=local)
    return found


@steps
@algorithms
def test_every_trainer_computes_what_a_plain_loop_does(
    algorithm: LocalAlgorithm, keys: dict[str, Any]
) -> None:
    local, cohort = local_of(algorithm, **keys), cohort_of(SIZES)
    present = [at for at, size in enumerate(SIZES) if size]
    for name, trainer in trainers_of(local).items():
        job = job_of(trainer, cohort, Unbounded())
        found = updates(trainer, cohort).numpy()
        for at in present:
            wanted = plain_loop(algorithm, local, cohort, job, at)
            np.testing.assert_allclose(found[at], wanted, rtol=2e-4, atol=2e-6, err_msg=name)
        assert not found[EMPTY].any()


def test_fedprox_is_the_gradient_of_the_loss_with_a_quadratic_term() -> None:
    """w <- w - eta (grad + mu (w - w_t)), written out for one step after another."""
    cohort, rate, mu = cohort_of([5]), 0.2, 0.7
    one = [updates(LoopTrainer(task=linear(), local=local_of(PLAIN, epochs=1)), cohort)[0]]
    task = linear()
    start, delta = task.initial().double(), torch.zeros(task.dimension, dtype=torch.float64)
    for _ in range(3):
        shifted = replace(
            job_of(LoopTrainer(task=task, local=local_of(PLAIN)), cohort, Unbounded()),
            start=(start + delta).float(),
        )
        gradient = (
            -LoopTrainer(task=task, local=local_of(PLAIN)).sums(shifted.per_contribution()).total[0] / rate
        )
        delta = delta - rate * (gradient + mu * delta)
    found = updates(LoopTrainer(task=task, local=local_of(FedProx(mu=mu), epochs=3)), cohort)[0]
    np.testing.assert_allclose(found, delta, rtol=1e-4, atol=1e-6)
    assert not np.allclose(found, 3 * one[0], rtol=1e-2)


@pytest.mark.parametrize("name", ["loop", "vmap", "gram"])
def test_fedprox_without_strength_is_plain_training_to_the_bit(name: str) -> None:
    cohort = cohort_of(SIZES)
    plain, prox = (
        updates(trainers_of(local_of(one, epochs=3, batch_size=3))[name], cohort)
        for one in (PLAIN, FedProx(mu=0.0))
    )
    assert torch.equal(plain, prox)


@pytest.mark.parametrize("keys", [STEPS["batches, momentum and decay"], STEPS["projected"]])
@algorithms
def test_an_update_has_the_same_bits_whoever_trains_beside(
    algorithm: LocalAlgorithm, keys: dict[str, Any]
) -> None:
    cohort = cohort_of([7, 2, 4, 3, 12, 5, 7, 4])
    for name, trainer in trainers_of(local_of(algorithm, **keys)).items():
        together = updates(trainer, cohort)
        for chosen in ([0], [6, 5, 2]):
            alone = updates(trainer, cohort, torch.tensor(chosen))
            assert torch.equal(alone, together[chosen]), name


@algorithms
def test_one_contribution_moves_the_sum_by_at_most_the_bound(algorithm: LocalAlgorithm) -> None:
    cohort, bound = cohort_of([7, 2, 4, 3]), Clip(norm=0.01)
    for name, trainer in trainers_of(local_of(algorithm, epochs=3, learning_rate=1.0)).items():
        whole = trainer.sums(job_of(trainer, cohort, bound)).total
        for left in (0, 3):
            others = torch.tensor([one for one in range(4) if one != left])
            moved = whole - trainer.sums(job_of(trainer, cohort, bound, others)).total
            assert 0.009 < float(moved.norm()) <= 0.01, name


# --- what is refused ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Shared(LocalAlgorithm):
    """Mixes the contributions of a batch."""

    def slope(self, gradient: Tensor, at: Tensor, start: Tensor) -> Tensor:
        return gradient - gradient.mean(0)


@dataclass(frozen=True, kw_only=True)
class Remembers(LocalAlgorithm):
    """Remembers its calls."""

    calls: ClassVar[list[int]] = []

    def slope(self, gradient: Tensor, at: Tensor, start: Tensor) -> Tensor:
        self.calls.append(1)
        return gradient * len(self.calls)


@dataclass(frozen=True, kw_only=True)
class Wide(LocalAlgorithm):
    """Returns doubles."""

    def slope(self, gradient: Tensor, at: Tensor, start: Tensor) -> Tensor:
        return gradient.double()


@dataclass(frozen=True, kw_only=True)
class Bent(LocalAlgorithm):
    """Says that the Gram trainer may run it, and is not linear."""

    in_span: ClassVar[bool] = True

    def slope(self, gradient: Tensor, at: Tensor, start: Tensor) -> Tensor:
        return gradient.clamp(-1.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class Unheard(FedProx):
    """Adds a method that nothing calls, such as one that keeps tensors between rounds."""

    def finish(self, sent: Tensor) -> Tensor:
        return sent


class Guarded(LocalAlgorithm):
    """Drops the gradients of a whole block where one of them is not finite."""

    def slope(self, gradient: Tensor, at: Tensor, start: Tensor) -> Tensor:
        return gradient if bool(gradient.isfinite().all()) else torch.zeros_like(gradient)


class Scaled(LocalAlgorithm):
    """Scales a whole block by its largest number, if that is large."""

    def slope(self, gradient: Tensor, at: Tensor, start: Tensor) -> Tensor:
        return gradient / gradient.abs().max().clamp(min=10)


class Writes(LocalAlgorithm):
    """Computes the pull of FedProx in the place of the global model, from which the next contributions start."""

    def slope(self, gradient: Tensor, at: Tensor, start: Tensor) -> Tensor:
        return gradient + 0.1 * start.sub_(at.mean())


class WritesAt(LocalAlgorithm):
    """Computes it in the place of the models, which are the global model at the first step."""

    def slope(self, gradient: Tensor, at: Tensor, start: Tensor) -> Tensor:
        return gradient + 0.1 * at.sub_(start)


class Views(LocalAlgorithm):
    """Returns a view of the global model, to which trainers add weight decay."""

    def slope(self, gradient: Tensor, at: Tensor, start: Tensor) -> Tensor:
        return start.expand_as(gradient)


class Forgets(LocalAlgorithm):
    """Returns nothing."""

    def slope(self, gradient: Tensor, at: Tensor, start: Tensor) -> Any:
        gradient.mul_(2)


@dataclass(frozen=True, kw_only=True)
class Holds(LocalAlgorithm):
    """Returns rows of a tensor that it holds, to which trainers add weight decay."""

    held: ClassVar[Tensor] = torch.zeros(64, 257)

    def slope(self, gradient: Tensor, at: Tensor, start: Tensor) -> Tensor:
        return self.held[: len(gradient)]


class Nothing(LocalAlgorithm):
    """Defines no direction."""


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (Shared(), r"Shared, .*: slope\(\) of one contribution depends on those computed beside it"),
        (Guarded(), r"Guarded, .*: slope\(\) of one contribution depends on those computed beside it"),
        (Scaled(), r"Scaled, .*: slope\(\) of one contribution depends on those computed beside it"),
        (Remembers(), r"Remembers, .*depends on those computed beside it, or on earlier calls"),
        (Wide(), r"Wide, .*: slope\(\) is \(64, 257\) of torch.float64; a float32 tensor of the shape"),
        (Forgets(), r"Forgets, .*: slope\(\) is NoneType; a float32 tensor of the shape"),
        (Writes(), r"Writes, .*: slope\(\) writes to the model or returns a view of it"),
        (WritesAt(), r"WritesAt, .*: slope\(\) writes to the model or returns a view of it"),
        (Holds(), r"Holds, .*depends on those computed beside it, or on earlier calls"),
        (Views(), r"Views, .*: slope\(\) writes to the model or returns a view of it"),
        (Nothing(), r"Nothing, given as local algorithm, does not define slope\(\)"),
    ],
)
def test_an_algorithm_that_breaks_the_conditions_is_refused(algorithm: LocalAlgorithm, message: str) -> None:
    with pytest.raises(CompositionError, match=message):
        choose_trainer(linear(), local_of(algorithm))


_CALLS = [0]
"""Calls of algorithms that behave while they are tried."""


def late() -> bool:
    """Count a call; return whether it is a late one."""
    _CALLS[0] += 1
    return _CALLS[0] > 200


class WritesLate(LocalAlgorithm):
    """Writes to the global model after the trial, from what one contribution has learnt."""

    def slope(self, gradient: Tensor, at: Tensor, start: Tensor) -> Tensor:
        if late():
            start.add_(gradient.mean())
        return gradient.clone()


@dataclass(frozen=True, kw_only=True)
class RemembersLate(LocalAlgorithm):
    """Remembers gradients after the trial, as a warm-up does."""

    seen: list[float]

    def slope(self, gradient: Tensor, at: Tensor, start: Tensor) -> Tensor:
        if late():
            self.seen.append(float(gradient.mean()))
        return gradient + sum(self.seen)


class MeansLate(LocalAlgorithm):
    """Returns one row for all after the trial."""

    def slope(self, gradient: Tensor, at: Tensor, start: Tensor) -> Tensor:
        return gradient.mean(0) if late() else gradient.clone()


@pytest.mark.parametrize("kind", [LoopTrainer, VmapTrainer])
@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (WritesLate(), "WritesLate, given as local algorithm, wrote to the global model"),
        (
            RemembersLate(seen=[]),
            "RemembersLate, given as local algorithm, holds something else after training",
        ),
        (MeansLate(), r"MeansLate, given as local algorithm: slope\(\) is \(21,\)"),
    ],
)
def test_what_an_algorithm_does_after_the_trial_ends_the_round(
    algorithm: LocalAlgorithm, message: str, kind: type[LoopTrainer | VmapTrainer]
) -> None:
    """One contribution would move the updates of those that are trained after it."""
    _CALLS[0] = 0
    check_rows(algorithm)
    assert 0 < _CALLS[0] < 200
    trainer = kind(task=linear(), local=local_of(algorithm, batch_size=2))
    _CALLS[0] = 200
    with pytest.raises(ModelError, match=message):
        trainer.sums(job_of(trainer, cohort_of([7, 2, 4, 3]), Clip(norm=0.01)))


class WritesLateInSpan(WritesLate):
    """The same, of a class that the Gram trainer may run."""

    in_span: ClassVar[bool] = True


def test_the_gram_trainer_notices_an_algorithm_that_writes_after_the_trial() -> None:
    _CALLS[0] = 0
    task = linear()
    trainer = GramTrainer(task=task, local=local_of(WritesLateInSpan(), batch_size=2))
    _CALLS[0] = 200
    with pytest.raises(
        ModelError, match="WritesLateInSpan, given as local algorithm, wrote to the global model"
    ):
        trainer.sums(job_of(trainer, cohort_of([700, 2]), Clip(norm=0.01)))


@algorithms
def test_every_member_meets_the_conditions(algorithm: LocalAlgorithm) -> None:
    check_rows(algorithm)
    if algorithm.in_span:
        linear_combination(algorithm)


def test_a_direction_that_is_not_linear_is_refused_by_the_gram_trainer_alone() -> None:
    task = linear()
    with pytest.raises(CompositionError, match=r"Bent, .* says in_span = True, and its slope"):
        linear_combination(Bent())
    with pytest.raises(ModelError, match="local algorithms whose slope is not a linear combination"):
        choose_trainer(task, local_of(Normalised()), TrainerOptions(name="gram"))
    assert choose_trainer(task, local_of(Normalised())).name == "vmap"
    assert choose_trainer(task, local_of(FedProx(mu=1.0))).name == "gram"


def test_members_that_a_run_would_ignore_are_refused() -> None:
    with pytest.raises(
        CompositionError, match="Unheard, given as local algorithm, adds finish, which nothing"
    ):
        uldp_avg(local=local_of(Unheard(mu=1.0)), clip=1.0, noise_multiplier=1.0)


# --- the table [local] ----------------------------------------------------------------------------------------------

EXPERIMENT: dict[str, Any] = {
    "name": "local",
    "rounds": 2,
    "data": {"name": "digits", "n_users": 20, "n_silos": 2},
    "model": {"name": "linear"},
    "local": {"learning_rate": 0.1, "epochs": 2},
    "method": {"name": "uldp-avg", "clip": 1.0, "noise_multiplier": 5.0},
    "privacy": {"insecure_seed": 5},
}
PROX: dict[str, Any] = {"local": {"name": "fedprox", "mu": 0.5}}


def test_a_document_names_the_algorithm_beside_the_keys_of_local_training(tmp_path: Path) -> None:
    asked = parse(merge(EXPERIMENT, PROX), "t")
    assert asked.local is not None
    assert asked.local.algorithm == FedProx(mu=0.5)
    document = asked.model_dump(mode="json", exclude_none=True)
    assert document["local"]["name"] == "fedprox"
    assert parse(document, "again") == asked
    plain = parse(merge(EXPERIMENT, {"local": {"name": "sgd"}}), "t")
    assert plain == parse(EXPERIMENT, "t")
    assert "name" not in plain.model_dump(mode="json")["local"]
    prepared = prepare(asked)
    assert prepared.setting.trainer.name == "gram"
    assert prepared.guarantee == prepare(plain).guarantee, "clipped last: no event changes"
    first, second = (
        run(one, tmp_path / str(at), NullObserver()).folder / "model.safetensors"
        for at, one in enumerate((prepared, prepare(plain)))
    )
    assert first.read_bytes() != second.read_bytes()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"local": {"mu": 0.5}}, r"^t: local\.mu: no such key; .*; it belongs to name = 'fedprox'"),
        ({"local": {"name": "fedprox"}}, r"^t: local\.mu: is required, for instance mu = 1\.0$"),
        ({"local": {"name": "fedprox", "mu": -1}}, r"^t: local\.mu: must be >= 0, not -1$"),
        (
            {"local": {"name": "fedprox", "mu": 1, "epoch": 3}},
            r"^t: local\.epoch: no such key; .*did you mean 'epochs'",
        ),
        (
            {"local": {"name": "fedprx", "mu": 1}},
            r"^t: local\.name: no local algorithm 'fedprx'.*did you mean 'fedprox'",
        ),
        ({"local": {"name": 3}}, r"^t: local\.name: must be a name in quotes, not 3$"),
        (
            {"local": {"name": "fedprox", "mu": 20}},
            r"local\.mu = 20 at local\.learning_rate = 0\.1: .* 2 / mu = 0\.1",
        ),
        (
            {
                "local": {"name": "fedprox", "mu": 1, "batch_size": 5},
                "method": {"name": "uldp-group", "group_size": 2},
            },
            r"steps nor another local algorithm",
        ),
        (
            {"local": {"name": "session:Own", "algorithm": "Own()"}},
            r"local\.name: 'session:Own' was handed over in a Python session",
        ),
    ],
)
def test_a_wrong_table_is_refused_with_its_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(FedveilError, match=message):
        prepare(parse(merge(EXPERIMENT, changes), "t"))


def people() -> fv.Population:
    """Two silos with three users each."""
    generator = np.random.default_rng(0)
    return fv.population(
        features=generator.normal(size=(60, 4)).astype(np.float32),
        targets=generator.integers(0, 2, 60),
        user=np.arange(60) % 6,
        silo=np.arange(60) % 2,
        n_users=6,
        task="classification",
    )


def test_an_algorithm_is_handed_over_in_python_and_the_run_resumes_with_the_same_alone(
    tmp_path: Path,
) -> None:
    method = fv.uldp_avg(clip=0.5, local_learning_rate=0.1, noise_multiplier=1.0)
    common: dict[str, Any] = {"method": method, "rounds": 1, "folder": tmp_path}
    named = fv.train("linear", people(), local=fv.FedProx(mu=0.5), name="named", **common)
    assert (named.folder / "experiment.toml").read_text().count('name = "fedprox"') == 1
    assert fv.resume(named.folder, "linear", people()).rounds == 1
    own = fv.train("linear", people(), local=Halved(), name="own", **common)
    uncovered = " ".join(own.statement.uncovered)
    assert "the local algorithm Halved comes from tests.contract.test_local_algorithms" in uncovered
    assert 'name = "session:Halved"' in (own.folder / "experiment.toml").read_text()
    assert fv.resume(own.folder, "linear", people(), local=Halved()).rounds == 1
    with pytest.raises(FedveilError, match="'session:Halved' was handed over in a Python session"):
        fv.resume(own.folder, "linear", people())
    with pytest.raises(
        FedveilError, match=r"another local algorithm: .*Halved\(\), and now it is FedProx\(mu=0.5\)"
    ):
        fv.resume(own.folder, "linear", people(), local=fv.FedProx(mu=0.5))
    with pytest.raises(
        FedveilError, match=r"another local algorithm: FedProx\(mu=0.5\), and now it is FedProx\(mu=0.6"
    ):
        fv.resume(named.folder, "linear", people(), local=fv.FedProx(mu=0.6))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"local": "fedprox"},
            r"local: a local algorithm is needed, such as fedveil.FedProx\(mu=0.1\), not str",
        ),
        ({"method": fv.uldp_sgd(clip=1.0, noise_multiplier=1.0)}, "local: uldp-sgd takes no local steps"),
        ({"settings": {"local": {"name": "fedprox", "mu": 1.0}}}, "settings name a local algorithm too"),
    ],
)
def test_a_local_argument_that_does_not_fit_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    method = fv.uldp_avg(clip=0.5, local_learning_rate=0.1, noise_multiplier=1.0)
    given = {"local": fv.FedProx(mu=0.5), "method": method, "rounds": 1, "folder": tmp_path}
    with pytest.raises(FedveilError, match=message):
        fv.train("linear", people(), **(given | changes))
    assert not list(tmp_path.iterdir())


def test_an_unknown_key_of_the_table_is_known_to_set() -> None:
    with pytest.raises(ConfigError, match=r"no such key 'mew'; known here: .*mu"):
        parse_assignment("local.mew=")


def test_a_model_that_has_diverged_was_not_written_to():
    start = torch.tensor([0.5, float("nan")])
    with check_algorithm_unchanged(SimpleNamespace(algorithm=WritesLate()), start):
        pass
    with (
        pytest.raises(ModelError, match="wrote to the global model"),
        check_algorithm_unchanged(SimpleNamespace(algorithm=WritesLate()), start),
    ):
        start[0] = 0.25
