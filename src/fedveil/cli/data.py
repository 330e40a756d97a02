"""The command that looks through tables."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedveil.cli.options import OUT, Json
from fedveil.console import print_json

if TYPE_CHECKING:  # what is only named here takes seconds to import
    from fedveil.data.data_report import DataReport


def check_data_command(
    schema: Annotated[Path, typer.Argument(help="the public schema of the tables")],
    tables: Annotated[list[Path], typer.Argument(metavar="TABLE...", help="tables that you hold")],
    page: Annotated[
        Path | None, typer.Option(help="write the report as a page; as private as the tables")
    ] = None,
    as_json: Json = False,
) -> None:
    """Inspect tables that you hold: people, ids, duplicates, columns, classes. What it prints is private."""
    from fedveil.data.data_report import data_report
    from fedveil.data.schema import read_schema
    from fedveil.report.data import write_data_page

    report = data_report(read_schema(schema), tables)
    written = None if page is None else write_data_page(report, page)
    if as_json:
        print_json(report.to_json() | {"page": written})
        return
    print_report(report)
    if written is not None:
        OUT.print(f"page: {written}")


def print_report(report: DataReport) -> None:
    """Print who holds what, and what was found."""
    from fedveil.api.checking import finding_lines
    from fedveil.report.data import FOR_WHOM

    OUT.print(FOR_WHOM, *finding_lines(report), sep="\n")
