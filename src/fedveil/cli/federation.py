"""The commands of a federation between institutions: create, check, serve, run."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedveil.cli.options import (
    OUT,
    Descriptor,
    Json,
    NewKey,
    PromptedPassphrase,
    expand_option_groups,
    group,
    print_result,
)
from fedveil.console import observer, print_json, transposed_table
from fedveil.errors import ConfigError, RefusedRunError, SilentSiloError
from fedveil.federation.enrollment.certificates import CERTIFICATE_DAYS
from fedveil.federation.hosts.sockets import END, RunOutcome
from fedveil.sanitize import sanitize

if TYPE_CHECKING:  # these modules need the extra fedveil[federation], and not every command does
    from fedveil.federation.hosts.coordinator_service import CoordinatorService
    from fedveil.federation.hosts.folders import CoordinatorFolder
    from fedveil.federation.hosts.silo_service import SiloService
    from fedveil.federation.hosts.submission import Submission
    from fedveil.run.folder.run_folder import RunFolder

federation = group("Create a federation between institutions, check a silo, run an experiment.")


Founder = Annotated[Path, typer.Argument(metavar="DIR", help="the founder's folder")]


@dataclass(frozen=True, kw_only=True)
class CharterOptions:
    """The command-line options whose values go into a charter."""

    host: Annotated[str, typer.Option(help="host name or address by which silos reach the coordinator")]
    name: Annotated[str, typer.Option(help="name of the federation")] = "federation"
    schema: Annotated[
        Path, typer.Option(help="the public schema of all tables; it names the list of users by its sha256")
    ] = Path("schema.toml")
    port: Annotated[int, typer.Option(min=1, max=65535, help="the coordinator's only port")] = 9443


@federation.command("create")
@expand_option_groups
def create_command(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="the founder's folder, created here; keep it offline")
    ],
    chartered: CharterOptions,
    key: NewKey,
    as_json: Json = False,
) -> None:
    """Make the founder's keys and the charter for all who may join; nobody else's key is made here."""
    from fedveil.federation.enrollment.founder import create_federation
    from fedveil.federation.membership import CHARTER

    charter = create_federation(
        folder,
        name=chartered.name,
        schema=chartered.schema,
        host=chartered.host,
        port=chartered.port,
        passphrase=key.passphrase(),
    )
    lines = f"hand out: {folder / CHARTER}", f"fingerprint of the charter: {charter.fingerprint}"
    print_result(as_json, {"charter": folder / CHARTER, "fingerprint": charter.fingerprint}, *lines)


@federation.command("admit")
def admit_command(
    folder: Founder,
    requests: Annotated[
        list[Path], typer.Argument(metavar="REQUEST...", help="the request files that the parties made")
    ],
    fingerprint: Annotated[
        list[str] | None,
        typer.Option(
            help="'request' and 8 groups of 4, as the party's operator reads them out; repeated for each request, in "
            "their order. Left out: asked for at the terminal"
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Admit parties whose operators read you their requests' fingerprints; they join with the next membership."""
    from fedveil.federation.enrollment.founder import admit

    typed = fingerprint or [
        typer.prompt(f"fingerprint that the operator of {sanitize(path.name)} reads out", err=True)
        for path in requests
    ]
    if len(typed) != len(requests):
        raise ConfigError(
            f"--fingerprint: given {len(typed)} times for {len(requests)} requests; give it once for each, in their "
            "order"
        )
    admitted = [admit(folder, path, text) for path, text in zip(requests, typed, strict=True)]
    lines = (f"admitted: {party.role} {party.name}" for party in admitted)
    print_result(as_json, {"admitted": [party.name for party in admitted]}, *lines)


@federation.command("revoke")
def revoke_command(
    folder: Founder,
    name: Annotated[str, typer.Argument(metavar="NAME", help="name of the silo, or `coordinator`")],
    reason: Annotated[str, typer.Option(help="for all members to read")],
    as_json: Json = False,
) -> None:
    """Remove a party from the next membership and revoke its key: it left, or its key was lost."""
    from fedveil.federation.enrollment.founder import revoke

    revocation = revoke(folder, name, reason)
    line = f"revoked: {name}, since {revocation.since}; seal, and hand out the membership"
    print_result(as_json, {"revoked": name, "since": revocation.since}, line)


