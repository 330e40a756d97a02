"""Five jobs in four libraries: lines, names to learn, and seconds; and a bound in a Flower app.

The programs are in ``benchmarks/programs``, one for every job and library. Counted are lines with code and the names of
the library and PyTorch that a program uses. Each program is also run, in a folder with its data. ``ours`` is fedveil's
figure and ``peer`` the other library's; a row says so where a program was not run, because its library is not installed
here. ``quick`` runs only fedveil's.
"""

from __future__ import annotations

import ast
import difflib
import io
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tokenize
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv

from benchmarks.harness import Row

PROGRAMS: Final = Path(__file__).parent / "programs"
LIBRARIES: Final = ("fedveil", "opacus", "flower", "sklearn")
JOBS: Final = {
    "own table": "table",
    "own module": "module",
    "cross-validation": "validate",
    "saved model, new records": "predict",
    "own method": "method",
}
_APP: Final = "bound in a Flower app"
_SECONDS: Final = 1800
_LONG: Final = 30
"""Seconds from which on a program runs once."""
_NEEDS: Final = {
    "fedveil": ("fedveil",),
    "opacus": ("opacus",),
    "flower": ("flwr", "ray"),
    "sklearn": ("sklearn", "joblib"),
}
_TARGETS: Final = {"own module": 12, "own method": 15, _APP: 4}
_KNOWN: Final = frozenset({*dir(import_module("pandas").DataFrame), *dir(np.ndarray), *dir(str), *dir(list)})
"""Methods that a Python programmer knows; a method of the same name counts as known."""


def rows(quick: bool) -> Iterator[Row]:
    """Count and run every program; ``quick`` runs fedveil's alone."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(folder)
        for job, found in programs().items():
            timed = {
                library: None
                if quick and library != "fedveil"
                else shorter_run(paths[-1].stem, library, folder)
                for library, paths in found.items()
            }
            for library in sorted(found.keys() - {"fedveil"}):
                seconds = timed["fedveil"], timed[library]
                yield from _rows_of(job, library, seconds)
        if not quick:
            for program in ("flower_plain", "flower_fedveil", "flower_own"):
                ran(program, "flower", folder)
        yield _app_row()


def smallest() -> Iterator[Row]:
    """Count every program, and run one of ours."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(folder)
        seconds = ran("module_fedveil", "fedveil", folder)
    for job, found in programs().items():
        for library in sorted(found.keys() - {"fedveil"}):
            yield from _rows_of(job, library, (seconds, None))
    yield _app_row()


def programs() -> dict[str, dict[str, list[Path]]]:
    """Return the files of every job, by library; the last one is run."""
    return {
        job: {
            library: sorted(PROGRAMS.glob(f"{stem}_{library}*.py"))
            for library in LIBRARIES
            if (PROGRAMS / f"{stem}_{library}.py").exists()
        }
        for job, stem in JOBS.items()
    }


def counts() -> dict[str, dict[str, tuple[int, int]]]:
    """Return lines with code and names to learn of every job, by library.

    Of a method of one's own, lines are those of the method and those of its use that differ from the module's program.
    """
    return {
        job: {
            library: (
                own_method(library) if job == "own method" else len(code_lines(paths[-1])),
                len(set[str]().union(*map(library_names, paths))),
            )
            for library, paths in found.items()
        }
        for job, found in programs().items()
    }


def library_names(path: Path) -> set[str]:
    """Return the names of third-party packages but numpy and pandas that a program uses, with their methods.

    A method counts unless a data frame, an array, a text or a list has one of that name.
    """
    usual = {*sys.stdlib_module_names, "numpy", "pandas"}
    own = {one.stem for one in PROGRAMS.glob("*.py")}
    whole, found, roots = ast.parse(path.read_text(encoding="utf-8")), set[str](), dict[str, str]()
    for node in ast.walk(whole):
        if isinstance(node, ast.Import):
            roots |= {one.asname or one.name.split(".")[0]: one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            roots |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
            found |= {f"{node.module}.{one.name}" for one in node.names}
    inner = {id(node.value) for node in ast.walk(whole) if isinstance(node, ast.Attribute)}
    for node in ast.walk(whole):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            names: list[str] = []
            at: ast.expr = node
            while isinstance(at, ast.Attribute):
                names.insert(0, at.attr)
                at = at.value
            if isinstance(at, ast.Name) and at.id in roots:
                found.add(".".join((roots[at.id], *names)))
            else:
                found |= {f".{one}" for one in names if one not in _KNOWN}
    return {one for one in found if one.split(".")[0] not in usual | own}


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


def ran(program: str, library: str, folder: Path) -> float | None:
    """Run a program in a copy of the folder; return its seconds, or None if its library is not installed.

    Raises:
        RuntimeError: it failed.
    """
    if any(find_spec(name) is None for name in _NEEDS[library]):
        return None
    _make_known(folder)
    path = os.pathsep.join((str(PROGRAMS), str(folder), *sys.path))
    with tempfile.TemporaryDirectory() as name:
        own = shutil.copytree(folder, Path(name, "own"))
        begun = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-W", "ignore", str(PROGRAMS / f"{program}.py")],
            cwd=own,
            env=os.environ | {"PYTHONPATH": path, "RAY_USAGE_STATS_ENABLED": "0"},
            capture_output=True,
            text=True,
            timeout=_SECONDS,
        )
        seconds = round(time.monotonic() - begun, 1)
    if done.returncode or "accuracy" not in done.stdout:
        raise RuntimeError(f"{program} failed: {done.stderr[-2000:]}")
    return seconds


def shorter_run(program: str, library: str, folder: Path) -> float | None:
    """Return the seconds of the shorter of two runs; a program of more than half a minute runs once."""
    first = ran(program, library, folder)
    if first is None or first > _LONG:
        return first
    return min(first, ran(program, library, folder) or first)


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


def _rows_of(job: str, library: str, seconds: tuple[float | None, float | None]) -> Iterator[Row]:
    """Return the rows of a job beside one library; lines carry the target."""
    (lines, names), (peer_lines, peer_names) = (counts()[job][one] for one in ("fedveil", library))
    yield _row(f"{job}, {library}", "lines", lines, peer_lines, _TARGETS.get(job))
    yield _row(f"{job}, {library}", "names", names, peer_names)
    ours, peer = seconds
    if ours is not None and peer is not None:
        yield _row(f"{job}, {library}", "s", ours, peer)


def _app_row() -> Row:
    """Return the row of a bound in a Flower app: lines that differ from an app without one."""
    ours, peer = (changed("flower_plain", app) for app in ("flower_fedveil", "flower_own"))
    return _row(f"{_APP}, flower", "lines", ours, peer, _TARGETS[_APP])


def _row(case: str, unit: str, ours: float, peer: float, target: int | None = None) -> Row:
    """Return a row whose target is of our own figure."""
    met = None if target is None else ours <= target
    ratio = round(peer / ours, 2)
    return Row(case=case, unit=unit, ours=ours, peer=peer, ratio=ratio, target=target, met=met)
