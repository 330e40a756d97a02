"""The recommended settings: what an epsilon alone asks for, from public facts, in Python and in a document."""

from __future__ import annotations

import hashlib
import re
import tomllib
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedveil as fv
from fedveil.api.planning import check_row
from fedveil.data.records import Population
from fedveil.errors import (
    CompositionError,
    ConfigError,
    FedveilError,
    LargeDeltaWarning,
    RunFolderError,
    TooFewPeopleWarning,
)
from fedveil.methods.guarantee import PublicFacts
from fedveil.methods.noise_ratio import noise_to_displacement
from fedveil.methods.uldp import uldp_avg
from fedveil.run.config.experiment import Experiment, parse
from fedveil.run.config.recommended import RECOMMENDED, TableFacts
from fedveil.run.populations import FixedPopulation
from fedveil.run.remarks import noise_ratio_of, people_warnings
from fedveil.run.setup import Prepared, prepare
from fedveil.run.training_run import resume, run
from fedveil.training.losses import LOSSES, ClassWeighted
from fedveil.training.server.denoise import ByRule, NoDenoiser
from fedveil.training.steps import LocalSgd
from tests.federation_world import population, share_of
from tests.runs import Silent, files, same_model

DATA = {"name": "digits", "n_users": 20, "n_silos": 3}


def asked(**changes: Any) -> Experiment:
    return parse({"name": "try", "data": DATA, "privacy": {"epsilon": 2.0}} | changes, "test")


def small(**changes: Any) -> Experiment:
    """Return the recommended settings on a small table, in two rounds."""
    model = {"name": "linear", "loss": "binary_cross_entropy"}
    seeded = {"epsilon": 3.0, "insecure_seed": 3}
    return asked(model=model, rounds=2, privacy=seeded, data={**DATA, "n_users": 6}, **changes)


# --- documents ----------------------------------------------------------------------------------------------------


def test_an_epsilon_alone_asks_for_the_recommended_settings() -> None:
    found = asked()
    assert found.rounds == 30
    assert (found.method.name, found.method.get("power")) == ("uldp-avg-w", "linked")
    assert found.method.get("clip").start == 0.1
    assert found.method.get("noise_multiplier") == "calibrated"
    assert found.local == LocalSgd(learning_rate="by-rule", epochs=30)  # type: ignore[arg-type]
    assert (found.server.learning_rate, found.model.start) == ("by-rule", "zero-output")
    assert found.server.average is not None
    assert found.server.average.document() == {"name": "ema", "beta": 0.8, "skip": 0}
    assert found.protection.name == "secure-aggregation"
    assert parse(tomllib.loads(found.to_toml()), "again") == found


def test_keys_of_a_document_replace_recommended_ones() -> None:
    found = asked(local={"epochs": 3}, server={"learning_rate": 1.0, "average": {"name": "tail"}}, rounds=5)
    assert found.local == LocalSgd(learning_rate="by-rule", epochs=3)  # type: ignore[arg-type]
    assert (found.rounds, found.server.learning_rate) == (5, 1.0)
    assert found.server.average is not None
    assert found.server.average.name == "tail"
    assert asked(protection={"name": "none"}).protection.name == "none"
    assert asked(model={"name": "a.b:c"}).model.start == "seed"


@pytest.mark.parametrize(
    ("data", "masked"),
    [
        ({"name": "digits", "n_users": 20}, True),
        ({"name": "digits", "n_users": 20, "n_silos": 1}, False),
        ({"name": "digits", "n_users": 90, "n_silos": 51}, False),
        ({"name": "digits", "n_users": 90, "allocation": {"law": "clients"}}, False),
        ({"table": {"schema_file": "s.toml", "files": ["a.csv"]}}, False),
        ({"table": {"schema_file": "s.toml", "files": ["a.csv", "b.csv"]}}, True),
    ],
)
def test_silos_are_masked_where_there_are_several_and_not_very_many(
    data: dict[str, Any], masked: bool
) -> None:
    assert (asked(data=data).protection.name == "secure-aggregation") == masked


