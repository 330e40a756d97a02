"""All commands, imported when they are used, and the exit codes of their errors.

A command prints text for a person, or one JSON object with ``--json``. Each class of error has its own exit code. Most
command modules import PyTorch; they are imported late so that ``--help`` does not wait for it.
"""

from __future__ import annotations

import atexit
import errno
import gc
import logging
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

from fedveil import __version__
from fedveil.console import Terminal
from fedveil.errors import FedveilError, HostError
from fedveil.files import HOST_FAULTS
from fedveil.sanitize import LogFormat, LogLevel, log_choice, show_log
from fedveil.user_code import name_user_code

_BUG: Final = 70
"""Exit code of an unexpected exception, which is a bug of fedveil."""

_UNWRITABLE_DISK: Final = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Error numbers of a full disk, an exhausted quota and a read-only file system."""

_Misuse: Final[Any] = typer.BadParameter.__base__
"""Base class of click's errors for a wrong command line; click is not imported by name (:class:`_LazyGroup`)."""


EXAMPLES: Final[Mapping[str, tuple[str, ...]]] = {
    "run": (
        "fedveil run digits",
        "fedveil run digits --variant uldp-avg-w --set method.noise_multiplier=2.0",
        "fedveil run hospitals.toml --runs results",
    ),
    "resume": ("fedveil resume runs/hospitals",),
    "check": ("fedveil check hospitals.toml", "fedveil check digits --quick"),
    "check-data": ("fedveil check-data schema.toml north.csv south.csv --page look.html",),
    "sweep": ("fedveil sweep hospitals.toml --over method.clip=0.5,1.0 --over rounds=10,20 --processes 2",),
    "plan": (
        "fedveil plan --users 300 --silos 3 --rounds 20 --epsilon 2",
        "fedveil plan --users 300 --silos 3 --epsilon 2 --over rounds=10,20,50 --parameters 6",
    ),
    "stats": ("fedveil stats cohort.toml --plan", "fedveil stats cohort.toml"),
    "infer": ("fedveil infer odds.toml --plan", "fedveil infer odds.toml"),
    "show": (
        "fedveil show runs/odds",
        "fedveil show runs/cohort --cross sick,ward --quantile age=.1,.9",
    ),
    "spent": ("fedveil spent runs/cohort runs/odds runs/model",),
    "report": ("fedveil report runs/hospitals",),
    "compare": ("fedveil compare runs/digits", "fedveil compare runs/sweep --against method.clip"),
    "bundle": ("fedveil bundle runs/hospitals -o hospitals.zip --about 'Tells who needs a bed.'",),
    "predict": ("fedveil predict hospitals.zip new.csv -o predicted.csv --keep patient",),
    "export": ("fedveil export hospitals.zip --onnx model.onnx",),
    "sign": ("fedveil sign hospitals.zip --key identity.pem --new-key",),
    "verify": ("fedveil verify runs/hospitals", "fedveil verify hospitals.zip"),
    "audit": ("fedveil audit runs/hospitals",),
    "presets": ("fedveil presets", "fedveil presets digits > mine.toml"),
    "methods": ("fedveil methods",),
    "stages": ("fedveil stages denoisers",),
    "data": ("fedveil data", "fedveil data heart_disease"),
    "schema": ("fedveil schema sample.csv --user patient --label sick -o schema.toml",),
    "bench": ("fedveil bench accounting --quick",),
    "reproduce": ("fedveil reproduce", "fedveil reproduce figure-6 --seeds 1"),
    "federation": ("fedveil federation demo demo --rounds 5",),
    "federation create": ("fedveil federation create founder --host learn.example.org --schema schema.toml",),
    "federation admit": (
        "fedveil federation admit founder coordinator.request north.request",
        "fedveil federation admit founder north.request --fingerprint "
        "'request 9f31 0d2c 55e8 7a46 11b9 e0c7 6a2f 84d3'",
    ),
    "federation revoke": ("fedveil federation revoke founder north --reason 'left the study'",),
    "federation seal": ("fedveil federation seal founder",),
    "federation demo": ("fedveil federation demo demo --rounds 5",),
    "federation status": ("fedveil federation status coordinator --html federation.html",),
    "federation check": ("fedveil federation check north",),
    "federation run": (
        "fedveil federation run hospitals.toml --home coordinator --dry-run",
        "fedveil federation run hospitals.toml --home coordinator",
        "fedveil federation run --home coordinator --resume coordinator/runs/hospitals",
    ),
    "status": ("fedveil status north",),
    "health": ("fedveil health north",),
    "deploy flower": ("fedveil deploy flower app --bridge /srv/fedveil/coordinator/link/run/bridge",),
    "deploy nvflare": (
        "fedveil deploy nvflare job --bridge /srv/fedveil/coordinator/link/run/bridge --silo site-1=north",
    ),
    "deploy write": ("fedveil deploy write units --memory 4G",),
    "coordinator join": (
        "fedveil coordinator join coordinator --charter charter.toml --listen 0.0.0.0:9443",
    ),
    "coordinator accept": (
        "fedveil coordinator accept coordinator sealed/membership.toml --fingerprint "
        "'membership b7d4 1f60 2a9c e835 0c41 97fe d6a2 5b13'",
    ),
    "coordinator serve": (
        "fedveil coordinator serve coordinator",
        "fedveil coordinator serve coordinator --accept sealed/membership.toml",
    ),
    "silo join": ("fedveil silo join north --name north --charter charter.toml --table north.csv",),
    "silo accept": (
        "fedveil silo accept north sealed/membership.toml --fingerprint "
        "'membership b7d4 1f60 2a9c e835 0c41 97fe d6a2 5b13'",
    ),
    "silo serve": ("fedveil silo serve north", "fedveil silo serve north --accept sealed/membership.toml"),
    "silo ledger export": ("fedveil silo ledger export north --output north.json",),
}
"""Examples for the help of each command, by the words of the command that follow ``fedveil``."""


