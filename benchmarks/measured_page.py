"""Writes the pages of measured figures of their result files: docs/measured-statistics.md and docs/benchmarks.md.

``python -m benchmarks.measured_page``
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from inspect import getdoc
from pathlib import Path
from typing import Any, Final


@dataclass(frozen=True, kw_only=True)
class Page:
    """A page of measured figures.

    Args:
        path: of the page, from the checkout.
        head: the file in ``benchmarks/`` that it begins with.
        results: the folder with its result files.
        sections: names of benchmarks by the titles of their sections.
    """

    path: Path
    head: str
    results: Path
    sections: Mapping[str, str]

    def documents(self) -> dict[str, dict[str, Any]]:
        """Return what the benchmarks printed, by the titles of their sections."""
        return {
            title: json.loads((self.results / f"{name}.json").read_text(encoding="utf-8"))
            for title, name in self.sections.items()
        }

    def text(self) -> str:
        """Return the page of the results in the checkout."""
        sections = [Path(__file__).with_name(self.head).read_text(encoding="utf-8").rstrip("\n")]
        sections += ["\n".join(_section(title, found)) for title, found in self.documents().items()]
        return "\n\n".join(sections) + "\n"


STATISTICS: Final = Page(
    path=Path("docs/measured-statistics.md"),
    head="statistics_head.md",
    results=Path("results"),
    sections={
        "Releases, test metrics and preprocessing": "statistics",
        "Speed": "statistics-speed",
        "Regressions": "inference",
    },
)
BENCHMARKS: Final = Page(
    path=Path("docs/benchmarks.md"),
    head="benchmarks_head.md",
    results=Path("results/benchmarks"),
    sections={
        "Local training": "training",
        "DP-SGD in silos": "dpsgd",
        "Client-level simulation": "simulation",
        "Large models, many users, noise": "scale",
        "Whole rounds, against an earlier state of the house": "rounds",
        "The channel": "channel",
        "Partial encryption": "encryption",
        "Messages and rounds of a federation": "federation",
        "The transport": "exchanges",
    },
)


def _section(title: str, document: dict[str, Any]) -> Iterator[str]:
    yield f"## {title}"
    yield ""
    yield from _conditions(document)
    rows = document["rows"]
    compared = any(row["ratio"] is not None for row in rows)
    heads = ["case", "ours", "peer", *(["ratio"] if compared else []), "goal", "met"]
    yield f"| {' | '.join(heads)} |"
    yield f"|{' --- |' * len(heads)}"
    for row in rows:
        met = {None: "", True: "yes", False: "**no**"}[row["met"]]
        figures = (row["ours"], row["peer"], *([row["ratio"]] if compared else []), row["target"])
        shown = ("" if figure is None else f"{figure:.4g}" for figure in figures)
        yield f"| {row['case']} ({row['unit']}) | {' | '.join(shown)} | {met} |"


def _conditions(document: dict[str, Any]) -> Iterator[str]:
    """Yield what was measured, where and how; of results of schema 1, which say no more, where."""
    machine = document["machine"]
    if document["schema_version"] == 1:
        yield f"Measured on {machine['processor']}, one core, Python {machine['python']}."
    else:
        command = (
            f"fedveil bench {document['name'].replace('_', '-')}{' --quick' if document['quick'] else ''}"
        )
        yield from (_documentation(document["name"]), "")
        yield (
            f"`{command} --json`, fedveil {machine['fedveil']}, on {machine['cores']} cores of {machine['processor']}, "
            f"Python {machine['python']}, torch {machine['torch']}; load average when it began: {machine['load']:g}."
        )
    yield ""


def _documentation(name: str) -> str:
    """Return what a benchmark says of itself, as Markdown."""
    text = getdoc(import_module(f"benchmarks.{name}")) or ""
    return re.sub(r":\w+:`([^`]+)`", r"`\1`", text.replace("``", "`"))


if __name__ == "__main__":
    for page in (STATISTICS, BENCHMARKS):
        page.path.write_text(page.text(), encoding="utf-8")
