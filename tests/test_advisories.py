"""What `make lint` does with the advisories about installed packages."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / ".ci" / "advisories"

CLEAN = (
    '{"dependencies": [{"name": "a", "version": "1", "vulns": []}, {"name": "b", "skip_reason": "unknown"}]}'
)
KNOWN = """{"dependencies": [{"name": "a", "version": "1",
    "vulns": [{"id": "PYSEC-1", "fix_versions": ["1.1", "2.0"], "aliases": [], "description": ""}]}]}"""


@pytest.mark.parametrize(
    ("printed", "code", "said"),
    [
        (CLEAN, 0, ["1 packages looked up, 0 known", "no advisories to be had for 1 packages"]),
        (KNOWN, 1, ["a 1: PYSEC-1, mended in 1.1, 2.0", "1 known"]),
        ("", 0, ["could not ask for advisories: no route to host"]),
    ],
)
def test_a_known_vulnerability_fails_and_silence_is_said(
    tmp_path: Path, printed: str, code: int, said: list[str]
) -> None:
    answer = tmp_path / "pip-audit"
    answer.write_text(f"#!/bin/sh\necho 'no route to host' >&2\ncat <<'END'\n{printed}\nEND\n")
    answer.chmod(0o700)
    ran = subprocess.run([sys.executable, str(SCRIPT), str(answer)], capture_output=True, text=True)
    assert ran.returncode == code, ran.stderr
    for words in said:
        assert words in ran.stdout
