"""Planning from Python: what each method would guarantee, from public numbers alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from fedveil.api.frame import Frame, Row
from fedveil.arguments import explain_arguments
from fedveil.config_keys import is_finite, is_number, plain, whole_argument
from fedveil.console import delta_text
from fedveil.errors import ConfigError, did_you_mean, show_argument
from fedveil.files import as_path
from fedveil.methods.noise_ratio import RHO_NOTE
from fedveil.report.plan import write_plan
from fedveil.run.planning import Plan, noise_ratio_rows, plan_rows, ratio_rows

_KEYS: Final = tuple(field.name for field in fields(Plan))
_WHOLE: Final = frozenset(
    {
        *("n_users", "n_silos", "parameters", "rounds"),
        *("group_sizes", "records_per_silo", "batch_size", "epochs"),
    }
)
_SEVERAL: Final = frozenset({"noise_multipliers", "sampling_rates", "group_sizes", "client_sampling_rates"})
_AT_LEAST_0: Final = "colluding_silos"
_NEEDED: Final = ("n_users", "n_silos")
_MOST_SILOS: Final = 10**6
_MOST: Final = 10**12
"""Largest count of anything else in a plan."""
_PLAIN: Final = frozenset({"accountant", "allow_large_delta"})
_PARAMETERS: Final = 1000
"""d of a comparison ``over`` rounds or ratios, unless it is given."""
_OVER: Final = "over must be {'rounds': [T, ...]} or {'ratio': [r, ...]}"


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class PlanFrame(Frame):
    """Predicted guarantee of each method.

    Attributes:
        refused: rows without a number, each with the ``reason``.
        left_out: methods that the accountant has no bound for.
        accountant: name of the accountant.
    """

    refused: tuple[Row, ...] = ()
    left_out: tuple[str, ...] = ()
    accountant: str = "pld"

    @property
    def shown(self) -> Sequence[Row]:
        """One row per method and setting: that of the most rounds."""
        if not all("method" in row for row in self.rows):
            return self.rows
        keys = ("method", "noise_multiplier", "sampling_rate", "accountant")
        return list({tuple(row[key] for key in keys): row for row in self.rows}.values())

    @property
    def lines(self) -> tuple[str, ...]:
        """The meaning of rho if a row has it, and why rows are missing."""
        return (
            *((RHO_NOTE,) if any(row.get("rho") is not None for row in self.rows) else ()),
            *(
                f"left out: {name}, for which accountant {self.accountant} has no bound"
                for name in self.left_out
            ),
            *map(_refusal, self.refused),
        )

    def to_json(self) -> dict[str, Any]:
        return {**super().to_json(), "left_out": list(self.left_out), "refused": [*map(dict, self.refused)]}

    def write(self, path: str | Path) -> Path:
        """Write the table and its plots as a page.

        Raises:
            RunFolderError: the file cannot be written.
        """
        return write_plan(self.rows, as_path(path, "write"), self.refused)


@explain_arguments
def plan(
    *,
    n_users: int,
    n_silos: int,
    parameters: int | None = None,
    over: Mapping[str, Iterable[float]] | None = None,
    **numbers: Any,
) -> PlanFrame:
    """Calculate what each method would guarantee, from public numbers alone; no record is read.

    Two of ``epsilon``, ``rounds`` and ``noise_multipliers`` determine the third: the least noise for a target, the
    most rounds, or epsilon. Without them, 50 rounds at a noise multiplier of 5 are planned.

    Args:
        n_users: |U|, the public number of users.
        n_silos: |S|.
        parameters: d, the number of model parameters. With it, rows have ``rho``, the noise-to-travel ratio; None where
            a method's contributions are not those of single users. ``over`` takes 1,000 without it.
        over: ``{"rounds": [10, 50]}`` compares the noise with the movement of the model at one ``epsilon``;
            ``{"ratio": [0.05, 0.1]}`` compares fractions of encrypted parameters.
        numbers: fields of :class:`fedveil.run.planning.Plan`: ``epsilon``, ``rounds``, ``noise_multipliers``,
            ``sampling_rates``, ``delta``, ``group_sizes``, ``records_per_silo``, ``batch_size``, ``epochs``,
            ``colluding_silos``, ``accountant``, ``client_sampling_rates``, ``allow_large_delta``.

    Raises:
        ConfigError: an argument that does not exist, or is outside its range.
        FedveilError: no row has a number.

    >>> found = plan(n_users=1000, n_silos=5, rounds=100, noise_multipliers=[5.0])
    >>> found[-1]["rounds"], found.columns[:2]
    (100, ('method', 'noise_multiplier'))
    """
    for name in numbers:
        if name not in _KEYS:
            raise ConfigError(
                f"plan: no argument '{name}'; there are: {', '.join(_KEYS)}{did_you_mean(name, _KEYS)}"
            )
    given = {"n_users": n_users, "n_silos": n_silos, "parameters": parameters, **numbers}
    planned = Plan.with_defaults(
        **{name: _number(name, one) for name, one in given.items() if one is not None or name in _NEEDED}
    )
    title = f"{planned.n_users} users, {planned.n_silos} silos"
    at_delta = f"delta {delta_text(planned.delta, planned.n_users)}"
    if over is None:
        table = plan_rows(planned)
        title += f", {at_delta}"
    else:
        key, values = _over(over)
        parameters = planned.parameters or _PARAMETERS
        title += f", {parameters} parameters"
        if key == "ratio":
            return PlanFrame(rows=tuple(ratio_rows(planned.n_silos, parameters, values)), title=title)
        table = noise_ratio_rows(
            planned, parameters, [whole_argument("plan: over", one, 1) for one in values]
        )
        title += f", epsilon {planned.epsilon}, {at_delta}"
    return PlanFrame(
        rows=tuple(table.rows),
        title=title,
        refused=tuple(table.refused),
        left_out=tuple(table.left_out),
        accountant=planned.accountant,
    )


def _number(name: str, value: Any) -> Any:
    """Return an argument of a plan as a plain number, or as a tuple of them."""
    if name in _SEVERAL:
        several = [value] if is_number(plain(value)) else value
        if isinstance(several, str) or not isinstance(several, Iterable):
            raise ConfigError(
                f"plan: {name} must be a number or a list of numbers, not {show_argument(value)}"
            )
        return tuple(_single(name, one) for one in several)
    return value if name in _PLAIN else _single(name, value)


def _single(name: str, value: Any) -> int | float:
    if name in _WHOLE or name == _AT_LEAST_0:
        found = whole_argument(f"plan: {name}", value, 0 if name == _AT_LEAST_0 else 1)
        if found > (most := _MOST_SILOS if name == "n_silos" else _MOST):
            raise ConfigError(f"plan: {name} must be at most {most:g}")
        return found
    found = plain(value)
    if not is_number(found) or (isinstance(found, int) and not is_finite(found)):
        raise ConfigError(f"plan: {name} must be a number, not {show_argument(value)}")
    return float(found)


def _over(over: Mapping[str, Iterable[float]]) -> tuple[str, tuple[float, ...]]:
    """Return the key and the values of ``over``."""
    if not isinstance(over, Mapping) or len(over) != 1 or not set(over) <= {"rounds", "ratio"}:
        raise ConfigError(f"plan: {_OVER}")
    key = next(iter(over))
    values: Any = over[key]
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise ConfigError(f"plan: {_OVER}")
    return key, tuple(_single("over", one) for one in values)


def _refusal(row: Row) -> str:
    """Return why a row is missing, in one line."""
    setting = [row["method"], f"rate {row['sampling_rate']:g}"]
    if row["noise_multiplier"] is not None:
        setting.append(f"sigma {row['noise_multiplier']:g}")
    if row["rounds"] is not None:
        setting.append(f"{row['rounds']} rounds")
    return f"refused: {', '.join(setting)}: {row['reason']}"
