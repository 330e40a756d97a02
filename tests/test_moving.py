"""A silo moves to another host, or leaves: what goes with it, what stays, and what copies of it may not do."""

from __future__ import annotations

import shutil
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedveil import cli
from fedveil.errors import BusyError, ConfigError
from fedveil.federation.ledger_audit import verify_ledger
from fedveil.flower.folders import SiloFolder
from fedveil.flower.guard import open_silo
from fedveil.flower.moving import leave, migrate
from fedveil.flower.sockets import RunningFolder
from tests.test_federation_parts import PEOPLE, Study
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
        with pytest.raises(BusyError, match="is served already"):
            migrate(home, tmp_path / "new")
        with pytest.raises(BusyError, match="is served already"):
            leave(home, tmp_path / "left.json")
    (tmp_path / "there").mkdir()
    with pytest.raises(ConfigError, match="exists already"):
        migrate(home, tmp_path / "there")
    assert files(home.path) == before


def test_a_silo_that_left_keeps_what_was_spent_and_nothing_that_signs_for_it(
    study: Study, tmp_path: Path
) -> None:
    old, export = study.paths[0], tmp_path / "left.json"
    known = CliRunner().invoke(cli.app, ["silo", "leave", str(old), "--output", str(export)])
    assert known.exit_code == 0, known.output
    checked = verify_ledger(export)
    assert checked.holds
    assert len(study.charges(0)) == 2
    left = files(old)
    assert {"state/ledger.jsonl", "state/head", "policy.toml"} <= left
    assert not {name for name in left if name.endswith(".key") or name.startswith("state/answers/")}
    with pytest.raises(ConfigError, match="has no membership"):
        open_silo(SiloFolder(old))
    with pytest.raises(ConfigError, match="is never overwritten"):
        leave(SiloFolder(study.paths[1]), export)
