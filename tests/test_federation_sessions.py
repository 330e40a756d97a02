"""Sessions under nonces of both sides: what is replayed changes nothing, and a second run waits for the first."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedveil.federation.audit.run_record import STATE
from fedveil.federation.coordinator import CoordinatorParty
from fedveil.federation.session_plan import LEASE_SECONDS, SessionAdmission, session_name, session_run
from fedveil.federation.silo_ledger import LEDGER
from fedveil.files import parse_json
from fedveil.privacy.ledger import read_entries
from fedveil.protocols.session_messages import (
    Declined,
    GlobalModel,
    Goodbye,
    Hello,
    Join,
    ProtocolMessage,
    Ready,
    RoundTask,
    SessionMessage,
)
from fedveil.run.folder.run_folder import RunFolder
from tests.federation_world import RUN, World, asked, population
from tests.test_federation_grammar import state_of

MASKED = {"protection": {"name": "secure-aggregation"}}
RECOVERING = {"protection": {"name": "secure-aggregation", "on_dropout": "recover", "max_dropouts": 1}}
RATE = 0.25


class Replayer:
    """Carries messages of several runs over the same silos, and between them every message that it ever saw, again."""

    def __init__(self, world: World, seed: int) -> None:
        self.world, self.random = world, random.Random(seed)
        self.down: list[tuple[int, bytes]] = []
        self.up: list[tuple[int, bytes]] = []
        self.replayed = self.carried = 0

    def replay(self, coordinators: list[CoordinatorParty]) -> None:
        """At the rate, send an old message to its silo, and an old answer to every coordinator."""
        while self.random.random() < RATE and self.down:
            self.replayed += 1
            number, data = self.random.choice(self.down)
            answer = self.world.party(number).receive(data)
            for coordinator in coordinators:
                coordinator.receive(number, self.random.choice([answer, dict(self.up)[number]]))
                coordinator.receive(*self.random.choice(self.up))

    def play(self, coordinators: list[CoordinatorParty], most: int = 200) -> int:
        """Carry until all runs have ended; return how many exchanges that took."""
        for turn in range(1, most):
            waiting = [one for one in coordinators if not one.is_finished]
            if not waiting:
                return turn
            for coordinator in waiting:
                for number, data in coordinator.messages():
                    self.replay(waiting)
                    answer = self.world.party(number).receive(data)
                    self.replay(waiting)
                    coordinator.receive(number, answer)
                    self.carried += 1
                    self.down.append((number, data))
                    self.up.append((number, answer))
                if coordinator.is_finished:
                    for number, data in coordinator.farewells:
                        party = self.world.party(number)
                        party.receive(data)
        raise AssertionError("a run does not end")


def another(world: World, name: str) -> CoordinatorParty:
    """A coordinator with the same key and another run."""
    world.run_folder = RunFolder.create(world.folder, world.experiment.model_copy(update={"name": name}))
    return world.coordinate()


@pytest.mark.parametrize("changes", [MASKED, RECOVERING], ids=["masked", "recovering"])
def test_two_runs_and_every_message_of_earlier_ones_again(changes: dict[str, Any], tmp_path: Path) -> None:
    world = World(tmp_path, asked(rounds=3, **changes), population())
    replayer = Replayer(world, seed=4)
    alone = replayer.play([world.coordinate()])
    both = [another(world, "second"), another(world, "third")]
    turns = replayer.play(both)
    for coordinator in both:
        assert coordinator.outcome is not None
        assert coordinator.outcome.stopped is None
        assert coordinator.outcome.rounds == 3
    assert turns <= 2 * alone + 1
    assert replayer.replayed > replayer.carried * RATE / 2
    for number in range(3):
        entries = read_entries(tmp_path / f"state-{number}" / LEDGER)
        assert [entry.round for entry in entries] == [1, 2, 3] * 3
        assert len({entry.run for entry in entries}) == 3
    world.close()


def test_no_old_message_changes_a_silo(tmp_path: Path) -> None:
    """All messages of a run, one after another, in every state of the next one: known are those of its own exchange."""
    world = World(tmp_path, asked(rounds=2, **MASKED), population())
    replayer = Replayer(world, seed=1)
    replayer.play([world.coordinate()])
    old = [data for number, data in replayer.down if number == 0]
    coordinator = another(world, "next")
    party = world.party()
    while not coordinator.is_finished:
        before = state_of(world, 0)
        for data in old:
            message = world.answer(0, party.receive(data))
            assert party._last is not None
            joined = party._last.run == coordinator.run
            assert (
                isinstance(message.parts[0], Ready) or not joined
            )  # till then the old session answers as it did
        assert state_of(world, 0) == before
        world.exchange(coordinator)
    world.close()


def test_an_old_word_of_a_silo_begins_nothing(tmp_path: Path) -> None:
    """A silo's old nonce, or its word that it is in no session, ends no session of the run that it was said in."""
    world = World(tmp_path, asked(rounds=2), population())
    coordinator = world.coordinate()
    party = world.party()
    ((_, hello), *_) = coordinator.messages()
    stale = party.receive(hello)
    world.exchange(coordinator)  # nonces
    before = coordinator.messages()
    coordinator.receive(0, stale)
    assert coordinator.messages() == before
    world.exchange(coordinator)  # terms
    before = coordinator.messages()
    coordinator.receive(0, stale)
    coordinator.receive(0, party.receive(hello))
    assert coordinator.messages() == before
    coordinator.close()
    world.close()


