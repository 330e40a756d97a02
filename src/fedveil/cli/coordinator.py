"""The commands of a coordinator: join a federation, accept its membership, serve."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedveil.cli.options import (
    Descriptor,
    Json,
    NewKey,
    PromptedPassphrase,
    expand_option_groups,
    group,
    print_result,
    read_address,
)
from fedveil.errors import ConfigError

if TYPE_CHECKING:  # these modules need the extra fedveil[federation], and not every command does
    from fedveil.federation.hosts.coordinator_service import CoordinatorService
    from fedveil.federation.hosts.folders import CoordinatorFolder

coordinator = group("Join a federation as its coordinator, accept its membership, serve.")

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="the coordinator's folder")]


def open_party(folder: CoordinatorFolder) -> CoordinatorService:
    """Return the coordinator of a folder; its transport is imported when it serves."""
    from fedveil.cli.operations import import_late

    party: CoordinatorService = import_late(
        "fedveil.federation.hosts.coordinator_service"
    ).CoordinatorService(folder)
    return party


MembershipFingerprint = Annotated[
    str | None,
    typer.Option(
        help="'membership' and 8 groups of 4, as the founder reads them out; left out: asked for at the terminal",
    ),
]


def typed_fingerprint(fingerprint: str | None) -> str:
    """Return the given fingerprint of a membership; without one, ask the operator for it."""
    prompt = "fingerprint of the membership that the founder reads out"
    return fingerprint if fingerprint is not None else str(typer.prompt(prompt))


@dataclass(frozen=True, kw_only=True)
class FirstAccept:
    """The options of ``serve`` by which a party first accepts a membership."""

    sealed: Annotated[
        Path | None,
        typer.Option("--accept", metavar="MEMBERSHIP", help="accept this sealed membership first"),
    ] = None
    fingerprint: Annotated[
        str | None, typer.Option(help="of that membership; left out: asked for at the terminal")
    ] = None

    def accept(self, folder: Path, passphrase: PromptedPassphrase) -> None:
        """Accept the membership, if one is given.

        Raises:
            ConfigError: a fingerprint without a membership.
        """
        if self.sealed is None:
            if self.fingerprint is not None:
                raise ConfigError("--fingerprint: of the membership that --accept names; give both")
            return
        from fedveil.cli.operations import announce
        from fedveil.federation.enrollment.joining import accept

        membership = accept(folder, self.sealed, typed_fingerprint(self.fingerprint), passphrase)
        announce(f"accepted: serial {membership.serial}, valid until {membership.valid_until}")


def print_request(path: Path, fingerprint: str, as_json: bool) -> None:
    """Print the path of a party's request, and the fingerprint that its operator reads out."""
    lines = f"send to the founder: {path}", f"read out by telephone: {fingerprint}"
    print_result(as_json, {"request": path, "fingerprint": fingerprint}, *lines)


@coordinator.command("join")
@expand_option_groups
def join_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="the coordinator's folder, created here")],
    charter: Annotated[Path, typer.Option(help="the charter that the founder handed out")],
    listen: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS:PORT",
            help="where this host listens: 0.0.0.0 is all its IPv4 addresses. Not the public name where a router, a "
            "load balancer or a proxy passes connections on",
        ),
    ],
    key: NewKey,
    as_json: Json = False,
) -> None:
    """Make the coordinator's keys and the request for admission, on the coordinator's own host."""
    from fedveil.federation.enrollment.joining import join_as_coordinator

    request = join_as_coordinator(
        folder, charter, passphrase=key.passphrase(), listen=read_address("--listen", listen)
    )
    print_request(folder / "coordinator.request", request.fingerprint, as_json)


@coordinator.command("accept")
def accept_command(
    folder: Folder,
    sealed: Annotated[
        Path, typer.Argument(metavar="MEMBERSHIP", help="the sealed membership, with server.crt beside it")
    ],
    fingerprint: MembershipFingerprint = None,
    descriptor: Descriptor = None,
    as_json: Json = False,
) -> None:
    """Accept a sealed membership whose fingerprint the founder read to you; take the certificate beside it."""
    from fedveil.federation.enrollment.joining import accept

    membership = accept(folder, sealed, typed_fingerprint(fingerprint), PromptedPassphrase(descriptor))
    print_result(as_json, {"serial": membership.serial}, f"accepted: serial {membership.serial}")


@coordinator.command("rotate")
def rotate_command(folder: Folder, descriptor: Descriptor = None, as_json: Json = False) -> None:
    """Make new keys and the request to replace the old ones; they are used once a membership names them."""
    from fedveil.federation.enrollment.joining import rotate

    request = rotate(folder, PromptedPassphrase(descriptor))
    print_request(folder / "coordinator.request", request.fingerprint, as_json)


@coordinator.command("serve")
@expand_option_groups
def serve_command(folder: Folder, first: FirstAccept, descriptor: Descriptor = None) -> None:
    """Serve as the coordinator: a TLS port for the silos of the membership, and runs submitted on this host."""
    from fedveil.cli.operations import announce, end_by_terminate
    from fedveil.federation.hosts.folders import CoordinatorFolder

    passphrase = PromptedPassphrase(descriptor)
    first.accept(folder, passphrase)
    home = CoordinatorFolder(folder, passphrase)
    _ = home.identity  # asks for the passphrase before anything listens
    end_by_terminate()
    party = open_party(home)
    try:
        announce(f"listening on {home.link.settings.address}; Ctrl-C ends it")
        party.wait()
    finally:
        party.stop()
