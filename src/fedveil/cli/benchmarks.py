"""The command that measures: the benchmarks of a checkout, found and run by name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fedveil.cli.checkout import import_from_checkout
from fedveil.cli.options import Json, print_result
from fedveil.console import rows_table
from fedveil.errors import ConfigError


def bench_command(
    name: Annotated[str, typer.Argument(help="a module of benchmarks/")],
    quick: Annotated[bool, typer.Option("--quick", help="at most a minute")] = False,
    smallest: Annotated[
        bool,
        typer.Option("--smallest", help="the smallest cases alone, which measure nothing: whether it runs"),
    ] = False,
    page: Annotated[
        Path | None, typer.Option("--page", help="draw the measured curves to this HTML file")
    ] = None,
    as_json: Json = False,
) -> None:
    """Run a benchmark against its peers (from a checkout: benchmarks/ is not installed)."""
    if smallest and (quick or page is not None):
        raise ConfigError("--smallest: measures nothing, and goes with neither --quick nor --page")
    document = run_benchmark(name, quick=quick, page=page, smallest=smallest)
    rows = [{key: value for key, value in row.items() if key != "place"} for row in document["rows"]]
    print_result(as_json, document, rows_table(rows, title=f"{name}: {document['machine']['processor']}"))


def run_benchmark(name: str, *, quick: bool, page: Path | None, smallest: bool = False) -> dict[str, Any]:
    """Run a module of ``benchmarks/`` below the current folder; return its report.

    Args:
        name: of the module; hyphens stand for underscores.
        quick: at most a minute.
        page: where the measured curves are drawn; None: nowhere.
        smallest: the smallest cases alone.

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
    harness = import_from_checkout("benchmarks.harness")
    found = harness.load(name, quick=quick, smallest=smallest)
    document: dict[str, Any] = harness.report(name, found, quick=quick, smallest=smallest)
    if page is not None:
        try:
            import_from_checkout("benchmarks.curves").write_page(document, page)
        except ValueError as error:
            raise ConfigError(f"--page: {error}") from None
    return document
