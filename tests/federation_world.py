"""A federation in one process: parties over real folders, and a carrier that loses, repeats, reorders and kills."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedveil.crypto.keys import IdentityKey
from fedveil.crypto.paillier import PaillierPrivateKey
from fedveil.data.records import Population, Records
from fedveil.errors import ProtocolError
from fedveil.federation.audit.run_record import RunRecord
from fedveil.federation.coordinator import CoordinatorParty
from fedveil.federation.hosts.submission import open_session
from fedveil.federation.ledger_heads import HEADS, NONE, SeenHeads, heads_for, sign_heads
from fedveil.federation.membership import Membership
from fedveil.federation.policy import Policy
from fedveil.federation.session_plan import session_name, session_run
from fedveil.federation.signed_message import SignedMessage
from fedveil.federation.silo import SiloParty, Standing
from fedveil.federation.silo_data import LocalPopulation
from fedveil.federation.silo_ledger import LEDGER
from fedveil.federation.store import RoundRecord
from fedveil.federation.terms import canonical
from fedveil.federation.transport.interface import LARGEST_MESSAGE
from fedveil.line_log import LineLog
from fedveil.privacy.ledger import read_entries
from fedveil.protocols.messages import SERVER, Envelope
from fedveil.protocols.plaintext_sums import PlaintextVector
from fedveil.protocols.sealed_sums import SealedMessage, SealedServer
from fedveil.protocols.session_messages import Hello, ProtocolMessage, Ready, RoundTask, SessionMessage, Terms
from fedveil.protocols.weighting import protocol_spec as weighting_spec
from fedveil.protocols.weighting.paillier_weights import PaillierEvaluator
from fedveil.registry import names
from fedveil.run.config.experiment import Experiment, merge, parse
from fedveil.run.folder.run_folder import RunFolder
from fedveil.run.folder.shown import uncovered_outputs
from fedveil.run.loop import Observer, RunParts
from fedveil.run.populations import FixedPopulation
from fedveil.run.setup import prepare
from fedveil.run.steps.experiment import ExperimentParts, Outcome
from fedveil.run.training_run import run
from tests.runs import Silent, files, same_model

RUN = bytes(range(16))
OPEN: dict[str, Any] = {"epsilon": 1e6, "clip": 1.0, "protections": ("none", "secure-aggregation")}
TESTING = Policy(
    **OPEN,
    methods=names("methods"),
    disclose_counts=True,
    without_guarantee=True,
)


def population(silos: int = 3, users: int = 6, records: int = 40, features: int = 3) -> Population:
    """A little table with something to learn; every silo has records of most users."""
    rng = np.random.default_rng(5)
    target = rng.integers(0, 2, records)
    return Population(
        name="little",
        train=Records(
            features=(rng.normal(size=(records, features)) + target[:, None]).astype(np.float32),
            targets=target.astype(np.int64),
            silo=(np.arange(records) % silos).astype(np.int32),
            user=rng.integers(0, users, records).astype(np.int32),
        ),
        test_features=rng.normal(size=(8, features)).astype(np.float32),
        test_targets=np.arange(8) % 2,
        n_users=users,
        silo_names=tuple(f"silo{number}" for number in range(silos)),
        task="classification",
        n_classes=2,
    )


def clients(number: int = 3) -> Population:
    """The same, where every silo holds the records of one user."""
    held = population(silos=number, users=number)
    return replace(held, train=replace(held.train, user=held.train.silo))


ADAPTIVE: dict[str, Any] = {
    "server": {
        "learning_rate": 0.5,
        "optimizer": {"name": "fedadam", "beta2": 0.9, "schedule": "linear"},
        "average": {"name": "ema"},
    },
}
"""A server's step that remembers."""

MOVING: dict[str, Any] = {"start": 0.05, "most": 1.0}
"""A clip that every round moves."""


