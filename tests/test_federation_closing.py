"""The end of a run: a silo signs no statement of fewer charges than its own ledger shows, whoever asks for it."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedveil.federation.audit.run_record import AGREED, signed_end
from fedveil.federation.silo_session.session import SiloSession
from fedveil.federation.silo_session.tasks import SiloTrainingTask
from fedveil.federation.transport.interface import LARGEST_STATEMENT
from fedveil.privacy.events import atoms, compose
from fedveil.privacy.statement import Statement
from fedveil.protocols.refusals import Code, RefusalError
from fedveil.protocols.session_messages import Attestation, Finalize, Join
from fedveil.run.folder.statement import state
from fedveil.run.populations import FixedPopulation
from fedveil.run.releases.side_releases import SpentBudget
from fedveil.run.setup import prepare
from fedveil.training.trainer import PartitionedTrainer
from tests.federation_world import RUN, World, asked, population

SECURE: dict[str, Any] = {"privacy": {"insecure_seed": None}}
MASKED = SECURE | {"protection": {"name": "secure-aggregation"}}
RECOVER = SECURE | {"protection": {"name": "secure-aggregation", "on_dropout": "recover", "max_dropouts": 1}}


def played(folder: Path, rounds: int, changes: dict[str, Any]) -> World:
    world = World(folder, asked(rounds=rounds, **changes), population())
    world.play()
    return world


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> World:
    return played(tmp_path_factory.mktemp("masked"), 2, MASKED)


@pytest.fixture(scope="module")
def recovering(tmp_path_factory: pytest.TempPathFactory) -> World:
    return played(tmp_path_factory.mktemp("recovering"), 1, RECOVER)


def session_of(world: World) -> SiloSession:
    party = world.party()
    assert party._session is not None
    return party._session


def stated(session: SiloSession, rounds: int, charges: int) -> Statement:
    """What the terms give for so many rounds and charges, made as an honest party makes it."""
    work = session.work
    assert isinstance(work, SiloTrainingTask)
    prepared = work.prepared
    of_round = atoms(prepared.guarantee.event_at_round(prepared.guarantee.event, 1))
    event = compose(Counter(dict.fromkeys(of_round, charges) if charges else {}))
    return state(
        prepared, rounds, SpentBudget(charges=charges, side_releases=prepared.side_releases, event=event)
    )


def closing(statement: Statement, rounds: int, charges: int) -> Finalize:
    return Finalize(round=rounds, charges=charges, line=bytes(32), statement=json.dumps(statement.to_json()))


def signs(session: SiloSession, rounds: int, charges: int) -> bool:
    try:
        session.sign_statement(closing(stated(session, rounds, charges), rounds, charges))
    except RefusalError as error:
        return error.why.code is not Code.STATEMENT
    return True


@pytest.mark.parametrize(
    ("rounds", "charges", "fits"),
    [
        (2, 2, True),
        (1, 2, True),  # the second was charged, and given up
        (0, 0, False),
        (1, 1, False),
        (0, 1, False),
        (0, 2, False),
        (2, 1, False),
    ],
)
def test_a_round_that_a_silo_gave_something_to_is_charged_in_what_it_signs(
    masked: World, rounds: int, charges: int, fits: bool
) -> None:
    """A coordinator that takes its folder back before the last sum, and has the run without it signed."""
    assert signs(session_of(masked), rounds, charges) is fits


def test_a_silo_signs_one_end_of_a_run(masked: World) -> None:
    """A coordinator that writes another last release, or model, into its record once the end is signed."""
    session, run = session_of(masked), masked.run_folder.path
    known = json.loads((run / AGREED).read_text())
    same = replace(closing(stated(session, 2, 2), 2, 2), line=bytes.fromhex(known["line"]))
    assert isinstance(session.sign_statement(same), Attestation)
    with pytest.raises(RefusalError, match="signs no other end"):
        session.sign_statement(replace(same, line=b"1" * 32))


def test_every_attempt_that_is_another_release_is_charged_in_what_a_silo_signs(recovering: World) -> None:
    """A coordinator that opens one round again and again, under recovery, and charges it once."""
    session = session_of(recovering)
    assert signs(session, 1, 1)
    books = session._books
    for attempt in (1, 2):
        books.ledger.ledger.charge(
            run=books.name,
            round=1,
            attempt=attempt,
            event=session.work.event(1, again=True),
            budget=None,
            origin=books.origin,
        )
    assert [signs(session, 1, charges) for charges in (1, 2, 3, 4)] == [False, False, True, True]


def test_a_silo_that_crashed_between_charge_and_answer_signs_what_was_charged_once(masked: World) -> None:
    """Where a round is repeated, the silo's own crash costs its own ledger alone."""
    session = session_of(masked)
    books = session._books
    books.ledger.ledger.charge(
        run=books.name,
        round=2,
        attempt=1,
        event=session.work.event(2, again=True),
        budget=None,
        origin=books.origin,
    )
    assert signs(session, 2, 2)


