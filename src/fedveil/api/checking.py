"""Checks before training: what a run would guarantee and cost, and what the data holder should know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from fedveil.api.frame import Frame, Row
from fedveil.api.training import TrainingArguments
from fedveil.arguments import explain_arguments
from fedveil.console import delta_text, epsilon_text
from fedveil.data.data_report import DataReport, data_report
from fedveil.data.records import Population
from fedveil.data.schema import read_schema
from fedveil.methods.noise_ratio import RHO_NOTE
from fedveil.privacy.claims import Role
from fedveil.run.remarks import explain_open_server, noise_ratio_of, people_warnings, remarks
from fedveil.run.setup import Prepared


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
        told = [
            dict(row)
            | {"delta": delta_text(row["delta"], row["users"]), "to server": epsilon_text(row["to server"])}
            | {
                "within budget": "no privacy.budget is set"
                if budget is None
                else within[row["within budget"]]
            }
            for row, budget in zip(self.rows, self.budgets, strict=True)
        ]
        return [{key: value for key, value in row.items() if key not in unasked} for row in told]

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
    stated = [one if prepared.secure and one < float("inf") else None for one in (epsilon, to_server)]
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
            f"{one.where} (affects the {one.bears_on}): {one.found}. {one.effect[0].upper()}{one.effect[1:]}."
            for one in report.findings
        ),
        *(
            ()
            if report.findings
            else ("Nothing was found that affects the guarantee, the model or the run.",)
        ),
    )
