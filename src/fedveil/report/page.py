"""Report of one run: a list of sections; a section without data in the run folder is left out."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from markupsafe import Markup

from fedveil.privacy.audit import unlike_records
from fedveil.privacy.statement import Statement, show_at_most, show_lower_bound
from fedveil.report import plots
from fedveil.report.document import (
    EMPTY,
    PRIVATE,
    Section,
    collapsible,
    document,
    fields,
    join_parts,
    notice,
    parties,
    source,
    statement_claim,
    table,
    write_document,
)
from fedveil.report.drawing import Axis, Plot, Series, show, show_epsilon, words
from fedveil.report.run_data import RunData, load_run
from fedveil.report.statistics import evaluation_section
from fedveil.report.summary import summarise
from fedveil.run.folder.documents import JsonValue, RoundRow

if TYPE_CHECKING:
    from fedveil.run.released_model import Dependence, ShownTree


# --- the released model ---


def model_section(run: RunData) -> Section | None:
    """Return the section of the released model; None before there is one, and for models of other data than tables."""
    if not (run.folder / "model.safetensors").is_file():
        return None
    from fedveil.run.released_model import read_released_model

    model = read_released_model(run.folder, run.experiment)
    if model is None:
        return None
    plots = [_dependence(dependence) for dependence in model.dependences]
    if model.tree is not None:
        plots.append(_tree(model.tree))
    return Section(
        identifier="model",
        title="The released model",
        lead="Computed from the released model and the public schema alone: no record is read, no privacy is spent. "
        "Each curve moves one column over its declared range; the other columns stay at the middle of their bounds or "
        "at their first category. These are no averages over people. Noise in the model moves every curve.",
        plots=plots,
        appendix=True,  # so that a report still prints on two pages
    )


def _dependence(dependence: Dependence) -> Plot:
    """Return the plot of one column."""
    several = len(dependence.curves) > 1
    ends = "; ".join(
        f"{name}: {show(min(curve))} to {show(max(curve))}" for name, curve in dependence.curves.items()
    )
    return Plot(
        title=f"Partial dependence on {dependence.column}",
        alt=f"What the model gives by {dependence.column}, the other columns at public reference values. {ends}.",
        caption=f"The other columns at public reference values. {ends}.",
        x=Axis(
            title=", ".join(filter(None, (dependence.column, dependence.unit))),
            categories=dependence.categories,
        ),
        y=Axis(title="" if several else next(iter(dependence.curves))),
        series=tuple(
            Series(
                name=name if several else "",
                mark="points" if dependence.categories else "line",
                colour=index,
                x=dependence.places,
                y=curve,
            )
            for index, (name, curve) in enumerate(dependence.curves.items())
        ),
    )


def _tree(tree: ShownTree) -> Plot:
    """Return the picture of a tree."""
    # Nodes of level d lie above the middle of their leaves; the two sides of an edge are apart by a gap.
    sides: tuple[list[float], list[float]] = ([], [])
    heights: list[float] = []
    for level in range(len(tree.questions)):
        under = len(tree.leaves) >> level
        for node in range(1 << level):
            middle = node * under + (under - 1) / 2
            for side, positions in enumerate(sides):
                positions += [middle, middle + (2 * side - 1) * under / 4, math.nan]
            heights += [level, level + 1, math.nan]  # category 0 is at the top
    leaves = ", ".join(show(leaf) for leaf in tree.leaves)
    return Plot(
        title="One tree of the model",
        alt=f"A tree that asks {', then '.join(tree.questions)}. Its leaves, from no to yes: {leaves}.",
        caption=f"Of {tree.trees} trees, the one with the most different leaves. Nodes of a level ask one question; a "
        f"leaf's number is added to {'the output' if tree.output is None else f'output {tree.output}'}.",
        x=Axis(title="added by the leaf", categories=tuple(f"{leaf:+.2g}" for leaf in tree.leaves)),
        y=Axis(title="", categories=(*tree.questions, "leaf")),
        series=tuple(
            Series(name=name, mark="line and points", colour=side, x=tuple(positions), y=tuple(heights))
            for side, (name, positions) in enumerate(zip(("no", "yes"), sides, strict=True))
        ),
    )


# --- sections and page ---


def write_report(
    run_folder: Path, *, without_privacy: Path | None = None, with_spectrum: bool = False
) -> Path:
    """Write `report.html` into a run folder: self-contained, readable offline.

    Args:
        run_folder: the run folder.
        without_privacy: folder of a run without a guarantee, whose result stands beside this one's.
        with_spectrum: whether to show the spectrum of the model's move.

    Returns:
        The path of the report.

    Raises:
        ConfigError: the run ``without_privacy`` has a guarantee, or other data.
        RunFolderError: a folder is missing, damaged or of another version, or cannot be written to.
    """
    other = None if without_privacy is None else load_run(without_privacy)
    page = report_page(load_run(run_folder), without_privacy=other, with_spectrum=with_spectrum)
    return write_document(run_folder / "report.html", page)


def report_page(run: RunData, *, without_privacy: RunData | None = None, with_spectrum: bool = False) -> str:
    """Return the report of a run as one HTML text; the arguments are those of :func:`write_report`."""
    sections = [
        summarise(run, without_privacy=without_privacy).section(),
        *report_sections(run, with_spectrum),
    ]
    last = f"{run.rounds[-1].round} rounds" if run.rounds else "no round yet"
    unit, units = run.statement.unit, run.statement.units
    plural = "people" if unit == "user" else f"{unit}s"
    over = "" if units is None else f", over the data of at most {show(units)} {plural}"
    return document(
        title=run.name,
        kicker="fedveil · report of one run",
        lead=f"{last[0].upper()}{last[1:]}{over}.",
        sections=sections,
    )


def report_sections(run: RunData, with_spectrum: bool = False) -> list[Section]:
    """Return the sections below the summary; those without data in the run folder are left out."""
    makers = [*SECTIONS, *([spectrum_section] if with_spectrum else [])]
    return [section for make in makers if (section := make(run)) is not None]


def run_plots(run: RunData) -> list[Plot]:
    """Return the plots of a run's report, without those of private diagnostics."""
    return [plot for section in report_sections(run) if not section.private for plot in section.plots]


