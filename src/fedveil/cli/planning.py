"""The command that plans a federation before there are data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from fedveil.cli.options import OUT, Json, expand_option_groups, print_frame

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
    def numbers(self) -> dict[str, Any]:
        """The options that are given, as arguments of :func:`fedveil.plan`."""
        return {name: value for name, value in vars(self).items() if value is not None}


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
        int | None,
        typer.Option(
            min=1,
            max=_MOST,
            help="d, the number of model parameters: adds rho, noise over movement (1000 for --over)",
        ),
    ] = None,
    page: Annotated[Path, typer.Option(help="where the table and plot are written")] = Path("plan.html"),
    as_json: Json = False,
) -> None:
    """Calculate what each method would guarantee, from public numbers alone: sigma, epsilon, rounds."""
    from fedveil.api.planning import plan
    from fedveil.run.planning import read_over

    found = plan(
        **asked.numbers, parameters=parameters, over=None if over is None else dict([read_over(over)])
    )
    print_frame(found, as_json)
    if over is None and not as_json:
        OUT.print(f"table and plot over the rounds: {found.write(page)}")
