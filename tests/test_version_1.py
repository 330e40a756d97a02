"""Experiments of schema version 1, whose server's rate was a key of the method, in another unit for pairs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedveil.errors import ConfigError
from fedveil.report.run_data import load_run
from fedveil.run.config.experiment import merge, parse
from fedveil.run.folder.run_folder import RunFolder
from fedveil.run.setup import prepare
from fedveil.run.training_run import resume, run
from fedveil.training.server.optimizers import FedAdam, ServerSgd
from tests.runs import Silent, experiment, files, same_model

OLD: dict[str, Any] = {
    "schema_version": 1,
    "name": "try",
    "rounds": 4,
    "data": {"name": "digits", "n_users": 20, "n_silos": 3},
    "model": {"name": "linear"},
    "local": {"learning_rate": 0.1, "epochs": 2, "batch_size": 8},
    "method": {"name": "uldp-avg-w", "clip": 0.5, "noise_multiplier": 5.0, "learning_rate": 20.0},
    "privacy": {"insecure_seed": 11},
}


def test_an_old_experiment_is_the_same_as_its_conversion() -> None:
    assert prepare(parse(OLD, "old")).experiment == prepare(experiment()).experiment


@pytest.mark.parametrize(
    ("changes", "server"),
    [
        ({"method": {"learning_rate": None}}, ServerSgd(1 / 3)),
        ({"method": {"name": "uldp-naive"}}, ServerSgd(20.0)),
        (
            {
                "method": {"learning_rate": 1.0},
                "server": {"optimizer": {"name": "sgd", "learning_rate": 6.0, "momentum": 0.5}},
            },
            ServerSgd(2.0, momentum=0.5),
        ),
        (
            {
                "method": {"learning_rate": 1.0},
                "server": {"optimizer": {"name": "fedadam", "learning_rate": 0.5, "tau": 0.01}},
            },
            FedAdam(0.5, tau=0.03),
        ),
    ],
)
def test_old_rates_keep_their_meaning(changes: dict[str, Any], server: Any) -> None:
    assert prepare(parse(merge(OLD, changes), "old")).method.server == server


def test_a_run_of_version_1_is_read_and_resumed_to_the_same_bits(tmp_path: Path) -> None:
    whole = run(prepare(experiment()), tmp_path / "whole", Silent())
    old = replace(prepare(experiment()), experiment=parse(OLD, "old"))
    with pytest.raises(KeyboardInterrupt):
        run(old, tmp_path / "cut", Silent(interrupt_after=2))
    folder = tmp_path / "cut" / "try"
    assert RunFolder.open(folder)[1].schema_version == 1
    assert same_model(files(whole.folder)[1], files(resume(folder, Silent()).folder)[1])
    assert load_run(folder).experiment["schema_version"] == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {},
            r"method\.learning_rate: .*in place of 20 write server\.learning_rate = 6\.66667, which is 20 / \|S\|",
        ),
        ({"data": {"n_silos": None}}, r"in place of 20 write server\.learning_rate = 20 / \|S\|"),
        ({"method": {"name": "uldp-naive"}}, r"in place of 20\.0 write server\.learning_rate = 20\.0"),
        (
            {"method": {"learning_rate": "by-rule"}},
            r"in place of 'by-rule' write server\.learning_rate = 'by-rule'",
        ),
        (
            {
                "method": {"learning_rate": None},
                "server": {"optimizer": {"name": "fedyogi", "learning_rate": 0.1}},
            },
            r"server\.optimizer\.learning_rate: .*write server\.learning_rate = 0\.1; tau is in mean updates",
        ),
    ],
)
def test_an_old_key_in_a_new_document_is_refused_with_the_converted_value(
    changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        parse(merge({key: value for key, value in OLD.items() if key != "schema_version"}, changes), "new")


def test_a_method_of_another_package_is_not_guessed(tmp_path: Path) -> None:
    old = merge(OLD, {"method": None}) | {
        "method": {"name": "session:mine", "stages": {"server": "ServerSgd(learning_rate=20.0)"}}
    }
    with pytest.raises(
        ConfigError, match=r"schema_version: an experiment of version 1 with the method 'session:mine'"
    ):
        prepare(parse(old, "old"))
