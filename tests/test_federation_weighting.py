"""Private weighting over messages: the model of the run in one process, one noisy sum a round, and no counts."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedveil.crypto.key_agreement import RoundId
from fedveil.data.records import Population, Records
from fedveil.errors import ProtocolError
from fedveil.federation import exchange
from fedveil.federation.policy import Policy
from fedveil.federation.signed_message import SignedMessage
from fedveil.federation.silo import SiloParty
from fedveil.federation.transport.interface import LARGEST_MESSAGE
from fedveil.protocols.messages import SERVER
from fedveil.protocols.refusals import Code
from fedveil.protocols.session_messages import (
    Join,
    RoundTask,
    SampledFlag,
    SampledUsers,
    SamplingCommitment,
    SessionMessage,
    UserCounts,
    UserTotals,
)
from fedveil.protocols.weighting.plan import WeightedInputs
from fedveil.protocols.weighting.server import WeightingServer
from fedveil.protocols.weighting.silo import WeightingSilo
from fedveil.randomness import ExperimentRandomness
from fedveil.run.config.experiment import Experiment
from fedveil.run.folder.run_folder import Checkpoint, RunFolder
from fedveil.run.populations import FixedPopulation
from fedveil.run.rounds.client_inputs import CohortInputs
from fedveil.run.rounds.round_context import RoundContext
from fedveil.run.setup import prepare
from tests.federation_world import (
    MOVING,
    TESTING,
    Chaos,
    Killed,
    Moments,
    World,
    asked,
    in_one_process,
    population,
    small_keys,
)
from tests.runs import files, same_model
from tests.slow_cases import slow_only

POLICY = TESTING.model_copy(update={"protections": ("private-weighting",), "disclose_counts": False})
SAMPLED = {"user_sampling_rate": 0.5}
TRANSFER = {"private_sampling": True}


@pytest.fixture(autouse=True)
def _small_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    small_keys(monkeypatch)


def weighted(
    method: dict[str, Any] | None = None, protection: dict[str, Any] | None = None, **more: Any
) -> Experiment:
    return asked(
        method={"name": "uldp-avg-w", **(method or {})},
        protection={"name": "private-weighting", "n_max": 30, **(protection or {})},
        **more,
    )


def secret(experiment: Experiment) -> Experiment:
    """The same with noise of the operating system."""
    return experiment.model_copy(
        update={"privacy": experiment.privacy.model_copy(update={"insecure_seed": None})}
    )


def complete(world: World) -> None:
    assert world.outcome.stopped is None


def stopped(world: World) -> str:
    return world.outcome.stopped or ""


class Record:
    """What went into every encrypted sum, and what the coordinator decrypted, by round.

    Attributes:
        given: per silo and round every input in turn.
        learned: per round every sum in turn.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.given: dict[tuple[int, int], list[WeightedInputs]] = {}
        self.learned: dict[int, list[bytes]] = {}
        contribute, result = WeightingSilo.contribute, WeightingServer.result

        def giving(client: WeightingSilo, round_id: RoundId, given: WeightedInputs) -> list[bytes]:
            self.given.setdefault((client.index, round_id.round), []).append(given)
            return contribute(client, round_id, given)

        def learning(server: WeightingServer) -> np.ndarray:
            found = result(server)
            self.learned.setdefault(server.round_id.round, []).append(found.tobytes())
            return found

        monkeypatch.setattr(WeightingSilo, "contribute", giving)
        monkeypatch.setattr(WeightingServer, "result", learning)


@pytest.mark.parametrize(
    ("method", "protection"),
    [
        ({}, {}),
        (SAMPLED | {"clip": MOVING}, {}),
        ({"name": "uldp-sgd-w", "power": 2}, {}),
        pytest.param(
            SAMPLED,
            {"cipher": "rlwe"},
            marks=[
                pytest.mark.slow,
                pytest.mark.skipif(find_spec("tenseal") is None, reason="needs the extra rlwe"),
            ],
        ),
    ],
    ids=["all", "sampled", "a gradient, squared", "rlwe"],
)
def test_the_model_is_that_of_the_run_in_one_process_bit_for_bit(
    method: dict[str, Any], protection: dict[str, Any], tmp_path: Path
) -> None:
    experiment, held = weighted(method, protection, rounds=3), population()
    world = World(tmp_path, experiment, held, POLICY)
    world.play()
    world.assert_as_in_one_process()
    world.close()