def statement_section(run: RunData) -> Section | None:
    """Return the section of the privacy statement: its sentences, then its fields."""
    statement = run.statement
    return Section(
        identifier="statement",
        title="Privacy statement",
        body=join_parts(
            (
                statement_claim(statement),
                collapsible("Who sees what", parties(statement)) if statement.trust else EMPTY,
                collapsible(
                    "The figures behind the sentences",
                    fields(_statement_fields(statement)) + _published(statement) + _event(statement),
                ),
            )
        ),
    )


def result_section(run: RunData) -> Section | None:
    """Return the section of results: metrics, epsilon and seconds at the first and at the last round."""
    if not run.rounds:
        return None
    first, last = run.rounds[0], run.rounds[-1]
    rows = [
        [
            f"Test {words(metric)}",
            _first(run.rounds, metric, first),
            _first(run.rounds[::-1], metric, last),
            show(run.baseline[metric]) if metric in run.baseline else "",
        ]
        for metric in run.metrics
    ]
    # epsilon up to a round and of the whole run differ: the latter includes the releases next to the rounds.
    unit = run.statement.unit
    rows.append([f"ε for one {unit}, so far", show_epsilon(first.epsilon), show_epsilon(last.epsilon), ""])
    rows.append([f"ε for one {unit}, of the whole run", "", show_epsilon(run.statement.epsilon), ""])
    rows.append(["Seconds, in all", show(first.seconds), show(sum(row.seconds for row in run.rounds)), ""])
    remarks = _verdict(run)
    if run.interrupted_line:
        remarks += notice(
            "metrics.jsonl ends in the middle of a line: the run was still writing, or was stopped. "
            "The report holds the rounds before it.",
            kind="warning",
        )
    header = ["", f"round {first.round}", f"round {last.round}", "constant baseline"]
    if run.metrics:
        caption = f"Before training and at the last round, on {run.tested_on}. {PRIVATE}"
    else:  # test metrics, if any, are a release with a section of its own
        header, rows, caption = header[:-1], [row[:-1] for row in rows], PRIVATE
    body = table(header, rows, caption=caption)
    return Section(
        identifier="result",
        title="Result",
        remarks=remarks,
        plots=_test_plots(run),
        body=_confusion(run) + body,
    )


def _test_plots(run: RunData) -> list[Plot]:
    """Return ROC curve and calibration of the released model; empty unless the test records are public."""
    test = run.public_test
    if test is None or not test.roc:
        return []
    return [plots.roc(test), plots.calibration(test)]


