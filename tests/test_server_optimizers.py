"""A server's optimiser in a run: asked for by name, costs no privacy, and keeps its state through a kill."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fedveil.errors import CompositionError, ConfigError, ModelError, RunFolderError
from fedveil.methods.derive import derive
from fedveil.methods.method import Method
from fedveil.methods.statistic import ReleaseSum
from fedveil.randomness import ExperimentRandomness, PrivacyRandomness
from fedveil.run.config.experiment import parse
from fedveil.run.folder.run_folder import RunFolder
from fedveil.run.rounds.round_context import RoundContext, next_model
from fedveil.run.setup import prepare
from fedveil.run.training_run import resume, run
from fedveil.training.server.averages import Ema, Last, Tail
from fedveil.training.server.optimizers import FedAdam, FedYogi, Optimizer, ServerSgd
from tests.federation_world import Killed, Moments
from tests.pins.compositions import compositions, public
from tests.runs import Silent, experiment, files, same_model

ADAM = {"name": "fedadam"}
YOGI = {"name": "fedyogi"}
MOMENTUM = {"name": "sgd", "momentum": 0.9}
FALLING = {"name": "sgd", "schedule": "linear"}
EMA, TAIL = {"name": "ema", "beta": 0.8}, {"name": "tail", "share": 0.6}
SERVERS = {
    "fedadam": {"optimizer": ADAM},
    "momentum": {"optimizer": MOMENTUM},
    "linear": {"optimizer": FALLING},
    "cosine, ema": {"optimizer": {**ADAM, "schedule": "cosine"}, "average": EMA},
    "tail": {"optimizer": MOMENTUM, "average": TAIL},
}


def asked(optimizer: dict[str, Any], **changes: Any) -> Any:
    return experiment(server=served(optimizer), **changes)


def served(optimizer: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return the table [server] of an optimizer; the rate of an adaptive one is in the unit of a parameter."""
    rate = 0.05 if optimizer.get("name") in ("fedadam", "fedyogi") else 20 / 3
    return {"learning_rate": rate, "optimizer": optimizer, **more}


