"""Every benchmark plays its smallest cases, so that it is not found broken on the day on which it is needed."""

from __future__ import annotations

import ast
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks import harness, training

from tests.commands import ended
from tests.processes import SECONDS
from tests.slow_cases import fast_every, slow_only
from tests.synthetic import serve_hospitals

ROOT = Path(__file__).parents[1]
SLOW = (
    "classes_and_numbers",
    "control_variates",
    "ergonomics",
    "federation_nodes",
    "flamby",
    "private_weighting",
    "rounds",
)
"""Benchmarks whose smallest cases take a second or more: some begin processes."""


def named() -> list[str]:
    """Return the names of all benchmarks: the modules with rows, by their text, as the command finds them."""
    found = []
    for path in sorted((ROOT / "benchmarks").glob("*.py")):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        if any(isinstance(one, ast.FunctionDef) and one.name == "rows" for one in body):
            found.append(path.stem)
    return found


@pytest.mark.parametrize(
    "name",
    [
        *fast_every((one for one in named() if one not in SLOW), 2),
        *slow_only(one for one in named() if one in SLOW),
    ],
)
@pytest.mark.filterwarnings("ignore")  # those of the peers
def test_a_benchmark_plays_its_smallest_cases(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`price` asked for what Prepared no longer has, and `training` compiled what could not be trained."""
    serve_hospitals(tmp_path, monkeypatch)
    monkeypatch.chdir(ROOT)
    found = list(harness.load(name, quick=True, smallest=True))
    assert found
    assert all(math.isfinite(row.ours) for row in found)
    assert len({(row.case, row.unit) for row in found}) == len(found)


def test_the_command_plays_the_smallest_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    found = ended("bench", "smoothing", "--smallest", "--json")
    assert found.code == 0
    document = json.loads(found.out)
    assert (document["name"], document["quick"], document["smallest"]) == ("smoothing", False, True)
    refused = ended("bench", "smoothing", "--smallest", "--quick")
    assert refused.code == 2
    assert "--smallest: measures nothing" in refused.err


@pytest.mark.slow
def test_the_benchmark_of_training_compiles_what_it_trains(tmp_path: Path) -> None:
    """PyTorch's compiler cannot read functions whose shapes are checked, as they are in a process that runs tests."""
    program = "from benchmarks import training; print(*(row.ours for row in training.compiled(4, 1)))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout.split()) == len(training.COMPILED)
