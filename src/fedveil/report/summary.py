"""Summary of a run in half a page: who is protected, how well, what was reached, and what to know before quoting it.

No private figure enters a summary, except an exact metric of private records, which is marked as not covered.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from markupsafe import Markup

from fedveil.errors import ConfigError
from fedveil.privacy.audit import attack_accuracy
from fedveil.privacy.claims import Role
from fedveil.privacy.events import Adjacency
from fedveil.privacy.statement import Statement
from fedveil.report.document import Section, render_part
from fedveil.report.drawing import show, show_delta, show_epsilon, words
from fedveil.report.run_data import NOT_COVERED, RunData
from fedveil.run.advice import advice

Tone = Literal["good", "weak", "none"]

_LEVELS: Final = ((0.6, "hides well"), (0.75, "hides"), (0.9, "only partly hides"), (1.0, "hardly hides"))
"""Largest accuracy of an attacker for each verb; docs/how-to/read-the-report.md has the table."""
_WEAK: Final = 0.75
_UNITS: Final[Mapping[str, tuple[str, str]]] = {
    "record": ("record", "A person with several records is protected less."),
    "client": ("client", "A client counts with all its records."),
    "user": ("person", "A person counts with all records, at every institution."),
    "silo": ("institution", "An institution counts with all its records."),
}
_NAMES: Final[Mapping[str, tuple[str, str]]] = {
    "accuracy": ("Right answers", "Share of test records that the model classifies correctly."),
    "balanced_accuracy": ("Right answers, by class", "Share of right answers, averaged over the classes."),
    "auc": ("Ranking (AUC)", "How often the model ranks a positive case above a negative one."),
    "c_index": ("Ranking (C-index)", "How often the model puts two people in the order of their events."),
    "r2": ("Variance explained (R²)", "Share of the differences between records that the model explains."),
}
_CHANCE: Final[Mapping[str, float]] = {"auc": 0.5, "c_index": 0.5, "r2": 0.0, "mcc": 0.0}
"""Value of a constant answer by definition: no record is read for it."""
_BAR_STYLE: Final = (
    "<style>.fedveil-reached .bar{width:12em;height:8px;color:inherit}.fedveil-reached .track{fill:#8884}"
    ".fedveil-reached .value{fill:#888}.fedveil-reached .main .value{fill:#2a6fb0}"
    ".fedveil-reached .interval{fill:currentColor}</style>"
)
"""Style of the bars in a notebook, which lacks the report's style sheet."""
RELEASED: Final = "released with noise, covered by the guarantee"
PUBLIC: Final = "measured on public test records"


@dataclass(frozen=True, kw_only=True)
class Reached:
    """Value of the main metric, with the ends of its interval where it has one."""

    label: str
    value: float
    low: float | None = None
    high: float | None = None

    @property
    def text(self) -> str:
        """The value with its interval."""
        shown = f"{self.value:.3f}" if abs(self.value) < 10 else show(self.value)
        return (
            shown if self.low is None or self.high is None else f"{shown} ({self.low:.3f} to {self.high:.3f})"
        )


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """Summary of a run for a reader without training in privacy.

    Attributes:
        name: name of the run.
        claim: who is protected, and how well, in one sentence.
        explanation: what the sentence counts, with epsilon and delta.
        tone: whether the guarantee is good, weak or absent.
        metric: name of the main metric; empty if there is none.
        meaning: what the metric measures.
        coverage: what covers the metric.
        reached: the model's value, then what it is compared with.
        parties: every other party with the epsilon against it.
        cautions: what to know before quoting a figure.
    """

    name: str
    claim: str
    explanation: str
    tone: Tone
    metric: str
    meaning: str
    coverage: str
    reached: tuple[Reached, ...]
    parties: tuple[tuple[str, str], ...]
    cautions: tuple[str, ...]

    def __str__(self) -> str:
        lines = [self.claim, self.explanation]
        if self.reached:
            lines.append(
                f"{self.metric} ({self.coverage}): "
                + "; ".join(f"{entry.label} {entry.text}" for entry in self.reached)
            )
        lines.extend(f"Against {party}: {bound}." for party, bound in self.parties)
        lines.extend(self.cautions)
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """Return the summary for a notebook, with the bars of the report and their style."""
        texts = "".join(
            f"<p>{'<b>' if not index else ''}{html.escape(text)}{'</b>' if not index else ''}</p>"
            for index, text in enumerate((self.claim, self.explanation))
        )
        bars = self._bars() or ("",) * len(self.reached)
        rows = "".join(
            f"<tr><td>{html.escape(entry.label)}</td><td>{html.escape(entry.text)}</td><td>{bar}</td></tr>"
            for entry, bar in zip(self.reached, bars, strict=True)
        )
        value_table = (
            f"{_BAR_STYLE}<table class='fedveil-reached'>"
            f"<caption>{html.escape(f'{self.metric}: {self.coverage}')}</caption>{rows}</table>"
            if rows
            else ""
        )
        sentences = [*(f"Against {party}: {bound}." for party, bound in self.parties), *self.cautions]
        return f"{texts}{value_table}<ul>{''.join(f'<li>{html.escape(sentence)}</li>' for sentence in sentences)}</ul>"

    def section(self) -> Section:
        """Return the first section of the report."""
        return Section(identifier="summary", title="", body=render_part("summary", self, self._bars()))

    def _bars(self) -> tuple[Markup, ...]:
        """Return a bar for each value on [0, 1]; none if a value lies outside."""
        if not all(0 <= entry.value <= 1 for entry in self.reached):
            return ()
        return tuple(render_part("bar", entry, index == 0) for index, entry in enumerate(self.reached))


