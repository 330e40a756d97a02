"""Rounds that go on without silos: the sum of the others, and no noisy vector in two sums whatever goes wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedveil.errors import CompositionError, IntegrityError
from fedveil.federation.coordinator import DRAWN, CoordinatorParty
from fedveil.federation.ledger_heads import HEADS, SeenHeads
from fedveil.federation.silo_ledger import LEDGER, adopt
from fedveil.federation.silo_session.session import RoundInstructions
from fedveil.protocols.driver import Dropouts
from fedveil.protocols.recoverable_aggregation import RecoverableServer, RecoverableSilo
from fedveil.protocols.refusals import RefusalError
from fedveil.protocols.session_messages import GlobalModel, RoundTask
from fedveil.run.config.experiment import Experiment
from fedveil.run.rounds.retries import MOST_ATTEMPTS
from tests.federation_world import MOVING, TESTING, Chaos, Moments, World, asked, in_one_process, population
from tests.runs import files, same_model
from tests.test_dropped_silos import scripted

SILOS = 5
RECOVER: dict[str, Any] = {"name": "secure-aggregation", "on_dropout": "recover", "max_dropouts": 2}


def recovering(seeded: bool = True, **changes: Any) -> Experiment:
    """An experiment whose rounds go on without up to two of five silos."""
    method = {"user_sampling_rate": 0.7} | changes.pop("method", {})
    protection = RECOVER | changes.pop("protection", {})
    experiment = asked(method=method, protection=protection, **changes)
    if seeded:
        return experiment
    privacy = experiment.privacy.model_copy(update={"insecure_seed": None})
    return experiment.model_copy(update={"privacy": privacy})


def world_of(folder: Path, experiment: Experiment) -> World:
    return World(folder, experiment, population(silos=SILOS))


def step(coordinator: CoordinatorParty) -> str:
    """Which step of an attempt is awaited: HELLO, IDLE (joining), KEYS, SHARES, VECTORS, SIGN, REVEAL."""
    if coordinator._exchange is not None and coordinator._exchange.hellos:
        return "HELLO"
    machine = coordinator._server
    assert isinstance(machine, RecoverableServer)
    return machine._phase.name


def exchange(world: World, coordinator: CoordinatorParty, without: Collection[int] = ()) -> None:
    """Carry every message that waits, but those to silos that are away; then the others go on."""
    for number, data in reversed(coordinator.messages()):  # those to silos left behind come first
        party = world.silos[number]
        if number not in without and party is not None:
            coordinator.receive(number, party.receive(data))
    silent = {silo for silo in without if silo not in coordinator._absent}
    if silent and not coordinator.is_finished:
        assert set(coordinator.drop_missing(coordinator.awaited_silos)) == {
            f"silo{number}" for number in silent
        }


def play(
    world: World, gone: Callable[[int, str], Collection[int]] = lambda number, at: ()
) -> CoordinatorParty:
    """Play a run to its end; a silo that is away in a step of a round reads its message later."""
    coordinator = world.coordinator = world.coordinate()
    for _ in range(1000):
        if coordinator.is_finished:
            return coordinator
        exchange(world, coordinator, gone(coordinator._part.checkpoint.round + 1, step(coordinator)))
    raise AssertionError("the run does not end")


def reach(world: World, coordinator: CoordinatorParty, number: int, at: str) -> None:
    """Play up to a step of a round."""
    for _ in range(200):
        if (coordinator._part.checkpoint.round + 1, step(coordinator)) == (number, at):
            return
        exchange(world, coordinator)
    raise AssertionError("the run does not come so far")


def summed(world: World) -> list[int]:
    return [row["summed"] for row in files(world.run_folder.path)[2][1:]]


class Inputs:
    """Every noisy vector that went under a mask, by silo."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.given: dict[int, list[bytes]] = {}
        masked = RecoverableSilo.mask_vector

        def giving(silo: RecoverableSilo, units: np.ndarray) -> bytes:
            sent = masked(silo, units)
            self.given.setdefault(silo.index, []).append(units.tobytes())
            return sent

        monkeypatch.setattr(RecoverableSilo, "mask_vector", giving)


