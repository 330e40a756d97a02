"""What a silo refuses: experiments beyond its policy, messages that are forged, replayed, oversized or damaged."""

from __future__ import annotations

import errno
import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from fedveil.crypto.key_agreement import RoundId
from fedveil.crypto.keys import IdentityKey
from fedveil.errors import CompositionError, ConfigError, CryptoError, ProtocolError, RunFolderError
from fedveil.federation.audit.run_record import round_attestation
from fedveil.federation.ledger_heads import NONE
from fedveil.federation.policy import Policy
from fedveil.federation.signed_message import SignedMessage
from fedveil.federation.silo_ledger import LEDGER
from fedveil.federation.store import RecordStore, RoundRecord
from fedveil.federation.transport.interface import LARGEST_MESSAGE
from fedveil.privacy.accounting import make_accountant
from fedveil.privacy.events import split_grid_loss
from fedveil.privacy.ledger import read_entries
from fedveil.protocols.field_codecs import Writer
from fedveil.protocols.messages import SERVER, Envelope, RoundStart
from fedveil.protocols.plaintext_sums import PlaintextVector
from fedveil.protocols.refusals import Code, Refusal
from fedveil.protocols.session_messages import (
    PARTS,
    Attestation,
    Declined,
    Finalize,
    GlobalModel,
    Goodbye,
    Hello,
    InProgress,
    Join,
    LedgerHeads,
    ModelStored,
    ProtocolMessage,
    Ready,
    RequestSignature,
    RequestSignatures,
    RoundClip,
    RoundTask,
    RunPart,
    SampledFlag,
    SampledUsers,
    SamplingCommitment,
    SessionMessage,
    Terms,
    UserCounts,
    UserTotals,
)
from fedveil.run.populations import FixedPopulation
from fedveil.run.rounds.client_inputs import CohortInputs
from fedveil.run.setup import prepare
from tests.federation_world import MOVING, OPEN, RUN, TESTING, World, asked, clients, population, small_keys

CASES = 20_000
EXAMPLES: list[SessionMessage] = [
    Terms(
        experiment='name = "é"',
        membership=bytes(32),
        head=bytes(32),
        opened=bytes(16),
        nonces=((3, bytes(16)),),
    ),
    Hello(),
    InProgress(),
    Goodbye(),
    RequestSignature(signed=(bytes(range(32)), bytes(range(64)))),
    Attestation(signature=bytes(range(64))),
    Finalize(round=4, charges=5, line=bytes(range(32)), statement='{"unit": "user"}'),
    RequestSignatures(signatures=((1, (bytes(32), bytes(64))),)),
    Join(heads=((bytes(32), bytes(range(64))),)),
    LedgerHeads(silos=((2, ((bytes(range(32)), bytes(64)), (bytes(32), bytes(range(64))))),)),
    UserCounts(counts=np.arange(5)),
    Declined(why=Refusal(Code.ROUND_BUDGET)),
    Ready(nonce=bytes(range(16)), busy=600),
    UserTotals(counts=np.arange(3)),
    RoundTask(round=3),
    GlobalModel(values=np.arange(4, dtype=np.float32)),
    RoundClip(length=0.375),
    SampledUsers(users=np.arange(11) % 2 == 0),
    SampledFlag(drawn=True),
    ProtocolMessage(message=b"a message"),
    ModelStored(tag=bytes(range(32))),
    SamplingCommitment(commitment=bytes(32)),
    RunPart(name="eval/2", released=((0.5, np.arange(3.0)), (2.0, np.zeros(0)))),
]


@pytest.fixture
def world(tmp_path: Path) -> Any:
    made = World(tmp_path, asked(), population())
    yield made
    made.close()


def terms(world: World, **changes: Any) -> Terms:
    return world.terms(asked(**changes))


def task(world: World, number: int = 1, value: float = 0.0, length: int = 4) -> tuple[SessionMessage, ...]:
    return GlobalModel(values=np.full(length, value, dtype=np.float32)), RoundTask(round=number)


@contextmanager
def unkept() -> Iterator[None]:
    """A disk that takes charges, and no answer."""
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(RecordStore, "_replace", Mock(side_effect=full))
        yield


def vector(parts: tuple[SessionMessage, ...]) -> np.ndarray:
    """The sum that a silo sends in the open, and signs."""
    part, signed = parts
    assert isinstance(part, ProtocolMessage), part
    assert isinstance(signed, Attestation), signed
    content = Envelope.decode(part.message).message
    assert isinstance(content, PlaintextVector)
    return content.values


def cause(parts: tuple[SessionMessage, ...]) -> str:
    assert len(parts) == 1
    assert isinstance(parts[0], Declined), parts
    return parts[0].why.code.cause


