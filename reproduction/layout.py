"""The layout of a table's cells on a page: a grid where the names of the cells form one, otherwise a list."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from reproduction.rows import Line
from reproduction.table import Table

_SEPARATORS: Final = ("-", ", ", ": ")
_WIDEST: Final = 8
"""Columns of a grid at most."""
_FULL: Final = 0.6
"""Least share of a grid's places that have a cell."""
Grid = dict[tuple[str, str], str]


def lay_out(table: Table, rows: Sequence[Line]) -> tuple[list[Line], str]:
    """Return the lines of a table as a page shows them, and sentences with what is alike in all of them.

    A cell of the page holds ``ours±sd (published)``, bold where the published figure lies outside the interval. Rounds,
    losses and seconds beside another value of trained models are left to ``fedveil reproduce TABLE``.
    """
    shown = [{name: text.replace(" ± ", "±") for name, text in row.items()} for row in rows]
    said = _counts(shown)
    if not table.not_comparable:
        said += _verdicts(shown) + _widths(shown)
    entries = {row["cell"]: _entry(table, row) for row in shown}
    dropped = {"cell", "n", "CPU s a run", "published", "difference", "half width", table.value}
    if table.parts:
        dropped |= {f"round {number}" for number in table.rounds} | {"loss", *table.figures}
        dropped |= {f"{name}, round {number}" for name in table.curved for number in table.rounds}
    if not table.bound:
        dropped.add("verdict")
    for row in shown:
        if ratio := row.pop("published noise / travel", ""):
            row["noise / travel"] += f" ({ratio})"
    others = {row["cell"]: {k: v for k, v in row.items() if k not in dropped} for row in shown}
    for name in _names(others.values()):
        found = {other.get(name, "") for other in others.values()}
        if len(rows) > 1 and len(found) == 1 and name != "verdict":
            said += f" {name[0].upper()}{name[1:]}: {found.pop()} in all."
            for other in others.values():
                del other[name]
    plain: list[Line] = [{"cell": cell, table.value: entries[cell]} | others[cell] for cell in entries]
    grids = (_as_lines(table, grid, entries, others) for grid in _grids(list(entries)))
    return min([plain, *(lines for lines in grids if lines)], key=_words), said


def _names(lines: Iterable[Line]) -> list[str]:
    return list(dict.fromkeys(name for line in lines for name in line))


def _words(lines: Sequence[Line]) -> int:
    """Return how many words the lines take as a table, the bars between them included."""
    names = _names(lines)
    texts = [*names, *(text for line in lines for text in line.values())]
    return sum(len(text.split()) for text in texts) + (len(lines) + 2) * (len(names) + 1)


def _entry(table: Table, row: Line) -> str:
    text = row[table.value]
    if row.get("published", "none") != "none":
        text += f" ({row['published']})"
    return f"**{text}**" if row.get("verdict") == "outside" else text


def _counts(rows: Sequence[Line]) -> str:
    counts = [row["n"] for row in rows]
    if counts[0] == "exact":
        return " Exact."
    least, most = min(counts, key=int), max(counts, key=int)
    return f" n = {least}." if least == most else f" n = {least} to {most}."


def _verdicts(rows: Sequence[Line]) -> str:
    counted = Counter(row["verdict"] for row in rows if row.get("verdict"))
    return f" Verdicts: {', '.join(f'{n} {name}' for name, n in sorted(counted.items()))}." if counted else ""


def _widths(rows: Sequence[Line]) -> str:
    """Say how wide the intervals are: with few runs they are wide, and a figure inside says little."""
    widths = [row["half width"] for row in rows if row.get("half width")]
    if not widths:
        return ""
    return f" Half widths of the intervals: {min(widths, key=float)} to {max(widths, key=float)}."


def _grids(cells: Sequence[str]) -> Iterator[Grid]:
    """Yield ways to write the names of the cells as row and column: what follows a common beginning is one of both."""
    tried: set[frozenset[str]] = set()
    for separator in _SEPARATORS:
        for cell in cells:
            parts = cell.split(separator)
            for count in range(1, len(parts)):
                start = separator.join(parts[:count]) + separator
                ends = dict.fromkeys(one.removeprefix(start) for one in cells if one.startswith(start))
                if len(ends) > 1 and frozenset(ends) not in tried:
                    tried.add(frozenset(ends))
                    if grid := _grid(cells, list(ends), separator):
                        yield grid
                        yield {(column, row): cell for (row, column), cell in grid.items()}


def _grid(cells: Sequence[str], ends: Sequence[str], separator: str) -> Grid | None:
    """Return the cell of each beginning and end; None where a name has no such end or the grid has many gaps."""
    grid: Grid = {}
    for cell in cells:
        end = max((one for one in ends if cell.endswith(separator + one)), key=len, default=None)
        if end is None:
            return None
        grid[cell.removesuffix(separator + end), end] = cell
    starts = {start for start, _ in grid}
    return grid if len(starts) > 1 and len(cells) >= _FULL * len(starts) * len(ends) else None


def _as_lines(
    table: Table, grid: Grid, entries: dict[str, str], others: dict[str, Line]
) -> list[Line] | None:
    """Return the lines of a grid; None where it is too wide, or much differs from cell to cell beside the value.

    Another value that is alike in every row has a column, one that is alike in every column a line at the end; one
    that is alike in neither stands in the cells.
    """
    rows, columns = _lines_of(grid, 0), _lines_of(grid, 1)
    names = _names(others.values())
    by_row = [name for name in names if _alike(name, rows, others)]
    by_column = [name for name in names if name not in by_row and _alike(name, columns, others)]
    inside = [name for name in names if name not in by_row and name not in by_column]
    if len(columns) > _WIDEST or len(inside) > (1 if table.parts else 2):
        return None
    top = "; ".join([table.value, *inside])
    lines = []
    for row, own in rows.items():
        cells = {column: cell for (of, column), cell in grid.items() if of == row}
        lines.append(
            {top: row}
            | {
                column: "; ".join(
                    [entries[cells[column]], *(others[cells[column]].get(name) or "none" for name in inside)]
                )
                if column in cells
                else ""
                for column in columns
            }
            | {name: _common(name, own, others) for name in by_row}
        )
    for name in by_column:
        lines.append({top: name} | {column: _common(name, own, others) for column, own in columns.items()})
    return lines


def _lines_of(grid: Grid, axis: int) -> dict[str, list[str]]:
    """Return the cells of every row (axis 0) or column (axis 1)."""
    found: dict[str, list[str]] = {}
    for place, cell in grid.items():
        found.setdefault(place[axis], []).append(cell)
    return found


def _alike(name: str, lines: dict[str, list[str]], others: dict[str, Line]) -> bool:
    return all(len({others[cell].get(name, "") for cell in own}) <= 1 for own in lines.values())


def _common(name: str, cells: Sequence[str], others: dict[str, Line]) -> str:
    return next((others[cell].get(name, "") for cell in cells), "")
