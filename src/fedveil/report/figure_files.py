"""Write plots as files: SVG and PDF for papers and slides, CSV for other tools.

Matplotlib draws the PDF, because it embeds fonts with Greek letters; it is imported for that alone (extra `figures`).
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from fedveil.arguments import list_argument
from fedveil.errors import ConfigError, RunFolderError, show_argument
from fedveil.files import replace_file, writing
from fedveil.report.drawing import PALETTE, Axis, Plot, Series, draw
from fedveil.sanitize import as_spreadsheet_text, one_line

_MATPLOTLIB_DASH: Final = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}


def write_figures(
    plots: Sequence[Plot], folder: Path, formats: Sequence[str] = ("svg", "pdf", "csv")
) -> list[Path]:
    """Write every plot into a folder, one file per format: ``01-roc-curve.svg``.

    Args:
        plots: the plots; their order numbers the files.
        folder: is created if it is missing; files of the same names are replaced.
        formats: some of "svg", "pdf", "csv".

    Returns:
        The paths of the files.

    Raises:
        ConfigError: an unknown format; no plot; "pdf" without Matplotlib.
        RunFolderError: a file cannot be written.
    """
    for name in list_argument("figures: formats", formats):
        if not isinstance(name, str) or name not in FORMATS:
            raise ConfigError(
                f"figures: format must be one of {', '.join(FORMATS)}, not {show_argument(name)}"
            )
    if not plots:
        raise ConfigError("figures: there is no plot to write; a run needs at least two evaluated rounds")
    if "pdf" in formats:
        _figure_class()
    written = []
    with writing(folder, RunFolderError):
        folder.mkdir(parents=True, exist_ok=True)
        for number, plot in enumerate(plots, start=1):
            for name in formats:
                path = folder / f"{number:02d}-{_slug(plot.title)}.{name}"
                replace_file(path, FORMATS[name](plot))
                written.append(path)
    return written


def plot_rows(plot: Plot) -> Iterator[tuple[str, ...]]:
    """Yield the header and the points of a plot as texts: series, x, y, low, high, label.

    A text that a spreadsheet would run as a formula gets an apostrophe in front.
    """
    yield ("series", plot.x.title or "x", plot.y.title or "y", "low", "high", "label")
    for series in plot.series:
        for index, x in enumerate(series.x):
            values = [_value(plot.x, x), *(_value(plot.y, y) for y in series.y[index : index + 1])]
            values += [""] * (2 - len(values))
            ends = [repr(float(end[index])) if end else "" for end in (series.low, series.high)]
            label = as_spreadsheet_text(series.labels[index]) if series.labels else ""
            yield (as_spreadsheet_text(series.name), *values, *ends, label)


def _value(axis: Axis, value: float) -> str:
    """Return a position as text: a category by its name, a place between two by its number, a gap as nothing."""
    if math.isnan(value):
        return ""
    if axis.categories and float(value).is_integer():
        return as_spreadsheet_text(axis.categories[int(value)])
    return repr(float(value))


def _slug(title: str) -> str:
    """Return a file name of ASCII letters, digits and hyphens."""
    plain = title.replace("ε", "epsilon").replace("σ", "sigma").replace("²", "2").lower()
    return re.sub(r"[^a-z0-9]+", "-", plain).strip("-")[:60] or "figure"


def _svg(plot: Plot) -> bytes:
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{draw(plot, wide=True)}\n'.encode()


def _csv(plot: Plot) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(plot_rows(plot))
    return text.getvalue().encode()


# --- PDF ---


def _figure_class() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            "figures: PDF needs Matplotlib; install fedveil[figures], or choose the formats svg and csv"
        ) from None
    return Figure


def _pdf(plot: Plot) -> bytes:
    """Return the plot as a page of 7 x 3.6 inches, without a date, so that equal plots are equal files."""
    figure = _figure_class()(figsize=(7.0, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for series in plot.series:
        _draw(axes, series)
    for name, axis in (("x", plot.x), ("y", plot.y)):
        _set_axis(axes, name, axis)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    axes.set_title(one_line(plot.title), parse_math=False, loc="left", fontsize=11)
    if sum(bool(series.name) for series in plot.series) > 1:
        for text in axes.legend(frameon=False, fontsize=8).get_texts():
            text.set_parse_math(False)
    content = io.BytesIO()
    figure.savefig(
        content, format="pdf", metadata={"CreationDate": None, "Producer": "fedveil", "Creator": None}
    )
    return content.getvalue()


def _set_axis(axes: Any, name: str, axis: Axis) -> None:
    shown = getattr(axes, f"{name}axis")
    getattr(axes, f"set_{name}label")(one_line(axis.title), parse_math=False)
    if axis.categories:
        names = [one_line(text) for text in axis.categories]
        shown.set_ticks(range(len(names)), names, parse_math=False)
        if name == "y":
            axes.invert_yaxis()
        elif sum(map(len, names)) > 70:
            axes.tick_params("x", rotation=35)
    elif axis.log:
        getattr(axes, f"set_{name}scale")("log")
    if axis.bounds is not None:
        getattr(axes, f"set_{name}lim")(*axis.bounds)
    elif axis.zero:
        getattr(axes, f"set_{name}lim")(**{"left" if name == "x" else "bottom": 0})
    if axis.rule is not None:
        (axes.axvline if name == "x" else axes.axhline)(axis.rule, color="grey", linestyle=":")


def _draw(axes: Any, series: Series) -> None:
    colour = PALETTE[series.colour % len(PALETTE)]
    named = {"label": one_line(series.name) if series.name else "_nolegend_", "color": colour}
    if series.mark == "ribbon":
        axes.fill_between(series.x, series.low, series.high, alpha=series.opacity, linewidth=0, **named)
    elif series.mark == "bars":
        axes.bar(series.x, series.y, **named)
        if series.low:
            axes.vlines(series.x, series.low, series.high, color="black", linewidth=1)
    elif series.mark == "intervals":
        axes.hlines(series.y, series.low, series.high, color=colour)
        axes.plot(series.x, series.y, marker="o", linestyle="", **named)
    else:
        style = "" if series.mark == "points" else _MATPLOTLIB_DASH[series.dash]
        marker = "" if series.mark == "line" else "o"
        axes.plot(series.x, series.y, linestyle=style, marker=marker, markersize=4, **named)


FORMATS: Final[dict[str, Callable[[Plot], bytes]]] = {"svg": _svg, "pdf": _pdf, "csv": _csv}
"""Writers by format."""
