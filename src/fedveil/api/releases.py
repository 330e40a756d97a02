"""Statistics and regressions from Python: one release of noisy figures with intervals, within one budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from fedveil.api.experiment_tables import data_section
from fedveil.api.frame import Frame, Row
from fedveil.arguments import explain_arguments, flag_argument, text_argument
from fedveil.config_keys import plain_inside
from fedveil.console import ends, epsilon_text, number
from fedveil.data.memory_tables import TableFile
from fedveil.data.records import Population
from fedveil.errors import ConfigError, show_argument
from fedveil.files import as_path
from fedveil.methods.capabilities import nominal_multiplier
from fedveil.privacy.statement import Statement, show_at_least
from fedveil.report.statistics import freedom_text, p_text, write_inference, write_statistics
from fedveil.run.config.experiment import merge
from fedveil.run.config.release_document import InferenceDocument, ReleaseDocument, TableDocument
from fedveil.run.folder.documents import read_statement
from fedveil.run.folder.run_folder import finite
from fedveil.run.releases.inference import find_inference_folder, prepare_inference
from fedveil.run.releases.series import Series
from fedveil.run.releases.statistics import find_release_folder, prepare_release
from fedveil.run.simulation import make_releases
from fedveil.statistics import figures
from fedveil.statistics.inference.newton import Effect
from fedveil.statistics.inference.result import TOO_FEW_HERE, FittedRegression, read_fitted
from fedveil.statistics.request import TOO_FEW
from fedveil.statistics.result import read_released
from fedveil.validation import validate_document

Family = Literal["logistic", "linear", "poisson", "survival"]


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class FigureFrame(Frame):
    """Released figures: estimate, interval, and how much of the interval's width is the price of privacy.

    Attributes:
        figures: the figures as objects.
        these_people: whether intervals are shown for these very people, without the variation of sampling people.
    """

    figures: tuple[figures.Row, ...]
    these_people: bool = False

    @property
    def shown(self) -> Sequence[Row]:
        """The figures in words; one with too few people is not shown."""
        return [_figure_in_words(row, self.these_people) for row in self.figures]

    @property
    def tables(self) -> Sequence[tuple[str | None, Sequence[Row]]]:
        """One table a release; the groups of one figure stand below each other."""
        by_release: dict[str, dict[str, list[Row]]] = {}
        for row in self.shown:
            cells = dict(row)
            by_release.setdefault(cells.pop("release"), {}).setdefault(cells["figure"], []).append(cells)
        return [
            (release, [cells for same in by_figure.values() for cells in same])
            for release, by_figure in by_release.items()
        ]


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class StatisticsFrame(FigureFrame):
    """Released statistics.

    Attributes:
        statement: what the release guarantees.
        folder: its run folder; :meth:`report` writes the page there.
        counted: what is counted: people, or pairs of a person and a silo.
    """

    statement: Statement
    folder: Path
    counted: str

    @property
    def lines(self) -> tuple[str, ...]:
        """The statement in sentences."""
        return self.statement.sentences()

    def report(self) -> Path:
        """Write the page of the release into its folder."""
        return write_statistics(self.folder)

    def to_json(self) -> dict[str, Any]:
        head = {"folder": self.folder, "counted": self.counted}
        return head | super().to_json() | {"statement": self.statement.to_json()}


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class EffectFrame(Frame):
    """Coefficients of a regression, with intervals and p-values that count the noise.

    Attributes:
        fitted: the regression.
        statement: what its releases guarantee.
        folder: its run folder.
    """

    fitted: FittedRegression
    statement: Statement
    folder: Path

    @property
    def shown(self) -> Sequence[Row]:
        """The coefficients in words; none where no interval would hold."""
        return effects_in_words(self.fitted)

    @property
    def lines(self) -> tuple[str, ...]:
        """Why no coefficient has an interval, if so; n; then the statement in sentences."""
        reason = self.fitted.hidden_reason
        hidden = () if reason is None else (f"no coefficient has an interval that holds: {reason}",)
        return (*hidden, n_in_words(self.fitted), *self.statement.sentences())

    def report(self) -> Path:
        """Write the page of the regression into its folder."""
        return write_inference(self.folder)

    def to_json(self) -> dict[str, Any]:
        return {"folder": self.folder, **effects_json(self.fitted), "statement": self.statement.to_json()}


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class ReleasePlanFrame(Frame):
    """Predicted cost and errors of a release; no record was read and nothing was charged.

    Attributes:
        epsilon: what the release would spend; None without a guarantee.
        noise_multiplier: noise multiplier of the first release.
        numbers: length of a release; None for a regression, whose ``releases`` say it.
        delta: delta of the guarantee.
        releases: the releases of a regression; empty for statistics.
    """

    epsilon: float | None
    noise_multiplier: float
    delta: float
    numbers: int | None = None
    releases: tuple[Row, ...] = field(default=())

    @property
    def lines(self) -> tuple[str, ...]:
        """Noise and cost, in a sentence."""
        length = "" if self.numbers is None else f"{self.numbers} numbers, "
        return (
            f"{length}noise multiplier {show_at_least(self.noise_multiplier)}, epsilon {epsilon_text(self.epsilon)} "
            f"at delta {self.delta:g}; no record was read and nothing was charged",
        )

    def to_json(self) -> dict[str, Any]:
        rows = [dict(row) for row in self.rows]
        if self.numbers is not None:
            return {"epsilon": self.epsilon, "numbers": self.numbers, "blocks": rows}
        return {
            "epsilon": self.epsilon,
            "releases": [dict(release) for release in self.releases],
            "effects": rows,
        }


@explain_arguments
def stats(
    people: Population,
    request: Mapping[str, Any],
    *,
    epsilon: float,
    delta: float = 1e-5,
    plan: bool = False,
    repeat: bool = False,
    name: str = "statistics",
    folder: str | Path = "runs",
    settings: Mapping[str, Any] | None = None,
) -> StatisticsFrame | ReleasePlanFrame:
    """Count people across silos: one release of tables with intervals, within one budget.

    Args:
        people: a population of tables (:func:`fedveil.tables`): the schema declares bounds and categories.
        request: the table ``[statistics]`` as a mapping, such as ``{"by": ["ward"], "release": {"age": {"show":
            ["count", "mean"]}}}``; docs/reference/experiment.md has its keys.
        epsilon: what the release spends.
        delta: delta of the guarantee; well below 1 / n_users.
        plan: predict every error bar; no record is read and nothing is charged.
        repeat: pay again for cells that a stored release in ``folder`` already has.
        name: name of the release.
        folder: parent of the run folder.
        settings: further tables of the document, such as ``{"protection": {"name": "secure-aggregation"}}``.

    Raises:
        ConfigError: the population has no schema; a wrong request; a stored release has every cell already.
        FedveilError: a budget that is too small for the request, or tables that do not fit the schema.
    """
    plan, repeat = flag_argument("fedveil.stats: plan", plan), flag_argument("fedveil.stats: repeat", repeat)
    requested = {"name": name, "statistics": request}
    document = _document(ReleaseDocument, "fedveil.stats", people, requested, (epsilon, delta, settings))
    if plan:
        return plan_statistics(document)
    assert people.source is not None, "_document asks for it"
    parent = as_path(folder, "fedveil.stats: folder")
    return release_statistics(document, parent, repeat=repeat, files=people.source.files)


@explain_arguments
def infer(
    people: Population,
    formula: str | None = None,
    *,
    family: Family,
    epsilon: float,
    delta: float = 1e-5,
    plan: bool = False,
    repeat: bool = False,
    name: str = "regression",
    folder: str | Path = "runs",
    settings: Mapping[str, Any] | None = None,
    **options: Any,
) -> EffectFrame | ReleasePlanFrame:
    """Estimate effects across silos: one regression with intervals and p-values, within one budget.

    Args:
        people: a population of tables (:func:`fedveil.tables`).
        formula: ``"sick ~ age + ward"``: the column that is explained, and the features. Without a left side
            (``"~ age"``) the schema's target is explained; None takes all features too.
        family: ``"logistic"``, ``"linear"`` (with ``cut``), ``"poisson"`` (with ``cap``) or ``"survival"`` (with
            ``grid``).
        epsilon: what the regression spends.
        delta: delta of the guarantee; well below 1 / n_users.
        plan: predict every interval; no record is read and nothing is charged.
        repeat: pay again for a regression that a folder already holds.
        name: name of the regression.
        folder: parent of the run folder.
        settings: further tables of the document.
        options: other keys of the table ``[inference]``, such as ``cut``, ``grid`` or ``scale``.

    Raises:
        ConfigError: the population has no schema; a wrong formula or key; a stored regression is the same.
        FedveilError: a budget that is too small, or tables that do not fit the schema.
    """
    plan, repeat = flag_argument("fedveil.infer: plan", plan), flag_argument("fedveil.infer: repeat", repeat)
    text_argument("fedveil.infer: family", family)
    requested = {"name": name, "inference": {"family": family, **_formula(formula, family), **options}}
    document = _document(InferenceDocument, "fedveil.infer", people, requested, (epsilon, delta, settings))
    if plan:
        return plan_regression(document)
    assert people.source is not None, "_document asks for it"
    parent = as_path(folder, "fedveil.infer: folder")
    return release_regression(document, parent, repeat=repeat, files=people.source.files)


# --- documents: what the functions and the commands share -------------------------------------------------------------


def plan_statistics(document: ReleaseDocument) -> ReleasePlanFrame:
    """Predict the errors and the cost of a release of statistics."""
    statistics = prepare_release(document)
    rows = tuple(
        {
            "release": planned.release,
            "part": planned.part,
            "cells": planned.cells,
            "numbers": planned.numbers,
            "share": planned.share,
            "noise (sd)": planned.noise,
            "95 % half width": planned.error,
            "largest noise": planned.allowed,
        }
        for planned in statistics.plan
    )
    return ReleasePlanFrame(
        rows=rows,
        epsilon=_cost_of(statistics.series),
        noise_multiplier=nominal_multiplier(statistics.release(()).method.channel),
        delta=document.privacy.delta,
        numbers=statistics.step.layout.length,
    )


def release_statistics(
    document: ReleaseDocument,
    folder: Path,
    *,
    repeat: bool = False,
    files: Sequence[TableFile] | None = None,
) -> StatisticsFrame:
    """Make a release of statistics in a new folder, unless a stored one has every cell already.

    Raises:
        ConfigError: a stored release has every cell of the same tables, and ``repeat`` is not given.
    """
    prepared = prepare_release(document)
    stored = None if repeat else find_release_folder(document, prepared, folder)
    if stored is not None:
        raise ConfigError(
            f"{document.name}: {stored} has every requested cell, of the same tables; "
            f"`fedveil show {stored}` reads it again at no cost, --repeat (repeat=True in Python) pays for another"
        )
    return read_statistics(make_releases(prepared, folder, files))


def read_statistics(folder: Path, *, these_people: bool = False) -> StatisticsFrame:
    """Return the statistics that a run folder holds, with their statement.

    Raises:
        RunFolderError: the folder has no release, or a damaged one.
    """
    released = read_released(folder)
    frame = figure_frame(figures.rows(released), these_people=these_people)
    return StatisticsFrame(
        rows=frame.rows,
        figures=frame.figures,
        these_people=these_people,
        statement=read_statement(folder / "privacy.json"),
        folder=folder,
        counted=released.counted_unit,
    )


def figure_frame(figure_rows: Sequence[figures.Row], *, these_people: bool = False) -> FigureFrame:
    """Return figures as a frame."""
    return FigureFrame(
        rows=tuple(row.to_json() for row in figure_rows),
        figures=tuple(figure_rows),
        these_people=these_people,
    )


def plan_regression(document: InferenceDocument) -> ReleasePlanFrame:
    """Predict the intervals and the cost of a regression."""
    inference = prepare_inference(document)
    releases = tuple(
        {
            "release": index,
            "numbers": release.step.length,
            "share": part.share,
            "multiplier": part.multiplier(inference.multiplier),
        }
        for index, (part, release) in enumerate(
            zip(inference.fitted.parts, inference.series.releases, strict=True), start=1
        )
    )
    effects = tuple(
        {
            "coefficient": effect.name,
            "95 % half width": effect.error,
            "width from privacy": effect.privacy,
            "curvature over noise": effect.margin,
        }
        for effect in inference.plan
    )
    return ReleasePlanFrame(
        rows=effects,
        epsilon=_cost_of(inference.series),
        noise_multiplier=inference.multiplier,
        delta=document.privacy.delta,
        releases=releases,
    )


def release_regression(
    document: InferenceDocument,
    folder: Path,
    *,
    repeat: bool = False,
    files: Sequence[TableFile] | None = None,
) -> EffectFrame:
    """Make the releases of a regression in a new folder, unless a folder holds it already.

    Raises:
        ConfigError: a folder holds this regression of the same tables, and ``repeat`` is not given.
    """
    prepared = prepare_inference(document)
    stored = None if repeat else find_inference_folder(document, folder)
    if stored is not None:
        raise ConfigError(
            f"{document.name}: {stored} is this regression of the same tables; "
            f"`fedveil show {stored}` reads it again at no cost, `fedveil resume {stored}` ends it if it was "
            f"interrupted, --repeat (repeat=True in Python) "
            "pays for another"
        )
    return read_regression(make_releases(prepared, folder, files))


def read_regression(folder: Path) -> EffectFrame:
    """Return the regression that a run folder holds, with its statement.

    Raises:
        RunFolderError: the folder has no regression, or a damaged or incomplete one.
    """
    fitted = read_fitted(folder)
    return EffectFrame(
        rows=tuple(_effect_row(effect) for effect in fitted.effects),
        fitted=fitted,
        statement=read_statement(folder / "privacy.json"),
        folder=folder,
    )


def _cost_of(series: Series) -> float | None:
    """Return the epsilon of releases; None if their noise comes from a known seed, which guarantees nothing."""
    return finite(series.epsilon_of(series.event)) if series.secure else None


def effects_json(fitted: FittedRegression) -> dict[str, Any]:
    """Return the results of a regression as JSON."""
    return {
        "family": fitted.family.name,
        "target": list(fitted.family.columns),
        "n_users": fitted.schema.n_users,
        "shown": fitted.has_intervals,
        "reason": fitted.hidden_reason,
        "effects": [asdict(effect) for effect in fitted.effects],
        "without_interval": list(fitted.lost),
    }


def _effect_row(effect: Effect) -> dict[str, Any]:
    """Return a coefficient as a flat row: e^coefficient and the ends of its interval have a column each."""
    row = asdict(effect)
    ratio = row.pop("ratio")
    return row | dict(zip(("ratio", "ratio_low", "ratio_high"), ratio or (), strict=False))


def n_in_words(fitted: FittedRegression) -> str:
    """Return how many people a regression is of, from public numbers."""
    return (
        f"n: at most {fitted.schema.n_users} people (n_users of the schema, public). The regression does not release "
        "the number of people and records that it used"
    )


def effects_in_words(fitted: FittedRegression) -> list[dict[str, str]]:
    """Return a regression's coefficients in words; none where no interval would hold."""
    rows = []
    for effect in fitted.effects:
        cells = {
            "coefficient": effect.name,
            "estimate": number(effect.estimate),
            "95 % interval": ends(effect.low, effect.high),
        }
        if effect.ratio is not None:
            value, low, high = effect.ratio
            cells |= {"e^coefficient": number(value), "its 95 % interval": ends(low, high)}
        rows.append(
            cells
            | {
                "t": f"{effect.z:.2f}",
                "df": freedom_text(effect.freedom),
                "p": p_text(effect.p),
                "width": f"privacy {effect.privacy:.0%}",
            }
        )
    empty = dict.fromkeys(rows[0] if rows else (), "")
    return [*rows, *(empty | {"coefficient": name, "estimate": TOO_FEW_HERE} for name in fitted.lost)]


