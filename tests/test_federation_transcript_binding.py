"""Coordinators that tell silos different things: no sum opens, every charge stands, and the lie is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedveil.crypto.key_agreement import RoundId
from fedveil.crypto.keys import IdentityKey
from fedveil.federation import transcript_binding
from fedveil.federation.audit.run_record import RunRecord
from fedveil.federation.coordinator import CoordinatorParty
from fedveil.federation.transcript_binding import (
    check_request_signatures,
    exchange_context,
    inconsistent_silos,
    round_context,
    session_context,
    sign_request,
    with_totals,
)
from fedveil.privacy.adaptive_clip import AdaptiveClip
from fedveil.protocols.messages import Envelope, OwnMask, RevealRequest, RoundStart
from fedveil.protocols.recoverable_aggregation import RevealedShares, Survivors
from fedveil.protocols.refusals import Code, RefusalError
from fedveil.protocols.session_messages import (
    Declined,
    GlobalModel,
    ModelStored,
    ProtocolMessage,
    RequestSignature,
    RequestSignatures,
    RoundClip,
    RoundTask,
    SampledUsers,
    SamplingCommitment,
    SessionMessage,
    Terms,
    UserTotals,
)
from tests.federation_world import MOVING, World, asked, population, small_keys
from tests.slow_cases import fast_every
from tests.test_federation_grammar import ALL

MASKED = {"name": "secure-aggregation"}
SAMPLED = {"name": "uldp-avg", "user_sampling_rate": 0.5}
BY_RECORDS = {"name": "uldp-avg-w", "user_sampling_rate": 0.5}
NEEDS_TENSEAL = pytest.mark.skipif(find_spec("tenseal") is None, reason="needs the extra rlwe")
PROTECTIONS: dict[str, dict[str, Any]] = {
    "masked": {"method": SAMPLED, "protection": MASKED},
    "masked, by records": {"method": BY_RECORDS | {"clip": MOVING}, "protection": MASKED},
    "recovering": {"method": SAMPLED, "protection": MASKED | {"on_dropout": "recover", "max_dropouts": 1}},
    "blind": {"method": BY_RECORDS, "protection": {"name": "private-weighting", "n_max": 30}},
    "encrypted": {"method": SAMPLED, "protection": {"name": "partial-encryption", "ratio": 0.5}},
}
IDS = [pytest.param(name, marks=[NEEDS_TENSEAL] if name == "encrypted" else []) for name in PROTECTIONS]
OPENING = (OwnMask, RevealedShares, ModelStored)
"""What opens a sum, or says that one was opened."""

Lie = Callable[[SessionMessage], SessionMessage]


def bit(model: GlobalModel) -> GlobalModel:
    values = model.values.copy()
    values[0] = np.nextafter(values[0], np.float32(1))
    return GlobalModel(values=values)


def other_draw(drawn: SampledUsers) -> SampledUsers:
    return SampledUsers(users=~drawn.users)


LIES: dict[str, tuple[type[SessionMessage], Lie]] = {
    "one bit of the model": (GlobalModel, bit),
    "NaN as the model": (GlobalModel, lambda part: GlobalModel(values=np.full_like(part.values, np.nan))),
    "another draw": (SampledUsers, other_draw),
    "another commitment": (SamplingCommitment, lambda part: SamplingCommitment(commitment=bytes(32))),
    "one total": (
        UserTotals,
        lambda part: UserTotals(counts=part.counts + (np.arange(len(part.counts)) == 2)),
    ),
    "another clip": (RoundClip, lambda part: replace(part, length=0.1)),
    "less noise": (Terms, lambda part: _text(part, '"noise_multiplier":5.0', '"noise_multiplier":4.0')),
    "another bound": (Terms, lambda part: _text(part, '"clip":0.5', '"clip":0.25')),
    "more rounds": (Terms, lambda part: _text(part, '"rounds":2', '"rounds":3')),
    "another seed": (Terms, lambda part: _text(part, '"seed":', '"seed":1')),
}


def _text(terms: Terms, old: str, new: str) -> Terms:
    assert old in terms.experiment
    return replace(terms, experiment=terms.experiment.replace(old, new))


def lying(world: World, kind: type[SessionMessage], lie: Lie, silos: tuple[int, ...]) -> list[int]:
    """Have the coordinator tell some silos something else; return, when it has run, whom it told so."""
    told: list[int] = []

    def alter(silo: int, parts: tuple[SessionMessage, ...]) -> tuple[SessionMessage, ...]:
        if silo in silos and any(isinstance(part, kind) for part in parts):
            told.append(silo)
            return tuple(lie(part) if isinstance(part, kind) else part for part in parts)
        return parts

    world.lie = alter
    return told


class Silent(CoordinatorParty[Any]):
    """A coordinator that does not say which silo was told something else."""

    def check_requests(self, context: bytes, signatures: Any) -> None:
        """Take every signature."""


class Left:
    """What left the silos, by kind of message."""

    def __init__(self, world: World) -> None:
        self.kinds: list[type] = []
        note = world.note

        def noting(number: int, data: bytes) -> None:
            signed_message = world.answer(number, data)
            for part in signed_message.parts:
                relayed = isinstance(part, ProtocolMessage)
                self.kinds.append(type(Envelope.decode(part.message).message) if relayed else type(part))
            note(number, data)

        world.note = noting  # type: ignore[method-assign]


def cases() -> list[Any]:
    """Every lie that a protection has a part for."""
    has = {
        "masked": {GlobalModel, SampledUsers, Terms},
        "masked, by records": {UserTotals, RoundClip},
        "recovering": {GlobalModel, SampledUsers, Terms},
        "blind": {GlobalModel, SamplingCommitment, Terms},
        "encrypted": {SampledUsers, Terms},
    }
    return [
        pytest.param(name, lie, marks=[NEEDS_TENSEAL] if name == "encrypted" else [], id=f"{name}-{lie}")
        for name, kinds in has.items()
        for lie, (kind, _) in LIES.items()
        if kind in kinds
    ]


@pytest.mark.parametrize(("name", "lie"), fast_every(cases(), 2))
def test_a_coordinator_that_lies_to_one_silo_opens_no_sum(
    name: str, lie: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_keys(monkeypatch)
    monkeypatch.setattr(AdaptiveClip, "possible", lambda *_: True)  # round 1 has its own lock
    world = World(tmp_path, asked(rounds=2, **PROTECTIONS[name]), population(), ALL, party=Silent)
    left = Left(world)
    told = lying(world, *LIES[lie], silos=(1,))
    world.play()
    assert told
    outcome = world.outcome
    assert outcome.rounds == 0
    assert not [kind for kind in left.kinds if kind in OPENING]
    stopped = outcome.stopped or ""
    if LIES[lie][0] is Terms:  # the setup does not come about
        assert Code.PROTOCOL.template in stopped or "belongs to another run" in stopped
        assert not any(world.charged(silo) for silo in range(3))
    elif "NaN" not in lie or "silo silo1" not in stopped:
        assert "received another request in this round than this silo" in stopped
        given = [] if name == "recovering" else [1]  # there it is seen before anything is given
        assert all(world.charged(silo) == given for silo in range(3))
    world.close()


@pytest.mark.parametrize("name", IDS)
def test_an_honest_coordinator_names_the_silo_that_is_out_of_step(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its message was altered by who has its key, say: the run ends before anything is opened, and says where."""
    small_keys(monkeypatch)
    world = World(tmp_path, asked(rounds=2, **PROTECTIONS[name]), population(), ALL)
    left = Left(world)
    kind = {"masked, by records": UserTotals, "blind": SamplingCommitment}.get(name, SampledUsers)
    (lie,) = (one for part, one in LIES.values() if part is kind)
    lying(world, kind, lie, silos=(2,))
    world.play()
    stopped = world.outcome.stopped or ""
    assert stopped == "silo silo2: signed another request than this coordinator sent"
    assert not [one for one in left.kinds if one in OPENING]
    world.close()