LIMITED = Policy(**OPEN, disclose_counts=True)
SECRET = {"privacy": {"delta": 1e-5}}


@pytest.mark.parametrize(
    ("policy", "changes", "expected"),
    [
        ({"clip": 0.1}, {}, Code.CLIP),
        ({"clip": 0.5}, {"method": {"clip": MOVING}}, Code.CLIP),
        ({"methods": ("uldp-naive",)}, {}, Code.METHOD),
        ({"models": ("mlp",)}, {}, Code.MODEL),
        ({"losses": ("cox",)}, {}, Code.LOSS),
        ({"protections": ("secure-aggregation",)}, {}, Code.PROTECTION),
        ({}, {"model": {"name": "os.path:join"}}, Code.MODEL),
        ({}, {"model": {"loss": "os.path:join"}}, Code.LOSS),
        ({"disclose_counts": False}, {"method": {"name": "uldp-avg-w"}}, Code.DISCLOSES_COUNTS),
        ({}, {"method": {"noise_multiplier": 0.0}}, Code.NOT_AGAINST_COORDINATOR),
        ({"epsilon": 0.01}, {}, Code.RUN_BUDGET),
    ],
)
def test_a_policy_is_a_limit(
    policy: dict[str, Any], changes: dict[str, Any], expected: Code, tmp_path: Path
) -> None:
    experiment = asked(**changes)
    secure = experiment.model_copy(
        update={"privacy": experiment.privacy.model_copy(update={"insecure_seed": None})}
    )
    world = World(tmp_path, secure, population(), LIMITED.model_copy(update=policy))
    asked_for = world.terms(secure)
    answer = world.tell(asked_for)[0]
    assert isinstance(answer, Declined)
    assert answer.why.code is expected
    assert not (tmp_path / "state-0" / "answers").exists()
    if "os.path" not in str(changes):  # the coordinator cannot load that either
        refused_by_all(world)
    world.close()


def test_the_budget_counts_what_the_grid_of_the_noise_costs(tmp_path: Path) -> None:
    """Exactly what the noise costs as real numbers is too little, and with the loss of all rounds it is enough."""
    experiment = asked()
    secure = experiment.model_copy(
        update={"privacy": experiment.privacy.model_copy(update={"insecure_seed": None})}
    )
    prepared = prepare(secure, FixedPopulation(population()))
    guarantee, rounds = prepared.guarantee, experiment.rounds
    whole = guarantee.after_rounds(LIMITED.event(guarantee), rounds)
    event, loss = split_grid_loss(whole)
    assert loss > 0
    accountant = make_accountant(LIMITED.accountant)
    least = accountant.epsilon(event, LIMITED.delta)
    enough = accountant.epsilon(whole, LIMITED.delta) * (1 + 1e-15)
    for epsilon, code in ((least, Code.RUN_BUDGET), (enough, None)):
        (tmp_path / str(code)).mkdir()
        policy = LIMITED.model_copy(update={"epsilon": epsilon})
        world = World(tmp_path / str(code), secure, population(), policy)
        answer = world.tell(world.terms(secure))[0]
        assert (answer.why.code if isinstance(answer, Declined) else None) is code
        world.close()


def refused_by_all(world: World) -> None:
    world.play()
    assert "silo0 refuses" in (world.outcome.stopped or "")
    assert world.outcome.rounds == 0


def test_noise_from_a_known_seed_is_refused(tmp_path: Path) -> None:
    world = World(tmp_path, asked(), population(), LIMITED)
    answer = world.tell(terms(world))[0]
    assert isinstance(answer, Declined)
    assert answer.why.code is Code.KNOWN_SEED
    world.close()


def test_the_budget_counts_all_runs(tmp_path: Path) -> None:
    experiment = asked(rounds=3)
    secure = experiment.model_copy(
        update={"privacy": experiment.privacy.model_copy(update={"insecure_seed": None})}
    )
    held = population()
    first = World(
        tmp_path, secure, held, LIMITED.model_copy(update={"epsilon": 2.0, "trust_coordinator": True})
    )
    first.play()
    assert first.outcome.stopped is None
    offer = first.terms(secure)
    while isinstance(first.tell(offer, run=os.urandom(16))[0], Join):
        identity = os.urandom(16)
        first.tell(offer, run=identity)
        for number in (1, 2, 3):
            first.tell(*task(first, number), run=identity, number=number)
    assert cause(first.tell(offer, run=os.urandom(16))) == "budget"
    party = first.party()
    budget = first.policy.budget
    assert budget is not None
    assert 0 < budget.accountant.epsilon(party._ledger.ledger.spent_event(), budget.delta) <= 2.0
    first.close()


