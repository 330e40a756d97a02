"""The figures of the reproduction: what stands in a result file is what is drawn, where the axes say it is."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reproduction.figure import Curve, _ticks, panels_of, svg
from reproduction.results import Results, Run
from reproduction.table import Table

SVG = "{http://www.w3.org/2000/svg}"
TABLE = Table(
    name="digits",
    title="Digits",
    items=("none/digits",),
    parts=(
        {"preset": "digits", "variants": ["recommended", "uldp-naive"], "label": "a"},
        {"preset": "digits", "variants": ["recommended"], "label": "b"},
    ),
    value="accuracy",
    percent=True,
    rounds=(1,),
    panels=("a", "b"),
    published_curves={"a-recommended": ((1, 55.0),)},
    chosen="Nothing.",
)


def run(cell: str, seed: int, *curve: float | None) -> Run:
    return Run(
        cell=cell,
        seed=seed,
        settings="0" * 64,
        version="0",
        cpu_seconds=1.0,
        values={"accuracy": curve[-1], "rounds": float(len(curve) - 1)},
        curve={"accuracy": tuple(enumerate(curve[:-1]))},
    )


def results(*runs: Run) -> Results:
    return Results(table="digits", command="c").adding(runs)


THREE = [run("a-recommended", seed, 0.1, 0.5 + 0.1 * seed, 0.8) for seed in range(3)]


def test_a_curve_is_mean_and_deviation_by_round_up_to_the_value_at_the_end():
    (panel,) = panels_of(TABLE, "accuracy", results(*THREE)).values()
    (curve,) = panel
    assert curve.label == "recommended"
    assert curve.published == ((1, 55.0),)
    assert [number for number, *_ in curve.points] == [0, 1, 2]
    assert [mean for _, mean, _ in curve.points] == pytest.approx([10, 60, 80])
    assert [sd for *_, sd in curve.points] == pytest.approx([0, 10, 0], abs=1e-9)


def test_cells_with_two_runs_and_rounds_that_a_run_does_not_have_are_not_drawn():
    assert panels_of(TABLE, "accuracy", results(*THREE[:2])) == {}
    shorter = run("a-recommended", 2, 0.1, 0.6)
    ((curve,),) = panels_of(TABLE, "accuracy", results(*THREE[:2], shorter)).values()
    assert [number for number, *_ in curve.points] == [0, 1]
    undefined = run("a-recommended", 2, 0.1, None, 0.8)
    ((curve,),) = panels_of(TABLE, "accuracy", results(*THREE[:2], undefined)).values()
    assert [number for number, *_ in curve.points] == [0, 2]
    assert panels_of(TABLE, "loss", results(*THREE)) == {}, "no run kept it"


def across(root: ElementTree.Element, tick: str) -> float:
    return next(
        float(text.get("x"))
        for text in root.iter(f"{SVG}text")
        if (text.text, text.get("text-anchor")) == (tick, "middle")
    )


def up(root: ElementTree.Element, tick: str) -> float:
    return next(
        float(text.get("y")) - 4
        for text in root.iter(f"{SVG}text")
        if (text.text, text.get("text-anchor")) == (tick, "end")
    )


def test_what_is_drawn_stands_where_the_axes_say():
    curve = Curve(
        label="one", points=((0, 10.0, 0.0), (40, 60.0, 10.0), (80, 30.0, 0.0)), published=((40, 50.0),)
    )
    root = ElementTree.fromstring(svg({"p": (curve,)}, "accuracy"))
    assert {"one", "p: accuracy", "round"} <= {text.text for text in root.iter(f"{SVG}text")}
    band, line = (
        [[float(one) for one in point.split()] for point in re.split("[ML]", path.get("d").rstrip("Z"))[1:]]
        for path in root.iter(f"{SVG}path")
        if "L" in path.get("d")
    )
    assert line[1] == pytest.approx([across(root, "40"), up(root, "60")], abs=0.11)
    assert line[2][0] == pytest.approx(across(root, "80"), abs=0.11)
    ten = (up(root, "20") - up(root, "60")) / 4
    assert band[1] == pytest.approx([across(root, "40"), up(root, "60") - ten], abs=0.11), "mean + sd"
    assert band[4] == pytest.approx([across(root, "40"), up(root, "60") + ten], abs=0.11), "mean - sd"
    ring = root.find(f"{SVG}circle")
    found = [float(ring.get("cx")), float(ring.get("cy"))]
    assert found == pytest.approx([across(root, "40"), up(root, "60") + ten], abs=0.11)


def test_names_are_text_and_nothing_else():
    curve = Curve(label="<script>&", points=((0, 1.0, 0.0), (1, 2.0, 0.0)), published=())
    root = ElementTree.fromstring(svg({"<b>": (curve,)}, "a & b"))
    assert "<script>&" in {text.text for text in root.iter(f"{SVG}text")}
    assert root.find(f"{SVG}script") is None


def test_a_curve_that_does_not_move_is_drawn():
    curve = Curve(label="flat", points=((0, 5.0, 0.0), (1, 5.0, 0.0)), published=())
    assert "nan" not in svg({"": (curve,)}, "loss")


@given(low=st.floats(-1e6, 1e6), width=st.floats(1e-3, 1e6))
def test_ticks_are_round_evenly_spaced_and_within_the_axis(low: float, width: float):
    ticks = _ticks(low, low + width)
    steps = {round((b - a) / width, 6) for a, b in pairwise(ticks)}
    assert 2 <= len(ticks) <= 6
    assert len(steps) == 1
    assert ticks[0] >= low - 1e-6 * width - 1e-9 * abs(low)
    assert ticks[-1] <= low + width * (1 + 1e-6) + 1e-9 * abs(low)
    step = ticks[1] - ticks[0]
    assert min(abs(step / 10 ** math.floor(math.log10(step * 1.0001)) - one) for one in (1, 2, 5)) < 1e-3


def test_a_figure_without_panels_is_refused():
    with pytest.raises(ValueError, match="a figure needs panels, and rounds"):
        Table.model_validate(TABLE.model_dump() | {"panels": (), "published_curves": {}, "drawn": ("loss",)})
