"""Commands for operators: how a party does, and the files that run it as a service."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fedveil.cli.options import OUT, Json, group, read_address
from fedveil.console import print_json, transposed_table
from fedveil.errors import ConfigError

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="the folder of a coordinator or a silo")]

deploy = group("Write files for service managers, containers, proxies, Flower, NVFlare.")


def status_command(
    folder: Folder,
    metrics: Annotated[
        bool, typer.Option("--metrics", help="in Prometheus text format, for a textfile collector")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show the state of a party on this host: service, run and round, certificates, membership, budget."""
    from fedveil.federation.hosts.metrics_server import as_metrics, ask_party
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


_Bridge = Annotated[Path, typer.Option("--bridge", metavar="SOCKET", help="the link's socket run/bridge")]
_App = Annotated[Path, typer.Argument(metavar="DIR", help="folder, created if it is missing")]


@deploy.command("flower")
def flower_command(folder: _App, bridge: _Bridge) -> None:
    """Write a Flower app that carries the messages of a federation between its link and Flower's nodes."""
    from fedveil.federation.hosts.deployment import write_flower_app

    for path in write_flower_app(folder, bridge):
        OUT.print(str(path))


@deploy.command("nvflare")
def nvflare_command(
    folder: _App,
    bridge: _Bridge,
    silo: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SITE=SILO", help="a site of NVFlare and its silo; none: all sites, by their names"
        ),
    ] = None,
    installed: Annotated[
        bool, typer.Option("--installed", help="send no code: fedveil is installed where NVFlare runs")
    ] = False,
) -> None:
    """Write an NVFlare job that carries the messages of a federation between its link and NVFlare's sites."""
    from fedveil.federation.hosts.deployment import write_nvflare_job

    silos = dict[str, str]()
    for pair in silo or ():
        site, _, name = pair.partition("=")
        if not site or not name:
            raise ConfigError(f"--silo {pair}: SITE=SILO is needed, such as site-1=north")
        silos[site] = name
    for path in write_nvflare_job(folder, bridge, silos, installed=installed):
        OUT.print(str(path))
