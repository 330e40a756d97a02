"""How many lines four jobs take: own table, own module, own method, a bound in a Flower app; beside three peers.

The programs are in ``benchmarks/programs``, one for every job and library. Counted are lines with code; each program is
also run, in a folder with its data. ``ours`` and ``peer`` are lines; a row says so where a program was not run, because
its library is not installed here. ``quick`` runs none but fedveil's.
"""

from __future__ import annotations

import ast
import difflib
import io
import os
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv

from benchmarks.harness import Row

PROGRAMS: Final = Path(__file__).parent / "programs"
_SECONDS: Final = 1800
_NEEDS: Final = {"fedveil": ("fedveil",), "opacus": ("opacus",), "pfl": ("pfl",), "flower": ("flwr", "ray")}
_TARGETS: Final = {"own module": 12, "own method": 15, "bound in a Flower app": 4}
_RUN: Final = {
    "own table": "table_{0}",
    "own module": "module_{0}",
    "own method": "method_{0}_use",
    "bound in a Flower app": "flower_{0}",
}


def rows(quick: bool) -> Iterator[Row]:
    """Count every program and run it; ``quick`` runs ours alone."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(folder)
        for job, lines in counts().items():
            app = job.endswith("Flower app")  # all three are Flower's
            if app and not quick:
                ran("flower_plain", "flower", folder)
            for library in lines:
                program = _RUN[job].format("own" if app and library == "flower" else library)
                ours = library == "fedveil" and not app
                noted = "" if quick and not ours else ran(program, "flower" if app else library, folder)
                if library != "fedveil":
                    yield _row(
                        f"{job}, {library}{noted}", lines["fedveil"], lines[library], _TARGETS.get(job)
                    )


def smallest() -> Iterator[Row]:
    """Count every program, and run one of ours."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(folder)
        ran(_RUN["own module"].format("fedveil"), "fedveil", folder)
    for job, lines in counts().items():
        for library in lines.keys() - {"fedveil"}:
            yield _row(f"{job}, {library}", lines["fedveil"], lines[library], _TARGETS.get(job))


def counts() -> dict[str, dict[str, int]]:
    """Return the lines of every job, by library; of the last one those that differ from an app without a bound."""
    found = {
        job: {
            one: len(code_lines(PROGRAMS / f"{stem}_{one}.py"))
            for one in ("fedveil", "opacus", "flower", "pfl")
        }
        for job, stem in (("own table", "table"), ("own module", "module"))
    }
    found["own method"] = {one: own_method(one) for one in ("fedveil", "flower", "pfl")}
    apps = {"fedveil": "flower_fedveil", "flower": "flower_own"}
    found["bound in a Flower app"] = {one: changed("flower_plain", app) for one, app in apps.items()}
    return found


def code_lines(path: Path) -> list[str]:
    """Return the lines of a file that hold code: no comments, docstrings or blank ones."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    if path.suffix != ".py":
        return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]
    skipped = set[int]()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            said = node.body[0]
            skipped |= set(range(said.lineno, (said.end_lineno or said.lineno) + 1))
    held = set[int]()
    silent = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in (*silent, tokenize.ENDMARKER):
            held |= set(range(token.start[0], token.end[0] + 1))
    return [lines[number - 1] for number in sorted(held - skipped)]


def changed(before: str, after: str) -> int:
    """Return how many lines with code of one program are not in the other."""
    old, new = (code_lines(PROGRAMS / f"{name}.py") for name in (before, after))
    return sum(line.startswith("+ ") for line in difflib.ndiff(old, new))


def own_method(library: str) -> int:
    """Return the lines that a method takes: what it is, how it is made known, and what uses it instead of another."""
    own = [path for path in PROGRAMS.glob(f"method_{library}.*") if path.suffix in (".py", ".toml")]
    return sum(len(code_lines(path)) for path in own) + changed(f"module_{library}", f"method_{library}_use")


def ran(program: str, library: str, folder: Path) -> str:
    """Run a program; return "" , or that it was not run, and why.

    Raises:
        RuntimeError: it failed.
    """
    missing = [name for name in _NEEDS[library] if find_spec(name) is None]
    if missing:
        return f" (not run: {missing[0]} is not installed)"
    _make_known(folder)
    path = os.pathsep.join((str(PROGRAMS), str(folder), *sys.path))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(PROGRAMS / f"{program}.py")],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path, "RAY_USAGE_STATS_ENABLED": "0"},
        capture_output=True,
        text=True,
        timeout=_SECONDS,
    )
    if done.returncode or "accuracy" not in done.stdout:
        raise RuntimeError(f"{program} failed: {done.stderr[-2000:]}")
    return ""


def write_data(folder: Path) -> None:
    """Write the table and the arrays that the programs read."""
    random = np.random.default_rng(0)
    user = np.concatenate([np.arange(100), random.integers(0, 100, 800)])  # everybody has a record
    features = random.normal(size=(900, 3)).astype(np.float32)
    targets = (features @ [1.0, -0.5, 0.8] + random.normal(size=900) / 2 > 0).astype(np.int64)
    np.savez(folder / "records.npz", X=features, y=targets, user=user, silo=user % 3)
    columns = {
        "patient": user,
        "hospital": np.array(["north", "south", "west"])[user % 3],
        **dict(zip(("age", "pressure", "sugar"), features.T, strict=True)),
        "ill": targets,
    }
    pa_csv.write_csv(pa.table(columns), folder / "table.csv")


def _make_known(folder: Path) -> None:
    """Lay the entry point of our own method where an installed package has it."""
    made = folder / "by_records-1.0.dist-info"
    made.mkdir(exist_ok=True)
    (made / "METADATA").write_text("Metadata-Version: 2.1\nName: by-records\nVersion: 1.0\n")
    (made / "entry_points.txt").write_text("[fedveil.methods]\nby-records = method_fedveil:by_records\n")


def _row(case: str, ours: int, peer: int, target: int | None) -> Row:
    """Return a row whose target is of our own lines."""
    met = None if target is None else ours <= target
    return Row(
        case=case, unit="lines", ours=ours, peer=peer, ratio=round(peer / ours, 2), target=target, met=met
    )
