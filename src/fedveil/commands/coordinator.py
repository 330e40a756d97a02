"""The commands of a coordinator: join a federation, accept its membership, serve."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedveil.commands.link import end_by_terminate, imported
from fedveil.commands.options import OUT, Json, group, grouped, tell
from fedveil.commands.passphrase import Asked, Descriptor, NewKey
from fedveil.flower.folders import CoordinatorFolder
from fedveil.flower.founding.joining import accept, join_as_coordinator
from fedveil.flower.release import check_release

if TYPE_CHECKING:  # it needs the extra, which not every command does
    from fedveil.flower.coordinator_host.party import Party

coordinator = group("Join a federation as its coordinator, accept its membership, serve.")

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="the coordinator's folder")]


def open_party(folder: CoordinatorFolder) -> Party:
    """Return the coordinator of a folder; what carries letters is imported when it serves."""
    party: Party = imported("fedveil.flower.coordinator_host.party").Party(folder)
    return party


def tell_request(path: Path, fingerprint: str, as_json: bool) -> None:
    """Say where a party's request is, and what its operator reads out."""
    told = f"send to the founder: {path}", f"read out by telephone: {fingerprint}"
    tell(as_json, {"request": path, "fingerprint": fingerprint}, *told)


@coordinator.command("join")
@grouped
def join_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="the coordinator's folder, created here")],
    charter: Annotated[Path, typer.Option(help="the charter that the founder handed out")],
    key: NewKey,
    as_json: Json = False,
) -> None:
    """Make the coordinator's keys and the request for admission, on the coordinator's own host."""
    asked = join_as_coordinator(folder, charter, passphrase=key.passphrase())
    tell_request(folder / "coordinator.request", asked.fingerprint, as_json)


@coordinator.command("accept")
def accept_command(
    folder: Folder,
    sealed: Annotated[
        Path, typer.Argument(metavar="MEMBERSHIP", help="the sealed membership, with server.crt beside it")
    ],
    fingerprint: Annotated[str, typer.Option(help="8 groups of 4, as the founder reads them out")],
    descriptor: Descriptor = None,
    as_json: Json = False,
) -> None:
    """Accept a sealed membership whose fingerprint the founder read to you; take the certificate beside it."""
    made = accept(folder, sealed, fingerprint, Asked(descriptor))
    tell(as_json, {"serial": made.serial}, f"accepted: serial {made.serial}")


@coordinator.command("serve")
def serve_command(folder: Folder, descriptor: Descriptor = None) -> None:
    """Serve as the coordinator: a TLS port for registered silos alone, and runs submitted on this host."""
    check_release()
    home = CoordinatorFolder(folder, Asked(descriptor))
    _ = home.identity  # asks for the passphrase before anything listens
    end_by_terminate()
    party = open_party(home)
    try:
        OUT.print(f"listening on {home.link.settings.address}; Ctrl-C ends it")
        raise party.link.wait()
    finally:
        party.stop()