@federation.command("seal")
def seal_command(
    folder: Founder,
    days: Annotated[
        int, typer.Option(min=1, max=CERTIFICATE_DAYS, help="how long it is valid")
    ] = CERTIFICATE_DAYS,
    above: Annotated[
        int, typer.Option(min=0, help="serial number seen before the founder's folder was restored")
    ] = 0,
    descriptor: Descriptor = None,
    as_json: Json = False,
) -> None:
    """Seal all admitted parties as the next membership, and certify the coordinator's TLS key anew."""
    from fedveil.federation.enrollment.founder import seal

    membership = seal(folder, PromptedPassphrase(descriptor), days, above)
    sealed = folder / "sealed"
    members = zip(membership.silos, membership.roster, strict=True)
    print_result(
        as_json,
        {"folder": sealed, "serial": membership.serial, "fingerprint": membership.fingerprint},
        *(f"{name}: {public.fingerprint}" for name, public in members),
        f"hand out: {sealed} (serial {membership.serial}, valid until {membership.valid_until})",
        f"fingerprint of the membership: {membership.fingerprint}",
    )


@federation.command("demo")
def demo_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="folder, created here")],
    rounds: Annotated[int, typer.Option(min=1, help="rounds of the experiment")] = 10,
    port: Annotated[
        int, typer.Option(min=1, max=65535, help="the coordinator's port; silos open none")
    ] = 9443,
) -> None:
    """Create a federation of four made-up hospitals, run all parties on this host, and run an experiment."""
    from fedveil.cli.coordinator import open_party
    from fedveil.cli.operations import import_late
    from fedveil.federation.enrollment.demonstration import write_demonstration
    from fedveil.federation.hosts.folders import CoordinatorFolder, SiloFolder
    from fedveil.federation.hosts.submission import create_run, read_document

    demonstration = write_demonstration(folder, rounds=rounds, port=port)
    home = CoordinatorFolder(demonstration.provisioned.coordinator)
    signal.signal(
        signal.SIGTERM, signal.default_int_handler
    )  # end as by Ctrl-C, so that all parties are stopped
    service = import_late("fedveil.federation.hosts.silo_service").SiloService
    served: list[CoordinatorService | SiloService] = [open_party(home)]
    try:
        served += [service(SiloFolder(path)) for path in demonstration.provisioned.silos]
        _run(home, create_run(home, read_document(demonstration.experiment, home)), as_json=False)
    finally:
        for party in reversed(served):
            party.stop()


@federation.command("check")
def check_command(
    silo: Annotated[Path, typer.Argument(metavar="SILO", help="the silo's folder")],
    descriptor: Descriptor = None,
    offline: Annotated[bool, typer.Option("--offline", help="do not try the coordinator")] = False,
    as_json: Json = False,
) -> None:
    """Check a silo on its own host: keys, certificates, table, budget, and the way to the coordinator."""
    from fedveil.cli.operations import import_late
    from fedveil.federation.hosts.folders import SiloFolder

    home = SiloFolder(silo, PromptedPassphrase(descriptor))
    checks = import_late("fedveil.federation.hosts.silo_checks")
    findings = checks.inspect_silo(home)
    if offline:
        print_result(as_json, findings, transposed_table([findings]))
        return
    reached = checks.try_coordinator(home)
    findings |= {f"coordinator: {name}": sentence for name, sentence in reached.findings.items()}
    print_result(as_json, findings, transposed_table([findings]))
    reached.check()


@federation.command("status")
def status_command(
    page: Annotated[Path, typer.Option("--html", metavar="FILE", help="the page to write")],
    home: Annotated[Path, typer.Argument(metavar="DIR", help="the coordinator's folder")] = Path("."),
    as_json: Json = False,
) -> None:
    """Write one self-contained page: silos, runs, what each cost against each role, refusals, certificates."""
    from fedveil.cli.federation_page import write_federation_page
    from fedveil.federation.hosts.folders import CoordinatorFolder

    path = write_federation_page(CoordinatorFolder(home), page)
    print_result(as_json, {"page": path}, f"page: {path}")


@federation.command("run")
def run_command(
    experiment: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE", help="an experiment, or a file with a table `statistics` or `inference`"
        ),
    ] = None,
    home: Annotated[Path, typer.Option("--home", help="the coordinator's folder")] = Path("."),
    resume: Annotated[Path | None, typer.Option("--resume", help="continue the run in this folder")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="only ask whether all silos' policies and budgets allow it")
    ] = False,
    as_json: Json = False,
) -> None:
    """Submit a run to the coordinator, follow it, and print its statement, run folder and report."""
    from fedveil.cli.results import kind_of, printer_of
    from fedveil.federation.hosts.folders import CoordinatorFolder
    from fedveil.federation.hosts.submission import check_served, create_run, read_document
    from fedveil.run.folder.run_folder import RunFolder

    coordinator = CoordinatorFolder(home)
    if (experiment is None) == (resume is None):
        raise ConfigError("give an experiment to run, or --resume and the folder of a run")
    if resume is not None:
        if dry_run:
            raise ConfigError("--dry-run: of a file that has not been run; leave --resume out")
        folder = RunFolder(resume.absolute())
    else:
        assert experiment is not None
        document = read_document(experiment, coordinator)
        check_served(coordinator)
        if dry_run:
            _ask_policies(coordinator, experiment, as_json)
            return
        folder = create_run(coordinator, document)
    kind = kind_of(folder.path)
    if kind is not None:
        _release(coordinator, folder, as_json, printer_of(kind))
    else:
        _run(coordinator, folder, as_json)