def _confusion(run: RunData) -> Markup:
    """Return the table of confusion counts; empty unless the test records are public."""
    test = run.public_test
    if test is None or not test.confusion:
        return EMPTY
    rows = [[name, *map(show, counts)] for name, counts in zip(test.classes, test.confusion, strict=True)]
    return table(
        ["class", *(f"predicted {name}" for name in test.classes)],
        rows,
        caption=f"The released model on {show(test.records)} public test records",
    )


def _verdict(run: RunData) -> Markup:
    """Return a warning if the model is no better than the best constant answer in the first metric."""
    metric = next(iter(run.metrics), "")
    if run.beats_baseline(metric) is not False:
        return EMPTY
    return notice(
        f"The model is no better than the constant baseline (the most frequent class, or the mean), by test "
        f"{words(metric)}. More people, fewer parameters, more rounds or less noise may help; for a rare class, "
        "weights of the classes or the focal loss.",
        kind="warning",
    )


def curves_section(run: RunData) -> Section | None:
    """Return the section of curves: test metrics and epsilon by round."""
    measured = [metric for metric in run.metrics if sum(metric in row.test for row in run.rounds) > 1]
    shown: list[Plot] = [plots.metric_curve(run, metric) for metric in measured]
    # No curve without a guarantee, where every epsilon is infinite, or for a constant epsilon.
    if len({row.epsilon for row in run.rounds if math.isfinite(row.epsilon)}) > 1:
        shown.append(plots.epsilon_curve(run))
        shown.extend(plots.privacy_utility(run, metric) for metric in measured[:1])
    if not shown:
        return None
    return Section(
        identifier="curves",
        title="Round by round",
        appendix=not measured,  # the price alone is told by the statement
        plots=shown,
        body=collapsible("Every round as a table", _rounds_table(run)),
    )


def audit_section(run: RunData) -> Section | None:
    """Return the section of the audit: results of attacks on the run next to its claim."""
    if run.audit is None:
        return None
    inference, bound, statement = run.audit.inference, run.audit.bound, run.statement
    interval = f"{show(inference.low)} to {show(inference.high)} ({inference.confidence:.0%} confidence)"
    rows = [["Membership inference by loss: area under the ROC curve", show(inference.auc), interval]]
    rows.extend(
        [f"True positive rate at {false:g} false positives", show(true), f"chance: {false:g}"]
        for false, true in inference.true_positive_rates
    )
    if run.audit.accuracy_bound is not None and run.audit.membership_bound is not None:
        linear = f"by 1/2 + ε/4 + δ: {show_at_most(run.audit.membership_bound)}"
        about = f"By the claim: share of right guesses about one {statement.unit}, in or out by a fair coin, at most"
        rows.append([about, show_at_most(run.audit.accuracy_bound), linear])
    verdict = EMPTY
    if bound is not None:
        guesses = f"{bound.right} of {bound.guesses} guesses right about {bound.canaries} canaries"
        claimed, least = show_epsilon(statement.epsilon), show_lower_bound(bound.epsilon)
        sure = f"{bound.confidence:.0%} confidence"
        rows.append([f"ε for one {statement.unit} is at least ({sure})", least, guesses])
        verdict = (
            notice(
                f"ERROR: the run claims ε = {claimed}, but an attack shows ε ≥ {least}, with {sure}: of a true claim "
                f"up to {1 - bound.confidence:.0%} of audits say so. Do not rely on it; audit the run again, and "
                "report a claim that is refuted twice as a bug.",
                kind="error",
            )
            if run.audit.refuted
            else notice(
                f"The claim, ε = {claimed}, stands: no attack here contradicts it. An audit can refute a claim, never "
                "prove it.",
                kind="note",
            )
        )
    if (unlike := unlike_records(inference.high)) is not None:
        verdict += notice(unlike, kind="warning")
    body = verdict + table(
        ["attack", "result", ""],
        rows,
        caption="Attacks on this run, computed from training records: covered by no guarantee",
    )
    return Section(identifier="audit", title="Audit", body=body)


def spectrum_section(run: RunData) -> Section | None:
    """Return the section of the spectrum of (last model - first model), as in Figure 1 of DP-Fed-LS."""
    data = run.spectrum
    if data is None or not any(math.isfinite(value) and value > 0 for value in data.magnitudes):
        return None
    return Section(identifier="spectrum", title="Spectrum", plots=[plots.spectrum(data)])


