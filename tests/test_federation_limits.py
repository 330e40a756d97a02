"""What a party does for another that asks too much: no work beyond a policy, no session for ever, no queue held."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedveil.errors import ConfigError, ProtocolError, RunFolderError
from fedveil.federation.coordinator import CoordinatorParty
from fedveil.federation.exchange import ReplyKind, check_lengths
from fedveil.federation.ledger_heads import NONE
from fedveil.federation.policy import CpuQuota, Deadline, Policy
from fedveil.federation.silo import SiloParty, Standing
from fedveil.federation.silo_ledger import LEDGER
from fedveil.federation.terms import canonical
from fedveil.federation.transport.interface import BEGINNING, LARGEST_OPENING
from fedveil.privacy.ledger import Note, read_entries, read_lines
from fedveil.protocols.refusals import Code, Refusal, RefusalError
from fedveil.protocols.session_messages import (
    Attestation,
    Declined,
    GlobalModel,
    Hello,
    InProgress,
    Join,
    Ready,
    RoundTask,
    SessionMessage,
)
from fedveil.registry import names
from tests.federation_world import TESTING, World, asked, population

MASKED = {"name": "secure-aggregation"}
BUDGETED = Policy(
    epsilon=1e6,
    clip=1.0,
    accountant="rdp",
    methods=names("methods"),
    protections=("none", "secure-aggregation", "private-weighting"),
    trust_silos=True,
    trust_coordinator=True,
)
"""A policy under which every join is accounted."""


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path, asked(rounds=2), population())
    yield made
    made.close()


def why(parts: tuple[SessionMessage, ...]) -> Refusal:
    (part,) = parts
    assert isinstance(part, Declined), part
    return part.why


# --- work that a policy does not allow -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "changes", "expected"),
    [
        ({}, {"rounds": 10**8}, Refusal(Code.ROUNDS, (1e8, 10_000.0))),
        ({"max_rounds": 3}, {}, Refusal(Code.ROUNDS, (4.0, 3.0))),
        ({}, {"local": {"epochs": 10**8}}, Refusal(Code.EPOCHS, (1e8, 100.0))),
        ({"max_epochs": 1}, {"local": {"epochs": 2}}, Refusal(Code.EPOCHS, (2.0, 1.0))),
        ({"max_parameters": 3}, {}, Refusal(Code.LARGE_MODEL, (4.0, 3.0))),
    ],
)
def test_a_run_of_more_work_than_the_policy_allows_is_not_joined(
    policy: dict[str, Any], changes: dict[str, Any], expected: Refusal, tmp_path: Path
) -> None:
    world = World(tmp_path, asked(**changes), population(), TESTING.model_copy(update=policy))
    assert why(world.tell(world.terms())) == expected
    assert not read_entries(tmp_path / "state-0" / LEDGER)
    world.close()


def test_what_is_just_allowed_is_joined(tmp_path: Path) -> None:
    tight = TESTING.model_copy(update={"max_rounds": 4, "max_epochs": 2, "max_parameters": 4})
    world = World(tmp_path, asked(), population(), tight)
    assert isinstance(world.tell(world.terms(asked()))[0], Join)
    world.close()


def test_training_beyond_its_deadline_ends_the_session_and_stays_charged(tmp_path: Path) -> None:
    world = World(tmp_path, asked(), population(), TESTING.model_copy(update={"round_seconds": 1e-6}))
    world.play()
    assert "the round took longer than" in (world.outcome.stopped or "")
    assert world.charged(0) == [1]
    world.close()


def test_a_deadline_is_looked_at_whenever_training_says_how_far_it_is() -> None:
    now = [100.0]
    deadline = Deadline(60.0, clock=lambda: now[0])
    now[0] += 59.9
    deadline(1, 2)
    now[0] += 0.1
    with pytest.raises(RefusalError, match="limit of 60 s"):
        deadline(1, 2)


def test_a_message_is_judged_by_its_beginning(world: World) -> None:
    """A message of the session may hold a model and protocol messages; any other is short, whoever signed it."""
    coordinator, party = world.coordinate(), world.silos[0]
    assert party is not None
    for step in range(3):
        signed_message = dict(coordinator.messages())[0]
        assert len(signed_message) <= party.longest(signed_message[:BEGINNING])
        assert (party.longest(signed_message[:BEGINNING]) > LARGEST_OPENING) == (step == 2)
        assert party.longest(bytes(BEGINNING)) == party.longest(b"") == LARGEST_OPENING
        for data in (
            bytes(LARGEST_OPENING + 1),
            signed_message + bytes(party.longest(signed_message) + 1 - len(signed_message)),
        ):
            with pytest.raises(ProtocolError, match=f"above the limit of {party.longest(data)}"):
                party.receive(data)
        world.exchange(coordinator)
    coordinator.close()


def test_a_run_whose_opening_nobody_would_read_is_not_begun(world: World) -> None:
    coordinator = world.coordinate()
    agreement, plan = coordinator._agreement, coordinator._plan
    coordinator.close()
    with pytest.raises(ProtocolError, match="a message that begins this run would have"):
        check_lengths(agreement, plan, " " * LARGEST_OPENING)


def numbers(document: Any, place: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], float]]:
    """Every number of an experiment, by its place."""
    if isinstance(document, dict):
        for key, value in document.items():
            yield from numbers(value, (*place, key))
    elif isinstance(document, int | float) and not isinstance(document, bool):
        yield place, document


def with_number(document: Any, place: tuple[str, ...], value: float) -> Any:
    key, *rest = place
    return document | {key: with_number(document[key], tuple(rest), value) if rest else value}


@pytest.mark.parametrize(
    "changes",
    [
        {"method": {"user_sampling_rate": 0.5}, "protection": MASKED},
        {"method": {"name": "uldp-avg-w"}, "protection": {"name": "private-weighting", "n_max": 30}},
    ],
    ids=["masked", "blind"],
)
def test_no_number_of_an_experiment_makes_joining_dear_or_untyped(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    """Each takes about a hundredth of a second: 1 s is the limit of any message, and 64 MiB that of all together."""
    experiment = asked(privacy={"insecure_seed": None}, **changes)
    world = World(tmp_path, experiment, population(), BUDGETED)
    document = json.loads(canonical(experiment))
    tried = 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for place, value in numbers(document):
        for other in (0, 10**6, 2**52) if isinstance(value, int) else (5e-324, 1e-300, 1e-9, 1e9, 1.7e308):
            text = json.dumps(with_number(document, place, other), sort_keys=True, separators=(",", ":"))
            tried += 1
            terms = replace(world.terms(experiment), experiment=text)
            began = time.process_time()
            answer = world.tell(terms, run=tried.to_bytes(16, "big"))[0]
            assert time.process_time() - began < 1.0, (place, other)
            assert not isinstance(answer, Declined) or answer.why.code is not Code.OWN_RECORDS, (place, other)
    assert tried > 50
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10
    world.close()


# --- messages that lead to no charge ----------------------------------------------------------------------------


def test_a_quota_counts_what_led_to_no_charge(tmp_path: Path) -> None:
    now = [0.0]
    own = CpuQuota(tmp_path / "cpu.json", clock=lambda: now[0])
    own.begin()
    own.count(6.0, "answered")  # an expensive setup, and the round that it was for
    own.count(50.0, "charged")
    own.count(30.0, "answered")
    own.check(10.0)
    own.begin()
    own.count(6.0, "answered")  # another, for nothing
    own.begin()
    own.count(3.9, "refused")
    own.check(10.0)
    own.count(0.1, "answered")
    with pytest.raises(ProtocolError, match="10 s of a processor"):
        own.check(10.0)
    now[0] += 86400.0 + 3600.0
    own.check(10.0)


def test_any_day_counts_and_not_a_day_that_begins_with_the_process(tmp_path: Path) -> None:
    """A window that is emptied at once gives twice the limit around its end; a restart gives nothing anew."""
    now = [7 * 86400.0 - 60.0]  # a minute before midnight, say

    def quota() -> CpuQuota:
        return CpuQuota(tmp_path / "cpu.json", clock=lambda: now[0])

    own = quota()
    own.count(10.0, "refused")
    for later in (120.0, 3600.0, 20 * 3600.0, 3 * 3600.0 - 120.0):  # in all less than a day
        now[0] += later
        for silo in (own, quota()):
            with pytest.raises(ProtocolError, match="10 s of a processor"):
                silo.check(10.0)
    now[0] += 2 * 3600.0
    own.check(10.0)
    quota().check(10.0)
    (tmp_path / "cpu.json").write_text('{"1": -5.0}')
    with pytest.raises(RunFolderError, match=r"cpu\.json is damaged"):
        CpuQuota(tmp_path / "cpu.json")


@pytest.mark.parametrize("signed_message", ["terms", "refused", "hello"])
def test_a_silo_reads_no_message_once_its_day_is_spent(signed_message: str, tmp_path: Path) -> None:
    """Whatever it is that leads nowhere; the terms that are joined and left again among them."""
    world = World(tmp_path, asked(), population(), TESTING.model_copy(update={"uncharged_cpu_seconds": 0.05}))
    say: Callable[[int], tuple[SessionMessage, ...]] = {
        "terms": lambda number: world.tell(world.terms(asked()), run=number.to_bytes(16, "big")),
        "refused": lambda number: world.tell(
            world.terms(asked(rounds=10**6)), run=number.to_bytes(16, "big"), session=2
        ),
        "hello": lambda number: world.tell(Hello(), number=number),
    }[signed_message]

    def spend() -> None:
        for number in range(5000):
            say(number)

    assert say(5000)
    with pytest.raises(ProtocolError, match="uncharged_cpu_seconds"):
        spend()
    with pytest.raises(ProtocolError, match="uncharged_cpu_seconds"):
        world.tell(world.terms(asked()))
    world.close()


def test_a_charged_round_that_is_asked_for_again_and_again_is_not_free(tmp_path: Path) -> None:
    """In the open no key forbids to repeat it in its session: nothing is charged, and it is work all the same."""
    policy = TESTING.model_copy(update={"uncharged_cpu_seconds": 0.05})
    world = World(tmp_path, asked(), population(), policy)
    assert isinstance(world.tell(world.terms(asked()))[0], Join)
    model = GlobalModel(values=np.zeros(4, dtype=np.float32))

    def ask_again() -> None:
        for number in range(2, 5000):
            assert isinstance(world.tell(model, RoundTask(round=1), number=number)[-1], Attestation)

    assert isinstance(world.tell(model, RoundTask(round=1), number=1)[-1], Attestation)
    with pytest.raises(ProtocolError, match="uncharged_cpu_seconds"):
        ask_again()
    assert world.charged(0) == [1]
    world.close()


def test_a_run_that_is_played_costs_nothing_of_it(tmp_path: Path) -> None:
    world = World(tmp_path, asked(protection=MASKED), population())
    world.play()
    for party in world.silos:
        assert party is not None
        assert party._cpu_quota._paid
        assert sum(party._cpu_quota._spent.values()) + party._cpu_quota._unpaid < 1.0
    world.close()


# --- a silo that holds a coordinator ---------------------------------------------------------------------------


def answer_of(world: World, silo: int, data: bytes, *parts: SessionMessage) -> bytes:
    """What a silo that lies answers to a message."""
    signed_message = world.open_message(silo, data)
    return signed_message.answer(*parts).seal(world.keys[silo])


def carried(
    world: World, coordinator: CoordinatorParty, lie: Callable[[int, bytes], bytes | None]
) -> set[ReplyKind]:
    """Carry the messages that wait; return what the answers were to the coordinator."""
    heard = set()
    for number, data in coordinator.messages():
        heard.add(coordinator.receive(number, lie(number, data) or world.party(number).receive(data)))
    return heard


def test_a_refusal_while_the_next_message_is_made_ends_the_run_and_no_process(tmp_path: Path) -> None:
    """What silos sent may lead to a message that the session's grammar does not have, such as one without a relay."""
    world = World(tmp_path, asked(rounds=2, protection=MASKED), population())
    coordinator = world.coordinate()
    world.exchange(coordinator)  # hello: now the terms are offered

    def refused(parts: object) -> None:
        raise RefusalError(Code.SHAPE)

    coordinator._conversations[1].ask = refused  # type: ignore[method-assign]
    world.exchange(coordinator)
    assert coordinator.outcome is not None
    assert Code.SHAPE.template in (coordinator.outcome.stopped or "")
    coordinator.close()
    world.close()


