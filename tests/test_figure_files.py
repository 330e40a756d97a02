"""Figures as files: the numbers of the plots and nothing private."""

from __future__ import annotations

import csv
import re
import sys
from itertools import product
from pathlib import Path
from typing import get_args
from xml.etree import ElementTree

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedveil.api.run_folders import compare
from fedveil.errors import ConfigError
from fedveil.report.drawing import Axis, Mark, Plot, Series, draw
from fedveil.report.figure_files import write_figures
from fedveil.report.page import run_plots
from fedveil.report.run_data import load_run
from tests.commands import as_json
from tests.report_folders import metric_rows, write_run


def plot(name: str = "line", *, log: bool = False) -> Plot:
    """A plot with a series of every mark."""
    series = tuple(
        Series(name=f"{name} {mark}", mark=mark, x=(1.0, 2.0), y=(2.0, 4.0), low=(1.0, 3.0), high=(3.0, 5.0))
        for mark in get_args(Mark)
    )
    return Plot(
        title=name,
        alt=name,
        caption=name,
        x=Axis(title="round", log=log),
        y=Axis(title="accuracy"),
        series=series,
    )


@pytest.mark.parametrize("log", [False, True])
def test_every_mark_is_written_in_every_format(tmp_path: Path, log: bool) -> None:
    pytest.importorskip("matplotlib")
    svg, pdf, table = write_figures([plot(log=log)], tmp_path)
    assert [path.name for path in (svg, pdf, table)] == ["01-line.svg", "01-line.pdf", "01-line.csv"]
    assert len(list(ElementTree.parse(svg).iter())) > 20
    assert pdf.read_bytes().startswith(b"%PDF")
    header, *rows = csv.reader(table.read_text().splitlines())
    assert header == ["series", "round", "accuracy", "low", "high", "label"]
    assert rows[0] == ["line line", "1.0", "2.0", "1.0", "3.0", ""]
    assert len(rows) == 2 * len(get_args(Mark))
    before = pdf.read_bytes()
    write_figures([plot(log=log)], tmp_path)
    assert pdf.read_bytes() == before


def test_gaps_and_places_between_categories_are_written_as_such(tmp_path: Path) -> None:
    """A line that is interrupted by NaN, over categories, as the picture of a tree has it."""
    gap = Series(name="no", mark="line", x=(0.0, 0.5, float("nan")), y=(0.0, 1.0, float("nan")))
    axes = {"x": Axis(title="leaf", categories=("+1", "-1")), "y": Axis(title="", categories=("a?", "b?"))}
    (table,) = write_figures(
        [Plot(title="tree", alt="a", caption="c", series=(gap,), **axes)], tmp_path, ["csv"]
    )
    assert table.read_text().splitlines()[1:] == ["no,'+1,a?,,,", "no,0.5,b?,,,", "no,,,,,"]


VALUES = st.floats(allow_nan=True, allow_infinity=True)


@settings(max_examples=60)
@given(values=st.lists(st.tuples(VALUES, VALUES, VALUES, VALUES), max_size=4), log=st.booleans())
@example(values=[(0.0, 1.0, 1e-200, 1e200)], log=True)
@example(values=[(1e17, 1e17, 1e17, 1e17), (-1e308, 0.0, -1e308, 1e308)], log=False)
def test_any_numbers_are_drawn_within_the_picture(
    values: list[tuple[float, float, float, float]], log: bool
) -> None:
    """Noise decides some figures: an interval of a ratio may reach from 1e-200 to 1e200."""
    x, y, low, high = zip(*values, strict=True) if values else ((), (), (), ())
    for mark, axis in product(get_args(Mark), (Axis(title="v", log=log), Axis(title="v", zero=True))):
        series = Series(name=mark, mark=mark, x=x, y=y, low=low, high=high)
        across = Axis(title="x") if mark == "bars" else axis
        drawn = draw(Plot(title="t", alt="a", caption="c", x=across, y=axis, series=(series,)))
        coordinates = " ".join(re.findall(r' (?:[xyd]|[xyc][xy12]|points)="([^"]*)"', drawn))
        assert "nan" not in coordinates
        assert all(-1 <= float(number) <= 1000 for number in re.findall(r"-?[\d.]+", coordinates))


def test_names_are_data_in_every_format(tmp_path: Path) -> None:
    """No formula of a spreadsheet, no mathematics of Matplotlib, no path."""
    pytest.importorskip("matplotlib")
    for name in ("=HYPERLINK(1)", "@x", "$\\frac{", "../../up", "<script>"):
        written = write_figures([plot(name)], tmp_path / "figures")
        assert all(path.parent == tmp_path / "figures" for path in written)
        rows = list(csv.reader(written[2].read_text().splitlines()))
        assert not any(cell[:1] in ("=", "+", "-", "@") for row in rows for cell in row)


def test_wrong_formats_and_nothing_to_draw_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="format must be one of svg, pdf, csv, not 'png'"):
        write_figures([plot()], tmp_path / "none", ["png"])
    with pytest.raises(ConfigError, match="no plot to write"):
        write_figures([], tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_pdf_without_matplotlib_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # importing it raises ImportError
    with pytest.raises(ConfigError, match=r"install fedveil\[figures\], or choose the formats svg and csv"):
        write_figures([plot()], tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_figures_of_a_run_hold_its_metrics_and_no_private_diagnostics(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", rounds=4)
    titles = [one.title for one in run_plots(load_run(folder))]
    assert titles == [
        "Test accuracy",
        "Test loss",
        "Privacy spent",
        "What privacy bought: accuracy against ε",
    ]
    told = as_json("report", folder, "--figures", tmp_path / "out")
    assert len(told["figures"]) == 8
    rows = list(csv.reader((tmp_path / "out" / "01-test-accuracy.csv").read_text().splitlines()))
    accuracy = [row["test"]["accuracy"] for row in metric_rows(rounds=4)]  # type: ignore[index]
    assert [float(row[2]) for row in rows[1:]] == accuracy


def test_figures_of_a_comparison(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, name=name, rounds=2) for name in ("one", "two")]
    found = compare(*runs).figures(tmp_path / "out", formats=("csv",))
    assert len(found) == 4
    as_json("compare", *runs, "--figures", tmp_path / "more", "--figure-formats", "svg")
    assert len(list((tmp_path / "more").iterdir())) == 4
