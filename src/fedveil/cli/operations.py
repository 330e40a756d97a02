"""Commands for operators: serve a link, ask how a party does, write the files that run it as a service.

No command of this module imports PyTorch or what reads tables: served processes stay small.
"""

from __future__ import annotations

import json
import logging
import signal
import threading
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from fedveil.cli.options import OUT, Json, group, read_address
from fedveil.console import print_json, transposed_table
from fedveil.errors import ConfigError
from fedveil.sanitize import LogFormat, log_choice, one_line, sanitize

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
    status = party_status(folder, served=answer is not None)
    connection = json.loads(answer[1]) if answer is not None else {}
    if connection and not metrics:
        status |= connection if as_json else {name: shown_fact(value) for name, value in connection.items()}
    elif connection:
        status["connection"] = connection
    if metrics:
        OUT.print(as_metrics(status), end="")
    elif as_json:
        print_json(status)
    else:
        OUT.print(transposed_table([status]))


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


# --- served processes ---


def link_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="the link's folder")],
) -> None:
    """Serve the coordinator's link under its own user account, which holds the TLS key and no other key."""
    from fedveil.federation.hosts.link_folder import LinkFolder

    link = LinkFolder(folder)
    serve_link = import_late("fedveil.federation.hosts.link").serve_link
    stopping = threading.Event()  # an exception out of a signal handler would leave asyncio's loop half open
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    serve_link(
        link,
        stopping.is_set,
        listening=lambda: announce(f"listening on {link.settings.address}; Ctrl-C ends it"),
    )


def announce(text: str) -> None:
    """Tell the operator of a served party something: on standard output, or with ``--log-format json`` in the log.

    A collector of logs reads both, and expects every line in that format.
    """
    if log_choice()[1] is LogFormat.TEXT:
        typer.echo(one_line(text))
    else:  # whatever level the log shows
        log = logging.getLogger("fedveil")
        log.handle(log.makeRecord(log.name, logging.INFO, __file__, 0, text, (), None))


def import_late(module: str) -> Any:
    """Return a module of a transport, which is imported when it serves.

    Raises:
        ConfigError: a package of the extra ``federation`` is not installed.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as missing:
        raise ConfigError(
            f"a federation needs {missing.name}, which is not installed: pip install 'fedveil[federation]'"
        ) from None


def end_by_terminate() -> None:
    """Let SIGTERM end a served party with exit code 0, so that a service manager calls no stopped service failed."""
    signal.signal(signal.SIGTERM, _end)


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(0)


# --- health of a served party ---


def health_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="the folder of a coordinator or a silo")],
) -> None:
    """Exit with code 0 if the party serves, is connected and has valid certificates, otherwise 1 with the cause."""
    from fedveil.federation.hosts.metrics_server import ask_party

    answer = ask_party(folder.absolute(), "/ready")
    if answer is None:
        typer.echo(f"{folder}: no process serves it")
    elif answer[0] != 200:
        typer.echo(sanitize(answer[1]))
    else:
        return
    raise typer.Exit(1)
