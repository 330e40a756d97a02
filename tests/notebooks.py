"""The notebooks of docs/notebooks: read, run cell by cell, and written again with what they print.

``python -m tests.notebooks`` runs all of them and keeps their outputs. Cells run in this process, in a new folder: what
a notebook server would add is not needed.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "notebooks"
PATHS = tuple(sorted(FOLDER.glob("*.ipynb")))


def read(path: Path) -> dict[str, Any]:
    """Return a notebook's document."""
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document


def source(cell: dict[str, Any]) -> str:
    """Return a cell's text."""
    return "".join(cell["source"])


def run(path: Path, folder: Path) -> list[str]:
    """Run the code cells of a notebook in a folder; return what each printed, its last value included."""
    names: dict[str, Any] = {"__name__": "notebook"}
    printed = []
    with contextlib.chdir(folder):
        for cell in read(path)["cells"]:
            if cell["cell_type"] == "code":
                printed.append(_printed(source(cell), names, path.name))
    return printed


def _printed(text: str, names: dict[str, Any], where: str) -> str:
    tree = ast.parse(text, where)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(tree, where, "exec"), names)
        value = eval(compile(ast.Expression(last.value), where, "eval"), names) if last is not None else None
        if value is not None:
            print(repr(value))
    return out.getvalue()


def main() -> None:
    """Run every notebook and write its outputs into it."""
    for path in PATHS:
        with tempfile.TemporaryDirectory() as folder:
            printed = iter(run(path, Path(folder)))
            document = read(path)
            for cell in document["cells"]:
                if cell["cell_type"] == "code":
                    text = next(printed).replace(folder + os.sep, "")
                    stream = {
                        "name": "stdout",
                        "output_type": "stream",
                        "text": text.splitlines(keepends=True),
                    }
                    cell["outputs"], cell["execution_count"] = [stream] if text else [], None
        path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
