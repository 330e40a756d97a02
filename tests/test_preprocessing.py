"""A schema refined by one release: bounds, medians and pooled categories from noisy cells, and a run that pays."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fedveil.bundle.writing import bundle_run
from fedveil.data.columns import read_columns
from fedveil.data.schema import Category, Number, Schema, read_schema
from fedveil.data.tables import read_tables
from fedveil.errors import BudgetError, ConfigError, FedveilError, RunFolderError
from fedveil.methods.weights import Weights
from fedveil.privacy.accountant import gaussian_epsilon
from fedveil.privacy.claims import Role
from fedveil.privacy.events import GaussianEvent, split_grid_loss
from fedveil.privacy.ledger import Ledger, read_entries
from fedveil.randomness import PrivacyRandomness
from fedveil.run.folder.run_folder import PREPROCESSED, SCHEMA, RunFolder
from fedveil.run.releases.preprocessing import read_preprocessed, write_preprocessed
from fedveil.run.releases.records import lengths_of_updates
from fedveil.run.setup import Prepared, prepare
from fedveil.run.steps.experiment import Outcome
from fedveil.run.training_run import resume, run
from fedveil.statistics.local_vectors import LocalStatistic, silo_sums
from fedveil.statistics.preprocessing import LENGTH, PreprocessingRequest, quantile_of_lengths, refine_schema
from tests.hospitals import FILES, prepared_run, write_tables
from tests.runs import Silent, json_lines

SCHEMA_TOML = """
n_users = {users}
user = "who"
silos = ["north", "south", "west"]
[target]
kind = "label"
column = "sick"
classes = ["0", "1"]
[features]
age = {{ kind = "number", lower = -1e6, upper = 1e6, missing = "middle" }}
code = {{ kind = "number", lower = 0, upper = 1e6 }}
ward = {{ kind = "category", categories = ["x", "y", "z"] }}
"""
PEOPLE = 1500
CLIP: dict[str, Any] = {"clip": "quantile", "bounds": None, "impute": None, "pool": None}


def tables(folder: Path, *, people: int = PEOPLE, without: int | None = None) -> None:
    """Write three hospitals' tables: ages from 20 to 90 with some missing, codes 0 to 2, a rare ward."""
    rng = np.random.default_rng(0)
    (folder / "schema.toml").write_text(SCHEMA_TOML.format(users=people))
    lines: dict[str, list[str]] = {name: [] for name in FILES}
    for who in range(people):
        age, code, ward = (
            rng.uniform(20, 90),
            rng.integers(3),
            "z" if who % 50 == 0 else "xy"[rng.integers(2)],
        )
        sick = int(rng.random() < 1 / (1 + math.exp(-0.1 * (age - 50))))
        cell = "" if who % 10 == 7 else f"{age:.1f}"
        if who != without:
            lines[FILES[who % 3]].append(f"p{who},{cell},{code},{ward},{sick}")
    write_tables(folder, "who,age,code,ward,sick", lines)


def prepared_in(folder: Path, **changes: Any) -> Prepared:
    """Prepare a run over the tables of a folder."""
    base = {
        "privacy": {"epsilon": 20.0},
        "preprocessing": {"bounds": ["age", "code"], "impute": ["age"], "pool": {"ward": 200}},
        "budget": {"preprocessing": 0.2},
    }
    return prepared_run(folder, base, changes)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Prepared, Outcome]:
    """Return the folder of the tables, and a run with preprocessing and evaluation."""
    folder = tmp_path_factory.mktemp("refined")
    tables(folder)
    prepared = prepared_in(folder, evaluation={}, data={"table": {"test_share": 0.5}})
    with pytest.MonkeyPatch.context() as patch:  # what the tests below ask of the noise holds for this seed
        patch.setattr(PrivacyRandomness, "system", lambda: PrivacyRandomness.insecure(2))
        return folder, prepared, run(prepared, folder / "runs", Silent())


# --- the schema -------------------------------------------------------------------------------------------------------