class Impatient(CoordinatorParty[Any]):
    """A coordinator that stops after few sessions."""

    most_left = 8


@pytest.mark.parametrize("recovers", [False, True])
def test_a_silo_that_leaves_every_session_does_not_hold_the_run(recovers: bool, tmp_path: Path) -> None:
    most = Impatient.most_left
    protection = MASKED | ({"on_dropout": "recover", "max_dropouts": 1} if recovers else {})
    world = World(tmp_path, asked(rounds=2, protection=protection), population(), party=Impatient)
    coordinator = world.coordinate()
    here = Ready(nonce=bytes(16), busy=0)

    def lie(number: int, data: bytes) -> bytes | None:
        asks = coordinator._exchange is not None and coordinator._exchange.hellos
        return answer_of(world, number, data, here) if number == 1 and not asks else None

    turns = 0
    while not coordinator.is_finished:
        carried(world, coordinator, lie)
        turns += 1
        assert turns < 4 * most
    assert coordinator.outcome is not None
    stopped = coordinator.outcome.stopped
    if recovers:  # the others go on without it
        assert (stopped, coordinator.outcome.rounds) == (None, 2)
    else:
        assert stopped == f"silo silo1 left {most} sessions of this run in which no round ended"
        assert turns >= most
    coordinator.close()
    world.close()


