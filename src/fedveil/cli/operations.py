"""Commands for operators: how a party does, and the files that run it as a service."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedveil.cli.options import OUT, Json, group
from fedveil.console import print_json, transposed_table
from fedveil.errors import ConfigError
from fedveil.flower.deployment import Hosting, write_deployment
from fedveil.flower.metrics import as_metrics
from fedveil.flower.metrics_server import probe
from fedveil.flower.status import party_status

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="the folder of a coordinator or a silo")]

deploy = group("Write files for service managers, containers and proxies.")


@deploy.callback()
def _group() -> None:
    """Keep ``write`` a command of its own."""


def status_command(
    folder: Folder,
    metrics: Annotated[
        bool, typer.Option("--metrics", help="in Prometheus text format, for a textfile collector")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show the state of a party on this host: service, run and round, certificates, membership, budget."""
    found = party_status(folder, served=probe(folder, "/live"))
    if metrics:
        OUT.print(as_metrics(found), end="")
    elif as_json:
        print_json(found)
    else:
        OUT.print(transposed_table([found]))


def health_command(folder: Folder) -> None:
    """Exit with code 0 if the party is serving and its certificates and membership are valid, otherwise 1."""
    try:
        party_status(folder, served=False)
    except ConfigError as error:
        OUT.print(str(error))
    else:
        if probe(folder, "/ready"):
            return
    raise typer.Exit(1)


@deploy.command("write")
def write_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="folder, created if it is missing")],
    port: Annotated[int, typer.Option(min=1, max=65535, help="the one port that silos reach")] = 9443,
    behind: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="the coordinator's link, behind the proxy")
    ] = "127.0.0.1:9444",
    memory: Annotated[str, typer.Option(help="memory limit of a party")] = "8G",
    program: Annotated[str, typer.Option(help="path of fedveil on the host")] = "/opt/fedveil/bin/fedveil",
    image: Annotated[
        str | None,
        typer.Option(metavar="NAME@sha256:DIGEST", help="base image of containers, built of DIR/packages"),
    ] = None,
) -> None:
    """Write systemd units and nginx.conf, and with --image what builds containers; every placeholder filled."""
    host, _, link = behind.rpartition(":")
    if not host or not link.isdecimal():
        raise ConfigError(f"--behind {behind}: HOST:PORT is needed, such as 127.0.0.1:9444")
    hosting = Hosting(host=host, port=port, link=int(link), memory=memory, program=program, image=image)
    for path in write_deployment(folder, hosting):
        OUT.print(str(path))