def test_a_refused_offer_of_another_run_leaves_the_one_that_goes_on(tmp_path: Path) -> None:
    experiment = asked(rounds=3)
    secure = experiment.model_copy(
        update={"privacy": experiment.privacy.model_copy(update={"insecure_seed": None})}
    )
    limited = LIMITED.model_copy(update={"epsilon": 2.0, "trust_coordinator": True})
    world = World(tmp_path, secure, population(), limited)
    identity, expensive = os.urandom(16), secure.model_copy(update={"rounds": 5000})
    world.tell(world.terms(secure), run=identity)
    refused = world.terms(expensive)
    assert cause(world.tell(refused, run=os.urandom(16))) == "budget"
    world.tell(*task(world, 1), run=identity, number=1)
    assert isinstance(
        world.tell(refused, run=os.urandom(16))[0], Ready
    )  # in the middle of a run: not even read
    answer = world.tell(*task(world, 2), run=identity, number=2)
    assert not any(isinstance(part, Declined) for part in answer)
    world.close()


def test_the_budget_counts_a_round_that_is_paid_twice(tmp_path: Path) -> None:
    """A run that fits when it is joined must fit at every round too: what was not kept costs again."""
    experiment = asked(rounds=3)
    secure = experiment.model_copy(
        update={"privacy": experiment.privacy.model_copy(update={"insecure_seed": None})}
    )
    for epsilon, refused in ((100.0, False), (None, True)):
        folder = tmp_path / str(refused)
        folder.mkdir()
        exact = prepare(secure, FixedPopulation(population())).epsilon_after(3) * (1 + 1e-9)
        limits = LIMITED.model_copy(update={"epsilon": epsilon or exact, "trust_coordinator": True})
        world = World(folder, secure, population(), limits)
        world.tell(world.terms(secure))
        world.tell(*task(world), number=1)
        world.tell(*task(world, number=2), number=2)
        with unkept():
            assert cause(world.tell(*task(world, number=3), number=3)) == "storage"
        world.tell(world.terms(secure), session=2)
        answer = world.tell(*task(world, number=3), session=2, number=1)
        assert (cause(answer) == "budget") if refused else isinstance(answer[0], ProtocolMessage)
        assert len(read_entries(folder / "state-0" / LEDGER)) == (3 if refused else 4)
        world.close()


def test_metrics_and_files_of_the_coordinator_are_not_touched_by_a_silo(world: World) -> None:
    offered = asked(
        model={"name": "linear", "loss": "binary_cross_entropy", "metrics": ["this_module:is_not_there"]}
    )
    answer = world.tell(world.terms(offered))
    assert isinstance(answer[0], Join)
    assert "this_module" not in sys.modules


def test_a_round_is_answered_once(world: World) -> None:
    world.tell(terms(world))
    first = vector(world.tell(*task(world), number=1))
    again = vector(world.tell(*task(world), number=2))
    assert np.array_equal(first, again)
    assert isinstance(world.tell(*task(world, number=2), number=3)[0], ProtocolMessage)
    for session, wrong in enumerate(
        (task(world, number=2, value=1.0), task(world, number=1), task(world, number=4)), start=2
    ):
        world.tell(terms(world), session=session)
        assert cause(world.tell(*wrong, session=session, number=1)) == "replay"


def test_a_refusal_ends_its_session(world: World) -> None:
    """A message that was begun and not finished may have taken effect in part, so none can follow it."""
    world.tell(terms(world))
    wrong = world.tell(*task(world, length=9), number=1)
    assert cause(wrong) == "request"
    assert world.tell(*task(world, length=9), number=1) == wrong
    assert isinstance(world.tell(*task(world), number=2)[0], Ready)
    world.tell(terms(world), session=2)
    assert isinstance(world.tell(*task(world), session=2, number=1)[0], ProtocolMessage)


