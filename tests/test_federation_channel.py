"""Channels of bytes between institutions: the model of one process, one message a round, nothing for others to read."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedveil.crypto.key_agreement import AgreementKey, RoundId
from fedveil.data.records import Population
from fedveil.errors import ProtocolError
from fedveil.federation.audit.run_record import round_attestation
from fedveil.federation.policy import Policy
from fedveil.federation.silo_ledger import LEDGER
from fedveil.federation.store import RecordStore
from fedveil.methods.message_encoding import CodedMessage
from fedveil.privacy.events import GaussianEvent, split_grid_loss
from fedveil.privacy.ledger import read_entries
from fedveil.protocols.messages import Envelope
from fedveil.protocols.refusals import Code, Refusal
from fedveil.protocols.sealed_sums import SealedClient, SealedMessage, SealedServer, SealedSums
from fedveil.protocols.session_messages import (
    Attestation,
    Declined,
    GlobalModel,
    Join,
    ProtocolMessage,
    RoundTask,
    SessionMessage,
)
from fedveil.run.config.experiment import Experiment, parse
from tests.federation_world import (
    MOVING,
    OPEN,
    RUN,
    Chaos,
    Moments,
    World,
    asked,
    clients,
    in_one_process,
    population,
)
from tests.runs import files, same_model
from tests.slow_cases import fast_every

LRSUQ = {"channel": {"name": "lrsuq"}}
GAUSSIAN = {"clip": 0.5, "noise_multiplier": 2.0}
THREE = {"data": {"n_users": 3}}


def of_clients(name: str, **parameters: Any) -> dict[str, Any]:
    return {"method": {"name": name, **parameters}, **THREE}


CASES: list[tuple[str, dict[str, Any]]] = [
    ("pairs", LRSUQ),
    ("pairs", {"method": {"name": "uldp-avg-w", "user_sampling_rate": 0.5, "clip": MOVING}, **LRSUQ}),
    ("pairs", {"method": {"name": "uldp-naive"}, "channel": {"name": "lrsuq", "lattice": "A2"}}),
    ("clients", of_clients("cepam-gaussian", weights=[1.0, 4.0, 2.0])),
    ("clients", of_clients("cepam-laplace")),
    ("clients", of_clients("fl-gaussian-sdq", step=1.0)),
    ("clients", of_clients("fl-laplace")),
    ("clients", of_clients("dp-fedavg")),
    ("clients", of_clients("dp-fed")),
    ("clients", of_clients("dp-fed", client_sampling_rate=0.5, denominator="actual")),
    ("clients", of_clients("dp-fed-ls", smoothing=1.0, client_sampling_rate=0.7)),
    ("clients", of_clients("dp-fed") | LRSUQ),
    ("clients", of_clients("dp-fed-ls", smoothing=1.0) | LRSUQ),
    ("clients", of_clients("varying-dp")),
    ("clients", of_clients("stevens") | {"protection": {"name": "secure-aggregation"}}),
]


def held_by(who: str) -> Population:
    return clients() if who == "clients" else population()


class Session:
    """The coordinator's end of a session with silo 0, which has joined.

    Attributes:
        server: the end of the protocol.
        key: its message to the silo, to be read ahead of the first task.
    """

    def __init__(self, world: World, number: int = 1) -> None:
        self._world, self._number = world, number
        terms = world.terms()
        agreed = SealedSums(clients=3, length=4, decode=lambda given, number: np.zeros(4))
        accepted, offer = world.tell(terms, session=number)
        self.server = SealedServer(agreed, world.runs[0, RUN, number])
        assert isinstance(accepted, Join)
        assert isinstance(offer, ProtocolMessage)
        ((_, self.key),) = self.server.receive(0, offer.message)

    def asked(self, *, first: bool, number: int) -> Envelope:
        """What the silo sends when it is asked for round 1 in an exchange."""
        model, task = GlobalModel(values=np.zeros(4, dtype=np.float32)), RoundTask(round=1)
        keys = (ProtocolMessage(message=self.key),) if first else ()
        return sealed(self._world.tell(*keys, model, task, session=self._number, number=number))

    def open(self, envelope: Envelope) -> bytes:
        return self.server.open_sealed(0, envelope)


def sealed(parts: tuple[SessionMessage, ...]) -> Envelope:
    part, signed = parts
    assert isinstance(part, ProtocolMessage), part
    assert isinstance(signed, Attestation)
    envelope = Envelope.decode(part.message)
    assert isinstance(envelope.message, SealedMessage)
    return envelope


@pytest.mark.parametrize(
    ("who", "changes"), fast_every(CASES, 3), ids=lambda part: part if isinstance(part, str) else ""
)
def test_the_model_is_that_of_the_run_in_one_process_bit_for_bit(
    who: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    experiment, held = asked(rounds=3, **changes), held_by(who)
    world = World(tmp_path, experiment, held)
    world.play()
    world.assert_as_in_one_process()
    world.close()


def test_mishaps_change_nothing_and_no_key_carries_two_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment, held = asked(rounds=8, **LRSUQ), population()
    undisturbed = files(in_one_process(experiment, held, tmp_path / "here"))
    world, moments = World(tmp_path, experiment, held), Moments(monkeypatch)
    chaos = Chaos(world, moments, 4)
    chaos.play()
    assert moments.kills + chaos.cuts >= 30
    assert moments.kills >= 5
    assert same_model(undisturbed[1], files(world.run_folder.path)[1])
    assert world.paid == list(range(1, 9))
    for number in range(3):
        charged = world.charged(number)
        assert sorted(set(charged)) == list(range(1, 9))
    world.close()


def test_a_silo_sends_one_message_a_round_under_a_key_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noise from the operating system: whatever is asked again, a round is the same bytes, and no two share a key."""
    experiment = asked(rounds=8, **LRSUQ)
    secret = experiment.privacy.model_copy(update={"insecure_seed": None})
    world = World(tmp_path, experiment.model_copy(update={"privacy": secret}), population())
    moments = Moments(monkeypatch)
    Chaos(world, moments, 5).play()
    assert moments.kills >= 3
    assert set(world.left) == {(silo, number) for silo in range(3) for number in range(1, 9)}
    assert {len(messages) for messages in world.left.values()} == {1}
    keys = {message[:32] for messages in world.left.values() for message in messages}
    assert len(keys) == 24
    world.close()


