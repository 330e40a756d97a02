"""Section of a run's report on the released model: partial dependence by column, and a tree."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fedveil.report.document import Section
from fedveil.report.drawing import Axis, Plot, Series, show
from fedveil.report.run_data import RunData

if TYPE_CHECKING:  # a page without a model needs none of what reads one
    from fedveil.run.released_model import Dependence, ShownTree


def model_section(run: RunData) -> Section | None:
    """Return the section of the released model; None before there is one, and for models of other data than tables."""
    if not (run.folder / "model.safetensors").is_file():
        return None
    from fedveil.run.released_model import read_released_model

    found = read_released_model(run.folder, run.experiment)
    if found is None:
        return None
    plots = [_dependence(one) for one in found.dependences]
    if found.tree is not None:
        plots.append(_tree(found.tree))
    return Section(
        identifier="model",
        title="The released model",
        lead="Computed from the released model and the public schema alone: no record is read, no privacy is spent. "
        "Each curve moves one column over its declared range; the other columns stay at the middle of their bounds or "
        "at their first category. These are no averages over people. Noise in the model moves every curve.",
        plots=plots,
        appendix=True,  # so that a report still prints on two pages
    )


def _dependence(one: Dependence) -> Plot:
    """Return the plot of one column."""
    several = len(one.curves) > 1
    ends = "; ".join(f"{name}: {show(min(of))} to {show(max(of))}" for name, of in one.curves.items())
    return Plot(
        title=f"Partial dependence on {one.column}",
        alt=f"What the model gives by {one.column}, the other columns at public reference values. {ends}.",
        caption=f"The other columns at public reference values. {ends}.",
        x=Axis(title=", ".join(filter(None, (one.column, one.unit))), categories=one.categories),
        y=Axis(title="" if several else next(iter(one.curves))),
        series=tuple(
            Series(
                name=name if several else "",
                mark="points" if one.categories else "line",
                colour=place,
                x=one.places,
                y=of,
            )
            for place, (name, of) in enumerate(one.curves.items())
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
            for side, found in enumerate(sides):
                found += [middle, middle + (2 * side - 1) * under / 4, math.nan]
            heights += [level, level + 1, math.nan]  # category 0 is at the top
    leaves = ", ".join(show(one) for one in tree.leaves)
    return Plot(
        title="One tree of the model",
        alt=f"A tree that asks {', then '.join(tree.questions)}. Its leaves, from no to yes: {leaves}.",
        caption=f"Of {tree.trees} trees, the one with the most different leaves. Nodes of a level ask one question; a "
        f"leaf's number is added to {'the output' if tree.output is None else f'output {tree.output}'}.",
        x=Axis(title="added by the leaf", categories=tuple(f"{one:+.2g}" for one in tree.leaves)),
        y=Axis(title="", categories=(*tree.questions, "leaf")),
        series=tuple(
            Series(name=name, mark="line and points", colour=side, x=tuple(found), y=tuple(heights))
            for side, (name, found) in enumerate(zip(("no", "yes"), sides, strict=True))
        ),
    )
