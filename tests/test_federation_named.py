"""Who is named where a silo's lie stops a run: the liar, and never an honest silo alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedveil.crypto.key_agreement import SignedKey
from fedveil.errors import ProtocolError
from fedveil.federation.coordinator import CoordinatorParty
from fedveil.federation.exchange import check_models_agree
from fedveil.federation.ledger_heads import sign_heads
from fedveil.federation.transcript_binding import exchange_context, sign_request
from fedveil.protocols.messages import Announcement, Envelope, Message
from fedveil.protocols.partial_encryption.plan import SealedKeys
from fedveil.protocols.recoverable_aggregation import ShareBundle, SignedSurvivors
from fedveil.protocols.refusals import Code, Refusal
from fedveil.protocols.session_messages import (
    Join,
    ModelStored,
    ProtocolMessage,
    RequestSignature,
    SessionMessage,
)
from fedveil.protocols.weighting.plan import SealedSeed
from tests.federation_world import World, asked, population, small_keys
from tests.test_federation_grammar import ALL, CASES, needs_tenseal

Lie = Callable[[World, SessionMessage], SessionMessage]


def stopped(folder: Path, case: str, lie: Lie) -> str | None:
    """Play a run in which silo 0 changes what it answers; return why it ended early."""
    world = World(folder, asked(**CASES[case]), population(), ALL)
    coordinator = world.coordinator = world.coordinate()
    while not coordinator.is_finished:
        for number, data in reversed(coordinator.messages()):  # silo 0, which lies, refuses nothing first
            reply = world.party(number).receive(data)
            if number == 0:
                signed_message = world.answer(0, reply)
                changed = tuple(lie(world, part) for part in signed_message.parts)
                reply = replace(signed_message, parts=changed).seal(world.keys[0])
            coordinator.receive(number, reply)
    world.close()
    return world.outcome.stopped


def relayed(kind: type[Message], change: Callable[[Any], Message]) -> Lie:
    """A lie in the messages of a kind."""

    def lie(_: World, part: SessionMessage) -> SessionMessage:
        envelope = Envelope.decode(part.message) if isinstance(part, ProtocolMessage) else None
        if envelope is None or not isinstance(envelope.message, kind):
            return part
        return ProtocolMessage(message=replace(envelope, message=change(envelope.message)).encode())

    return lie


def _other(sealed: bytes) -> bytes:
    return sealed[:-1] + bytes([sealed[-1] ^ 1])


@pytest.mark.parametrize(
    ("case", "lie"),
    [
        ("masked", relayed(Announcement, lambda _: Announcement(key=SignedKey(public=bytes(32), signature=bytes(64))))),
        (
            "recovering",
            relayed(ShareBundle, lambda m: replace(m, shares=tuple((n, _other(one)) for n, one in m.shares))),
        ),
        ("recovering", relayed(SignedSurvivors, lambda m: SignedSurvivors(signature=bytes(64)))),
        ("blind", relayed(SealedSeed, lambda m: SealedSeed(sealed=_other(m.sealed)))),
        pytest.param(
            "encrypted",
            relayed(SealedKeys, lambda m: SealedKeys(sealed=_other(m.sealed))),
            marks=needs_tenseal,
        ),
    ],
    ids=["key", "share", "list of survivors", "seed", "common keys"],
)  # fmt: skip
def test_a_silo_whose_message_another_one_refuses_is_named(
    case: str, lie: Lie, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator cannot read it; it was told that silo 2 refuses a message of the protocol, and nothing else."""
    small_keys(monkeypatch)
    assert (
        stopped(tmp_path, case, lie)
        == f"silo silo2 refuses (request): {Refusal(Code.OF_SILO, (0.0,)).describe(['silo0'])}"
    )


@pytest.mark.parametrize("kind", [Join, RequestSignature])
def test_a_silo_shows_its_peers_the_end_of_its_ledger_that_it_shows_the_coordinator(
    kind: type[SessionMessage], tmp_path: Path
) -> None:
    """An end from before had silo 1 refuse, of which the run said that lines were missing from its own ledger."""
    seen: list[bytes] = []
    parties: list[CoordinatorParty[Any]] = []

    def lie(world: World, part: SessionMessage) -> SessionMessage:
        coordinator = world.coordinator
        assert coordinator is not None
        if coordinator not in parties:
            parties.append(coordinator)
        if isinstance(part, RequestSignature):
            seen.append(part.signed[0])
            if kind is RequestSignature and len(seen) == 3:
                return RequestSignature(
                    signed=sign_request(world.keys[0], exchange_context(coordinator._asked, 0), seen[0])
                )
        if isinstance(part, Join) and kind is Join:
            seen.append(part.heads[0][0])
            heads = [bytes([9]) * 32, *(head for head, _ in part.heads[1:])]
            return Join(heads=sign_heads(world.keys[0], coordinator._session, heads))
        return part

    said = stopped(tmp_path, "masked", lie)
    assert said == "silo silo0: shows the other silos another ledger head than the coordinator"
    assert parties[0]._heads.last("silo0") == seen[-1]  # a ledger that goes back to before it is noticed


@pytest.mark.parametrize(
    ("tags", "said"),
    [
        (b"xaa", "silo 0: ends the round with another model or optimiser's state than most silos"),
        (b"axa", "silo 1: ends the round with another model or optimiser's state than most silos"),
        (b"ax", "silos north and south end the round with different models or optimisers' states"),
        (b"aabb", "silos north and west end the round with different models or optimisers' states"),
    ],
)
def test_a_silo_with_another_model_than_most_is_named(tags: bytes, said: str) -> None:
    """Silo 0 was taken for right: where it lied, silo 1 was named."""
    names = ("north", "south", "west", "east")
    check_models_agree({silo: (ModelStored(tag=bytes(32)),) for silo in range(3)}, names)
    with pytest.raises(ProtocolError) as raised:
        check_models_agree(
            {silo: (ModelStored(tag=bytes([tag]) * 32),) for silo, tag in enumerate(tags)}, names
        )
    assert str(raised.value) == said
