"""A method composed in Python runs as one that has a name does, and goes on with the same composition alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import fedveil as fv
from fedveil.errors import ConfigError, FedveilError, RunFolderError
from fedveil.methods.contributions import SiloUserContribution
from fedveil.methods.gaussian_shares import GaussianShares
from fedveil.methods.method import Method
from fedveil.methods.secure_aggregation import SecureAggregation
from fedveil.methods.weights import Weights
from fedveil.privacy.bounds import Clip
from fedveil.privacy.claims import Role
from fedveil.privacy.sampling import Everyone, PoissonUsers
from fedveil.training.server.denoise import Laplacian
from fedveil.training.server.optimizers import ServerSgd
from fedveil.training.steps import LocalSgd
from tests.commands import ended
from tests.test_python import network, people, train

METHOD = Method(
    name="my-avg",
    contribution=SiloUserContribution(),
    sampler=Everyone(),
    local=LocalSgd(learning_rate=0.5, epochs=2, batch_size=4),
    bound=Clip(norm=0.5),
    weights=Weights.UNIFORM,
    channel=GaussianShares(noise_multiplier=1.0, scale=0.5),
    server=ServerSgd(5.0),
)
"""uldp-avg, stage by stage."""


class Once(fv.Callback):
    def on_round_end(self, round: fv.RoundSummary) -> str | None:
        return "enough"


@dataclass(frozen=True, kw_only=True)
class Mine(GaussianShares):
    """Another package's shares."""


@dataclass(frozen=True, kw_only=True)
class Unsayable(GaussianShares):
    rule: Callable[[], float] = float

    def nominal(self) -> float:
        return self.noise_multiplier + self.rule()


def run(folder: Path, method: Any = METHOD, **changes: Any) -> fv.Result:
    return train(folder, method=method, **{"server": None} | changes)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> fv.Result:
    return run(tmp_path_factory.mktemp("runs"))


def test_a_composition_is_stated_as_the_method_that_it_is(trained: fv.Result, tmp_path: Path) -> None:
    named = fv.uldp_avg(clip=0.5, noise_multiplier=1.0, local_learning_rate=0.5, epochs=2, batch_size=4)
    same = train(tmp_path, method=named)
    assert trained.statement.epsilon == same.statement.epsilon
    assert trained.statement.line_for(Role.SERVER) == same.statement.line_for(Role.SERVER)
    assert trained.statement.sentences()[0] == same.statement.sentences()[0]
    text = (trained.folder / "experiment.toml").read_text(encoding="utf-8")
    assert 'name = "session:my-avg"' in text
    assert 'bound = "Clip(norm=0.5)"' in text


def test_an_interrupted_run_goes_on_with_the_same_composition_and_no_other(tmp_path: Path) -> None:
    began = run(tmp_path, callbacks=[Once()])
    assert began.rounds == 1
    other = replace(METHOD, bound=Clip(norm=0.75))
    with pytest.raises(RunFolderError, match=r"another method: its bound was Clip\(norm=0.5\), and now"):
        fv.resume(began.folder, network(), people(), method=other)
    with pytest.raises(ConfigError, match="began with a composed Method"):
        fv.resume(began.folder, network(), people())
    went_on = fv.resume(began.folder, network(), people(), method=replace(METHOD))
    assert went_on.rounds == 2


def test_a_run_that_names_its_method_takes_no_other(tmp_path: Path) -> None:
    began = train(tmp_path, rounds=1)
    with pytest.raises(ConfigError, match="knows that it began with uldp-avg-w"):
        fv.resume(began.folder, network(), people(), method=METHOD)


def test_whoever_has_the_folder_alone_is_told_what_goes_on(trained: fv.Result) -> None:
    for command in ("resume", "audit"):
        assert "Python session" in ended(command, trained.folder).mistake


def test_what_reads_run_folders_reads_this_one(
    trained: fv.Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trained.report(tmp_path / "page.html")
    assert "my-avg" in (tmp_path / "page.html").read_text(encoding="utf-8")
    assert ended("compare", trained.folder).code == 0
    assert ended("spent", trained.folder).code == 0
    assert ended("verify", trained.folder).code == 0
    assert fv.verify(trained.save(tmp_path / "bundle")).holds


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"epsilon": 2.0}, "epsilon: a composed method has its own noise"),
        ({"server": fv.Sgd(1.0)}, "server: a composed method has its own"),
        ({"settings": {"local": {"epochs": 3}}}, "settings: local: a composed method has its own"),
        (
            {"settings": {"privacy": {"colluding_silos": 1}}},
            "privacy.colluding_silos = 1: .* sized by its own channel",
        ),
        (
            {"method": replace(METHOD, channel=Unsayable(noise_multiplier=1.0, scale=0.5))},
            "method.channel.rule: experiment.toml cannot represent type",
        ),
    ],
)
def test_what_cannot_go_together_is_refused_before_the_run(tmp_path: Path, changes: Any, said: str) -> None:
    with pytest.raises(FedveilError, match=said):
        run(tmp_path, **changes)
    assert not list(tmp_path.glob("*/ledger.jsonl"))


def test_stages_of_the_settings_go_with_it_as_with_any_other(tmp_path: Path) -> None:
    settings = {"protection": {"name": "secure-aggregation"}}
    laid_over = run(tmp_path, rounds=1, settings=settings, name="laid")
    own = run(tmp_path, replace(METHOD, protection=SecureAggregation()), rounds=1, name="own")
    assert laid_over.statement.line_for(Role.SERVER) == own.statement.line_for(Role.SERVER)
    smooth = replace(METHOD, denoiser=Laplacian(smoothing=1.0), sampler=PoissonUsers(rate=0.5))
    assert run(tmp_path, smooth, rounds=1, name="smooth").statement.epsilon is not None


def test_a_stage_from_elsewhere_is_taken_at_its_word_and_the_statement_says_so(tmp_path: Path) -> None:
    made = run(tmp_path, replace(METHOD, channel=Mine(noise_multiplier=1.0, scale=0.5)), rounds=1)
    (said,) = [one for one in made.statement.uncovered if "taken on trust" in one]
    assert said.startswith(
        "the channel Mine comes from tests.test_in_memory_objects, and was handed over in Python"
    )
