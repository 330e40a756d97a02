"""An answer that a silo had kept, and that is not there any more, is not drawn again: the run is refused."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from fedveil.errors import IntegrityError, RunFolderError
from fedveil.federation import silo_state
from fedveil.federation.coordinator import CoordinatorParty
from fedveil.federation.silo_state import KEPT, ReplayMark, ReplayMarks
from fedveil.federation.store import RecordStore, RoundRecord
from fedveil.privacy.events import GaussianEvent
from fedveil.privacy.ledger import Ledger
from fedveil.protocols.refusals import Code
from fedveil.protocols.session_messages import Declined, ProtocolMessage
from tests.federation_world import RUN, World, small_keys
from tests.slow_cases import fast_every
from tests.test_federation_grammar import ALL, CASES, IDS, held_by
from tests.test_federation_grammar import asked as asked_of
from tests.test_federation_silo import asked, population, task, terms, vector

ANSWERS = "state-0/answers"
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def world(tmp_path: Path) -> Any:
    """Noise from the operating system: a sum that is drawn twice is drawn differently."""
    secure = asked()
    privacy = secure.privacy.model_copy(update={"insecure_seed": None})
    made = World(tmp_path, secure.model_copy(update={"privacy": privacy}), population())
    yield made
    made.close()


def charged(world: World) -> list[int]:
    return world.charged(0)


def put_back(world: World, lost: bool) -> Any:
    """Play round 2 between a copy of the answers and its return; return what was sent, and what is answered then."""
    answers, copy = world.folder / ANSWERS, world.folder / "copy"
    world.tell(world.terms(world.experiment))
    world.tell(*task(world), number=1)
    shutil.copytree(answers, copy)
    sent = vector(world.tell(*task(world, number=2), number=2))
    shutil.rmtree(answers)
    if not lost:
        copy.rename(answers)
    world.restart()
    world.tell(world.terms(world.experiment), session=2)
    return sent, world.tell(*task(world, number=2), session=2, number=1)


def refused(parts: Any) -> Code:
    (part,) = parts
    assert isinstance(part, Declined), part
    return part.why.code


@pytest.mark.parametrize("lost", [False, True], ids=["an old copy", "lost"])
def test_a_silo_whose_answers_went_back_draws_no_second_sum(
    world: World, lost: bool, caplog: pytest.LogCaptureFixture
) -> None:
    _, answer = put_back(world, lost)
    assert refused(answer) is Code.REPLACED
    assert charged(world) == [1, 2]
    if not lost:
        assert "lacks the last answer" in caplog.text
        assert "restore the folder as it was last" in caplog.text


def test_a_ledger_that_went_back_with_the_answers_draws_no_second_sum(world: World) -> None:
    """The marks stayed. In the open no peer hears of a charge before the next session; the coordinator said nothing.

    Where the ledger lacked the line that the last mark names, any answer passed for a later one.
    """
    state, copy = world.folder / "state-0", world.folder / "copy"
    world.tell(world.terms(world.experiment))
    world.tell(*task(world), number=1)
    shutil.copytree(state, copy)
    vector(world.tell(*task(world, number=2), number=2))
    for name in ("ledger.jsonl", "head", "answers"):
        (shutil.rmtree if (state / name).is_dir() else os.unlink)(state / name)
        (copy / name).rename(state / name)
    world.restart()
    world.tell(world.terms(world.experiment), session=2)
    assert refused(world.tell(*task(world, number=2), session=2, number=1)) is Code.REPLACED
    assert charged(world) == [1]


@pytest.mark.parametrize("name", fast_every(IDS, 3))
def test_under_every_protection_the_run_is_refused_before_a_charge(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Silo 0's host dies once its second answer, or step of one, is marked; its answers of before are put back."""
    small_keys(monkeypatch)
    world = World(tmp_path, asked_of(rounds=2, **CASES[name]), held_by(name), ALL)
    coordinator = world.coordinate()
    answered_twice(world, coordinator)
    coordinator.close()
    world.restart()
    before = charged(world)
    world.play()
    assert world.coordinator is not None
    assert world.coordinator.refused is Code.REPLACED
    assert charged(world) == before
    world.close()


def answered_twice(world: World, coordinator: CoordinatorParty) -> None:
    """Carry messages until silo 0 has marked twice, and put back the answers that it had before that."""
    answers, copy = world.folder / ANSWERS, world.folder / "copy"
    for _ in range(100):
        for number, data in coordinator.messages():
            if number == 0 and answers.exists():
                shutil.rmtree(copy, ignore_errors=True)
                shutil.copytree(answers, copy)
            reply = world.party(number).receive(data)
            marks = sum(
                len(path.read_bytes().splitlines()) for path in world.folder.glob(f"state-0/{KEPT}/*")
            )
            if marks == 2:
                shutil.rmtree(answers)
                copy.rename(answers)
                return
            coordinator.receive(number, reply)
    raise AssertionError("no two answers")