def test_a_round_is_repeated_under_another_seal_in_any_session(tmp_path: Path) -> None:
    world = World(tmp_path, asked(**LRSUQ), population())
    session = Session(world)
    first, again = session.asked(first=True, number=1), session.asked(first=False, number=2)
    assert first.message.encode() != again.message.encode()
    assert session.open(first) == session.open(again)
    world.silos[0].close()  # type: ignore[union-attr]
    world.silos[0] = world.silo(0)
    later = Session(world, 2)
    assert later.open(later.asked(first=True, number=1)) == session.open(first)
    with pytest.raises(ProtocolError, match="does not authenticate"):
        later.open(first)
    world.close()


def test_others_read_nothing(tmp_path: Path) -> None:
    """A message shows neither its content nor a key, and opens for its round, silo and coordinator alone."""
    world = World(tmp_path, asked(**LRSUQ), population())
    session = Session(world)
    envelope = session.asked(first=True, number=1)
    content = session.open(envelope)
    kept = RecordStore(tmp_path / "state-0" / "answers").read(RUN)
    assert kept is not None
    assert kept.contribution == content
    assert isinstance(envelope.message, SealedMessage)
    data = envelope.message.sealed
    coded = CodedMessage.from_bytes(content)
    assert coded.key not in data
    assert coded.message[:16] not in data
    stranger = Session.__new__(Session)
    stranger.server = SealedServer(session.server._spec, envelope.round_id.run)
    stranger.server._shared[0] = AgreementKey.generate().agree(AgreementKey.generate().public)
    other = replace(envelope, round_id=replace(envelope.round_id, round=2))
    for opener, sent in ((stranger, envelope), (session, other)):
        with pytest.raises(ProtocolError, match="does not authenticate"):
            opener.open(sent)
    for place in range(len(data)):
        altered = bytearray(data)
        altered[place] ^= 1
        with pytest.raises(ProtocolError, match="refused"):
            session.open(replace(envelope, message=SealedMessage(sealed=bytes(altered))))
    world.close()


