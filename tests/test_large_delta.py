"""A delta of 1 / n_users or more protects no single user: refused unless allowed by name, and never shown as good."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedveil.bundle.card import _privacy
from fedveil.console import delta_text
from fedveil.errors import ConfigError
from fedveil.privacy.statement import Statement
from fedveil.report.compare import compare
from fedveil.report.document import statement_claim
from fedveil.run.config.experiment import parse
from fedveil.run.planning import Plan
from fedveil.run.setup import prepare
from tests.report_folders import statement, write_run
from tests.runs import experiment
from tests.test_python import train
from tests.test_releases import refusal

REFUSED = r"privacy\.delta = 0\.05 is not below 1 / n_users = 1 / 20: .*privacy\.allow_large_delta = true"


def stated(delta: float) -> Statement:
    """A statement about 100 users."""
    return replace(Statement.from_json(statement()), delta=delta)


def test_a_delta_of_one_users_worth_is_refused_before_anything_is_charged() -> None:
    with pytest.raises(ConfigError, match=REFUSED):
        prepare(experiment(privacy={"delta": 1 / 20}))
    assert prepare(experiment(privacy={"delta": 0.0499})).experiment.privacy.allow_large_delta is None
    allowed = prepare(experiment(privacy={"delta": 0.5, "allow_large_delta": True}))
    assert allowed.experiment.privacy.delta == 0.5
    with pytest.raises(ConfigError, match=r"privacy\.delta = 0\.5"):
        prepare(experiment(privacy={"delta": 0.5, "allow_large_delta": False}))


def test_an_experiment_that_does_not_allow_it_has_one_text() -> None:
    """The key is left out unless it is true, so that documents and digests of earlier versions stay what they were."""
    plain, denied = experiment(), experiment(privacy={"allow_large_delta": False})
    assert plain == denied
    assert "allow_large_delta" not in plain.to_toml()
    allowed = experiment(privacy={"allow_large_delta": True})
    document: dict[str, Any] = allowed.model_dump(mode="json", exclude_none=True)
    assert parse(document, "test") == allowed != plain


def test_documents_of_releases_refuse_it_too(tmp_path: Path) -> None:
    assert "allow_large_delta" in refusal(tmp_path, privacy="epsilon = 1.0\ndelta = 0.3")


def test_plans_refuse_it_too() -> None:
    keys: dict[str, Any] = {
        "n_users": 100,
        "n_silos": 5,
        "rounds": 50,
        "noise_multipliers": (5.0,),
        "sampling_rates": (1.0,),
        "delta": 0.01,
        "epsilon": None,
        "group_sizes": (),
        "records_per_silo": 1000,
        "batch_size": 64,
        "epochs": 1,
        "colluding_silos": 0,
        "accountant": "pld",
    }
    with pytest.raises(ConfigError, match=r"1 / n_users = 1 / 100.*--allow-large-delta"):
        Plan(**keys)
    assert Plan(**keys, allow_large_delta=True).delta == 0.01


@pytest.mark.parametrize(("delta", "is_good"), [(1e-5, True), (0.00999, True), (0.01, False), (0.5, False)])
def test_no_page_shows_such_a_statement_as_good(delta: float, is_good: bool, tmp_path: Path) -> None:
    claim = str(statement_claim(stated(delta)))
    assert ('class="claim guaranteed"' in claim) == is_good
    assert ("No protection of any one user: δ is not below 1 / 100" in claim) != is_good
    card = str(_privacy(stated(delta)).body)
    assert ('class="notice warning"' in card) != is_good
    assert ("not below 1 / 100" in delta_text(delta, 100)) != is_good
    folders = [write_run(tmp_path / name, rounds=2) for name in ("one", "two")]
    (folders[0] / "privacy.json").write_text(json.dumps(stated(delta).to_json()))
    page = compare(folders).page()
    assert ("δ is not below one over the number of units" in page) != is_good


def test_python_refuses_it_too_and_a_result_that_is_allowed_says_it(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"privacy\.delta = 0\.5 is not below 1 / n_users.*in Python: settings"
    ):
        train(tmp_path, delta=0.5)
    assert list(tmp_path.iterdir()) == []
    found = train(tmp_path, delta=0.5, settings={"privacy": {"allow_large_delta": True}})
    assert "delta=0.5 not below 1/" in repr(found)
    assert any(sentence.startswith("Warning: delta = 0.5") for sentence in found.statement.sentences())
