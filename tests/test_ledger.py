"""The ledger under crashes, edits, a full disk and rivals: budget may be wasted, never hidden."""

import hashlib
import json
import math
import os
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedveil.errors import BudgetError, PrivacyError, RunFolderError
from fedveil.privacy.accounting import RdpAccountant, epsilon
from fedveil.privacy.events import (
    Adjacency,
    ComposedEvent,
    Event,
    GaussianEvent,
    PoissonSampledEvent,
    SelfComposedEvent,
)
from fedveil.privacy.ledger import (
    Budget,
    Entry,
    Head,
    Ledger,
    Note,
    Origin,
    read_entries,
    read_head,
    read_lines,
)
from tests.children import forking
from tests.full_disks import Disk, for_a_moment

EVENT = PoissonSampledEvent(rate=0.25, event=GaussianEvent(noise_multiplier=5.0))

EPSILON_OF_TWO = RdpAccountant().epsilon(SelfComposedEvent(event=EVENT, count=2), 1e-5)


def budget_of(epsilon: float) -> Budget:
    return Budget(epsilon=epsilon, delta=1e-5, accountant=RdpAccountant())


def charge(ledger: Ledger, round: int, attempt: int = 0) -> None:
    ledger.charge(run="run", round=round, attempt=attempt, event=EVENT)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


@pytest.fixture
def three(path: Path) -> Path:
    with Ledger(path, unit="user") as ledger:
        for round in (1, 2, 3):
            charge(ledger, round)
    return path


def test_charges_are_read_back_in_order(three: Path) -> None:
    with Ledger(three, unit="user") as ledger:
        assert [(e.index, e.run, e.round, e.attempt) for e in ledger.entries] == [
            (0, "run", 1, 0),
            (1, "run", 2, 0),
            (2, "run", 3, 0),
        ]
        assert ledger.spent_event() == SelfComposedEvent(event=EVENT, count=3)
        assert not ledger.recovered
        charge(ledger, 4)
    assert len(read_entries(three)) == 4


def test_a_ledger_is_continued_with_notes_and_charges_of_several_parties(three: Path) -> None:
    before = read_entries(three)
    spoken_for = Origin(terms="a" * 64, coordinator="b" * 64, membership=3, policy="c" * 64)
    with Ledger(three, unit="user") as ledger:
        old = ledger.head
        ledger.note("opened", "f" * 32)
        ledger.charge(run="new", round=1, attempt=0, event=EVENT, origin=spoken_for)
        ledger.require_extends(old)
        assert ledger.contains(old.digest)
        assert not ledger.contains("e" * 64)
    lines = read_lines(three)
    assert lines[: len(before)] == before
    note, charged = lines[len(before) :]
    assert isinstance(note, Note)
    assert isinstance(charged, Entry)
    assert (note.kind, charged.origin, charged.index) == ("opened", spoken_for, len(before) + 1)
    assert charged.time >= note.time > "2026"
    assert read_head(three).count == len(lines)
    assert read_entries(three) == (*before, charged)


def test_the_ledger_of_a_run_tells_the_day_alone(path: Path) -> None:
    """It goes with the model, and how long a round takes depends on who takes part; a silo's own ledger is its log."""
    with Ledger(path, unit="user") as ledger:
        charge(ledger, 1)
    (entry,) = read_entries(path)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT00:00:00Z", entry.time)


def test_an_empty_ledger_has_spent_nothing(path: Path) -> None:
    with Ledger(path, unit="user") as ledger:
        assert ledger.spent_event() == ComposedEvent(events=())
    assert read_entries(path) == ()


def test_every_line_is_json_with_a_version(three: Path) -> None:
    for line in three.read_text().splitlines():
        assert json.loads(line)["schema_version"] == 2


# --- crashes ----------------------------------------------------------------------------------------------


def test_a_file_cut_at_any_byte_keeps_every_completed_charge(three: Path, tmp_path: Path) -> None:
    content = three.read_bytes()
    ends = [i + 1 for i, byte in enumerate(content) if byte == ord("\n")]
    cut = tmp_path / "cut.jsonl"
    for length in range(len(content)):
        cut.write_bytes(content[:length])
        completed = sum(end <= length for end in ends)
        sealed = sum(end - 1 <= length for end in ends)  # complete but for the newline
        with Ledger(cut, unit="user") as ledger:
            assert completed <= len(ledger.entries) == sealed
            assert ledger.recovered == (length not in [0, *ends])
            charge(ledger, 9)
        assert [entry.round for entry in read_entries(cut)] == [*[1, 2, 3][:sealed], 9]


@given(position=st.integers(0, 10**6), flip=st.integers(1, 255))
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_changed_byte_is_found_and_its_line_named(three: Path, position: int, flip: int) -> None:
    content = bytearray(three.read_bytes())
    position %= len(content)
    content[position] ^= flip
    changed = three.with_name("changed.jsonl")
    changed.write_bytes(content)
    line = bytes(content[:position]).count(b"\n") + 1
    with pytest.raises(RunFolderError, match=rf"changed.jsonl, line ({line}|{line + 1}):.* damaged"):
        Ledger(changed, unit="user")
    assert changed.read_bytes() == bytes(content), "a damaged ledger is left as it is"


