"""The command that plans a federation before there are data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import typer

from fedveil.cli.options import OUT, Json, expand_option_groups, print_result
from fedveil.console import delta_text, print_json, rows_table
from fedveil.report.plan import write_plan
from fedveil.run.planning import Plan, PlanTable, noise_ratio_rows, plan_rows, ratio_rows, read_over

_MOST: Final = 10**9
"""Of users, silos, rounds, records and parameters: as many as an experiment may have rounds."""


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The options that describe what is planned."""

    n_users: Annotated[
        int, typer.Option("--users", min=1, max=_MOST, help="|U|, the public number of users")
    ] = 100
    n_silos: Annotated[int, typer.Option("--silos", min=1, max=_MOST, help="|S|")] = 5
    rounds: Annotated[
        int | None, typer.Option(min=1, max=_MOST, help="T; 50 unless --epsilon and --sigma are given")
    ] = None
    noise_multipliers: Annotated[
        list[float] | None,
        typer.Option("--sigma", help="noise multiplier; may be repeated; 5 without --epsilon"),
    ] = None
    sampling_rates: Annotated[
        list[float] | None, typer.Option("--rate", help="user sampling rate q; may be repeated")
    ] = None
    delta: Annotated[float, typer.Option(min=0, max=1)] = 1e-5
    allow_large_delta: Annotated[
        bool,
        typer.Option(
            "--allow-large-delta", help="plan a delta of 1 / |U| or more, which protects nobody in particular"
        ),
    ] = False
    epsilon: Annotated[
        float | None,
        typer.Option(help="target: find the least sigma for the rounds, or the most rounds for --sigma"),
    ] = None
    group_sizes: Annotated[
        list[int] | None, typer.Option("--group", min=1, max=_MOST, help="k of uldp-group; may be repeated")
    ] = None
    records_per_silo: Annotated[
        int, typer.Option("--records", min=1, max=_MOST, help="records per silo (uldp-group)")
    ] = 1000
    batch_size: Annotated[int, typer.Option(min=1, max=_MOST, help="batch size (uldp-group)")] = 64
    epochs: Annotated[int, typer.Option(min=1, max=_MOST, help="local epochs (uldp-group)")] = 1
    colluding_silos: Annotated[int, typer.Option(min=0, max=_MOST)] = 0
    client_sampling_rates: Annotated[
        list[float] | None,
        typer.Option("--client-rate", help="dp-fed: share of the clients; may be repeated"),
    ] = None
    accountant: Annotated[str, typer.Option(help="pld, rdp or rdp-2017")] = "pld"

    @property
    def plan(self) -> Plan:
        """The same as the plan takes it, with what holds where an option is not given."""
        sigmas = tuple(self.noise_multipliers or (() if self.epsilon else (5.0,)))
        given = {
            "rounds": 50 if self.rounds is None and not (self.epsilon and sigmas) else self.rounds,
            "noise_multipliers": sigmas,
            "sampling_rates": tuple(self.sampling_rates or (1.0,)),
            "group_sizes": tuple(self.group_sizes or (2, 8)),
            "client_sampling_rates": tuple(self.client_sampling_rates or ()),
        }
        return Plan(**vars(self) | given)


@expand_option_groups
def plan_command(
    asked: PlanOptions,
    over: Annotated[
        str | None,
        typer.Option(
            "--over",
            help="rounds=T,T,...: noise-to-travel ratio for each, at --epsilon (pairs' methods); ratio=r,r,...: what "
            "each share under encryption leaves and sends",
        ),
    ] = None,
    parameters: Annotated[
        int, typer.Option(min=1, max=_MOST, help="d, the number of model parameters (--over)")
    ] = 1000,
    page: Annotated[Path, typer.Option(help="where the table and plot are written")] = Path("plan.html"),
    as_json: Json = False,
) -> None:
    """Calculate what each method would guarantee, from public numbers alone: sigma, epsilon, rounds."""
    planned = asked.plan
    title = f"{asked.n_users} users, {asked.n_silos} silos"
    at_delta = f"delta {delta_text(asked.delta, asked.n_users)}"
    if over is not None:
        key, values = read_over(over)
        title += f", {parameters} parameters"
        if key == "ratio":
            found = ratio_rows(asked.n_silos, parameters, values)
            print_result(as_json, {"rows": found}, rows_table(found, title=title))
            return
        travel = noise_ratio_rows(planned, parameters, [int(value) for value in values])
        title += f", epsilon {asked.epsilon}, {at_delta}"
        print_result(
            as_json, {"rows": travel.rows, "refused": travel.refused}, rows_table(travel.rows, title=title)
        )
        if not as_json:
            _print_refused(travel)
        return
    table = plan_rows(planned)
    rows = table.rows
    if as_json:
        print_json({"rows": rows, "left_out": table.left_out, "refused": table.refused})
        return
    for label in table.left_out:
        OUT.print(f"left out: {label}, for which accountant {asked.accountant} has no bound")
    _print_refused(table)
    keys = ("method", "noise_multiplier", "sampling_rate", "accountant")
    last = {tuple(row[key] for key in keys): row for row in rows}  # rows of more rounds come later
    OUT.print(rows_table(last.values(), title=f"{title}, {at_delta}"))
    OUT.print(f"table and plot over the rounds: {write_plan(rows, page, table.refused)}")


def _print_refused(table: PlanTable) -> None:
    """Print why rows are missing, one line each."""
    for row in table.refused:
        setting = [row["method"], f"rate {row['sampling_rate']:g}"]
        if row["noise_multiplier"] is not None:
            setting.append(f"sigma {row['noise_multiplier']:g}")
        if row["rounds"] is not None:
            setting.append(f"{row['rounds']} rounds")
        OUT.print(f"refused: {', '.join(setting)}: {row['reason']}")