def _print_before(submission: Submission, as_json: bool) -> None:
    """Print how many runs the coordinator plays before a submitted one."""
    if submission.before and not as_json:
        OUT.print(f"runs that are played before it: {submission.before}")


def _ask_policies(home: CoordinatorFolder, experiment: Path, as_json: bool) -> None:
    """Print that all silos would take part in a run.

    Raises:
        RefusedRunError: silos refuse; the error names each.
        SilentSiloError: silos do not answer; the error names each.
    """
    from fedveil.federation.hosts.submission import Submission, wait

    again = f"fedveil federation run --dry-run --home {shlex.quote(str(home.path))}"
    with Submission(home, experiment, asks_policies=True) as submission:
        _print_before(submission, as_json)
        end = wait(again, experiment, submission, lambda: None)
    if end.stopped is not None:
        raise RefusedRunError(f"{experiment}: {end.stopped}")
    if end.silent:
        raise SilentSiloError(f"{experiment}: no answer from {', '.join(end.silent)}")
    silos = home.membership.silos
    print_result(
        as_json, {"silos": silos}, f"would take part: {', '.join(silos)}; nothing was run or charged"
    )


def _refuse_silence(home: CoordinatorFolder, folder: RunFolder, end: RunOutcome) -> None:
    """Raise a SilentSiloError if a run ended because silos did not answer."""
    from fedveil.federation.hosts.submission import resume_command

    if end.silent:
        raise SilentSiloError(
            f"{folder.path}: ended because {', '.join(end.silent)} did not answer; go on once it does: "
            f"`{resume_command(home)} {shlex.quote(str(folder.path))}`"
        )


def _is_refused(folder: RunFolder, end: RunOutcome) -> bool:
    """Return whether a run was stopped before its first round, for another reason than a silo that does not answer."""
    checkpoint = folder.read_checkpoint()
    return end.stopped is not None and not end.silent and (checkpoint is None or not checkpoint.round)


def check_end(home: CoordinatorFolder, folder: RunFolder, end: RunOutcome) -> None:
    """Check that a run between institutions was played.

    Raises:
        SilentSiloError: silos did not answer.
        RefusedRunError: the run was refused before its first round.
    """
    _refuse_silence(home, folder, end)
    if _is_refused(folder, end):
        raise RefusedRunError(f"{folder.path}: refused before the first round: {end.stopped}")


def _release(
    home: CoordinatorFolder, folder: RunFolder, as_json: bool, show: Callable[[Path, bool], None]
) -> None:
    """Submit a document of releases, wait for its end, and print the released figures."""
    from fedveil.federation.hosts.submission import Submission, resume_command, wait

    (folder / END).unlink(missing_ok=True)  # the outcome of an earlier attempt at this run
    with Submission(home, folder.path) as submission:
        _print_before(submission, as_json)
        end = wait(resume_command(home), folder.path, submission, lambda: None)
    _refuse_silence(home, folder, end)
    if end.stopped is not None:
        raise RefusedRunError(f"{folder.path}: not all of it was released: {end.stopped}")
    show(folder.path, as_json)


def _run(home: CoordinatorFolder, folder: RunFolder, as_json: bool) -> None:
    """Submit an experiment, follow its rounds, and print its statement, run folder and report."""
    from fedveil.cli.options import print_statement
    from fedveil.federation.hosts.submission import Submission, resume_command, watch
    from fedveil.report.page import write_report
    from fedveil.run.folder.documents import read_statement
    from fedveil.run.folder.run_folder import RunFolder

    _, experiment = RunFolder.open(folder.path)
    again = resume_command(home)
    (folder / END).unlink(missing_ok=True)  # the outcome of an earlier attempt at this run
    with Submission(home, folder.path) as submission:
        _print_before(submission, as_json)
        with observer(OUT, quiet=as_json, resume=again) as watching:
            end = watch(again, folder, watching, experiment, submission)
    report = write_report(folder.path)
    is_refused = _is_refused(folder, end)
    if as_json:
        print_json({"folder": folder.path, "stopped": end.stopped, "report": report})
    else:
        if end.stopped is not None and not is_refused:
            OUT.print(f"stopped: {end.stopped}")
        path = folder / "privacy.json"
        statement = read_statement(path) if path.exists() else None
        # A run that was stopped with epsilon 0 has released nothing.
        if statement is not None and not (end.stopped is not None and statement.epsilon == 0):
            print_statement(statement)
        OUT.print(f"run folder: {folder.path}")
        OUT.print(f"report: {report}")
    check_end(home, folder, end)