def asked(**changes: Any) -> Experiment:
    """An experiment over the little table; its data section is not read."""
    base = {
        "name": "try",
        "rounds": 4,
        "data": {"name": "digits", "n_users": 6, "n_silos": 3},
        "model": {"name": "linear", "loss": "binary_cross_entropy"},
        "local": {"learning_rate": 0.1, "epochs": 1, "batch_size": 4},
        "trainer": {"name": "loop"},
        "method": {"name": "uldp-avg", "clip": 0.5, "noise_multiplier": 5.0},
        "server": {"learning_rate": 20 / 3},
        "privacy": {"insecure_seed": 11},
    }
    if changes.get("method", {}).get("name") in (
        "fedavg",
        "fl",
        "fl-sdq",
        "ckks-fedavg",
    ):  # no noise, no bound
        base["method"] = {}
        del base["server"]
    if changes.get("method", {}).get("name") in (
        "newton",
        "boosted-trees",
    ):  # no clip, no local steps, no rate
        del base["server"], base["local"], base["method"]["clip"]
        base["model"]["name"] = (
            "whitened-linear" if changes["method"]["name"] == "newton" else "boosted-trees"
        )
    if changes.get("method", {}).get("name") in ("uldp-sgd", "uldp-sgd-w"):
        del base["local"]
    return parse(merge(base, changes), "test")


def in_one_process(experiment: Experiment, held: Population, folder: Path) -> Path:
    """The run folder of the same experiment with all records in this process."""
    return run(prepare(experiment, FixedPopulation(held)), folder, Silent()).folder


def small_keys(monkeypatch: pytest.MonkeyPatch, bits: int = 512) -> None:
    """Have private weighting use Paillier keys that protect nobody, so that a test may make many of them."""
    monkeypatch.setattr(PaillierPrivateKey, "generate", lambda _: PaillierPrivateKey.generate_insecure(bits))
    small = partial(PaillierEvaluator, bits=bits)
    monkeypatch.setattr(weighting_spec, "PaillierEvaluator", lambda plan, public, **_: small(plan, public))


class Killed(BaseException):
    """A process that ended without warning; nothing but the operating system cleans up after it."""


class Moments:
    """Counts the moments at which a process writes to its disk, and kills it at one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left: int | None = None
        self.kills = 0
        self.logs: list[LineLog] = []
        self._write = os.write
        for name in ("fsync", "replace", "write"):
            monkeypatch.setattr(os, name, self._deadly(name, getattr(os, name)))
        lock = LineLog.lock
        monkeypatch.setattr(LineLog, "lock", lambda log, **how: (self.logs.append(log), lock(log, **how)))

    def release_locks(self) -> None:
        """Release the locks of the process that was killed, as the operating system does."""
        for log in self.logs:
            log.close()

    def _deadly(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any) -> Any:
            if self.left is not None:
                self.left -= 1
                if self.left < 0:
                    self.left = None
                    self.kills += 1
                    if name == "write":
                        self._write(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
                    raise Killed
            return call(*arguments)

        return wrapped

    def during(self, after: int | None, work: Callable[[], Any]) -> Any:
        """Do some work; with ``after``, the process that does it is killed at that write, if it makes so many."""
        self.left = after
        self.logs = []
        try:
            return work()
        finally:
            self.left = None


def public_records(held: Population) -> Records:
    """What the coordinator has instead of records: the test table, of which nothing but its shape is used."""
    nobody = np.zeros(len(held.test_targets), dtype=np.int32)
    return Records(features=held.test_features, targets=held.test_targets, silo=nobody, user=nobody)


def _share(held: Population, records: Records, features: np.ndarray, targets: np.ndarray) -> LocalPopulation:
    return LocalPopulation(
        name=held.name,
        train=records,
        test_features=features,
        test_targets=targets,
        n_users=held.n_users,
        silo_names=held.silo_names,
        task=held.task,
        n_classes=held.n_classes,
        target_names=held.target_names,
    )


def share_of(held: Population, number: int) -> LocalPopulation:
    """What a silo has: its own records."""
    records = held.train.select(np.flatnonzero(held.train.silo == number))
    return _share(held, records, records.features[:1], records.targets[:1])


def public_share_of(held: Population) -> LocalPopulation:
    """What the coordinator has."""
    return _share(held, public_records(held), held.test_features, held.test_targets)


def statement(folder: Path) -> Any:
    """What a run's folder states of its privacy, without the list of outputs: institutions write fewer."""
    document = json.loads((folder / "privacy.json").read_text())
    listed = {
        text
        for is_federated in (False, True)
        for exact in (False, True)
        for text in uncovered_outputs(exact_metrics=exact, is_federated=is_federated)
    }
    document["uncovered"] = [text for text in document["uncovered"] if text not in listed]
    document["sentences"] = [
        text
        for text in document["sentences"]
        if text.removeprefix("Not covered: ").removesuffix(".") not in listed
    ]
    return document


def _rounds(path: Path) -> list[int]:
    return [entry.round for entry in read_entries(path)]


