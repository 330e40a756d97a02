"""What the console shows: epsilons rounded up."""

from __future__ import annotations

import ast
import io
from fractions import Fraction
from pathlib import Path

from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console

from fedveil.console import rows_table, transposed_table

SOURCE = Path(__file__).resolve().parents[1] / "src" / "fedveil"


@given(st.floats(0, 1e12))
@example(2.5000000000001)
def test_tables_show_epsilon_rounded_up(epsilon: float) -> None:
    rows = [{"method": "a", "epsilon": epsilon}]
    for table in (rows_table(rows), transposed_table(rows)):
        console = Console(file=io.StringIO(), width=200)
        console.print(table)
        (row,) = cells(console, "a" if table.show_header else "epsilon")
        assert 0 <= Fraction(row[-1]) - Fraction(epsilon) < Fraction(1, 100)


def cells(console: Console, word: str) -> list[list[str]]:
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines]
    return [row for row in rows if word in row]


def test_no_epsilon_is_rounded_by_a_format() -> None:
    found = []
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FormattedValue) and node.format_spec is not None:
                value, style = ast.unparse(node.value), ast.unparse(node.format_spec)
                if "epsilon" in value and "." in style:
                    found.append(f"{path.relative_to(SOURCE)}:{node.lineno}: {value} by {style}")
    assert found == []