@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
def test_what_nobody_foresaw_is_refused_once_and_not_charged_again(
    error: type[BaseException], world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unanswered, the message came again, another session after it, and every time the round was charged anew.

    A model of one's own that ended the process by sys.exit ended only the thread that reads messages: the silo said for
    hours that it was at work, and then to everybody after.
    """

    def fail(*_: object) -> None:
        raise error("record 17 of the table")

    monkeypatch.setattr(CohortInputs, "client_input", fail)
    world.tell(terms(world))
    answer = world.tell(*task(world), number=1)
    assert cause(answer) == "request"
    assert isinstance(answer[0], Declined)
    assert answer[0].why == Refusal(Code.OWN_RECORDS)
    assert world.tell(*task(world), number=1) == answer
    assert isinstance(world.tell(*task(world), number=2)[0], Ready)
    assert len(read_entries(tmp_path / "state-0" / LEDGER)) == 1
    world.close()
    world.silos[:] = [world.silo(number) for number in range(3)]
    world.play()
    assert "silo0 refuses" in (world.outcome.stopped or "")
    assert len(read_entries(tmp_path / "state-0" / LEDGER)) == 2


def test_a_stored_sum_is_sent_under_its_own_terms_alone(world: World) -> None:
    """A sum that was charged as one under masks is not sent in the open, nor one of other weights, for free."""
    world.tell(terms(world))
    first = vector(world.tell(*task(world), number=1))
    assert cause(world.tell(terms(world, rounds=5), session=2)) == "replay"
    assert cause(world.tell(terms(world, method={"noise_multiplier": 4.0}), session=3)) == "replay"
    world.tell(terms(world), session=4)
    again = vector(world.tell(*task(world), session=4, number=1))
    assert np.array_equal(first, again)


def test_old_messages_are_not_answered_again(world: World) -> None:
    world.tell(terms(world), session=2)
    world.tell(*task(world), session=2, number=3)
    assert cause(world.tell(*task(world, number=2), session=2, number=2)) == "replay"
    assert cause(world.tell(*task(world, number=2), session=2, number=3)) == "replay"
    for stranger in (
        world.tell(*task(world, number=2), session=1, number=9),
        world.tell(*task(world), run=bytes(16)),
    ):
        assert isinstance(stranger[0], Ready)


def test_a_task_must_fit(world: World) -> None:
    totals = UserTotals(counts=np.full(6, 99))
    for session, (wrong, expected) in enumerate(
        (
            (task(world), Refusal(Code.SHAPE)),
            ((totals, *task(world, length=9)), Refusal(Code.PARAMETERS, (9, 4))),
            ((totals, SampledUsers(users=np.ones(6, dtype=np.bool_)), *task(world)), Refusal(Code.SHAPE)),
            ((totals, SampledFlag(drawn=True), *task(world)), Refusal(Code.SHAPE)),
            ((totals, RoundTask(round=1)), Refusal(Code.SHAPE)),
            ((UserTotals(counts=np.full(5, 99)), *task(world)), Refusal(Code.USERS, (5, 6))),
            ((UserTotals(counts=np.zeros(6, dtype=np.int64)), *task(world)), Refusal(Code.OWN_RECORDS)),
            ((totals, *task(world, number=5)), Refusal(Code.NO_SUCH_ROUND, (4,))),
            ((totals, *task(world, number=0)), Refusal(Code.NO_SUCH_ROUND, (4,))),
            ((Join(heads=()),), Refusal(Code.SHAPE)),
        ),
        start=1,
    ):
        world.tell(terms(world, method={"name": "uldp-avg-w"}), session=session)
        (answer,) = world.tell(*wrong, session=session, number=1)
        assert isinstance(answer, Declined)
        assert answer.why == expected


@pytest.mark.parametrize(
    ("number", "length", "allowed"),
    [
        (1, 0.05, True),
        (1, 0.06, False),
        (2, 0.06, True),
        (2, 1.01, False),
        (2, -0.1, False),
        (2, np.nan, False),
    ],
)
def test_a_clip_must_be_one_that_its_course_comes_to(
    world: World, number: int, length: float, allowed: bool
) -> None:
    """The first is given and the others have limits; a silo charges nothing for another one."""
    world.tell(terms(world, method={"clip": MOVING}))
    if number == 2:
        vector(world.tell(RoundClip(length=0.05), *task(world), number=1))
    answers = world.tell(RoundClip(length=length), *task(world, number=number), number=2)
    if allowed:
        assert np.isfinite(vector(answers)).all()
    else:
        (answer,) = answers
        assert isinstance(answer, Declined)
        assert answer.why.code is Code.CLIP_MOVED
    charged = list(read_entries(world.folder / "state-0" / LEDGER))
    assert len(charged) == number - (not allowed)
    if allowed and number == 2:
        world.tell(terms(world, method={"clip": MOVING}), session=2)
        again = (RoundClip(length=2 * length), *task(world, number=2))
        assert cause(world.tell(*again, session=2, number=1)) == "replay"


def test_a_clip_that_stays_is_not_told(world: World) -> None:
    world.tell(terms(world))
    (answer,) = world.tell(RoundClip(length=0.5), *task(world), number=1)
    assert isinstance(answer, Declined)
    assert answer.why.code is Code.SHAPE


def test_another_membership_is_refused(world: World) -> None:
    assert cause(world.tell(world.terms(asked(), bytes(32)))) == "schema"
    assert cause(world.tell(replace(world.terms(asked()), experiment="a = ["))) == "request"


def test_a_state_that_was_put_back_is_noticed(world: World, tmp_path: Path) -> None:
    world.tell(terms(world))
    world.tell(*task(world), number=1)
    kept = next((tmp_path / "state-0" / "answers").iterdir())
    content = kept.read_bytes()
    world.tell(*task(world, number=2), number=2)
    world.tell(*task(world, number=3), number=3)
    kept.write_bytes(content)
    assert cause(world.tell(*task(world, number=2), number=4)) == "state"
    world.tell(terms(world), session=2)
    kept.write_bytes(content[:-1])
    assert cause(world.tell(*task(world, number=2), session=2, number=1)) == "storage"


def test_new_noise_is_never_free(world: World, tmp_path: Path) -> None:
    """What it could not keep, and so did not send, a silo cannot repeat: it draws again, and pays again."""
    world.tell(terms(world))
    world.tell(*task(world), number=1)
    world.tell(*task(world, number=2), number=2)
    with unkept():
        assert cause(world.tell(*task(world, number=3), number=3)) == "storage"
    world.tell(terms(world), session=2)
    assert isinstance(world.tell(*task(world, number=3), session=2, number=1)[0], ProtocolMessage)
    charges = [(entry.round, entry.attempt) for entry in read_entries(tmp_path / "state-0" / LEDGER)]
    assert charges == [(1, 0), (2, 0), (3, 0), (3, 1)]


def test_a_full_disk_stops_a_round_before_it_is_answered(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    world.tell(terms(world))
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        assert cause(world.tell(*task(world), number=1)) == "storage"
    assert isinstance(world.tell(*task(world), number=2)[0], Ready)
    world.tell(terms(world), session=2)
    assert isinstance(world.tell(*task(world), session=2, number=1)[0], ProtocolMessage)


def test_a_coordinator_with_a_full_disk_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    world = World(tmp_path, asked(), population())
    coordinator = world.coordinate()
    with monkeypatch.context() as patched, pytest.raises(RunFolderError, match="No space left"):  # noqa: PT012
        while True:
            for number, data in coordinator.messages():
                reply = world.party(number).receive(data)
                if coordinator._part.checkpoint.round == 2:
                    patched.setattr(os, "replace", full)
                coordinator.receive(number, reply)
                patched.undo()
    coordinator.close()
    world.play()
    assert world.outcome.rounds == 4
    world.close()


# --- messages -------------------------------------------------------------------------------------------------


def sealed(world: World, key: IdentityKey, *, sender: int, recipient: int) -> bytes:
    return SignedMessage(
        run=RUN, session=bytes(16), number=0, sender=sender, recipient=recipient, parts=(Hello(),)
    ).seal(key)


def test_only_the_coordinator_can_ask(world: World) -> None:
    party = world.party()
    for data in (
        sealed(world, world.keys[1], sender=SERVER, recipient=0),
        sealed(world, IdentityKey.generate(), sender=SERVER, recipient=0),
        sealed(world, world.key, sender=SERVER, recipient=1),
        sealed(world, world.keys[1], sender=1, recipient=0),
        b"",
        b"FVL" + bytes(200),
        bytes(LARGEST_MESSAGE + 1),
    ):
        with pytest.raises(ProtocolError):
            party.receive(data)


def test_a_silo_cannot_speak_for_another(tmp_path: Path) -> None:
    world = World(tmp_path, asked(), population())
    coordinator = world.coordinate()
    for sender, key in ((1, world.keys[0]), (1, world.key), (0, world.keys[1])):
        with pytest.raises(ProtocolError, match="not signed by its sender"):
            coordinator.receive(sender, sealed(world, key, sender=sender, recipient=SERVER))
    with pytest.raises(ProtocolError, match="another sender"):
        coordinator.receive(1, sealed(world, world.keys[0], sender=0, recipient=SERVER))
    with pytest.raises(ProtocolError, match="3 silos"):
        coordinator.receive(7, b"")
    with pytest.raises(ProtocolError, match="limit"):
        coordinator.receive(0, bytes(1 << 20))
    coordinator.close()
    world.close()


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (np.array([1.0, np.nan, 0, 0]), "finite numbers"),
        (np.zeros(3), "finite numbers"),
        (np.array([np.inf, 0, 0, 0]), "finite numbers"),
        (np.full(4, 1e300), "the next model has a NaN or an infinity"),
        (np.full(4, 1e308), "the aggregate has a NaN or an infinity"),
    ],
)
def test_a_vector_that_is_none_ends_the_run_with_the_model(
    values: np.ndarray, reason: str, tmp_path: Path
) -> None:
    """Numbers that are finite alone made a model that is not, and a folder that nobody could open again."""
    world = World(tmp_path, asked(), population())
    coordinator = world.coordinate()
    world.exchange(coordinator)
    world.exchange(coordinator)
    for number, data in coordinator.messages():
        signed_message = world.open_message(number, data)
        round_id = RoundId(run=coordinator._session_run, round=1, attempt=0)
        sent = Envelope(
            round_id=round_id, sender=number, recipient=SERVER, message=PlaintextVector(values=values)
        )
        terms = coordinator._record._terms
        told = round_attestation(
            signed_message.run, terms, ("", 1), coordinator._asked, coordinator._told, bytes(32)
        )
        signed = Attestation(signature=world.keys[number].sign(told))
        answer = signed_message.answer(ProtocolMessage(message=sent.encode()), signed)
        coordinator.receive(number, answer.seal(world.keys[number]))
    assert coordinator.outcome is not None
    assert reason in (coordinator.outcome.stopped or "")
    assert coordinator.outcome.rounds == 0
    coordinator.close()
    world.coordinate().close()
    world.close()


def test_every_kind_of_part_has_an_example() -> None:
    assert {type(example) for example in EXAMPLES} == set(PARTS.values())


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: type(example).__name__)
def test_parts_survive_their_bytes(example: SessionMessage) -> None:
    assert type(example).decode(example.encode()).encode() == example.encode()


def test_the_bytes_of_version_3_stay() -> None:
    """The order of a class's fields is the order of its bytes; another order needs another version."""
    writer = Writer()
    for example in EXAMPLES:
        writer.number(example.kind, 1).block(example.encode())
    assert (
        hashlib.sha256(writer.bytes()).hexdigest()
        == "66bbe9717a7be651caf22f72823990363b6820fc842b217334d12fc6569163d0"
    )


def test_no_bytes_do_more_than_be_refused() -> None:
    random = np.random.default_rng(8)
    key = IdentityKey.generate()
    whole = SignedMessage(
        run=RUN, session=bytes(16), number=0, sender=SERVER, recipient=0, parts=tuple(EXAMPLES)
    ).seal(key)

    def read(content: bytes) -> None:
        SignedMessage.open(content, sender=SERVER, identity=key.public, recipient=0, largest=1 << 16)

    for case in range(CASES):
        if case % 4:
            example = EXAMPLES[case % len(EXAMPLES)]
            look: Callable[[bytes], Any] = type(example).decode
            data = bytearray(example.encode())
        else:
            look, data = read, bytearray(whole)
        for _ in range(int(random.integers(1, 4))):
            kind, at = random.integers(4), int(random.integers(len(data) + 1))
            if kind == 0 and data:
                data[min(at, len(data) - 1)] = int(random.integers(256))
            elif kind == 1:
                del data[at:]
            elif kind == 2:
                data[at:at] = random.bytes(int(random.integers(1, 9)))
            else:
                data = bytearray(random.bytes(int(random.integers(80))))
        try:
            look(bytes(data))
        except ProtocolError:
            continue
        assert look is not read or bytes(data) == whole


def test_parts_are_checked_behind_a_signature(world: World) -> None:
    """Who has the key can sign anything; what is signed is still read with care."""
    signed_message = SignedMessage(run=RUN, session=bytes(16), number=0, sender=SERVER, recipient=0, parts=())
    content = signed_message.seal(world.key)[:-64]
    for body, count in (
        (b"\x05" + bytes(8), 1),
        (bytes([Hello.kind]) + bytes(7), 1),
        (bytes([PlaintextVector.kind]) + bytes(8), 1),
        (b"", 2),
        (bytes([Hello.kind]) + bytes(8) + b"x", 1),
    ):
        forged = content[:-2] + count.to_bytes(2, "big") + body
        party = world.party()
        with pytest.raises(ProtocolError):
            party.receive(forged + world.key.sign(b"fedveil/1/letter" + forged))


# --- files ---------------------------------------------------------------------------------------------------


def test_answers_are_kept_or_refused(tmp_path: Path) -> None:
    store = RecordStore(tmp_path / "answers")
    assert store.read(RUN) is None
    store.write(
        RUN,
        RoundRecord(
            round=3,
            request=bytes(32),
            binding=bytes(32),
            contribution=b"a sum",
            after={"model": np.arange(5.0)},
        ),
    )
    kept = store.read(RUN)
    assert kept is not None
    assert (kept.round, kept.contribution, kept.after["model"].tolist()) == (3, b"a sum", [0, 1, 2, 3, 4])
    assert not kept.before
    path = next((tmp_path / "answers").iterdir())
    assert path.stat().st_mode & 0o777 == 0o600
    content = path.read_bytes()
    for place in range(0, len(content), 7):
        damaged = bytearray(content)
        damaged[place] ^= 1
        path.write_bytes(bytes(damaged))
        with pytest.raises(RunFolderError, match="damaged"):
            store.read(RUN)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("clip = 1.0", "epsilon: is required"),
        ("epsilon = 1.0\nclip = 1.0\nmethod = 3", "method: no such key"),
        ("epsilon = -1.0\nclip = 1.0", "epsilon: must be > 0"),
        ("epsilon = ", "not a TOML document"),
        (
            'epsilon = 1\nclip = 1\nmethods = ["uldp-avg", "uldp-svg"]',
            r"policy\.toml: methods: no method 'uldp-svg'; there are: fedavg, .*; did you mean 'uldp-sgd'\?$",
        ),
        (
            'epsilon = 1\nclip = 1\nprotections = ["secure-agregation"]',
            r"protections: no protection 'secure-agregation'; there are: none, secure-aggregation.*; did you mean",
        ),
        ('epsilon = 1\nclip = 1\nmodels = ["linaer"]', "models: no model named 'linaer'; use one of linear"),
        ('epsilon = 1\nclip = 1\nlosses = ["mse"]', "losses: no loss named 'mse'; use one of cross_entropy"),
        ('epsilon = "1"\nclip = 1', "epsilon: must be a number, not '1'"),
    ],
)
def test_a_policy_file_says_what_is_wrong(text: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=expected):
        Policy.read(path)