def test_a_silo_that_says_for_ever_that_it_is_busy_counts_as_silent(world: World) -> None:
    """The carrier's patience runs out: such a word is nothing that it waited for."""
    coordinator = world.coordinate()
    busy = Ready(nonce=bytes(16), busy=600)
    said = carried(
        world, coordinator, lambda number, data: answer_of(world, 1, data, busy) if number == 1 else None
    )
    assert said == {ReplyKind.ANSWER, ReplyKind.NOTHING}
    for _ in range(3):
        again = carried(world, coordinator, lambda number, data: answer_of(world, 1, data, busy))
        assert again == {ReplyKind.NOTHING}
    assert [number for number, _ in coordinator.messages()] == [1]
    coordinator.close()


# --- signs of life ---------------------------------------------------------------------------------------------


def test_a_silo_at_work_says_so_and_nothing_of_its_work(world: World) -> None:
    """The answer is awaited on; the word is of the message's own exchange, and changes nothing on either side."""
    coordinator = world.coordinate()
    world.exchange(coordinator)
    world.exchange(coordinator)
    (number, data), *others = coordinator.messages()
    party = world.party(number)
    word = party.in_progress_message(data)
    opened = world.answer(number, word)
    assert opened.parts == (InProgress(),)
    assert opened.head == NONE
    assert not read_entries(world.folder / f"state-{number}" / LEDGER)
    assert coordinator.receive(number, word) is ReplyKind.SIGN
    assert coordinator.awaited_silos == (0, 1, 2)
    with pytest.raises(ProtocolError):
        party.in_progress_message(others[0][1])  # a message to another silo
    assert coordinator.receive(number, party.receive(data)) is ReplyKind.ANSWER
    assert coordinator.receive(number, word) is ReplyKind.NOTHING
    assert coordinator.awaited_silos == (1, 2)
    coordinator.close()


