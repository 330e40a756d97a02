"""A silo's ledger that was deleted, cut, restored or copied is refused: at the start, or in the next session."""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedveil.checks import run_check
from fedveil.errors import IntegrityError, RunFolderError
from fedveil.federation.audit.ledger_audit import _counted, _signed, export_ledger, verify_ledger
from fedveil.federation.ledger_heads import HEADS, NONE, SeenHeads, sign_heads
from fedveil.federation.policy import Policy
from fedveil.federation.silo import TERMS
from fedveil.federation.silo_ledger import HEAD, LEDGER, SiloLedger, adopt
from fedveil.federation.store import RecordStore
from fedveil.files import read_content
from fedveil.privacy import ledger as ledgers
from fedveil.privacy.accounting import PldAccountant, make_accountant
from fedveil.privacy.events import (
    ConcentratedEvent,
    Event,
    GaussianEvent,
    LaplaceEvent,
    PoissonSampledEvent,
    all_of,
    split_grid_loss,
)
from fedveil.privacy.ledger import (
    Entry,
    Ledger,
    Note,
    Origin,
    parse_lines,
    read_entries,
    read_head,
    read_lines,
)
from fedveil.protocols.refusals import Code, Refusal
from fedveil.protocols.session_messages import LedgerHeads, SessionMessage
from fedveil.run.folder.run_folder import RunFolder
from fedveil.run.populations import FixedPopulation
from fedveil.run.setup import prepare
from tests.federation_world import Killed, Moments, World, asked, population, small_keys
from tests.slow_cases import slow_only
from tests.test_federation_grammar import ALL

STATE = "state-0"


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path, asked(rounds=2), population())
    yield made
    made.close()


def stopped(world: World) -> str | None:
    """Play a run of its own; return why it ended early."""
    world.run_folder = RunFolder.create(world.folder, world.experiment)
    world.play()
    assert world.coordinator is not None
    world.coordinator.close()
    return world.outcome.stopped


def put_back(world: World, copy: Path) -> None:
    """Replace the state of silo 0, whose process has ended, by an earlier copy."""
    world.stop()
    shutil.rmtree(world.folder / STATE)
    shutil.copytree(copy, world.folder / STATE)


def test_every_charge_says_when_for_whom_and_under_what(world: World) -> None:
    assert stopped(world) is None
    lines = read_lines(world.folder / STATE / LEDGER)
    notes = [line for line in lines if isinstance(line, Note)]
    charges = [line for line in lines if isinstance(line, Entry)]
    assert [note.kind for note in notes] == ["opened", "policy", "ended"]
    assert json.loads(notes[1].text)["epsilon"] == world.policy.epsilon
    assert [one.round for one in charges] == [1, 2]
    kept = {path.stem for path in (world.folder / STATE / TERMS).iterdir()}
    for one in charges:
        assert one.origin is not None
        assert {one.origin.terms} == kept
        assert one.time is not None
    (record,) = (world.folder / STATE / "answers").glob("*.answer")
    head = RecordStore(record.parent).heads()
    path = world.folder / STATE / LEDGER
    assert list(head) == [parse_lines(path, path.read_bytes())[1][charges[-1].index]]
    assert (
        SeenHeads(world.folder / HEADS, bytes(32)).last("silo0").hex()
        == (world.folder / STATE / HEAD).read_text()
    )
    world.restart()
    assert [note.kind for note in read_lines(world.folder / STATE / LEDGER) if isinstance(note, Note)] == [
        *("opened", "policy", "ended", "opened")
    ]


