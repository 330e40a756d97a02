"""Model card: inputs and outputs, test metrics, and the privacy of the training."""

from __future__ import annotations

import json
from typing import Final

from fedveil.bundle.manifest import Manifest, Reached
from fedveil.privacy.statement import Statement
from fedveil.report.document import (
    EMPTY,
    Section,
    bullets,
    collapsible,
    document,
    fields,
    notice,
    paragraphs,
    parties,
    source,
    table,
)

_TEST: Final = {
    "public": "Computed on a public test table, outside every guarantee.",
    "released": "Released with noise within the stated epsilon; the intervals hold for people like those on whom they "
    "were computed.",
    "private": "No test metrics are shown. Exact figures of private records are not covered by any guarantee and stay "
    "in the run folder; metrics on a public test table, or released ones ([evaluation]), would be shown here.",
}
_GROUPS: Final = (
    " A metric over all people says nothing about any group among them: test the model on the people whom it is to "
    "serve before it is used."
)

CARD: Final = "card.html"
"""File name of the card in a bundle."""


def model_card(manifest: Manifest, statement: Statement) -> str:
    """Return the card as one HTML page that loads nothing and runs no script."""
    return document(
        title=manifest.run,
        kicker="fedveil · model card",
        lead=f"A model for {manifest.task}, trained in {manifest.rounds} rounds over records that stayed where they "
        "were.",
        sections=[
            _privacy(statement),
            _use(manifest),
            _data(manifest),
            _results(manifest),
            _limits(statement),
            _training(manifest),
        ],
    )


def _privacy(statement: Statement) -> Section:
    sentences, warning = statement.sentences(), statement.delta_warning
    return Section(
        identifier="privacy",
        title="Privacy statement",
        body=paragraphs(sentences[:1])
        + (EMPTY if warning is None else notice(warning, kind="warning"))
        + parties(statement)
        + collapsible("The whole statement", bullets(sentences[1:])),
    )


def _use(manifest: Manifest) -> Section:
    columns = "without names" if manifest.input.columns is None else ", ".join(manifest.input.columns)
    if manifest.input.schema_file is not None:
        columns = "as schema.toml declares them"
    about = (
        paragraphs([manifest.about])
        if manifest.about
        else notice("Nobody has stated what this model is for.", kind="warning")
    )
    body = about + fields(
        [
            ("Predicts", manifest.task),
            ("Classes", [str(label) for label in manifest.classes] or "none: a number"),
            ("Shape of a record", " x ".join(str(size) for size in manifest.input.shape)),
            ("Columns", columns),
            ("Network", manifest.model.name),
            ("Parameters", manifest.model.parameters),
        ]
    )
    return Section(identifier="use", title="What it is for", body=body)


def _data(manifest: Manifest) -> Section:
    data = manifest.experiment.get("data", {})
    shown = [(key.replace("_", " "), value) for key, value in data.items() if value is not None]
    lead = "Public facts about the training data."
    return Section(
        identifier="data", title="Data", lead=lead, body=fields(shown or [("Data", "tables of silos")])
    )


def _results(manifest: Manifest) -> Section:
    released = manifest.test == "released"
    rows = [
        [f"Test {name}", _figure(metric.estimate), *([_interval(metric)] if released else [])]
        for name, metric in manifest.metrics.items()
    ]
    header = ["", f"round {manifest.rounds}", *(["95 % interval"] if released else [])]
    body = table(header, rows, caption="After the last round") if rows else EMPTY
    remark = _TEST[manifest.test] + (_GROUPS if rows else "")
    return Section(identifier="results", title="What it reached", body=body + notice(remark, kind="note"))


def _figure(value: float | None) -> str:
    return "not defined" if value is None else f"{value:.4g}"


def _interval(reached: Reached) -> str:
    low, high = ("no bound" if end is None else f"{end:.4g}" for end in (reached.low, reached.high))
    return f"{low} to {high}"


def _limits(statement: Statement) -> Section:
    return Section(
        identifier="limits",
        title="What no guarantee covers",
        body=bullets(statement.uncovered)
        + notice("`fedveil verify` checks this bundle, and lists what no file can show.", kind="note"),
    )


def _training(manifest: Manifest) -> Section:
    return Section(
        identifier="training",
        title="How it was trained",
        body=source(json.dumps(manifest.experiment, indent=2)) + fields([("fedveil", manifest.fedveil)]),
    )