def test_a_method_has_its_own_defaults_and_nothing_is_refused() -> None:
    method = {"name": "uldp-avg", "clip": 1.0, "noise_multiplier": "calibrated"}
    plain = asked(method=method, local={"learning_rate": 0.1})
    assert (plain.model.start, plain.server.learning_rate, plain.protection.name) == ("seed", None, "none")
    with pytest.raises(ConfigError, match=r"method: give \[privacy\] with epsilon = 2"):
        asked(privacy={})
    with pytest.raises(ConfigError, match=r"method\.name: is required"):
        asked(method={"clip": 1.0})


# --- rules from public facts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "outputs", "features", "rate"),
    [
        ("cross_entropy", 10, 64, 1 / (0.09 * 65)),
        ("cross_entropy", 2, 9, 1 / (0.25 * 10)),
        ("binary_cross_entropy", 1, 13, 1 / (0.25 * 14)),
        ("squared_error", 1, 10, 1 / (2 * 11)),
        ("cox", 1, 39, 1 / (0.5 * 40)),
    ],
)
def test_the_local_rate_is_that_of_its_formula(loss: str, outputs: int, features: int, rate: float) -> None:
    assert RECOMMENDED.local_rate(LOSSES[loss], outputs, features) == pytest.approx(rate)


def test_the_curvature_is_that_of_the_loss_at_a_zero_start() -> None:
    """Second differences of the loss by one output of one record."""
    step = 1e-3
    for loss, outputs, target in (
        ("cross_entropy", 4, torch.tensor([1])),
        ("binary_cross_entropy", 1, torch.tensor([1])),
        ("squared_error", 1, torch.tensor([0.5])),
        ("multi_label_cross_entropy", 3, torch.tensor([[1.0, 0.0, 1.0]])),
    ):

        def at(value: float, name: str = loss, k: int = outputs, y: torch.Tensor = target) -> float:
            z = torch.zeros(1, k, dtype=torch.float64)
            z[0, 0] = value
            return float(
                LOSSES[name].records(z, y.double() if y.is_floating_point() else y, torch.ones(1))[0]
            )

        second = (at(step) - 2 * at(0.0) + at(-step)) / step**2
        assert second == pytest.approx(LOSSES[loss].curvature(outputs), rel=1e-4)


def test_a_loss_of_unknown_curvature_needs_a_number() -> None:
    with pytest.raises(ConfigError, match=r"local\.learning_rate: 'by-rule' needs the curvature .* focal"):
        RECOMMENDED.local_rate(LOSSES["focal"], 2, 3)
    weighted = ClassWeighted(LOSSES["cross_entropy"], (1.0, 4.0), 2)
    assert weighted.curvature(2) == 4 * 0.25


def test_a_rate_by_rule_is_no_rate_of_a_composition() -> None:
    local = LocalSgd(learning_rate="by-rule")  # type: ignore[arg-type]
    with pytest.raises(CompositionError, match="found for an experiment; give a number"):
        uldp_avg(local=local, clip=1.0, noise_multiplier=1.0)
    with pytest.raises(FedveilError, match="a number, or 'by-rule', is needed"):
        LocalSgd(learning_rate="auto")  # type: ignore[arg-type]


def test_tables_are_never_smoothed_by_rule() -> None:
    assert ByRule().resolve(lambda: 5.0, (64,)) == NoDenoiser()


def test_delta_follows_the_number_of_people_unless_it_is_given() -> None:
    held = replace(population(), n_users=200_000)
    experiment = small()
    assert prepare(experiment, FixedPopulation(held)).experiment.privacy.delta == pytest.approx(5e-7)
    given = asked(privacy={"epsilon": 2.0, "delta": 1e-6}, model={"name": "linear"})
    assert prepare(given).experiment.privacy.delta == 1e-6


def test_other_records_get_the_same_settings() -> None:
    """One user less, other labels, other features: method, rates, start and delta stay."""
    held = population()
    train = held.train
    others = replace(
        train.select(np.flatnonzero(train.user != train.user[0])),
    )
    other = replace(others, targets=1 - others.targets, features=others.features * np.float32(0.01))
    one, two = (prepare(small(), FixedPopulation(at)) for at in (held, replace(held, train=other)))
    assert one.experiment == two.experiment
    assert one.method == two.method


# --- too few people -----------------------------------------------------------------------------------------------


