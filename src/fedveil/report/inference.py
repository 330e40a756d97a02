"""Page of a regression: the statement, and the coefficients with intervals as a table and a plot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from fedveil.report.document import Section, document, notice, table, write_document
from fedveil.report.drawing import Axis, Plot, Series, show
from fedveil.report.statistics import promise
from fedveil.run.folder.documents import read_statement
from fedveil.statistics.inference.newton import Effect
from fedveil.statistics.inference.result import TOO_FEW_HERE, FittedRegression, read_fitted

_RATIOS = {"logistic": "odds ratio", "poisson": "rate ratio", "survival": "hazard ratio"}


def write_inference(folder: Path) -> Path:
    """Write `report.html` of a regression into its run folder, from the released figures only.

    Raises:
        RunFolderError: the folder has no regression or no statement, or cannot be written to.
    """
    fitted = read_fitted(folder)
    page = document(
        title=fitted.name,
        kicker="fedveil · inference",
        lead="What was promised comes first; what was found comes after it.",
        sections=[promise(read_statement(folder / "privacy.json")), _found(fitted)],
    )
    return write_document(folder / "report.html", page)


def p_text(p: float) -> str:
    """Return a p-value in the usual format of publications.

    >>> p_text(3e-7), p_text(0.0456)
    ('< 0.0001', '0.0456')
    """
    return "< 0.0001" if p < 1e-4 else f"{p:.4f}"


def _found(fitted: FittedRegression) -> Section:
    family = fitted.family.name
    title = f"{family} regression of {', '.join(fitted.family.columns)}"
    if fitted.hidden_reason is not None:
        return Section(
            identifier="coefficients", title=title, body=notice(fitted.hidden_reason, kind="warning")
        )
    ratio = _RATIOS.get(family)
    head = ["", "coefficient", "95 % interval", *([ratio, "95 % interval"] if ratio else [])]
    body = [_cells(one) for one in fitted.effects]
    width = len(body[0])
    body += [[name, TOO_FEW_HERE, *[""] * (width - 2)] for name in fitted.lost]
    drawn = list(_forest([one for one in fitted.effects if one.name in fitted.design.names], ratio))
    return Section(
        identifier="coefficients",
        title=title,
        plots=drawn,
        body=table([*head, "t", "df", "p", "width from privacy"], body, caption="All coefficients"),
    )


def _cells(one: Effect) -> list[str]:
    ratios = (
        [] if one.ratio is None else [show(one.ratio[0]), f"{show(one.ratio[1])} to {show(one.ratio[2])}"]
    )
    return [
        one.name,
        show(one.estimate),
        f"{show(one.low)} to {show(one.high)}",
        *ratios,
        f"{one.z:.2f}",
        f"{one.freedom:.3g}",
        p_text(one.p),
        f"{one.privacy:.0%}",
    ]


def _forest(effects: Sequence[Effect], ratio: str | None) -> Iterator[Plot]:
    """Yield a forest plot: coefficients with their intervals, one below the other."""
    if not effects:
        return
    ends = [(one.estimate, one.low, one.high) if one.ratio is None else one.ratio for one in effects]
    label = ratio or "coefficient"
    told = "; ".join(f"{one.name}: {show(value)}" for one, (value, _, _) in zip(effects, ends, strict=True))
    yield Plot(
        title=label.capitalize(),
        alt=f"Points with intervals, one a coefficient. {told}.",
        caption=f"With 95 % intervals for the population, per unit of the column. {told}.",
        # No effect is a ratio of 1 or a coefficient of 0; ratios are symmetric on a logarithmic axis.
        x=Axis(title=label, log=ratio is not None, rule=0.0 if ratio is None else 1.0),
        y=Axis(title="", categories=tuple(one.name for one in effects)),
        series=(
            Series(
                name="",
                mark="intervals",
                x=tuple(value for value, _, _ in ends),
                y=tuple(range(len(ends))),
                low=tuple(low for _, low, _ in ends),
                high=tuple(high for _, _, high in ends),
            ),
        ),
    )