def task(number: int = 1) -> tuple[SessionMessage, ...]:
    return GlobalModel(values=np.zeros(4, dtype=np.float32)), RoundTask(round=number)


def greet(world: World, run: bytes) -> Ready:
    (here,) = world.tell(Hello(), session=9, run=run)
    assert isinstance(here, Ready)
    return here


def test_another_run_waits_from_the_first_round_to_the_last(tmp_path: Path) -> None:
    now = [1000.0]
    world = World(tmp_path, asked(rounds=2), population(), clock=lambda: now[0])
    other = bytes(16)
    world.tell(world.terms(asked(rounds=2)))
    assert not greet(world, other).busy  # nothing was asked for yet
    assert isinstance(world.tell(*task(), number=1)[0], ProtocolMessage)
    assert greet(world, other).busy == LEASE_SECONDS
    (refused,) = world.tell(world.terms(asked(rounds=2)), run=other)
    assert isinstance(refused, Ready)
    assert not greet(world, RUN).busy  # the same run resumes at once
    now[0] += 400.0
    assert greet(world, other).busy == 200
    world.tell(*task(), number=2)  # every message of the session renews it
    assert greet(world, other).busy == LEASE_SECONDS
    world.tell(*task(2), number=3)
    assert not greet(world, other).busy  # its last round is over
    world.tell(world.terms(asked(rounds=2)), session=2)
    world.tell(*task(2), session=2, number=1)
    world.tell(world.terms(asked(rounds=2)), run=other, session=3)
    assert isinstance(world.tell(*task(), run=other, session=3, number=1)[0], ProtocolMessage)
    assert greet(world, RUN).busy
    world.tell(Goodbye(), run=other, session=3, number=2)
    assert not greet(world, RUN).busy
    assert isinstance(world.tell(*task(2), run=other, session=3, number=3)[0], Ready)
    now[0] += LEASE_SECONDS
    world.close()


def test_a_silo_whose_coordinator_died_is_free_after_a_while(tmp_path: Path) -> None:
    now = [0.0]
    world = World(tmp_path, asked(rounds=2), population(), clock=lambda: now[0])
    world.tell(world.terms(asked(rounds=2)))
    world.tell(*task(), number=1)
    now[0] += LEASE_SECONDS
    assert isinstance(world.tell(world.terms(asked(rounds=2)), run=bytes(16))[0], Join)
    world.close()


def test_terms_join_under_the_present_nonces_alone(tmp_path: Path) -> None:
    world = World(tmp_path, asked(), population())
    admission = SessionAdmission()
    terms = replace(
        world.terms(asked()),
        opened=b"c" * 16,
        nonces=((0, admission.ready_message(RUN).nonce), (2, b"o" * 16)),
    )
    name = session_name(RUN, terms.opened, terms.nonces)
    assert admission.admits(0, RUN, name, terms)
    for silo, run, session, changed in (
        (2, RUN, name, terms),
        (1, RUN, name, terms),
        (0, bytes(16), name, terms),
        (0, RUN, bytes(16), terms),
        (0, RUN, name, replace(terms, opened=b"d" * 16)),
        (0, RUN, name, replace(terms, nonces=terms.nonces[:1])),
    ):
        assert not admission.admits(silo, run, session, changed)
    admission.admit()
    assert not admission.admits(0, RUN, name, terms)
    # the bytes of version 3 stay
    fixed = replace(terms, nonces=((0, b"s" * 16),))
    assert session_name(RUN, fixed.opened, fixed.nonces).hex() == "d6054096ab42249cd3ef62495a722eda"
    assert (
        session_run(bytes(16), replace(fixed, experiment="{}", membership=bytes(32)).digest).hex()
        == "a5a8713498aa000a62ae0cba5b2de9b3"
    )
    world.close()


def test_a_folder_names_its_run_and_no_session(tmp_path: Path) -> None:
    world = World(tmp_path, asked(), population())
    coordinator = world.coordinate()
    document = parse_json((world.run_folder / STATE).read_bytes(), STATE, ValueError)  # type: ignore[arg-type]
    assert document == {"schema_version": 1, "run": coordinator.run.hex()}
    coordinator.close()
    again = world.coordinate()
    assert again.run == coordinator.run
    assert again._session != coordinator._session
    again.close()
    world.close()


def test_what_answers_a_knock_with_something_else_ends_the_run(tmp_path: Path) -> None:
    world = World(tmp_path, asked(), population())
    coordinator = world.coordinate()
    number, data = coordinator.messages()[0]
    message = world.open_message(number, data)
    coordinator.receive(number, message.answer(Join(heads=())).seal(world.keys[number]))
    assert coordinator.outcome is not None
    assert "silo0: sent a message of another shape" in (coordinator.outcome.stopped or "")
    assert not any(isinstance(part, Declined) for part in message.parts)
    world.close()
