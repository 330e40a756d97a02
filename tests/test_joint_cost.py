"""What several runs cost together: composition of their ledgers, the grids of their noise, and refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedveil.data.catalogue import Allocation, load
from fedveil.errors import FedveilError
from fedveil.privacy.accountant import gaussian_epsilon
from fedveil.privacy.events import (
    Adjacency,
    ComposedEvent,
    Event,
    GaussianEvent,
    GridEvent,
    PoissonSampledEvent,
)
from fedveil.privacy.joint_cost import joint_cost
from fedveil.privacy.ledger import Ledger
from fedveil.privacy.statement import Statement
from fedveil.run.sweep import ROWS, Point, joint_cost_of_points
from tests.commands import output
from tests.runs import experiment

PLAIN = Statement(
    unit="user",
    adjacency=Adjacency.ADD_OR_REMOVE_ONE,
    epsilon=1.0,
    delta=1e-5,
    accountant="pld",
    epsilons=(),
    event=GaussianEvent(noise_multiplier=1.0),
    units=100,
    mechanisms=(),
    trust=(),
    randomness="drawn",
    secure_randomness=True,
    uncovered=(),
)


def run(folder: Path, *events: Event, charged: int | None = None, **other: object) -> Path:
    """Write the ledger of a run on tables, and its statement."""
    folder.mkdir()
    (folder / "experiment.toml").write_text('[data.table]\nschema_file = "schema.toml"\n')
    with Ledger(folder / "ledger.jsonl", unit="user") as ledger:
        for number, event in enumerate(events[:charged], start=1):
            ledger.charge(run=folder.name, round=number, attempt=0, event=event)
    multiplier = (
        sum(event.noise_multiplier**-2 for event in events if isinstance(event, GaussianEvent)) ** -0.5
    )
    statement = replace(
        PLAIN, event=ComposedEvent(events=events), epsilon=gaussian_epsilon(1 / multiplier, 1e-5)
    )
    (folder / "privacy.json").write_text(json.dumps(replace(statement, **other).to_json()))
    return folder


def test_charges_of_all_ledgers_compose(tmp_path: Path) -> None:
    """Gaussian releases add up by their squares: less than the sum of the epsilons, and to the last digit."""
    one = run(tmp_path / "one", GaussianEvent(noise_multiplier=4.0), GaussianEvent(noise_multiplier=3.0))
    two = run(tmp_path / "two", GaussianEvent(noise_multiplier=5.0))
    found = joint_cost([one, two, one])
    assert [charges for _, charges, _ in found.runs] == [2, 1]
    assert found.epsilon is not None
    exact = gaussian_epsilon((1 / 16 + 1 / 9 + 1 / 25) ** 0.5, 1e-5)
    assert found.epsilon == pytest.approx(exact, rel=1e-6)
    assert found.epsilon >= exact
    assert found.epsilon < sum(epsilon or 0 for *_, epsilon in found.runs)


def test_the_grids_of_all_runs_are_paid(tmp_path: Path) -> None:
    events = GaussianEvent(noise_multiplier=4.0), GridEvent(loss=0.01)
    found = joint_cost([run(tmp_path / name, *events) for name in "ab"])
    assert found.epsilon is not None
    assert found.epsilon >= gaussian_epsilon((2 / 16) ** 0.5, 1e-5 * 2.718281828**-0.02) + 0.02 - 1e-9


def test_one_run_without_a_guarantee_takes_it_from_all(tmp_path: Path) -> None:
    one = run(tmp_path / "one", GaussianEvent(noise_multiplier=4.0))
    two = run(tmp_path / "two", GaussianEvent(noise_multiplier=4.0), epsilon=None, reasons=("seeded",))
    assert joint_cost([one, two]).epsilon is None
    assert "guarantee nothing" in output("spent", one, two)


def test_what_has_no_common_epsilon_is_refused(tmp_path: Path) -> None:
    release = GaussianEvent(noise_multiplier=4.0)
    one = run(tmp_path / "one", release)
    with pytest.raises(FedveilError, match="protect different things"):
        joint_cost([one, run(tmp_path / "clients", release, unit="client")])
    other = run(tmp_path / "delta", release, delta=1e-6)
    with pytest.raises(FedveilError, match="give --delta"):
        joint_cost([one, other])
    assert joint_cost([one, other], delta=1e-5).epsilon is not None
    with pytest.raises(FedveilError, match="other charges than its statement"):
        joint_cost([run(tmp_path / "torn", release, GaussianEvent(noise_multiplier=3.0), charged=1)])
    with pytest.raises(FedveilError, match="name the run folders"):
        joint_cost([])
    with pytest.raises(FedveilError):
        joint_cost([tmp_path / "nowhere"])


def on_digits(folder: Path, **changes: object) -> Path:
    (folder / "experiment.toml").write_text(experiment(**changes).to_toml())
    return folder


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 1},
        {"data": {"n_users": 19}},
        {"data": {"allocation": {"law": "uniform"}}},
        {"data": {"name": "mnist"}},
    ],
)
def test_users_that_an_allocation_draws_are_not_those_of_another(
    other: dict[str, Any], tmp_path: Path
) -> None:
    """A user's records in one run are those of many users in the other, who have a contribution each."""
    release = GaussianEvent(noise_multiplier=4.0)
    one, same, two = (
        on_digits(run(tmp_path / name, release), **more)
        for name, more in (("a", {}), ("b", {"data": {"allocation": {"law": "zipf"}}}), ("c", other))
    )
    assert joint_cost([one, same]).epsilon is not None
    with pytest.raises(FedveilError, match=r"'digits'.* to users in different ways.*data\.seed"):
        joint_cost([one, two])
    told = joint_cost_of_points(
        [Point(experiment=experiment(name=name), settings={}) for name in "ac"], tmp_path
    )
    assert told["epsilon"] is None
    assert "each run's statement is about that run alone" in told["told"]


