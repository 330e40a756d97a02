"""Boosted trees at user level: the plain loops, one user's reach, who is there, and a run through every layer."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from scipy.special import expit

import fedveil as fv
from fedveil.bundle.export import export_onnx
from fedveil.bundle.manifest import SUMS, BundleError, read_files, sums, write_files
from fedveil.data.records import Affine, Population, Records
from fedveil.errors import CompositionError, ModelError
from fedveil.methods.boosted_trees import boosted_trees
from fedveil.methods.derive import derive
from fedveil.methods.guarantee import PublicFacts
from fedveil.methods.secure_aggregation import SecureAggregation
from fedveil.methods.weights import Weights
from fedveil.privacy.bounds import Clip
from fedveil.privacy.claims import Role
from fedveil.privacy.events import GaussianEvent
from fedveil.randomness import ExperimentRandomness
from fedveil.training.losses import load_loss
from fedveil.training.newton import LinearFamily
from fedveil.training.record_sums import RecordSumsTrainer
from fedveil.training.task import Task
from fedveil.training.trainer import Cohort, TrainJob
from fedveil.training.trees import (
    CELLS,
    CUTS,
    DEPTH,
    LEAVES,
    TREES,
    BoostedTrees,
    LocalTrees,
    TreeSteps,
    quantile_cuts,
)
from tests.federation_world import TESTING, World, asked, in_one_process, population
from tests.runs import files, same_model

INPUTS, SILOS = 3, 3
KINDS = {
    "two classes": ("binary_cross_entropy", 2, 1),
    "three classes": ("cross_entropy", 3, 3),
    "a number": ("squared_error", None, 1),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def family(kind: str) -> LinearFamily:
    classes = KINDS[kind][1]
    return LinearFamily(inputs=INPUTS, classes=classes, record_length=1.0, residual=None if classes else 0.75)


def task(kind: str, seed: int = 0) -> Task:
    loss, _, outputs = KINDS[kind]
    generator = torch.Generator().manual_seed(seed)
    return Task(model=BoostedTrees(INPUTS, outputs, generator), loss=load_loss(loss))


def records(kind: str, n: int = 40, users: int = 8, seed: int = 0) -> Records:
    rng, classes = np.random.default_rng(seed), KINDS[kind][1]
    features = rng.uniform(-1.1, 1.1, size=(n, INPUTS)).astype(np.float32)
    features[:, 2] = features[:, 2] > 0  # a category
    targets = rng.normal(size=n).astype(np.float32) if classes is None else rng.integers(0, classes, n)
    return Records(
        features=features,
        targets=targets,
        silo=rng.integers(0, SILOS, n).astype(np.int32),
        user=rng.integers(0, users, n).astype(np.int32),
    )


def job_of(held: Records, model: torch.Tensor, weights: Weights = Weights.UNIFORM) -> TrainJob:
    groups = held.by_silo_user()
    cohort = Cohort.from_records(
        held, groups=groups, n_silos=SILOS, scale=Affine(), device=torch.device("cpu")
    )
    found = weights.for_groups(groups, SILOS, 10)
    bound, random = Clip(norm=1.0), ExperimentRandomness(0)
    return TrainJob(model, cohort, torch.arange(len(groups)), found, bound, random, ("round", 1))


def played(kind: str, held: Records, rounds: int) -> list[torch.Tensor]:
    """The models of some rounds without noise."""
    described, server = task(kind), TreeSteps(family=family(kind))
    trainer = RecordSumsTrainer(task=described, local=LocalTrees(family=family(kind)))
    models = [described.initial()]
    state = server.init(models[0])
    for number in range(1, rounds + 1):
        total = trainer.at_round(number).sums(job_of(held, models[-1])).total.sum(0)
        model, state = server.step(models[-1], total, state)
        models.append(model)
    return models


# --- the oracle -------------------------------------------------------------------------------------------------------


class PlainLoops:
    """The algorithm as loops over records, trees and leaves, without noise: one silo and user at a time."""

    def __init__(self, kind: str, held: Records) -> None:
        self.bounds, self.held, self.outputs = family(kind), held, KINDS[kind][2]
        model = task(kind).model
        assert isinstance(model, BoostedTrees)
        self.feature, self.rank = model.feature.tolist(), model.rank.tolist()
        self.cuts = [[float(one) for one in row] for row in model.cuts.tolist()]
        self.leaves: list[Any] = []  # by round, tree, leaf, output

    def cell(self, number: int, tree: int, x: Any) -> int:
        found = 0
        for level in range(DEPTH):
            j, rank = self.feature[number][tree][level], self.rank[number][tree][level]
            found = 2 * found + (1 if float(x[j]) > self.cuts[j][rank] else 0)
        return found

    def residual(self, i: int) -> list[float]:
        x, y, k = self.held.features[i], self.held.targets[i], self.outputs
        f = [0.0] * k
        for number, grown in enumerate(self.leaves):
            added = [0.0] * k
            for tree in range(TREES):
                leaf = grown[tree][self.cell(number, tree, x)]
                added = [a + one for a, one in zip(added, leaf, strict=True)]
            f = [a + one for a, one in zip(f, added, strict=True)]
        if k > 1:
            powers = np.exp(np.array(f) - max(f))
            found = [float(y == c) - float(one) for c, one in enumerate(powers / powers.sum())]
        else:
            mean = f[0] if self.bounds.classes is None else float(expit(f[0]))
            found = [float(y) - mean]
        # Rounded as numpy rounds a sum of squares of so few numbers: in order.
        squares = 0.0
        for one in found:
            squares += one * one
        factor = min(1.0, self.bounds.residual_norm(k) / max(math.sqrt(squares), 1e-300))
        return [one * factor for one in found]

    def total(self, length: int, of_records: Any) -> list[float]:
        """The sum over pairs of weighted means, each cut to the grid of the bound."""
        groups, bound = self.held.by_silo_user(), Clip(norm=1.0)
        units = [0.0] * length
        for pair in range(len(groups)):
            summed = [0.0] * length
            scale, held = None, groups.members(pair).tolist()
            for i in held:
                entries, scale = of_records(i)
                for place, value in entries:
                    summed[place] += value
            assert scale is not None
            mean = [one * scale[place] / len(held) for place, one in enumerate(summed)]
            row = torch.tensor([mean], dtype=torch.float64).float()
            cut = bound.quantize_(row, bound.norms(row), torch.tensor([1 / SILOS], dtype=torch.float64))
            units = [a + one for a, one in zip(units, cut[0].tolist(), strict=True)]
        return [one * bound.grid for one in units]

    def find_cuts(self) -> None:
        def of_record(i: int) -> Any:
            x = [float(one) for one in self.held.features[i]]
            cells = [min(CELLS - 1, max(0, math.floor((one + 1) * (CELLS / 2)))) for one in x]
            return [(j * CELLS + cell, 1.0) for j, cell in enumerate(cells)], scales

        scales = [1 / math.sqrt(INPUTS)] * (INPUTS * CELLS)
        # The program divides by sqrt(p); a product may round otherwise.
        counts = self.total(INPUTS * CELLS, lambda i: (of_record(i)[0], _Divided(math.sqrt(INPUTS))))
        for j in range(INPUTS):
            own = [max(0.0, one) for one in counts[j * CELLS : (j + 1) * CELLS]]
            below, running = [], 0.0
            for one in own:
                running += one
                below.append(running)
            for place in range(CUTS):
                edge = sum(one < (place + 1) / (CUTS + 1) * running for one in below) + 1
                cut = min(CELLS - 1, max(1, edge)) * (2 / CELLS) - 1
                self.cuts[j][place] = float(np.float32(cut))

    def grow(self) -> None:
        number, k = len(self.leaves), self.outputs
        norm = self.bounds.residual_norm(k)
        count = 0.2 * norm
        whole = math.sqrt(TREES * (norm**2 + count**2))
        of_residuals, of_counts = 1 / whole, count / whole
        block = TREES * LEAVES

        def of_record(i: int) -> Any:
            entries, pulled = [], self.residual(i)
            for tree in range(TREES):
                cell = tree * LEAVES + self.cell(number, tree, self.held.features[i])
                entries += [(c * block + cell, pulled[c]) for c in range(k)] + [(k * block + cell, 1.0)]
            return entries, [of_residuals] * (k * block) + [of_counts] * block

        released = self.total((k + 1) * block, of_record)
        slope = self.bounds.slope(k)
        grown = []
        for tree in range(TREES):
            leaves = []
            for leaf in range(LEAVES):
                people = released[k * block + tree * LEAVES + leaf] / of_counts
                values = []
                for c in range(k):
                    pulled = released[c * block + tree * LEAVES + leaf] / of_residuals
                    step = pulled / (slope * max(people, 0.0) + np.finfo(np.float64).tiny)
                    step = min(8.0 * norm, max(-8.0 * norm, step))
                    values.append(float(np.float32(step * (3.0 / TREES))))
                leaves.append(values)
            grown.append(leaves)
        self.leaves.append(grown)


class _Divided:
    """A factor that is a division."""

    def __init__(self, by: float) -> None:
        self.by = by

    def __getitem__(self, place: int) -> _Inverse:
        return _Inverse(self.by)


class _Inverse:
    def __init__(self, by: float) -> None:
        self.by = by

    def __rmul__(self, other: float) -> float:
        return other / self.by


@every_kind
def test_without_noise_it_is_the_plain_loop_bit_for_bit(kind: str) -> None:
    held, rounds = records(kind, n=30), 4
    model = played(kind, held, rounds)[-1]
    oracle = PlainLoops(kind, held)
    oracle.find_cuts()
    for _ in range(rounds - 1):
        oracle.grow()
    named = task(kind).layout.unflatten(model)
    assert named["cuts"].tolist() == oracle.cuts
    assert named["leaves"][: rounds - 1].tolist() == oracle.leaves
    assert not named["leaves"][rounds - 1 :].any()


@every_kind
def test_the_model_predicts_what_training_predicted(kind: str) -> None:
    held, described = records(kind), task(kind)
    model = played(kind, held, 4)[-1]
    predicted = described.predict(model, torch.from_numpy(held.features)).double().numpy()
    oracle = PlainLoops(kind, held)
    named = described.layout.unflatten(model)
    oracle.cuts, oracle.leaves = named["cuts"].tolist(), named["leaves"][:3].tolist()
    for i in range(len(held)):
        expected = [0.0] * KINDS[kind][2]
        for number in range(3):
            for tree in range(TREES):
                leaf = oracle.leaves[number][tree][oracle.cell(number, tree, held.features[i])]
                expected = [a + one for a, one in zip(expected, leaf, strict=True)]
        assert predicted[i] == pytest.approx(expected, abs=1e-4)


@every_kind
def test_importances_are_the_squared_steps_across_the_cuts(kind: str) -> None:
    described = task(kind)
    model = described.model
    assert isinstance(model, BoostedTrees)
    assert model.importances().tolist() == [0.0] * INPUTS
    trained = played(kind, records(kind), 4)[-1]
    model.load_state_dict(described.layout.unflatten(trained), strict=False)
    expected = np.zeros(INPUTS)
    for number in range(3):
        for tree in range(TREES):
            leaves = model.leaves[number, tree].tolist()
            for level in range(DEPTH):
                bit = 2 ** (DEPTH - 1 - level)
                steps = [
                    (high - low) ** 2
                    for cell in range(LEAVES)
                    if not cell & bit
                    for low, high in zip(leaves[cell], leaves[cell | bit], strict=True)
                ]
                expected[int(model.feature[number, tree, level])] += np.mean(steps)
    assert model.importances().numpy() == pytest.approx(expected / expected.sum(), rel=1e-4)


# --- one user --------------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    number=st.sampled_from([1, 2, 4]),
    scale=st.sampled_from([1e-30, 1.0, 50.0, 1e30]),
    seed=st.integers(0, 10**6),
    weights=st.sampled_from([Weights.UNIFORM, Weights.EQUAL, Weights.BY_RECORDS, Weights.MAIN]),
    alike=st.booleans(),
)
def test_a_user_in_every_silo_moves_a_sum_by_1_at_most(
    kind: str, number: int, scale: float, seed: int, weights: Weights, alike: bool
) -> None:
    rng = np.random.default_rng(seed)
    held = records(kind, n=30, users=4, seed=seed)
    model = played(kind, held, 3)[-1]
    mine = rng.random(30) < 0.7
    features = np.where(mine[:, None], held.features * np.float32(scale), held.features)
    targets = held.targets.copy()
    if alike and mine.any():  # duplicates in one leaf of every tree
        features[mine], targets[mine] = features[mine][:1], targets[mine][:1]
    if KINDS[kind][1] is None:
        targets = np.where(mine, targets * np.float32(1e20), targets)
    user = np.where(mine, 9, held.user).astype(np.int32)
    held = replace(held, features=features, targets=targets, user=user)
    rest = held.select(np.flatnonzero(~mine))

    def total(some: Records) -> np.ndarray:
        local = LocalTrees(family=family(kind), round_number=number)
        trainer = RecordSumsTrainer(task=task(kind), local=local)
        found: np.ndarray = trainer.sums(job_of(some, model, weights)).total.sum(0).numpy()
        return found

    assert np.linalg.norm(total(held) - total(rest)) <= 1.0


@every_kind
@pytest.mark.parametrize("number", [1, 3])
def test_a_contribution_is_the_same_whoever_else_is_there(kind: str, number: int) -> None:
    held = records(kind, n=200, users=50)
    model = played(kind, held, 3)[-1]

    def total(some: Records) -> np.ndarray:
        local = LocalTrees(family=family(kind), round_number=number)
        found: np.ndarray = (
            RecordSumsTrainer(task=task(kind), local=local).sums(job_of(some, model)).total.numpy()
        )
        return found

    without, alone = (held.select(np.flatnonzero(keep)) for keep in (held.user != 7, held.user == 7))
    assert np.array_equal(total(held), total(without) + total(alone))


def test_kept_predictions_change_no_bit_and_belong_to_one_table_and_model() -> None:
    kind = "two classes"
    held, other = records(kind), records(kind, seed=5)
    models = played(kind, held, 4)
    local = LocalTrees(family=family(kind))
    keeping = RecordSumsTrainer(task=task(kind), local=local)

    def fresh(number: int, some: Records, model: torch.Tensor) -> torch.Tensor:
        return (
            RecordSumsTrainer(task=task(kind), local=local).at_round(number).sums(job_of(some, model)).total
        )

    changed = models[3].clone()
    changed[INPUTS * CUTS] += 1.0  # another leaf of the first tree
    jobs = {id(one): job_of(one, models[0]) for one in (held, other)}
    for number, some, model in (
        (2, held, models[1]),
        (3, held, models[2]),
        (4, held, models[3]),
        (3, held, models[2]),
        (4, held, changed),
        (4, other, models[3]),
        (4, held, models[3]),
    ):
        job = replace(jobs[id(some)], start=model)
        assert torch.equal(keeping.at_round(number).sums(job).total, fresh(number, some, model))


def test_cuts_are_quantiles_with_people_on_both_sides() -> None:
    counts = np.zeros((5, CELLS))
    counts[0] = 1.0  # even
    counts[1, 64] = counts[1, 127] = 10.0  # a category: 0 or 1
    counts[2, 127] = 10.0  # everybody at the upper bound
    counts[3] = -1.0  # nothing but noise below 0
    counts[4, 0] = 3.0
    cuts = quantile_cuts(counts)
    assert cuts[0] == pytest.approx(np.arange(1, 16) / 8 - 1, abs=0.02)
    assert ((cuts[1] > 0) & (cuts[1] < 1)).all()
    assert ((cuts > -1) & (cuts < 1)).all()
    assert cuts[3] == pytest.approx(np.arange(1, 16) / 8 - 1, abs=0.02)


# --- a run -----------------------------------------------------------------------------------------------------------


def people(n: int = 600, **changes: Any) -> Population:
    """Two features whose product decides, which no linear model can tell."""
    rng = np.random.default_rng(4)
    features = rng.uniform(-1, 1, size=(n, 3)).astype(np.float32)
    labels = (features[:, 0] * features[:, 1] > 0).astype(int)
    given: dict[str, Any] = {
        "user": np.arange(n) % (n // 2),
        "silo": rng.integers(0, SILOS, n),
        "n_users": n // 2,
        "silos": [0, 1, 2],
        "task": "classification",
        "classes": [0, 1],
    } | changes
    return fv.population(features, given.pop("targets", labels), **given)


def test_it_finds_what_no_linear_model_finds_and_travels_as_a_bundle(tmp_path: Path) -> None:
    test = np.random.default_rng(8).uniform(-1, 1, size=(400, 3)).astype(np.float32)
    found = fv.train(
        "boosted-trees", people(), method=fv.boosted_trees(), epsilon=20, rounds=31, folder=tmp_path,
        settings={"evaluate_every": 31},
    )  # fmt: skip
    right = found.predict(test) == (test[:, 0] * test[:, 1] > 0)
    assert right.mean() > 0.8
    assert found.statement.epsilon <= 20
    loaded = fv.load(found.save(tmp_path / "trees"))
    assert np.array_equal(loaded.predict_proba(test), found.predict_proba(test))


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("feature", lambda old: old - old - 1, "'feature' names a feature or a cut"),
        ("feature", lambda old: old + 3, "'feature' names a feature or a cut"),
        ("rank", lambda old: old + 15, "'rank' names a feature or a cut"),
        ("feature", lambda old: old.float(), "'feature' holds torch.float32 in the bundle and torch.int64"),
    ],
)
def test_a_bundle_whose_trees_read_beside_the_features_is_refused(
    name: str, change: Any, said: str, tmp_path: Path
) -> None:
    """Before, an error of an index; or an ONNX file that has its reader read beside a record's memory."""
    found = fv.train(
        "boosted-trees", people(), method=fv.boosted_trees(), epsilon=20, rounds=3, folder=tmp_path
    )
    held = read_files(found.save(tmp_path / "trees"))
    tensors = load(held["model.safetensors"])
    held["model.safetensors"] = save({**tensors, name: change(tensors[name])})
    del held[SUMS]
    write_files(tmp_path / "hostile", {**held, SUMS: sums(held)})
    hostile = fv.load(tmp_path / "hostile")
    for use in (
        lambda: hostile.predict(np.zeros((1, 3), np.float32)),
        lambda: export_onnx(hostile, tmp_path / "t.onnx"),
    ):
        with pytest.raises(BundleError, match=said):
            use()


