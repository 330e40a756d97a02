"""One statement of the source changed at a time: which test of the fast suite notices?

``mutants.toml`` lists the changes, each a way to lose a guarantee; ``python -m tests.mutants`` plays them.
"""

from __future__ import annotations

import ast
import re
import textwrap
import tomllib
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = Path(__file__).parent / "README.md"
BODY = r""""{3}(?:\\.|[^\\])*?"{3}|'{3}(?:\\.|[^\\])*?'{3}|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*\'"""
TOKEN = re.compile(
    rf"(?P<blank>\s+|#[^\n]*|\\\n|,(?=\s*[)\]}}]))|[a-zA-Z]{{0,2}}(?:{BODY})"
    r"|\d[\w.]*(?:(?<=[eE])[-+]\d+)?|\w+|\*\*=?|//=?|<<=?|>>=?|->|:=|[-+*/%@&|^<>=!]=|.",
    re.DOTALL,
)
"""A token of Python. Layout is none: white space, comments, and a comma before a closing bracket."""


def tokens_of(text: str) -> list[re.Match[str]]:
    """Return the tokens of a text, which may be a part of a statement."""
    return [token for token in TOKEN.finditer(text) if token["blank"] is None]


def _definitions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, int, int]]:
    """Yield the qualified name, first and last line of functions (with decorators), classes and assigned names."""
    for child in ast.iter_child_nodes(node):
        inner = prefix
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner, first = f"{prefix}{child.name}.", (*child.decorator_list, child)[0].lineno
            yield inner[:-1], first, child.end_lineno or first
        elif isinstance(child, ast.Assign | ast.AnnAssign):
            for target in child.targets if isinstance(child, ast.Assign) else [child.target]:
                if isinstance(target, ast.Name):
                    yield prefix + target.id, child.lineno, child.end_lineno or child.lineno
        yield from _definitions(child, inner)


@lru_cache(maxsize=4)
def _parsed(text: str) -> tuple[list[int], list[re.Match[str]], list[tuple[str, int, int]]]:
    """Return where lines start, the tokens, and the definitions of a file."""
    starts = [0, *(end.end() for end in re.finditer(r"\n|\Z", text))]
    return starts, tokens_of(text), [("", 1, len(starts) - 1), *_definitions(ast.parse(text))]


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A change that must be noticed.

    Attributes:
        name: what goes wrong.
        source: where: ``file.py::Class.function`` of ``src/fedveil``; a class or an assigned name serves, too.
        pattern: what is replaced there: tokens that follow each other exactly once. Layout and comments do not count.
        replacement: what takes its place; its lines after the first are indented as the line of the pattern is.
        tests: files or tests of the fast suite, one of which must fail.
    """

    name: str
    source: str
    pattern: str
    replacement: str
    tests: tuple[str, ...]

    @property
    def file(self) -> str:
        """The changed file, of ``src/fedveil``."""
        return self.source.partition("::")[0]

    def applied(self, text: str) -> str:
        """Return the changed text of the file.

        Raises:
            ValueError: the pattern is not there exactly once, so that the list is out of step with the source.
        """
        starts, found, definitions = _parsed(text)
        place, wanted = self.source.partition("::")[2], [token[0] for token in tokens_of(self.pattern)]
        spans = set()
        for name, first, last in definitions:
            if name == place:
                low, high = (
                    bisect_left(found, starts[line], key=re.Match.start) for line in (first - 1, last)
                )
                words = [token[0] for token in found[low:high]]
                spans |= {
                    (found[low + at].start(), found[low + at + len(wanted) - 1].end())
                    for at in range(len(words) - len(wanted) + 1)
                    if words[at : at + len(wanted)] == wanted
                }
        if len(spans) != 1:
            raise ValueError(
                f"{self.name}: {self.source} has {len(spans)} times, and not once: {self.pattern!r}"
            )
        [(start, end)] = spans
        line = text[starts[bisect_right(starts, start) - 1] : start]
        indent = line[: len(line) - len(line.lstrip())]
        body = textwrap.indent(textwrap.dedent(self.replacement).strip(), indent).lstrip()
        return text[:start] + body + text[end:]


def read() -> tuple[Mutant, ...]:
    """Return the list.

    Raises:
        ValueError: an entry has other keys.
    """
    listed = tomllib.loads((Path(__file__).parent / "mutants.toml").read_text(encoding="utf-8"))["mutant"]
    keys = {field.name for field in fields(Mutant)}
    for entry in listed:
        if set(entry) != keys:
            raise ValueError(
                f"mutants.toml: {entry.get('name')!r} has the keys {', '.join(sorted(entry))}; "
                f"write {', '.join(sorted(keys))}, with source = 'file.py::Class.function'"
            )
    return tuple(Mutant(**{**entry, "tests": tuple(entry["tests"])}) for entry in listed)
