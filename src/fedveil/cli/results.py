"""Commands that read run folders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedveil.cli.options import OUT, FigureFormats, Figures, Json, print_frame, print_result

if TYPE_CHECKING:  # imports take seconds
    from fedveil.run.config.release_document import TableDocument


def report_command(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="a run folder")],
    without_privacy: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="a run without a guarantee on the same data, to compare with"),
    ] = None,
    with_spectrum: Annotated[
        bool, typer.Option("--with-spectrum", help="show how far the model moved, by frequency")
    ] = False,
    figures: Figures = None,
    figure_formats: FigureFormats = "svg,csv",
    as_json: Json = False,
) -> None:
    """Write a run's self-contained report again, and its plots as files."""
    from fedveil.report.figure_files import write_figures
    from fedveil.report.page import run_plots, write_report
    from fedveil.report.run_data import load_run

    path = write_report(folder, without_privacy=without_privacy, with_spectrum=with_spectrum)
    written = (
        []
        if figures is None
        else write_figures(run_plots(load_run(folder)), figures, figure_formats.split(","))
    )
    print_result(
        as_json,
        {"report": path, "figures": written},
        f"report: {path}",
        *(f"figure: {one}" for one in written),
    )


def compare_command(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN...", help="run folders, or folders of them")],
    page: Annotated[Path, typer.Option(help="where the page is written")] = Path("comparison.html"),
    against: Annotated[
        str | None, typer.Option(help="a key: draw results and costs against it, with the Pareto front")
    ] = None,
    figures: Figures = None,
    figure_formats: FigureFormats = "svg,csv",
    as_json: Json = False,
) -> None:
    """Compare runs: a table with the standard deviation over seeds, and a page of privacy-utility curves."""
    from fedveil.api.run_folders import compare

    found = compare(*folders)
    if figures is not None:
        found.figures(figures, against=against, formats=figure_formats.split(","))
    if against is not None:
        written = found.write(page, against=against)
        print_result(as_json, {"page": written}, f"comparison: {written}")
        return
    print_frame(found, as_json)
    if not as_json:
        OUT.print(f"comparison: {found.write(page)}")


def spent_command(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN...", help="run folders over the same people")],
    delta: Annotated[
        float | None, typer.Option(help="delta of the sum; default: that of the runs, if it is the same")
    ] = None,
    accountant: Annotated[str, typer.Option(help="pld, rdp or rdp-2017")] = "pld",
    as_json: Json = False,
) -> None:
    """Calculate what several runs over the same people cost together."""
    from fedveil.api.run_folders import spent

    print_frame(spent(*folders, delta=delta, accountant=accountant), as_json)


# --- folders of releases ---


def kind_of(folder: Path) -> type[TableDocument] | None:
    """Return the kind of releases in a folder; None for a run that trains."""
    from fedveil.run.config.release_document import InferenceDocument, ReleaseDocument

    kinds: tuple[type[TableDocument], ...] = (ReleaseDocument, InferenceDocument)
    return next((kind for kind in kinds if (folder / kind.file).exists()), None)


def printer_of(kind: type[TableDocument]) -> Callable[[Path, bool], None]:
    """Return the function that prints a folder of this kind of releases."""
    from fedveil.cli.statistics import print_inference, print_release
    from fedveil.run.config.release_document import ReleaseDocument

    return print_release if kind is ReleaseDocument else print_inference


def resume_release(folder: Path, kind: type[TableDocument], as_json: bool) -> None:
    """Make the releases that a folder lacks if it was interrupted before, and print what they show."""
    from fedveil.run.config.release_document import read_releases
    from fedveil.run.releases.requests import prepare_document
    from fedveil.run.simulation import resume_releases

    resume_releases(prepare_document(read_releases(folder / kind.file, kind)), folder)
    printer_of(kind)(folder, as_json)