def test_runs_of_users_that_nobody_knows_have_no_epsilon(tmp_path: Path) -> None:
    """Without its experiment a run passed for one on tables; the statistics of tables never have one."""
    release = GaussianEvent(noise_multiplier=4.0)
    one, two = (run(tmp_path / name, release) for name in "ab")
    (two / "experiment.toml").unlink()
    with pytest.raises(FedveilError, match=r"b/experiment\.toml"):
        joint_cost([one, two])
    counted = run(tmp_path / "counted", release, released="statistics")
    (counted / "experiment.toml").unlink()
    assert joint_cost([one, counted]).epsilon is not None


def test_one_user_of_one_allocation_is_many_of_another() -> None:
    """Digits with 20 users: whoever has most records there is 19 users of the next seed's, not one."""
    first, second = (load("digits", allocation=Allocation(), n_users=20, seed=seed).train for seed in (0, 1))
    own = {row.tobytes() for row in first.features[first.user == 0]}
    there = [row.tobytes() in own for row in second.features]
    assert len(np.unique(second.user[np.array(there)])) > 10


def test_runs_of_one_data_seed_have_one_epsilon_whatever_their_seeds(tmp_path: Path) -> None:
    release, data = GaussianEvent(noise_multiplier=4.0), {"data": {"seed": 7}}
    folders = [on_digits(run(tmp_path / f"{seed}", release), seed=seed, **data) for seed in (0, 1)]
    assert joint_cost(folders).epsilon is not None


def test_sampled_rounds_compose_with_whole_releases(tmp_path: Path) -> None:
    """More than either alone, less than if nobody were sampled."""
    release = GaussianEvent(noise_multiplier=4.0)
    sampled = PoissonSampledEvent(rate=0.1, event=GaussianEvent(noise_multiplier=1.0))
    one = run(tmp_path / "one", release)
    two = run(tmp_path / "two", release, sampled)
    found = joint_cost([one, two]).epsilon
    assert found is not None
    assert gaussian_epsilon((2 / 16) ** 0.5, 1e-5) < found < gaussian_epsilon((2 / 16 + 1) ** 0.5, 1e-5) + 0.1


