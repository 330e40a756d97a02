"""The command that measures: the benchmarks of a checkout, found and run by name."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer

from fedveil.cli.options import MOST_SEEDS, OUT, Json, WorkerOptions, expand_option_groups, print_result
from fedveil.console import observer, rows_table
from fedveil.errors import ConfigError
from fedveil.files import replace_file, writing

# --- checkout -----------------------------------------------------------------------------------------------
# Packages of a checkout that are not installed: ``benchmarks`` and ``reproduction``.


def import_from_checkout(name: str) -> ModuleType:
    """Import a module of a package that lies in the current folder.

    Args:
        name: name of the module, with its package: ``"benchmarks.harness"``.

    Raises:
        ConfigError: the current folder has no such package.
    """
    package = name.split(".")[0]
    folder = Path.cwd()
    if not (folder / package / "__init__.py").is_file():
        raise ConfigError(
            f"{package}/ is part of a checkout of fedveil and is not installed; run the command in the "
            "checkout's folder"
        )
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return import_module(name)


# --- benchmarks ---------------------------------------------------------------------------------------------


@expand_option_groups
def bench_command(
    on: WorkerOptions,
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
    document = run_benchmark(name, quick=quick, page=page, smallest=smallest, on=on)
    rows = [{key: value for key, value in row.items() if key != "place"} for row in document["rows"]]
    print_result(as_json, document, rows_table(rows, title=f"{name}: {document['machine']['processor']}"))


def run_benchmark(
    name: str,
    *,
    quick: bool,
    page: Path | None,
    smallest: bool = False,
    on: WorkerOptions | None = None,
) -> dict[str, Any]:
    """Run a module of ``benchmarks/`` below the current folder; return its report.

    Args:
        name: name of the module; hyphens stand for underscores.
        quick: at most a minute.
        page: where the measured curves are drawn; None: nowhere.
        smallest: the smallest cases alone.
        on: who plays the runs of a benchmark that measures models, not time; None: this process.

    Raises:
        ConfigError: no such benchmark, a page for one without curves, or workers for one that measures time.
    """
    folder, name = Path.cwd() / "benchmarks", name.replace("-", "_")
    available = sorted(p.stem for p in folder.glob("*.py") if "\ndef rows(" in p.read_text(encoding="utf-8"))
    if name not in available:
        hint = (
            f"there are: {', '.join(available)}"
            if available
            else "benchmarks/ is found only in a checkout of fedveil"
        )
        raise ConfigError(f"no benchmark '{name}'; {hint}")
    harness = import_from_checkout("benchmarks.harness")
    workers = None if on is None or on.is_this_process else on.open()
    try:
        rows = harness.load(name, quick=quick, smallest=smallest, workers=workers)
    except ValueError as error:
        raise ConfigError(f"--executor, --processes: {error}") from None
    document: dict[str, Any] = harness.report(name, rows, quick=quick, smallest=smallest)
    if page is not None:
        try:
            import_from_checkout("benchmarks.curves").write_page(document, page)
        except ValueError as error:
            raise ConfigError(f"--page: {error}") from None
    return document


# --- reproduction -------------------------------------------------------------------------------------------
# The command that makes published tables again, and the pages of all of them.


@dataclass(frozen=True, kw_only=True)
class ReproductionFolders:
    """The options that say where result files and run folders are."""

    results: Annotated[Path, typer.Option("--results", help="folder of the result files")] = Path("results")
    runs: Annotated[Path, typer.Option("--runs", help="folder in which run folders are created")] = Path(
        "runs/reproduce"
    )


@expand_option_groups
def reproduce_command(
    on: WorkerOptions,
    places: ReproductionFolders,
    name: Annotated[
        str | None, typer.Argument(metavar="[TABLE]", help="which table; none: list them")
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            "--seeds", min=1, max=MOST_SEEDS, help="runs per cell; default: what the table asks for"
        ),
    ] = None,
    write: Annotated[
        Path | None,
        typer.Option(
            "--page", help="write the index of all result files here, the papers' pages beside; train nothing"
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Reproduce a published table, run by run (from a checkout: reproduction/ is not installed)."""
    import_from_checkout("reproduction")
    from reproduction.page import pages
    from reproduction.play import reproduce
    from reproduction.results import ResultFolder
    from reproduction.rows import section_rows
    from reproduction.table import load_table, table_names

    folder = ResultFolder(places.results)
    if write is not None:
        if name is not None:
            raise ConfigError(f"{name}: --page writes the page of all tables; name none")
        for path, text in pages(folder, write.stem).items():
            with writing(write.parent / path, ConfigError):
                (write.parent / path).parent.mkdir(parents=True, exist_ok=True)
                replace_file(write.parent / path, text.encode())
        return
    if name is None:
        rows = [{"table": table, "title": load_table(table).title} for table in table_names()]
        print_result(as_json, {"tables": rows}, rows_table(rows))
        return
    table, workers = load_table(name), None if on.is_this_process else on.open
    try:
        with observer(OUT, quiet=True) as watching:
            for run in reproduce(table, folder, places.runs, watching, seeds=seeds, workers=workers):
                if not as_json:
                    value = run.values.get(table.value)
                    spent = "" if run.cpu_seconds is None else f", {run.cpu_seconds:.1f} CPU seconds"
                    OUT.print(f"{run.cell}, seed {run.seed}: {table.value} {value}{spent}")
    except KeyboardInterrupt as stop:
        stop.add_note("the same command goes on where it was")
        raise
    table_rows = section_rows(table, folder.read(name), least=1)
    print_result(as_json, {"table": name, "rows": table_rows}, rows_table(table_rows, title=table.title))
