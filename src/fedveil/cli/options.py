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
TranscriptOption = Annotated[
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
    """Options that choose the processes or cluster workers that compute a command's runs."""

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
    """Return a Typer application whose commands are subcommands."""
    return typer.Typer(help=help, no_args_is_help=True, add_completion=False)


def read_address(option: str, address: str) -> tuple[str, int]:
    """Return host and port of an address such as ``0.0.0.0:9443`` or ``[::]:9443``.

    Raises:
        ConfigError: the text is no address; the error names the option.
    """
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal():
        raise ConfigError(f"{option} {address}: HOST:PORT is needed, such as 127.0.0.1:9444")
    return host, int(port)


def print_result(as_json: bool, document: Mapping[str, Any], *lines: object) -> None:
    """Print a result as one JSON object, or in lines and tables for people."""
    print_json(document) if as_json else OUT.print(*lines, sep="\n")


Figures = Annotated[
    Path | None,
    typer.Option("--figures", metavar="FOLDER", help="also write every plot as a file into a folder"),
]
FigureFormats = Annotated[
    str,
    typer.Option("--figure-formats", help="some of svg, pdf (needs the extra figures) and csv"),
]


def print_tables(frame: Frame) -> None:
    """Print the tables of a result, each with its heading."""
    for title, rows in frame.tables:
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


def print_frame(frame: Frame, as_json: bool) -> None:
    """Print a result of the Python interface as one JSON object, or as a table with its sentences."""
    if as_json:
        print_json(frame.to_json())
        return
    print_tables(frame)
    for line in frame.lines:
        OUT.print(line, highlight=False)


def expand_option_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with a separate keyword parameter for every field of its dataclass parameters.

    Typer reads the new signature, so each field becomes an option of the command line.
    """
    groups: dict[str, type[Any]] = {}
    expanded: list[inspect.Parameter] = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        kind = parameter.annotation
        if is_dataclass(kind) and isinstance(kind, type):
            groups[parameter.name] = kind
            hints = get_type_hints(kind, include_extras=True)
            expanded += [
                inspect.Parameter(
                    option.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    annotation=hints[option.name],
                    default=inspect.Parameter.empty if option.default is MISSING else option.default,
                )
                for option in fields(kind)
            ]
        else:
            expanded.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @wraps(command)
    def run(**options: Any) -> None:
        grouped = {
            name: kind(**{option.name: options.pop(option.name) for option in fields(kind)})
            for name, kind in groups.items()
        }
        command(**options, **grouped)

    run.__signature__ = inspect.Signature(expanded)  # type: ignore[attr-defined]
    return run


# --- figures ------------------------------------------------------------------------------------------------
# How figures of releases are printed (estimate, interval, and where its width comes from), and a statement.


def print_statement(statement: Statement) -> None:
    """Print the sentences of a statement, the claim first."""
    for sentence in statement.sentences():
        OUT.print(sentence, highlight=False, soft_wrap=not OUT.is_terminal)


def print_rows(rows: Sequence[Row], these_people_only: bool = False) -> None:
    """Print a table of figures.

    Args:
        rows: the figures.
        these_people_only: whether intervals describe the people in the data alone, without sampling from a population.
    """
    from fedveil.api.releases import figure_frame

    print_tables(figure_frame(rows, these_people=these_people_only))


# --- passphrases ---

Descriptor = Annotated[
    int | None,
    typer.Option("--passphrase-fd", min=0, help="read the passphrase from this open file descriptor"),
]
_LONGEST: Final = 4096
_SHORTEST: Final = 12


class PromptedPassphrase:
    """Passphrase that is read at its first use and then cached.

    Args:
        descriptor: file descriptor to read the passphrase from; None: a credential of the service manager, else the
            terminal.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self._descriptor = descriptor

    def __call__(self) -> bytes:
        """Return the passphrase.

        Raises:
            ConfigError: there is no descriptor, credential or terminal to read it from, or it is too long.
        """
        return self._passphrase

    @cached_property
    def _passphrase(self) -> bytes:
        credentials = os.environ.get("CREDENTIALS_DIRECTORY")
        if self._descriptor is not None:
            try:
                with os.fdopen(
                    self._descriptor, "rb", closefd=False
                ) as stream:  # to its end: a pipe gives pieces
                    passphrase = stream.read(_LONGEST + 1)
            except OSError as error:
                raise ConfigError(
                    f"--passphrase-fd {self._descriptor}: cannot be read: {error.strerror}"
                ) from None
        elif credentials is not None and (Path(credentials) / "passphrase").exists():
            passphrase = read_content(Path(credentials) / "passphrase", ConfigError, largest=_LONGEST)
        elif sys.stdin.isatty():
            passphrase = getpass.getpass("passphrase: ").encode()
        else:
            raise ConfigError("a passphrase is needed: give --passphrase-fd, a credential, or a terminal")
        if len(passphrase) > _LONGEST:
            raise ConfigError(f"a passphrase has at most {_LONGEST} bytes")
        return passphrase.rstrip(b"\r\n")

    def choose_new(self) -> bytes:
        """Return the passphrase for a new key's file; on a terminal it is entered twice.

        Raises:
            ConfigError: the passphrase is too short, or the two entries differ.
        """
        passphrase = self()
        if len(passphrase) < _SHORTEST:
            raise ConfigError(f"a passphrase has at least {_SHORTEST} characters; take five random words")
        if (
            self._descriptor is None
            and sys.stdin.isatty()
            and getpass.getpass("again: ").encode() != passphrase
        ):
            raise ConfigError("the two passphrases differ")
        return passphrase


@dataclass(frozen=True, kw_only=True)
class NewKey:
    """Options that choose how the file of a new key is protected."""

    descriptor: Descriptor = None
    unprotected: Annotated[
        bool, typer.Option("--no-passphrase", help="protect the key's file by its mode alone")
    ] = False

    def passphrase(self) -> bytes | None:
        """Return the passphrase of the file; None if only the file's permissions protect it.

        Raises:
            ConfigError: the passphrase is too short, or the two entries differ.
        """
        return None if self.unprotected else PromptedPassphrase(self.descriptor).choose_new()