def test_a_policy_is_cautious_by_itself() -> None:
    policy = Policy(epsilon=1.0, clip=1.0)
    assert not any((policy.trust_coordinator, policy.disclose_counts, policy.without_guarantee))
    assert policy.protections == ("secure-aggregation",)
    assert TESTING.budget is None


def test_a_sum_over_fewer_silos_is_refused(tmp_path: Path) -> None:
    world = World(tmp_path, asked(protection={"name": "secure-aggregation"}), population())
    coordinator = world.coordinate()
    world.exchange(coordinator)
    world.exchange(coordinator)
    data = dict(coordinator.messages())[0]
    signed_message = world.open_message(0, data)
    heads, directory, start, *asked_for = signed_message.parts
    assert isinstance(start, ProtocolMessage)
    envelope = Envelope.decode(start.message)
    fewer = ProtocolMessage(message=replace(envelope, message=RoundStart(cohort=(0, 1))).encode())
    party = world.party()
    (answer,) = world.answer(
        0, party.receive(replace(signed_message, parts=(heads, directory, fewer, *asked_for)).seal(world.key))
    ).parts
    assert isinstance(answer, Declined)
    assert answer.why.code is Code.PROTOCOL
    coordinator.close()
    world.close()


def test_counts_of_a_silo_that_lies_do_not_wrap_the_totals(tmp_path: Path) -> None:
    """Totals modulo 2^32 were below what a user has, so weights over all silos were above 1, and above the bound."""
    held = population()
    world = World(tmp_path, asked(method={"name": "uldp-avg-w"}), held)
    truth = np.bincount(held.train.user, minlength=held.n_users)
    largest = np.max(
        [np.bincount(held.train.user[held.train.silo == silo], minlength=6) for silo in (0, 1)], axis=0
    )
    own = np.bincount(held.train.user[held.train.silo == 2], minlength=6)
    wrapping = 2**32 - (truth - own - largest)  # with it the totals are what one silo has, modulo 2^32
    coordinator = world.coordinate()
    world.exchange(coordinator)
    for silo, data in coordinator.messages():
        reply = world.party(silo).receive(data)
        if silo == 2:
            signed_message = world.open_message(2, data)
            reply = signed_message.answer(
                Join(heads=((NONE, bytes(64)),) * 3), UserCounts(counts=np.minimum(wrapping, 2**32 - 1))
            ).seal(world.keys[2])
        coordinator.receive(silo, reply)
    assert coordinator.outcome is not None
    assert "silo silo2: " in (coordinator.outcome.stopped or "")
    assert "more records of a user" in (coordinator.outcome.stopped or "")
    with pytest.raises(ProtocolError, match="not between 0 and"):
        UserTotals(counts=np.array([3, 2**32])).encode()
    world.close()


