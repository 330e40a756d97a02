"""The lines of a table: what was measured of each cell, beside what was published, with the verdict."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from reproduction.results import Results, Run
from reproduction.run_counts import LEAST_RUNS, cells_with_runs
from reproduction.table import Expectation, Table
from reproduction.verdicts import (
    Comparison,
    Summary,
    agreement,
    bound_holds,
    half_width,
    order,
    summary,
)

_PLACEHOLDER: Final = re.compile(r"\{([^{}]+)\}")
Line = dict[str, str]
OTHER_REGIME: Final = " in another noise regime"
"""End of the verdict on an order under another noise-to-travel ratio than the published one."""


def section_rows(table: Table, results: Results, least: int = LEAST_RUNS) -> list[Line]:
    """Return a line for every cell that has enough runs."""
    return [_row(table, cell, results) for cell in cells_with_runs(table, results, least)]


def _row(table: Table, cell: str, results: Results) -> Line:
    runs, shown = results.runs_of(cell), _shown(table)
    row = {"cell": cell, "n": "exact" if table.exact else str(len(runs))}
    for name in () if table.panels else table.curved:  # a figure shows more than columns of rounds would
        for number in table.rounds:
            row[f"{name}, round {number}" if table.curves else f"round {number}"] = _at_round(
                table, name, runs, number
            )
    values = _values(results, cell, table.value)
    if len(values) < len(runs):
        row[table.value] = f"undefined or infinite in {len(runs) - len(values)} of {len(runs)} runs"
        return row | {name: _mean(results, cell, name) for name in table.also}
    ours = summary([value * _unit(table) for value in values], exact=table.exact)
    row[table.value] = _with_spread(ours, shown)
    if table.published:
        row |= _against(table, ours, table.published.get(cell))
    if table.bound:
        bound, *trivial = (summary(_values(results, cell, name)).mean for name in table.bound)
        row |= {name: _mean(results, cell, name) for name in table.bound}
        row["verdict"] = bound_holds(ours, bound, trivial[0] if trivial else math.inf)
    row |= {name: _mean(results, cell, name) for name in table.also}
    spent = [run.cpu_seconds for run in runs if run.cpu_seconds is not None]
    if table.regimes:
        regime = table.regime(cell)
        row["noise / travel"] = "" if regime is None else f"{regime.ours.ratio:.2g}"
        row["published noise / travel"] = "" if regime is None else f"{regime.published.ratio:.2g}"
    if table.compute:
        return row
    return row | {"CPU s a run": f"{summary(spent).mean:.2g}" if spent else "unknown"}


def _against(table: Table, ours: Summary, published: str | None) -> Line:
    row = dict.fromkeys(("published", "difference", *(() if table.exact else ("half width",)), "verdict"), "")
    if published is None:
        return row | {"published": "none"}
    shown, runs = _shown(table), table.published_runs
    width = half_width(ours, runs=runs)
    difference = ours.mean - float(published)
    row |= {
        "published": published,
        "difference": f"{difference:+.2f}" if table.percent else f"{difference:+.3g}",
    }
    if not table.exact:
        row["half width"] = "" if width is None else shown(width)
    return row | {
        "verdict": "not comparable" if table.not_comparable else agreement(ours, published, runs=runs)
    }


def comparison(table: Table, said: Expectation, pair: tuple[str, str], results: Results) -> Comparison | None:
    """Return how two cells compare over the seeds that both have; None if these are too few.

    Runs of different lengths are not comparable: the longer one has learnt, and spent, for longer.
    """
    name = said.value or table.value
    higher, lower = (
        {
            run.seed: value
            for run in results.runs_of(cell)
            if (value := _value_at(run, name, said.round)) is not None
        }
        for cell in pair
    )
    seeds = sorted(set(higher) & set(lower), key=lambda seed: seed or 0)
    if len(seeds) < (1 if table.exact else LEAST_RUNS):
        return None
    scale = _unit(table) if name == table.value else 1.0
    lengths = {
        run.values["rounds"] for cell in pair for run in results.runs_of(cell) if "rounds" in run.values
    }
    found = order(
        [higher[seed] * scale for seed in seeds],
        [lower[seed] * scale for seed in seeds],
        less=said.less,
        exact=table.exact,
    )
    if len(lengths) > 1:
        return replace(found, order="not comparable")
    return replace(found, order="contradicted") if said.same and found.order == "holds" else found


def _value_at(run: Run, name: str, number: int) -> float | None:
    """Return a value at an evaluated round, 0 being the last; None where it is not defined there."""
    return dict(run.curve.get(name, ())).get(number) if number else run.values.get(name)


def order_rows(table: Table, results: Results) -> list[Line]:
    """Return a line for every order between cells of the table, those of the paper first.

    The statement stands in the first line of its orders alone.
    """
    rows = []
    for said in sorted(table.expected, key=lambda said: said.beyond):
        for number, pair in enumerate(said.pairs):
            found = comparison(table, said, pair, results)
            sign = "=" if said.same else "<" if said.less else ">"
            stated = f"beyond the paper: {said.says}" if said.beyond else said.says
            row = {"stated": "" if number else stated, "order": f"`{pair[0]}` {sign} `{pair[1]}`"}
            row |= {"value": (said.value or table.value) + (f", round {said.round}" if said.round else "")}
            if found is None:
                rows.append(row | {"verdict": "too few runs"})
                continue
            width = "" if found.width is None else f" ± {_number(found.width)}"
            row |= {"difference": _number(found.difference) + width, "seeds": str(found.n)}
            rows.append(row | {"verdict": order_verdict(table, pair, found)})
    return rows


def order_verdict(table: Table, pair: tuple[str, str], found: Comparison) -> str:
    """Return the verdict on an order, with a remark if a cell's noise-to-travel ratio is not the published one."""
    regimes = (table.regime(cell) for cell in pair)
    other = any(regime is not None and regime.differs for regime in regimes)
    return f"{found.order}{OTHER_REGIME}" if other and found.order != "not comparable" else found.order


