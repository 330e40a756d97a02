"""Writes docs/measured-statistics.md of its result files.

``python -m benchmarks.statistics_page``
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

_PAGE: Final = Path("docs/measured-statistics.md")
_HEAD: Final = Path(__file__).with_name("statistics_head.md")
SOURCES: Final = {
    "Releases, test metrics and preprocessing": "statistics",
    "Speed": "statistics-speed",
    "Regressions": "inference",
}
"""Result files by their section."""


def page() -> str:
    """Return the page of the results in the checkout."""
    sections = [_HEAD.read_text(encoding="utf-8").rstrip("\n")]
    for title, name in SOURCES.items():
        document = json.loads(Path(f"results/{name}.json").read_text(encoding="utf-8"))
        sections.append("\n".join(_section(title, document)))
    return "\n\n".join(sections) + "\n"


def _section(title: str, document: dict[str, Any]) -> Iterator[str]:
    yield f"## {title}"
    yield ""
    yield f"Measured on {document['machine']['processor']}, one core, Python {document['machine']['python']}."
    yield ""
    yield "| case | ours | peer | goal | met |"
    yield "| --- | --- | --- | --- | --- |"
    for row in document["rows"]:
        met = {None: "", True: "yes", False: "**no**"}[row["met"]]
        ours, peer, goal = (
            "" if row[key] is None else f"{row[key]:.4g}" for key in ("ours", "peer", "target")
        )
        yield f"| {row['case']} ({row['unit']}) | {ours} | {peer} | {goal} | {met} |"


if __name__ == "__main__":
    _PAGE.write_text(page(), encoding="utf-8")
