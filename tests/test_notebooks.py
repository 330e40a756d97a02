"""The notebooks run from top to bottom, have kept what they printed, and are pages of the documentation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.notebooks import FOLDER, PATHS, read, run, source

ROOT = Path(__file__).resolve().parents[1]


EXPENSIVE = ("compose-and-compare", "own-model")
"""Twelve runs, and a network of one's own: seconds each, of what other tests try by itself."""


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.slow] if path.stem in EXPENSIVE else []) for path in PATHS],
    ids=lambda path: path.stem,
)
def test_a_notebook_runs_and_has_kept_what_it_printed(path: Path, tmp_path: Path) -> None:
    """Numbers differ by the noise; the words between them do not."""
    cells = [cell for cell in read(path)["cells"] if cell["cell_type"] == "code"]
    kept = ["".join("".join(out["text"]) for out in cell["outputs"]) for cell in cells]
    printed = run(path, tmp_path)
    assert [_words(text) for text in printed] == [_words(text) for text in kept]


def _words(text: str) -> list[str]:
    return re.findall(r"[A-Za-z]{3,}", text)


def test_the_notebooks_are_pages_of_the_documentation() -> None:
    assert [path.stem for path in PATHS] == ["compose-and-compare", "own-model", "own-table"]
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for path in PATHS:
        assert f"notebooks/{path.stem}.md" in site
        text = "\n".join(source(cell) for cell in read(path)["cells"])
        assert not re.search(r"^[%!]", text, re.MULTILINE), "cells are plain Python"


def test_a_page_of_a_notebook_has_every_cell() -> None:
    names: dict[str, object] = {}
    exec((FOLDER / "pages.py").read_text(encoding="utf-8"), names)
    for path in PATHS:
        text = names["page"](path)  # type: ignore[operator]
        for cell in read(path)["cells"]:
            assert source(cell).strip() in text
            for out in cell.get("outputs", ()):
                assert "".join(out["text"]).rstrip() in text
        assert f"{path.name})" in text