def other_round(task: RoundTask) -> RoundTask:
    return RoundTask(round=task.round + 1)


def smaller_cohort(relay: ProtocolMessage) -> ProtocolMessage:
    envelope = Envelope.decode(relay.message)
    if not isinstance(envelope.message, RoundStart):
        return relay
    return ProtocolMessage(
        message=replace(envelope, message=RoundStart(cohort=envelope.message.cohort[:-1])).encode()
    )


IN_TURN = {"half": ((0, 1),), "one after another": ((0,), (1,), (2,))}


@pytest.mark.parametrize("told", IN_TURN)
@pytest.mark.parametrize("name", IDS)
def test_a_lie_to_half_of_the_silos_or_to_one_after_another_opens_no_sum(
    name: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is begun again after every refusal, and another silo is lied to: all charges stand, and nothing opens."""
    small_keys(monkeypatch)
    world = World(tmp_path, asked(rounds=2, **PROTECTIONS[name]), population(), ALL, party=Silent)
    left = Left(world)
    kind = {"masked, by records": UserTotals, "blind": SamplingCommitment}.get(name, SampledUsers)
    (lie,) = (one for part, one in LIES.values() if part is kind)
    for silos in IN_TURN[told]:
        assert not lying(world, kind, lie, silos=silos)
        world.play()
        assert world.outcome.rounds == 0
        assert "refuses" in (world.outcome.stopped or "")
        world.coordinator.close()
    assert not [one for one in left.kinds if one in OPENING]
    if name != "recovering":  # there it is seen before anything is given
        assert all(set(world.charged(silo)) == {1} for silo in range(3))
    world.close()


COHORTS = [name for name in IDS if name.values != ("blind",)]
"""All silos take part under private weighting: no message of it names a cohort."""


@pytest.mark.parametrize(
    ("name", "kind", "lie"),
    [pytest.param(*name.values, RoundTask, other_round, marks=name.marks) for name in IDS]
    + [pytest.param(*name.values, ProtocolMessage, smaller_cohort, marks=name.marks) for name in COHORTS],
)
def test_another_round_or_cohort_for_one_silo_opens_no_sum(
    name: str, kind: type[SessionMessage], lie: Lie, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_keys(monkeypatch)
    world = World(tmp_path, asked(rounds=2, **PROTECTIONS[name]), population(), ALL, party=Silent)
    left = Left(world)
    told = lying(world, kind, lie, silos=(1,))
    world.play()
    assert told
    assert world.outcome.rounds == 0
    assert "refuses" in (world.outcome.stopped or "")
    assert not [one for one in left.kinds if one in OPENING]
    world.close()


@pytest.mark.parametrize("silos", [(0,), (0, 1), (2,)])
def test_without_signatures_masks_do_not_cancel(
    silos: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second lock: were no signature compared, vectors of silos that were told different things stay uniform.

    Words of 64 bits show it by a sum that is out of range. In 16 bits, most sums of uniform words are in range: the
    run goes on with a useless sum, which tells as little.
    """
    monkeypatch.setattr(transcript_binding, "inconsistent_silos", lambda *_: ())
    monkeypatch.setattr(RunRecord, "_check", lambda *_: None)
    wide = {"channel": {"name": "additive", "word_bits": 64}}
    world = World(tmp_path, asked(rounds=2, **wide, **PROTECTIONS["masked"]), population(), ALL, party=Silent)
    lying(world, GlobalModel, bit, silos=silos)
    world.play()
    assert world.coordinator is not None
    plan = world.coordinator._server._plan  # type: ignore[attr-defined]
    by_chance = (2 * plan.largest_sum + 1) / 2.0 ** (8 * plan.word.itemsize)
    assert by_chance**plan.length < 1e-6
    assert "the masks did not cancel" in (world.outcome.stopped or "")
    assert all(world.charged(silo) == [1] for silo in range(3))
    world.close()


@pytest.mark.parametrize("change", ["left out", "of two", "none", "of another round"])
def test_signatures_cannot_be_held_back(change: str, tmp_path: Path) -> None:
    world = World(tmp_path, asked(rounds=2, **PROTECTIONS["masked"]), population(), ALL)
    left = Left(world)
    first: list[RequestSignatures] = []

    def alter(silo: int, parts: tuple[SessionMessage, ...]) -> tuple[SessionMessage, ...]:
        for place, part in enumerate(parts):
            if isinstance(part, RequestSignatures):
                first.append(part)
                if change == "left out":
                    return parts[:place] + parts[place + 1 :]
                kept = {"of two": part.signatures[:2], "none": ()}.get(change, first[0].signatures)
                return (*parts[:place], RequestSignatures(signatures=kept), *parts[place + 1 :])
        return parts

    world.lie = alter
    world.play()
    stopped = world.outcome.stopped or ""
    expected = {
        "left out": Code.SHAPE.template,
        "of two": "2 silos signed the request of this round; 3 are needed",
        "none": "0 silos signed",
        "of another round": "received another request",
    }
    assert expected[change] in stopped
    rounds = 1 if change == "of another round" else 0
    assert world.outcome.rounds == rounds
    assert left.kinds.count(OwnMask) == 3 * rounds
    world.close()


@pytest.mark.parametrize("shown", ["left out", "of the exchange before", "as they were"])
@pytest.mark.parametrize("name", ["recovering", "by transfer"])
def test_no_sum_opens_before_all_have_shown_where_their_ledgers_ended_after_their_charge(
    name: str, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There a silo charges after it has signed what it was asked: a coordinator hides no charge from the others."""
    small_keys(monkeypatch)
    transfer = {
        "method": BY_RECORDS,
        "protection": PROTECTIONS["blind"]["protection"] | {"private_sampling": True},
    }
    world = World(tmp_path, asked(rounds=1, **PROTECTIONS.get(name, transfer)), population(), ALL)
    left, before, heads = Left(world), dict[int, RequestSignatures](), set[bytes]()

    def alter(silo: int, parts: tuple[SessionMessage, ...]) -> tuple[SessionMessage, ...]:
        given = any(isinstance(part, ProtocolMessage) and _opens(part) for part in parts)
        return tuple(
            changed(silo, part, given) if isinstance(part, RequestSignatures) else part for part in parts
        )

    def changed(silo: int, part: RequestSignatures, given: bool) -> RequestSignatures:
        (zero, head), (one, _), (two, last) = part.signatures
        known = before.setdefault(silo, part)
        if not given or shown == "as they were":
            heads.add(part.signatures[1][1][0])
            return part
        kept = {"left out": (), "of the exchange before": ((one, known.signatures[1][1]),)}[shown]
        return RequestSignatures(signatures=((zero, head), *kept, (two, last)))

    world.lie = alter
    world.play()
    stopped = world.outcome.stopped
    if shown == "as they were":
        assert stopped is None
        assert len(heads) == 2  # ahead of its charge and after it
    else:
        told = {
            "left out": "silo silo1 counts as a contributor" if name == "recovering" else "2 silos signed"
        }
        assert told.get(shown, "silo silo1 received another request") in (stopped or "")
        assert not [kind for kind in left.kinds if kind in OPENING]
        assert world.charged(1) == [1]
    world.close()


def _opens(relay: ProtocolMessage) -> bool:
    return isinstance(Envelope.decode(relay.message).message, Survivors | RevealRequest)


def test_a_signature_is_of_what_was_asked() -> None:
    keys = [IdentityKey.generate() for _ in range(3)]
    roster = tuple(key.public for key in keys)
    signatures = tuple((number, sign_request(key, bytes(32), bytes(32))) for number, key in enumerate(keys))
    check_request_signatures(roster, bytes(32), signatures, 3)
    assert inconsistent_silos(roster, b"x" * 32, signatures) == [0, 1, 2]
    swapped = ((0, signatures[1][1]), *signatures[1:])
    with pytest.raises(RefusalError, match="silo 0 received another request"):
        check_request_signatures(roster, bytes(32), swapped, 3)
    with pytest.raises(RefusalError, match="silo 7 received"):
        check_request_signatures(roster, bytes(32), (*signatures, (7, signatures[0][1])), 3)
    with pytest.raises(RefusalError, match="2 silos signed"):
        check_request_signatures(roster, bytes(32), signatures[:2], 3)


def test_a_context_is_of_all_that_was_told() -> None:
    """Golden values of version 3; and whatever of it changes, the context changes."""
    session = session_context(bytes(16), bytes(32))
    parts: list[SessionMessage] = [
        SamplingCommitment(commitment=bytes(32)),
        GlobalModel(values=np.arange(3, dtype=np.float32)),
        RoundTask(round=1),
    ]
    context = round_context(session, bytes(32), parts)
    assert session.hex() == "c30cff6e30a0d1e6113d5f5ffac633c95abcdf59094b1ed701473fffbfa1518e"
    assert context.hex() == "bd5109043b72c3c7b032925fbc27c8921fb7cc7cce853db5610b70b264901b99"
    seen = {context}
    for other in (
        round_context(session_context(b"1" * 16, bytes(32)), bytes(32), parts),
        round_context(session_context(bytes(16), b"1" * 32), bytes(32), parts),
        round_context(session, with_totals(bytes(32), [UserTotals(counts=np.array([1, 2]))]), parts),
        round_context(session, with_totals(bytes(32), [UserTotals(counts=np.array([1, 3]))]), parts),
        round_context(session, bytes(32), [*parts[:2], RoundTask(round=2)]),
        round_context(
            session, bytes(32), [parts[0], GlobalModel(values=-np.arange(3, dtype=np.float32)), parts[2]]
        ),
        round_context(session, bytes(32), [SamplingCommitment(commitment=b"1" * 32), *parts[1:]]),
        round_context(session, bytes(32), parts[1:]),
        round_context(session, bytes(32), [*parts, RoundClip(length=0.5)]),
        round_context(session, bytes(32), [*parts, SampledUsers(users=np.ones(2, dtype=np.bool_))]),
    ):
        assert other not in seen
        seen.add(other)
    assert (
        round_context(
            session,
            bytes(32),
            [*parts, ProtocolMessage(message=b"own"), RequestSignature(signed=(bytes(32), bytes(64)))],
        )
        == context
    )
    here, there = (RoundId(run=bytes(16), round=1, attempt=0, context=one) for one in (session, context))
    assert here == there  # no message carries it
    assert here.encode() != there.encode()
    assert len({exchange_context(context, place) for place in range(3)} | {context}) == 4
    assert Declined not in {type(part) for part in parts}
