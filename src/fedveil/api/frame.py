"""Tables of results: rows with the sentences that belong to them, for print, notebooks and data frames."""

from __future__ import annotations

import csv
import html
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import pyarrow

from fedveil.arguments import explain_arguments
from fedveil.console import Terminal, cell_text, rows_table
from fedveil.errors import ConfigError
from fedveil.files import as_path, replace_file, writing
from fedveil.sanitize import as_spreadsheet_text, strip_control_characters

Row = Mapping[str, Any]
"""One row: values by the names of their columns."""


@explain_arguments
@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Frame(Sequence[Row]):
    """A table of results. It prints as a table, shows as one in a notebook, and becomes a pandas or Arrow table.

    Attributes:
        rows: the rows, with plain values.
        title: heading of the table; None if it has none.
        notes: sentences that belong to the table, printed below it.
        private: whether the table has exact figures of private records, which no guarantee covers.

    >>> found = Frame(rows=({"rounds": 10, "epsilon": 1.25}, {"rounds": 20, "epsilon": None}))
    >>> found
    Frame(2 rows: rounds, epsilon)
    >>> found[0]["rounds"], found.columns
    (10, ('rounds', 'epsilon'))
    """

    rows: tuple[Row, ...] = ()
    title: str | None = None
    notes: tuple[str, ...] = ()
    private: bool = False

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns, in the order in which they first occur."""
        return tuple(dict.fromkeys(name for row in self.rows for name in row))

    @property
    def shown(self) -> Sequence[Row]:
        """The rows for people: the same figures, in words where that is plainer."""
        return self.rows

    @property
    def tables(self) -> Sequence[tuple[str | None, Sequence[Row]]]:
        """The tables for people, each with its heading."""
        return ((self._heading(), self.shown),)

    @property
    def lines(self) -> tuple[str, ...]:
        """The sentences below the table."""
        return self.notes

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...

    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __repr__(self) -> str:
        names = self.columns
        column_list = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
        marked = "PRIVATE, " if self.private else ""
        return f"{type(self).__name__}({marked}{len(self)} rows: {column_list})"

    def __str__(self) -> str:
        """Return the table and its sentences as text."""
        text = io.StringIO()
        terminal = Terminal(file=text, force_terminal=False, no_color=True)
        for title, rows in self.tables:
            terminal.print(rows_table(rows, title=title))
        for line in self.lines:
            terminal.print(line, highlight=False)
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines())

    def _repr_html_(self) -> str:
        """Return the tables as HTML for a notebook; every text is escaped."""
        tables = "".join(_html_table(title, list(rows)) for title, rows in self.tables)
        return tables + "".join(f"<p>{_escaped(line)}</p>" for line in self.lines)

    def to_frame(self) -> Any:
        """Return the rows as a pandas data frame.

        Raises:
            ConfigError: pandas is not installed.
        """
        try:
            return self.to_arrow().to_pandas()
        except ImportError:
            raise ConfigError(
                "to_frame: pandas is not installed; install it, or take to_arrow() or the rows themselves"
            ) from None

    def to_arrow(self) -> Any:
        """Return the rows as an Arrow table; a missing value is null."""
        return pyarrow.table({name: [row.get(name) for row in self.rows] for name in self.columns})

    @explain_arguments
    def write_csv(self, path: str | Path) -> Path:
        """Write the rows of :meth:`to_frame` into a CSV file (UTF-8); a missing value is an empty cell.

        A text that a spreadsheet would run as a formula gets an apostrophe in front.

        Raises:
            ConfigError: the file cannot be written.
        """
        text = io.StringIO()
        writer = csv.DictWriter(text, self.columns, lineterminator="\n")
        writer.writeheader()
        for row in self.rows:
            writer.writerow(
                {
                    key: as_spreadsheet_text(value) if isinstance(value, str) else value
                    for key, value in row.items()
                }
            )
        target = as_path(path, "write_csv: path")
        with writing(target, ConfigError):
            replace_file(target, text.getvalue().encode(), mode=0o600 if self.private else 0o644)
        return target

    def to_json(self) -> dict[str, Any]:
        """Return the rows as a JSON object."""
        return {"rows": [dict(row) for row in self.rows]}

    def _heading(self) -> str | None:
        if not self.private:
            return self.title
        return f"PRIVATE: {self.title or 'exact figures of records, which no guarantee covers'}"


def _html_table(title: str | None, rows: Sequence[Row]) -> str:
    """Return one table as HTML; the keys of the first row are the columns."""
    names = list(rows[0]) if rows else []
    head = "".join(f"<th>{_escaped(name.replace('_', ' '))}</th>" for name in names)
    body = "".join(
        f"<tr>{''.join(f'<td>{_escaped(cell_text(key, row.get(key)))}</td>' for key in names)}</tr>"
        for row in rows
    )
    caption = "" if title is None else f"<caption>{_escaped(title)}</caption>"
    return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _escaped(text: object) -> str:
    return html.escape(strip_control_characters(str(text)))