def wanted(**changes: Any) -> PreprocessingRequest:
    """Return what a preprocessing of one number and one category is of."""
    document = {
        "n_users": 10,
        "user": "who",
        "target": {"kind": "label", "column": "sick", "classes": ["0", "1"]},
        "features": {
            "age": {"kind": "number", "lower": -1000.0, "upper": 1e6, "missing": "middle"},
            "ward": {"kind": "category", "categories": ["x", "y", "z"]},
        },
    }
    given = {"silos": "equal", "bounds": ("age",), "impute": (), "pool": {}} | changes
    return PreprocessingRequest(schema_=Schema.model_validate(document), silo_names=("a", "b"), **given)


def vector_of(asked: PreprocessingRequest, values: np.ndarray, wards: tuple[int, ...] = ()) -> np.ndarray:
    """Return the sum without noise: one record a person."""
    found = np.zeros(asked.layout.length)
    for slot in asked.layout.slots:
        name, cells = slot.block.release, np.zeros(slot.block.encoder.width)
        if name in asked.numbers:
            np.add.at(cells, np.searchsorted(asked.edges(name), values, side="right"), 1)
        else:
            cells[: len(wards)] = wards
        found[slot.place] = slot.scale * slot.block.strategy.matrix @ cells
    return found


def number(schema: Schema, name: str) -> Number:
    found = schema.features[name]
    assert isinstance(found, Number)
    return found


def test_bounds_are_the_outermost_bins_whose_tails_are_no_noise() -> None:
    asked, values = wanted(), np.random.default_rng(0).uniform(20, 90, 2000)
    found = number(refine_schema(asked, vector_of(asked, values), 1e-9), "age")
    assert (found.lower, found.upper) == (16.0, 128.0)
    far = np.concatenate((values, np.full(30, 3e5)))  # 1.5 %: a tail
    assert number(refine_schema(asked, vector_of(asked, far), 1e-9), "age").upper == 128.0
    many = np.concatenate((values, np.full(60, 3e5)))
    assert number(refine_schema(asked, vector_of(asked, many), 1e-9), "age").upper == 2.0**19


def test_one_noisy_far_bin_is_no_bound() -> None:
    """A threshold of no standard deviations is the disaster that two of them prevent: tried over many draws."""
    rng, asked = np.random.default_rng(1), wanted()
    vector = vector_of(asked, rng.integers(0, 3, 400).astype(float))
    uppers = [
        number(refine_schema(asked, vector + 12.0 * rng.normal(size=len(vector)), 12.0), "age").upper
        for _ in range(60)
    ]
    assert np.mean(np.array(uppers) > 100) < 0.1
    blind = [
        number(refine_schema(asked, vector + 12.0 * rng.normal(size=len(vector)), 1e-9), "age").upper
        for _ in range(60)
    ]
    assert np.mean(np.array(blind) > 100) > 0.3


def test_missing_values_are_taken_for_the_median() -> None:
    values = np.random.default_rng(2).uniform(20, 90, 2000)
    for bounds in (("age",), ()):
        asked = wanted(bounds=bounds, impute=("age",))
        if not bounds:
            asked = asked.model_copy(update={"schema_": _narrow(asked.schema_)})
        found = number(refine_schema(asked, vector_of(asked, values), 1e-9), "age")
        assert found.fill == pytest.approx(55, abs=3)
        assert found.fill_value == pytest.approx(
            2 * (found.fill - found.lower) / (found.upper - found.lower) - 1
        )


def _narrow(schema: Schema) -> Schema:
    features = {
        **schema.features,
        "age": number(schema, "age").model_copy(update={"lower": 0.0, "upper": 120.0}),
    }
    return schema.model_copy(update={"features": features})


def test_rare_categories_are_pooled_and_one_stays() -> None:
    asked = wanted(bounds=(), pool={"ward": 30.0})
    for wards, kept in (((100, 80, 3), ("x", "y")), ((100, 80, 60), ("x", "y", "z")), ((1, 2, 0), ("y",))):
        found = refine_schema(asked, vector_of(asked, np.zeros(0), wards), 1e-9).features["ward"]
        assert isinstance(found, Category)
        assert found.categories == kept
        assert (found.unknown == "zero") == (len(kept) < 3)
    unsure = refine_schema(asked, vector_of(asked, np.zeros(0), (100, 80, 20)), 15.0).features["ward"]
    assert isinstance(unsure, Category)
    assert unsure.categories == ("x", "y", "z")  # the upper limit of 20 +- 15 is not below 30


