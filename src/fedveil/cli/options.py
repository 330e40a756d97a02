"""Options and arguments that several commands have in common, and the passphrase of a key file.

A passphrase is read from a descriptor, a credential of the service manager, or the terminal. It is never an argument
or an environment variable: other users of a host can read those. ``CREDENTIALS_DIRECTORY`` is the folder that
systemd's ``LoadCredential=`` or a container's secrets give to a service; the file ``passphrase`` in it is read.
"""

from __future__ import annotations

import getpass
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cached_property, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, get_type_hints

import typer

from fedveil.console import Terminal, print_json, rows_table
from fedveil.errors import ConfigError
from fedveil.files import read_content, writing

if TYPE_CHECKING:
    from fedveil.api.frame import Frame
    from fedveil.privacy.statement import Statement
    from fedveil.run.executors import Workers
    from fedveil.statistics.figures import Row


OUT: Final = Terminal()
"""Console that commands print to."""

Json = Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")]
Csv = Annotated[
    Path | None, typer.Option("--csv", metavar="FILE", help="write all rows into a CSV file, besides")
]
Source = Annotated[str, typer.Argument(metavar="PRESET_OR_TOML", help="a preset's name or a TOML file")]
Listed = Annotated[
    bool, typer.Option("--transcript", help="list every message of the protocol (transcript.jsonl)")
]
Code = Annotated[
    list[str] | None,
    typer.Option("--code", help="package.module:name that the run folder names: says that its code may run"),
]
MOST_SEEDS: Final = 10_000
"""Runs of one variant that one command makes."""

Runs = Annotated[Path, typer.Option("--runs", help="folder in which run folders are created")]


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """The options that say who plays the runs of a command."""

    processes: Annotated[int, typer.Option(min=1, help="runs at a time, each in its own process")] = 1
    executor: Annotated[
        str | None,
        typer.Option(
            "--executor",
            help="instead: workers of a cluster that shares the folders: dask:ADDRESS, parsl:FILE.py, ray:ADDRESS, or "
            "your own package.module:function",
        ),
    ] = None

    @property
    def is_this_process(self) -> bool:
        """Return whether neither other processes nor a cluster were requested."""
        return self.processes == 1 and self.executor is None

    def open(self) -> AbstractContextManager[Workers]:
        """Return the workers, which start when the context is entered.

        Raises:
            ConfigError: no such executor, or it cannot be reached.
        """
        from fedveil.run.executors import local_workers, open_workers

        return local_workers(self.processes) if self.executor is None else open_workers(self.executor)


def group(help: str) -> typer.Typer:
    """Return a command that has commands of its own."""
    return typer.Typer(help=help, no_args_is_help=True, add_completion=False)


def read_address(option: str, given: str) -> tuple[str, int]:
    """Return host and port of an address such as ``0.0.0.0:9443`` or ``[::]:9443``.

    Raises:
        ConfigError: it is none; names the option.
    """
    host, _, port = given.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal():
        raise ConfigError(f"{option} {given}: HOST:PORT is needed, such as 127.0.0.1:9444")
    return host, int(port)


def print_result(as_json: bool, document: Mapping[str, Any], *told: object) -> None:
    """Print a result as one JSON object, or in lines and tables for people."""
    print_json(document) if as_json else OUT.print(*told, sep="\n")


Figures = Annotated[
    Path | None,
    typer.Option("--figures", metavar="FOLDER", help="also write every plot as a file into a folder"),
]
FigureFormats = Annotated[
    str,
    typer.Option("--figure-formats", help="some of svg, pdf (needs the extra figures) and csv"),
]


def print_tables(found: Frame) -> None:
    """Print the tables of a result, each with its heading."""
    for title, rows in found.tables:
        OUT.print(rows_table(rows, title=title))


def check_writable(option: str, path: Path | None) -> None:
    """Refuse a file that cannot be written, before anything is charged or computed.

    The file is opened to append, so that the operating system decides (permissions, names, read-only volumes, full
    quotas); one that did not exist is removed again. Pipes and devices are not opened.

    Raises:
        ConfigError: names the option, the file and the reason.
    """
    # os.path answers False where a name is too long, and pathlib raises.
    new = path is not None and not os.path.lexists(path)
    if path is None or not (new or os.path.isfile(path) or os.path.isdir(path)):
        return
    with writing(f"{option} {path}", ConfigError), open(path, "ab"):
        pass
    if new:
        path.unlink()


