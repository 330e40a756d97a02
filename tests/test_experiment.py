"""Experiments and studies: what is accepted comes back equal, what is wrong is named by its key's path."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from fedveil.config_keys import REQUIRED
from fedveil.data.catalogue import catalogue
from fedveil.errors import ConfigError
from fedveil.registry import find, names
from fedveil.run.config.choice import own_keys, section_of
from fedveil.run.config.experiment import merge, parse, parse_assignment
from fedveil.run.config.study import Selection, load_study, preset_text, presets
from fedveil.run.populations import PopulationCache
from fedveil.run.setup import prepare
from fedveil.training.steps import LocalSgd


def document(**changes: Any) -> dict[str, Any]:
    base = {
        "name": "try",
        "rounds": 3,
        "data": {"name": "digits", "n_users": 20},
        "local": {"learning_rate": 0.1},
        "method": {"name": "uldp-avg-w", "clip": 0.5, "noise_multiplier": 5.0},
    }
    return merge(base, changes)


def test_the_written_document_reads_back_equal() -> None:
    experiment = parse(document(), "test")
    assert parse(tomllib.loads(experiment.to_toml()), "again") == experiment


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rouns": 3}, r"rouns: no such key; known here: .*rounds"),
        ({"method": {"clipp": 1}}, r"method\.clipp: no such key; known here: .*clip"),
        (
            {"method": {"clipp": 1, "nois": 2, "foo": 3}},
            r"method\.clipp: no such key; known here: clip, [a-z_, ]+; did you mean 'clip'\?; "
            r"method\.nois: no such key; did you mean 'noise_multiplier'\?; method\.foo: no such key$",
        ),
        (
            {"model": {"name": "linaer"}},
            r"test\.toml: model\.name: no model named 'linaer'; .* mean 'linear'",
        ),
        ({"model": {"loss": "mse"}}, r"model\.loss: no loss named 'mse'; use one of cross_entropy"),
        ({"model": {"metrics": ["auc", "f9"]}}, r"model\.metrics: no metric named 'f9'; use one of accuracy"),
        ({"rounds": 0}, r"rounds: must be >= 1, not 0"),
        ({"rounds": "20"}, r"test\.toml: rounds: must be a whole number, not '20'$"),
        (
            {"method": {"clip": "0.5"}, "privacy": {"delta": "1e-5"}, "trainer": {"compile": "true"}},
            r"trainer\.compile: must be true or false, not 'true'; method\.clip: must be a number, not '0\.5'; "
            r"privacy\.delta: must be a number, not '1e-5'$",
        ),
        ({"rounds": 10**17}, r"rounds: must be <= 1e\+09, not 1"),
        ({"data": {"n_users": 10**10}}, r"data\.n_users: must be <= 1e\+08, not 1"),
        (
            {"method": {"name": "uldp-group", "group_size": 10**9}},
            r"method\.group_size: must be <= 1e\+06, not 1",
        ),
        ({"data": {"n_silos": 2**63}}, r"data\.n_silos: must be <= 1e\+06, not 9"),
        ({"local": {"epochs": 0}}, r"local\.epochs: must be >= 1, not 0"),
        ({"local": {"projection": 1.0}}, r"local\.projection: no such key; known here: .*weight_decay"),
        ({"local": {"epochs": 2, "steps": 1}}, r"local: .*epochs must be 1, not 2"),
        ({"rounds": "many"}, "rounds: must be a whole number, not 'many'"),
        ({"method": {"clip": 0}}, r"method\.clip: must be > 0, not 0"),
        ({"method": {"clip": -1.0}}, r"method\.clip"),
        (
            {"method": {"clip": "adaptive"}},
            r"method\.clip: must be a number, or a table with .*start.*'adaptive'",
        ),
        ({"method": {"clip": {"begin": 1}}}, r"method\.clip\.begin: no such key; known here: .*start"),
        ({"method": {"clip": float("nan")}}, r"method\.clip"),
        ({"method": {"user_sampling_rate": 0}}, r"method\.user_sampling_rate: must be > 0, not 0"),
        ({"method": {"user_sampling_rate": 1.5}}, r"method\.user_sampling_rate: must be <= 1, not 1\.5"),
        ({"method": {"name": "uldp"}}, r"method\.name: no method 'uldp'; there are: fedavg.* \(of fedveil\)"),
        (
            {"method": {"group_size": 2}},
            r"method\.group_size: no such key; known here: clip, correlated, name, ",
        ),
        ({"data": {"n_users": 0}}, r"data\.n_users"),
        ({"data": {"table": {"schema_file": "s.toml", "files": ["a.csv"]}}}, r"data: give either name"),
        ({"privacy": {"delta": 0}}, r"privacy\.delta"),
        ({"privacy": {"epsilon": 1.0}}, r"privacy\.epsilon: needs method\.noise_multiplier"),
        ({"method": {"noise_multiplier": "calibrated"}}, r"privacy\.epsilon: needed"),
        ({"privacy": {"accountant": "magic"}}, r"privacy\.accountant: .*'pld'"),
        ({"name": "../../etc"}, r"name: "),
    ],
)
def test_a_mistake_is_named_by_its_path(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(document(**changes), "test.toml")


def test_a_missing_parameter_of_the_method_is_named() -> None:
    wrong = document()
    del wrong["method"]["clip"]
    with pytest.raises(ConfigError, match=r"method\.clip: is required"):
        parse(wrong, "test.toml")


def test_the_table_local_is_the_stage() -> None:
    local = parse(document(local={"epochs": 2, "batch_size": 4}), "test").local
    assert local == LocalSgd(learning_rate=0.1, epochs=2, batch_size=4)


def test_local_training_is_asked_for_where_it_happens() -> None:
    without = document()
    del without["local"]
    with pytest.raises(ConfigError, match=r"local: uldp-avg-w trains locally"):
        parse(without, "test.toml")
    (said,) = parse(document(method={"name": "uldp-sgd"}), "test.toml").unused_tables()
    assert said.startswith("[local]: uldp-sgd sends one gradient per contribution")
    assert parse(document(), "test.toml").unused_tables() == ()


def test_a_gradient_method_trains_the_same_with_and_without_the_table_local() -> None:
    with_table = parse(document(method={"name": "uldp-sgd"}), "test.toml")
    assert prepare(with_table).method == prepare(with_table.model_copy(update={"local": None})).method


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("method.clip=0.5", {"method": {"clip": 0.5}}),
        ("rounds=3", {"rounds": 3}),
        ("method.name=fedavg", {"method": {"name": "fedavg"}}),
        ('model.metrics=["loss"]', {"model": {"metrics": ["loss"]}}),
        ("method.clip=", {"method": {"clip": None}}),
        ("local=", {"local": None}),
    ],
)
def test_assignments_are_toml_values_or_bare_words(text: str, expected: dict[str, Any]) -> None:
    assert parse_assignment(text) == expected


@pytest.mark.parametrize("text", ["evaluation.by=[ward]", "rounds=[1", "method.clip={start=}"])
def test_a_list_or_table_whose_quotation_marks_a_shell_took_says_so(text: str) -> None:
    with pytest.raises(ConfigError, match=r"is no TOML value; a shell takes quotation marks away"):
        parse_assignment(text)


@pytest.mark.parametrize("text", ["rounds", "=3", ""])
def test_an_assignment_without_key_or_value_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected KEY=VALUE"):
        parse_assignment(text)


@pytest.mark.parametrize("name", presets())
def test_every_preset_is_valid_at_both_scales(name: str) -> None:
    full, quick = load_study(name), load_study(name, Selection(quick=True))
    names = [experiment.name for experiment in full.experiments]
    assert len(set(names)) == len(names)
    assert 0 < len(quick.experiments) <= len(full.experiments)
    assert max(e.rounds for e in quick.experiments) < max(e.rounds for e in full.experiments)
    assert full.title in preset_text(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", presets())
def test_every_preset_prepares_at_the_quick_scale(name: str, data_folder: Path) -> None:
    overrides = ({"data": {"folder": str(data_folder)}},)
    experiments = load_study(name, Selection(quick=True, overrides=overrides)).experiments
    present = {entry.name for entry in catalogue(data_folder) if entry.present}
    wanted = {experiment.data.name for experiment in experiments}
    if not wanted <= present:
        pytest.skip(f"files of {', '.join(map(str, wanted - present))} are not there")
    populations = PopulationCache()
    for experiment in experiments:
        prepared = prepare(experiment, populations)
        assert len(prepared.population.train) > 0
        budget = experiment.privacy.budget
        assert budget is None or prepared.epsilon_after(experiment.rounds) <= budget


def test_presets_cover_figures_4_to_9() -> None:
    figures = {int(match[1]) for name in presets() if (match := re.match(r"figure-(\d)", name))}
    assert figures >= {4, 5, 6, 7, 8, 9}


def test_published_settings_of_a_scenario_reach_the_variant() -> None:
    study = load_study("figure-5-mnist", Selection(scenarios=("users10000-zipf",), variants=("uldp-avg-w",)))
    (experiment,) = study.experiments
    assert experiment.server.learning_rate == 20.0
    assert experiment.data.n_users == 10000


def test_seeds_are_consecutive_and_in_the_name() -> None:
    study = load_study("digits", Selection(variants=("fedavg",), seeds=3))
    assert [(e.name, e.seed) for e in study.experiments] == [(f"fedavg-seed{s}", s) for s in range(3)]


def test_overrides_come_last() -> None:
    study = load_study("digits", Selection(quick=True, overrides=(parse_assignment("rounds=2"),)))
    assert {experiment.rounds for experiment in study.experiments} == {2}


def test_unknown_names_are_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"neither a preset nor a \.toml file; presets: .*digits"):
        load_study("figure-99")
    with pytest.raises(ConfigError, match="no variant 'x'; there are: fedavg"):
        load_study("digits", Selection(variants=("x",)))
    with pytest.raises(ConfigError, match="no such file"):
        load_study(str(tmp_path / "missing.toml"))


def test_a_file_that_is_no_toml_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "broken.toml"
    path.write_text("rounds = = 3\n")
    with pytest.raises(ConfigError, match=r"broken\.toml: not a TOML document: .*line 1"):
        load_study(str(path))


def test_paths_of_tables_are_relative_to_the_document(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'name = "mine"\nrounds = 1\n[data.table]\nschema_file = "schema.toml"\nfiles = ["a.csv"]\n'
        '[local]\nlearning_rate = 0.1\n[method]\nname = "fedavg"\n'
    )
    (experiment,) = load_study(str(path)).experiments
    assert experiment.data.table is not None
    assert experiment.data.table.files == (tmp_path / "a.csv",)


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ("experiment = 3", "experiment: must be a table, not 3"),
        ("variants = ['a']\n[experiment]\nrounds = 1", "variants: must be a table, not a list"),
        ("[experiment]\nrounds = 1\n[variants]\na = 3", "variants.a: must be a table, not 3"),
        (
            "[experiment]\nrounds = 1\n[scenarios.a]\nvariants = 3",
            "scenarios.a.variants: must be a table, not 3",
        ),
        ("[experiment]\nrounds = 1\n[quick]\nvariants = [3]", "quick.variants.0: must be text, not 3"),
        (
            "[experiment]\nrounds = 1\n[quick]\nrounds = 1",
            "quick.rounds: no such key; known here: experiment",
        ),
        ("[experiment]\nrounds = 1\n[variant.a]", "did you mean 'variants'"),
    ],
)
def test_a_study_of_another_shape_is_refused_by_its_path(tables: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text(tables)
    with pytest.raises(ConfigError, match=rf"study.toml: .*{re.escape(said)}"):
        load_study(str(tmp_path / "study.toml"))


def test_a_name_laid_over_named_variants_is_refused_and_over_one_experiment_is_taken(tmp_path):
    with pytest.raises(
        ConfigError, match="name: every experiment here has the name of its scenario and variant"
    ):
        load_study("digits", Selection(overrides=(parse_assignment("name=mine"),)))
    single = tmp_path / "one.toml"
    single.write_text(
        'rounds = 1\ndata = { name = "digits", n_users = 10 }\n'
        'method = { name = "fedavg" }\nlocal = { learning_rate = 0.1 }\n'
    )
    (experiment,) = load_study(str(single), Selection(overrides=(parse_assignment("name=mine"),))).experiments
    assert experiment.name == "mine"


def test_all_that_a_method_lacks_is_named_at_once_with_examples() -> None:
    base = {"name": "t", "data": {"name": "digits", "n_users": 20, "n_silos": 2}}
    with pytest.raises(ConfigError) as missing:
        parse(base | {"method": {"name": "uldp-group"}}, "t")
    said = str(missing.value)
    assert "method.clip: is required, for instance clip = 1.0" in said
    assert "method.noise_multiplier: is required, for instance noise_multiplier = 'calibrated'" in said
    assert "method.group_size: is required, for instance group_size = 'median'" in said
    assert (
        "method: uldp-group trains locally; give [local] with a learning_rate, for instance 'by-rule'" in said
    )
    with pytest.raises(ConfigError) as missing:
        parse(base | {"method": {"name": "uldp-avg", "clip": 1, "noise_multiplier": "calibrated"}}, "t")
    assert "local: uldp-avg trains locally" in str(missing.value)
    assert "privacy.epsilon: needed" in str(missing.value)


@pytest.mark.parametrize("method", names("methods"))
def test_the_examples_of_missing_keys_are_accepted(method: str) -> None:
    section = section_of("methods", method)
    required = [key for key in own_keys(find("methods", method).load()) if key.default is REQUIRED]
    read = section.model_validate(
        tomllib.loads("\n".join(key.example.partition(" for ")[0] for key in required))
    )
    assert all(getattr(read, key.name) is not None for key in required)
