"""A party whose disk is full from any moment of a run on, or for one moment: nothing is lost, nothing summed uncharged.

    python -m tests.full_disks              every case of tests/test_federation_grammar.py, at every moment

A moment is whatever needs room: a byte that is written, a file or folder that is made, a name that is replaced, what is
flushed. The disk refuses in the middle of what is written, as a real one does. Then somebody makes room: the run is
resumed, and a silo that could not start is started again. What is held against it is what ``tests/kills.py`` holds
against kills.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from fedveil.errors import FedveilError
from fedveil.federation.audit.recorded_run import verify_run
from fedveil.federation.audit.run_record import signed_end
from fedveil.federation.silo_ledger import LEDGER
from fedveil.privacy.ledger import read_entries
from fedveil.protocols.partial_encryption import silo as partial_encryption
from tests.federation_world import World, small_keys
from tests.kills import Given, models
from tests.test_federation_grammar import ALL, CASES, asked, held_by

ROUNDS: Final = 2
NEW_NOISE: Final = ("recovering", "blind, by transfer")
"""Cases whose round, begun again, is another release: charged again, and another model."""
COORDINATOR: Final = -1
_TRIES: Final = 40


class Disk:
    """The disk of one party: it counts the moments at which that party asks for room, and has none at some of them.

    Attributes:
        moments: how many there were while the party acted.
        refused: how many of them there was no room at.
    """

    def __init__(self, patched: pytest.MonkeyPatch) -> None:
        self.moments = self.refused = 0
        self._full: Callable[[int], bool] = lambda _: False
        self._acts = False
        self._write = os.write
        for name in ("fsync", "replace", "mkdir"):
            patched.setattr(os, name, self._tight(getattr(os, name)))
        patched.setattr(os, "write", self._half)
        opened, make, fdopen = os.open, builtins.open, os.fdopen

        def made(path: Any, flags: int, *rest: Any, **named: Any) -> int:
            if flags & os.O_CREAT and not os.path.exists(path):
                self.ask()
            return opened(path, flags, *rest, **named)

        def file(path: Any, mode: str = "r", *rest: Any, **named: Any) -> Any:
            if mode == "w":
                self.ask()
            if mode not in ("wb", "ab") or not self._acts:
                return make(path, mode, *rest, **named)
            return io.BufferedWriter(_Raw(self, path, mode))

        def wrapped(descriptor: int, mode: str = "r", *rest: Any, **named: Any) -> Any:
            if mode != "wb" or not self._acts:
                return fdopen(descriptor, mode, *rest, **named)
            return io.BufferedWriter(_Raw(self, descriptor, mode))

        patched.setattr(os, "open", made)
        patched.setattr(os, "fdopen", wrapped)
        patched.setattr(builtins, "open", file)
        patched.setattr(io, "open", file)

    def fill(self, full: Callable[[int], bool]) -> None:
        """From now on have no room at these moments, counted from here."""
        self._full, self.moments, self.refused = full, 0, 0

    def room(self) -> None:
        """Make room for good."""
        self._full = lambda _: False

    @contextmanager
    def acting(self, acts: bool) -> Iterator[None]:
        """While the party acts whose disk this is."""
        self._acts = acts
        try:
            yield
        finally:
            self._acts = False

    def ask(self, some: Callable[[], Any] | None = None) -> None:
        """Ask for room, and fail if there is none; ``some`` is what still fits."""
        if not self._acts:
            return
        self.moments += 1
        if self._full(self.moments - 1):
            self.refused += 1
            if some is not None:
                some()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _tight(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def tight(*arguments: Any, **named: Any) -> Any:
            self.ask()
            return call(*arguments, **named)

        return tight

    def _half(self, descriptor: int, data: Any) -> int:
        self.ask(lambda: self._write(descriptor, bytes(data)[: len(data) // 2]))
        return self._write(descriptor, data)


class _Raw(io.FileIO):
    """A file that is written unbuffered, and half of it where the disk is full."""

    def __init__(self, disk: Disk, place: Any, mode: str) -> None:
        super().__init__(place, mode)
        self._disk = disk

    def write(self, data: Any) -> int:
        whole = super().write
        self._disk.ask(lambda: whole(bytes(data)[: len(data) // 2]))
        return whole(data)


class Run:
    """A run one of whose parties has a full disk for a while.

    Args:
        world: the parties; the run is not begun.
        disk: of the party.
        whose: the party: a silo's number, or :data:`COORDINATOR`.
    """

    def __init__(self, world: World, disk: Disk, whose: int) -> None:
        self.world, self.disk, self.whose = world, disk, whose
        if whose != COORDINATOR:
            world.stop(whose)  # so that its start is played too
        self.stuck = 0

    def play(self) -> None:
        """Play until all have signed the run's end; whenever nothing goes on, make room and start what has ended."""
        for _ in range(_TRIES):
            try:
                if self._end():
                    return
            except FedveilError:
                pass
            self.stuck += 1
            self.disk.room()
            if self.world.coordinator is not None:
                self.world.coordinator.close()
                self.world.coordinator = None
        raise AssertionError("the run does not end")

    def _end(self) -> bool:
        """Play until nothing goes on; return whether that is the end of the run."""
        world = self.world
        if None in world.silos:
            with self.disk.acting(self.whose != COORDINATOR):
                world.restart(self.whose)
        own = self.disk.acting
        with own(self.whose == COORDINATOR):
            coordinator = world.coordinator = world.coordinate()
        for _ in range(1000):
            if coordinator.is_finished:
                break
            self._carry(coordinator.messages())
        self._carry(coordinator.farewells)
        return world.outcome.stopped is None and len(signed_end(world.run_folder.path)) == len(world.silos)

    def _carry(self, messages: list[tuple[int, bytes]]) -> None:
        world = self.world
        for number, data in messages:
            with self.disk.acting(number == self.whose):
                reply = world.party(number).receive(data)
            world.note(number, reply)
            assert world.coordinator is not None
            with self.disk.acting(self.whose == COORDINATOR):
                world.coordinator.receive(number, reply)


