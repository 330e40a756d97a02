"""Page of the data report, for the owner of the tables only."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from markupsafe import Markup

from fedveil.report.document import Section, document, notice, table, write_document
from fedveil.report.drawing import show

if TYPE_CHECKING:  # a page needs the figures of a report, and nothing that reads tables
    from fedveil.data.data_report import DataReport

FOR_WHOM = (
    "These figures are exact and as private as the records: no guarantee covers them, so show them only to those who "
    "may read the tables. A person who has another id in a table that is not among these is not recognised here."
)


def write_data_page(report: DataReport, path: Path) -> Path:
    """Write the page of a data report.

    Raises:
        RunFolderError: the file cannot be written.
    """
    return write_document(path, data_page(report))


def data_page(report: DataReport) -> str:
    """Return the page of a data report as one HTML text."""
    return document(
        title=f"{show(report.records)} records of {show(report.people)} people",
        kicker="fedveil · data report",
        lead=FOR_WHOM,
        sections=[
            Section(identifier="findings", title="What to know before a run", body=_findings(report)),
            Section(identifier="people", title="Who holds what", body=_silos(report)),
            Section(identifier="columns", title="Columns", body=_columns(report)),
        ],
    )


def _findings(report: DataReport) -> Markup:
    if not report.findings:
        return notice("Nothing was found that affects the guarantee, the model or the run.", kind="note")
    rows = [
        [finding.where, finding.found, finding.effect, f"the {finding.bears_on}"]
        for finding in report.findings
    ]
    return table(
        ["where", "found", "effect and remedy", "affects"], rows, caption="The guarantee comes first"
    )


def _silos(report: DataReport) -> Markup:
    rows = [[silo.name, show(silo.records), show(silo.people)] for silo in report.silos]
    rows.append(["all", show(report.records), show(report.people)])
    silo_table = table(
        ["silo", "records", "people"],
        rows,
        caption=f"{show(report.in_several_silos)} people have records in several silos; "
        f"{show(report.n_users)} people are declared, with or without records",
    )
    if not report.classes:
        return silo_table
    total = sum(report.classes.values())
    classes = [
        [name, show(count), f"{count / total:.1%}" if total else ""] for name, count in report.classes.items()
    ]
    return silo_table + table(["class", "records", "share"], classes, caption="How the classes are balanced")


def _columns(report: DataReport) -> Markup:
    def share(value: float) -> str:
        return "" if math.isnan(value) else f"{value:.1%}"

    rows = [
        [
            column.name,
            column.kind,
            share(column.missing),
            share(column.invalid),
            share(column.outside),
            show(column.distinct),
        ]
        for column in report.columns
    ]
    header = ["column", "kind", "missing", "does not fit", "outside the bounds", "distinct values"]
    return table(
        header, rows, caption="Shares of the records. Private: computed from the records without noise"
    )