# --- whatever goes wrong ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "seed"), [*slow_only([({}, 7)]), (SAMPLED, 5)], ids=["all", "sampled"])
def test_a_hundred_mishaps_change_nothing(
    method: dict[str, Any], seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment, held = weighted(method, rounds=5), population()
    undisturbed = files(in_one_process(experiment, held, tmp_path / "here"))
    world, moments, record = (
        World(tmp_path, experiment, held, POLICY),
        Moments(monkeypatch),
        Record(monkeypatch),
    )
    chaos = Chaos(world, moments, seed, rate=0.4)
    chaos.play()
    complete(world)
    assert moments.kills + chaos.cuts >= 100
    assert moments.kills >= 15
    assert same_model(undisturbed[1], files(world.run_folder.path)[1])
    assert world.paid == list(range(1, 6))
    for number in range(3):
        charged = world.charged(number)
        assert sorted(set(charged)) == list(range(1, 6))
        assert len(charged) - 5 <= moments.kills  # a crash may waste a charge
    assert max(len(inputs) for inputs in record.given.values()) > 1
    assert {len({one.encode() for one in inputs}) for inputs in record.given.values()} == {1}
    world.close()


@pytest.mark.parametrize("method", [{}, SAMPLED], ids=["all", "sampled"])
def test_a_round_that_is_asked_for_in_two_sessions_shows_one_number(
    method: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, record = World(tmp_path, secret(weighted(method)), population(), POLICY), Record(monkeypatch)
    write, dead = RunFolder.write_checkpoint, {0}

    def deadly(folder: RunFolder, checkpoint: Checkpoint) -> None:
        if checkpoint.round not in dead:
            dead.add(checkpoint.round)
            raise Killed
        write(folder, checkpoint)

    monkeypatch.setattr(RunFolder, "write_checkpoint", deadly)
    for _ in range(4):
        with pytest.raises(Killed):
            world.play()
        assert world.coordinator is not None
        world.coordinator.close()
    world.play()
    complete(world)
    assert {number: len(sums) for number, sums in record.learned.items()} == dict.fromkeys((1, 2, 3, 4), 2)
    assert {len(set(sums)) for sums in record.learned.values()} == {1}
    assert {len({one.encode() for one in inputs}) for inputs in record.given.values()} == {1}
    assert [world.paid, *map(world.charged, range(3))] == [[1, 2, 3, 4]] * 4
    world.close()


def test_under_oblivious_transfer_every_session_draws_and_pays_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = secret(weighted(SAMPLED, TRANSFER, rounds=5))
    world, moments, record = (
        World(tmp_path, experiment, population(), POLICY),
        Moments(monkeypatch),
        Record(monkeypatch),
    )
    Chaos(world, moments, 7, rate=0.15).play()
    complete(world)
    assert moments.kills >= 5
    assert max(len(inputs) for inputs in record.given.values()) > 1
    for (silo, number), inputs in record.given.items():
        assert len({one.noise.tobytes() for one in inputs}) == len(inputs)
        assert len({one.dither for one in inputs}) == len(inputs)
        charged = world.charged(silo)
        assert charged.count(number) >= len(inputs)
    for number, sums in record.learned.items():
        assert world.paid.count(number) >= len(sums)
    charges = len(world.paid)
    last = files(world.run_folder.path)[2][-1]
    assert last["epsilon"] == prepare(experiment, FixedPopulation(population())).epsilon_after(charges)
    world.close()


def test_under_oblivious_transfer_somebody_is_drawn_whom_nobody_knows(tmp_path: Path) -> None:
    quiet = {**SAMPLED, "noise_multiplier": 0.0}
    experiment = weighted(quiet, TRANSFER, rounds=1, server={"learning_rate": 1.0})
    held = population()
    world = World(tmp_path, experiment, held, POLICY)
    world.play()
    complete(world)
    prepared = prepare(experiment, FixedPopulation(held))
    moved = _vector(files(world.run_folder.path)[1]) - prepared.task.initial().numpy()
    moved *= prepared.method.divisor(held.n_users, 3)
    turn = RoundContext(
        setting=prepared.setting,
        model=prepared.task.initial(),
        round_number=1,
        experiment=ExperimentRandomness(experiment.seed),
        privacy=experiment.privacy.randomness(),
    )
    training = CohortInputs(turn, prepared.protocol_spec)
    groups, alone = prepared.setting.cohort.groups, np.zeros((held.n_users, len(moved)))
    totals = np.bincount(groups.user, weights=groups.size)
    for silo in range(3):
        users = groups.user[groups.silo == silo]
        alone[users] += (
            training.contributions(silo) * (groups.size[groups.silo == silo] / totals[users])[:, None]
        )
    coins = np.array(
        [[(bits >> user) & 1 for user in range(held.n_users)] for bits in range(2**held.n_users)]
    )
    assert np.abs(coins @ alone - moved).max(axis=1).min() < 1e-3
    world.close()


def _vector(state: dict[str, np.ndarray]) -> np.ndarray:
    return np.concatenate([state["1.weight"].ravel(), state["1.bias"].ravel()])


# --- what nobody is told, and what is refused ---------------------------------------------------------------------


def test_no_message_tells_counts_or_who_was_drawn(tmp_path: Path) -> None:
    world = World(tmp_path, weighted(SAMPLED), population(), POLICY)
    told: list[Any] = []
    receive = SiloParty.receive

    def overheard(party: SiloParty, data: bytes) -> bytes:
        reply = receive(party, data)
        number = party._number
        for message, sender, recipient in ((data, SERVER, number), (reply, number, SERVER)):
            key = world.membership.coordinator if sender == SERVER else world.membership.roster[number]
            told.extend(
                SignedMessage.open(
                    message, sender=sender, identity=key, recipient=recipient, largest=LARGEST_MESSAGE
                ).parts
            )
        return reply

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(SiloParty, "receive", overheard)
        world.play()
    complete(world)
    assert sum(isinstance(part, Join) for part in told) == 3
    assert sum(isinstance(part, RoundTask) for part in told) == 12
    assert not any(isinstance(part, UserCounts | UserTotals | SampledUsers | SampledFlag) for part in told)
    assert len({part.commitment for part in told if isinstance(part, SamplingCommitment)}) == 4
    world.close()


def interrupted(tmp_path: Path, experiment: Experiment) -> World:
    """A federation whose coordinator dies after round 1 was answered by all silos and before it was released."""
    world = World(tmp_path, experiment, population(), POLICY)
    leading = world.coordinator = world.coordinate()
    for _ in range(20):
        world.exchange(leading)
        if all((tmp_path / f"state-{number}" / "answers").exists() for number in range(3)):
            leading.close()
            return world
    raise AssertionError("no round was answered")


def test_a_restarted_coordinator_gets_the_same_round(tmp_path: Path) -> None:
    experiment = weighted(SAMPLED)
    world = interrupted(tmp_path, experiment)
    world.play()
    complete(world)
    here = files(in_one_process(experiment, population(), tmp_path / "here"))
    assert same_model(here[1], files(world.run_folder.path)[1])
    world.close()


def test_the_same_round_for_other_users_is_refused(tmp_path: Path) -> None:
    world = interrupted(tmp_path, weighted(SAMPLED))
    (world.run_folder / "checkpoint/participants.json").unlink()
    world.play()
    assert "silo0 refuses (replay): round 1 was answered for another experiment" in stopped(world)
    world.close()


def test_the_same_round_after_a_silo_counts_other_records_is_refused(tmp_path: Path) -> None:
    world = interrupted(tmp_path, weighted())
    train = world.held.train
    silo = 1
    first = int(np.flatnonzero(train.silo == silo)[0])
    rest = np.delete(np.arange(len(train.user)), first)
    held = world.held
    world.held = _with(held, train.select(rest))
    world.restart(silo)
    world.play()
    assert "silo1 refuses (replay): round 1 was answered for other records" in stopped(world)
    assert "other records of its users" in stopped(world)
    world.close()


def _with(held: Population, records: Records) -> Population:
    return replace(held, train=records)


@pytest.mark.parametrize("parts", ["told", "uncommitted"])
def test_a_task_that_tells_who_is_drawn_or_commits_to_nobody_is_refused(parts: str, tmp_path: Path) -> None:
    world = World(tmp_path, weighted(SAMPLED), population(), POLICY)

    def lie(_: int, message: tuple[SessionMessage, ...]) -> tuple[SessionMessage, ...]:
        if parts == "uncommitted":
            return tuple(part for part in message if not isinstance(part, SamplingCommitment))
        drawn = SampledUsers(users=np.ones(6, dtype=np.bool_))
        return tuple(
            told for part in message for told in ((drawn, part) if isinstance(part, RoundTask) else (part,))
        )

    world.lie = lie
    world.play()
    assert f"refuses (request): {Code.SHAPE.template}" in stopped(world)
    assert not (tmp_path / "state-0" / "answers").exists()
    world.close()


def test_more_records_than_n_max_are_not_counted_and_nobody_is_told(tmp_path: Path) -> None:
    """A refusal would tell the coordinator, who chooses N_max, whether somebody has more records than its share."""
    held = population()
    assert held.train.user.size > 3 * held.n_users
    world = World(tmp_path, secret(weighted(protection={"n_max": 9})), held, POLICY)
    world.play()
    complete(world)
    world.close()


def test_a_silo_takes_part_only_if_its_policy_names_private_weighting(tmp_path: Path) -> None:
    cautious = Policy(epsilon=1e6, clip=1.0)
    world = World(tmp_path, secret(weighted()), population(), cautious)
    world.play()
    assert Code.PROTECTION.template in stopped(world)
    world.close()
    allowed = cautious.model_copy(update={"protections": ("private-weighting",)})
    again = World(tmp_path / "again", secret(weighted()), population(), allowed)
    again.play()
    complete(again)
    again.close()


def test_messages_that_nobody_would_read_are_refused_before_a_run(tmp_path: Path) -> None:
    world = World(tmp_path, weighted(), population(), POLICY)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(exchange, "LARGEST_MESSAGE", 1 << 11)
        with pytest.raises(ProtocolError, match="above the limit of 2048: fewer users or parameters"):
            world.coordinate()
    world.close()


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_what_is_stored_is_what_is_given(dtype: Any) -> None:
    rng = np.random.default_rng(3)
    content = WeightedInputs(
        contributions=rng.integers(-(2**30), 2**30, (3, 5)).astype(dtype),
        noise=rng.integers(-(2**60), 2**60, 5),
        dither=rng.bytes(32),
    )
    again = WeightedInputs.decode(content.encode())
    np.testing.assert_array_equal(again.contributions, content.contributions)
    assert again.contributions.dtype == dtype
    np.testing.assert_array_equal(again.noise, content.noise)
    assert again.dither == content.dither
