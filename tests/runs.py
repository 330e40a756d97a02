"""Short runs on digits that many tests start from, who watches them, and what they leave behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from fedveil.privacy.ledger import read_entries
from fedveil.randomness import PrivacyRandomness
from fedveil.run.config.experiment import Experiment, merge, parse
from fedveil.run.loop import NullObserver


class Silent(NullObserver):
    """Keeps the rows; raises KeyboardInterrupt after a number of rounds if asked."""

    def __init__(self, interrupt_after: int | None = None) -> None:
        self.rows: list[dict[str, Any]] = []
        self.interrupt_after = interrupt_after

    def on_round_end(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        if row["round"] == self.interrupt_after:
            raise KeyboardInterrupt


class DrawnStreams:
    """Paths of all streams of privacy randomness that are drawn from now on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.paths: list[tuple[Any, ...]] = []
        stream = PrivacyRandomness.stream

        def listed(randomness: PrivacyRandomness, *path: Any) -> Any:
            self.paths.append(path)
            return stream(randomness, *path)

        monkeypatch.setattr(PrivacyRandomness, "stream", listed)


def experiment(**changes: Any) -> Experiment:
    base = {
        "name": "try",
        "rounds": 4,
        "data": {"name": "digits", "n_users": 20, "n_silos": 3},
        "model": {"name": "linear"},
        "local": {"learning_rate": 0.1, "epochs": 2, "batch_size": 8},
        "method": {"name": "uldp-avg-w", "clip": 0.5, "noise_multiplier": 5.0},
        "server": {"learning_rate": 20 / 3},
        "privacy": {"insecure_seed": 11},
    }
    return parse(merge(base, changes), "test")


def files(folder: Path) -> tuple[list[Any], dict[str, Any], list[Any]]:
    """Return the events that a run charged, its model and its rows."""
    model = {name: value.numpy() for name, value in load_file(folder / "model.safetensors").items()}
    rows = json_lines(folder / "metrics.jsonl")
    return [entry.event for entry in read_entries(folder / "ledger.jsonl")], model, rows


def json_lines(path: Path) -> list[Any]:
    """Return the lines of a file of JSON."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def same_model(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(np.array_equal(one[name], other[name]) for name in one) and one.keys() == other.keys()
