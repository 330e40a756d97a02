"""Which messages a silo and the coordinator take: the grammar of a session, and what tries to get around it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from enum import Enum
from functools import cached_property
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedveil.crypto.key_agreement import RoundId
from fedveil.data.records import Population
from fedveil.federation import policy
from fedveil.federation.grammar import ENDINGS, OPENINGS, OUTSIDE, SIGNS, Grammar
from fedveil.federation.signed_message import SignedMessage
from fedveil.federation.silo_ledger import LEDGER
from fedveil.privacy.claims import Role
from fedveil.privacy.ledger import read_entries
from fedveil.protocols.messages import KINDS, SERVER, Envelope
from fedveil.protocols.plaintext_sums import PlaintextVector
from fedveil.protocols.protocol import ExchangeStep, Kind, message_shape
from fedveil.protocols.refusals import Code, Refusal
from fedveil.protocols.session_messages import (
    PARTS,
    Declined,
    Finalize,
    GlobalModel,
    Goodbye,
    InProgress,
    ProtocolMessage,
    Ready,
    RoundTask,
    RunPart,
    SamplingCommitment,
    SessionMessage,
    Terms,
    UserTotals,
)
from tests.federation_world import MOVING, TESTING, World, asked, clients, population, small_keys
from tests.runs import files, same_model
from tests.slow_cases import fast_every

MASKED = {"protection": {"name": "secure-aggregation"}}
BY_RECORDS = {"name": "uldp-avg-w"}
SAMPLED = BY_RECORDS | {"user_sampling_rate": 0.5}
BLIND = {"name": "private-weighting", "n_max": 30}
ENCRYPTED = {"name": "partial-encryption", "ratio": 0.5}
ALL = TESTING.model_copy(
    update={
        "protections": ("none", "secure-aggregation", "private-weighting", "partial-encryption"),
        "trust_silos": True,
    }
)
needs_tenseal = pytest.mark.skipif(find_spec("tenseal") is None, reason="needs the extra rlwe")
CASES: dict[str, dict[str, Any]] = {
    "open": {"method": {"user_sampling_rate": 0.5}},
    "open, whole silos": {"method": {"name": "uldp-naive"}},
    "open, by records": {"method": BY_RECORDS},
    "bytes": {"method": BY_RECORDS, "channel": {"name": "lrsuq"}},
    "clients": {"method": {"name": "dp-fed", "client_sampling_rate": 0.5}, "data": {"n_users": 3}},
    "masked": MASKED,
    "masked, by records": {"method": SAMPLED | {"clip": MOVING}, **MASKED},
    "recovering": {"protection": {"name": "secure-aggregation", "on_dropout": "recover", "max_dropouts": 1}},
    "blind": {"method": BY_RECORDS, "protection": BLIND},
    "blind, sampled": {"method": SAMPLED, "protection": BLIND},
    "blind, by transfer": {"method": SAMPLED, "protection": BLIND | {"private_sampling": True}},
    "encrypted": {"method": BY_RECORDS, "protection": ENCRYPTED},
    "encrypted, masked votes": {"protection": ENCRYPTED | {"votes": "secagg"}},
    "encrypted, whole": {"protection": ENCRYPTED | {"ratio": 1.0}},
}
IDS = [pytest.param(name, marks=[needs_tenseal] if "encrypted" in name else [], id=name) for name in CASES]


@pytest.fixture(autouse=True)
def _small_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    small_keys(monkeypatch)


def guessed(world: World, users: int) -> tuple[list[int], int]:
    """A silo's counts by bisection over totals that it takes or refuses, and how many messages that took."""
    world.tell(world.terms())
    found, messages = [], 0
    for user in range(users):
        low, high = 0, 64
        while low < high:
            messages += 1
            middle = (low + high) // 2
            totals = np.full(users, 1000)
            totals[user] = middle
            taken = not any(
                isinstance(part, Declined) for part in world.tell(UserTotals(counts=totals), number=messages)
            )
            low, high = (low, middle) if taken else (middle + 1, high)
        found.append(low)
    return found, messages


@pytest.mark.parametrize(
    "changes", [{}, MASKED, {"method": {"name": "uldp-avg-w"}}], ids=["open", "masked", "weights"]
)
def test_totals_are_no_oracle_for_counts(changes: dict[str, Any], tmp_path: Path) -> None:
    """39 messages told all six counts of a silo before messages had a grammar."""
    held = population()
    world = World(tmp_path, asked(**changes), held)
    truth = np.bincount(held.train.user[held.train.silo == 0], minlength=6).tolist()
    found, messages = guessed(world, 6)
    assert messages > 30
    assert found != truth
    assert len(set(found)) == 1  # every message was answered alike
    world.close()