def test_nobody_is_no_reason_to_move_a_bound() -> None:
    asked = wanted(impute=("age",))
    found = number(refine_schema(asked, vector_of(asked, np.zeros(0)), 5.0), "age")
    assert (found.lower, found.upper, found.fill) == (-1000.0, 1e6, None)


def test_a_declared_fill_outside_of_the_bounds_that_are_found_is_taken_for_the_nearest() -> None:
    """It ended a run after its charge by an error about a schema that nobody wrote."""
    asked, values = wanted(), np.random.default_rng(0).uniform(20, 90, 2000)
    filled = number(asked.schema_, "age").model_copy(update={"fill": 5e5})
    features = {**asked.schema_.features, "age": filled}
    asked = asked.model_copy(update={"schema_": asked.schema_.model_copy(update={"features": features})})
    found = number(refine_schema(asked, vector_of(asked, values), 1e-9), "age")
    assert (found.lower, found.upper, found.fill) == (16.0, 128.0, 128.0)
    far = vector_of(asked, np.concatenate((values, np.full(2000, 7e5))))
    assert number(refine_schema(asked, far, 1e-9), "age").fill == 5e5


@pytest.mark.parametrize("bounds", [(2.0**20 - 0.01, 2.0**20 + 1000), (-1024.00001, -1000.0)])
def test_any_two_edges_are_bounds_that_a_schema_may_have(bounds: tuple[float, float]) -> None:
    """A power of two beside a declared bound was the same number in float32, which no schema has as its bounds."""
    asked = wanted()
    narrow = number(asked.schema_, "age").model_copy(update={"lower": bounds[0], "upper": bounds[1]})
    features = {**asked.schema_.features, "age": narrow}
    asked = asked.model_copy(update={"schema_": asked.schema_.model_copy(update={"features": features})})
    edges = asked.edges("age")
    assert (edges[0], edges[-1]) == bounds
    for value in edges:
        found = number(refine_schema(asked, vector_of(asked, np.full(900, value)), 1e-9), "age")
        assert found.lower <= value <= found.upper


# --- the clip ---------------------------------------------------------------------------------------------------------


def test_the_clip_is_the_quantile_of_the_lengths() -> None:
    """Without noise, four fifths of a thousand lengths are below; beyond the grid it lies in the grid's last bin."""
    asked = wanted(bounds=(), clip=2.0)
    (layout,) = asked.layouts
    (slot,) = layout.slots
    edges = 2.0 * 2.0 ** (np.arange(-8, 9) / 2)
    for factor, low, high in ((1.0, 1.58, 1.62), (1e3, edges[-2], edges[-1]), (1e-3, edges[0], edges[1])):
        lengths, cells = factor * np.linspace(0.002, 2.0, 1000), np.zeros(slot.block.encoder.width)
        np.add.at(cells, np.searchsorted(edges, lengths, side="right"), 1)
        vector = asked.unit * slot.scale * slot.block.strategy.matrix @ cells
        found = quantile_of_lengths(asked, vector, 1e-9)
        assert low <= found <= high
    assert quantile_of_lengths(asked, 0 * vector, 1.0) == 2.0