def test_a_round_is_given_no_oftener_than_its_charge_counts(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sessions without end, a restart between them or not: ciphertexts of one charge are counted in the statement."""
    monkeypatch.setattr(silo_state, "MOST_REPEATS", 3)
    answers = []
    for session in range(1, 6):
        world.tell(world.terms(world.experiment), session=session)
        answers.append(world.tell(*task(world), session=session, number=1))
        if session == 2:
            world.restart()
    assert len({vector(answer).tobytes() for answer in answers[:3]}) == 1
    assert [refused(answer) for answer in answers[3:]] == [Code.REPEATED] * 2
    assert charged(world) == [1]


def test_a_round_that_was_not_kept_is_drawn_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.tell(world.terms(world.experiment))
    world.tell(*task(world), number=1)
    with monkeypatch.context() as patched:
        patched.setattr(RecordStore, "_replace", Mock(side_effect=FULL))
        assert refused(world.tell(*task(world, number=2), number=2)) is Code.STORAGE
    world.restart()
    world.tell(world.terms(world.experiment), session=2)
    assert isinstance(world.tell(*task(world, number=2), session=2, number=1)[0], ProtocolMessage)
    assert charged(world) == [1, 2, 2]


def test_a_round_that_was_kept_and_not_marked_is_repeated_and_marked(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.tell(world.terms(world.experiment))
    world.tell(*task(world), number=1)
    with monkeypatch.context() as patched:
        patched.setattr(ReplayMarks, "append", Mock(side_effect=RunFolderError("no room")))
        assert refused(world.tell(*task(world, number=2), number=2)) is Code.STORAGE
    world.restart()
    world.tell(world.terms(world.experiment), session=2)
    assert isinstance(world.tell(*task(world, number=2), session=2, number=1)[0], ProtocolMessage)
    assert charged(world) == [1, 2]
    record = RecordStore(world.folder / ANSWERS).read(RUN)
    assert record is not None
    assert ReplayMarks(world.folder / "state-0" / KEPT).last(RUN) == ReplayMark.from_record(record)


def test_a_mark_fits_its_answer_and_later_ones(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.jsonl", unit="user") as ledger:
        heads = []
        for number in (1, 2):
            ledger.charge(run="r", round=number, attempt=0, event=GaussianEvent(noise_multiplier=5.0))
            heads.append(bytes.fromhex(ledger.head.digest))
        first, second = (
            RoundRecord(round=1, request=bytes(32), binding=bytes(32), head=head, contribution=b"four")
            for head in heads
        )
        assert ReplayMark.from_record(first).fits(first, ledger)
        assert ReplayMark.from_record(first).fits(second, ledger)
        assert not ReplayMark.from_record(second).fits(first, ledger)
        assert not ReplayMark.from_record(second).fits(None, ledger)
        assert not ReplayMark(ReplayMark.from_record(first).head, 5).fits(
            first, ledger
        )  # the second step of an answer is missing
        assert not ReplayMark("a" * 64, 4).fits(
            RoundRecord(round=1, request=bytes(32), binding=bytes(32), head=b"b" * 32), ledger
        )


@pytest.mark.parametrize("broken", ["write", "fsync"])
def test_marks_survive_a_torn_line_and_a_full_disk(
    tmp_path: Path, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    marks, one, two = ReplayMarks(tmp_path / KEPT), ReplayMark("a" * 64, 1), ReplayMark("b" * 64, 2)
    assert marks.last(RUN) is None
    assert marks.append(RUN, one, most=2)
    path = next((tmp_path / KEPT).iterdir())
    assert path.stat().st_mode & 0o777 == 0o600
    if broken == "write":
        path.write_bytes(path.read_bytes() + b"bbbb")  # a crash within a line
    else:
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", Mock(side_effect=FULL))
            with pytest.raises(RunFolderError, match="nothing was sent"):
                marks.append(RUN, two, most=2)
    assert marks.last(RUN) == one
    assert [marks.append(RUN, two, most=2) for _ in range(3)] == [True, True, False]
    assert marks.last(RUN) == two
    assert path.read_bytes() == b"a" * 64 + b" 1\n" + 2 * (b"b" * 64 + b" 2\n")


@pytest.mark.parametrize("damage", [bytes.upper, lambda line: line.replace(b" ", b""), lambda _: b"\n"])
def test_a_damaged_mark_is_refused(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    marks = ReplayMarks(tmp_path / KEPT)
    marks.append(RUN, ReplayMark("a" * 64, 1), most=2)
    path = next((tmp_path / KEPT).iterdir())
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(IntegrityError, match="line 1: damaged"):
        marks.last(RUN)


def test_each_round_is_marked_by_one_flush(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.tell(terms(world))
    world.tell(*task(world), number=1)
    flushed: list[str] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        flushed.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real(descriptor)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fsync)
        world.tell(*task(world, number=2), number=2)
    marked = [at for at, path in enumerate(flushed) if f"/{KEPT}" in path]
    assert len(marked) == 1
    assert max(at for at, path in enumerate(flushed) if "/answers" in path) < marked[0]