@pytest.mark.parametrize("outputs", [1, 3])
def test_the_trees_are_written_as_one_onnx_operator_and_give_the_same(outputs: int, tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    rng, classes = np.random.default_rng(8), [0, 1] if outputs == 1 else [0, 1, 2]
    held = people() if outputs == 1 else people(targets=rng.integers(0, 3, 600), classes=classes)
    found = fv.train("boosted-trees", held, method=fv.boosted_trees(), epsilon=20, rounds=3, folder=tmp_path)
    saved = found.save(tmp_path / "trees")
    path = export_onnx(fv.load(saved), tmp_path / "trees.onnx")
    # Records that lie on a cut go to the same side, too.
    test = rng.uniform(-1, 1, size=(50, 3)).astype(np.float32)
    test[:15] = fv.load(saved).model.cuts.detach().numpy().T
    (given,) = runtime.InferenceSession(str(path)).run(None, {"features": test})
    with torch.no_grad():
        expected = fv.load(saved).model(torch.from_numpy(test)).numpy()
    assert given.shape == (50, outputs)
    assert given == pytest.approx(expected, abs=1e-5)
    assert np.ptp(given) > 0.01


@pytest.mark.parametrize(
    ("model", "rounds", "more", "error", "reason"),
    [
        ("linear", 3, {}, ModelError, "it grows its own model"),
        ("boosted-trees", 32, {}, CompositionError, "take 2 to 31 rounds"),
        ("boosted-trees", 1, {}, CompositionError, "take 2 to 31 rounds"),
        ("boosted-trees", 3, {"loss": "focal"}, ModelError, "focal is not one"),
    ],
)
def test_what_cannot_be_grown_is_refused_before_a_charge(
    model: str, rounds: int, more: dict[str, Any], error: type[Exception], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=reason):
        fv.train(
            model, people(), method=fv.boosted_trees(), epsilon=2, rounds=rounds, folder=tmp_path, **more
        )
    assert not list(tmp_path.rglob("ledger.jsonl"))


def test_the_guarantee_is_that_of_a_gaussian_sum() -> None:
    method = boosted_trees(inputs=3, classes=2, target_range=None, noise_multiplier=2.0, rounds=5)
    guarantee = derive(method, PublicFacts(n_silos=SILOS, n_users=150, dimension=384))
    assert guarantee.event == GaussianEvent(noise_multiplier=2.0)
    hidden = replace(method, weights=Weights.UNIFORM, protection=SecureAggregation())
    facts = PublicFacts(n_silos=SILOS, n_users=150, dimension=512)
    assert derive(hidden, facts).event_for(Role.SERVER) == GaussianEvent(noise_multiplier=2.0)


def test_between_institutions_and_under_masks_it_is_the_run_in_one_process(tmp_path: Path) -> None:
    method = {
        "name": "boosted-trees",
        "clip": None,
        "noise_multiplier": 3.0,
        "power": 1.0,
    }
    changes: dict[str, Any] = {
        "local": None,
        # Masks round messages as little as no masks do.
        "channel": {"name": "additive", "word_bits": 64},
        "server": None,
        "method": method,
        "model": {"name": "boosted-trees"},
    }
    masked = asked(**changes, protection={"name": "secure-aggregation"})
    policy = TESTING.model_copy(update={"models": ("boosted-trees",)})
    world = World(tmp_path, masked, population(), policy)
    world.play()
    world.assert_as_in_one_process()
    world.close()
    plain = in_one_process(asked(**changes), population(), tmp_path / "plain")
    assert same_model(files(plain)[1], files(world.run_folder.path)[1])