def _letter(
    run: bytes, session: bytes, number: int, silo: int, parts: tuple[SessionMessage, ...]
) -> SignedMessage:
    return SignedMessage(run=run, session=session, number=number, sender=SERVER, recipient=silo, parts=parts)


def next_session(
    run: RunParts[Any],
    record: RunRecord,
    heads: SeenHeads,
    *,
    again: bool = False,
    party: type[CoordinatorParty[Any]] = CoordinatorParty,
) -> CoordinatorParty[Any]:
    """The coordinator's session of the next part of a run."""
    try:
        part = next(iter(run.parts(again=again)))
    except BaseException:
        run.close()
        raise
    return open_session(run, part, record, heads, party)


class World:
    """All parties of a run, each with its folder.

    Args:
        folder: where their files are.
        experiment: what the coordinator runs.
        held: the records of all; each silo gets its own.
        policy: of every silo.
        clock: of every silo.
        party: class of the coordinator.
    """

    def __init__(
        self,
        folder: Path,
        experiment: Experiment,
        held: Population,
        policy: Policy = TESTING,
        clock: Callable[[], float] = time.monotonic,
        party: type[CoordinatorParty[Any]] = CoordinatorParty,
    ) -> None:
        self.clock, self.coordinator_class = clock, party
        self.folder, self.experiment, self.held, self.policy = folder, experiment, held, policy
        self.keys = [IdentityKey.generate() for _ in held.silo_names]
        self.key = IdentityKey.generate()
        self.membership = Membership(
            silos=held.silo_names,
            roster=tuple(key.public for key in self.keys),
            coordinator=self.key.public,
            schema_digest=bytes(32),
        )
        self.run_folder = RunFolder.create(folder, experiment)
        self.named: dict[tuple[int, bytes, int], bytes] = {}
        self.runs: dict[tuple[int, bytes, int], bytes] = {}
        self.left: dict[tuple[int, int], set[bytes]] = {}
        self.silos: list[SiloParty | None] = [self.silo(number) for number in range(len(self.keys))]
        self.coordinator: CoordinatorParty | None = None
        self.lie: Callable[[int, tuple[SessionMessage, ...]], tuple[SessionMessage, ...]] | None = None

    def party(self, number: int = 0) -> SiloParty:
        """The process of a silo, which runs."""
        found = self.silos[number]
        assert found is not None
        return found

    def stop(self, number: int = 0) -> None:
        """End a silo's process, if it runs."""
        party, self.silos[number] = self.silos[number], None
        if party is not None:
            party.close()

    def restart(self, number: int = 0) -> SiloParty:
        """End a silo's process, and start another on its folder."""
        self.stop(number)
        self.silos[number] = party = self.silo(number)
        return party

    @property
    def outcome(self) -> Outcome:
        """How the run ended."""
        assert self.coordinator is not None
        assert self.coordinator.outcome is not None
        return self.coordinator.outcome

    def charged(self, number: int) -> list[int]:
        """The rounds of the charges in a silo's ledger."""
        return _rounds(self.folder / f"state-{number}" / LEDGER)

    @property
    def paid(self) -> list[int]:
        """The rounds of the charges in the run's ledger."""
        return _rounds(self.run_folder / "ledger.jsonl")

    def assert_as_in_one_process(self) -> None:
        """The run is that of one process, bit for bit: model, metrics, clips, events, statement; one charge a round."""
        folder = in_one_process(self.experiment, self.held, self.folder / "here")
        here, there = files(folder), files(self.run_folder.path)
        assert self.outcome.stopped is None
        assert same_model(here[1], there[1])
        for told in ("test", "clip"):
            assert [row.get(told) for row in here[2]] == [row.get(told) for row in there[2]]
        assert here[0] == there[0]
        assert statement(folder) == statement(self.run_folder.path)
        for number in range(len(self.silos)):
            assert self.charged(number) == list(range(1, self.experiment.rounds + 1))

    def share(self, number: int) -> LocalPopulation:
        return share_of(self.held, number)

    def silo(self, number: int) -> SiloParty:
        state = self.folder / f"state-{number}"
        state.mkdir(exist_ok=True)
        return SiloParty(
            standing=lambda: Standing(membership=self.membership, policy=self.policy),
            number=number,
            identity=self.keys[number],
            share=self.share(number),
            state=state,
            clock=self.clock,
        )

    def coordinate(self, observer: Observer | None = None) -> CoordinatorParty:
        """The coordinator, opened on its folder: of the next part of the run."""
        record = RunRecord(self.run_folder, self.membership, self.key)
        public = FixedPopulation(public_share_of(self.held))
        run = ExperimentParts(
            prepare(self.experiment, public, trains=False),
            self.run_folder,
            observer or Silent(),
            prepare=lambda refined: prepare(refined, public, trains=False),
            witness=record,
        )
        return next_session(
            run, record, SeenHeads(self.folder / HEADS, bytes(32)), party=self.coordinator_class
        )

    def note(self, number: int, data: bytes) -> None:
        """Remember what left a silo in the open, by round of its answers."""
        signed_message = self.answer(number, data)
        for part in signed_message.parts:
            if not isinstance(part, ProtocolMessage):
                continue
            envelope = Envelope.decode(part.message)
            if isinstance(envelope.message, PlaintextVector | SealedMessage):
                party = self.party(number)
                record = party._store.read(signed_message.run)
                assert record is not None
                vector = isinstance(envelope.message, PlaintextVector)
                content = envelope.message.encode() if vector else self.opened(number, record, envelope)
                self.left.setdefault((number, record.round), set()).add(content)

    def opened(self, number: int, record: RoundRecord, envelope: Envelope) -> bytes:
        """What is in a sealed message, if the coordinator it was sealed for is still there."""
        server = getattr(self.coordinator, "_server", None)  # none before its session begins
        if isinstance(server, SealedServer):
            try:
                return server.open_sealed(number, envelope)
            except ProtocolError:  # sealed in a session that is over
                return record.contribution
        return record.contribution

    def play(self, *, most: int = 1000) -> None:
        """Carry every message once, in order, until the run ends."""
        coordinator = self.coordinator = self.coordinate()
        for _ in range(most):
            if coordinator.is_finished:
                self.farewell()
                return
            for number, data in coordinator.messages():
                reply = self.party(number).receive(self.altered(number, data))
                self.note(number, reply)
                coordinator.receive(number, reply)
        raise AssertionError("the run does not end")

    def altered(self, number: int, data: bytes) -> bytes:
        """The coordinator's message to a silo, or what one that lies (``lie``) makes of its parts."""
        if self.lie is None:
            return data
        signed_message = self.open_message(number, data)
        return replace(signed_message, parts=self.lie(number, signed_message.parts)).seal(self.key)

    def tell(
        self, *parts: SessionMessage, silo: int = 0, session: int = 1, number: int = 0, run: bytes = RUN
    ) -> tuple[SessionMessage, ...]:
        """What a silo answers to a message of the coordinator; terms begin a session, under a nonce that is asked for.

        Args:
            parts: of the message.
            silo: who reads it.
            session: the test's own name of the session that the terms begin, or that the message is of.
            number: of the exchange.
            run: of the session.
        """
        place = silo, run, session
        if isinstance(parts[0], Terms):
            opened = bytes([session]) * 16
            (here,) = self.ask(_letter(run, opened, 0, silo, (Hello(),)))
            assert isinstance(here, Ready)
            nonces = ((silo, here.nonce),)
            terms = replace(parts[0], opened=opened, nonces=nonces)
            parts = (terms, *parts[1:])
            self.named[place] = session_name(run, opened, nonces)
            self.runs[place] = session_run(self.named[place], terms.digest)
        named = self.named.get(place, session.to_bytes(16, "big"))
        if any(isinstance(part, RoundTask) for part in parts) and self.unplayed(silo, named):
            said = {
                peer: sign_heads(key, named, [NONE] * len(self.keys)) for peer, key in enumerate(self.keys)
            }
            parts = (heads_for(silo, said), *parts)
        return self.ask(_letter(run, named, number, silo, parts))

    def unplayed(self, silo: int, named: bytes) -> bool:
        """Whether a silo is in a session of this name that has had no round: what silos say of ledgers is due."""
        party = self.party(silo)
        joined = party._last is not None and party._last.session == named and party._session is not None
        return joined and not party._session.talk._rounds  # type: ignore[union-attr]

    def ask(self, signed_message: SignedMessage) -> tuple[SessionMessage, ...]:
        """What a silo answers to a message."""
        return self.answer(
            signed_message.recipient,
            self.party(signed_message.recipient).receive(signed_message.seal(self.key)),
        ).parts

    def open_message(self, number: int, data: bytes) -> SignedMessage:
        """What the coordinator's message to a silo says."""
        return SignedMessage.open(
            data, sender=SERVER, identity=self.key.public, recipient=number, largest=LARGEST_MESSAGE
        )

    def answer(self, number: int, data: bytes) -> SignedMessage:
        """What a silo's message says."""
        identity = self.membership.roster[number]
        return SignedMessage.open(
            data, sender=number, identity=identity, recipient=SERVER, largest=LARGEST_MESSAGE
        )

    def terms(self, experiment: Experiment | None = None, membership: bytes | None = None) -> Terms:
        """The terms of an experiment, by itself the world's own, of no session yet."""
        named = self.membership.digest if membership is None else membership
        return Terms(
            membership=named,
            head=NONE,
            opened=bytes(16),
            nonces=(),
            experiment=canonical(experiment or self.experiment),
        )

    def exchange(self, coordinator: CoordinatorParty) -> None:
        """Carry the messages that wait, and their answers."""
        for number, data in coordinator.messages():
            coordinator.receive(number, self.party(number).receive(data))

    def farewell(self) -> None:
        """Carry the last messages of a run."""
        assert self.coordinator is not None
        for number, data in self.coordinator.farewells:
            self.coordinator.receive(number, self.party(number).receive(data))

    def close(self) -> None:
        for party in (*self.silos, self.coordinator):
            if party is not None:
                party.close()