def show_examples(command: Any, words: str) -> None:
    """Append the examples to the help of a command, and of the commands in its group.

    Args:
        command: click's object for the command; changed in place.
        words: words of the command that follow ``fedveil``, a key of :data:`EXAMPLES`.
    """
    if examples := EXAMPLES.get(words):
        command.epilog = "\n\n".join(("Examples:", *examples))
    for name, inner in getattr(command, "commands", {}).items():
        show_examples(inner, f"{words} {name}")


class Interrupted(FedveilError):
    """Interruption by Ctrl-C; the message has the command that resumes the interrupted work, if there is one."""

    exit_code = 130


@dataclass(frozen=True)
class Command:
    """A command that is imported when it is used.

    Attributes:
        place: ``module:name`` of its function, or of its group of commands, below ``fedveil.cli``.
        summary: its line in ``fedveil --help``, equal to the first line of its docstring.
    """

    place: str
    summary: str

    def load(self, name: str) -> Any:
        """Import the command; return click's object for it, whose help has the examples."""
        module, attribute = self.place.split(":")
        definition = getattr(import_module(f"fedveil.cli.{module}"), attribute)
        if not isinstance(definition, typer.Typer):
            single = typer.Typer(add_completion=False)
            single.command(name)(definition)
            definition = single
        command = typer.main.get_command(definition)
        show_examples(command, name)
        return command


COMMANDS: Final = {
    "run": Command(
        "training:run_command",
        "Train one experiment, or every experiment of a preset; print a table and write a report.",
    ),
    "resume": Command(
        "training:resume_command",
        "Continue an interrupted run from its last complete round, or an interrupted release.",
    ),
    "check": Command(
        "training:check_command", "Check data, model, configuration and budget without training."
    ),
    "check-data": Command(
        "lists:check_data_command",
        "Inspect tables that you hold: people, ids, duplicates, columns, classes. What it prints is private.",
    ),
    "sweep": Command(
        "training:sweep_command",
        "Run a grid over any keys; repeat the command to continue an interrupted sweep.",
    ),
    "plan": Command(
        "training:plan_command",
        "Calculate what each method would guarantee, from public numbers alone: sigma, epsilon, rounds.",
    ),
    "stats": Command(
        "statistics:stats_command",
        "Count people across silos: one release of tables with intervals, within one budget.",
    ),
    "infer": Command(
        "statistics:infer_command",
        "Estimate effects across silos: one regression with intervals, within one budget.",
    ),
    "show": Command(
        "statistics:show_command",
        "Print released figures again, or figures that follow from them: free of charge, and no record is read.",
    ),
    "spent": Command(
        "results:spent_command", "Calculate what several runs over the same people cost together."
    ),
    "report": Command(
        "results:report_command", "Write a run's self-contained report again, and its plots as files."
    ),
    "compare": Command(
        "results:compare_command",
        "Compare runs: a table with the standard deviation over seeds, and a page of privacy-utility curves.",
    ),
    "bundle": Command(
        "results:bundle_command",
        "Pack a run's model, schema, statement and ledger into one folder or zip, for use elsewhere.",
    ),
    "predict": Command("results:predict_command", "Predict for every record of a table."),
    "export": Command("results:export_command", "Write a bundle's model for other programs."),
    "sign": Command("results:sign_command", "Sign a bundle that you made or have checked."),
    "verify": Command(
        "results:verify_command",
        "Verify a run, bundle or exported ledger (bytes, signatures, chains, epsilon); list what cannot be checked.",
    ),
    "audit": Command(
        "results:audit_command",
        "Attack a run: membership inference, and a lower bound on epsilon that may refute the stated one.",
    ),
    "presets": Command("lists:presets_command", "List the presets, or print one."),
    "methods": Command(
        "lists:methods_command",
        "List the methods, with the package that provides each and its keys in the table `method`.",
    ),
    "stages": Command(
        "lists:stages_command",
        "List the stages of every kind, with the package that provides each and the keys of its table.",
    ),
    "data": Command(
        "lists:data_command",
        "List the data sets with their terms; with a name, download what is missing, check it and show its digests.",
    ),
    "schema": Command(
        "lists:schema_command",
        "Draft the public schema of your tables from public samples, for you to read and correct.",
    ),
    "bench": Command(
        "benchmarks:bench_command",
        "Run a benchmark against its peers (from a checkout: benchmarks/ is not installed).",
    ),
    "reproduce": Command(
        "benchmarks:reproduce_command",
        "Reproduce a published table, run by run (from a checkout: reproduction/ is not installed).",
    ),
    "federation": Command(
        "federation:federation",
        "Create a federation between institutions, check a silo, run an experiment.",
    ),
    "status": Command(
        "operations:status_command",
        "Show the state of a party on this host: service, run and round, certificates, membership, budget.",
    ),
    "health": Command(
        "operations:health_command",
        "Exit with code 0 if the party serves, is connected and has valid certificates, otherwise 1 with the cause.",
    ),
    "deploy": Command(
        "operations:deploy", "Write files for service managers, containers, proxies, Flower, NVFlare."
    ),
    "coordinator": Command(
        "coordinator:coordinator",
        "Join a federation as its coordinator, accept its membership, serve.",
    ),
    "link": Command(
        "operations:link_command",
        "Serve the coordinator's link under its own user account, which holds the TLS key and no other key.",
    ),
    "silo": Command(
        "silo:silo",
        "Join a federation as a silo, accept its membership, serve; export the ledger.",
    ),
}


