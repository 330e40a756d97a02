"""Packages from outside the source tree, installed by hand into a folder of their own for the time of a test."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from fedveil.registry import members
from fedveil.run.config import choice


class Install(Protocol):
    """Installs a package."""

    def __call__(
        self, name: str, brought: Mapping[str, Mapping[str, str]], modules: Mapping[str, str]
    ) -> Path:
        """Install it with its entry points (kind, name, place) and its modules' code; return the folder."""
        ...


def forget() -> None:
    """Forget which members there are, and what was loaded of them."""
    for cached in (members, choice.section_of, choice._loaded):
        cached.cache_clear()


def metadata(folder: Path, name: str, brought: Mapping[str, Mapping[str, str]]) -> None:
    """Write what an installer would write of a package."""
    info = folder / f"{name.replace('-', '_')}-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n")
    lines = [
        line
        for kind, table in brought.items()
        for line in (f"[fedveil.{kind}]", *(f"{one} = {place}" for one, place in table.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


@contextmanager
def installing(folder: Path) -> Iterator[Install]:
    """Give a way to install packages into a folder, which are gone afterwards with all that they loaded."""
    site = folder / "site-packages"
    site.mkdir()
    before = set(sys.modules)

    def install(name: str, brought: Mapping[str, Mapping[str, str]], modules: Mapping[str, str]) -> Path:
        for module, code in modules.items():
            (site / f"{module}.py").write_text(code)
        metadata(site, name, brought)
        importlib.invalidate_caches()
        forget()
        return site

    sys.path.insert(0, str(site))
    try:
        yield install
    finally:
        sys.path.remove(str(site))
        for name in set(sys.modules) - before:
            file = getattr(sys.modules[name], "__file__", None) or ""
            if file.startswith(str(site)):
                del sys.modules[name]
        importlib.invalidate_caches()
        forget()