def test_the_model_is_that_of_the_run_in_one_process_where_the_same_silos_vanish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = {(2, "VECTORS"): (1, 4), (4, "REVEAL"): (2,), (7, "SHARES"): (0,), (7, "VECTORS"): (3,)}
    here = {
        2: Dropouts(before_input=frozenset({1, 4})),
        4: Dropouts(before_reveal=frozenset({2})),
        5: Dropouts(before_input=frozenset({2})),  # it is heard again when the round has begun
        7: Dropouts(before_input=frozenset({0, 3})),
    }
    moving = {"clip": MOVING}
    world = world_of(tmp_path, recovering(rounds=8, method=moving))
    play(world, lambda *now: there.get(now, ()))
    scripted(monkeypatch, {(number, 0): dropouts for number, dropouts in here.items()})
    simulated = recovering(rounds=8, method=moving, protection={"dropout_rate": 0.5})
    _, model, rows = files(in_one_process(simulated, world.held, tmp_path / "here"))
    assert [row["summed"] for row in rows[1:]] == summed(world) == [5, 3, 5, 5, 4, 5, 3, 5]
    assert same_model(model, files(world.run_folder.path)[1])
    assert world.paid == list(range(1, 9))
    world.close()


def test_the_others_go_on_without_a_silo_that_never_comes_back(tmp_path: Path) -> None:
    world = world_of(tmp_path, recovering(rounds=6))
    play(world, lambda number, at: (2,) if number > 3 or (number, at) == (3, "SHARES") else ())
    assert summed(world) == [5, 5, 4, 4, 4, 4]
    assert world.charged(2) == [1, 2]
    assert world.charged(0) == world.paid == [1, 2, 3, 4, 5, 6]
    world.close()


@pytest.mark.parametrize("at", ["IDLE", "KEYS", "SHARES", "VECTORS", "SIGN", "REVEAL"])
def test_a_silo_that_was_away_is_in_the_next_round(at: str, tmp_path: Path) -> None:
    world = world_of(tmp_path, recovering())
    number = 1 if at == "IDLE" else 2
    play(world, lambda *now: (1,) if now == (number, at) else ())
    later = at == "REVEAL"  # its vector was in, and the next round has begun when it is heard
    assert summed(world) == [4 if turn == number + later and at != "SIGN" else 5 for turn in range(1, 5)]
    assert world.paid == [1, 2, 3, 4]
    world.close()


@pytest.mark.parametrize("at", ["KEYS", "SHARES", "VECTORS", "SIGN", "REVEAL"])
def test_a_silo_that_was_restarted_costs_the_others_nothing(at: str, tmp_path: Path) -> None:
    world = world_of(tmp_path, recovering())
    coordinator = world.coordinator = world.coordinate()
    reach(world, coordinator, 2, at)
    world.restart(4)
    while not coordinator.is_finished:
        exchange(world, coordinator)
    assert summed(world) == [5, 5 if at in ("SIGN", "REVEAL") else 4, 5, 5]
    assert world.paid == world.charged(0) == [1, 2, 3, 4]
    world.close()


