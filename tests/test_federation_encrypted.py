"""Partial encryption between institutions: silos end with the model of one process, the coordinator with none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tenseal")

from safetensors.numpy import load_file

from fedveil.crypto.ckks import CkksParameters, coefficients
from fedveil.crypto.key_agreement import RoundId
from fedveil.data.records import Population
from fedveil.errors import CompositionError, ProtocolError
from fedveil.federation.coordinator import CoordinatorParty
from fedveil.federation.policy import Policy
from fedveil.federation.proposal_review import check_deployable
from fedveil.federation.silo import MODELS
from fedveil.federation.silo_ledger import LEDGER
from fedveil.federation.silo_session.tasks import SiloTrainingTask
from fedveil.federation.store import RoundRecord
from fedveil.privacy.claims import Role
from fedveil.privacy.events import ComposedEvent, split_grid_loss
from fedveil.privacy.ledger import read_entries
from fedveil.protocols.messages import SERVER, Envelope, RoundStart
from fedveil.protocols.partial_encryption import server as partial_server
from fedveil.protocols.partial_encryption import silo as partial_encryption
from fedveil.protocols.partial_encryption.plan import (
    Ballot,
    PartialInputs,
    PartialSum,
    PartialUpdate,
    SplitUpdate,
    largest,
)
from fedveil.protocols.partial_encryption.protocol_spec import PartialClient
from fedveil.protocols.partial_encryption.server import PartialServer
from fedveil.protocols.refusals import Code, Refusal, RefusalError
from fedveil.protocols.session_messages import Declined, ModelStored, ProtocolMessage, SessionMessage
from fedveil.run.config.experiment import Experiment
from fedveil.run.populations import FixedPopulation
from fedveil.run.setup import prepare
from tests.federation_world import (
    ADAPTIVE,
    OPEN,
    TESTING,
    Chaos,
    Moments,
    World,
    asked,
    clients,
    in_one_process,
    population,
    statement,
)
from tests.slow_cases import fast_every

ENCRYPTED = {"name": "partial-encryption"}
WILLING = TESTING.model_copy(update={"protections": (*TESTING.protections, "partial-encryption")})
THREE = {"data": {"n_users": 3}}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("pairs", {"protection": ENCRYPTED | {"ratio": 0.5}}),
    ("pairs", {"protection": ENCRYPTED | {"ratio": 0.5, "votes": "secagg"}}),
    (
        "pairs",
        {
            "protection": ENCRYPTED
            | {
                "ratio": 0.5,
                "votes": "secagg",
                "partition": "noisy-votes",
                "vote_noise": 2.0,
                "he_noise": 1.0,
            },
            "method": {"name": "uldp-avg-w", "user_sampling_rate": 0.5},
            "privacy": {"accountant": "rdp"},
        },
    ),
    ("pairs", {"protection": ENCRYPTED | {"ratio": 0.5, "partition": "released", "he_noise": 1.0}}),
    ("pairs", {"protection": ENCRYPTED | {"ratio": 1.0}, "method": {"name": "uldp-naive"}}),
    (
        "clients",
        {"method": {"name": "paraaegis"}, "protection": ENCRYPTED | {"ratio": 0.5, "he_clip": 0.3}, **THREE},
    ),
    ("pairs", {"protection": ENCRYPTED | {"ratio": 1.0}, "method": {"name": "fedavg"}}),
    ("clients", {"method": {"name": "serial"}, **THREE}),
    (
        "clients",
        {
            "method": {"name": "dp-fed-ls", "smoothing": 1.0},
            "protection": ENCRYPTED | {"strategy": "random"},
            **THREE,
        },
    ),
]


@pytest.fixture
def same_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Orders that are the same in every run: places break ties of votes, so the partition follows the order."""

    def order(key: bytes, length: int) -> np.ndarray:
        return np.random.default_rng(length).permutation(length)

    monkeypatch.setattr(partial_encryption, "secret_order", order)