class Case:
    """A case, its undisturbed run, and runs of it with a full disk.

    Args:
        name: of the case in ``tests/test_federation_grammar.py``.
        folder: where its runs are kept.
        patched: undone when the case is over.
    """

    def __init__(self, name: str, folder: Path, patched: pytest.MonkeyPatch) -> None:
        small_keys(patched)
        patched.setattr(partial_encryption, "secret_order", lambda _, length: np.arange(length)[::-1])
        self.name, self._folder, self._patched = name, folder, patched
        self.disk = Disk(patched)
        self._worlds = 0
        world = self._world()
        world.play()
        self._models = models(world)
        assert self._models
        world.close()

    def moments(self, whose: int) -> int:
        """How often a party asks for room in a whole run."""
        self.disk.fill(lambda _: False)
        world = self._world()
        Run(world, self.disk, whose).play()
        world.close()
        return self.disk.moments

    def play(self, whose: int, full: Callable[[int], bool]) -> None:
        """Play the run with a disk that is full at some moments, and hold it against the undisturbed one."""
        given, world = Given(self._patched), self._world()
        self.disk.fill(full)
        Run(world, self.disk, whose).play()
        self.disk.room()
        checks = verify_run(world.run_folder.path).checks
        assert not [one for one in checks if one.outcome == "fails"], self.name
        if self.name not in NEW_NOISE:
            assert models(world) == self._models
        for silo in range(len(world.silos)):
            charged = Counter(entry.round for entry in read_entries(world.folder / f"state-{silo}" / LEDGER))
            for number in range(1, ROUNDS + 1):
                sums = len(given.kept[silo, number])
                assert 1 <= sums <= (charged[number] if self.name in NEW_NOISE else 1), (silo, number)
        world.close()

    def _world(self) -> World:
        self._worlds += 1
        folder = self._folder / str(self._worlds)
        folder.mkdir()
        return World(folder, asked(rounds=ROUNDS, **CASES[self.name]), held_by(self.name), ALL)


def from_then_on(moment: int) -> Callable[[int], bool]:
    """Full from a moment on, until somebody makes room."""
    return lambda asked: asked >= moment


def for_a_moment(moment: int) -> Callable[[int], bool]:
    """Full at one moment; somebody else's file is deleted just after."""
    return lambda asked: asked == moment


def main() -> None:
    """Play everything; one line a case and party."""
    for name in CASES:
        for whose in (0, COORDINATOR):
            with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
                case = Case(name, Path(folder), patched)
                moments = case.moments(whose)
                for moment in range(moments):
                    for full in (from_then_on, for_a_moment):
                        case.play(whose, full(moment))
                party = "coordinator" if whose == COORDINATOR else f"silo {whose}"
                print(f"{name}, {party}: {2 * moments} full disks survived", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