def filled(table: Table, note: str, results: Results) -> str | None:
    """Return a note with its measured values, None where one of them is not there."""
    values: dict[str, str] = {}
    for key in _PLACEHOLDER.findall(note):
        cell, _, name = key.partition("/")
        name = name or table.value
        found = _values(results, cell, name)
        if len(found) < (1 if table.exact else LEAST_RUNS) or len(found) < len(results.runs_of(cell)):
            return None
        own = name == table.value
        one = summary([value * (_unit(table) if own else 1.0) for value in found], exact=table.exact)
        values[key] = _with_spread(one, _shown(table) if own else _number)
    return _PLACEHOLDER.sub(lambda match: values[match.group(1)], note)


def _at_round(table: Table, name: str, runs: Sequence[Run], number: int) -> str:
    found = [value for run in runs for at, value in run.curve.get(name, ()) if at == number]
    own = name == table.value
    there = [value * (_unit(table) if own else 1.0) for value in found if value is not None]
    if not there or len(there) < max(len(found), len(runs)):
        return "-"
    return (_shown(table) if own else _number)(summary(there).mean)


def _mean(results: Results, cell: str, name: str) -> str:
    found = _values(results, cell, name)
    if not found:
        return "none"
    if len(found) < len(results.runs_of(cell)):
        return "not in every run"
    return _number(summary(found).mean)


def _values(results: Results, cell: str, name: str) -> list[float]:
    found = [run.values.get(name) for run in results.runs_of(cell)]
    return [value for value in found if value is not None]


def _with_spread(ours: Summary, shown: Callable[[float], str]) -> str:
    return shown(ours.mean) + ("" if ours.sd is None else f" ± {shown(ours.sd)}")


def _unit(table: Table) -> float:
    return 100.0 if table.percent else 1.0


def _shown(table: Table) -> Callable[[float], str]:
    return (lambda value: f"{value:.2f}") if table.percent else _number


def _number(value: float) -> str:
    return f"{value:.4g}"
