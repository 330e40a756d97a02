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
from reproduction.results import ResultFolder, Results
from reproduction.rows import Line, comparison, filled, order_rows, order_verdict, section_rows
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
    lines = [f'<a id="{table.name}"></a>', "", f"## {table.title}", f"    fedveil reproduce {table.name}", ""]
    lines += [f"*Settings.* {table.chosen}", ""]
    if table.reduced:
        lines += ["*Reduced:*", "", *_bullets(table.reduced)]
    if table.not_comparable:
        lines += [f"*Not comparable with the published figures:* {table.not_comparable}", ""]
    unit = " in percent" if table.percent else ""
    late = f", mean of the last {table.last} evaluated rounds" if table.last > 1 else ""
    rows, alike = _condensed(section_rows(table, results))
    lines += [f"Value: {table.value}{unit}{late}.{alike}", "", *_markdown(rows), ""]
    for value in _drawn(table, results):
        lines += [f"![{table.title}: {_words(table, value)} by round]({_path(table, value)})", ""]
    if table.expected:
        lines += [*_markdown(_condensed_orders(order_rows(table, results))), ""]
    lines += _bullets(text for note in table.notes if (text := filled(table, note, results)))
    return "\n".join([*lines, _provenance(table, results), ""])


def _condensed(rows: Sequence[Line]) -> tuple[list[Line], str]:
    """Return the lines of a table without what is alike in all of them, and a sentence that says it once.

    The half width stands beside its difference. CPU seconds are given as a range.
    """
    kept = [dict(row) for row in rows]
    for row in kept:
        width = row.pop("half width", "")
        if width:
            row["difference"] += f" ± {width}"
    said = ""
    if (runs := {row["n"] for row in kept}) and len(runs) == 1 and (count := runs.pop()) != "exact":
        said += f" n = {count}."
        for row in kept:
            del row["n"]
    spent = [row.pop("CPU s a run") for row in kept if "CPU s a run" in row]
    if seconds := [float(one) for one in spent if one != "unknown"]:
        said += f" CPU seconds a run: {min(seconds):g} to {max(seconds):g}."
    return kept, said


_MANY_ORDERS: Final = 3
"""A statement of more orders than these gets one line."""


def _condensed_orders(rows: Sequence[Line]) -> list[Line]:
    """Return one line for every statement of many orders: how many have each verdict, and which are contradicted."""
    statements: list[list[Line]] = []
    for row in rows:
        if row["stated"] or not statements:
            statements.append([])
        statements[-1].append(row)
    return [
        line for group in statements for line in (_one_line(group) if len(group) > _MANY_ORDERS else group)
    ]


def _one_line(group: Sequence[Line]) -> list[Line]:
    counted = Counter(row["verdict"] for row in group)
    verdicts = ", ".join(f"{count} {name}" for name, count in counted.most_common())
    against = [row["order"] for row in group if row["verdict"].startswith("contradicted")]
    values = ", ".join(dict.fromkeys(row["value"] for row in group))
    seeds = sorted({int(row["seeds"]) for row in group if "seeds" in row})
    line = {"stated": group[0]["stated"], "order": f"{len(group)} orders", "value": values}
    if seeds:
        line["seeds"] = str(seeds[0]) if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    return [line | {"verdict": verdicts + (f": {'; '.join(against)}" if against else "")}]


def _provenance(table: Table, results: Results) -> str:
    spent = [run.cpu_seconds for run in results.runs]
    seconds, unknown = sum(one for one in spent if one is not None), sum(one is None for one in spent)
    text = f"`results/{table.name}.json`: {len(results.runs)} runs, {seconds:.0f} CPU seconds"
    text += f" and {unknown} resumed runs whose seconds are unknown" if unknown else ""
    text += f", fedveil {', '.join(sorted({run.version for run in results.runs}))}."
    today = {cell.name: cell.settings() for cell in table.cells(0)}
    computed = table.computation()[1] if table.compute else None
    stale = sorted({run.cell for run in results.runs if run.settings != (computed or today.get(run.cell))})
    if stale:
        text += f" **The settings of these have changed since they were measured**: {', '.join(stale)}."
    known = dict.fromkeys((*today, *(run.cell for run in results.runs)))
    shown = cells_with_runs(table, results, LEAST_RUNS)
    absent = [cell for cell in known if cell not in shown]
    if absent:
        text += f" Fewer than {LEAST_RUNS} runs so far, and so not shown: {', '.join(absent)}."
    few = [cell for cell in shown if len(results.runs_of(cell)) < runs_wanted(table, results, cell)]
    if few:
        text += f" Fewer runs than they should have: {', '.join(few)}."
    return text


def _index(tables: Sequence[Table], found: dict[str, Results], name: str) -> str:
    lines = ["## Index", ""]
    for paper, items in index_items().items():
        lines += [f"### {paper}", "", *_markdown([_item(item, tables, found, name) for item in items]), ""]
    return "\n".join(lines)


def _item(item: IndexItem, tables: Sequence[Table], found: dict[str, Results], name: str) -> Line:
    own = [table for table in tables if item.id in table.items]
    measured = [table for table in own if _shown(table, found)]
    links = {table.name: f"{name}/{_file(_paper_of(table))}#{table.name}" for table in measured}
    names = ", ".join(
        f"[{one.name}]({links[one.name]})" if one in measured else f"`{one.name}`" for one in own
    )
    names = names or "none"
    row = {"item": item.title, "tables": names}
    if not measured:
        return row | {"status": f"not reproduced: {item.why or 'its runs have not been played yet'}"}
    status = _extent(own, measured, found)
    if item.why:
        status += f"; {item.why}"
    return row | {"status": status, "verdicts": _verdicts(measured, found, item)}


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


def _verdicts(measured: Sequence[Table], found: dict[str, Results], item: IndexItem) -> str:
    """Count the verdicts of an item, table by table: an epsilon inside says nothing of the accuracies beside it."""
    each = {table.name: _counted(table, found[table.name], item) for table in measured}
    return "; ".join(f"`{name}`: {counts}" for name, counts in each.items() if counts)


def _counted(table: Table, results: Results, item: IndexItem) -> str:
    """Count verdicts on published figures, and on the orders that this item of the paper states."""
    counted = Counter(line["verdict"] for line in section_rows(table, results) if line.get("verdict"))
    for said in table.expected:
        if said.beyond or (said.items and item.id not in said.items):
            continue
        compared = ((pair, comparison(table, said, pair, results)) for pair in said.pairs)
        counted.update(
            f"order {order_verdict(table, pair, one)}" for pair, one in compared if one is not None
        )
    return ", ".join(f"{count} {name}" for name, count in sorted(counted.items()))


def _omissions() -> str:
    """List what the papers show and no table here makes again, as the index says it."""
    lines = ["## Not reproduced", ""]
    lines += [
        "What the papers show beyond the tables above, as far as it is known, and what it would take.",
        "",
    ]
    for paper, items in index_items().items():
        told = [f"{item.title}: {text}" for item in items for text in item.omitted]
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
    lines = [f"| {' | '.join(names)} |", f"|{' --- |' * len(names)}"]
    return lines + [
        f"| {' | '.join(row.get(name, '').replace('|', '&#124;') for name in names)} |" for row in rows
    ]
