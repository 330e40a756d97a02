"""Parties that are killed at their writes, over every protection: nothing is lost, and nothing is summed uncharged.

    python -m tests.kills 200               until so many kills, from seed 0
    python -m tests.kills 200 1000          from another seed

A seed is a run of one case of ``tests/test_federation_grammar.py``, whose messages are lost, repeated and delayed, and
whose parties die at any write to their disks. What is held against it: the model of the undisturbed run, bit for bit
(where the protocol repeats a round; one that recovers, or draws by oblivious transfer, makes another), and that a silo
has never given more to a round than its ledger was charged for.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from safetensors.numpy import load_file

from fedveil.federation.silo import MODELS
from fedveil.federation.silo_ledger import LEDGER
from fedveil.federation.silo_session.session import SiloSession
from fedveil.privacy.ledger import read_entries
from fedveil.protocols.partial_encryption import silo as partial_encryption
from tests.federation_world import Chaos, Moments, World, small_keys
from tests.test_federation_grammar import ALL, CASES, asked, held_by

ROUNDS: Final = 3
_OTHER_MODELS: Final = ("recovering", "blind, by transfer")


class Given:
    """What every silo has put into rounds: how many different things, by silo and round."""

    def __init__(self, patched: pytest.MonkeyPatch) -> None:
        self.kept: dict[tuple[int, int], set[bytes]] = {}
        keep = SiloSession._persist_input

        def noted(session: SiloSession, given: Any) -> None:
            keep(session, given)
            assert session._record is not None
            vector = getattr(given, "message", given)  # what is divided later is the same before and after
            content = vector.tobytes() if isinstance(vector, np.ndarray) else session._record.contribution
            self.kept.setdefault((session._place.number, session._record.round), set()).add(content)

        patched.setattr(SiloSession, "_persist_input", noted)


def models(world: World) -> list[dict[str, bytes]]:
    """The models that a run has left: the coordinator's, or every silo's."""
    own = world.run_folder / "model.safetensors"
    paths = [own] if own.exists() else sorted(world.folder.glob(f"state-*/{MODELS}/*"))
    return [{name: value.tobytes() for name, value in load_file(path).items()} for path in paths]


def play(name: str, seed: int, folder: Path) -> int:
    """Play a case with mishaps and without; return how many kills it has survived."""
    with pytest.MonkeyPatch.context() as patched:
        small_keys(patched)
        patched.setattr(partial_encryption, "secret_order", lambda _, length: np.arange(length)[::-1])
        worlds = []
        for part in ("undisturbed", "disturbed"):
            (folder / part).mkdir()
            worlds.append(World(folder / part, asked(rounds=ROUNDS, **CASES[name]), held_by(name), ALL))
        undisturbed, world = worlds
        undisturbed.play()
        given, moments = Given(patched), Moments(patched)
        Chaos(world, moments, seed, rate=0.2, impatient=name == "recovering").play()
        assert world.outcome.stopped is None, world.outcome.stopped
        if name not in _OTHER_MODELS:
            found = models(world)
            assert found
            assert found == models(undisturbed)
        for silo in range(len(world.silos)):
            charged = Counter(entry.round for entry in read_entries(world.folder / f"state-{silo}" / LEDGER))
            for number in range(1, ROUNDS + 1):
                sums = len(given.kept.get((silo, number), ()))
                assert sums <= (1 if name not in _OTHER_MODELS else charged[number]), (silo, number)
                assert sums <= charged[number], (silo, number)
        for one in worlds:
            one.close()
    return moments.kills


def kills(most: int, first: int = 0) -> Iterator[tuple[int, str, int]]:
    """Play seeds until so many kills were survived; yield each with its case and its kills."""
    seed, total = first, 0
    while total < most:
        name = list(CASES)[seed % len(CASES)]
        with tempfile.TemporaryDirectory() as folder:
            died = play(name, seed, Path(folder))
        total += died
        yield seed, name, died
        seed += 1


def main(most: int, first: int = 0) -> None:
    """Play, and say how far it has come after every seed."""
    total = 0
    for seed, name, died in kills(most, first):
        total += died
        print(f"seed {seed} ({name}): {died} kills survived, {total} in all", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