def test_totals_change_no_weight_of_a_method_without_them(tmp_path: Path) -> None:
    """Each silo was told that it alone has records: its weights became 1, and the sum 3.000 times what was charged."""
    silent = asked(method={"noise_multiplier": 0.0})
    held = population()
    sums = {}
    for name in ("honest", "lying"):
        (tmp_path / name).mkdir()
        world = World(tmp_path / name, silent, held, TESTING)
        task = (GlobalModel(values=np.zeros(4, dtype=np.float32)), RoundTask(round=1))
        total = np.zeros(4)
        for silo in range(3):
            world.tell(world.terms(), silo=silo)
            own = np.bincount(held.train.user[held.train.silo == silo], minlength=6)
            if name == "lying":
                world.tell(UserTotals(counts=own), silo=silo, number=1)
            part, _ = world.tell(*task, silo=silo, number=2)
            assert isinstance(part, ProtocolMessage)
            content = Envelope.decode(part.message).message
            assert isinstance(content, PlaintextVector)
            total += content.values
        sums[name] = total
        world.close()
    ratio = float(np.linalg.norm(sums["lying"]) / np.linalg.norm(sums["honest"]))
    assert f"{ratio:.3f}" == "1.000"


def test_other_weights_than_the_promised_ones_are_not_trained_with(tmp_path: Path) -> None:
    """The second lock: whatever changed the weights, a round is charged and trained with those of its guarantee."""
    world = World(tmp_path, asked(), population())
    world.tell(world.terms())
    party = world.party()
    assert party._session is not None
    party._session.work.prepared.setting.weights.mul_(1.0 + 2.0**-52)
    (answer,) = world.tell(GlobalModel(values=np.zeros(4, dtype=np.float32)), RoundTask(round=1), number=1)
    assert isinstance(answer, Declined)
    assert answer.why.code is Code.WEIGHTS
    assert not list(read_entries(tmp_path / "state-0" / LEDGER))
    world.close()


# --- every kind in every state -------------------------------------------------------------------------------


def held_by(name: str) -> Population:
    return clients() if name == "clients" else population()


def made(name: str, folder: Path) -> World:
    folder.mkdir(exist_ok=True)
    return World(folder, asked(rounds=2, **CASES[name]), held_by(name), ALL)


class Exchange:
    """One message of an honest run, on its way to a silo, and the silo's answer."""

    def __init__(self, world: World, silo: int, data: bytes) -> None:
        self.world, self.silo, self.data = world, silo, data
        self.message = world.open_message(silo, data)
        self.answered: SignedMessage | None = None
        assert world.coordinator is not None
        self.round = world.coordinator._part.checkpoint.round + 1

    def to_silo(self, *parts: SessionMessage) -> tuple[SessionMessage, ...]:
        """What the silo says to another message in this one's place."""
        return self.world.answer(
            self.silo,
            self.world.party(self.silo).receive(replace(self.message, parts=parts).seal(self.world.key)),
        ).parts

    def from_silo(self, *parts: SessionMessage) -> None:
        """Have the coordinator read another answer in this one's place."""
        assert self.world.coordinator is not None
        data = self.message.answer(*parts).seal(self.world.keys[self.silo])
        self.world.coordinator.receive(self.silo, data)

    def deliver(self) -> bytes:
        """Carry the message; return the answer, not yet carried."""
        reply = self.world.party(self.silo).receive(self.data)
        self.answered = self.world.answer(self.silo, reply)
        return reply

    @cached_property
    def terms(self) -> Terms:
        return self.world.terms()

    @cached_property
    def session(self) -> bytes:
        assert self.world.coordinator is not None
        return self.world.coordinator._session_run

    def addressed_all(self, samples: dict[Kind, SessionMessage], *, up: bool) -> dict[Kind, SessionMessage]:
        """Samples as this moment would have them."""
        return {kind: self.addressed(part, up=up) for kind, part in samples.items()}

    def addressed(self, part: SessionMessage, *, up: bool) -> SessionMessage:
        """A sample as this moment would have it: a relay with the session's name and the round being played."""
        if isinstance(part, Terms):
            return self.terms
        if not isinstance(part, ProtocolMessage):
            return part
        envelope = Envelope.decode(part.message)
        round_id = RoundId(run=self.session, round=self.round, attempt=0)
        ends = (self.silo, SERVER) if up else (SERVER, self.silo)
        return ProtocolMessage(
            message=replace(envelope, round_id=round_id, sender=ends[0], recipient=ends[1]).encode()
        )