@pytest.fixture(scope="module")
def clipped(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Return a run whose clip, declared far too large, is found on refined features."""
    folder = tmp_path_factory.mktemp("clipped")
    tables(folder)
    asked = {"privacy": {"insecure_seed": 1}, "method": {"clip": 3.0}, "preprocessing": {"clip": "quantile"}}
    return run(prepared_in(folder, **asked), folder / "runs", Silent())


def test_a_run_is_clipped_to_what_was_found_and_pays_for_it(clipped: Outcome) -> None:
    outcome = clipped
    entries = read_entries(outcome.folder / "ledger.jsonl")
    assert [entry.run for entry in entries] == ["hospitals/prep/1", "hospitals/prep/2", *["hospitals"] * 2]
    noises = [split_grid_loss(entry.event)[0] for entry in entries]
    strengths = [one.noise_multiplier**-2 for one in noises if isinstance(one, GaussianEvent)]
    shares = np.array(strengths) / sum(strengths)
    assert shares[:2] == pytest.approx([0.2 * 3 / 4, 0.2 / 4], abs=1e-3)
    found = read_preprocessed(outcome.folder)
    assert found is not None
    assert found.clip is not None
    rows = json_lines(outcome.folder / "metrics.jsonl")
    assert {row["clip"] for row in rows} == {found.clip}
    prepared = prepare(RunFolder.open(outcome.folder)[1])
    assert prepared.epsilon_with(Role.READER, 2, prepared.side_releases) == pytest.approx(20.0, rel=1e-4)
    lengths = lengths_of_updates(prepared, prepared.task.initial()).numbers(LENGTH).values
    assert 0.7 < float((lengths <= found.clip).mean()) < 0.9
    assert any(
        "clip bound comes from the release hospitals/prep/2" in note for note in outcome.statement.notes
    )
    assert any("prep/2: 20 numbers, people by the length" in one for one in outcome.statement.mechanisms)
    again = resume(outcome.folder, Silent())
    assert again.statement.mechanisms == outcome.statement.mechanisms


def test_a_run_that_was_cut_off_between_two_releases_makes_the_second(
    clipped: Outcome, tmp_path: Path
) -> None:
    """The same noise (of a seed) gives the same clip, under the charge that the ledger has."""
    outcome = clipped
    folder = RunFolder(shutil.copytree(outcome.folder, tmp_path / "hospitals"))
    before = read_preprocessed(folder.path)
    assert before is not None
    write_preprocessed(folder, replace(before, sums=before.sums[:1]))
    lines = (folder / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "ledger.jsonl").write_bytes(b"".join(lines[:2]))
    for name in ("checkpoint/state.safetensors", "diagnostics.json", "metrics.jsonl", "privacy.json"):
        (folder / name).unlink()
    resume(folder.path, Silent())
    again = read_preprocessed(folder.path)
    assert again is not None
    assert again.clip == before.clip
    assert (folder / "model.safetensors").read_bytes() == (outcome.folder / "model.safetensors").read_bytes()
    assert len(read_entries(folder / "ledger.jsonl")) == 4


def test_one_person_moves_the_lengths_by_one_and_updates_of_nothing_have_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user is in one silo of three and weighs a third there."""
    sums = []
    for without in (None, 7):
        tables(tmp_path, people=300, without=without)
        prepared = prepared_in(tmp_path, preprocessing=CLIP)
        planned = prepared.preprocessing
        assert planned is not None
        (release,) = planned.releases
        table = lengths_of_updates(prepared, prepared.task.initial())
        weights = Weights.UNIFORM.for_groups(table.pairs(), 3, 300)
        sums.append(silo_sums(release.step, table, weights, release.method.bound).sum(axis=0))  # type: ignore[arg-type]
    assert 0.3 < np.linalg.norm(sums[0] - sums[1]) <= 1 / 3
    norms = torch.arange(300.0, dtype=torch.float64)
    norms[1] = torch.nan
    trained = prepared.setting.trainer.sums
    stub: Any = SimpleNamespace(
        at_round=lambda _: stub,
        sums=lambda job, progress=None: replace(trained(job, progress), norms=norms[: len(job.members)]),
    )
    prepared = replace(prepared, setting=replace(prepared.setting, trainer=stub))
    state = lengths_of_updates(prepared, prepared.task.initial()).numbers(LENGTH).state
    assert np.bincount(state).tolist() == [len(prepared.population.train) - 2, 2]


# --- a run ------------------------------------------------------------------------------------------------------------


def test_preprocessing_training_and_evaluation_spend_what_was_declared(
    world: tuple[Path, Prepared, Outcome],
) -> None:
    _, _, outcome = world
    entries = read_entries(outcome.folder / "ledger.jsonl")
    names = ["hospitals/prep/1", "hospitals", "hospitals", "hospitals/eval/1", "hospitals/eval/2"]
    assert [entry.run for entry in entries] == names
    noises = [split_grid_loss(entry.event)[0] for entry in entries]
    strengths = [one.noise_multiplier**-2 for one in noises if isinstance(one, GaussianEvent)]
    assert len(strengths) == 5
    assert gaussian_epsilon(math.sqrt(math.fsum(strengths)), 1e-5) == pytest.approx(20.0, abs=1e-3)
    assert outcome.statement.epsilon == pytest.approx(20.0, abs=1e-3)
    assert strengths[0] / sum(strengths) == pytest.approx(0.2, abs=1e-3)
    rows = json_lines(outcome.folder / "metrics.jsonl")
    assert 0 < rows[0]["epsilon"] < rows[1]["epsilon"] < rows[2]["epsilon"] < 20.0
    assert any("hospitals/prep/1" in note for note in outcome.statement.notes)


def test_a_run_is_trained_on_the_refined_schema(world: tuple[Path, Prepared, Outcome]) -> None:
    folder, prepared, outcome = world
    schema = read_schema(outcome.folder / SCHEMA)
    age, code, ward = number(schema, "age"), number(schema, "code"), schema.features["ward"]
    assert 2 <= age.lower <= 32
    assert 64 <= age.upper <= 256
    assert age.fill is not None
    assert 30 < age.fill < 80
    assert code.upper <= 16
    assert isinstance(ward, Category)
    assert ward.categories == ("x", "y")
    model = load_file(outcome.folder / "model.safetensors")
    assert sum(value.numel() for value in model.values()) == schema.width + 1
    assert prepared.population.feature_shape == (5,)
    found = read_preprocessed(outcome.folder)
    assert found is not None
    assert found.schema == schema
    expected = read_tables(schema, [folder / f"{name}.csv" for name in FILES], test_share=0.5)
    assert expected.train.features.std(axis=0).min() > 0.1


def test_resuming_uses_the_same_release(world: tuple[Path, Prepared, Outcome]) -> None:
    _, _, outcome = world
    before = {
        name: (outcome.folder / name).read_bytes() for name in (PREPROCESSED, SCHEMA, "model.safetensors")
    }
    again = resume(outcome.folder, Silent())
    assert again.statement.epsilon == outcome.statement.epsilon
    assert {name: (outcome.folder / name).read_bytes() for name in before} == before
    assert len(read_entries(outcome.folder / "ledger.jsonl")) == 5


def test_a_bundle_reads_new_records_by_the_refined_schema(
    world: tuple[Path, Prepared, Outcome], tmp_path: Path
) -> None:
    _, _, outcome = world
    path = bundle_run(outcome.folder, tmp_path / "bundle")
    assert (path / "schema.toml").read_bytes() == (outcome.folder / SCHEMA).read_bytes()


def test_a_run_killed_after_the_charge_charges_the_release_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables(tmp_path)
    prepared = prepared_in(tmp_path)

    def killed(*given: Any, **named: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("fedveil.run.simulation.noisy_sum", killed)
        with pytest.raises(KeyboardInterrupt):
            run(prepared, tmp_path / "runs", Silent())
    folder = tmp_path / "runs" / "hospitals"
    assert len(read_entries(folder / "ledger.jsonl")) == 1
    assert not (folder / SCHEMA).exists()
    outcome = resume(folder, Silent())
    assert (folder / SCHEMA).exists()
    assert outcome.rounds == 2
    assert len(read_entries(folder / "ledger.jsonl")) == 4
    twice = (*prepared.releases_before_training, *prepared.side_releases)
    assert outcome.statement.epsilon == pytest.approx(prepared.epsilon_with(Role.READER, 2, twice), rel=1e-9)


def test_a_run_killed_between_its_releases_and_their_schema_goes_on_with_that_schema(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables(tmp_path)
    seeded = prepared_in(tmp_path, privacy={"epsilon": 20.0, "insecure_seed": 1})
    undisturbed, write = run(seeded, tmp_path / "whole", Silent()), RunFolder.write

    def killed(self: RunFolder, name: str, content: bytes) -> None:
        if name == SCHEMA:
            raise KeyboardInterrupt
        write(self, name, content)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "write", killed)
        with pytest.raises(KeyboardInterrupt):
            run(seeded, tmp_path / "runs", Silent())
    folder = tmp_path / "runs" / "hospitals"
    assert (folder / PREPROCESSED).exists()
    assert not (folder / SCHEMA).exists()
    resume(folder, Silent())
    for name in (SCHEMA, "model.safetensors", "ledger.jsonl"):
        assert (folder / name).read_bytes() == (undisturbed.folder / name).read_bytes()


def test_neighbours_are_planned_alike_and_a_person_moves_the_release_by_one_at_most(tmp_path: Path) -> None:
    found, sums = [], []
    for without in (None, 7):
        tables(tmp_path, without=without)
        prepared = prepared_in(tmp_path)
        planned = prepared.preprocessing
        assert planned is not None
        found.append((planned.request, planned.noise, planned.releases[0].guarantee))
        step = planned.releases[0].step
        assert isinstance(step, LocalStatistic)
        assert prepared.experiment.data.table is not None
        table = read_columns(planned.request.schema_, prepared.experiment.data.table.files, step.columns)
        weights = Weights.UNIFORM.for_groups(table.pairs(), 3, PEOPLE)
        sums.append(silo_sums(step, table, weights, planned.releases[0].method.bound).sum(axis=0))  # type: ignore[arg-type]
    assert found[0] == found[1]
    assert 0 < np.linalg.norm(sums[0] - sums[1]) <= 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"preprocessing": {"bounds": ["ward"]}}, "'ward' is no number"),
        ({"preprocessing": {"bounds": ["height"]}}, "'height' is no number"),
        ({"preprocessing": {"impute": ["code"]}}, "declare missing = 'middle'"),
        ({"preprocessing": {"pool": {"age": 30}}}, "'age' is no category"),
        ({"preprocessing": {"pool": {"ward": -1}}}, "preprocessing.pool.ward: must be > 0"),
        ({"preprocessing": {"bounds": ["age", "age"]}}, "named twice"),
        ({"preprocessing": {"bounds": [], "impute": [], "pool": None}}, "no release is requested"),
        ({"preprocessing": {"scale": ["age"]}}, "no such key"),
        ({"privacy": {"epsilon": 0.1}}, "larger privacy.epsilon"),
        (
            {"method": {"noise_multiplier": 5.0}, "privacy": {"epsilon": None}},
            "preprocessing: spends a share",
        ),
        ({"budget": {"preprocessing": 0.95}}, "nothing for training"),
        ({"data": {"table": None, "name": "digits", "n_users": 10, "n_silos": 3}}, "your own tables"),
        ({"preprocessing": {"silos": "records"}}, "counts people"),
        ({"preprocessing": {"clip": 0.8}}, "preprocessing.clip: must be 'quantile'"),
        ({"preprocessing": CLIP, "method": {"clip": {"start": 1.0}}}, "follows a quantile of them by itself"),
        (
            {"preprocessing": CLIP, "method": {"name": "uldp-naive"}},
            "contributions of uldp-naive are those of a silo",
        ),
    ],
)
def test_what_cannot_be_refined_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    tables(tmp_path)
    with pytest.raises(FedveilError) as caught:
        prepared_in(tmp_path, **changes)
    assert words in str(caught.value)


