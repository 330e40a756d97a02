"""The command that makes published tables again, and the pages of all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedveil.cli.checkout import import_from_checkout
from fedveil.cli.options import MOST_SEEDS, OUT, Json, print_result
from fedveil.console import observer, rows_table
from fedveil.errors import ConfigError
from fedveil.files import replace_file, writing


def reproduce_command(
    name: Annotated[
        str | None, typer.Argument(metavar="[TABLE]", help="which table; none: list them")
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            "--seeds", min=1, max=MOST_SEEDS, help="runs per cell; default: what the table asks for"
        ),
    ] = None,
    results: Annotated[Path, typer.Option("--results", help="folder of the result files")] = Path("results"),
    runs: Annotated[Path, typer.Option("--runs", help="folder in which run folders are created")] = Path(
        "runs/reproduce"
    ),
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

    folder = ResultFolder(results)
    if write is not None:
        if name is not None:
            raise ConfigError(f"{name}: --page writes the page of all tables; name none")
        for path, text in pages(folder, write.stem).items():
            with writing(write.parent / path, ConfigError):
                (write.parent / path).parent.mkdir(parents=True, exist_ok=True)
                replace_file(write.parent / path, text.encode())
        return
    if name is None:
        rows = [{"table": one, "title": load_table(one).title} for one in table_names()]
        print_result(as_json, {"tables": rows}, rows_table(rows))
        return
    table = load_table(name)
    try:
        with observer(OUT, quiet=True) as watching:
            for run in reproduce(table, folder, runs, watching, seeds=seeds):
                if not as_json:
                    value = run.values.get(table.value)
                    spent = "" if run.cpu_seconds is None else f", {run.cpu_seconds:.1f} CPU seconds"
                    OUT.print(f"{run.cell}, seed {run.seed}: {table.value} {value}{spent}")
    except KeyboardInterrupt as stop:
        stop.add_note("the same command goes on where it was")
        raise
    found = section_rows(table, folder.read(name), least=1)
    print_result(as_json, {"table": name, "rows": found}, rows_table(found, title=table.title))