@pytest.mark.parametrize("changes", [MASKED, RECOVER], ids=["masked", "recover"])
def test_a_silo_that_gave_nothing_signs_nothing(tmp_path: Path, changes: dict[str, Any]) -> None:
    world = World(tmp_path, asked(rounds=2, **changes), population())
    assert isinstance(world.tell(world.terms(), run=RUN)[0], Join)
    session = session_of(world)
    assert signs(session, 0, 0)  # the run ended before its first round
    assert not signs(session, 2, 2)
    assert not signs(session, 1, 1)
    world.close()


def test_a_figure_of_a_publication_is_not_made_smaller(tmp_path: Path) -> None:
    world = played(tmp_path, 1, SECURE | {"method": {"name": "uldp-naive"}, "protection": {"name": "none"}})
    session = session_of(world)
    honest = stated(session, 1, 1)
    (figure,) = honest.as_published
    assert figure.value is not None
    for factor, words in ((1.0, "other end"), (1.1, "other end"), (0.99, "computes"), (0.001, "computes")):
        told = replace(honest, as_published=(replace(figure, value=figure.value * factor),))
        with pytest.raises(RefusalError, match=words):
            session.sign_statement(closing(told, 1, 1))
    world.close()


def test_an_absurd_end_is_refused_before_anything_is_computed(recovering: World) -> None:
    """Four thousand million charges would take hours to compose."""
    session = session_of(recovering)
    honest = closing(stated(session, 1, 3), 1, 3)
    for absurd in (
        replace(honest, charges=2**32 - 1),
        replace(honest, charges=20_000),
        replace(honest, round=2**32 - 1, charges=2**32 - 1),
        replace(honest, statement=" " * (LARGEST_STATEMENT + 1)),
    ):
        with pytest.raises(RefusalError, match="differs from the one that this silo computes"):
            session.sign_statement(absurd)


def test_who_has_signed_the_end_of_a_run_gives_nothing_more_to_it(tmp_path: Path) -> None:
    """A coordinator has the end signed after one round of two, and goes on: also with silos that were started again."""
    world = World(tmp_path, asked(rounds=2, **SECURE), population())
    coordinator = world.coordinator = world.coordinate()
    while coordinator._part.number == 1:
        world.exchange(coordinator)
    coordinator._part.step.refusal = lambda: "as if nothing were left of the budget"
    coordinator.stop("nothing is left of the budget", between_rounds=True)
    world.farewell()
    assert [one["silo"] for one in signed_end(world.run_folder.path)] == [0, 1, 2]
    for number, party in enumerate(world.silos):
        assert party is not None
        party.close()
        world.silos[number] = world.silo(number)
    world.play()
    assert "has signed the end of the run" in (coordinator_of(world).outcome.stopped or "")
    assert all(party is not None and party._session is None for party in world.silos)  # and joins nothing
    assert world.charged(0) == [1]
    world.close()


def test_the_end_of_a_run_that_can_go_on_is_signed_by_nobody(tmp_path: Path) -> None:
    world = World(tmp_path, asked(rounds=2, **SECURE), population())
    coordinator = world.coordinator = world.coordinate()
    while coordinator._part.number == 1:
        world.exchange(coordinator)
    coordinator.stop("somebody interrupted it")
    world.farewell()
    assert (world.run_folder / "privacy.json").exists()
    assert not (world.run_folder / AGREED).exists()
    world.close()


def test_a_signature_of_another_end_is_not_kept(masked: World) -> None:
    before = signed_end(masked.run_folder.path)
    assert len(before) == 3
    coordinator_of(masked)._record.agree(0, (Attestation(signature=masked.keys[0].sign(b"another end")),))
    assert signed_end(masked.run_folder.path) == before


def coordinator_of(world: World) -> Any:
    assert world.coordinator is not None
    return world.coordinator


def test_what_parties_sign_says_nothing_of_one_of_their_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """A silo that trains on a CUDA device, or by compiled kernels, signs the text of one that has none."""

    def said(name: str) -> tuple[str, ...]:
        return prepare(asked(rounds=1, trainer={"name": name}), FixedPopulation(population())).uncovered

    here = said("gram")
    monkeypatch.setattr(PartitionedTrainer, "has_generated_kernels", property(lambda trainer: True))
    assert said("gram") == here
    assert sum("a silo's training in batches" in one for one in here) == 1
    assert not any("training in batches" in one for one in said("loop"))
