"""Commands that list presets, methods, stages and data sets, and the command that drafts a schema."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from fedveil.cli.options import OUT, Json, print_result
from fedveil.console import print_json, rows_table
from fedveil.errors import ConfigError, did_you_mean
from fedveil.files import writing

if TYPE_CHECKING:  # an import at run time takes seconds
    from fedveil.data.data_report import DataReport
    from fedveil.reference import Entry


_STAGES: Final = (
    "channels",
    "protections",
    "denoisers",
    "optimizers",
    "averages",
    "local_algorithms",
    "samplers",
    "accounting_rules",
    "executors",
)


def presets_command(
    name: Annotated[str | None, typer.Argument(help="print this preset's TOML")] = None, as_json: Json = False
) -> None:
    """List the presets, or print one."""
    from fedveil.run.config.study import preset_text, presets

    if name is not None:
        text = preset_text(name)
        print_json({"name": name, "toml": text}) if as_json else OUT.print(text, highlight=False)
        return
    rows = [{"preset": key, "what it shows": title} for key, title in presets().items()]
    print_result(as_json, {"presets": rows}, rows_table(rows))


def methods_command(as_json: Json = False) -> None:
    """List the methods, with the package that provides each and its keys in the table `method`."""
    from fedveil.reference import entries

    rows = [{"method": entry.name, **_row_of(entry)} for entry in entries("methods")]
    print_result(as_json, {"methods": rows}, rows_table(rows))


def stages_command(
    kind: Annotated[str | None, typer.Argument(help=f"one of: {', '.join(_STAGES)}; default: all")] = None,
    as_json: Json = False,
) -> None:
    """List the stages of every kind, with the package that provides each and the keys of its table."""
    from fedveil.reference import SECTIONS, entries

    if kind is not None and kind not in _STAGES:
        raise ConfigError(
            f"no kind of stage '{kind}'; there are: {', '.join(_STAGES)}{did_you_mean(kind, _STAGES)}"
        )
    rows = [
        {"table": SECTIONS[stage_kind][0], "name": entry.name, **_row_of(entry)}
        for stage_kind in _STAGES
        if kind in (None, stage_kind)
        for entry in entries(stage_kind)
    ]
    print_result(as_json, {"stages": rows}, rows_table(rows))


def _row_of(entry: Entry) -> dict[str, str]:
    """Return the cells of a table row about a stage, without its name."""
    keys = ", ".join(key.name for key in entry.keys)
    return {"keys": keys, "what it does": entry.summary, "package": entry.package}


def data_command(
    name: Annotated[str | None, typer.Argument(help="fetch and check this data set")] = None,
    folder: Annotated[Path | None, typer.Option(help="folder of the files; default: FEDVEIL_DATA")] = None,
    as_json: Json = False,
) -> None:
    """List the data sets with their terms; with a name, download what is missing, check it and show its digests."""
    from fedveil.data.catalogue import catalogue
    from fedveil.data.catalogue.data_set import store

    listed = [entry for entry in catalogue(folder) if name in (None, entry.name)]
    if not listed:
        names = [entry.name for entry in catalogue(folder)]
        raise ConfigError(
            f"no data set '{name}'; there are: {', '.join(names)}{did_you_mean(str(name), names)}"
        )
    if name is not None:
        for file in listed[0].files:
            store(folder).path(file)
        listed = [entry for entry in catalogue(folder) if entry.name == name]
    keys = ("name", "package", "title", "records", "terms", "present")
    rows = [{key: getattr(entry, key) for key in keys} for entry in listed]
    document: dict[str, Any] = {"folder": listed[0].folder, "data": rows}
    if name is None:
        print_result(as_json, document, rows_table(rows))
        return
    files = [
        {"file": file.path, "digest": ":".join(file.digest), "from": " or ".join(file.urls)}
        for file in listed[0].files
    ]
    shown_files = rows_table(files) if files else "no files: the records come with an installed package"
    print_result(as_json, {**document, "files": files}, rows_table(rows), shown_files)


def schema_command(
    samples: Annotated[
        list[Path], typer.Argument(help="PUBLIC sample tables, one a silo or one: never private records")
    ],
    user: Annotated[str | None, typer.Option(help="column of the user; default: guessed by name")] = None,
    silo: Annotated[str | None, typer.Option(help="column of the silo; default: guessed by name")] = None,
    label: Annotated[str | None, typer.Option(help="column of the class label; default: guessed")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="file to write; default: print")
    ] = None,
    as_json: Json = False,
) -> None:
    """Draft the public schema of your tables from public samples, for you to read and correct."""
    from fedveil.data.draft import draft_schema

    text = draft_schema(samples, user=user, silo=silo, label=label)
    if output is not None:
        if output.exists():
            raise ConfigError(f"{output}: exists already; choose another name")
        with writing(output, ConfigError):
            output.write_text(text, encoding="utf-8")
    if as_json:
        print_json({"toml": text, "output": output})
    elif output is None:
        OUT.print(text, highlight=False)
    else:
        advice = "read it, correct the bounds and categories, and keep it public"
        OUT.print(f"drafted {output}: {advice}")


# --- check of tables ---


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
    from fedveil.api.planning import finding_lines
    from fedveil.report.data import FOR_WHOM

    OUT.print(FOR_WHOM, *finding_lines(report), sep="\n")
