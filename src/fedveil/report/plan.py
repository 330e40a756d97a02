"""Page of a privacy plan: epsilon by noise, rounds and sampling, computed without data."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from markupsafe import Markup

from fedveil.privacy.statement import show_noise
from fedveil.report import plots
from fedveil.report.document import Section, document, table, write_document
from fedveil.report.drawing import Curve, Plot, show, show_epsilon
from fedveil.run.folder.documents import JsonValue

PlanRow = Mapping[str, JsonValue]
"""Row with the keys `method`, `noise_multiplier`, `rounds`, `users`, `sampling_rate`, `epsilon` and `accountant`; a
null epsilon means that there is no guarantee."""

_COLUMNS = {
    "method": "method",
    "noise_multiplier": "noise multiplier σ",
    "rounds": "rounds",
    "users": "users",
    "sampling_rate": "sampling rate",
    "accountant": "accountant",
    "epsilon": "ε",
}
_AXES = (("rounds", False), ("noise_multiplier", True), ("sampling_rate", True), ("users", True))
"""Quantities that a plan varies, with whether their axis is logarithmic."""


def write_plan(rows: Sequence[PlanRow], path: Path, refused: Sequence[PlanRow] = ()) -> Path:
    """Write the page of a plan: a table, and a plot of epsilon against each varied quantity.

    Args:
        rows: the combinations with a computed cost.
        path: path of the page.
        refused: the combinations without a cost: the same keys, with a `reason` instead of the cost.

    Raises:
        RunFolderError: the file cannot be written.
    """
    shown = [plot for key, log in _AXES if (plot := _plot(rows, key, log)) is not None]
    sections = [Section(identifier="table", title="Every combination", body=_table(rows))]
    if shown:
        sections.insert(0, Section(identifier="cost", title="What it costs", plots=shown, wide=True))
    if refused:
        sections.append(
            Section(identifier="refused", title="Rows that cannot be planned", body=_refused(refused))
        )
    page = document(
        title="Privacy plan",
        kicker="fedveil · plan",
        lead="ε by method, noise, rounds, users and sampling: no data was read, and none is needed.",
        sections=sections,
    )
    return write_document(path, page)


def _table(rows: Sequence[PlanRow]) -> Markup:
    used = [key for key in _COLUMNS if any(row.get(key) is not None for row in rows) or key == "epsilon"]
    cells = [[_shown(row, key) for key in used] for row in rows]
    return table([_COLUMNS[key] for key in used], cells, caption="One row a combination")


def _refused(rows: Sequence[PlanRow]) -> Markup:
    keys = ("method", "noise_multiplier", "rounds", "sampling_rate")
    cells = [[*(_shown(row, key) for key in keys), _text(row["reason"])] for row in rows]
    return table([*(_COLUMNS[key] for key in keys), "reason"], cells, caption="Rows without a number")


def _plot(rows: Sequence[PlanRow], axis: str, log: bool) -> Plot | None:
    """Plot epsilon against one quantity; None if the plan does not vary it."""
    lines: dict[tuple[str, ...], dict[float, float]] = {}
    other_keys = [key for key in _COLUMNS if key not in (axis, "epsilon")]
    for row in rows:
        x, epsilon = row.get(axis), row.get("epsilon")
        if isinstance(x, int | float) and isinstance(epsilon, int | float) and math.isfinite(epsilon):
            setting = tuple(_text(row.get(key)) for key in other_keys)
            lines.setdefault(setting, {})[float(x)] = float(epsilon)
    # A line needs two points; others of the same quantity are in the table only.
    merged = _merged({setting: points for setting, points in lines.items() if len(points) > 1})
    if not merged:
        return None
    varying = [i for i in range(1, len(other_keys)) if len({setting[i] for setting in merged}) > 1]
    curves = [
        Curve(
            label=", ".join([setting[0], *(f"{_COLUMNS[other_keys[i]]} {setting[i]}" for i in varying)]),
            colour=colour,
            x=sorted(points),
            mean=[points[x] for x in sorted(points)],
        )
        for colour, (setting, points) in enumerate(merged.items())
    ]
    return plots.plan_curves(curves, axis=_COLUMNS[axis], log=log)


def _merged(lines: Mapping[tuple[str, ...], dict[float, float]]) -> dict[tuple[str, ...], dict[float, float]]:
    """Merge the lines of methods that cost the same at every point: one line would hide the others."""
    methods: dict[tuple[object, ...], list[str]] = {}
    for (method, *setting), points in lines.items():
        methods.setdefault((*setting, *sorted(points.items())), []).append(method)
    return {
        (" = ".join(methods[*setting, *sorted(points.items())]), *setting): points
        for (_, *setting), points in lines.items()
    }


def _epsilon(row: PlanRow) -> str:
    epsilon = row.get("epsilon")
    return show_epsilon(float(epsilon)) if isinstance(epsilon, int | float) else "∞"


def _shown(row: PlanRow, key: str) -> str:
    """Return the text of one cell; epsilon and the noise multiplier are rounded up, never down."""
    value = row.get(key)
    if key == "noise_multiplier" and isinstance(value, int | float):
        return show_noise(float(value))
    return _epsilon(row) if key == "epsilon" else _text(value)


def _text(value: JsonValue) -> str:
    if value is None:
        return ""
    return show(value) if isinstance(value, int | float) else str(value)