def test_a_message_of_another_version_is_refused_by_name(world: World) -> None:
    party = world.party()
    signed_message = SignedMessage(
        run=RUN, session=bytes(16), number=0, sender=SERVER, recipient=0, parts=(Hello(),)
    )
    content = signed_message.seal(world.key)[:-64]
    old = content[:3] + b"\x02" + content[4:]
    with pytest.raises(
        ProtocolError, match="a message of version 2, where version 4 is read; all parties need"
    ):
        party.receive(old + world.key.sign(b"fedveil/1/letter" + old))


MASKED = {"name": "secure-aggregation"}
HIDDEN = [
    pytest.param({"protection": MASKED}, id="masked"),
    pytest.param({"protection": MASKED | {"on_dropout": "recover", "max_dropouts": 1}}, id="recovering"),
    pytest.param(
        {"method": {"name": "uldp-avg-w"}, "protection": {"name": "private-weighting", "n_max": 30}},
        id="blind",
    ),
    pytest.param(
        {"protection": {"name": "partial-encryption", "ratio": 0.5}},
        id="encrypted",
        marks=pytest.mark.skipif(find_spec("tenseal") is None, reason="needs the extra rlwe"),
    ),
]
ANY = TESTING.model_copy(
    update={"protections": (MASKED["name"], "private-weighting", "partial-encryption"), "trust_silos": True}
)


