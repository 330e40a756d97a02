"""DP-Fed-LS's Table 6 at reduced scale, begun at a model that was trained before.

The network is trained first without noise, on another draw of 100 roles; so the question is whether smoothing still
begins behind when there is less left to learn, and whether the other denoisers learn at all from there. The two draws
may have roles in common, so no epsilon is stated.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from fedveil.run.config.experiment import parse, parse_assignment
from fedveil.run.config.study import Selection, study_documents
from fedveil.run.folder.run_folder import Row
from fedveil.run.loop import NullObserver
from fedveil.run.populations import PopulationCache
from fedveil.run.setup import prepare
from fedveil.run.training_run import run
from reproduction.results import Values

_PRESET: Final = "table-6-shakespeare-subset"
_BEFORE, _AFTER, _EVERY = 18, 12, 3
_OTHER_ROLES: Final = 1_000
"""Added to the seed of the first training, which draws its own roles and its own initial model."""


@dataclass
class _Curve(NullObserver):
    """Keeps accuracy and loss of the evaluated rounds."""

    found: dict[int, tuple[float, float]] = field(default_factory=dict)

    def on_round_end(self, row: Row) -> None:
        """Note a round's."""
        if row["test"] is not None:
            self.found[row["round"]] = row["test"]["accuracy"], row["test"]["loss"]


def table_6_warm(seed: int) -> Iterator[tuple[str, Values]]:
    """Every denoiser from the same model, tested on the records of its own draw of roles."""
    populations = PopulationCache()
    with tempfile.TemporaryDirectory() as name:
        first = {"seed": _OTHER_ROLES + seed, "rounds": _BEFORE, "evaluate_every": _BEFORE}
        unprotected = (first, parse_assignment("method.noise_multiplier=0"))
        (document,) = _documents(("sigma0",), unprotected)
        before, _ = _play(document | {"name": "before"}, Path(name), populations)
        warm = {"model": {"initial": str(before / "model.safetensors")}}
        again = {"seed": seed, "rounds": _AFTER, "evaluate_every": _EVERY}
        for document in _documents(None, (again, warm)):
            label = str(document["name"])
            _, curve = _play(document, Path(name), populations)
            accuracy, loss = curve.pop(_AFTER)
            values: Values = {f"round {number}": found for number, (found, _) in curve.items()}
            yield label, {**values, "accuracy": accuracy, "loss": loss}


def _documents(
    variants: tuple[str, ...] | None, overrides: tuple[dict[str, Any], ...]
) -> list[dict[str, Any]]:
    return list(study_documents(_PRESET, Selection(variants=variants, overrides=overrides)))


def _play(
    document: dict[str, Any], folder: Path, populations: PopulationCache
) -> tuple[Path, dict[int, tuple[float, float]]]:
    """Return the run's folder, and accuracy and loss of its evaluated rounds."""
    watched = _Curve()
    played = run(prepare(parse(document, str(document["name"])), populations), folder, watched)
    return played.folder, watched.found