class Chaos:
    """Carries messages of a world badly: each is lost, delayed, repeated; each party dies at any of its writes.

    Args:
        world: the parties.
        moments: where they die.
        seed: of everything that goes wrong.
        rate: of each kind of mishap.
        impatient: whether the coordinator sometimes goes on without those that have not answered yet.
    """

    def __init__(
        self, world: World, moments: Moments, seed: int, rate: float = 0.25, *, impatient: bool = False
    ) -> None:
        self.world, self.moments, self.rate, self.impatient = world, moments, rate, impatient
        self.random = random.Random(seed)
        self.cuts = 0
        self.late: list[tuple[int, bytes, bool]] = []

    def play(self, most: int = 5000) -> None:
        """Carry until the run ends."""
        world = self.world
        for _ in range(most):
            if world.coordinator is None:
                world.coordinator = self._mortal(world.coordinate, [])
                continue
            if world.coordinator.is_finished:
                return
            post = [(number, data, True) for number, data in world.coordinator.messages()]
            if self.late and self._happens():
                post += self.random.sample(self.late, min(3, len(self.late)))
            self.random.shuffle(post)
            for number, data, down in post:
                self._carry(number, data, down)
            if self.impatient and self._happens():
                self._hurry()
        raise AssertionError("the run does not end")

    def _happens(self) -> bool:
        return self.random.random() < self.rate

    def _mortal(self, work: Callable[[], Any], dead: list[Any]) -> Any:
        """Do a party's work, in which it may die; returns None if it did."""
        after = self.random.randrange(6) if self._happens() else None
        try:
            return self.moments.during(after, work)
        except Killed:
            for party in dead:
                party.close()
            self.moments.release_locks()
            return None

    def _carry(self, number: int, data: bytes, down: bool) -> None:
        if self._happens():
            self.cuts += 1
            self.late.append((number, data, down))
            return
        for _ in range(2 if self._happens() else 1):
            if down:
                self._to_silo(number, data)
            else:
                self._to_coordinator(number, data)

    def _to_silo(self, number: int, data: bytes) -> None:
        world = self.world
        party = world.silos[number]
        if party is None:
            party = world.silos[number] = self._mortal(lambda: world.silo(number), [])
            if party is None:
                return
        reply = self._mortal(lambda: party.receive(data), [party])
        if reply is None:
            world.silos[number] = None
            return
        world.note(number, reply)
        self._carry(number, reply, False)

    def _hurry(self) -> None:
        """Have the coordinator go on without those that have not answered yet."""
        coordinator = self.world.coordinator
        if (
            coordinator is not None
            and self._mortal(lambda: [coordinator.drop_missing(coordinator.awaited_silos)], [coordinator])
            is None
        ):
            self.world.coordinator = None

    def _to_coordinator(self, number: int, data: bytes) -> None:
        coordinator = self.world.coordinator
        if coordinator is None or coordinator.is_finished:
            return

        def read() -> bool:
            coordinator.receive(number, data)
            return True

        if self._mortal(read, [coordinator]) is None:
            self.world.coordinator = None