@pytest.mark.parametrize("changes", HIDDEN)
def test_all_silos_of_a_sum_play_the_same_round(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A sum of two silos' kept vectors of round 1 and a new one of the third's round 2 showed, less the sum of round 1,
    what the third trained, under two shares of noise instead of all: half the variance that was charged.
    """
    caplog.set_level("WARNING", "fedveil")
    small_keys(monkeypatch)
    world = World(tmp_path, asked(**changes), population(), ANY)
    first: dict[int, tuple[SessionMessage, ...]] = {}

    def lie(silo: int, parts: tuple[SessionMessage, ...]) -> tuple[SessionMessage, ...]:
        numbers = [part.round for part in parts if isinstance(part, RoundTask)]
        if numbers == [1]:
            first[silo] = tuple(part for part in parts if isinstance(part, GlobalModel | RoundTask))
        if numbers == [2] and silo < 2:
            return (*(part for part in parts if not isinstance(part, GlobalModel | RoundTask)), *first[silo])
        return parts

    world.lie = lie
    world.play()
    outcome = world.outcome
    assert outcome.rounds == 1
    if "recover" in str(changes):  # what was asked is compared before anybody contributes
        assert outcome.stopped == "silo silo0: signed another request than this coordinator sent"
    else:
        assert Code.PROTOCOL.template in (outcome.stopped or "")
        assert "silo 0: round 1, attempt 0 has not begun" in caplog.text
    assert world.charged(0) == [1]
    world.close()


@pytest.mark.parametrize("changes", HIDDEN)
def test_all_silos_of_a_sum_were_told_the_same_terms(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A silo charged its users for noise of which the others, who were told less, added less."""
    caplog.set_level("WARNING", "fedveil")
    small_keys(monkeypatch)
    world = World(tmp_path, asked(**changes), population(), ANY)

    def lie(silo: int, parts: tuple[SessionMessage, ...]) -> tuple[SessionMessage, ...]:
        if silo == 0 and isinstance(parts[0], Terms):
            other = parts[0].experiment.replace('"noise_multiplier":5.0', '"noise_multiplier":5.5')
            assert other != parts[0].experiment
            return replace(parts[0], experiment=other), *parts[1:]
        return parts

    world.lie = lie
    world.play()
    outcome = world.outcome
    assert outcome.rounds == 0
    said = caplog.text + (outcome.stopped or "")
    assert "another run" in said or "public key was refused" in said
    assert not any(read_entries(tmp_path / f"state-{silo}" / LEDGER) for silo in range(3))
    world.close()


@pytest.mark.parametrize(
    "changes",
    [
        {
            "method": {"name": "dp-fed", "client_sampling": "uniform", "client_sampling_rate": 0.7},
            "data": {"n_users": 3},
        },
        {"method": {"name": "uldp-group", "group_size": 2}},
    ],
)
def test_what_cannot_travel_is_refused_by_both_sides(changes: dict[str, Any], tmp_path: Path) -> None:
    experiment = asked(**changes)
    policy = TESTING.model_copy(
        update={"methods": (*TESTING.methods, "uldp-group"), "protections": ("none",)}
    )
    world = World(tmp_path, experiment, clients(), policy)
    with pytest.raises(CompositionError, match="institutions"):
        world.coordinate()
    answer = world.tell(world.terms(experiment))[0]
    assert isinstance(answer, Declined)
    assert answer.why.code is Code.EXPERIMENT
    world.close()


def test_a_message_is_signed_as_a_message() -> None:
    """Members sign keys and lists under the same identity: none passes for a message, nor a message for one."""
    key = IdentityKey.generate()
    data = SignedMessage(
        run=RUN, session=bytes(16), number=0, sender=SERVER, recipient=0, parts=(Hello(),)
    ).seal(key)
    content, signature = data[:-64], data[-64:]
    key.public.verify(b"fedveil/1/letter" + content, signature)
    for other in (b"", b"fedveil/1", b"fedveil/1/agreement-key"):
        with pytest.raises(CryptoError):
            key.public.verify(other + content, signature)
