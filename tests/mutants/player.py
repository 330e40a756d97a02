"""Play the changes of the list, and write which test notices each: ``python -m tests.mutants [NAME ...]``.

Every change is made in a copy of ``src``, and the tests it names run on that copy in a process of their own, which is
forked from one that has the large libraries loaded. First of all those tests must pass on an unchanged copy. The table
goes to the page of the documentation; with names, only their rows are made anew.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import shutil
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.mutants import PAGE, ROOT, Mutant, read

LIBRARIES = [
    "torch",
    "scipy.stats",
    "scipy.signal",
    "dp_accounting.pld",
    "pydantic",
    "rich",
]  # no plugin of pytest
LIMIT_SECONDS = 1800
HEAD = "| What goes wrong | Where | Noticed by | CPU seconds |\n|---|---|---|---|\n"


@dataclass(frozen=True, kw_only=True)
class Result:
    """What the tests said: pytest's exit code, the first test that failed, and the processor time they took."""

    code: int
    failed: str
    seconds: float


class Witness:
    """A pytest plugin that keeps the first test that failed."""

    failed = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep a failed test."""
        if report.failed and not self.failed:
            self.failed = report.nodeid


def play(source: Path, tests: tuple[str, ...], log: Path, connection: Connection) -> None:
    """Run tests on a copy of the source; send the result."""
    os.environ["PYTHONPATH"] = str(source)  # of processes that tests start
    os.chdir(ROOT)
    sys.path[:0] = [str(source), str(ROOT)]
    witness = Witness()
    options = ["-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", *tests]
    with log.open("w") as stream, redirect_stdout(stream), redirect_stderr(stream):
        code = int(pytest.main(options, plugins=[witness]))
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    seconds = sum(usage.ru_utime + usage.ru_stime for usage in used)
    connection.send(Result(code=code, failed=witness.failed, seconds=seconds))


def tried(mutant: Mutant | None, tests: tuple[str, ...]) -> Result:
    """Run tests on a copy of the source with one change, or with none.

    Raises:
        SystemExit: the tests did not run to an answer, so that they say nothing of the change.
    """
    with tempfile.TemporaryDirectory() as folder:
        source, log = Path(folder) / "src", Path(folder) / "log"
        shutil.copytree(ROOT / "src", source)
        if mutant is not None:
            path = source / "fedveil" / mutant.file
            path.write_text(mutant.applied(path.read_text(encoding="utf-8")), encoding="utf-8")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(LIBRARIES)
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=play, args=(source, tests, log, theirs))
        process.start()
        theirs.close()
        answered = ours.poll(LIMIT_SECONDS)
        try:
            result: Result | None = ours.recv() if answered else None
        except EOFError:
            result = None
        process.kill()
        process.join()
        if result is None or result.code not in (0, 1) or (mutant is None and result.code):
            name = "the source as it is" if mutant is None else mutant.name
            raise SystemExit(
                f"{name}: the tests gave no answer\n{log.read_text()[-4000:] if log.exists() else ''}"
            )
        return result


def row_of(mutant: Mutant, result: Result) -> str:
    """Return a change's row of the table."""
    noticed = (
        f"`{result.failed.removeprefix('tests/')}`".replace("|", "\\|") if result.code else "**SURVIVED**"
    )
    return f"| {mutant.name} | `{mutant.file}` | {noticed} | {result.seconds:.0f} |"


def rewritten(page: str, rows: dict[str, str], mutants: tuple[Mutant, ...]) -> str:
    """Return the page with these rows made anew, in the order of the list."""
    above, _, table = page.partition(HEAD)
    old = {row.split(" | ")[0].removeprefix("| "): row for row in table.splitlines() if row.startswith("| ")}
    known = old | rows
    return above + HEAD + "".join(f"{known[mutant.name]}\n" for mutant in mutants if mutant.name in known)


def main(names: list[str]) -> int:
    """Play the changes of these names, or all; return 1 if one survives."""
    mutants = read()
    unknown = set(names) - {mutant.name for mutant in mutants}
    if unknown:
        raise SystemExit(f"no such change: {', '.join(sorted(unknown))}")
    chosen = [mutant for mutant in mutants if not names or mutant.name in names]
    tried(None, tuple(sorted({test for mutant in chosen for test in mutant.tests})))
    survivors = 0
    for mutant in chosen:
        result = tried(mutant, mutant.tests)
        survivors += result.code == 0
        row = row_of(mutant, result)
        print(row, flush=True)
        PAGE.write_text(
            rewritten(PAGE.read_text(encoding="utf-8"), {mutant.name: row}, mutants), encoding="utf-8"
        )
    print(f"{len(chosen)} changes, {survivors} of them unnoticed")
    return 1 if survivors else 0