def print_frame(found: Frame, as_json: bool) -> None:
    """Print a result of the Python interface as one JSON object, or as a table with its sentences."""
    if as_json:
        print_json(found.to_json())
        return
    print_tables(found)
    for line in found.lines:
        OUT.print(line, highlight=False)


def expand_option_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command whose parameters that are dataclasses of options are given option by option."""
    groups: dict[str, type[Any]] = {}
    spelt_out: list[inspect.Parameter] = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        kind = parameter.annotation
        if is_dataclass(kind) and isinstance(kind, type):
            groups[parameter.name] = kind
            hints = get_type_hints(kind, include_extras=True)
            spelt_out += [
                inspect.Parameter(
                    option.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    annotation=hints[option.name],
                    default=inspect.Parameter.empty if option.default is MISSING else option.default,
                )
                for option in fields(kind)
            ]
        else:
            spelt_out.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @wraps(command)
    def run(**given: Any) -> None:
        whole = {
            name: kind(**{option.name: given.pop(option.name) for option in fields(kind)})
            for name, kind in groups.items()
        }
        command(**given, **whole)

    run.__signature__ = inspect.Signature(spelt_out)  # type: ignore[attr-defined]
    return run


# --- figures ------------------------------------------------------------------------------------------------
# How figures of releases are printed (estimate, interval, and where its width comes from), and a statement.


def print_statement(statement: Statement) -> None:
    """Print the sentences of a statement, the claim first."""
    for sentence in statement.sentences():
        OUT.print(sentence, highlight=False, soft_wrap=not OUT.is_terminal)


def print_rows(found: Sequence[Row], here: bool = False) -> None:
    """Print a table of figures.

    Args:
        found: the figures.
        here: whether intervals are for these people alone, without the spread of a population.
    """
    from fedveil.api.releases import figure_frame

    print_tables(figure_frame(found, these_people=here))


# --- passphrases ---

Descriptor = Annotated[
    int | None,
    typer.Option("--passphrase-fd", min=0, help="read the passphrase from this open file descriptor"),
]
_LONGEST: Final = 4096
_SHORTEST: Final = 12


class PromptedPassphrase:
    """Gives a passphrase, asked for once, and not before it is needed.

    Args:
        descriptor: to read it from.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self._descriptor = descriptor

    def __call__(self) -> bytes:
        """Return it.

        Raises:
            ConfigError: there is nowhere to ask.
        """
        return self._found

    @cached_property
    def _found(self) -> bytes:
        credentials = os.environ.get("CREDENTIALS_DIRECTORY")
        if self._descriptor is not None:
            try:
                with os.fdopen(
                    self._descriptor, "rb", closefd=False
                ) as stream:  # to its end: a pipe gives pieces
                    found = stream.read(_LONGEST + 1)
            except OSError as error:
                raise ConfigError(
                    f"--passphrase-fd {self._descriptor}: cannot be read: {error.strerror}"
                ) from None
        elif credentials is not None and (Path(credentials) / "passphrase").exists():
            found = read_content(Path(credentials) / "passphrase", ConfigError, largest=_LONGEST)
        elif sys.stdin.isatty():
            found = getpass.getpass("passphrase: ").encode()
        else:
            raise ConfigError("a passphrase is needed: give --passphrase-fd, a credential, or a terminal")
        if len(found) > _LONGEST:
            raise ConfigError(f"a passphrase has at most {_LONGEST} bytes")
        return found.rstrip(b"\r\n")

    def choose_new(self) -> bytes:
        """Return the passphrase for a new key's file.

        Raises:
            ConfigError: too short, or typed in differently twice.
        """
        found = self()
        if len(found) < _SHORTEST:
            raise ConfigError(f"a passphrase has at least {_SHORTEST} characters; take five random words")
        if self._descriptor is None and sys.stdin.isatty() and getpass.getpass("again: ").encode() != found:
            raise ConfigError("the two passphrases differ")
        return found


@dataclass(frozen=True, kw_only=True)
class NewKey:
    """The options by which the file of a new key is protected."""

    descriptor: Descriptor = None
    unprotected: Annotated[
        bool, typer.Option("--no-passphrase", help="protect the key's file by its mode alone")
    ] = False

    def passphrase(self) -> bytes | None:
        """Return the passphrase of the file; None where its mode alone shall protect it.

        Raises:
            ConfigError: too short, or typed in differently twice.
        """
        return None if self.unprotected else PromptedPassphrase(self.descriptor).choose_new()
