"""The driver: first in, first out; who vanishes; and the two protocols without masks, whose sums are exact."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedveil.crypto.key_agreement import RoundId
from fedveil.crypto.keys import IdentityKey
from fedveil.errors import ProtocolError, SiloVanished
from fedveil.protocols.driver import Dropouts, LocalDriver, Transcript
from fedveil.protocols.masked_sums import MaskedSumSpec
from fedveil.protocols.messages import SERVER, Envelope
from fedveil.protocols.partial_encryption.plan import PartialInputs, PartialPlan, PartialResult
from fedveil.protocols.partial_encryption.protocol_spec import PartialEncryptionSpec
from fedveil.protocols.plaintext_sums import PlaintextClient, PlaintextServer, PlaintextSums, PlaintextVector
from fedveil.protocols.protocol import ClientContext
from fedveil.protocols.sealed_sums import SealedMessage, SealedSums
from fedveil.randomness import ExperimentRandomness, PrivacyRandomness
from fedveil.run.rounds.client_inputs import CohortInputs, PerClientInputs
from fedveil.run.rounds.round_context import RoundContext
from fedveil.run.simulation import SimulatedParties
from tests.pins.cases import prepared as pins

RUN = bytes(range(16))
UNITS = np.arange(4, dtype=np.int64)
NOW = RoundId(run=RUN, round=1, attempt=0)


def decode(given: bytes, round_number: int) -> np.ndarray:
    return np.frombuffer(given, dtype="<f8")


def at(number: int) -> ClientContext:
    identity = IdentityKey.generate()
    return ClientContext(run=RUN, number=number, identity=identity, roster=(identity.public,))


def opened(clients: int = 3, length: int = 4) -> LocalDriver:
    return LocalDriver(PlaintextSums(clients=clients, length=length), Transcript())


def sealed(clients: int = 3, length: int = 4) -> LocalDriver:
    return LocalDriver(SealedSums(clients=clients, length=length, decode=decode), Transcript())


def vectors(clients: int = 3, length: int = 4) -> list[np.ndarray]:
    return list(np.random.default_rng(1).normal(size=(clients, length)))


def test_open_and_sealed_sums_are_those_of_a_loop_in_the_order_of_the_clients() -> None:
    """Float sums depend on their order, so the order is part of what is played."""
    given = vectors(50)
    expected = np.zeros(4)
    for vector in given:
        expected += vector
    everybody = tuple(range(50))
    total, summed = opened(50).play((1, 0), everybody, None, lambda number: given[number])
    assert summed == 50
    np.testing.assert_array_equal(total, expected)
    total, _ = sealed(50).play((1, 0), everybody, None, lambda number: given[number].tobytes())
    np.testing.assert_array_equal(total, expected)
    backwards = np.zeros(4)
    for vector in given[::-1]:
        backwards += vector
    assert not np.array_equal(backwards, expected)


def test_messages_that_arrive_early_are_added_in_their_turn() -> None:
    given, server = vectors(), PlaintextServer(4)
    server.begin(NOW, (0, 1, 2), None)
    for number in (2, 0, 1):
        assert number in server.missing
        (data,) = PlaintextClient(at(number)).contribute(NOW, given[number])
        assert server.receive(number, data) == []
    np.testing.assert_array_equal(server.result(), given[0] + given[1] + given[2])


def test_contributions_are_made_one_at_a_time_when_their_turn_comes() -> None:
    driver, log = opened(), []

    def give(number: int) -> np.ndarray:
        assert driver.transcript is not None
        log.append((number, len(driver.transcript.lines)))
        return vectors()[number]

    driver.play((1, 0), (0, 1, 2), None, give)
    assert log == [(0, 0), (1, 1), (2, 2)]


@pytest.mark.parametrize("make", [opened, sealed])
def test_a_client_that_vanishes_ends_an_open_attempt_which_counts(make: type[LocalDriver]) -> None:
    driver = make()
    give = (lambda number: vectors()[number]) if make is opened else (lambda number: bytes(32))
    with pytest.raises(SiloVanished) as vanished:
        driver.play((1, 0), (0, 1, 2), None, give, Dropouts(before_input=frozenset({1})))
    assert vanished.value.silos == (1,)
    assert vanished.value.may_have_released
    driver.play((1, 1), (0, 2), None, give)
    with pytest.raises(ProtocolError, match="used once"):
        driver.play((1, 1), (0, 2), None, give)


def envelope(sender: int, values: np.ndarray, round_id: RoundId = NOW) -> bytes:
    message = PlaintextVector(values=values)
    return Envelope(round_id=round_id, sender=sender, recipient=SERVER, message=message).encode()


def test_what_does_not_belong_into_an_open_sum_is_refused_and_leaves_it_alone() -> None:
    server, given = PlaintextServer(4), vectors()
    server.begin(NOW, (0, 1), None)
    server.receive(0, envelope(0, given[0]))
    later = RoundId(run=RUN, round=2, attempt=0)
    for sender, data, reason in (
        (1, envelope(0, given[1]), "under another party's name"),
        (2, envelope(2, given[1]), "outside its cohort"),
        (0, envelope(0, given[1]), "twice"),
        (1, envelope(1, given[1], later), "another run, or to round 2"),
        (1, envelope(1, given[1][:3]), "4 finite numbers"),
        (1, b"", "at least"),
    ):
        with pytest.raises(ProtocolError, match=reason) as refused:
            server.receive(sender, data)
        assert refused.value.silo == sender
    with pytest.raises(ProtocolError, match=r"clients \[1\] are missing"):
        server.result()


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_a_vector_that_is_not_finite_is_refused(wrong: float) -> None:
    given = vectors()
    given[1] = np.full(4, wrong)
    with pytest.raises(ProtocolError, match="silo 1: did not send 4 finite numbers"):
        opened().play((1, 0), (0, 1, 2), None, lambda number: given[number])


def test_a_sealed_message_opens_for_its_sender_and_moment_alone() -> None:
    agreed = SealedSums(clients=2, length=4, decode=decode)
    server = agreed.server(RUN)
    clients = [agreed.client(at(number)) for number in range(2)]
    for number, client in enumerate(clients):
        first = client.announce()
        assert first is not None
        for to, reply in server.receive(number, first):
            assert clients[to].receive(reply) == []
    server.begin(NOW, (0, 1), None)
    given = vectors()[0].tobytes()
    (data,) = clients[0].contribute(NOW, given)
    content = Envelope.decode(data).message
    assert isinstance(content, SealedMessage)
    assert given not in content.sealed
    as_other = Envelope(round_id=NOW, sender=1, recipient=SERVER, message=content).encode()
    with pytest.raises(ProtocolError, match="silo 1: its message was refused"):
        server.receive(1, as_other)
    later = RoundId(run=RUN, round=2, attempt=0)
    server.begin(later, (0, 1), None)
    replayed = Envelope(round_id=later, sender=0, recipient=SERVER, message=content).encode()
    with pytest.raises(ProtocolError, match="silo 0: its message was refused"):
        server.receive(0, replayed)


@pytest.mark.parametrize("clients", [0, SERVER])
def test_clients_that_two_bytes_do_not_tell_apart_are_refused(clients: int) -> None:
    with pytest.raises(ProtocolError, match="are possible"):
        PlaintextSums(clients=clients, length=1)


def test_one_message_of_all_clients_is_the_sum_of_each_clients_own() -> None:
    """Bounded updates lie on a grid, so a simulation may add up what clients without noise would send."""
    setting = pins("dp-fed", whole=True).setting
    turn = RoundContext(
        setting=setting,
        model=torch.zeros(sum(int(np.prod(shape)) for shape in setting.shapes)),
        round_number=1,
        experiment=ExperimentRandomness(5),
        privacy=PrivacyRandomness.insecure(3),
    )
    parties = SimulatedParties.in_the_open(setting)
    work = CohortInputs(turn, parties.protocol_spec)
    drawn = work.begin(0)
    together, summed = parties.driver.play((1, 0), (0,), drawn, work.client_input)
    assert drawn is not None
    assert summed == 1 < drawn.sum()
    rows = setting.cohort.groups.user.astype(np.int64)
    apart = replace(setting, cohort=replace(setting.cohort, rows=rows, n_silos=setting.n_users))
    driver = SimulatedParties.in_the_open(apart).driver
    work = CohortInputs(replace(turn, setting=apart), driver.agreement)
    work.begin(0)
    assert driver.agreement.clients == setting.n_users
    alone, summed = driver.play((1, 0), tuple(range(setting.n_users)), drawn, work.client_input)
    assert summed == setting.n_users
    np.testing.assert_array_equal(together, alone)
    assert np.abs(together).max() > 0


@pytest.mark.parametrize("name", ["cepam-gaussian", "ldp-gaussian"])
def test_clients_are_trained_in_blocks_whose_size_changes_no_bit(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is that of one block: none is trained before the last one was sent. An attempt has noise of its own."""
    setting = pins(name, whole=True).setting
    length = sum(int(np.prod(shape)) for shape in setting.shapes)
    turn = RoundContext(
        setting=setting,
        model=torch.zeros(length),
        round_number=1,
        experiment=ExperimentRandomness(5),
        privacy=PrivacyRandomness.insecure(3),
    )

    def played(block: int, attempt: int = 0) -> tuple[np.ndarray, list[int]]:
        parties = SimulatedParties.in_the_open(setting)
        work, held = PerClientInputs(turn, parties.protocol_spec, block_elements=block * length), []
        drawn = work.begin(attempt)

        def give(number: int) -> Any:
            given = work.client_input(number)
            held.append(len(work._block))
            return given

        total, _ = parties.driver.play((1, 0), work.senders(()), drawn, give)
        return total, held

    whole, together = played(8)
    parts, apart = played(3)
    assert (together, apart) == ([7, 6, 5, 4, 3, 2, 1, 0], [2, 1, 0, 2, 1, 0, 1, 0])
    np.testing.assert_array_equal(parts, whole)
    assert (played(8, attempt=1)[0] != whole).any()  # of the same clients: all are drawn