@pytest.mark.parametrize("order", [[1, 2], [0, 2], [1, 0, 2], [0, 0, 1, 2], [0, 1, 1, 2]])
def test_lost_doubled_and_reordered_lines_are_found(three: Path, order: list[int]) -> None:
    lines = three.read_bytes().splitlines(keepends=True)
    three.write_bytes(b"".join(lines[i] for i in order))
    with pytest.raises(RunFolderError, match="does not continue the line before"):
        Ledger(three, unit="user")


def test_lines_missing_at_the_end_are_found_against_a_checkpoint(three: Path) -> None:
    with Ledger(three, unit="user") as ledger:
        head = ledger.head
        assert head.count == 3
        charge(ledger, 4)
        ledger.require_extends(head)
        ledger.require_extends(Head(count=0, digest="0" * 64))
    lines = three.read_bytes().splitlines(keepends=True)
    three.write_bytes(b"".join(lines[:2]))
    with Ledger(three, unit="user") as ledger, pytest.raises(RunFolderError, match="charges were lost"):
        ledger.require_extends(head)


def release_until_killed(path: Path, fifo: Path) -> None:
    """Charge and release, round after round; a line says that a release left."""
    ledger = Ledger(path, unit="user")
    with fifo.open("w") as released:
        for round_number in range(len(ledger.entries), 10**9):
            charge(ledger, round_number)
            print(round_number, file=released, flush=True)


def test_killed_processes_never_release_what_is_not_charged(path: Path) -> None:
    released, fifo = -1, path.with_name("releases")
    os.mkfifo(fifo)
    for kill in range(2):
        child = forking().Process(target=release_until_killed, args=(path, fifo))
        child.start()
        with fifo.open() as lines:
            for line in lines:
                released = int(line)
                if released >= 7 * (kill + 1):
                    break
            child.kill()
            rest = lines.read().split()
        child.join()
        released = int(rest[-1]) if rest else released
        entries = read_entries(path)
        assert [entry.round for entry in entries] == list(range(len(entries)))
        assert len(entries) >= released + 1
        with Ledger(path, unit="user"):
            pass  # repairs a torn line and is free again: the kernel gave the dead process's lock back


# --- rivals, full disks, other versions -------------------------------------------------------------------


def write_beside(path: Path, said: Path) -> None:
    """Open a ledger, and leave what was said to that."""
    try:
        Ledger(path, unit="user").close()
    except RunFolderError as error:
        said.write_text(str(error))
    else:
        said.write_text("")


def test_two_writers_are_refused(path: Path) -> None:
    with Ledger(path, unit="user"):
        with pytest.raises(RunFolderError, match="another process"):
            Ledger(path, unit="user")
        said = path.with_name("said")
        other = forking().Process(target=write_beside, args=(path, said))
        other.start()
        other.join()
        assert "another process is writing" in said.read_text()
    Ledger(path, unit="user").close()


@pytest.mark.parametrize("step", [0, 1], ids=["write", "fsync"])
def test_a_full_disk_is_a_typed_error_and_the_charge_is_not_made(
    three: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """Half of the line is on disk, or all of it and not flushed: the call returns only once the charge is durable."""
    ledger, disk = Ledger(three, unit="user"), Disk(monkeypatch)
    disk.fill(for_a_moment(step))
    with (
        disk.acting(True),
        pytest.raises(RunFolderError, match=r"round 4 could not be charged \(No space left"),
    ):
        charge(ledger, 4)
    assert disk.refused == 1
    with pytest.raises(RunFolderError, match="closed"):
        charge(ledger, 4)
    with Ledger(three, unit="user") as again:
        assert len(again.entries) == 3
        assert not again.recovered
        charge(again, 4)


@pytest.mark.parametrize("copied", [False, True], ids=["removed", "replaced by a copy"])
def test_no_charge_is_written_to_a_file_that_has_lost_its_name(three: Path, copied: bool) -> None:
    """A clean-up, or a backup that is put back while a process runs: the charge would be in no file at its end."""
    before = three.read_bytes()
    with Ledger(three, unit="user") as ledger:
        three.unlink()
        if copied:
            three.write_bytes(before)
        with pytest.raises(RunFolderError, match="round 4 could not be charged"):
            charge(ledger, 4)
    assert (three.read_bytes() if three.exists() else b"") == (before if copied else b"")


def test_a_missing_folder_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="No such file"):
        Ledger(tmp_path / "nowhere" / "ledger.jsonl", unit="user")
    with pytest.raises(RunFolderError, match="no such file"):
        read_entries(tmp_path / "ledger.jsonl")