@pytest.mark.parametrize("server", SERVERS.values(), ids=SERVERS.keys())
def test_a_run_that_was_killed_ends_with_the_same_bits(
    server: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed once right after a release, and once right before the next: what lives in memory alone is lost."""
    wanted = experiment(server=served(**server))
    whole = run(prepare(wanted), tmp_path / "whole", Silent())
    with pytest.raises(KeyboardInterrupt):
        run(prepare(wanted), tmp_path / "cut", Silent(interrupt_after=2))
    moments = Moments(monkeypatch)
    with pytest.raises(Killed):
        moments.during(4, lambda: resume(tmp_path / "cut" / "try", Silent()))
    moments.release_locks()
    again = resume(tmp_path / "cut" / "try", Silent())
    assert same_model(files(whole.folder)[1], files(again.folder)[1])
    states = [load_file(at / "checkpoint" / "state.safetensors") for at in (whole.folder, again.folder)]
    assert same_model(*states)
    assert len(states[0]) > 1


def test_a_run_without_its_state_would_end_elsewhere(tmp_path: Path) -> None:
    """The test above can fail: a state that begins anew after a kill leads to another model."""
    whole = run(prepare(asked(ADAM)), tmp_path / "whole", Silent())
    with pytest.raises(KeyboardInterrupt):
        run(prepare(asked(ADAM)), tmp_path / "cut", Silent(interrupt_after=2))
    folder, _ = RunFolder.open(tmp_path / "cut" / "try")
    found = folder.read_checkpoint()
    assert found is not None
    folder.write_checkpoint(replace(found, state=FedAdam(learning_rate=1.0).init(found.model)))
    again = resume(tmp_path / "cut" / "try", Silent())
    assert not same_model(files(whole.folder)[1], files(again.folder)[1])


def test_the_plain_step_by_either_key_is_the_same_run(tmp_path: Path) -> None:
    one = run(prepare(experiment(rounds=2)), tmp_path / "method", Silent())
    two = run(prepare(asked({"name": "sgd"}, rounds=2)), tmp_path / "optimizer", Silent())
    assert same_model(files(one.folder)[1], files(two.folder)[1])


def rewritten(folder: Path, version: str, *, drop: str = "none", times: float = 1.0) -> None:
    """Write the checkpoint again under another schema version, without some tensors, its state multiplied."""
    path = folder / "checkpoint" / "state.safetensors"
    with safe_open(path, framework="pt") as stored:
        metadata = stored.metadata() | {"schema_version": version}
    tensors = {name: value for name, value in load_file(path).items() if not name.startswith(drop)}
    save_file(
        {name: value * times if name.startswith("state.") else value for name, value in tensors.items()},
        path,
        metadata,
    )


@pytest.mark.parametrize(
    ("version", "changes", "message"),
    [
        ("2", {"drop": "state."}, r"no state of server\.optimizer \(FedAdam\) and server\.average"),
        ("2", {"drop": "state.square"}, r"no state of server\.optimizer \(FedAdam\) and server\.average"),
        ("2", {"times": float("nan")}, r"no state of server\.optimizer \(FedAdam\) and server\.average"),
        ("1", {}, "schema version 1 is not readable here; this program reads 2"),
    ],
)
def test_a_checkpoint_without_its_state_is_refused(
    version: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    outcome = run(prepare(asked(ADAM, rounds=1)), tmp_path, Silent())
    rewritten(outcome.folder, version, **changes)
    with pytest.raises(RunFolderError, match=message):
        resume(outcome.folder, Silent())


def test_a_state_beyond_all_numbers_releases_nothing() -> None:
    """Squares overflow before models do: the step would be 0, and a resumed run would find a damaged state."""
    prepared = prepare(asked(ADAM))
    turn = RoundContext(
        setting=prepared.setting,
        model=prepared.task.initial(),
        state=prepared.method.server.init(prepared.task.initial()),
        round_number=1,
        experiment=ExperimentRandomness(0),
        privacy=PrivacyRandomness.insecure(1),
    )
    with pytest.raises(ModelError, match=r"lower server\.learning_rate"):
        next_model(turn, np.full(prepared.task.dimension, 1e200), n_silos=3, summed=3)


# --- privacy ------------------------------------------------------------------------------------------------------


def test_no_optimizer_changes_what_any_composition_guarantees() -> None:
    """Post-processing: the same events for readers, server and silos, and one more line that says so."""
    for name, method in compositions():
        if method.server.reads != FedAdam.reads:  # steps of other sums than mean updates
            continue
        plain, stepped = (
            derive(one, public(method))
            for one in (method, replace(method, server=FedAdam(learning_rate=0.1)))
        )
        assert replace(stepped, mechanisms=plain.mechanisms, published=plain.published) == plain, name
        assert set(stepped.mechanisms) - set(plain.mechanisms) == {
            "the server's step uses FedAdam, beta1 0.9, beta2 0.99, tau 0.001: post-processing of the released mean, "
            "at no privacy cost"
        }


def test_no_average_changes_what_any_composition_guarantees() -> None:
    for name, own in compositions():
        method = replace(own, average=Last())
        plain, averaged = (derive(one, public(method)) for one in (method, replace(method, average=Ema())))
        assert replace(averaged, mechanisms=plain.mechanisms, published=plain.published) == plain, name
        assert set(averaged.mechanisms) - set(plain.mechanisms) == {
            "the run releases an exponential average of its models, beta 0.8: post-processing of released models, "
            "at no privacy cost"
        }


def test_what_the_last_rounds_need_is_refused_without_their_number() -> None:
    method: Method = compositions()[0][1]
    with pytest.raises(
        CompositionError, match=r"schedule = 'linear' falls until the last round.*give rounds"
    ):
        replace(method, server=ServerSgd(1.0, schedule="linear"))
    with pytest.raises(CompositionError, match="the number of rounds is not given: give rounds"):
        replace(method, average=Tail())


def test_the_run_releases_its_average_and_keeps_the_last_model_in_the_checkpoint(tmp_path: Path) -> None:
    outcome = run(prepare(experiment(server={"average": EMA})), tmp_path, Silent())
    plain = run(prepare(experiment()), tmp_path / "plain", Silent())
    assert not same_model(files(outcome.folder)[1], files(plain.folder)[1])
    last = [load_file(at.folder / "checkpoint" / "state.safetensors") for at in (outcome, plain)]
    assert same_model({"model": last[0]["model"]}, {"model": last[1]["model"]})
    kept = last[0]["state.average.mean"].float()
    released = torch.cat(
        [value.reshape(-1) for value in load_file(outcome.folder / "model.safetensors").values()]
    )
    assert sorted(kept.tolist()) == sorted(released.tolist())


def test_an_optimizer_is_refused_where_no_model_is_trained() -> None:
    """A statistic is decoded from the released sum; a step from sum to sum would be another figure."""
    method: Method = compositions()[0][1]
    for one, released in ((FedAdam(learning_rate=1.0), "statistics"), (ReleaseSum(), "models")):
        with pytest.raises(CompositionError, match=f"this method releases {released}"):
            replace(method, server=one, released=released)


# --- experiments --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (ADAM, FedAdam(learning_rate=0.05)),
        (YOGI | {"tau": 0.1, "beta1": 0.0}, FedYogi(learning_rate=0.05, tau=0.1, beta1=0.0)),
        (MOMENTUM | {"nesterov": True}, ServerSgd(20 / 3, momentum=0.9, nesterov=True)),
    ],
)
def test_an_optimizer_is_asked_for_by_name_and_reads_back_equal(
    optimizer: dict[str, Any], expected: Optimizer
) -> None:
    read = asked(optimizer)
    assert read.server.optimizer is not None
    assert read.server.optimizer.build({"learning_rate": expected.learning_rate}) == expected
    assert parse(tomllib.loads(read.to_toml()), "again") == read
    assert prepare(read).method.server == expected


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ({"tau": 1.0}, r"server\.optimizer\.name: is required"),
        (
            {"name": "adam"},
            r"server\.optimizer\.name: no server optimizer 'adam'; there are: sgd, fedadam, fedyogi",
        ),
        (ADAM | {"beta2": 1.0}, r"server\.optimizer\.beta2: must be < 1, not 1\.0"),
        (ADAM | {"tau": 0}, r"server\.optimizer\.tau: must be > 0, not 0"),
        (YOGI | {"tau": float("inf")}, r"server\.optimizer\.tau: must be a finite"),
        (
            ADAM | {"momentum": 0.9},
            r"server\.optimizer\.momentum: no such key; known here: beta1, beta2, name, schedule, tau",
        ),
        (
            {"name": "sgd", "nesterov": True},
            r"server\.optimizer: nesterov: looks along",
        ),
    ],
)
def test_a_mistake_is_named_by_its_path(optimizer: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        asked(optimizer)


def test_an_optimizer_and_the_rate_of_the_server_fit_together() -> None:
    with pytest.raises(ConfigError, match=r"server\.learning_rate: the optimizer 'fedadam' needs a number"):
        experiment(server={"learning_rate": None, "optimizer": ADAM})
    with pytest.raises(ConfigError, match=r"server\.learning_rate: 'by-rule' is the rule of a plain step"):
        experiment(server={"learning_rate": "by-rule", "optimizer": ADAM})
    default = experiment(server={"learning_rate": None, "optimizer": {"name": "sgd", "momentum": 0.5}})
    assert prepare(default).method.server == ServerSgd(1.0, momentum=0.5)


def test_the_statement_names_the_optimizer(tmp_path: Path) -> None:
    outcome = run(prepare(asked(YOGI, rounds=1)), tmp_path, Silent())
    statement = json.loads((outcome.folder / "privacy.json").read_text())
    assert any("FedYogi" in line for line in statement["mechanisms"])
