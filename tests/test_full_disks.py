"""Disks that are full at any moment of a run, of a silo or of the coordinator: it ends as if they had not been."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedveil.errors import RunFolderError
from tests.federation_world import World, asked, population
from tests.full_disks import COORDINATOR, Case, Disk, for_a_moment, from_then_on
from tests.test_federation_grammar import IDS

PARTIES = [pytest.param(0, id="silo"), pytest.param(COORDINATOR, id="coordinator")]


def play(name: str, whose: int, every: int, folder: Path) -> int:
    """Play some moments of a case, by turns full from then on and for that moment; return how many."""
    with pytest.MonkeyPatch.context() as patched:
        case = Case(name, folder, patched)
        chosen = range(0, case.moments(whose), every)
        for turn, moment in enumerate(chosen):
            case.play(whose, (from_then_on, for_a_moment)[turn % 2](moment))
            assert case.disk.refused
    return len(chosen)


@pytest.mark.parametrize(("whose", "every"), [(0, 5), (COORDINATOR, 7)], ids=["silo", "coordinator"])
def test_twenty_full_disks_change_nothing(whose: int, every: int, tmp_path: Path) -> None:
    """The model bit for bit, no round summed twice, none without its charge, and an end that all have signed."""
    assert play("masked", whose, every, tmp_path) >= 10


def opens(world: World) -> bool:
    """Whether the coordinator can open its run."""
    try:
        world.coordinate().close()
    except RunFolderError:
        return False
    return True


def test_a_run_that_could_not_be_opened_is_opened_when_there_is_room(tmp_path: Path) -> None:
    """The coordinator's process kept the run's ledger locked, and refused every resume as another process's work."""
    with pytest.MonkeyPatch.context() as patched:
        disk, moment, opened = Disk(patched), 0, False
        while not opened:
            folder = tmp_path / str(moment)
            folder.mkdir()
            world = World(folder, asked(), population())
            disk.fill(from_then_on(moment))
            with disk.acting(True):
                opened = opens(world)
            disk.room()
            assert opens(world)
            world.close()
            moment += 1
    assert moment > 10


@pytest.mark.slow
@pytest.mark.parametrize("whose", PARTIES)
@pytest.mark.parametrize("name", IDS)
def test_full_disks_under_every_protection_change_nothing(name: str, whose: int, tmp_path: Path) -> None:
    assert play(name, whose, 3, tmp_path) >= 10