@pytest.mark.parametrize("at", ["VECTORS", "REVEAL"])
def test_another_attempt_is_another_release(at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, world = Inputs(monkeypatch), world_of(tmp_path, recovering(seeded=False))
    coordinator = world.coordinate()
    reach(world, coordinator, 2, at)
    for number, data in coordinator.messages()[:3]:  # the vectors of some, or the shares, have arrived
        coordinator.receive(number, world.party(number).receive(data))
    drawn = (world.run_folder / DRAWN).read_bytes()
    coordinator.close()
    again = world.coordinate()
    reach(world, again, 2, "KEYS")
    assert (world.run_folder / DRAWN).read_bytes() != drawn
    again.close()
    play(world)
    assert world.paid == [1, 2, 2, 2, 3, 4]
    assert world.charged(0) == [1, 2, 2, 3, 4]
    for silo, given in inputs.given.items():
        assert len(given) == len(set(given)) == len(world.charged(silo))
    world.close()


def test_too_few_are_waited_for_and_begin_again_with_those_that_are_back(tmp_path: Path) -> None:
    world = world_of(tmp_path, recovering())
    coordinator = world.coordinator = world.coordinate()
    reach(world, coordinator, 1, "SHARES")
    exchange(world, coordinator, {0, 1})
    waiting = [number for number, _ in coordinator.messages() if number not in (0, 1, 2)]
    for number, data in coordinator.messages():
        party = world.party(number)
        if number in waiting:
            coordinator.receive(number, party.receive(data))
    assert coordinator.drop_missing(coordinator.awaited_silos) == ()  # two of five are not enough
    assert step(coordinator) == "VECTORS"
    for number, data in coordinator.messages():
        party = world.silos[number]
        if number in (0, 1) and party is not None:
            coordinator.receive(number, party.receive(data))
    assert coordinator.drop_missing(coordinator.awaited_silos) == ("silo2",)
    assert step(coordinator) == "HELLO"
    while not coordinator.is_finished:
        exchange(world, coordinator, () if 2 in coordinator._absent else (2,))
    assert summed(world) == [4, 4, 4, 4]
    assert world.paid == [1, 1, 2, 3, 4]
    world.close()


def test_a_run_whose_last_round_is_over_asks_nobody_again(tmp_path: Path) -> None:
    world = world_of(tmp_path, recovering())
    coordinator = world.coordinator = world.coordinate()
    reach(world, coordinator, 4, "VECTORS")
    world.restart(1)
    for _ in range(3):
        exchange(world, coordinator)
    assert coordinator.is_finished
    assert summed(world) == [5, 5, 5, 4]
    world.close()


def test_an_attempt_that_was_charged_twice_ends_the_run_where_the_budget_ends(tmp_path: Path) -> None:
    experiment = recovering(seeded=False)
    policy = TESTING.model_copy(update={"without_guarantee": False, "accountant": "rdp", "epsilon": 1e-3})
    world = World(tmp_path, experiment, population(silos=SILOS))
    play(world)
    assert policy.budget is not None
    cost = policy.budget.accountant.epsilon(world.silos[0]._ledger.ledger.spent_event(), policy.delta)  # type: ignore[union-attr]
    world.close()
    (tmp_path / "again").mkdir()
    policy = policy.model_copy(update={"epsilon": 1.0001 * cost})
    world = World(tmp_path / "again", experiment, population(silos=SILOS), policy)
    coordinator = world.coordinate()
    reach(world, coordinator, 1, "REVEAL")
    coordinator.close()
    coordinator = world.coordinator = world.coordinate()
    reach(world, coordinator, 2, "SHARES")
    world.restart(1)  # so that another session begins when the round is over
    while not coordinator.is_finished:
        exchange(world, coordinator)
    assert coordinator.outcome is not None
    assert "refuses (budget): the round would exceed" in (coordinator.outcome.stopped or "")
    assert summed(world) == [5, 4, 5]
    assert world.charged(0) == [1, 1, 2, 3]
    world.close()


def test_a_silo_that_dies_in_every_attempt_does_not_spend_what_the_others_have(tmp_path: Path) -> None:
    world = world_of(tmp_path, recovering())
    coordinator = world.coordinator = world.coordinate()
    exchange(world, coordinator, {0, 1})
    for _ in range(100):
        if (
            step(coordinator) == "VECTORS"
        ):  # two send theirs, then the third, without which there are too few, dies
            for number, data in coordinator.messages():
                party = world.silos[number]
                if number in (3, 4) and party is not None:
                    coordinator.receive(number, party.receive(data))
            world.restart(2)
        exchange(world, coordinator, {0, 1})
        if coordinator.is_finished:
            break
    assert coordinator.outcome is not None
    assert "silos vanished in each of 10 attempts at round 1" in (coordinator.outcome.stopped or "")
    assert len(world.paid) == len(world.charged(3)) == MOST_ATTEMPTS
    world.close()


def test_an_earlier_round_is_not_answered_again(tmp_path: Path) -> None:
    world = world_of(tmp_path, recovering())
    coordinator = world.coordinator = world.coordinate()
    reach(world, coordinator, 3, "KEYS")
    share = world.party()
    assert share._session is not None
    last = share._store.read(coordinator.run)
    assert last is not None
    with pytest.raises(RefusalError, match="round 1 has ended"):
        share._session._check_follows(last, 1)
    share._session._check_follows(last, 4)
    world.close()


@pytest.mark.parametrize("number", [0, 5])
def test_a_round_that_the_run_does_not_have_is_neither_charged_nor_answered(
    number: int, tmp_path: Path
) -> None:
    world = world_of(tmp_path, recovering())
    coordinator = world.coordinator = world.coordinate()
    reach(world, coordinator, 1, "KEYS")
    party = world.party()
    session = party._session
    assert session is not None
    session.instructions = RoundInstructions()
    session.instructions.add(GlobalModel(values=coordinator._part.checkpoint.model.numpy()))
    with pytest.raises(RefusalError, match="the run has rounds 1 to 4"):
        session._round_input(RoundTask(round=number))
    assert world.charged(0) == []
    world.close()


def test_a_silo_whose_ledger_lost_its_last_answer_goes_no_further(tmp_path: Path) -> None:
    world = world_of(tmp_path, recovering())
    coordinator = world.coordinator = world.coordinate()
    reach(world, coordinator, 3, "KEYS")
    world.party().close()
    (tmp_path / "state-0" / LEDGER).unlink()
    with pytest.raises(IntegrityError, match="lines are missing"):
        world.silo(0)
    heard = (
        SeenHeads(tmp_path / "state-1" / HEADS, bytes(32)).last("silo0").hex()
    )  # by a peer, when the session began
    adopt(tmp_path / "state-0", "somebody answers for it; this run cannot go on all the same", (heard,))
    world.silos[0] = world.silo(0)
    while not coordinator.is_finished:
        exchange(world, coordinator)
    assert coordinator.outcome is not None
    assert "silo0 refuses (state)" in (coordinator.outcome.stopped or "")
    world.close()


@pytest.mark.parametrize("seed", [9, pytest.param(6, marks=pytest.mark.slow)])
def test_no_noisy_vector_is_in_two_sums_whatever_goes_wrong(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, moments = Inputs(monkeypatch), Moments(monkeypatch)
    world = world_of(tmp_path, recovering(seeded=False, rounds=12))
    chaos = Chaos(world, moments, seed, rate=0.2, impatient=True)
    chaos.play()
    assert moments.kills + chaos.cuts >= 100
    assert len(summed(world)) == 12
    assert set(summed(world)) <= {3, 4, 5}
    assert min(summed(world)) < 5
    assert sorted(set(world.paid)) == list(range(1, 13))
    for silo in range(SILOS):
        given = inputs.given[silo]
        assert len(given) == len(set(given)) <= len(world.charged(silo))
        assert not Counter(world.charged(silo)) - Counter(world.paid)  # else it would not sign an honest end
    world.close()


@pytest.mark.parametrize(
    ("protection", "reason"),
    [
        ({"on_dropout": "retry"}, 'on_dropout = "recover" continues a round without silos'),
        ({"dropout_rate": 0.1}, "drops silos in a simulation"),
    ],
)
def test_what_does_not_travel_is_refused(protection: dict[str, Any], reason: str, tmp_path: Path) -> None:
    world = world_of(tmp_path, recovering(protection=protection))
    with pytest.raises(CompositionError, match=reason):
        world.coordinate()
    world.close()


def test_without_recovery_all_are_waited_for(tmp_path: Path) -> None:
    world = world_of(tmp_path, asked(protection={"name": "secure-aggregation"}))
    coordinator = world.coordinator = world.coordinate()
    for number, data in coordinator.messages()[:-1]:
        coordinator.receive(number, world.party(number).receive(data))
    assert coordinator.drop_missing(coordinator.awaited_silos) == ()
    assert [number for number, _ in coordinator.messages()] == [SILOS - 1]
    world.close()
