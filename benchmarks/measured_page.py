"""Writes the pages of measured figures of their result files: docs/measured-statistics.md and docs/benchmarks.md.

``python -m benchmarks.measured_page``
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
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
        documents = self.documents()
        same = _same_conditions(documents.values())
        sections = [Path(__file__).with_name(self.head).read_text(encoding="utf-8").rstrip("\n")]
        sections += [f"All sections: {', '.join(same)}."] if same else []
        sections += ["\n".join(_section(title, found, same)) for title, found in documents.items()]
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
        "Boosted trees of a large table": "tree-speed",
        "The channel": "channel",
        "Partial encryption": "encryption",
        "Messages and rounds of a federation": "federation",
        "The transport": "exchanges",
        "Words of masked messages": "words",
    },
)


def _section(title: str, document: dict[str, Any], same: list[str]) -> Iterator[str]:
    yield f"## {title}"
    yield ""
    yield from _conditions(document, same)
    rows = document["rows"]
    laid = [list(_laid(rows, splits)) for splits in _SPLITS]
    yield from min(laid, key=lambda lines: sum(len(line.split()) for line in lines))


_SPLITS: Final = (("", False), (": ", False), (", ", False), (", ", True))
"""How a case may be read as what was measured and which figure of it: separator, and whether its last place counts."""


def _laid(rows: list[dict[str, Any]], split: tuple[str, bool]) -> Iterator[str]:
    """Yield tables: one for all subjects with the same figures, and a list of the rest."""
    subjects: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        subject, figure = _parts(row["case"], *split)
        subjects.setdefault(subject, {})[f"{figure} ({row['unit']})"] = row
    alike: dict[tuple[str, ...], list[str]] = {}
    for subject, figures in subjects.items():
        alike.setdefault(tuple(figures), []).append(subject)
    grids = {figures: own for figures, own in alike.items() if len(own) > 1 and len(figures) > 1}
    gridded = {subject for own in grids.values() for subject in own}
    alone = [row for row in rows if _parts(row["case"], *split)[0] not in gridded]
    if alone:
        yield from _list(alone)
    for number, (names, own) in enumerate(grids.items()):
        if number or alone:
            yield ""
        goals = {figure: {subjects[subject][figure]["target"] for subject in own} for figure in names}
        one = {figure: next(iter(found)) if len(found) == 1 else None for figure, found in goals.items()}
        heads = {figure: "" if one[figure] is None else f", goal {one[figure]:.4g}" for figure in names}
        wide = len(names) > len(own)
        columns, lines = (own, list(names)) if wide else (list(names), own)
        yield f"| | {' | '.join(column + heads.get(column, '') for column in columns)} |"
        yield f"|{'---|' * (1 + len(columns))}"
        for line in lines:
            pairs = [(column, line) if wide else (line, column) for column in columns]
            cells = (_entry(subjects[subject][figure], one[figure]) for subject, figure in pairs)
            yield f"| {line}{heads.get(line, '')} | {' | '.join(cells)} |"


def _parts(case: str, separator: str, last: bool) -> tuple[str, str]:
    if not separator or separator not in case:
        return case, ""
    subject, _, figure = case.rpartition(separator) if last else case.partition(separator)
    return subject, figure


def _entry(row: dict[str, Any], goal: float | None) -> str:
    """Return our figure, with the peer's and the ratio in brackets; bold where a goal is missed."""
    beside = [] if row["peer"] is None else [f"{row['peer']:.4g}"]
    beside += [] if row["ratio"] is None else [f"×{row['ratio']:.4g}"]
    beside += [] if row["target"] is None or goal is not None else [f"goal {row['target']:.4g}"]
    text = f"{row['ours']:.4g}" + (f" ({'; '.join(beside)})" if beside else "")
    return f"**{text}**" if row["met"] is False else text


def _list(rows: list[dict[str, Any]]) -> Iterator[str]:
    known = {name: any(row[name] is not None for row in rows) for name in ("ours", "peer", "ratio", "target")}
    names = [name for name, shown in known.items() if shown]
    yield f"| case | {' | '.join('goal' if name == 'target' else name for name in names)} |"
    yield f"|{'---|' * (1 + len(names))}"
    for row in rows:
        shown = ["" if row[name] is None else f"{row[name]:.4g}" for name in names]
        if row["met"] is False:
            shown[0] = f"**{shown[0]}**"
        yield f"| {row['case']} ({row['unit']}) | {' | '.join(shown)} |"


def _conditions(document: dict[str, Any], same: list[str]) -> Iterator[str]:
    """Yield what was measured, how, and where, but for what is the same on the whole page; of schema 1 only where."""
    machine = document["machine"]
    if document["schema_version"] == 1:
        yield f"Measured on {machine['processor']}, one core, Python {machine['python']}."
    else:
        command = (
            f"fedveil bench {document['name'].replace('_', '-')}{' --quick' if document['quick'] else ''}"
        )
        yield from (_documentation(document["name"]), "")
        own = [one for one in _machine(machine) if one not in same]
        own.append(f"load average {machine['load']:g}")
        yield f"`{command} --json`: {', '.join(own)}."
    yield ""


def _machine(machine: dict[str, Any]) -> list[str]:
    """Return the conditions of a measurement that sections of a page may share."""
    return [
        f"fedveil {machine['fedveil']}",
        f"Python {machine['python']}",
        f"torch {machine['torch']}",
        f"{machine['cores']} cores",
        machine["processor"],
    ]


def _same_conditions(documents: Iterable[dict[str, Any]]) -> list[str]:
    """Return the conditions that all documents share, if there are several that name them."""
    told = [_machine(one["machine"]) for one in documents if one["schema_version"] > 1]
    return [one for one in told[0] if all(one in other for other in told)] if len(told) > 1 else []


def _documentation(name: str) -> str:
    """Return what a benchmark says of itself, as Markdown."""
    text = getdoc(import_module(f"benchmarks.{name}")) or ""
    return re.sub(r":\w+:`([^`]+)`", r"`\1`", text.replace("``", "`"))


if __name__ == "__main__":
    for page in (STATISTICS, BENCHMARKS):
        page.path.write_text(page.text(), encoding="utf-8")
