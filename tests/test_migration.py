"""A silo moves to another host, or leaves: what goes with it, what stays, and what copies of it may not do."""

from __future__ import annotations

import builtins
import io
import itertools
import os
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import pytest

from fedveil.errors import BusyError, ConfigError, IntegrityError
from fedveil.federation.audit.ledger_audit import verify_ledger
from fedveil.federation.enrollment.demonstration import provision
from fedveil.federation.enrollment.joining import accept, rotate
from fedveil.federation.enrollment.migration import leave_federation, migrate
from fedveil.federation.hosts.folders import SiloFolder
from fedveil.federation.hosts.key_process import open_silo
from fedveil.federation.hosts.sockets import RunningFolder
from fedveil.federation.membership import MEMBERSHIP
from fedveil.privacy.ledger import Note, read_lines
from tests.commands import output
from tests.federation_world import Killed
from tests.test_federation_run_parts import PEOPLE, Study
from tests.test_preprocessing import tables


@pytest.fixture
def study(tmp_path: Path) -> Study:
    """A run whose first part is played: every silo has been charged."""
    tables(tmp_path, people=PEOPLE)
    study = Study(tmp_path, preprocessing=None, budget=None)
    assert study.play(parts=1) == [None]
    return study


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_a_silo_goes_on_elsewhere_and_a_copy_that_stayed_is_seen(study: Study, tmp_path: Path) -> None:
    old, new = study.paths[0], tmp_path / "carried" / "silo"
    copy = shutil.copytree(old, tmp_path / "copy")
    carry = migrate(SiloFolder(old), new)
    assert carry == tuple(str(path) for path in (tmp_path / f"{old.name}.csv", tmp_path / "users.txt"))
    assert {"membership.toml", "identity.key", "node.key", "state/ledger.jsonl", "state/head"} <= files(new)
    assert (new / "identity.key").stat().st_mode & 0o777 == 0o600
    assert new.stat().st_mode & 0o777 == 0o700
    assert not {name for name in files(old) if name.startswith("state/") or name.endswith(".key")}
    with pytest.raises(ConfigError, match="has no membership"):
        SiloFolder(old)
    study.paths[0] = new
    assert study.play(parts=1) == [None]
    study.paths[0] = copy  # somebody serves what was copied before it moved
    (stopped,) = study.play(parts=1)
    assert "lines are missing from the silo's ledger" in (stopped or "")
    study.paths[0] = new
    assert study.play() == [None]


def test_a_silo_that_is_served_moves_nowhere(study: Study, tmp_path: Path) -> None:
    home, before = SiloFolder(study.paths[0]), files(study.paths[0])
    with closing(RunningFolder(home.path)):
        with pytest.raises(BusyError, match="is already served"):
            migrate(home, tmp_path / "new")
        with pytest.raises(BusyError, match="is already served"):
            leave_federation(home, tmp_path / "left.json")
    (tmp_path / "there").mkdir()
    with pytest.raises(ConfigError, match="exists already"):
        migrate(home, tmp_path / "there")
    assert files(home.path) == before


def test_a_silo_that_left_keeps_what_was_spent_and_nothing_that_signs_for_it(
    study: Study, tmp_path: Path
) -> None:
    old, export = study.paths[0], tmp_path / "left.json"
    output("silo", "leave", old, "--output", export)
    checked = verify_ledger(export)
    assert checked.holds
    assert len(study.charges(0)) == 2
    left = files(old)
    assert {"state/ledger.jsonl", "state/head", "policy.toml"} <= left
    assert not {name for name in left if name.endswith(".key") or name.startswith("state/answers/")}
    with pytest.raises(ConfigError, match="has no membership"):
        open_silo(SiloFolder(old))
    with pytest.raises(ConfigError, match="is never overwritten"):
        leave_federation(SiloFolder(study.paths[1]), export)


def test_what_was_spent_counts_in_another_federation(study: Study, tmp_path: Path) -> None:
    """There its name, its peers' names and the serial number are the same, and what was heard of them is not."""
    assert study.play() == [None] * 2
    spent = len(study.charges(0))
    leave_federation(SiloFolder(study.paths[0]), tmp_path / "left.json")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    tables(elsewhere, people=PEOPLE)
    other = Study(elsewhere, preprocessing=None, budget=None)
    shutil.copytree(study.paths[0] / "state", other.paths[0] / "state")
    assert other.play() == [None] * 3
    assert (len(other.charges(0)), len(other.charges(1))) == (spent + 4, 4)
    serials = [note.text.split() for note in read_notes(other.paths[0]) if note.kind == "membership"]
    assert [serial for _, serial in serials] == ["1", "1"]
    assert len({charter for charter, _ in serials}) == 2