def test_a_client_contributes_to_the_round_that_it_was_told_of_alone() -> None:
    """The moment that a caller names is the one that the server's message began."""
    agreed = MaskedSumSpec(clients=2, length=3, limit=10)
    driver = LocalDriver(agreed)
    other = RoundId(run=driver._run, round=2, attempt=0)
    for to, data in driver._server.begin(RoundId(run=driver._run, round=1, attempt=0), (0, 1), None):
        assert driver._clients[to].receive(data) == []
    with pytest.raises(ProtocolError, match="silo 0: round 2, attempt 0 has not begun"):
        driver._clients[0].contribute(other, np.zeros(3, dtype=np.int64))


@pytest.mark.parametrize("wrong", [0, 1])
def test_clients_that_end_with_different_results_end_the_attempt(wrong: int) -> None:
    pytest.importorskip("tenseal")
    plan = PartialPlan(silos=2, length=4, ratio=0.5, clear_limit=9, hidden_limit=9, ballots="none")
    driver = LocalDriver(PartialEncryptionSpec(plan=plan))
    result = driver._clients[wrong].result

    def altered() -> PartialResult:
        right = result()
        return replace(right, clear=right.clear + 1)

    driver._clients[wrong].result = altered  # type: ignore[method-assign]
    given = PartialInputs(values=np.arange(4.0), message=np.arange(4.0))
    with pytest.raises(ProtocolError, match="silo 1: ends with another sum"):
        driver.play((1, 0), (0, 1), None, lambda number: given)