def test_a_column_that_is_named_as_the_silos_is_refused_before_anything_is_charged(tmp_path: Path) -> None:
    tables(tmp_path)
    for path in (tmp_path / "schema.toml", *(tmp_path / f"{name}.csv" for name in FILES)):
        path.write_text(path.read_text().replace("ward", "silo"))
    asked = {"bounds": ["age"], "impute": None, "pool": {"silo": 200.0, "ward": None}}
    with pytest.raises(FedveilError, match="column 'silo': statistics and preprocessing call the silos so"):
        prepared_in(tmp_path, preprocessing=asked)


def test_a_schema_that_another_run_refined_is_not_taken_for_the_one_before(
    world: tuple[Path, Prepared, Outcome], tmp_path: Path
) -> None:
    folder, _, outcome = world
    section = {"bounds": ["code"], "impute": None, "pool": None}
    named = {"table": {"schema_file": str(outcome.folder / SCHEMA)}}
    second = prepared_in(folder, data=named, preprocessing=section)
    with pytest.raises(
        ConfigError, match=r"schema\.toml was refined by another run; remove \[preprocessing\]"
    ):
        run(second, tmp_path, Silent())
    assert not (tmp_path / "hospitals" / "ledger.jsonl").exists()

    own = tmp_path / "own.toml"
    own.write_text((outcome.folder / SCHEMA).read_text())
    again = prepared_in(folder, data={"table": {"schema_file": str(own)}}, preprocessing=section)
    assert again.preprocessing is not None
    assert again.preprocessing.request.schema_ == read_schema(outcome.folder / SCHEMA)


