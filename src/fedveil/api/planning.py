"""Before training: what each method would guarantee, from public numbers alone, and what one run would cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from torch import nn

from fedveil.api.frame import Frame, Row
from fedveil.api.training import TrainingArguments
from fedveil.arguments import explain_arguments
from fedveil.config_keys import is_finite, is_number, plain, whole_argument
from fedveil.console import delta_text, epsilon_text
from fedveil.data.data_report import DataReport, data_report
from fedveil.data.records import Population
from fedveil.data.schema import read_schema
from fedveil.errors import ConfigError, did_you_mean, show_argument
from fedveil.files import as_path
from fedveil.methods.noise_ratio import RHO_NOTE
from fedveil.privacy.claims import Role
from fedveil.report.plan import write_plan
from fedveil.run.planning import Plan, noise_ratio_rows, plan_rows, ratio_rows
from fedveil.run.remarks import explain_open_server, noise_ratio_of, people_warnings, remarks
from fedveil.run.setup import Prepared

# --- each method, from public numbers ---


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
    arguments = {"n_users": n_users, "n_silos": n_silos, "parameters": parameters, **numbers}
    planned = Plan.with_defaults(
        **{
            name: _number(name, value)
            for name, value in arguments.items()
            if value is not None or name in _NEEDED
        }
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
            planned, parameters, [whole_argument("plan: over", value, 1) for value in values]
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
        return tuple(_single(name, item) for item in several)
    return value if name in _PLAIN else _single(name, value)


def _single(name: str, value: Any) -> int | float:
    if name in _WHOLE or name == _AT_LEAST_0:
        number = whole_argument(f"plan: {name}", value, 0 if name == _AT_LEAST_0 else 1)
        if number > (most := _MOST_SILOS if name == "n_silos" else _MOST):
            raise ConfigError(f"plan: {name} must be at most {most:g}")
        return number
    number = plain(value)
    if not is_number(number) or (isinstance(number, int) and not is_finite(number)):
        raise ConfigError(f"plan: {name} must be a number, not {show_argument(value)}")
    return float(number)


def _over(over: Mapping[str, Iterable[float]]) -> tuple[str, tuple[float, ...]]:
    """Return the key and the values of ``over``."""
    if not isinstance(over, Mapping) or len(over) != 1 or not set(over) <= {"rounds", "ratio"}:
        raise ConfigError(f"plan: {_OVER}")
    key = next(iter(over))
    values: Any = over[key]
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise ConfigError(f"plan: {_OVER}")
    return key, tuple(_single("over", value) for value in values)


def _refusal(row: Row) -> str:
    """Return why a row is missing, in one line."""
    setting = [row["method"], f"rate {row['sampling_rate']:g}"]
    if row["noise_multiplier"] is not None:
        setting.append(f"sigma {row['noise_multiplier']:g}")
    if row["rounds"] is not None:
        setting.append(f"{row['rounds']} rounds")
    return f"refused: {', '.join(setting)}: {row['reason']}"


# --- one run: its guarantee and cost, and what the data holder should know ---


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class CheckFrame(Frame):
    """One row per experiment that was checked: sizes, epsilon, and whether it fits its budget.

    The numbers of records and the report on the data are exact figures of private records.

    Attributes:
        budgets: ``privacy.budget`` of each experiment; None if it has none.
        data: report on the tables, for their owner only; empty for records in memory.
        settings: the first experiment as TOML, with all defaults.
    """

    budgets: tuple[float | None, ...] = ()
    data: tuple[DataReport, ...] = ()
    settings: str = ""

    @property
    def shown(self) -> Sequence[Row]:
        """The figures in words, without what no experiment asked for."""
        optional = ("noise of bounds", "noise of test metric (sd)", "rho")
        unasked = {key for key in optional if all(row[key] is None for row in self.rows)} | {
            "warnings",
            "not read",
        }
        within = {None: "nothing is guaranteed", True: "yes", False: "no"}
        shown_rows = [
            dict(row)
            | {"delta": delta_text(row["delta"], row["users"]), "to server": epsilon_text(row["to server"])}
            | {
                "within budget": "no privacy.budget is set"
                if budget is None
                else within[row["within budget"]]
            }
            for row, budget in zip(self.rows, self.budgets, strict=True)
        ]
        return [{key: value for key, value in row.items() if key not in unasked} for row in shown_rows]

    @property
    def lines(self) -> tuple[str, ...]:
        """Meaning of rho, remarks from public facts, and what was found in the tables."""
        meaning = (RHO_NOTE,) if any(row["rho"] is not None for row in self.rows) else ()
        return (*meaning, *self.notes, *(line for report in self.data for line in finding_lines(report)))


@explain_arguments
def check(
    model: nn.Module | str | Population, people: Population | None = None, **arguments: Any
) -> CheckFrame:
    """Check a model, data, settings and budget as :func:`fedveil.train` would; nothing trains and nothing is charged.

    Args:
        model: as of :func:`fedveil.train`; left out, it is chosen as there.
        people: as of :func:`fedveil.train`.
        arguments: keyword arguments of :func:`fedveil.train`, without ``callbacks`` and ``folder``.

    Returns:
        A frame of one row: what the run would be and guarantee. ``print`` shows it with all findings. It is as
        private as the records, because it counts them.

    Raises:
        FedveilError: as :func:`fedveil.train`.
    """
    prepared, _ = TrainingArguments.bind("fedveil.check", arguments).prepare(model, people)
    people = prepared.population
    source = people.source
    row = check_row(prepared)
    return CheckFrame(
        rows=(row,),
        notes=(*row["warnings"], *row["not read"], *remarks(prepared.task, people)),
        private=True,
        budgets=(prepared.experiment.privacy.budget,),
        data=() if source is None else (data_report(read_schema(source.schema_file), source.files),),
        settings=prepared.experiment.to_toml(),
    )


def check_row(prepared: Prepared) -> dict[str, Any]:
    """Return the sizes and the guarantee of an experiment that is ready to be played."""
    experiment = prepared.experiment
    epsilon, to_server = (
        prepared.epsilon_with(role, experiment.rounds, prepared.side_releases)
        for role in (Role.READER, Role.SERVER)
    )
    budget = experiment.privacy.budget
    stated = [bound if prepared.secure and bound < float("inf") else None for bound in (epsilon, to_server)]
    within = None if budget is None else epsilon <= budget
    if within and not prepared.secure:
        within = None  # all rounds are played, and nothing is guaranteed
    open_server = explain_open_server(experiment, *stated)
    return {
        "experiment": experiment.name,
        "silos": prepared.population.n_silos,
        "users": prepared.population.n_users,
        "training records": len(prepared.population.train),
        "parameters": prepared.task.dimension,
        "contributions": len(prepared.setting.cohort.groups),
        "trainer": prepared.setting.trainer.name,
        "rounds": experiment.rounds,
        "noise of bounds": None if prepared.preprocessing is None else prepared.preprocessing.noise,
        "noise of test metric (sd)": None if prepared.evaluation is None else prepared.evaluation.error,
        "delta": experiment.privacy.delta,
        "epsilon": stated[0],
        "to server": stated[1],
        "within budget": within,
        "rho": noise_ratio_of(prepared),
        "warnings": [*map(str, people_warnings(prepared)), *filter(None, (open_server,))],
        "not read": list(experiment.unused_tables()),
    }


def finding_lines(report: DataReport) -> tuple[str, ...]:
    """Return who holds what and what was found in tables, in sentences for their owner."""
    return (
        *(f"{silo.name}: {silo.records} records of {silo.people} people" for silo in report.silos),
        f"all silos: {report.records} records of {report.people} people, {report.n_users} declared",
        *(
            f"{finding.where} (affects the {finding.bears_on}): {finding.found}. "
            f"{finding.effect[0].upper()}{finding.effect[1:]}."
            for finding in report.findings
        ),
        *(
            ()
            if report.findings
            else ("Nothing was found that affects the guarantee, the model or the run.",)
        ),
    )
