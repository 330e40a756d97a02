"""The command that measures: the benchmarks of a checkout, found and run by name."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from fedveil.commands.options import Json, tell
from fedveil.console import rows_table
from fedveil.errors import ConfigError


def bench_command(
    name: Annotated[str, typer.Argument(help="a module of benchmarks/")],
    quick: Annotated[bool, typer.Option("--quick", help="at most a minute")] = False,
    page: Annotated[
        Path | None, typer.Option("--page", help="draw the measured curves to this HTML file")
    ] = None,
    as_json: Json = False,
) -> None:
    """Run a benchmark against its peers (from a checkout: benchmarks/ is not installed)."""
    document = run_benchmark(name, quick=quick, page=page)
    rows = [{key: value for key, value in row.items() if key != "place"} for row in document["rows"]]
    tell(as_json, document, rows_table(rows, title=f"{name}: {document['machine']['processor']}"))


def run_benchmark(name: str, *, quick: bool, page: Path | None) -> dict[str, Any]:
    """Run a module of ``benchmarks/`` below the current folder; return its report.

    Args:
        name: of the module; hyphens stand for underscores.
        quick: at most a minute.
        page: where the measured curves are drawn; None: nowhere.

    Raises:
        ConfigError: no such benchmark, or a page for one without curves.
    """
    folder, name = Path.cwd() / "benchmarks", name.replace("-", "_")
    known = sorted(p.stem for p in folder.glob("*.py") if "\ndef rows(" in p.read_text(encoding="utf-8"))
    if name not in known:
        there = (
            f"there are: {', '.join(known)}"
            if known
            else "benchmarks/ is found only in a checkout of fedveil"
        )
        raise ConfigError(f"no benchmark '{name}'; {there}")
    sys.path.insert(0, str(folder.parent))
    harness = import_module("benchmarks.harness")
    document: dict[str, Any] = harness.report(name, harness.load(name)(quick), quick=quick)
    if page is not None:
        try:
            import_module("benchmarks.curves").write_page(document, page)
        except ValueError as error:
            raise ConfigError(f"--page: {error}") from None
    return document