def test_a_silo_that_is_left_behind_is_not_back_because_it_works(tmp_path: Path) -> None:
    protection = MASKED | {"on_dropout": "recover", "max_dropouts": 1}
    world = World(tmp_path, asked(rounds=2, protection=protection), population())
    coordinator = world.coordinate()
    messages = dict(coordinator.messages())
    assert coordinator.drop_missing((2,)) == ("silo2",)
    party = world.party(2)
    assert coordinator.receive(2, party.in_progress_message(messages[2])) is ReplyKind.NOTHING
    assert not coordinator._absent.n_returned
    assert 2 in dict(coordinator.messages())
    coordinator.receive(2, party.receive(messages[2]))
    assert coordinator._absent.n_returned == 1
    coordinator.close()
    world.close()


# --- what holds now ----------------------------------------------------------------------------------------------


def standing_of(world: World, read: Callable[[], Standing]) -> None:
    """Have silo 0 be served by files that say what ``read`` returns."""
    world.party().close()
    world.silos[0] = SiloParty(
        standing=read, number=0, identity=world.keys[0], share=world.share(0), state=world.folder / "state-0"
    )


def test_a_stricter_policy_holds_from_the_next_session(world: World) -> None:
    now = [world.policy]
    standing_of(world, lambda: Standing(membership=world.membership, policy=now[0]))
    assert isinstance(world.tell(world.terms())[0], Join)
    now[0] = world.policy.model_copy(update={"clip": 0.1})
    assert why(world.tell(world.terms(), session=2)).code is Code.CLIP
    now[0] = world.policy.model_copy(update={"clip": 0.75})
    assert isinstance(world.tell(world.terms(), session=3)[0], Join)
    noted = [line for line in read_lines(world.folder / "state-0" / LEDGER) if isinstance(line, Note)]
    policies = [json.loads(note.text)["clip"] for note in noted if note.kind == "policy"]
    assert policies == [1.0, 0.75]  # nothing was joined under the one between