def held_by(who: str) -> Population:
    return clients() if who == "clients" else population()


def models(folder: Path, silos: int = 3) -> list[dict[str, np.ndarray]]:
    """The model that each silo has."""
    found = [list((folder / f"state-{number}" / MODELS).iterdir()) for number in range(silos)]
    assert all(len(names) == 1 for names in found)
    return [load_file(names[0]) for names in found]


def here(experiment: Experiment, held: Population, folder: Path) -> dict[str, np.ndarray]:
    """The model of the run in one process."""
    return load_file(in_one_process(experiment, held, folder / "here") / "model.safetensors")


def equal(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(one[key].tobytes() == other[key].tobytes() for key in one)


@pytest.mark.usefixtures("same_orders")
@pytest.mark.parametrize(
    ("who", "changes"), fast_every(CASES, 3), ids=lambda part: part if isinstance(part, str) else ""
)
def test_every_silo_ends_with_the_model_of_one_process_bit_for_bit(
    who: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    experiment, held = asked(rounds=3, **changes), held_by(who)
    world = World(tmp_path, experiment, held, WILLING)
    world.play()
    assert world.outcome.stopped is None
    expected = here(experiment, held, tmp_path)
    assert all(equal(model, expected) for model in models(tmp_path))
    for number in range(3):
        assert world.charged(number) == [1, 2, 3]
    assert world.paid == [1, 2, 3]
    assert not (world.run_folder / "model.safetensors").exists()
    assert statement(tmp_path / "here" / "try") == statement(world.run_folder.path)
    world.close()


@pytest.mark.slow
@pytest.mark.usefixtures("same_orders")
def test_mishaps_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither models nor what every silo's optimiser remembers."""
    experiment = asked(rounds=6, protection=ENCRYPTED | {"ratio": 0.5, "votes": "secagg"}, **ADAPTIVE)
    held = population()
    world, moments = World(tmp_path, experiment, held, WILLING), Moments(monkeypatch)
    chaos = Chaos(world, moments, 6)
    chaos.play()
    assert moments.kills + chaos.cuts >= 60
    assert moments.kills >= 10
    expected = here(experiment, held, tmp_path)
    assert all(equal(model, expected) for model in models(tmp_path))
    for number in range(3):
        assert sorted(set(world.charged(number))) == list(range(1, 7))
    assert len((world.run_folder / "metrics.jsonl").read_bytes().splitlines()) == 7
    world.close()


VOTED: dict[str, Any] = {"protection": ENCRYPTED | {"ratio": 0.5}}


class Seen:
    """What the coordinator reads of each silo's rounds: ballots, parts in clear, and every byte of it.

    Args:
        monkeypatch: of the test.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ballots: dict[tuple[int, int], set[bytes]] = {}
        self.clear: dict[tuple[int, int], set[bytes]] = {}
        self.all: list[bytes] = []
        receive = PartialServer.receive

        def noted(party: PartialServer, silo: int, message: bytes) -> Any:
            self.all.append(message)
            envelope = Envelope.decode(message)
            key = (silo, envelope.round_id.round)
            if isinstance(envelope.message, Ballot):
                self.ballots.setdefault(key, set()).add(envelope.message.bitmap)
            elif isinstance(envelope.message, PartialUpdate):
                self.clear.setdefault(key, set()).add(envelope.message.clear.tobytes())
            return receive(party, silo, message)

        monkeypatch.setattr(PartialServer, "receive", noted)


def secretly(experiment: Experiment) -> Experiment:
    """The same with noise from the operating system."""
    privacy = experiment.privacy.model_copy(update={"insecure_seed": None})
    return experiment.model_copy(update={"privacy": privacy})


def carry(world: World, coordinator: CoordinatorParty, until: Callable[[], bool]) -> None:
    """Carry messages in order until something holds, or the run ends."""
    while not coordinator.is_finished:
        for number, data in coordinator.messages():
            if until():
                return
            coordinator.receive(number, world.party(number).receive(world.altered(number, data)))


def begun_again(world: World, seen: Seen, parts: int) -> CoordinatorParty:
    """Play until the coordinator has so many parts in clear of round 1; return it as it begins another session."""
    first = world.coordinate()
    carry(world, first, lambda: sum(number == 1 for _, number in seen.clear) >= parts)
    first.close()
    return world.coordinate()


def stopped(coordinator: CoordinatorParty) -> str:
    assert coordinator.outcome is not None
    return coordinator.outcome.stopped or ""


def test_two_attempts_at_a_round_show_what_one_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise and orders from the operating system, in any disorder: one ballot and one part in clear a round."""
    experiment = secretly(asked(rounds=6, **VOTED))
    seen, moments = Seen(monkeypatch), Moments(monkeypatch)
    world = World(tmp_path, experiment, population(), WILLING)
    chaos = Chaos(world, moments, 7)
    chaos.play()
    assert moments.kills >= 5
    every = {(silo, number) for silo in range(3) for number in range(1, 7)}
    assert set(seen.clear) == every
    assert {len(parts) for parts in seen.clear.values()} == {1}
    assert set(seen.ballots) == every
    assert {len(ballots) for ballots in seen.ballots.values()} == {1}
    first, *others = models(tmp_path)
    assert all(equal(first, other) for other in others)
    world.close()


def test_the_coordinator_has_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Seen(monkeypatch)
    world = World(tmp_path, secretly(asked(**VOTED)), population(), WILLING)
    world.play()
    (model, *_) = models(tmp_path)
    content = b"".join(tensor.tobytes() for tensor in model.values())
    kept = [path.read_bytes() for path in world.run_folder.path.rglob("*") if path.is_file()]
    assert not any(content in data for data in (*kept, *seen.all))
    assert world.coordinator is not None
    assert equal_arrays(
        world.coordinator._part.checkpoint.model.numpy(),
        world.coordinator._part.prepared.task.initial().numpy(),
    )
    world.close()


def equal_arrays(one: np.ndarray, other: np.ndarray) -> bool:
    return one.tobytes() == other.tobytes()


def test_another_partition_of_the_same_round_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What the first partition hid would show in the open under a second one."""
    seen = Seen(monkeypatch)
    world = World(tmp_path, secretly(asked(**VOTED)), population(), WILLING)
    again = begun_again(world, seen, 2)
    monkeypatch.setattr(
        partial_server,
        "largest",
        lambda counts, count: largest(-len(counts) * counts - np.arange(len(counts)), count),
    )
    carry(world, again, lambda: False)
    assert Code.PROTOCOL.template in stopped(again)
    assert "answered for another partition" in caplog.text
    assert {len(parts) for parts in seen.clear.values()} == {1}
    world.close()


def shifted(told: PartialSum, units: int) -> PartialSum:
    """The sum with so many units added to its first encrypted coordinate; that takes no key."""
    parameters = CkksParameters(silos=3)
    added = np.zeros(parameters.degree)
    added[0] = units * parameters.scale
    encoded = np.rint(coefficients(added.view(np.complex128)[None]))[0].astype(np.int64)
    words = parameters.unpack(told.hidden)
    first = words[: parameters.degree].astype(np.int64) + encoded
    words[: parameters.degree] = (first % parameters.prime).astype(np.uint64)
    return replace(told, hidden=parameters.pack(words))


def sum_offered(world: World, units: int) -> tuple[SessionMessage, bool]:
    """What silo 1 says in a new session to the sum with so many units added, and whether it gave its parts before."""
    coordinator, gave = world.coordinate(), False

    def lie(silo: int, parts: tuple[SessionMessage, ...]) -> tuple[SessionMessage, ...]:
        if silo != 1 or not isinstance(parts[-1], ProtocolMessage):
            return parts
        told = Envelope.decode(parts[-1].message)
        if not isinstance(told.message, PartialSum):
            return parts
        told = replace(told, message=shifted(told.message, units))
        return (*parts[:-1], ProtocolMessage(message=told.encode()))

    world.lie = lie
    while True:
        for number, data in coordinator.messages():
            reply = world.party(number).receive(world.altered(number, data))
            parts = world.answer(number, reply).parts
            end = next((part for part in parts if isinstance(part, ModelStored | Declined)), None)
            if number == 1:
                relayed = [Envelope.decode(one.message) for one in parts if isinstance(one, ProtocolMessage)]
                gave = gave or any(isinstance(one.message, PartialUpdate) for one in relayed)
            if end is None:
                coordinator.receive(number, reply)
            elif number == 1:
                coordinator.close()
                return end, gave


@pytest.mark.parametrize(("known", "units"), [(False, 1 << 22), (True, 1 << 22), (True, 1)])
def test_a_sum_is_refused_once_and_in_one_way(known: bool, units: int, tmp_path: Path) -> None:
    """A coordinator that could try sums would find what one silo encrypted by bisection, 20 refusals a coordinate."""
    world = World(tmp_path, secretly(asked(**VOTED)), population(), WILLING)
    if known:
        assert isinstance(sum_offered(world, 0)[0], ModelStored)
    refused, gave = sum_offered(world, units)
    assert (refused, gave) == (Declined(why=Refusal(Code.OTHER_SUM, (1.0,))), True)
    world.restart(1)
    assert sum_offered(world, 0) == (refused, False)
    assert world.charged(1) == [1]
    world.close()


def test_a_silo_that_missed_the_sum_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Silo 0 has the next model and the others died before the sum: all play the round again, to the same sum."""
    seen = Seen(monkeypatch)
    world = World(tmp_path, secretly(asked(**VOTED)), population(), WILLING)
    coordinator = world.coordinate()
    party = world.party()
    carry(world, coordinator, lambda: (tmp_path / "state-0" / MODELS).exists())
    before = party._store.read(coordinator.run)
    for number in (1, 2):
        world.restart(number)
    carry(world, coordinator, lambda: False)
    assert not stopped(coordinator)
    assert before is not None
    assert before.after
    assert {len(parts) for parts in seen.clear.values()} == {1}
    first, *others = models(tmp_path)
    assert all(equal(first, other) for other in others)
    world.close()


def test_a_next_round_needs_the_last_sum() -> None:
    prepared = prepare(asked(**VOTED, **ADAPTIVE), FixedPopulation(population()))
    work = SiloTrainingTask(prepared, prepared.guarantee.event, 900.0)
    zeros, after = np.zeros(4, dtype=np.float32), np.arange(4, dtype=np.float32)
    kept = RoundRecord(
        round=3,
        request=bytes(32),
        binding=bytes(32),
        contribution=b"given",
        before={"model": zeros},
        refused=True,
    )
    with pytest.raises(RefusalError, match="is not complete at this silo"):
        work.state_after(kept)
    first = work.state_after(None)
    following = {**first, "model": after, "state.mean": first["state.mean"] + 1}
    ended = RoundRecord.decode(replace(kept, after=following).encode())
    again = work.state_after(ended)
    assert (again["model"].tolist(), again["state.mean"].tolist()) == ([0, 1, 2, 3], [1] * 4)
    for lost in ({"model": after}, following | {"state.mean": np.zeros(3)}):
        with pytest.raises(RefusalError, match="belongs to another server"):
            work.state_after(replace(ended, after=lost))
    assert (ended.round, ended.request, ended.contribution, ended.refused) == (3, bytes(32), b"given", True)
    assert ended.before["model"].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("votes", [None, np.arange(4) - 2])
@pytest.mark.parametrize("divided", [False, True])
def test_what_is_stored_is_what_is_given(votes: np.ndarray | None, divided: bool) -> None:
    parts = SplitUpdate(
        partition=np.arange(4) < 1, clear=np.arange(3, dtype=np.int64), hidden=np.array([-7], dtype=np.int64)
    )
    given = PartialInputs(
        values=np.arange(4.0), message=np.arange(4.0) / 3, votes=votes, divided=parts if divided else None
    )
    again = PartialInputs.decode(given.encode())
    assert again.encode() == given.encode()
    assert again.values.tolist() == [0, 1, 2, 3]
    assert again.message.tolist() == given.message.tolist()
    assert (again.votes is None) == (votes is None)
    assert again.votes is None or again.votes.tolist() == [-2, -1, 0, 1]
    assert (again.divided is None) == (not divided)
    if again.divided is not None:
        assert again.divided.partition.tolist() == [True, False, False, False]
        assert (again.divided.clear.tolist(), again.divided.hidden.tolist()) == ([0, 1, 2], [-7])


@pytest.mark.parametrize("what", ["model", "state"])
def test_silos_with_different_models_are_noticed(what: str, tmp_path: Path) -> None:
    """Also where the state alone differs, by 1e-12 of itself, which the next model does not show yet."""
    world = World(tmp_path, asked(**VOTED, **ADAPTIVE), population(), WILLING)
    coordinator = world.coordinate()
    carry(world, coordinator, lambda: coordinator._part.checkpoint.round == 1)
    party = world.party(1)
    last = party._store.read(coordinator.run)
    assert last is not None
    other = {
        name: value * (1 + 1e-12) if name.startswith("state.") and value.dtype.kind == "f" else value
        for name, value in last.after.items()
    }
    lost = other if what == "state" else {**last.after, "model": last.after["model"] + 1}
    party._store.write(coordinator.run, replace(last, after=lost))
    carry(world, coordinator, lambda: False)
    assert "silo silo1: ends the round with another model or optimiser's state than most silos" in stopped(
        coordinator
    )
    assert coordinator._part.checkpoint.round == 1
    world.close()


def test_a_first_silo_without_its_memory_cannot_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its new secret would put the others' ballots of the same round in another order."""
    seen = Seen(monkeypatch)
    world = World(tmp_path, asked(**VOTED), population(), WILLING)
    again = begun_again(world, seen, 1)
    world.party().close()
    (secret,) = (tmp_path / "state-0" / "answers").glob("*.secret")
    secret.unlink()
    world.silos[0] = world.silo(0)
    carry(world, again, lambda: False)
    assert "silo 0 lost the secret" in stopped(again)
    world.close()


@pytest.mark.parametrize(
    ("protection", "policy", "expected"),
    [
        ({"ratio": 0.5}, {}, "nothing is guaranteed against another silo"),
        ({"ratio": 0.5}, {"trust_silos": True}, None),
        ({"ratio": 0.5, "partition": "released", "he_noise": 1.0}, {}, None),
        ({"ratio": 0.5}, {"trust_silos": True, "trust_coordinator": True}, "against readers of the models"),
        ({"ratio": 0.5}, {"protections": ("secure-aggregation",)}, "does not allow protection.name"),
    ],
)
def test_a_silo_is_told_to_trust_the_others(
    protection: dict[str, Any], policy: dict[str, Any], expected: str | None, tmp_path: Path
) -> None:
    experiment = secretly(asked(rounds=1, protection=ENCRYPTED | protection))
    limits = Policy(**(OPEN | {"protections": ("partial-encryption",)} | policy))
    world = World(tmp_path, experiment, population(), limits)
    world.play()
    assert world.coordinator is not None
    reason = stopped(world.coordinator)
    assert expected in reason if expected else not reason
    world.close()


def test_the_bound_of_the_encrypted_part_is_within_the_policy_s_clip() -> None:
    policy = WILLING.model_copy(update={"clip": 0.5})
    for he_clip, refused in ((0.5, False), (0.6, True)):
        experiment = asked(
            method={"name": "paraaegis"}, protection=ENCRYPTED | {"ratio": 0.5, "he_clip": he_clip}, **THREE
        )
        method = prepare(experiment, FixedPopulation(clients())).method
        if not refused:
            policy.check_method(method, 1)
            continue
        with pytest.raises(RefusalError) as error:
            policy.check_method(method, 1)
        assert error.value.why.code is Code.CLIP


@pytest.mark.parametrize("trusts", [False, True])
def test_a_silo_charges_what_other_silos_learn_where_the_coordinator_sees_nothing(
    trusts: bool, tmp_path: Path
) -> None:
    """Everything is encrypted: the coordinator's line is 0, and every silo decrypts the noisy sum of every round."""
    experiment = secretly(asked(rounds=2, method={"name": "serial"}, **THREE))
    open_to_all = OPEN | {"protections": ("none", "partial-encryption"), "methods": ("serial",)}
    world = World(tmp_path, experiment, clients(), Policy(**open_to_all, trust_silos=trusts))
    world.play()
    assert world.coordinator is not None
    assert not stopped(world.coordinator)
    prepared = prepare(experiment, FixedPopulation(clients()))
    assert prepared.guarantee.event_for(Role.SERVER) == ComposedEvent(events=())
    counted = prepared.guarantee.event_for(Role.SERVER if trusts else Role.SILO)
    charged = [split_grid_loss(one.event) for one in read_entries(tmp_path / "state-0" / LEDGER)]
    assert [event for event, _ in charged] == [counted] * 2
    assert [loss > 0 for _, loss in charged] == [not trusts] * 2
    world.close()


def test_a_sum_over_fewer_silos_is_refused(tmp_path: Path) -> None:
    world = World(tmp_path, asked(**VOTED), population(), WILLING)
    coordinator = world.coordinate()
    carry(world, coordinator, lambda: bool(coordinator._conversations) and coordinator._server.ready)
    party = world.party()
    assert party._session is not None
    client = party._session.client
    assert isinstance(client, PartialClient)
    round_id = RoundId(run=client._place.run, round=1, attempt=0)
    start = Envelope(round_id=round_id, sender=SERVER, recipient=0, message=RoundStart(cohort=(0, 1)))
    with pytest.raises(ProtocolError, match="2 of 3 silos"):
        client.receive(start.encode())
    coordinator.close()
    world.close()


def test_a_model_from_elsewhere_is_refused(tmp_path: Path) -> None:
    experiment = asked(**VOTED)
    prepared = prepare(experiment, FixedPopulation(population()))
    asked_for = experiment.model_copy(
        update={"model": experiment.model.model_copy(update={"sha256": "ab" * 32})}
    )
    with pytest.raises(CompositionError, match="sends no model"):
        check_deployable(replace(prepared, experiment=asked_for))


def test_a_model_of_another_size_is_refused_before_anything_is_done(tmp_path: Path) -> None:
    """A coordinator that goes on with another model in the same run: no silo joins."""
    policy = WILLING.model_copy(update={"models": ("linear", "mlp"), "trust_silos": True})
    experiment = asked(protection=ENCRYPTED | {"ratio": 0.5})
    world = World(tmp_path, experiment, population(), policy)
    coordinator = world.coordinate()
    while coordinator._part.checkpoint.round < 1:
        world.exchange(coordinator)
    coordinator.close()
    paid = len(read_entries(tmp_path / "state-0" / LEDGER))
    world.experiment = asked(protection=ENCRYPTED | {"ratio": 0.5}, model={"name": "mlp"})
    again = world.coordinate()
    for _ in range(8):
        world.exchange(again)
    assert again.outcome is not None
    assert "charged under another experiment" in (again.outcome.stopped or "")
    assert len(read_entries(tmp_path / "state-0" / LEDGER)) == paid
    world.close()