def warned(n_users: int, epsilon: float, **privacy: Any) -> tuple[Prepared, tuple[Warning, ...]]:
    data = {"name": "digits", "n_users": n_users, "n_silos": 3}
    found = prepare(asked(data=data, privacy={"epsilon": epsilon, **privacy}, model={"name": "linear"}))
    return found, people_warnings(found)


def test_too_few_people_are_named_with_three_remedies_that_hold() -> None:
    _, (said,) = warned(100, 1.0)
    assert isinstance(said, TooFewPeopleWarning)
    text = str(said)
    assert text.startswith("100 people, 650 parameters, epsilon 1.00: noise is 0.9")
    needed = text.partition("0.25 needs ")[2]
    people, epsilon, parameters = (part.split() for part in needed.rstrip(".").split(", or "))
    assert warned(int(people[0]), 1.0)[1] == ()
    assert warned(100, 1.05 * float(epsilon[1]))[1] == ()
    found, _ = warned(100, 1.0)
    facts = PublicFacts(n_silos=3, n_users=100, dimension=int(parameters[3]))
    assert noise_to_displacement(found.method, facts, 30) <= 0.25
    assert "mostly noise" not in text
    assert str(warned(50, 1.0)[1][0]).endswith(
        "The model will be mostly noise; no clip and no rate changes that."
    )


def test_rho_is_told_before_training_and_equals_its_closed_form() -> None:
    found, _ = warned(100, 1.0)
    row = check_row(found)
    facts = PublicFacts(n_silos=3, n_users=100, dimension=650)
    assert row["rho"] == noise_to_displacement(found.method, facts, 30) == pytest.approx(0.98, abs=0.01)
    assert noise_ratio_of(warned(400, 1.0)[0]) == pytest.approx(row["rho"] / 4)


def test_a_delta_that_allows_to_publish_records_is_named_and_a_larger_one_refused() -> None:
    _, found = warned(1000, 8.0, delta=2e-4)
    assert [type(one) for one in found] == [LargeDeltaWarning]
    assert "0.2 of 1000 people in expectation" in str(found[0])
    with pytest.raises(ConfigError, match=r"delta = 0\.001 is not below 1 / n_users"):
        warned(1000, 8.0, delta=1e-3)


# --- Python -------------------------------------------------------------------------------------------------------


def people(n_users: int = 40) -> Population:
    random = np.random.default_rng(0)
    x = random.uniform(-1, 1, (300, 3))
    return fv.population(
        x,
        np.where(x[:, 0] > 0, "ill", "well"),
        user=random.integers(0, n_users, 300),
        silo=random.integers(0, 2, 300),
        n_users=n_users,
        silos=[0, 1],
        task="classification",
        classes=["well", "ill"],
    )