def summarise(run: RunData, *, without_privacy: RunData | None = None) -> RunSummary:
    """Return the summary of a run.

    Args:
        run: the run.
        without_privacy: a run of the same experiment without a guarantee, to compare with; None for none.

    Raises:
        ConfigError: ``without_privacy`` has a guarantee, or was trained on other data.
    """
    statement = run.statement
    claim, explanation, tone = _protection(statement)
    metric, coverage, reached = _reached(run)
    if without_privacy is not None:
        reached = (*reached, *_beside(run, without_privacy, metric))
    name, meaning = _NAMES.get(metric, (words(metric).capitalize(), ""))
    return RunSummary(
        name=run.name,
        claim=claim,
        explanation=explanation,
        tone=tone,
        metric=name if reached else "",
        meaning=meaning,
        coverage=coverage,
        reached=reached,
        parties=tuple(
            (line.party, "no protection" if line.epsilon is None else f"ε = {show_epsilon(line.epsilon)}")
            for line in statement.trust
            if line.role is not Role.READER
        ),
        cautions=tuple(_cautions(run, metric, coverage)),
    )


def _protection(statement: Statement) -> tuple[str, str, Tone]:
    """Return the claim in one sentence, what it counts, and its tone."""
    unit, counted = _UNITS[statement.unit]
    success = attack_accuracy(statement)
    if success is None:
        reasons = "; ".join(statement.reasons)
        return f"Nothing is guaranteed to any {unit}: {reasons}.", counted, "none"
    bound = f"ε = {show_epsilon(statement.epsilon)} at δ = {show_delta(statement.delta)}"
    technical = f"{counted} In technical terms: {bound}, against anyone who reads every released model."
    if statement.has_large_delta:
        claim = f"No single {unit} is protected: δ is not below 1 / {statement.units}."
        return claim, technical, "none"
    verb = next(verb for largest, verb in _LEVELS if success <= largest)
    hidden = (
        f"which of two versions of a {unit}'s data was used"
        if statement.adjacency is Adjacency.REPLACE_ONE
        else f"whether any one {unit}'s data were used"
    )
    share = math.ceil(100 * success - 1e-9)
    often = f"at most {share} times in 100 (a coin toss: 50)" if share < 100 else "practically always"
    claim = f"This model {verb} {hidden}: an attacker who knows everything else guesses right {often}."
    return claim, technical, "weak" if success > _WEAK else "good"


def _reached(run: RunData) -> tuple[str, str, tuple[Reached, ...]]:
    """Return the main metric, what covers it, and its value beside that of a constant answer."""
    if run.evaluated is not None:
        for metric, interval in run.evaluated.headline.items():
            if interval is not None:
                model = Reached(
                    label="This model", value=interval.estimate, low=interval.low, high=interval.high
                )
                return metric, RELEASED, (model, *_constant(_CHANCE.get(metric)))
        return "", RELEASED, ()
    coverage = PUBLIC if run.public_test is not None else NOT_COVERED
    for metric in run.metrics[:1]:
        value = run.last(metric)
        if value is not None:
            return (
                metric,
                coverage,
                (Reached(label="This model", value=value), *_constant(run.baseline.get(metric))),
            )
    return "", coverage, ()


def _constant(value: float | None) -> tuple[Reached, ...]:
    if value is None or not math.isfinite(value):
        return ()
    return (Reached(label="Constant baseline", value=value),)


def _beside(run: RunData, other: RunData, metric: str) -> tuple[Reached, ...]:
    """Return the value of a run without privacy."""
    if other.statement.epsilon is not None:
        raise ConfigError(
            f"{other.folder}: this run has a guarantee (epsilon {show_epsilon(other.statement.epsilon)}); give a run "
            "without one, such as one of method fedavg"
        )
    if run.experiment.get("data") != other.experiment.get("data"):
        raise ConfigError(
            f"{other.folder}: [data] of its experiment.toml differs from that of {run.folder}; results on other data "
            "cannot be compared"
        )
    value = other.last(metric)
    if value is None:
        return ()
    label = "Without privacy" if other.public_test is not None else f"Without privacy ({NOT_COVERED})"
    return (Reached(label=label, value=value),)


def _cautions(run: RunData, metric: str, coverage: str) -> list[str]:
    """Return cautions about quoting the figures."""
    statement, cautions = run.statement, []
    if statement.delta_warning is not None:
        cautions.append(statement.delta_warning)
    if coverage == NOT_COVERED and metric:
        cautions.append(
            f"The test metric is {NOT_COVERED}: it was computed from private records without noise. Ask before it "
            "leaves those who may read the records; [evaluation] releases it with noise."
        )
    if run.evaluated is None and run.beats_baseline(metric) is False:
        cautions.append(
            "The model is no better than the constant baseline: the most frequent class, or the mean."
        )
    if statement.epsilon is not None:
        cautions.append("Everything else that is released from the same records adds to ε.")
        cautions.append(
            f"The guarantee does not cover everything: the privacy statement names {len(statement.uncovered)} items."
        )
    if run.rounds and (advice_text := advice(run.rounds, run.rounds[-1].round)) is not None:
        cautions.append(advice_text)
    return cautions
