"""Commands for operators: how a party does, and the files that run it as a service."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fedveil.cli.options import OUT, Json, group, read_address
from fedveil.console import print_json, transposed_table
from fedveil.federation.hosts.metrics_server import ask_party

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
    from fedveil.federation.hosts.metrics import as_metrics
    from fedveil.federation.hosts.status import party_status

    answer = ask_party(folder, "/connection")
    found = party_status(folder, served=answer is not None)
    connection = json.loads(answer[1]) if answer is not None else {}
    if connection and not metrics:
        found |= connection if as_json else {name: shown_fact(value) for name, value in connection.items()}
    elif connection:
        found["connection"] = connection
    if metrics:
        OUT.print(as_metrics(found), end="")
    elif as_json:
        print_json(found)
    else:
        OUT.print(transposed_table([found]))


def shown_fact(value: object) -> object:
    """Return a fact of a connection as text for a table."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {fact:g}" for name, fact in value.items()) or "none"
    return ", ".join(map(str, value)) or "none" if isinstance(value, list) else value


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
    from fedveil.federation.hosts.deployment import Hosting, write_deployment

    host, link = read_address("--behind", behind)
    hosting = Hosting(host=host, port=port, link=link, memory=memory, program=program, image=image)
    for path in write_deployment(folder, hosting):
        OUT.print(str(path))
