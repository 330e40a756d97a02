"""A federation over bytes: the model of the run in one process, and nothing lost or released twice in any disorder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.federation_world import (
    ADAPTIVE,
    MOVING,
    TESTING,
    Chaos,
    Moments,
    World,
    asked,
    in_one_process,
    population,
)
from tests.runs import files, same_model
from tests.slow_cases import slow_only

PLAIN: dict[str, Any] = {}
MASKED = {"protection": {"name": "secure-aggregation"}}
CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"name": "fedavg"}, PLAIN),
    ({"name": "uldp-naive"}, PLAIN),
    ({"name": "uldp-sgd"}, MASKED),
    ({"name": "uldp-avg-w"}, PLAIN),
    ({"name": "uldp-avg", "user_sampling_rate": 0.5}, PLAIN),
    ({"name": "uldp-avg-w", "user_sampling_rate": 0.5}, MASKED),
    ({"name": "uldp-avg", "clip": MOVING}, PLAIN),
    ({"name": "uldp-avg-w", "clip": MOVING, "correlated": {"period": 3}}, PLAIN),
    ({"name": "uldp-sgd", "correlated": {"period": 2, "bands": 1}}, MASKED),
    ({"name": "uldp-avg-w", "user_sampling_rate": 0.5, "clip": MOVING}, MASKED),
]


@pytest.mark.parametrize(
    ("method", "protection"),
    CASES,
    ids=lambda part: "-".join(str(value) for value in part.values()) if "name" in part else "",
)
def test_the_model_is_that_of_the_run_in_one_process_bit_for_bit(
    method: dict[str, Any], protection: dict[str, Any], tmp_path: Path
) -> None:
    experiment, held = asked(method=method, **protection), population()
    world = World(tmp_path, experiment, held)
    world.play()
    world.assert_as_in_one_process()
    world.close()


@pytest.mark.parametrize(
    ("who", "protection", "seed"),
    [({"user_sampling_rate": 0.7}, PLAIN, 3), *slow_only([({"correlated": {"period": 3}}, MASKED, 2)])],
    ids=["sampled", "correlated, masked"],
)
def test_a_hundred_mishaps_change_nothing(
    who: dict[str, Any],
    protection: dict[str, Any],
    seed: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    method: dict[str, Any] = {"clip": MOVING} | who
    experiment = asked(rounds=12, method=method, server=ADAPTIVE["server"], **protection)
    held = population()
    undisturbed = files(in_one_process(experiment, held, tmp_path / "here"))
    world, moments = World(tmp_path, experiment, held), Moments(monkeypatch)
    chaos = Chaos(world, moments, seed)
    chaos.play()
    assert moments.kills + chaos.cuts >= 100
    assert moments.kills >= 20
    assert same_model(undisturbed[1], files(world.run_folder.path)[1])
    assert world.paid == list(range(1, 13))
    for number in range(3):
        charged = world.charged(number)
        assert sorted(set(charged)) == list(range(1, 13))
        assert len(charged) - 12 <= moments.kills  # a crash may waste a charge
    world.close()


def test_a_silo_sends_one_noisy_sum_a_round_whatever_goes_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = asked(rounds=20, privacy={"delta": 1e-5})
    experiment = experiment.model_copy(
        update={"privacy": experiment.privacy.model_copy(update={"insecure_seed": None})}
    )
    world, moments = World(tmp_path, experiment, population(), TESTING), Moments(monkeypatch)
    Chaos(world, moments, 3).play()
    assert moments.kills >= 20
    assert set(world.left) == {(silo, number) for silo in range(3) for number in range(1, 21)}
    assert {len(sums) for sums in world.left.values()} == {1}
    world.close()