def read_notes(silo: Path) -> list[Note]:
    lines = read_lines(silo / "state" / "ledger.jsonl")
    return [line for line in lines if isinstance(line, Note)]


def test_a_silo_whose_keys_are_being_changed_neither_moves_nor_leaves(study: Study, tmp_path: Path) -> None:
    """Else the next keys stay behind, and a membership that names them has the folder served without its charges."""
    home = SiloFolder(study.paths[0])
    rotate(home.path, None)
    before = files(home.path)
    for waiting in ("identity.key.next", "node.key.next"):
        with pytest.raises(ConfigError, match=f"{waiting}: the silo's keys are being changed.*silo accept"):
            migrate(home, tmp_path / "new")
        with pytest.raises(ConfigError, match=f"{waiting}: the silo's keys are being changed"):
            leave_federation(home, tmp_path / "left.json")
        assert files(home.path) == before
        assert not (tmp_path / "new").exists()
        (home / waiting).unlink()
        before = files(home.path)
    migrate(home, tmp_path / "new")


def test_a_silo_leaves_without_a_ledger_only_if_it_never_had_one(study: Study, tmp_path: Path) -> None:
    home, export = SiloFolder(study.paths[0]), tmp_path / "left.json"
    (home / "state" / "ledger.jsonl").unlink()
    before = files(home.path)
    with pytest.raises(IntegrityError, match=r"the ledger is missing.*ledger adopt"):
        leave_federation(home, export)
    assert files(home.path) == before
    shutil.rmtree(home / "state")  # as it is before a silo was served first
    leave_federation(home, export)
    assert not export.exists()


class Deaths:
    """Ends this process before one of its file operations, or when a file that it writes is there and still empty."""

    def __init__(self, patched: pytest.MonkeyPatch, moment: int) -> None:
        self.left: int | None = moment
        for name in ("mkdir", "rmdir", "unlink", "replace", "fsync"):
            patched.setattr(os, name, self._deadly(getattr(os, name)))
        for module in (builtins, io):
            patched.setattr(module, "open", self._emptied(module.open))

    def _may_die(self) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                self.left = None  # what closes its files afterwards stands for the system
                raise Killed

    def _deadly(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def deadly(*arguments: Any, **named: Any) -> Any:
            self._may_die()
            return call(*arguments, **named)

        return deadly

    def _emptied(self, opened: Callable[..., Any]) -> Callable[..., Any]:
        def emptied(path: Any, mode: str = "r", *rest: Any, **named: Any) -> Any:
            stream = opened(path, mode, *rest, **named)
            if "w" in mode:
                with ExitStack() as closes:
                    closes.push(stream)
                    self._may_die()
                    closes.pop_all()
            return stream

        return emptied


def test_a_move_that_is_killed_anywhere_leaves_one_silo_with_all_it_had(tmp_path: Path) -> None:
    """The folder with a membership, as docs/deployment.md says, or the new one, where the present one is accepted."""
    tables(tmp_path, people=4)
    (home,) = provision(tmp_path / "made", ("north",), schema=tmp_path / "schema.toml").silos
    (home / "state" / "answers").mkdir(parents=True)
    for name in ("ledger.jsonl", "head", "answers/1"):
        (home / "state" / name).write_text(f"the content of {name}")
    held = {name: file for name, file in content(home).items() if not name.endswith(".request")}
    fingerprint = SiloFolder(home).membership.fingerprint
    ends = Counter[str]()
    for moment in itertools.count():
        old, new = tmp_path / f"old-{moment}", tmp_path / f"carried-{moment}" / "north"
        shutil.copytree(home, old)
        with pytest.MonkeyPatch.context() as patched:
            deaths = Deaths(patched, moment)
            with suppress(Killed):
                migrate(SiloFolder(old), new)
        silos = [folder for folder in (old, new) if (folder / MEMBERSHIP).exists()]
        if not silos:
            accept(new, home / MEMBERSHIP, fingerprint, None)
        assert len(silos) <= 1, moment
        served = silos[0] if silos else new
        assert held.items() <= content(served).items(), moment
        assert SiloFolder(served).membership.fingerprint == fingerprint
        ends["neither" if not silos else "old" if served == old else "new"] += 1
        if deaths.left is not None:
            break
    assert ends.keys() == {"old", "neither", "new"}
    assert min(ends["old"], ends["neither"]) > 10, ends


def content(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in files(folder)}