def exchanges(world: World) -> Iterator[Exchange]:
    """The messages of an honest run, one after another; each is carried, and its answer, unless it was before."""
    coordinator = world.coordinator = world.coordinate()
    while not coordinator.is_finished:
        for silo, data in coordinator.messages():
            exchange = Exchange(world, silo, data)
            yield exchange
            coordinator.receive(silo, exchange.deliver())
    assert coordinator.outcome is not None
    assert coordinator.outcome.stopped is None


class Undisturbed:
    """An honest run of each case, its world closed, and one part of every kind that was sent in any of them."""

    def __init__(self, folder: Path) -> None:
        self.worlds: dict[str, World] = {}
        self.samples: dict[Kind, SessionMessage] = {Declined: Declined(why=Refusal(Code.ROUND_BUDGET))}
        for name in CASES:
            if "encrypted" not in name or find_spec("tenseal") is not None:
                self.worlds[name] = self._played(made(name, folder / name))
        self.samples[UserTotals] = UserTotals(counts=np.full(6, 50))
        self.samples[SamplingCommitment] = SamplingCommitment(commitment=bytes(range(32)))
        self.samples[Goodbye], self.samples[InProgress] = Goodbye(), InProgress()
        self.samples[Finalize] = Finalize(round=2, charges=2, line=bytes(32), statement="{}")
        self.samples[RunPart] = RunPart(name="1", released=((1.0, np.zeros(3)),))

    def _played(self, world: World) -> World:
        for exchange in exchanges(world):
            exchange.deliver()
            assert exchange.answered is not None
            for part in (*exchange.message.parts, *exchange.answered.parts):
                self.samples[message_shape([part])[0]] = part
        world.close()
        return world


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """Honest runs, whose parts would do harm where they were read at another time."""
    with pytest.MonkeyPatch.context() as patched:
        small_keys(patched)
        return Undisturbed(tmp_path_factory.mktemp("undisturbed"))


@pytest.fixture
def samples(undisturbed: Undisturbed) -> dict[Kind, SessionMessage]:
    return undisturbed.samples


def steps_of(world: World) -> list[ExchangeStep]:
    """Every step that the grammars of two silos have."""
    coordinator, found = world.coordinator, list[ExchangeStep]()
    assert coordinator is not None
    for silo in (0, 1):
        grammar = Grammar.from_plan(coordinator._plan, coordinator._agreement.exchanges(silo))
        found += [grammar.opening, *grammar.protocol.setup]
        found += [step for first in (True, False) for step in grammar.round(1, first=first)]
    return found


@needs_tenseal
def test_every_kind_has_its_place_in_a_grammar(undisturbed: Undisturbed) -> None:
    """A kind of part or message that no session has is either dead or unguarded."""
    listed: set[Kind] = {kind for shape in (*ENDINGS, *SIGNS, *OUTSIDE, *OPENINGS) for kind in shape}
    for world in undisturbed.worlds.values():
        for step in steps_of(world):
            listed |= {*step.requests, *step.replies}
    assert listed == {*KINDS.values()} - {ProtocolMessage}
    assert set(undisturbed.samples) == listed


@pytest.mark.parametrize("name", IDS)
def test_no_message_has_a_kind_that_the_method_does_not_list(name: str, undisturbed: Undisturbed) -> None:
    """The statement is a fold over the messages a method lists: a kind beside them would be told and not counted."""
    world = undisturbed.worlds[name]
    assert world.coordinator is not None
    sends = world.coordinator._plan.method.sends()
    listed = {role: {one.kind for one in sends if one.to & role} for role in Role}
    for step in steps_of(world):
        assert {*step.requests} <= listed[Role.SILO]
        assert {*step.replies} <= listed[Role.SERVER]
    assert {kind for shape in ENDINGS for kind in shape} <= listed[Role.SERVER]


PLAIN = (bytes, bytearray, str, int, float, bool, type(None), Enum, Path, type)


