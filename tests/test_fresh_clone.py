"""A newcomer's two commands, in a fresh clone with nothing built."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_make_run_and_make_test_work_in_a_fresh_clone(tmp_path: Path) -> None:
    if shutil.which("make") is None or not (ROOT / ".git").exists():
        pytest.skip("needs make and a git checkout")
    clone = tmp_path / "fedveil"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    ran = subprocess.run(["make", "run"], cwd=clone, capture_output=True, text=True, check=True)
    assert "recommended" in ran.stdout
    assert list(clone.glob("runs/digits/*/report.html"))
    tested = subprocess.run(
        ["make", "test", "TESTS=tests/test_randomness.py tests/test_events.py"],
        cwd=clone,
        capture_output=True,
        text=True,
        check=True,
    )
    assert " passed" in tested.stdout