@pytest.mark.parametrize("delta", [0.0, 1.0, -1.0, float("nan")])
def test_a_delta_that_is_no_probability_below_one_is_refused(delta: float, tmp_path: Path) -> None:
    one = run(tmp_path / "one", GaussianEvent(noise_multiplier=4.0))
    with pytest.raises(FedveilError, match="--delta must lie between 0 and 1"):
        joint_cost([one], delta=delta)


def points(*names: str) -> list[Point]:
    return [Point(experiment=experiment(name=name), settings={}) for name in names]


def test_a_sweep_adds_up_what_all_its_points_have_spent(tmp_path: Path) -> None:
    """As ``fedveil spent`` does, and never one epsilon for runs that protect different things."""
    release = GaussianEvent(noise_multiplier=4.0)
    folders = [run(tmp_path / name, release, release) for name in ("a", "b")]
    spent = joint_cost_of_points(points("a", "b"), tmp_path)
    assert spent["epsilon"] == joint_cost(folders).epsilon
    assert spent["told"].startswith(
        "together, 2 runs on the same people: each user is protected with epsilon "
    )
    assert "Metrics on test records are exact and covered by no epsilon" in spent["told"]
    run(tmp_path / "c", release, unit="client")
    mixed = joint_cost_of_points(points("a", "c"), tmp_path)
    assert mixed["epsilon"] is None
    assert "protect different things, so no one epsilon covers them" in mixed["told"]


def test_runs_on_tables_have_one_epsilon_where_ids_name_the_same_person(tmp_path: Path) -> None:
    """A patient in one run's column of users may be twenty visits in another's, and no run folder shows it."""
    release = GaussianEvent(noise_multiplier=4.0)
    folders = [run(tmp_path / name, release) for name in ("a", "b")]
    condition = "if an id names the same person in all of them"
    both, alone = joint_cost(folders).promise, joint_cost(folders[:1]).promise
    assert both is not None
    assert condition in both
    assert condition in joint_cost_of_points(points("a", "b"), tmp_path)["told"]
    assert alone is not None
    assert condition not in alone
    allotted = [on_digits(run(tmp_path / name, release), seed=1) for name in ("c", "d")]
    promised = joint_cost(allotted).promise
    assert promised is not None
    assert condition not in promised
    assert condition in str(joint_cost([*folders, *allotted]).promise)


def test_a_sweep_counts_a_run_that_guarantees_nothing(tmp_path: Path) -> None:
    release = GaussianEvent(noise_multiplier=4.0)
    run(tmp_path / "a", release)
    run(tmp_path / "d", release, epsilon=None, reasons=("none",))
    assert "no guarantee" in joint_cost_of_points(points("a", "d"), tmp_path)["told"]


def test_a_sweep_counts_what_earlier_ones_left_in_its_folder(tmp_path: Path) -> None:
    """Whoever chooses has looked at those too; a run of them that is gone or has not ended takes the epsilon away."""
    release = GaussianEvent(noise_multiplier=4.0)
    folders = [run(tmp_path / name, release) for name in ("a", "b")]
    spent = joint_cost_of_points(points("b"), tmp_path)
    assert (spent["runs"], spent["epsilon"]) == (2, joint_cost(folders).epsilon)
    assert "together, 2 runs on the same people (1 of them from earlier sweeps into " in spent["told"]
    (tmp_path / ROWS).write_text('{"schema_version": 1, "run": "gone"}\n')
    assert joint_cost_of_points(points("b"), tmp_path)["epsilon"] is None
    (tmp_path / ROWS).unlink()
    (tmp_path / "a" / "privacy.json").unlink()
    begun = joint_cost_of_points(points("b"), tmp_path)
    assert begun["epsilon"] is None
    assert "it has no privacy.json" in begun["told"]