def fingerprint(value: Any) -> str:
    """A digest of everything that a value holds: numbers, bytes, arrays, and the objects of this package."""
    content: list[bytes] = []
    _content(value, {}, content.append)
    return hashlib.sha256(b"".join(content)).hexdigest()


def _content(value: Any, seen: dict[int, int], add: Callable[[bytes], None]) -> None:
    """Add what a value holds, each value with its type and its size before it."""
    of = type(value)
    if isinstance(value, PLAIN):
        text = repr(value).encode()
        add(b"%s %d " % (of.__name__.encode(), len(text)) + text)
        return
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray):
        add(f"{of.__name__} {value.dtype} {value.shape} ".encode() + np.ascontiguousarray(value).tobytes())
        return
    if id(value) in seen:
        add(b"again %d " % seen[id(value)])
        return
    seen[id(value)] = len(seen)
    inside: list[Any] = []
    if isinstance(value, dict):
        inside = [one for key, held in value.items() for one in (repr(key), held)]
    elif isinstance(value, list | tuple):
        inside = list(value)
    elif isinstance(value, set | frozenset):
        inside = sorted(map(repr, value))
    elif of.__module__.startswith("fedveil.") and hasattr(value, "__dict__"):
        inside = [vars(value)]
    add(b"%s %d " % (of.__name__.encode(), len(inside)))
    for one in inside:
        _content(one, seen, add)


def on_disk(folder: Path) -> dict[str, bytes]:
    """All files of a folder but the quota's, which counts the processor time of refused messages too."""
    paths = (
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != policy.UNCHARGED_CPU_FILE
    )
    return {str(path): path.read_bytes() for path in paths}


def state_of(world: World, silo: int) -> tuple[str, dict[str, bytes]]:
    """Everything a silo has: counts, weights, charges, answers, and its part of the protocol."""
    party = world.party(silo)
    return fingerprint(party._session), on_disk(world.folder / f"state-{silo}")


def near(
    signed_message: tuple[SessionMessage, ...], samples: dict[Kind, SessionMessage]
) -> Iterator[tuple[SessionMessage, ...]]:
    """The messages one step from an honest one: a part less, twice, in another place, or one more."""
    for place, part in enumerate(signed_message):
        yield signed_message[:place] + signed_message[place + 1 :]
        yield (*signed_message[:place], part, *signed_message[place:])
        yield (part, *signed_message[:place], *signed_message[place + 1 :])
    for kind in (*PARTS.values(),):
        if kind is not ProtocolMessage:
            yield (samples[kind], *signed_message)
            yield (*signed_message, samples[kind])


def others(
    honest: tuple[SessionMessage, ...], samples: dict[Kind, SessionMessage], *, pairs: bool = False
) -> Iterator[tuple[SessionMessage, ...]]:
    """Messages of other shapes than an honest one: every kind alone, what is near to it, and every pair."""
    shapes = [(part,) for part in samples.values()] + list(near(honest, samples))
    if pairs:
        shapes += list(product(samples.values(), repeat=2))
    own = message_shape(honest)
    return (
        parts for parts in shapes if message_shape(parts) not in (own, *OUTSIDE)
    )  # which the coordinator may say


def tries_at_a_silo(exchange: Exchange, samples: dict[Kind, SessionMessage], *, pairs: bool) -> int:
    """Send a silo other messages in an honest one's place, and see that nothing changes; return how many."""
    before, mine = state_of(exchange.world, exchange.silo), exchange.addressed_all(samples, up=False)
    tried = 0
    for parts in others(exchange.message.parts, mine, pairs=pairs):
        (answer,) = exchange.to_silo(*parts)
        assert isinstance(answer, Declined | Ready)
        if isinstance(answer, Declined):
            assert answer.why.code is Code.SHAPE or answer.why.code.cause == "replay"
        tried += 1
    assert state_of(exchange.world, exchange.silo) == before
    return tried


def tries_at_the_coordinator(exchange: Exchange, samples: dict[Kind, SessionMessage]) -> None:
    """Give other answers in an honest one's place: each ends the run, by the silo's name, and none of it is read."""
    exchange.deliver()
    coordinator, honest = exchange.world.coordinator, exchange.answered
    assert coordinator is not None
    assert honest is not None
    stops: list[str] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(coordinator, "stop", stops.append)
        state = {key: value for key, value in vars(coordinator).items() if key not in ("stop", "_ledger")}
        mine = exchange.addressed_all(samples, up=True)
        before = fingerprint(state), on_disk(exchange.world.run_folder.path)
        messages = [
            parts for parts in others(honest.parts, mine) if message_shape(parts) not in (*ENDINGS, *SIGNS)
        ]
        for parts in messages:
            exchange.from_silo(*parts)
        assert (fingerprint(state), on_disk(exchange.world.run_folder.path)) == before
    assert stops == [f"silo silo{exchange.silo}: sent {Code.SHAPE.template}"] * len(messages)
    assert len(messages) > 40