@pytest.mark.parametrize("version", [1, 3, True, "2"])
def test_another_version_is_refused(path: Path, version: object) -> None:
    with Ledger(path, unit="user") as ledger:
        charge(ledger, 1)
    line = json.loads(path.read_text()) | {"schema_version": version}
    del line["digest"]
    body = json.dumps(line)
    path.write_text(f'{body[:-1]}, "digest": "{hashlib.sha256(body.encode()).hexdigest()}"}}\n')
    with pytest.raises(
        RunFolderError, match=f"line 1: schema version {version!r}; this fedveil reads version 2"
    ):
        Ledger(path, unit="user")


def test_a_ledger_is_about_one_unit_and_adjacency(three: Path) -> None:
    with pytest.raises(RunFolderError, match="line 1: charges one user"):
        Ledger(three, unit="record")
    with pytest.raises(RunFolderError, match="under replace-one"):
        Ledger(three, unit="user", adjacency=Adjacency.REPLACE_ONE)
    Ledger(three, unit="user").close()


def test_one_attempt_is_charged_once(three: Path) -> None:
    with Ledger(three, unit="user") as ledger:
        with pytest.raises(PrivacyError, match="attempt 0 is charged already"):
            charge(ledger, 3)
        charge(ledger, 3, attempt=1)
        assert ledger.spent_event() == SelfComposedEvent(event=EVENT, count=4)


# --- budget -----------------------------------------------------------------------------------------------


def test_a_run_stops_before_the_round_that_would_exceed_its_budget(path: Path) -> None:
    budget = Budget(epsilon=1.0, delta=1e-5, accountant=RdpAccountant())

    def run(ledger: Ledger) -> None:
        for round in range(1, 10_000):
            ledger.charge(run="run", round=round, attempt=0, event=EVENT, budget=budget)

    with Ledger(path, unit="user") as ledger, pytest.raises(BudgetError, match="epsilon 1 at delta 1e-05"):
        run(ledger)
    size = path.stat().st_size
    with Ledger(path, unit="user") as ledger:
        rounds = len(ledger.entries)
        assert ledger.would_exceed(EVENT, budget)
        assert not ledger.would_exceed(ComposedEvent(events=()), budget)
    assert path.stat().st_size == size
    spent = SelfComposedEvent(event=EVENT, count=rounds)
    assert epsilon(spent, 1e-5, "rdp") <= 1.0 < epsilon(SelfComposedEvent(event=spent, count=2), 1e-5, "rdp")
    assert epsilon(SelfComposedEvent(event=EVENT, count=rounds + 1), 1e-5, "rdp") > 1.0


@pytest.mark.parametrize(("eps", "delta"), [(-1.0, 1e-5), (float("nan"), 1e-5), (1.0, 0.0), (1.0, 1.0)])
def test_a_budget_must_be_one(eps: float, delta: float) -> None:
    with pytest.raises(PrivacyError, match="budget"):
        Budget(epsilon=eps, delta=delta)


def test_a_budget_is_spent_to_its_last_and_not_beyond(path: Path) -> None:
    exact = EPSILON_OF_TWO
    with Ledger(path, unit="user") as ledger:
        for round, allowed in ((1, exact), (2, exact)):
            ledger.charge(run="run", round=round, attempt=0, event=EVENT, budget=budget_of(allowed))
    path.unlink()
    with Ledger(path, unit="user") as ledger:
        charge(ledger, 1)
        with pytest.raises(BudgetError, match="would spend more"):
            ledger.charge(run="run", round=2, attempt=0, event=EVENT, budget=budget_of(exact * (1 - 1e-9)))
        assert len(ledger.entries) == len(read_entries(path)) == 1


class Failing(RdpAccountant):
    """An accountant that finds no number."""

    def epsilon(self, event: Event, delta: float) -> float:
        return math.nan


def test_what_has_no_number_exceeds_every_budget(path: Path) -> None:
    """NaN is not above anything: an accountant that fails so must not open the budget."""
    budget = Budget(epsilon=1e6, delta=1e-5, accountant=Failing())
    with Ledger(path, unit="user") as ledger, pytest.raises(BudgetError, match="would spend more"):
        ledger.charge(run="run", round=1, attempt=0, event=EVENT, budget=budget)
    assert not read_entries(path)


def test_a_line_of_another_ledger_is_found(path: Path, tmp_path: Path) -> None:
    """Each of its lines is whole and sealed; that the second does not go on from the first shows in the chain alone."""
    lines = []
    for name in ("a", "b"):
        with Ledger(tmp_path / name, unit="user") as ledger:
            ledger.charge(run=name, round=1, attempt=0, event=EVENT)
            charge(ledger, 2)
        lines.append((tmp_path / name).read_bytes().splitlines(keepends=True))
    path.write_bytes(lines[0][0] + lines[1][1])
    with pytest.raises(RunFolderError, match=r"line 2: .*does not continue the line before it"):
        Ledger(path, unit="user")