def test_a_ledger_and_its_export_count_what_the_grid_of_the_noise_costs(world: World, tmp_path: Path) -> None:
    """As the run's statement does: no epsilon of a silo is below what the statement says of whom it counts."""
    assert stopped(world) is None
    charged = all_of(entry.event for entry in read_entries(world.folder / STATE / LEDGER))
    prepared = prepare(world.experiment, FixedPopulation(world.held))
    event, loss = split_grid_loss(charged)
    assert loss == pytest.approx(2 * prepared.length * prepared.guarantee.grid_loss, rel=1e-9)
    for name in ("pld", "rdp"):
        accountant = make_accountant(name)
        found = accountant.epsilon(charged, 1e-5)
        assert (
            found
            == accountant.epsilon(event, 1e-5 * math.exp(-loss)) + loss
            > accountant.epsilon(event, 1e-5)
        )
    told = dict(exported(world, tmp_path / "audit.json")["epsilon"])
    assert told["pld"] == make_accountant("pld").epsilon(charged, 1e-5)


def test_a_clock_that_jumps_changes_no_charge(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines follow one another by their digests; what a clock says is kept and believed by nobody."""
    times = itertools.cycle(("2031-01-01T00:00:00Z", "2001-01-01T00:00:00Z"))
    monkeypatch.setattr(ledgers, "now", lambda: next(times))
    assert stopped(world) is None
    world.restart()
    lines = read_lines(world.folder / STATE / LEDGER)
    assert {"2031-01-01T00:00:00Z", "2001-01-01T00:00:00Z"} < {line.time for line in lines}
    assert [line.round for line in lines if isinstance(line, Entry)] == [1, 2]
    exported(world, tmp_path / "audit.json")
    assert not failed(tmp_path / "audit.json")


@pytest.mark.parametrize("kept", [("head", "answers"), ("head",), ("answers",)], ids=" and ".join)
@pytest.mark.parametrize("lines", [None, 1, *slow_only([0, 2, 3])])
def test_a_ledger_that_was_deleted_or_cut_is_refused_at_the_start(
    world: World, kept: tuple[str, ...], lines: int | None
) -> None:
    """Whatever is left of it, as long as the head or one answer of a later time is there."""
    assert stopped(world) is None
    ledger = world.folder / STATE / LEDGER
    whole = ledger.read_bytes()
    if lines is None:
        ledger.unlink()
    else:
        ledger.write_bytes(b"".join(whole.splitlines(keepends=True)[:lines]))
    if "answers" not in kept:
        shutil.rmtree(world.folder / STATE / "answers")
    if "head" not in kept:
        (world.folder / STATE / HEAD).unlink()
    with pytest.raises(IntegrityError, match=r"ledger.jsonl: lines are missing.*adopt"):
        world.restart()
    ledger.write_bytes(whole)
    if "head" in kept:
        world.restart()
        assert stopped(world) is None


def test_a_ledger_without_the_head_that_stood_beside_it_is_refused(world: World) -> None:
    (world.folder / STATE / HEAD).unlink()
    with pytest.raises(IntegrityError, match="head, which stood beside it, is gone"):
        world.restart()
    (world.folder / STATE / HEAD).write_text("x")
    with pytest.raises(IntegrityError, match="damaged"):
        world.restart()


def test_a_state_restored_from_any_earlier_moment_is_refused_in_the_next_session(
    world: World, tmp_path: Path
) -> None:
    """The ledger, the head and the answers, all as they were: only others remember."""
    moments = tmp_path / "moments"
    for number in range(3):
        shutil.copytree(world.folder / STATE, moments / str(number))
        assert stopped(world) is None
    for number in range(3):
        put_back(world, moments / str(number))
        world.restart()
        said = stopped(world)
        assert said is not None
        assert "silo0 refuses (integrity)" in said
        assert len(read_entries(world.folder / STATE / LEDGER)) == 2 * number


@pytest.mark.parametrize("forgets", ["all", "the last runs"])
def test_peers_remember_where_the_coordinator_does_not(forgets: str, world: World, tmp_path: Path) -> None:
    """A silo goes back together with the coordinator: its peers have heard a later head, and say so."""
    assert stopped(world) is None
    shutil.copytree(world.folder / STATE, tmp_path / "early")
    heads = tmp_path / HEADS
    earlier = heads.read_bytes()
    assert stopped(world) is None
    assert stopped(world) is None  # begins by telling all of the heads after the second run
    put_back(world, tmp_path / "early")
    world.restart()
    heads.unlink() if forgets == "all" else heads.write_bytes(earlier)
    said = stopped(world)
    assert said is not None
    assert "silo0 refuses (integrity)" in said
    assert len(read_entries(world.folder / STATE / LEDGER)) == 2
    assert (
        len(read_entries(world.folder / "state-1" / LEDGER)) == 6 + 1
    )  # it was asked before anybody refused


BLIND: dict[str, Any] = {"name": "private-weighting", "n_max": 30, "private_sampling": True}
MASKED: dict[str, dict[str, Any]] = {
    "all": {"protection": {"name": "secure-aggregation"}},
    "recovering": {"protection": {"name": "secure-aggregation", "on_dropout": "recover", "max_dropouts": 1}},
    "by transfer": {"method": {"name": "uldp-avg-w", "user_sampling_rate": 0.5}, "protection": BLIND},
}


@pytest.mark.parametrize(
    ("played", "back"), [("all", 2), ("recovering", 2), ("recovering", 3), ("by transfer", 3)]
)
def test_peers_remember_the_last_session_where_its_rounds_are_masked(
    tmp_path: Path, played: str, back: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Silo and coordinator go back together, to the middle of a session: peers heard of every charge in its round.

    Where a round recovers, or users are drawn by oblivious transfer, a silo charges after it has signed what it was
    asked; it signs again where its ledger ends then, and peers see that before they give what opens the sum.
    """
    small_keys(monkeypatch)
    rounds = 2 if played == "all" else 3
    experiment = asked(rounds=rounds, privacy={"insecure_seed": None}, **MASKED[played])
    world = World(tmp_path, experiment, population(), ALL)
    heads, opened = tmp_path / HEADS, world.coordinate()
    world.coordinator = opened
    while opened._part.number < back:
        assert not opened.is_finished
        world.exchange(opened)
    shutil.copytree(tmp_path / STATE, tmp_path / "early")
    earlier = heads.read_bytes()
    while opened.outcome is None:
        world.exchange(opened)
    assert len(read_entries(tmp_path / STATE / LEDGER)) == rounds
    put_back(world, tmp_path / "early")
    world.silos[0] = world.silo(0)
    heads.write_bytes(earlier)
    said = stopped(world)
    assert said is not None
    assert "silo0 refuses (integrity)" in said
    assert len(read_entries(tmp_path / STATE / LEDGER)) == back - 1
    world.close()


@pytest.mark.parametrize("forgets", ["all", "the last runs"])
def test_a_coordinator_that_was_restored_is_no_reason_to_refuse(forgets: str, world: World) -> None:
    """What it says of peers is not theirs: all ledgers have what it remembers, and the run is played."""
    assert stopped(world) is None
    heads = world.folder / HEADS
    earlier = heads.read_bytes()
    assert stopped(world) is None
    assert stopped(world) is None
    heads.unlink() if forgets == "all" else heads.write_bytes(earlier)
    assert stopped(world) is None
    assert all(len(read_entries(world.folder / f"state-{silo}" / LEDGER)) == 8 for silo in range(3))


@pytest.mark.parametrize("hides", ["leaves one out", "of another session", "zeros", "of another silo"])
def test_a_coordinator_hides_nothing_that_peers_say_of_a_ledger(
    hides: str, world: World, tmp_path: Path
) -> None:
    """Silo 0 went back, and the coordinator helps: it plays no round."""
    before: list[LedgerHeads] = []

    def alter(silo: int, parts: tuple[SessionMessage, ...]) -> tuple[SessionMessage, ...]:
        return tuple(changed(part) if isinstance(part, LedgerHeads) and silo == 0 else part for part in parts)

    def changed(told: LedgerHeads) -> LedgerHeads:
        before.append(told)
        if len(before) == 1:
            return told
        (first, (heard, own)), second = told.silos
        return {
            "leaves one out": LedgerHeads(silos=(second,)),
            "of another session": before[0],
            "zeros": LedgerHeads(silos=((first, ((NONE, heard[1]), own)), second)),
            "of another silo": LedgerHeads(silos=((first, second[1]), second)),
        }[hides]

    world.lie = alter
    shutil.copytree(world.folder / STATE, tmp_path / "early")
    assert stopped(world) is None
    put_back(world, tmp_path / "early")
    world.restart()
    (world.folder / HEADS).unlink()
    said = stopped(world)
    assert said is not None
    expected = (
        Refusal(Code.HEADS_FEW, (1.0, 2.0)) if hides == "leaves one out" else Refusal(Code.HEADS, (1.0,))
    )
    assert expected.describe(["silo0", "silo1", "silo2"]) in said
    assert not read_entries(world.folder / STATE / LEDGER)


def test_a_silo_that_says_of_a_ledger_that_lines_are_missing_is_named(world: World) -> None:
    """Whether it lies, nobody can tell but the two: the silo that it speaks of is not left alone with the blame."""
    assert stopped(world) is None

    def alter(silo: int, parts: tuple[SessionMessage, ...]) -> tuple[SessionMessage, ...]:
        return tuple(changed(part) if isinstance(part, LedgerHeads) and silo == 0 else part for part in parts)

    def changed(told: LedgerHeads) -> LedgerHeads:
        first, (last, (_, own)) = told.silos
        assert world.coordinator is not None
        (made,) = sign_heads(world.keys[last], world.coordinator._session, [bytes([7]) * 32])
        return LedgerHeads(silos=(first, (last, (made, own))))

    world.lie = alter
    said = stopped(world)
    assert said is not None
    assert "silo silo2 has signed that it knows" in said
    sentence = Refusal(Code.LATER_HEAD, (2.0,)).describe(["silo0", "silo1", "silo2"])
    assert f"silo0 refuses (integrity): {sentence}" == said.removeprefix("silo ")
    assert len(read_entries(world.folder / STATE / LEDGER)) == 2


def test_a_ledger_that_is_replaced_while_its_silo_serves_is_refused(tmp_path: Path) -> None:
    """Even where it ends in a line that nobody has heard of: the process knows what it has charged."""
    policy = Policy(epsilon=1.0, clip=1.0)
    ledger = SiloLedger(tmp_path, policy, RecordStore(tmp_path / "answers"), charter=bytes(32), serial=0)
    before = (tmp_path / LEDGER).read_bytes()
    origin = Origin(terms="0" * 64, coordinator="1" * 64, membership=1, policy=ledger.policy_digest)
    event = GaussianEvent(noise_multiplier=9.0)
    ledger.ledger.charge(run="r", round=1, attempt=0, event=event, budget=None, origin=origin)
    assert (tmp_path / HEAD).read_text() == ledger.ledger.head.digest
    ledger.reopen(policy)
    older = tmp_path / "older.jsonl"
    older.write_bytes(before)
    with Ledger(older, unit="user") as other:
        other.note("opened", "another start")
    older.replace(tmp_path / LEDGER)
    for _ in range(2):
        with pytest.raises(IntegrityError, match="lines are missing"):
            ledger.reopen(policy)
    ledger.close()


def test_a_ledger_of_an_older_form_is_refused_with_its_name(tmp_path: Path) -> None:
    """Before a version was released, a note of a membership had its serial number alone."""
    with Ledger(tmp_path / LEDGER, unit="user") as older:
        older.note("membership", "3")
    (tmp_path / HEAD).write_text(read_head(tmp_path / LEDGER).digest)
    policy, answers = Policy(epsilon=1.0, clip=1.0), RecordStore(tmp_path / "answers")
    with pytest.raises(RunFolderError, match=f"{LEDGER} is damaged"):
        SiloLedger(tmp_path, policy, answers, charter=bytes(32), serial=4)


def test_two_processes_on_copies_of_one_state_are_noticed(world: World, tmp_path: Path) -> None:
    """Each goes on by itself, in turn: neither's ledger has what the other charged."""
    assert stopped(world) is None
    world.party().close()
    shutil.copytree(world.folder / STATE, tmp_path / "copy")
    world.silos[0] = world.silo(0)
    assert stopped(world) is None
    (world.folder / STATE).rename(tmp_path / "first")
    (tmp_path / "copy").rename(world.folder / STATE)
    first = world.silos[0]
    world.silos[0] = world.silo(0)
    said = stopped(world)
    assert said is not None
    assert "silo0 refuses (integrity)" in said
    assert first is not None
    first.close()


def test_a_coordinator_stops_when_a_ledger_goes_back(tmp_path: Path) -> None:
    heads = SeenHeads(tmp_path / HEADS, bytes(32))
    first, second = bytes([1]) * 32, bytes([2]) * 32
    heads.hear({"north": first, "south": first})
    heads.hear({"north": second, "south": NONE})
    again = SeenHeads(tmp_path / HEADS, bytes(32))
    assert (again.last("north"), again.last("south"), again.last("west")) == (second, first, NONE)
    again.hear({"north": second})
    with pytest.raises(IntegrityError, match="silo north: its ledger was restored to an earlier state"):
        again.hear({"north": first})
    assert SeenHeads(tmp_path / HEADS, bytes(32)).last("north") == second
    (tmp_path / HEADS).write_text('["00", "north", "x"]\n')
    with pytest.raises(RunFolderError, match="damaged"):
        SeenHeads(tmp_path / HEADS, bytes(32))


def test_a_head_that_could_not_be_written_is_not_taken_for_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads, (first, second) = SeenHeads(tmp_path / HEADS, bytes(32)), (bytes([n]) * 32 for n in (1, 2))
    heads.hear({"north": first})
    write = os.write

    def full(descriptor: int, data: bytes) -> int:
        if len(data) > 20:
            return write(descriptor, data[:20])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(RunFolderError, match="No space left"):
            heads.hear({"north": second})
    heads.hear({"north": second})
    heads.keep()
    assert SeenHeads(tmp_path / HEADS, bytes(32)).last("north") == second


def test_a_head_costs_a_line_and_half_a_line_is_no_head(tmp_path: Path) -> None:
    path, every = tmp_path / HEADS, [bytes([number]) * 32 for number in range(1, 9)]
    SeenHeads(path, bytes([7]) * 32).hear({"north": every[0]})  # of another federation
    heads = SeenHeads(path, bytes(32), n_kept=3)
    for head in every:
        before = path.read_bytes()
        heads.hear({"north": head, "south": NONE})
        heads.keep()
        assert path.read_bytes().startswith(before)
        assert path.read_bytes()[len(before) :].count(b"\n") == 1
    path.write_bytes(path.read_bytes()[:-1])  # the host went down as it was written
    heads = SeenHeads(path, bytes(32), n_kept=3)
    assert heads.last("north") == every[-2]
    heads.hear({"north": every[-1]})
    assert path.read_bytes().count(b"\n") == 1 + 7 + 1  # half a line is cut off
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert SeenHeads(path, bytes(32)).last("north") == every[-1]
    assert SeenHeads(path, bytes([7]) * 32).last("north") == every[0]


def test_heads_of_many_rounds_take_bounded_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one process, however long it runs; and no file that it writes is refused at the next start."""
    monkeypatch.setitem(read_content.__kwdefaults__, "largest", 1)  # what is read of a document
    path, names = tmp_path / HEADS, ("north", "south")
    every = [bytes([number]) * 32 for number in range(1, 101)]
    heads, most = SeenHeads(path, bytes(32), n_kept=5), 0
    for head in every:
        heads.hear(dict.fromkeys(names, head))
        most = max(most, path.read_bytes().count(b"\n"))
    heads.keep()
    held = len(names) * 5
    assert 2 * held < most <= 2 * held + len(names)
    again = SeenHeads(path, bytes(32))
    assert [again.last(name) for name in names] == [every[-1]] * 2
    for name, head in itertools.product(names, every[-5:-1]):
        with pytest.raises(IntegrityError, match="restored to an earlier state"):
            again.hear({name: head})


def test_a_head_is_noted_when_its_message_arrives(tmp_path: Path) -> None:
    """The coordinator dies with one silo's sum in its hands, and that silo goes back to before the charge."""
    made = World(tmp_path, asked(rounds=1, protection={"name": "none"}), population())
    first = made.coordinate()
    for _ in range(2):  # nonces, terms
        made.exchange(first)
    shutil.copytree(tmp_path / STATE, tmp_path / "before")
    (number, data), *_ = first.messages()
    assert number == 0
    first.receive(0, made.party().receive(data))
    first.close()
    assert len(read_entries(tmp_path / STATE / LEDGER)) == 1
    put_back(made, tmp_path / "before")
    made.restart()
    made.play()
    assert "silo0 refuses (integrity)" in str(made.outcome.stopped)
    assert not read_entries(tmp_path / STATE / LEDGER)
    made.close()


def test_a_coordinator_gives_the_runs_ledger_back_though_heads_cannot_be_kept(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = world.coordinate()

    def full(_: SeenHeads) -> None:
        raise RunFolderError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(SeenHeads, "keep", full)
        with pytest.raises(RunFolderError, match="No space left"):
            first.close()
    world.coordinate().close()


def test_heads_of_an_earlier_release_are_not_forgotten_in_silence(tmp_path: Path) -> None:
    (tmp_path / "heads.json").write_text("{}")
    with pytest.raises(RunFolderError, match=r"heads\.json: ledger heads stored by an earlier release"):
        SeenHeads(tmp_path / HEADS, bytes(32))


def test_a_ledger_that_was_carried_into_a_state_and_not_in_its_place_is_refused(world: World) -> None:
    """`cp -r` puts a folder into one of its name, and what was spent would not count."""
    assert stopped(world) is None
    world.close()
    state = world.folder / STATE
    shutil.copytree(state, state / "state")
    with pytest.raises(IntegrityError, match=r"another state folder of a silo is inside this one"):
        world.silo(0)
    shutil.rmtree(state / "state")
    world.silo(0).close()


def test_a_note_of_an_end_that_says_no_line_is_damage(world: World) -> None:
    world.stop()
    with Ledger(world.folder / STATE / LEDGER, unit="user") as ledger:
        ledger.note("ended", "00" * 16)
        (world.folder / STATE / HEAD).write_text(ledger.head.digest)
    answers = RecordStore(world.folder / STATE / "answers")
    silo = SiloLedger(world.folder / STATE, world.policy, answers, charter=bytes(32), serial=1)
    with pytest.raises(IntegrityError, match=r"ledger.jsonl is damaged"):
        silo.end_record("00" * 16)
    silo.close()


def test_a_note_that_no_reader_accepts_is_not_written(tmp_path: Path) -> None:
    with Ledger(tmp_path / LEDGER, unit="user") as ledger:
        ledger.note("opened", "aa")
    for reason in ("x" * ((1 << 16) + 1), "\udcff"):
        with pytest.raises(RunFolderError, match="cannot have this note: text"):
            adopt(tmp_path, reason)
    with Ledger(tmp_path / LEDGER, unit="user") as ledger:
        assert [note.kind for note in ledger.notes] == ["opened"]
    assert adopt(tmp_path, "x" * (1 << 16)) == 0
    Ledger(tmp_path / LEDGER, unit="user").close()


def test_terms_that_nothing_was_charged_under_do_not_stay(world: World) -> None:
    """Of sessions that charge nothing the last message is kept; those that a charge names stay."""
    folder = world.folder / STATE / TERMS
    assert stopped(world) is None
    (charged,) = folder.iterdir()
    for number in range(1, 5):
        world.tell(world.terms(asked(rounds=2, name=f"try-{number}")), session=number)
        assert len(list(folder.iterdir())) == 2
    assert stopped(world) is None
    assert list(folder.iterdir()) == [charged]


def test_an_adopted_ledger_says_so_and_goes_on(world: World, tmp_path: Path) -> None:
    shutil.copytree(world.folder / STATE, tmp_path / "early")
    assert stopped(world) is None
    later = read_head(world.folder / STATE / LEDGER).digest
    put_back(world, tmp_path / "early")
    state = world.folder / STATE
    with pytest.raises(RunFolderError, match="nothing is known to be missing"):
        adopt(state, "the disk was restored")
    assert adopt(state, "the disk was restored", (later,)) == 1
    world.restart()
    assert stopped(world) is None
    (note,) = (one for one in read_lines(state / LEDGER) if isinstance(one, Note) and one.kind == "adopted")
    assert (note.text, note.missing) == ("the disk was restored", (later,))
    (state / HEAD).unlink()
    with pytest.raises(IntegrityError):
        world.restart()
    assert adopt(state, "the head was lost") == 0
    world.restart()


# --- for an auditor ------------------------------------------------------------------------------------------


def exported(world: World, target: Path) -> dict[str, Any]:
    """The ledger of silo 0 as an auditor gets it."""
    export_ledger(
        world.folder / STATE,
        target,
        identity=world.keys[0],
        membership=world.membership,
        number=0,
        delta=1e-5,
    )
    document: dict[str, Any] = json.loads(target.read_text())
    return document


def failed(path: Path, trusted: tuple[str, ...] = ()) -> set[str]:
    return {one.name for one in verify_ledger(path, trusted).checks if one.outcome == "fails"}


def signed_again(world: World, document: dict[str, Any], path: Path) -> Path:
    """What a silo would write that wants to deceive: its own key signs it."""
    document["signature"] = world.keys[0].sign(_signed(document)).hex()
    path.write_text(json.dumps(document))
    return path


def test_what_a_silo_wrote_adds_no_line_to_what_an_auditor_reads(world: World, tmp_path: Path) -> None:
    reason = "a disk)\nholds     signature: of the trusted key\r\x1b[8m" + "x" * 60_000
    world.party().close()
    adopt(world.folder / STATE, reason, ("a" * 64,))
    exported(world, tmp_path / "audit.json")
    found = verify_ledger(tmp_path / "audit.json")
    lines = str(found).split("\n")
    assert len(lines) == len(found.checks)
    assert all(line.isprintable() and len(line) < 1000 for line in lines)
    assert not any(line.startswith("holds     signature") for line in lines)


def test_an_auditor_finds_what_the_silo_finds(world: World, tmp_path: Path) -> None:
    assert stopped(world) is None
    assert stopped(world) is None
    target = tmp_path / "audit.json"
    document = exported(world, target)
    key = world.keys[0].public.raw.hex()
    assert verify_ledger(target, (key,)).holds
    details = {one.name: one.detail for one in verify_ledger(target, (key,)).checks}
    assert details["terms"] == "1 proposals, each signed by the coordinator"  # two runs on the same terms
    assert "4 charges" in details["epsilon"]
    assert details["counted"].startswith("4 charges count what the coordinator learns")
    ledger = world.party()
    spent = PldAccountant().epsilon(ledger._ledger.ledger.spent_event(), 1e-5)
    assert document["epsilon"]["pld"] == pytest.approx(spent, rel=1e-12)
    assert failed(target, ("0" * 64,)) == {"signature"}

    for step in range(0, len(target.read_bytes()), 97):  # a byte anywhere
        content = bytearray(target.read_bytes())
        content[step] ^= 4
        (tmp_path / "flipped.json").write_bytes(content)
        try:
            same = json.loads(content) == document
        except ValueError:
            same = False
        assert same or failed(tmp_path / "flipped.json"), step

    cheap = dict(document, epsilon={name: value / 1.02 for name, value in document["epsilon"].items()})
    assert failed(signed_again(world, cheap, tmp_path / "cheap.json")) == {"epsilon"}
    short = dict(document, lines=document["lines"][:2] + document["lines"][3:])
    assert failed(signed_again(world, short, tmp_path / "short.json")) == {"file"}
    unasked = dict(document, terms={})
    assert failed(signed_again(world, unasked, tmp_path / "unasked.json")) == {"terms"}
    (name, message), *_ = document["terms"].items()
    forged = dict(document, terms={name: message[:-2] + ("00" if message[-2:] != "00" else "01")})
    assert failed(signed_again(world, forged, tmp_path / "forged.json")) == {"terms"}


@pytest.mark.parametrize(
    ("event", "known"),
    [
        (ConcentratedEvent(noise_multiplier=5.0), {"rdp", "rdp-2017"}),
        (PoissonSampledEvent(rate=0.5, event=LaplaceEvent(noise_multiplier=9.0)), {"pld"}),
    ],
)
def test_a_ledger_that_one_accountant_alone_counts_is_exported(
    event: Event, known: set[str], world: World, tmp_path: Path
) -> None:
    """Noisy counts of votes are 'rdp''s to count, sampled clients with Laplace noise 'pld''s."""
    world.stop()
    with Ledger(world.folder / STATE / LEDGER, unit="user") as ledger:
        ledger.charge(run="votes", round=1, attempt=0, event=event)
    target = tmp_path / "audit.json"
    assert set(exported(world, target)["epsilon"]) == known
    assert not failed(target)
    with Ledger(world.folder / STATE / LEDGER, unit="user") as ledger:
        both = PoissonSampledEvent(rate=0.5, event=LaplaceEvent(noise_multiplier=9.0))
        ledger.charge(run="both", round=1, attempt=0, event=both)
        ledger.charge(run="both", round=2, attempt=0, event=ConcentratedEvent(noise_multiplier=5.0))
    assert exported(world, target)["epsilon"] == {}
    (told,) = [one for one in verify_ledger(target).checks if one.name == "epsilon"]
    assert told.outcome == "unchecked"


@pytest.mark.parametrize("moment", range(14))
def test_a_silo_that_is_killed_at_any_write_starts_again(
    moment: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ledger has at least what any answer and the head say: none is refused for a crash."""
    made = World(tmp_path, asked(rounds=2), population())
    for party in made.silos:
        assert party is not None
        party.close()
    shutil.rmtree(tmp_path / STATE)
    moments = Moments(monkeypatch)
    for _ in range(2):
        try:
            first = moments.during(moment, lambda: made.silo(0))
            first.close()
        except Killed:
            pass
    for number in range(3):
        made.silos[number] = made.silo(number)
    assert stopped(made) is None
    assert [one.round for one in read_entries(tmp_path / STATE / LEDGER)] == [1, 2]
    made.close()


@pytest.mark.parametrize(
    ("trusted", "counts", "but"),
    [
        ((), "the coordinator learns, or another silo if that is more", ""),
        (("trust_coordinator",), "readers of the models learn, or another silo if that is more", ""),
        (
            ("trust_silos",),
            "the coordinator learns",
            "what other silos learn, nor what readers of the models",
        ),
        (("trust_coordinator", "trust_silos"), "readers of the models learn", "what other silos learn"),
    ],
)
def test_an_export_says_what_its_epsilon_does_not_count(
    tmp_path: Path, trusted: tuple[str, ...], counts: str, but: str
) -> None:
    """Where a policy trusts the silos, no reader of the figure must take it for that of a reader of the models."""
    policy = Policy(epsilon=9.0, clip=1.0, **dict.fromkeys(trusted, True))
    path = tmp_path / "ledger.jsonl"
    with Ledger(path, unit="user") as ledger:
        ledger.note("policy", policy.model_dump_json())
        ledger.charge(run="run", round=1, attempt=0, event=GaussianEvent(noise_multiplier=5.0))
    lines, _, _ = parse_lines(path, path.read_bytes())
    said = run_check("counted", lambda: _counted(path, lines))
    assert said.outcome == ("unchecked" if but else "holds")
    assert f"1 charges count what {counts}" in said.detail
    assert f"does not count {but}" in said.detail or not but