_Kind = TypeVar("_Kind", bound=TableDocument)


def _document(
    kind: type[_Kind],
    function: str,
    people: Population,
    request: Mapping[str, Any],
    privacy: tuple[float, float, Mapping[str, Any] | None],
) -> _Kind:
    """Return the document of a release.

    Args:
        kind: class of the document.
        function: name of the function, for errors.
        people: the population.
        request: name and request.
        privacy: epsilon, delta, and further tables.

    Raises:
        ConfigError: the population has no schema, or a key is wrong.
    """
    if not isinstance(people, Population):
        raise ConfigError(f"{function}: people: a population is needed, not {type(people).__name__}")
    if people.source is None:
        raise ConfigError(
            f"{function}: people: bounds and categories are needed, and fedveil.population declares none; read tables "
            "by a schema, from files or from memory: fedveil.tables('schema.toml', {'north': frame})"
        )
    epsilon, delta, settings = privacy
    if settings is not None and not isinstance(settings, Mapping):
        raise ConfigError(f"{function}: settings: tables by name are needed, not {type(settings).__name__}")
    whole = {**request, "data": data_section(people), "privacy": {"epsilon": epsilon, "delta": delta}}
    return validate_document(kind, plain_inside(merge(whole, dict(settings or {}))), function)


def _formula(formula: str | None, family: str) -> dict[str, Any]:
    """Return the keys ``target`` and ``features`` of a formula.

    Raises:
        ConfigError: no formula of the form ``target ~ feature + feature``.
    """
    if formula is None:
        return {}
    left, tilde, right = formula.partition("~") if isinstance(formula, str) else ("", "", "")
    features = [part.strip() for part in right.split("+")]
    if not tilde or not all(features) or "~" in right:
        raise ConfigError(
            f"fedveil.infer: formula {show_argument(formula)}: expected 'target ~ feature + feature', such as "
            "'sick ~ age + ward'; interactions and transformations are not fitted"
        )
    target = left.strip()
    if target and family == "survival":
        raise ConfigError(
            f"fedveil.infer: formula {formula!r}: survival explains the schema's target; leave the left side empty: "
            "'~ age + ward'"
        )
    return {"features": features, **({"target": target} if target else {})}


def _figure_in_words(row: figures.Row, these_people: bool) -> dict[str, str]:
    """Return a figure in words: estimate, interval, and where its width comes from."""
    cells = {"release": row.release, "figure": f"{row.figure} {row.cell}".strip(), "group": row.group}
    interval = row.interval
    if interval is None:
        return cells | {"estimate": TOO_FEW, "95 % interval": "", "width": ""}
    low, high = (interval.low_here, interval.high_here) if these_people else (interval.low, interval.high)
    privacy = 1.0 if these_people else interval.privacy
    width = f"privacy {privacy:.0%}, people {1 - privacy:.0%}"
    estimate = interval.in_words(number(interval.estimate))
    return cells | {"estimate": estimate, "95 % interval": ends(low, high), "width": width}
