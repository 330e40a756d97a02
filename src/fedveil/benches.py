"""The benchmarks of a checkout, found and run by name."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from fedveil.errors import ConfigError


def run_benchmark(name: str, *, quick: bool, page: Path | None) -> dict[str, Any]:
    """Run a module of ``benchmarks/`` below the current folder; return its report.

    Args:
        name: of the module; hyphens stand for underscores.
        quick: at most a minute.
        page: where the measured curves are drawn; None: nowhere.

    Raises:
        ConfigError: no such benchmark, or a page for one without curves.
    """
    folder, name = Path.cwd() / "benchmarks", name.replace("-", "_")
    known = sorted(p.stem for p in folder.glob("*.py") if "\ndef rows(" in p.read_text(encoding="utf-8"))
    if name not in known:
        there = (
            f"there are: {', '.join(known)}"
            if known
            else "benchmarks/ is found only in a checkout of fedveil"
        )
        raise ConfigError(f"no benchmark '{name}'; {there}")
    sys.path.insert(0, str(folder.parent))
    harness = import_module("benchmarks.harness")
    document: dict[str, Any] = harness.report(name, harness.load(name)(quick))
    if page is not None:
        try:
            import_module("benchmarks.curves").write_page(document, page)
        except ValueError as error:
            raise ConfigError(f"--page: {error}") from None
    return document