class _LazyGroup(TyperGroup):
    """The group of all commands; it lists them by their summaries, without importing them.

    Contexts and formatters are click's. Older versions of typer depend on click and newer ones contain it, so this
    module does not import click and annotates them as ``Any``.
    """

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = {name: TyperCommand(name, help=command.summary) for name, command in COMMANDS.items()}
        self._listing = False

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command; import it, unless the help only lists it."""
        if self._listing or cmd_name not in COMMANDS:
            return super().get_command(ctx, cmd_name)
        return COMMANDS[cmd_name].load(cmd_name)

    def invoke(self, ctx: Any) -> Any:
        """Run a command; turn Ctrl-C into an error that keeps the notes on how to resume, which typer would drop."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stop:
            raise Interrupted("; ".join(("interrupted", *getattr(stop, "__notes__", ())))) from None

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help, which lists the commands without importing them."""
        self._listing = True
        super().format_help(ctx, formatter)
        self._listing = False


app = typer.Typer(
    name="fedveil",
    cls=_LazyGroup,
    help="Federated learning over data that nobody may pool, with one honest privacy statement per run.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=True,
)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="print the version")] = False,
    log_level: Annotated[
        LogLevel, typer.Option(help="how much is logged to standard error")
    ] = LogLevel.WARNING,
    log_format: Annotated[
        LogFormat, typer.Option(help="lines for people, or one JSON object per line")
    ] = LogFormat.TEXT,
) -> None:
    show_log(log_level, log_format)
    if version:
        Terminal().print(__version__)
        raise typer.Exit


def main() -> None:
    """Run the command line; a user's mistake is one line on standard error, and a bug ends with exit code 70."""
    # Skip the garbage collection at the end of the process: with PyTorch it takes a second.
    atexit.register(gc.freeze)
    try:
        with name_user_code(_Misuse, typer.Abort):
            code = app(prog_name="fedveil", standalone_mode=False)
    except FedveilError as error:
        _print_error(str(error))
        code = error.exit_code
    except _Misuse as error:
        # A group without a command prints its help; its error then has no message.
        if message := " ".join(error.format_message().split()):
            command = error.ctx.command_path if error.ctx else "fedveil"
            _print_error(f"{message.rstrip('.')}; `{command} --help` says what it takes")
        code = error.exit_code
    except typer.Abort:
        _print_error("an answer was asked for, and the input ended")
        code = 1
    except MemoryError:
        # The exception's own text may contain array shapes, and so the number of records: do not print it.
        _print_error(
            "more memory is needed than there is: fewer users, silos or parameters, or another machine"
        )
        code = HostError.exit_code
    except OSError as error:
        code = _print_host_error(error)
    except Exception:
        code = _BUG
        traceback.print_exc()
    raise SystemExit(code or 0)


def _print_host_error(error: OSError) -> int:
    """Print an operating-system error that no command has turned into an error of its own; return the exit code."""
    if error.errno in _UNWRITABLE_DISK:
        _print_error(f"{error.filename or 'a file'} cannot be written: {error.strerror}")
    elif error.errno in HOST_FAULTS:
        _print_error(f"{error.filename or 'this host'}: {error.strerror}")
    elif isinstance(error, PermissionError) and error.filename:
        _print_error(f"{error.filename}: {error.strerror}; this command's user needs access to it")
        return FedveilError.exit_code
    else:
        traceback.print_exc()
        return _BUG
    return HostError.exit_code


def _print_error(message: str) -> None:
    """Print an error to standard error as text, or log it as JSON if ``--log-format json`` was chosen."""
    if log_choice()[1] is LogFormat.JSON:
        logging.getLogger("fedveil").critical("%s", message)
        return
    Terminal(stderr=True).print(f"fedveil: {message}", style="bold red", highlight=False)