def population_section(run: RunData) -> Section | None:
    """Return the section of private diagnostics: records per user and silo, norms, clipping, messages."""
    shown: list[Plot] = []
    if run.diagnostics is not None:
        shown.append(plots.records_per_user(run.diagnostics))
        if run.diagnostics.records_per_silo:
            shown.append(plots.records_per_silo(run.diagnostics))
    if any(row.norms is not None for row in run.rounds):
        shown.append(plots.contribution_norms(run))
    if any(row.clipped is not None for row in run.rounds):
        shown.append(plots.clipped_fraction(run))
    if any(row.communication_cost is not None for row in run.rounds):
        shown.append(plots.bits_a_parameter(run))
    if any(
        row.communication_cost is not None and row.communication_cost.acceptance is not None
        for row in run.rounds
    ):
        shown.append(plots.acceptance(run))
    nonfinite = sum(row.nonfinite for row in run.rounds)
    if not shown and not nonfinite:
        return None
    warning = notice(
        "Computed from private records, in simulation only. Nothing in this section is covered by the "
        "privacy statement: do not publish it about real people.",
        kind="warning",
    )
    lost = (
        notice(
            f"{show(nonfinite)} contributions were not finite numbers. They counted as zero.",
            kind="warning",
        )
        if nonfinite
        else EMPTY
    )
    return Section(
        identifier="population",
        title="Population diagnostics",
        remarks=warning + lost,
        plots=shown,
        private=True,
        appendix=True,
    )


def environment_section(run: RunData) -> Section | None:
    """Return the section of the environment: machine and versions."""
    if run.environment is None:
        return None
    pairs: list[tuple[str, JsonValue]] = [
        (words(key), value) for key, value in run.environment.items() if key != "schema_version"
    ]
    return Section(identifier="environment", title="Environment", body=fields(pairs), appendix=True)


def experiment_section(run: RunData) -> Section | None:
    """Return the section of the resolved experiment, which is sufficient to repeat the run."""
    return Section(
        identifier="experiment",
        title="Experiment",
        lead="The resolved experiment.toml: enough to repeat the run.",
        body=source(run.experiment_toml),
        appendix=True,
    )


SECTIONS: Sequence[Callable[[RunData], Section | None]] = (
    statement_section,
    audit_section,
    result_section,
    evaluation_section,
    model_section,
    curves_section,
    population_section,
    environment_section,
    experiment_section,
)
"""Sections of the report below the summary, from top to bottom; a section without data is left out.

A further kind of section is one function here: it returns None for runs without its data.
"""


def _statement_fields(statement: Statement) -> list[tuple[str, JsonValue]]:
    """Return the values behind the sentences of the statement."""
    return [
        ("Unit of privacy", statement.unit),
        ("Neighbouring data sets", words(statement.adjacency.value).replace("-", " ")),
        (f"Declared number of {statement.unit}s", statement.units),
        ("ε by accountant", {name: show_epsilon(value) for name, value in statement.epsilons}),
        *([("Why nothing is guaranteed", list(statement.reasons))] if statement.reasons else []),
        ("Secure randomness", statement.secure_randomness),
    ]


def _published(statement: Statement) -> Markup:
    """Return the table of bounds that are reproduced as published although their proof has a gap."""
    rows = [
        [figure.name, show(math.inf if figure.value is None else figure.value), figure.gap]
        for figure in statement.as_published
    ]
    caption = "Reproduced as published, although the theory has a gap"
    return table(["figure", "value", "gap"], rows, caption=caption) if rows else EMPTY


def _event(statement: Statement) -> Markup:
    """Return the privacy event of the run, from which a reader can recompute epsilon."""
    event = json.dumps(statement.event.to_json(), indent=2)
    return collapsible("The event that epsilon was computed from", source(event))


def _first(rows: Sequence[RoundRow], metric: str, expected: RoundRow) -> str:
    """Return the metric of the first row that has it, with its round if that is not the expected row."""
    row = next(row for row in rows if metric in row.test)
    return show(row.test[metric]) + ("" if row is expected else f" (round {row.round})")


def _rounds_table(run: RunData) -> Markup:
    def cells(row: RoundRow) -> list[str]:
        metrics = [show(row.test[metric]) if metric in row.test else "" for metric in run.metrics]
        return [str(row.round), *metrics, show_epsilon(row.epsilon), f"{row.seconds:.3g}"]

    header = ["round", *(f"test {words(metric)}" for metric in run.metrics), "ε", "seconds"]
    return table(header, [cells(row) for row in run.rounds], caption=f"All rounds on record. {PRIVATE}")
