"""The commands of a silo: join a federation, accept its membership, change keys, serve, move, leave; and its ledger."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from fedveil.cli.coordinator import FirstAccept, MembershipFingerprint, print_request, typed_fingerprint
from fedveil.cli.options import (
    Descriptor,
    Json,
    NewKey,
    PromptedPassphrase,
    expand_option_groups,
    group,
    print_result,
)

silo = group("Join a federation as a silo, accept its membership, serve; export the ledger.")
ledger = group("What the silo's users have spent over all runs.")
silo.add_typer(ledger, name="ledger")

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="the silo's folder")]


@dataclass(frozen=True, kw_only=True)
class FileOptions:
    """The silo's own files, which ``silo.toml`` names."""

    table: Annotated[
        Path | None, typer.Option(help="the silo's table; left out: table.csv in the new folder")
    ] = None
    users: Annotated[
        Path | None,
        typer.Option(
            help="the list of users whose SHA-256 the schema names; left out: users.txt in the folder"
        ),
    ] = None


@silo.command("join")
@expand_option_groups
def join_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="the silo's folder, created here")],
    name: Annotated[str, typer.Option(help="name of the silo")],
    charter: Annotated[Path, typer.Option(help="the charter that the founder handed out")],
    files: FileOptions,
    key: NewKey,
    as_json: Json = False,
) -> None:
    """Make a silo's keys, its settings, a draft policy and the request for admission, on the silo's own host."""
    from fedveil.federation.enrollment.joining import FILES, LocalFiles, join_as_silo

    holds = LocalFiles(
        table=FILES.table if files.table is None else files.table.absolute(),
        users=None if files.users is None else files.users.absolute(),
    )
    request = join_as_silo(folder, charter, name=name, passphrase=key.passphrase(), holds=holds)
    print_request(folder / f"{request.name}.request", request.fingerprint, as_json)


@silo.command("rotate")
def rotate_command(folder: Folder, descriptor: Descriptor = None, as_json: Json = False) -> None:
    """Make new keys and the request to replace the old ones; they are used once a membership names them."""
    from fedveil.federation.enrollment.joining import rotate

    request = rotate(folder, PromptedPassphrase(descriptor))
    print_request(folder / f"{request.name}.request", request.fingerprint, as_json)


@silo.command("accept")
def accept_command(
    folder: Folder,
    sealed: Annotated[
        Path, typer.Argument(metavar="MEMBERSHIP", help="the sealed membership, with silo-NAME.crt beside it")
    ],
    fingerprint: MembershipFingerprint = None,
    descriptor: Descriptor = None,
    as_json: Json = False,
) -> None:
    """Accept a sealed membership whose fingerprint the founder read to you, and show who belongs to it."""
    from fedveil.federation.enrollment.joining import accept

    membership = accept(folder, sealed, typed_fingerprint(fingerprint), PromptedPassphrase(descriptor))
    members = {
        name: public.fingerprint for name, public in zip(membership.silos, membership.roster, strict=True)
    }
    coordinator = membership.coordinator.fingerprint
    print_result(
        as_json,
        {"serial": membership.serial, "silos": members, "coordinator": coordinator},
        *(f"{name}: {print_}" for name, print_ in members.items()),
        f"coordinator: {coordinator}",
        f"accepted: serial {membership.serial}, valid until {membership.valid_until}",
    )


@silo.command("serve")
@expand_option_groups
def serve_command(folder: Folder, first: FirstAccept, descriptor: Descriptor = None) -> None:
    """Serve as a silo: a process with table and keys, and one that fetches messages; no port is opened."""
    from fedveil.cli.operations import announce, end_by_terminate, import_late
    from fedveil.federation.hosts.folders import SiloFolder

    passphrase = PromptedPassphrase(descriptor)
    first.accept(folder, passphrase)
    home = SiloFolder(folder, passphrase)
    end_by_terminate()
    service = import_late("fedveil.federation.hosts.silo_service")
    service.limit_memory(home)
    served = service.SiloService(home)
    try:
        announce(
            f"silo {home.settings.name} serves the coordinator at {home.settings.coordinator}; Ctrl-C ends it"
        )
        served.wait()
    finally:
        served.stop()


@silo.command("migrate")
def migrate_command(
    folder: Folder,
    target: Annotated[
        Path, typer.Argument(metavar="TARGET", help="folder, created here, to be carried to the other host")
    ],
    as_json: Json = False,
) -> None:
    """Move a stopped silo into a new folder: keys, settings and all it remembers, but no table."""
    from fedveil.federation.enrollment.migration import migrate
    from fedveil.federation.hosts.folders import SiloFolder

    beside = migrate(SiloFolder(folder), target)
    carried = f"carry to the other host: {target}, and the table that silo.toml names ({', '.join(beside)})"
    print_result(as_json, {"folder": target, "beside": beside}, carried, f"{folder} is no silo's any more")


@silo.command("leave")
def leave_command(
    folder: Folder,
    output: Annotated[Path, typer.Option("--output", "-o", help="the signed ledger, for an auditor")] = Path(
        "ledger.json"
    ),
    descriptor: Descriptor = None,
    as_json: Json = False,
) -> None:
    """Leave the federation: write the ledger, then delete membership, keys and stored messages."""
    from fedveil.federation.enrollment.migration import leave_federation
    from fedveil.federation.hosts.folders import SiloFolder

    leave_federation(SiloFolder(folder, PromptedPassphrase(descriptor)), output)
    summary = f"ledger: {output}; {folder} keeps it, and is served no more"
    print_result(as_json, {"export": output}, summary, "the founder now revokes this silo, and seals")


@ledger.command("export")
def export_command(
    folder: Folder,
    output: Annotated[Path, typer.Option("--output", "-o", help="the file to write")] = Path("ledger.json"),
    descriptor: Descriptor = None,
    as_json: Json = False,
) -> None:
    """Write the ledger as one signed file for an auditor, who checks it with `fedveil verify`."""
    from fedveil.federation.audit.ledger_audit import export_ledger
    from fedveil.federation.hosts.folders import SiloFolder

    home = SiloFolder(folder, PromptedPassphrase(descriptor))
    membership = home.membership
    path = export_ledger(
        home / "state",
        output,
        identity=home.identity,
        membership=membership,
        number=membership.number(home.settings.name),
        delta=home.policy.delta,
    )
    print_result(as_json, {"export": path}, f"ledger: {path}")


@ledger.command("adopt")
def adopt_command(
    folder: Folder,
    reason: Annotated[str, typer.Option(help="what happened, for an auditor; it stays in the ledger")],
    head: Annotated[
        list[str] | None, typer.Option(help="a missing head that the silo's log names (may be repeated)")
    ] = None,
    as_json: Json = False,
) -> None:
    """Continue with a ledger that lost lines, on your responsibility: what they charged is no longer counted."""
    from fedveil.federation.hosts.folders import SiloFolder
    from fedveil.federation.silo_ledger import adopt

    missing = adopt(SiloFolder(folder) / "state", reason, tuple(head or ()))
    summary = f"adopted; {missing} missing heads are answered for. More was spent than this ledger tells."
    print_result(as_json, {"missing": missing}, summary)
