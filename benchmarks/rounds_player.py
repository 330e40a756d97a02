"""The process that plays the rounds of :mod:`benchmarks.rounds`; it runs with any checkout of fedveil on its path."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch

from fedveil.run.setup import prepare
from fedveil.run.training_run import run

_STUDIES = ("experiments.study", "study")  # where this checkout has them, and where earlier ones do


class Clock:
    """An observer that notes this process's CPU time at the end of every round."""

    def __init__(self) -> None:
        self.marks: list[float] = []

    def on_run_start(self, *_: object) -> None:
        """Nothing."""

    def training(self, *_: object) -> None:
        """Nothing."""

    def on_round_end(self, _: object) -> None:
        """Note the time."""
        self.marks.append(time.process_time())


def main() -> None:
    """Play a run of the experiment given for every line read; write when its rounds were complete, in CPU seconds."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "case.toml"
        written.write_text(sys.argv[1])
        place = next(one for one in _STUDIES if find_spec(f"fedveil.run.{one.partition('.')[0]}"))
        study = import_module(f"fedveil.run.{place}").load_study(str(written))
        prepared = prepare(study.experiments[0])
    for _ in sys.stdin:
        clock = Clock()
        with tempfile.TemporaryDirectory() as folder:
            run(prepared, Path(folder), clock)
        print(json.dumps(clock.marks), flush=True)


if __name__ == "__main__":
    main()