def test_training_needs_an_epsilon_and_nothing_else(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = fv.train("linear", people(400), epsilon=3, folder=tmp_path)
    assert result.metrics["auc"] is not None
    assert result.metrics["auc"] > 0.9
    document = tomllib.loads(result.settings)
    assert document["local"]["learning_rate"] == pytest.approx(1 / (0.25 * 4))
    assert document["protection"]["name"] == "secure-aggregation"
    with pytest.warns(TooFewPeopleWarning, match="40 people") as said:
        fv.train("linear", people(), epsilon=0.5, rounds=2, folder=tmp_path)
    assert {one.filename for one in said} == {__file__}  # the caller's line, not one of fedveil


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, r"epsilon: needed; .*fedveil\.train\(model, people, epsilon=2\)"),
        ({"epsilon": 2, "class_weight": "balanced"}, r"class_weight: a weight for each class .*'balanced'"),
        (
            {"epsilon": 2, "class_weight": {"ill": 2.0}},
            "class_weight: one weight for each of well, ill is needed",
        ),
        (
            {"epsilon": 2, "average": object()},
            "average: a name, a table or a registered stage is needed, not object",
        ),
        (
            {"epsilon": 2, "method": fv.uldp_sgd(clip=0.5), "local_epochs": 3},
            "local_epochs: uldp-sgd does not train",
        ),
        (
            {"epsilon": 2, "method": fv.uldp_avg(clip=0.5, epochs=2), "local_epochs": 3},
            "local_epochs: the method has",
        ),
    ],
)
def test_a_wrong_argument_is_named_before_anything_trains(
    given: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        fv.train("linear", people(), folder=tmp_path / "none", **given)
    assert not (tmp_path / "none").exists()


def test_arguments_replace_single_settings(tmp_path: Path) -> None:
    result = fv.train(
        "linear",
        people(400),
        epsilon=3,
        rounds=2,
        local_learning_rate=0.5,
        local_epochs=2,
        server_learning_rate=1.5,
        average={"name": "tail", "share": 0.5},
        denoiser="none",
        protection="none",
        start="zeros",
        class_weight={"well": 1.0, "ill": 3.0},
        folder=tmp_path,
    )
    found = tomllib.loads(result.settings)
    assert found["local"] | {"learning_rate": 0.5, "epochs": 2} == found["local"]
    assert (found["server"]["learning_rate"], found["server"]["average"]["name"]) == (1.5, "tail")
    assert (found["model"]["start"], found["model"]["class_weights"]) == ("zeros", [1.0, 3.0])
    assert (found["protection"]["name"], found["rounds"]) == ("none", 2)


def test_a_network_begins_with_zero_outputs_and_its_own_hidden_layers() -> None:
    begun = prepare(asked(model={"name": "mlp"})).task.model
    layers = [one for one in begun.modules() if isinstance(one, nn.Linear)]
    assert not layers[-1].weight.any()
    assert layers[0].weight.any()


def test_the_settings_of_a_result_make_the_same_model_again(tmp_path: Path) -> None:
    """With one insecure seed: the complete document names everything that the rules chose."""
    folder = tmp_path / "tables"
    folder.mkdir()
    random = np.random.default_rng(1)
    for silo in ("north", "south"):
        rows = [
            f"{random.integers(0, 60)},{random.uniform(0, 1):.3f},{random.integers(0, 2)}" for _ in range(120)
        ]
        (folder / f"{silo}.csv").write_text("\n".join(["patient,a,ill", *rows]) + "\n")
    (folder / "schema.toml").write_text(
        'n_users = 400\nuser = "patient"\n[target]\nkind = "label"\ncolumn = "ill"\nclasses = ["0", "1"]\n'
        '[features.a]\nkind = "number"\nlower = 0\nupper = 1\n'
    )
    held = fv.tables(folder / "schema.toml", [folder / "north.csv", folder / "south.csv"])
    seeded = {"privacy": {"insecure_seed": 7}, "trainer": {"device": "cpu"}}
    first = fv.train("linear", held, epsilon=3, rounds=3, folder=tmp_path / "python", settings=seeded)
    again = run(prepare(parse(tomllib.loads(first.settings), "again")), tmp_path / "toml", Silent())
    assert same_model(files(first.folder)[1], files(again.folder)[1])


# --- a file of main silos -----------------------------------------------------------------------------------------


def test_a_simulation_writes_the_file_of_main_silos_and_states_its_digest(tmp_path: Path) -> None:
    held = population()
    outcome = run(prepare(small(), FixedPopulation(held)), tmp_path, Silent())
    content = (outcome.folder / "main_silos.csv").read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    assert any(f"sha256 {digest[:16]}..." in one for one in outcome.statement.uncovered)
    lines = content.decode().splitlines()
    counted = np.zeros((held.n_users, held.n_silos), dtype=int)
    np.add.at(counted, (held.train.user, held.train.silo), 1)
    assert lines[1:] == [f"{user},{held.silo_names[row.argmax()]}" for user, row in enumerate(counted)]
    other = run(prepare(small(), FixedPopulation(held)), tmp_path, Silent())
    assert (other.folder / "main_silos.csv").read_bytes() != content  # another salt
    assert same_model(files(outcome.folder)[1], files(other.folder)[1])


def test_a_resumed_run_states_the_file_with_which_it_began(tmp_path: Path) -> None:
    experiment = parse(
        {"name": "try", "data": DATA, "rounds": 3, "privacy": {"epsilon": 3.0}, "local": {"epochs": 1}}
        | {"model": {"name": "linear"}},
        "test",
    )
    with pytest.raises(KeyboardInterrupt):
        run(prepare(experiment), tmp_path, Silent(interrupt_after=1))
    path = tmp_path / "try" / "main_silos.csv"
    content = path.read_bytes()
    path.write_bytes(content + b"7,silo 0\n")
    with pytest.raises(RunFolderError, match=r"main_silos\.csv is not of these records"):
        resume(tmp_path / "try", Silent())
    path.unlink()
    with pytest.raises(RunFolderError, match=r"main_silos\.csv is missing"):
        resume(tmp_path / "try", Silent())
    path.write_bytes(content)
    statement = resume(tmp_path / "try", Silent()).statement
    assert any(hashlib.sha256(content).hexdigest()[:16] in one for one in statement.uncovered)


def test_a_digest_of_no_file_is_refused_in_a_simulation_and_linked_between_institutions(
    tmp_path: Path,
) -> None:
    method = {"name": "uldp-avg-w", "clip": 0.5, "noise_multiplier": 2.0, "power": {"main_silos": "0" * 64}}
    model = {"name": "linear", "loss": "binary_cross_entropy"}
    declared = asked(method=method, local={"learning_rate": 0.1}, model=model, privacy={}, rounds=1)
    with pytest.raises(
        ConfigError, match=r"method\.power: a file of main silos is shared between institutions"
    ):
        run(prepare(declared, FixedPopulation(population())), tmp_path, Silent())
    with pytest.raises(ConfigError, match=r"method\.power: 'linked' has a simulation write the file"):
        prepare(small(), FixedPopulation(share_of(population(), 0)))


# --- a table without a model --------------------------------------------------------------------------------------

TABLE = TableFacts(
    task="classification",
    classes=2,
    n_users=5000,
    columns=7,
    features=12,
    scaled=True,
    bounded=False,
    epsilon=2.0,
)


@pytest.mark.parametrize(
    ("changes", "method", "reason"),
    [
        ({}, "boosted-trees", "5,000 users x epsilon 2 = 10,000 reaches 7,500"),
        ({"columns": 10}, "boosted-trees", "reaches 10,000"),
        ({"columns": 11}, "newton", "10,000 is below 11,000"),
        ({"n_users": 3749}, "newton", "7,498 is below 7,500"),
        ({"n_users": 3750}, "boosted-trees", "7,500 reaches 7,500"),
        ({"scaled": False}, "newton", "no schema scales the features"),
        (
            {"classes": 3},
            "newton",
            "10,000 is below 15,000, from which on trees are taken for 7 columns and 3 classes",
        ),
        ({"classes": 3, "n_users": 7500}, "boosted-trees", "15,000 reaches 15,000"),
        ({"classes": 3, "n_users": 7500, "columns": 16}, "newton", "15,000 is below 16,000"),
        ({"n_users": 215}, "newton", "430 is below 7,500"),
        (
            {"n_users": 214},
            None,
            "428 is below 429, from which on Newton steps are taken for 2 classes and 12 features$",
        ),
        ({"n_users": 650, "classes": 3}, "newton", "1,300 is below 15,000"),
        ({"n_users": 649, "classes": 3}, None, "1,298 is below 1,300, .* for 3 classes and 12 features"),
        ({"n_users": 649, "scaled": False}, None, "12 features that no schema scales"),
        ({"n_users": 50, "task": "regression", "classes": None, "bounded": True}, "newton", "linear models"),
        ({"classes": 11}, None, "up to 10 classes"),
        ({"task": "regression", "classes": None}, None, "no declared bounds"),
        (
            {"task": "regression", "classes": None, "bounded": True},
            "newton",
            "linear models predicted numbers",
        ),
        (
            {"task": "survival", "classes": None, "bounded": True},
            "newton",
            "the horizon of the schema",
        ),
    ],
)
def test_public_facts_choose_the_model_of_a_table(
    changes: dict[str, Any], method: str | None, reason: str
) -> None:
    found = RECOMMENDED.table_model(replace(TABLE, **changes))
    assert found.method == method
    newton = "whitened-hazards" if changes.get("task") == "survival" else "whitened-linear"
    assert found.model == {"newton": newton, "boosted-trees": "boosted-trees", None: "linear"}[method]
    assert found.rounds == {"newton": 12, "boosted-trees": 31, None: 30}[method]
    assert re.search(reason, found.reason)


def test_survival_without_a_horizon_is_refused_with_what_would_do() -> None:
    with pytest.raises(ConfigError, match=r"horizon in the schema's target \(horizon = 1825\)"):
        RECOMMENDED.table_model(replace(TABLE, task="survival", classes=None))


def table(folder: Path, n_users: int, seed: int = 0) -> Population:
    """Return 30 records of a population of ``n_users``, read by a schema; the rest of the people have none."""
    folder.mkdir()
    rows = np.random.default_rng(seed).uniform(0, 1, (30, 2)).round(3)
    for silo, held in (("north", rows[:18]), ("south", rows[18:])):
        lines = [f"{silo}{i},{a},{int(b > 0.5)}" for i, (a, b) in enumerate(held)]
        (folder / f"{silo}.csv").write_text("\n".join(["patient,a,ill", *lines]) + "\n")
    (folder / "schema.toml").write_text(
        f'n_users = {n_users}\nuser = "patient"\n[target]\nkind = "label"\ncolumn = "ill"\nclasses = ["0", "1"]\n'
        '[features.a]\nkind = "number"\nlower = 0\nupper = 1\n'
    )
    return fv.tables(folder / "schema.toml", [folder / "north.csv", folder / "south.csv"])


def test_a_table_alone_is_trained_by_the_model_of_its_public_facts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other records and fewer of them, of as many declared users, get the same model and the same settings."""
    chosen = []
    for place, seed in (("one", 0), ("other", 5)):
        held = table(tmp_path / place, 10_000, seed)
        if place == "other":
            held = replace(held, train=held.train.select(np.arange(3)))
        result = fv.train(held, epsilon=2, rounds=2, folder=tmp_path / "runs")
        assert result.statement.epsilon == pytest.approx(2, rel=1e-3)
        document = tomllib.loads(result.settings)
        chosen.append(
            (capsys.readouterr().out, {key: document[key] for key in ("method", "model", "rounds")})
        )
        assert document["protection"]["name"] == "secure-aggregation"
    said, settings = chosen[0]
    assert said == (
        "model boosted-trees, method boosted-trees: 10,000 users x epsilon 2 = 20,000 reaches 7,500, from which on "
        "trees are taken for 1 columns\n"
    )
    assert (settings["method"]["name"], settings["method"]["power"]) == ("boosted-trees", "linked")
    assert chosen[1] == chosen[0]


def test_arrays_alone_take_newton_steps_and_survival_names_what_it_needs(tmp_path: Path) -> None:
    found = fv.train(people(400), epsilon=3, rounds=3, protection="none", folder=tmp_path)
    document = tomllib.loads(found.settings)
    assert (document["method"]["name"], document["protection"]["name"]) == ("newton", "none")
    held = people(400)
    alive = np.stack([held.train.targets, 1.0 + held.train.user], axis=1).astype(np.float32)
    tested = np.array([[1, 2], [0, 3]], dtype=np.float32)
    lives = replace(
        held,
        task="survival",
        n_classes=None,
        classes=(),
        train=replace(held.train, targets=alive),
        test_features=held.test_features[:2],
        test_targets=tested,
        test_rows=None,
    )
    with pytest.raises(ConfigError, match="target: survival needs the public time"):
        fv.train(lives, epsilon=3, rounds=1, folder=tmp_path)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "epsilon: needed"),
        ({"epsilon": 2, "method": fv.newton()}, "model: needed where method is given"),
        ({"epsilon": 2, "start": "zeros"}, "model: needed where start is given"),
    ],
)
def test_what_belongs_to_a_model_is_refused_without_one(
    given: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        fv.train(people(), folder=tmp_path / "none", **given)
    assert not (tmp_path / "none").exists()


def test_records_that_are_no_table_need_a_model() -> None:
    held = people()
    images = replace(
        held,
        train=replace(held.train, features=held.train.features.reshape(-1, 1, 3)),
        test_features=held.test_features.reshape(-1, 1, 3),
    )
    with pytest.raises(ConfigError, match=r"model: needed for records of shape \(1, 3\)"):
        fv.train(images, epsilon=2)
    with pytest.raises(ConfigError, match=r"people: a population is needed"):
        fv.train("linear", epsilon=2)