def test_a_damaged_release_is_noticed(world: tuple[Path, Prepared, Outcome], tmp_path: Path) -> None:
    _, _, outcome = world
    document = json.loads((outcome.folder / PREPROCESSED).read_text())
    for broken in (
        {"schema_version": 9},
        {"releases": []},
        {"releases": [{"noise_std": 1.0, "vector": [1.0]}]},
        {"releases": [document["releases"][0] | {"noise_std": 0}]},
        {"releases": document["releases"] * 2},
        {"request": {"silos": "equal"}},
    ):
        (tmp_path / PREPROCESSED).write_text(json.dumps(document | broken))
        with pytest.raises(RunFolderError, match=r"preprocessing\.json"):
            read_preprocessed(tmp_path)


def test_a_budget_that_the_releases_beside_the_rounds_would_break_is_refused(tmp_path: Path) -> None:
    """They are charged whatever training does, so a run that could play no round would spend them for nothing."""
    tables(tmp_path)
    with pytest.raises(
        ConfigError, match=r"privacy\.budget = 0\.01: one round and the releases beside it \(prep/1"
    ):
        prepared_in(tmp_path, privacy={"budget": 0.01})


def test_no_repeat_takes_the_room_of_what_is_still_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is due is the evaluation too: a repeat before it is charged where everything fits, or never."""
    tables(tmp_path)
    asked: dict[str, Any] = {"evaluation": {}, "data": {"table": {"test_share": 0.5}}}
    plain = prepared_in(tmp_path, **asked)
    repeat = plain.releases_before_training[:1]
    budget = plain.epsilon_with(Role.READER, 1, (*plain.side_releases, *repeat)) * 0.999
    assert (
        plain.epsilon_with(Role.READER, 1, (*plain.releases_before_training, *repeat)) < budget
    )  # were there no evaluation

    def killed(*_: object) -> None:
        raise MemoryError("killed")

    prepared = prepared_in(tmp_path, **asked, privacy={"budget": budget})
    monkeypatch.setattr("fedveil.run.simulation.noisy_sum", killed)
    with pytest.raises(MemoryError):
        run(prepared, tmp_path / "runs", Silent())
    with pytest.raises(BudgetError, match="due after it and one more round would bring epsilon to"):
        resume(tmp_path / "runs" / "hospitals", Silent())
    charged = read_entries(tmp_path / "runs" / "hospitals" / "ledger.jsonl")
    assert [entry.run for entry in charged] == ["hospitals/prep/1"]


LOST = ("preprocessing.json", "schema.toml", "checkpoint/state.safetensors")


@pytest.mark.parametrize(("evaluates", "seed"), [(False, None), (True, None), (True, 5)])
def test_a_lost_release_is_charged_again_only_where_all_that_was_charged_leaves_room(
    tmp_path: Path, evaluates: bool, seed: int | None
) -> None:
    """Two rounds are charged: the reserve is them, another one, and every release that is not on disk."""
    tables(tmp_path)
    asked: dict[str, Any] = {"evaluation": {}, "data": {"table": {"test_share": 0.5}}} if evaluates else {}
    asked["rounds"] = 4
    plain = prepared_in(tmp_path, **asked)
    spent = plain.epsilon_with(Role.READER, 2, plain.side_releases)
    again = (*plain.side_releases, *plain.releases_before_training)
    needed = plain.epsilon_with(Role.READER, 3, again)
    budget = (needed + max(spent, plain.epsilon_with(Role.READER, 1, again))) / 2
    assert spent < budget < needed
    prepared = prepared_in(tmp_path, **asked, privacy={"budget": budget, "insecure_seed": seed})
    with pytest.raises(KeyboardInterrupt):
        run(prepared, tmp_path / "runs", Silent(interrupt_after=2))
    folder = tmp_path / "runs" / "hospitals"
    before = read_entries(folder / "ledger.jsonl")
    assert [entry.run for entry in before] == ["hospitals/prep/1", "hospitals", "hospitals"]
    for name in LOST:
        (folder / name).unlink()
    if seed is None:
        with pytest.raises(
            BudgetError, match="prep/1, what is due after it and one more round would bring epsilon"
        ):
            resume(folder, Silent())
        assert read_entries(folder / "ledger.jsonl") == before
    else:  # the same release and the same rounds: no charge is made twice
        resume(folder, Silent())
        made = [(entry.run, entry.round, entry.attempt) for entry in read_entries(folder / "ledger.jsonl")]
        assert len(set(made)) == len(made)
        assert {attempt for *_, attempt in made} == {0}


def test_a_round_leaves_room_for_an_evaluation_that_is_charged_and_not_made(tmp_path: Path) -> None:
    """Killed between charge and file, the evaluation is charged again: a round that takes its room is not played."""
    tables(tmp_path)
    asked: dict[str, Any] = {"evaluation": {}, "rounds": 4, "data": {"table": {"test_share": 0.5}}}
    plain = prepared_in(tmp_path, **asked)
    budget = (
        plain.epsilon_with(Role.READER, 3, (*plain.side_releases, *plain.releases_after_training)) * 0.999
    )
    assert (
        plain.epsilon_with(Role.READER, 3, plain.side_releases) < budget
    )  # were the evaluation not charged again
    prepared = prepared_in(tmp_path, **asked, privacy={"budget": budget})
    with pytest.raises(KeyboardInterrupt):
        run(prepared, tmp_path / "runs", Silent(interrupt_after=2))
    folder = tmp_path / "runs" / "hospitals"
    with Ledger(folder / "ledger.jsonl", unit="user") as ledger:
        for one in plain.releases_after_training:
            ledger.charge(run=one.of_run("hospitals"), round=0, attempt=0, event=one.event)
    outcome = resume(folder, Silent())
    assert outcome.rounds == 2
    assert outcome.stopped is not None
    assert "round 3 would bring epsilon" in outcome.stopped
    assert outcome.evaluated is not None
    assert outcome.statement.epsilon is not None
    assert outcome.statement.epsilon <= budget


def test_what_training_has_begun_on_is_not_released_again_though_the_budget_has_room(tmp_path: Path) -> None:
    """Fresh noise gives another schema: the folder's records would not be these, which was seen after the charge."""
    tables(tmp_path)
    prepared = prepared_in(tmp_path, rounds=4)
    with pytest.raises(KeyboardInterrupt):
        run(prepared, tmp_path / "runs", Silent(interrupt_after=2))
    folder = tmp_path / "runs" / "hospitals"
    before = read_entries(folder / "ledger.jsonl")
    for name in LOST:
        (folder / name).unlink()
    with pytest.raises(RunFolderError, match=r"preprocessing\.json is lost, .* Nothing was charged"):
        resume(folder, Silent())
    assert read_entries(folder / "ledger.jsonl") == before