@pytest.mark.parametrize("content", [b"short", bytes(32), bytes(64), b"key" * 20])
def test_a_message_that_is_none_ends_the_run_with_the_model(content: bytes, tmp_path: Path) -> None:
    world = World(tmp_path, asked(**LRSUQ), population())
    coordinator = world.coordinate()
    for _ in range(3):
        for number, data in coordinator.messages():
            party = world.party(number)
            reply = party.receive(data)
            if party._last is not None and party._session is not None and party._last.number == 2:
                signed_message = world.open_message(number, data)
                client = party._session.client
                assert isinstance(client, SealedClient)
                round_id = RoundId(run=client._setup.run, round=1, attempt=0)
                (message,) = client._send(content, round_id)
                terms = coordinator._record._terms
                said = round_attestation(
                    signed_message.run, terms, ("", 1), coordinator._asked, coordinator._told, bytes(32)
                )
                signed = Attestation(signature=world.keys[number].sign(said))
                reply = signed_message.answer(ProtocolMessage(message=message), signed).seal(
                    world.keys[number]
                )
            coordinator.receive(number, reply)
    assert coordinator.outcome is not None
    assert "was refused" in (coordinator.outcome.stopped or "")
    assert coordinator.outcome.rounds == 0
    world.close()


@pytest.mark.parametrize(("who", "changes"), [("pairs", LRSUQ), ("clients", of_clients("dp-fed"))])
def test_who_does_not_trust_the_coordinator_refuses(
    who: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    experiment = asked(**changes)
    secret = experiment.privacy.model_copy(update={"insecure_seed": None})
    experiment = experiment.model_copy(update={"privacy": secret})
    for trusts in (False, True):
        policy = Policy(
            **OPEN, methods=("uldp-avg", "dp-fed"), disclose_counts=True, trust_coordinator=trusts
        )
        world = World(tmp_path, experiment, held_by(who), policy)
        terms = world.terms(experiment)
        answer = world.tell(terms)[0]
        assert isinstance(answer, Join if trusts else Declined)
        if isinstance(answer, Declined):
            assert answer.why.code is Code.NOT_AGAINST_COORDINATOR
        world.close()


@pytest.mark.parametrize(
    ("changes", "held", "expected"),
    [
        (of_clients("cepam-gaussian"), replace(clients(), n_users=6), "takes 3 users, not 6"),
        (of_clients("dp-fed", client_sampling="uniform", client_sampling_rate=0.7), clients(), "everyone"),
        (
            of_clients("dp-fed", client_sampling="uniform", client_sampling_rate=0.7) | LRSUQ,
            clients(),
            "everyone",
        ),
        (of_clients("dp-fedavg", calibration="as-published"), clients(), "largest client"),
    ],
)
def test_what_cannot_travel_is_refused_with_the_reason(
    changes: dict[str, Any], held: Population, expected: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    refused(asked(**changes), held, tmp_path)
    assert expected in caplog.text


def test_a_scale_that_is_private_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    experiment = asked(**of_clients("cepam-gaussian"))
    document = tomllib.loads(experiment.to_toml())
    del document["method"]["clip"]
    document["method"]["scale"] = "norm"
    refused(parse(document, "test"), clients(), tmp_path)
    assert "private number" in caplog.text


def refused(experiment: Experiment, held: Population, folder: Path) -> None:
    """The coordinator says why; a silo sends a code, and says why in its own log."""
    world = World(folder, experiment, held)
    terms = world.terms(experiment)
    answer = world.tell(terms)[0]
    assert isinstance(answer, Declined)
    assert answer.why == Refusal(Code.EXPERIMENT)
    world.close()


def test_a_client_holds_her_own_records(tmp_path: Path) -> None:
    held = clients()
    swapped = replace(held, train=replace(held.train, user=(held.train.user + 1) % 3))
    experiment = asked(**of_clients("cepam-gaussian"))
    world = World(tmp_path, experiment, swapped)
    answer = world.tell(world.terms(experiment))[0]
    assert isinstance(answer, Declined)
    assert answer.why == Refusal(Code.OWN_RECORDS)
    world.close()


def test_noise_that_falls_is_charged_round_by_round(tmp_path: Path) -> None:
    experiment = asked(**of_clients("varying-dp", noise_decay=0.5, noise_multiplier=8.0))
    world = World(tmp_path, experiment, clients())
    world.play()
    for path in (world.run_folder / "ledger.jsonl", tmp_path / "state-0" / LEDGER):
        events = [split_grid_loss(entry.event)[0] for entry in read_entries(path)]
        assert all(isinstance(event, GaussianEvent) for event in events)
        multipliers = [event.noise_multiplier for event in events if isinstance(event, GaussianEvent)]
        assert multipliers == pytest.approx([multipliers[0] * 0.5**number for number in range(4)])
    world.close()
