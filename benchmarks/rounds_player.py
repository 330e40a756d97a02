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

_LAYOUTS = (
    ("fedveil.run.setup", "fedveil.run.training_run", "fedveil.run.config.study"),
    ("fedveil.engine.setup", "fedveil.engine.run", "fedveil.engine.experiments.study"),
)
"""Where this checkout has preparation, runs and studies, and where checkouts of version 0.2.0 have them."""


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

    started, completed = on_run_start, on_round_end  # the names in version 0.2.0


def main() -> None:
    """Play a run of the experiment given for every line read; write when its rounds were complete, in CPU seconds."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "case.toml"
        written.write_text(sys.argv[1])
        setup, runs, studies = (import_module(name) for name in _LAYOUTS[find_spec("fedveil.run") is None])
        prepared = setup.prepare(studies.load_study(str(written)).experiments[0])
    for _ in sys.stdin:
        clock = Clock()
        with tempfile.TemporaryDirectory() as folder:
            runs.run(prepared, Path(folder), clock)
        print(json.dumps(clock.marks), flush=True)


if __name__ == "__main__":
    main()
