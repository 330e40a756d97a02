"""One line of the source changed at a time: which test of the fast suite notices?

``mutants.toml`` lists the changes, each a way to lose a guarantee; ``python -m tests.mutants`` plays them.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "mutants.md"


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A change that must be noticed.

    Attributes:
        name: what goes wrong.
        file: of ``src/fedveil``.
        text: what is replaced, found exactly once in the file.
        replacement: what takes its place.
        tests: files or tests of the fast suite, one of which must fail.
    """

    name: str
    file: str
    text: str
    replacement: str
    tests: tuple[str, ...]

    def applied(self, source: str) -> str:
        """Return the changed source.

        Raises:
            ValueError: the text does not occur exactly once, so that the list is out of step with the source.
        """
        count = source.count(self.text)
        if count != 1:
            raise ValueError(f"{self.name}: {self.file} has {count} times, and not once: {self.text!r}")
        return source.replace(self.text, self.replacement)


def read() -> tuple[Mutant, ...]:
    """Return the list."""
    listed = tomllib.loads((Path(__file__).parent / "mutants.toml").read_text(encoding="utf-8"))["mutant"]
    return tuple(Mutant(**{**entry, "tests": tuple(entry["tests"])}) for entry in listed)
