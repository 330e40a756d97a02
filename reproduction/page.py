"""The pages of all reproductions, made from result files alone: a figure that none of them holds cannot stand on them.

One page is the index; beside it lies a folder of its name with a page for each paper and the figures that are drawn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Final

from fedveil.errors import ConfigError
from fedveil.files import read_text
from reproduction.figure import Panels, panels_of, svg
from reproduction.index import IndexItem, index_items
from reproduction.layout import lay_out
from reproduction.results import ResultFolder, Results
from reproduction.rows import OTHER_REGIME, Line, comparison, filled, order_rows, order_verdict, section_rows
from reproduction.run_counts import LEAST_RUNS, cells_with_runs, runs_wanted
from reproduction.table import Table, load_table, table_names


def pages(results: ResultFolder, name: str) -> dict[str, str]:
    """Return what is written, by path from where the index lies: it, a page for each paper, figures.

    Args:
        results: where the result files are.
        name: of the index, without its ending, and of the folder.
    """
    tables = [load_table(one) for one in table_names()]
    found = {table.name: results.read(table.name) for table in tables}
    measured = [table for table in tables if _shown(table, found)]
    head = read_text(Path(__file__).parent / "head.md", ConfigError)
    parts = [head, _index(tables, found, name), _omissions()]
    parts += [_waiting([table for table in tables if table not in measured])]
    written = {f"{name}.md": "\n".join(part for part in parts if part)}
    for paper, items in index_items().items():
        own = [table for table in _in_order(measured, items) if _paper_of(table) == paper]
        sections = [_section(table, found[table.name]) for table in own]
        if sections:
            written[f"{name}/{_file(paper)}"] = "\n".join([_top(paper, name), *sections])
        for table in own:
            for value, panels in _drawn(table, found[table.name]).items():
                written[f"{name}/{_path(table, value)}"] = svg(panels, _words(table, value))
    return written


def _paper_of(table: Table) -> str:
    """Return the heading under which the first item of a table stands."""
    return _headings()[table.items[0]]


@cache
def _headings() -> dict[str, str]:
    """Return the heading of every item, read from the index once."""
    return {item.id: heading for heading, items in index_items().items() for item in items}


def _in_order(tables: Sequence[Table], items: Sequence[IndexItem]) -> list[Table]:
    """Return the tables in the order of their first items."""
    place = {item.id: number for number, item in enumerate(items)}
    return sorted(tables, key=lambda table: (place.get(table.items[0], len(items)), table.name))


def _file(paper: str) -> str:
    return f"{paper.lower().replace(' ', '-')}.md"


def _top(paper: str, name: str) -> str:
    return (
        f"# Reproduction: {paper}\nWritten from result files by `fedveil reproduce --page`; "
        f"[the index](../{name}.md) says how to read it.\n"
    )


def _drawn(table: Table, results: Results) -> dict[str, Panels]:
    """Return the panels of the figures of a table, by the value that is drawn."""
    found = {value: panels_of(table, value, results) for value in table.figures}
    return {value: panels for value, panels in found.items() if panels}


def _path(table: Table, value: str) -> str:
    return f"figures/{table.name}-{value}.svg"


def _words(table: Table, value: str) -> str:
    unit = " in percent" if table.percent and value == table.value else ""
    return value.replace("_", " ") + unit


def _shown(table: Table, found: dict[str, Results]) -> bool:
    """Return whether any cell of a table has enough runs."""
    return bool(cells_with_runs(table, found[table.name], LEAST_RUNS))


def _section(table: Table, results: Results) -> str:
    lines = [f'<a id="{table.name}"></a>', "", f"## {table.title.removeprefix(f'{_paper_of(table)}, ')}", ""]
    lines += [f"*Settings.* {table.chosen}", ""]
    if table.reduced:
        lines += ["*Reduced:*", "", *_bullets(table.reduced)]
    if table.not_comparable:
        lines += [f"*Not comparable:* {table.not_comparable}", ""]
    unit = " in percent" if table.percent else ""
    late = f", mean of the last {table.last} evaluated rounds" if table.last > 1 else ""
    rows, alike = lay_out(table, section_rows(table, results))
    lines += [f"Value: {table.value}{unit}{late}.{alike}", "", *_markdown(rows), ""]
    for value in _drawn(table, results):
        lines += [f"![{table.name}: {_words(table, value)} by round]({_path(table, value)})", ""]
    lines += _bullets(_orders(order_rows(table, results)))
    lines += _bullets(text for note in table.notes if (text := filled(table, note, results)))
    return "\n".join([*lines, _provenance(table, results), ""])


VERSION: Final = "0.2.0"
"""The version that the index names once."""
_MANY_ORDERS: Final = 3
"""A statement of more orders than these is counted, not listed."""


def _orders(rows: Sequence[Line]) -> list[str]:
    """Return a text for every statement on orders: each order with its verdict, or of many how many have each."""
    statements: list[list[Line]] = []
    for row in rows:
        if row["stated"] or not statements:
            statements.append([])
        statements[-1].append(row)
    return [_statement(group) for group in statements]


def _statement(group: Sequence[Line]) -> str:
    counted = Counter(row["verdict"] for row in group)
    found = _listed_counts(counted.most_common())
    if len(group) > _MANY_ORDERS:
        found = f"of {len(group)} orders {found}"
    elif len(counted) == 1:
        found = group[0]["verdict"] + (f" {len(group)} times" if len(group) > 1 else "")
    values = ", ".join(dict.fromkeys(row["value"] for row in group))
    seeds = dict.fromkeys(sorted({int(row["seeds"]) for row in group if "seeds" in row}))
    runs = f", {' or '.join(map(str, seeds))} seeds" if seeds else ""
    against = [row for row in group if row["verdict"].startswith("contradicted")]
    listed = group if len(group) <= _MANY_ORDERS else against
    regime = OTHER_REGIME if all(name.endswith(OTHER_REGIME) for name in counted) else ""
    told = "; ".join(
        row["order"]
        + (f" by {row['difference'].replace(' ± ', '±')}" if "difference" in row else "")
        + (f" {row['verdict'].removesuffix(regime)}" if listed is group and len(counted) > 1 else "")
        for row in listed
    )
    if len(listed) > _MANY_ORDERS or (listed is group and len(group) > 1 == len(counted)):
        differences = sorted(
            (row["difference"] for row in listed if "difference" in row),
            key=lambda text: float(text.split()[0]),
        )
        told = f"by {differences[0]} to {differences[-1]}".replace(" ± ", "±") if differences else ""
    return f"{group[0]['stated']}: **{found}** ({values}{runs})" + (f": {told}" if told else "") + "."


def _listed_counts(counts: Sequence[tuple[str, int]]) -> str:
    """Return how many have each verdict; those of another noise regime stand last, under these words once."""
    other = [
        f"{count} {name.removesuffix(OTHER_REGIME)}" for name, count in counts if name.endswith(OTHER_REGIME)
    ]
    told = [f"{count} {name}" for name, count in counts if not name.endswith(OTHER_REGIME)]
    if other:
        told.append(", ".join(other) + OTHER_REGIME)
    return ("; " if other else ", ").join(told)


def _provenance(table: Table, results: Results) -> str:
    spent = [run.cpu_seconds for run in results.runs]
    seconds, unknown = sum(one for one in spent if one is not None), None in spent  # of resumed runs
    text = f"`fedveil reproduce {table.name}`: {len(results.runs)} runs, "
    text += f"{'more than ' if unknown else ''}{seconds:.0f} CPU seconds"
    versions = sorted({run.version for run in results.runs})
    text += "." if versions == [VERSION] else f", fedveil {', '.join(versions)}."
    today = {cell.name: cell.settings() for cell in table.cells(0)}
    computed = table.computation()[1] if table.compute else None
    stale = sorted({run.cell for run in results.runs if run.settings != (computed or today.get(run.cell))})
    if stale:
        text += f" **The settings of these have changed since they were measured**: {_listed(stale)}."
    known = dict.fromkeys((*today, *(run.cell for run in results.runs)))
    shown = cells_with_runs(table, results, LEAST_RUNS)
    absent = [cell for cell in known if cell not in shown]
    if absent:
        text += f" Fewer than {LEAST_RUNS} runs so far, and so not shown: {_listed(absent)}."
    few = [cell for cell in shown if len(results.runs_of(cell)) < runs_wanted(table, results, cell)]
    if few:
        text += f" Fewer runs than they should have: {_listed(few)}."
    return text


def _listed(cells: Sequence[str]) -> str:
    return ", ".join(cells) if len(cells) <= _MANY_ORDERS else f"{len(cells)} cells"


def _index(tables: Sequence[Table], found: dict[str, Results], name: str) -> str:
    lines = ["## Index", ""]
    for paper, items in index_items().items():
        counted: set[str] = set()
        rows = [_item(item, tables, found, name, counted) for item in items]
        lines += [f"### {paper}", "", *_markdown(rows), ""]
    return "\n".join(lines)


def _item(
    item: IndexItem, tables: Sequence[Table], found: dict[str, Results], name: str, counted: set[str]
) -> Line:
    own = [table for table in tables if item.id in table.items]
    measured = [table for table in own if _shown(table, found)]
    row = {"item": item.title, "status": f"not reproduced: {item.why or 'its runs have not been played yet'}"}
    if measured:
        row["status"] = _extent(own, measured, found) + (f"; {item.why}" if item.why else "")
    told = []
    for table in own:
        text = _verdicts(table, measured, found, item, name)
        told.append(text.partition(": ")[0] if text in counted else text)
        counted.add(text)
    return row | {"tables and verdicts": "; ".join(told)}


def _extent(own: Sequence[Table], measured: Sequence[Table], found: dict[str, Results]) -> str:
    """Say how much of an item was made again: a computed epsilon is not the figure that it stands beside."""
    if own[0].items[0].startswith("beyond/"):
        return "no published counterpart"
    trained = [table for table in own if table.parts]
    if not trained:
        return "reduced" if any(table.reduced for table in measured) else "computed"
    shown = sum(len(cells_with_runs(table, found[table.name], LEAST_RUNS)) for table in trained)
    if not shown:
        return "no trained model yet, only what is computed"
    cells = sum(len(table.cells(0)) for table in trained)
    scale = "reduced" if any(table.reduced for table in trained) else "published scale"
    return scale if shown == cells else f"{scale}, {shown} of {cells} cells"


def _verdicts(
    table: Table, measured: Sequence[Table], found: dict[str, Results], item: IndexItem, name: str
) -> str:
    """Link a table and count its verdicts on an item: an epsilon inside says nothing of the accuracies beside it."""
    if table not in measured:
        return f"`{table.name}`"
    counts = _counted(table, found[table.name], item)
    link = f"[{table.name}]({name}/{_file(_paper_of(table))}#{table.name})"
    return f"{link}: {counts}" if counts else link


def _counted(table: Table, results: Results, item: IndexItem) -> str:
    """Count verdicts on published figures, and on the orders that this item of the paper states."""
    counted = Counter[str]()
    if not table.not_comparable:
        counted.update(line["verdict"] for line in section_rows(table, results) if line.get("verdict"))
    for said in table.expected:
        if said.beyond or (said.items and item.id not in said.items):
            continue
        compared = ((pair, comparison(table, said, pair, results)) for pair in said.pairs)
        counted.update(
            f"order {order_verdict(table, pair, one)}" for pair, one in compared if one is not None
        )
    return _listed_counts([(_plural(verdict, count), count) for verdict, count in sorted(counted.items())])


def _plural(verdict: str, count: int) -> str:
    """Return a verdict on one order as a verdict on so many.

    >>> _plural("order holds", 2), _plural("order holds", 1), _plural("inside", 2)
    ('orders hold', 'order holds', 'inside')
    """
    if count == 1 or not verdict.startswith("order "):
        return verdict
    return verdict.replace("order ", "orders ", 1).replace("orders holds", "orders hold", 1)


def _omissions() -> str:
    """List what the papers show and no table here makes again, as the index says it."""
    lines = ["## Not reproduced", ""]
    lines += [
        "What the papers show beyond the tables above, as far as it is known, and what it would take.",
        "",
    ]
    for paper, items in index_items().items():
        told = [f"{item.title.partition(':')[0]}: {' '.join(item.omitted)}" for item in items if item.omitted]
        if told:
            lines += [f"### {paper}: not reproduced", "", *_bullets(told)]
    return "\n".join(lines)


def _waiting(tables: Sequence[Table]) -> str:
    if not tables:
        return ""
    lines = ["## Not yet measured", "", "Tables that are described and have too few runs, or none:", ""]
    lines += _bullets(f"`fedveil reproduce {table.name}`: {table.title}" for table in tables)
    return "\n".join(lines)


def _bullets(texts: Iterable[str]) -> list[str]:
    lines = [f"- {text}" for text in texts]
    return [*lines, ""] if lines else []


def _markdown(rows: Sequence[Line]) -> list[str]:
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]
    return lines + [
        f"| {' | '.join(row.get(name, '').replace('|', '&#124;') for name in names)} |" for row in rows
    ]