def disturbed(name: str, undisturbed: Undisturbed, folder: Path, *, pairs: bool) -> None:
    """Play a run in which both ends are sent other messages than the honest ones; it ends as it does without them."""
    honest, world = undisturbed.worlds[name], made(name, folder)
    tried = 0
    for exchange in exchanges(world):
        if exchange.silo > 1 or (exchange.silo and exchange.round == 2):
            continue
        tried += tries_at_a_silo(exchange, undisturbed.samples, pairs=pairs)
        tries_at_the_coordinator(exchange, undisturbed.samples)
    assert tried > 100
    for number in range(3):
        ledger = f"state-{number}/{LEDGER}"
        assert len(read_entries(world.folder / ledger)) == len(read_entries(honest.folder / ledger)) == 2
    if (honest.run_folder / "model.safetensors").exists() and "transfer" not in name:  # draws by lot
        assert same_model(files(honest.run_folder.path)[1], files(world.run_folder.path)[1])
    world.close()


@pytest.mark.parametrize("name", fast_every(IDS, 3))
def test_no_other_message_or_answer_changes_anything(
    name: str, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """Every kind alone and every message near to the honest one, in every state of the session, at both ends."""
    disturbed(name, undisturbed, tmp_path, pairs=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", IDS)
def test_no_pair_of_parts_changes_anything_at_a_silo(
    name: str, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    disturbed(name, undisturbed, tmp_path, pairs=True)


SEQUENCES = ("open, by records", "masked", "blind, sampled", "recovering")


def any_sequence(
    names: tuple[str, ...], examples: int
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Try sequences of at most six messages: the next honest one (0), or one or two of any kinds (others)."""

    def wrap(test: Callable[..., None]) -> Callable[..., None]:
        kinds = st.integers(0, len(PARTS) + len(KINDS) - 1)
        other = st.lists(kinds, min_size=1, max_size=2)
        messages = st.lists(st.one_of(st.none(), st.none(), other), max_size=6)
        quiet = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
        profile = settings(
            max_examples=examples, derandomize=True, deadline=None, database=None, suppress_health_check=quiet
        )
        return profile(given(name=st.sampled_from(names), messages=messages)(test))

    return wrap


def played(
    name: str, messages: list[list[int] | None], samples: dict[Kind, SessionMessage], folder: Path
) -> None:
    """Play a run in which a silo is sent other messages between the honest ones; all ends as it does without them."""
    world, kinds = made(name, folder), list(samples.values())
    waiting, sent = list(messages), 0
    for exchange in exchanges(world):
        while exchange.silo == 0 and waiting:
            others_first = waiting.pop(0)
            if others_first is None:
                break
            parts = tuple(exchange.addressed(kinds[kind % len(kinds)], up=False) for kind in others_first)
            if message_shape(parts) not in (message_shape(exchange.message.parts), *OUTSIDE):
                before = state_of(world, 0)
                assert isinstance(exchange.to_silo(*parts)[0], Declined | Ready)
                assert state_of(world, 0) == before
                sent += 1
    charges = [world.charged(n) for n in range(3)]
    assert charges == [[1, 2]] * 3
    world.close()


@pytest.mark.slow
@any_sequence(SEQUENCES, 8)
def test_no_sequence_of_messages_changes_anything(
    samples: dict[Kind, SessionMessage], tmp_path_factory: pytest.TempPathFactory, name: str, messages: Any
) -> None:
    played(name, messages, samples, tmp_path_factory.mktemp("sequence"))


@pytest.mark.slow
@any_sequence(tuple(name for name in CASES if "encrypted" not in name), 300)
def test_no_sequence_of_messages_changes_anything_in_any_method(
    samples: dict[Kind, SessionMessage], tmp_path_factory: pytest.TempPathFactory, name: str, messages: Any
) -> None:
    played(name, messages, samples, tmp_path_factory.mktemp("sequence"))