@pytest.mark.parametrize("fault", ["unreadable", "another"])
def test_a_membership_that_does_not_hold_any_more_ends_what_a_served_silo_joins(
    fault: str, world: World
) -> None:
    """Revoked, run out, or sealed anew while the silo is served: nothing is joined, and nothing charged."""
    sealed = [world.membership]

    def read() -> Standing:
        if not sealed:
            raise ConfigError("membership.toml: its validity ended")
        return Standing(membership=sealed[0], policy=world.policy)

    standing_of(world, read)
    assert isinstance(world.tell(world.terms())[0], Join)
    sealed[:] = (
        [] if fault == "unreadable" else [replace(world.membership, serial=world.membership.serial + 1)]
    )
    assert why(world.tell(world.terms(), session=2)).code is Code.STANDING
    assert not read_entries(world.folder / "state-0" / LEDGER)


# --- memory ------------------------------------------------------------------------------------------------------

LIMITED = """\
import sys
from pathlib import Path
from types import SimpleNamespace
from fedveil.federation.hosts.silo_service import limit_memory
limit_memory(SimpleNamespace(policy=SimpleNamespace(memory_mb=1024)))
import numpy
try:
    numpy.ones(1 << 28)
except MemoryError:
    sys.exit(0)
sys.exit(1)
"""


@pytest.mark.slow
def test_a_served_silo_takes_no_more_memory_than_its_policy_allows() -> None:
    assert subprocess.run([sys.executable, "-c", LIMITED], check=False, env=os.environ).returncode == 0
