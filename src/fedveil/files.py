"""Read files within limits; replace and append files so that a crash leaves no half-written content.

Claim: for any file content, and for any object under the file's name (a folder, a queue, a device), reading yields a
value or one fedveil error that names the file. No read is unbounded. No document is nested deeper, and no number is
longer, than in files that fedveil writes. Errors while decoding become the same error (:func:`reading`).
``tests/test_files.py`` mutates every kind of file.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
import struct
import tomllib
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Final

from fedveil.errors import ConfigError, FedveilError, HostError, RunFolderError
from fedveil.sanitize import sanitize

LARGEST_DOCUMENT: Final = 1 << 26
"""Most bytes of a document that is read at once: settings, a schema, a statement, a key."""

LARGEST_FILE: Final = 1 << 32
"""Most bytes of any other file: a model, or the lines of one run."""

CLOSED_IN_CHILDREN: Final = getattr(os, "O_CLOEXEC", 0)
"""Flag for a descriptor that no child process inherits; 0 on Windows, which passes none on."""

# O_NONBLOCK: opening a named pipe without a writer would block forever. O_NOCTTY: opening a terminal device would
# make it the controlling terminal. O_BINARY: Windows would translate line ends.
_NEVER_WAITED_FOR: Final = (
    getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0) | getattr(os, "O_BINARY", 0)
)

HOST_FAULTS: Final = tuple(
    getattr(errno, name)
    for name in ("ENOSPC", "EDQUOT", "EROFS", "EIO", "EMFILE", "ENFILE", "ENOMEM", "ENOBUFS", "EAGAIN")
    if hasattr(errno, name)
)
"""Errors that say nothing about a file: there is no room, no descriptor, no memory, no process, or the disk fails."""

DEEPEST: Final = 64
"""Deepest nesting of tables and lists in a document that is read; documents of fedveil stay below 16."""

_PART: Final = r"""(?:[A-Za-z0-9_-]++|"[^"\n]*+"|'[^'\n]*+')"""
_DEEP_KEY: Final = re.compile(
    rf"(?<![A-Za-z0-9_.-])(?<!\.[ \t]){_PART}(?:[ \t]*+\.[ \t]*+{_PART}){{{DEEPEST}}}"
)
"""Dotted TOML key of more than ``DEEPEST`` parts; ``tomllib`` reads one in quadratic time."""

_BYTE_ORDER_MARK: Final = "\ufeff"
"""Character with which some editors begin a UTF-8 file."""

_LONGEST_INTEGER: Final = 128
_SHOWN: Final = 8
_GROWN: Final = 1 << 16
_MALFORMED: Final = (
    # Every error that a decoder (struct, zlib, json, tomllib, numpy) may raise for damaged content. MemoryError: a
    # damaged length field asks for more memory than the host has.
    ValueError,  # includes the errors of UTF-8, JSON and TOML decoding
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    NotImplementedError,
    EOFError,
    MemoryError,
    struct.error,
    zlib.error,
)


def as_path(path: Any, argument: str) -> Path:
    """Return a path argument as a :class:`~pathlib.Path`.

    Args:
        path: the argument: text or a path object.
        argument: function and argument, for the error.

    Raises:
        ConfigError: neither text nor a path object.
    """
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str):
        raise ConfigError(
            f"{argument}: a path is needed, as text or as a pathlib.Path, not {type(path).__name__}"
        )
    return Path(path)


@contextmanager
def reading(place: object, error: type[FedveilError]) -> Iterator[None]:
    """Turn every error from a file's content into one error that names the file and shows no content.

    Args:
        place: name of the file in the error, mostly its path.
        error: class of the error.
    """
    try:
        yield
    # "from None": the cause of the error may quote the file's content, which may be private.
    except OSError as problem:
        reason = "no such file" if isinstance(problem, FileNotFoundError) else problem.strerror
        raise with_host_code(
            problem, error(f"{place} cannot be read: {reason or type(problem).__name__}")
        ) from None
    except _MALFORMED as problem:
        raise error(f"{place} is damaged, or of another kind ({type(problem).__name__})") from None


@contextmanager
def writing(place: object, error: type[FedveilError], so: str = "") -> Iterator[None]:
    """Turn every error of the file system into one error that names the file.

    Args:
        place: name of the file in the error, mostly its path.
        error: class of the error.
        so: consequence, appended to the message, as in "; nothing was sent".
    """
    try:
        yield
    except OSError as problem:
        why = problem.strerror or type(problem).__name__
        raise with_host_code(problem, error(f"{place} cannot be written: {why}{so}")) from None


def with_host_code(problem: OSError, failed: FedveilError) -> FedveilError:
    """Give an error the exit code of a host's fault where it is one, so that a service manager tries again."""
    if problem.errno in HOST_FAULTS:
        failed.exit_code = HostError.exit_code
    return failed


def read_content(
    path: Path, error: type[FedveilError], *, largest: int = LARGEST_DOCUMENT, private: bool = False
) -> bytes:
    """Return all bytes of a regular file, also of one that grows meanwhile or reports a wrong size.

    Args:
        path: the file.
        error: class of the error.
        largest: most bytes of a file that is read.
        private: refuse a file that other users may read.

    Raises:
        FedveilError: of class ``error``: the file is missing, no regular file, too long, or open to others.
    """
    with reading(path, error), _opened(path, error, largest) as stream:
        facts = os.fstat(stream.fileno())
        mode = stat.S_IMODE(facts.st_mode)
        if private and mode & 0o077:
            raise error(
                f"{path} has mode {mode:04o}, so others may have read it; make a new key, or chmod 600 it"
            )
        # BinaryIO.read(n) allocates n bytes in advance. So this asks for slightly more than the reported size, not
        # for ``largest``, and reads on if the file has grown.
        parts, remaining, room = [], largest + 1, facts.st_size + _GROWN
        while remaining and (part := stream.read(min(remaining, room))):
            parts.append(part)
            remaining, room = remaining - len(part), _GROWN
        if not remaining:
            raise _too_long(path, error, largest)
        return b"".join(parts)


def check_file(path: Path, error: type[FedveilError]) -> None:
    """Check that a path is a regular file within the size limit, so that a library may open it.

    Raises:
        FedveilError: of class ``error``: missing, no regular file, or too long; names the file.
    """
    with reading(path, error), _opened(path, error, LARGEST_FILE):
        pass


@contextmanager
def _opened(path: Path, error: type[FedveilError], largest: int) -> Iterator[BinaryIO]:
    descriptor = os.open(path, os.O_RDONLY | CLOSED_IN_CHILDREN | _NEVER_WAITED_FOR)
    # The type is checked on the open descriptor, not on the path, so that nobody can exchange the file in between.
    facts = os.fstat(descriptor)
    if not stat.S_ISREG(facts.st_mode):
        os.close(descriptor)
        raise error(f"{path} is no file")
    with os.fdopen(descriptor, "rb") as stream:
        if facts.st_size > largest:
            raise _too_long(path, error, largest)
        yield stream


def _too_long(path: Path, error: type[FedveilError], largest: int) -> FedveilError:
    return error(f"{path} has more than {largest} bytes, the most that is read of such a file")


def read_text(path: Path, error: type[FedveilError], *, largest: int = LARGEST_DOCUMENT) -> str:
    """Return the text of a UTF-8 file.

    Raises:
        FedveilError: of class ``error``, as :func:`read_content`, or another encoding: names the byte.
    """
    return as_text(read_content(path, error, largest=largest), path, error)


def as_text(content: bytes, place: object, error: type[FedveilError]) -> str:
    """Decode UTF-8 bytes.

    Raises:
        FedveilError: of class ``error``: the bytes are not UTF-8.
    """
    try:
        return content.decode()
    except UnicodeDecodeError as problem:
        raise error(f"{place} is damaged: byte {problem.start} is not UTF-8 text") from None


def parse_toml(text: str, place: object, error: type[FedveilError]) -> dict[str, Any]:
    """Parse a TOML document.

    Raises:
        FedveilError: of class ``error``: no TOML (names the line), too deeply nested, or a number with too many
            digits.
    """
    with reading(place, error):
        if _DEEP_KEY.search(text):
            raise _too_deep(place, error)
        try:
            document = tomllib.loads(text.removeprefix(_BYTE_ORDER_MARK))
        except tomllib.TOMLDecodeError as problem:
            raise error(f"{place}: not a TOML document: {problem}") from None
        _check(document, place, error)
        return document


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file; an unreadable one raises :class:`ConfigError` with file and line."""
    return parse_toml(read_text(path, ConfigError), path, ConfigError)


def parse_json(content: bytes | str, place: object, error: type[FedveilError]) -> Any:
    """Parse a JSON document, in UTF-8 if it is bytes; refuses NaN, infinities and lone surrogates.

    Raises:
        FedveilError: of class ``error``: no JSON, a duplicate key, too deeply nested, or a number with too many
            digits.
    """
    text = as_text(content, place, error) if isinstance(content, bytes) else content

    # Parsers differ in which of two equal keys they keep, so a signed document with a duplicate key could mean two
    # things.
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries = dict(pairs)
        if len(entries) != len(pairs):
            raise error(
                f"{place} is damaged: a key occurs twice in one object, and JSON readers differ in "
                "which value they take"
            )
        return entries

    with reading(place, error):
        try:
            value = json.loads(text, parse_constant=_no_number, object_pairs_hook=once)
        except json.JSONDecodeError as problem:
            raise error(f"{place} is damaged: it is not valid JSON ({problem})") from None
        _check(value, place, error, finite=True)
        return value


def read_json(path: Path, error: type[FedveilError]) -> Any:
    """Read the JSON document of a file; raises as :func:`read_text` and :func:`parse_json` do."""
    return parse_json(read_text(path, error), path, error)


def check_schema_version(value: object, place: object, *versions: int) -> dict[str, Any]:
    """Check that a document is an object of one of these schema versions, and return it.

    Raises:
        RunFolderError: no object, or another version; names the place.
    """
    if not isinstance(value, dict):
        raise RunFolderError(f"{place} is damaged: it should hold a JSON object")
    if value.get("schema_version") not in versions:
        raise RunFolderError(
            f"{place} has schema_version {value.get('schema_version')!r}, but this version of fedveil reads "
            f"{' and '.join(map(str, versions))}: read it with the version of fedveil that wrote it (environment.json "
            "names it)"
        )
    return value


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no JSON")


def _check(document: Any, location: object, error: type[FedveilError], *, finite: bool = False) -> None:
    """Check a document's nesting depth, numbers and text, level by level without recursion."""
    level: list[Any] = [document]
    for _ in range(DEEPEST):
        inner: list[Any] = []
        for value in level:
            if isinstance(value, str):  # most of them
                # raises UnicodeEncodeError (a ValueError) for a lone surrogate, which JSON can spell but UTF-8 cannot
                value.encode()
            elif isinstance(value, dict):
                inner += [*value.keys(), *value.values()]
            elif isinstance(value, list):
                inner += value
            elif isinstance(value, int) and value.bit_length() > _LONGEST_INTEGER:
                raise error(f"{location} is damaged: a whole number has {value.bit_length()} bits")
            elif isinstance(value, float) and finite and not math.isfinite(value):
                raise error(f"{location} is damaged: a number is infinite")
        level = inner
        if not level:
            return
    raise _too_deep(location, error)


def _too_deep(location: object, error: type[FedveilError]) -> FedveilError:
    return error(f"{location} is damaged: tables or lists are nested more than {DEEPEST} deep")


def replace_file(target: Path, content: bytes, *, mode: int = 0o644) -> None:
    """Replace a file atomically: write a temporary file next to it, flush it to the disk, and rename it.

    Readers see the old or the new content, never a mixture. After the return, the new content survives a crash. The
    temporary file is always created anew (O_EXCL). A file that lies under its name after a crash, or that another
    user of a shared folder placed there, is removed. It is neither followed as a link nor written to, and no other
    process holds the new file open.

    Args:
        target: the file.
        content: its new content.
        mode: permissions, before the umask.

    Raises:
        OSError: the file could not be written; the old content is unchanged.
    """
    temporary = target.with_name(f".{target.name}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
            stream.flush()
            # before the rename: otherwise a crash could leave the new name with an empty file
            os.fsync(stream.fileno())
        os.replace(temporary, target)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    # The rename itself is durable only after the folder is flushed.
    sync_folder(target.parent)


def append(descriptor: int, content: bytes, *, flush: bool = True) -> None:
    """Append to an open file; after an error, the file ends as before.

    Claim: after the return, the file is the old content plus ``content``, and this survives a crash of the host.
    After an error (a full disk), the file has its old content, in this process and for every reader. In three cases
    the file may be the old content plus any part of ``content``: a crash of the host before the return, a crash after
    an error, or an error whose truncation fails as well. Readers of lines therefore ignore a last line without its
    end.

    Conditions: no other process writes the file, and the disk keeps flushed data.

    Args:
        descriptor: the file, opened for appending.
        content: the bytes to append.
        flush: False leaves the time of the write to the operating system. The content then survives the end of this
            process only; a caller that needs more flushes the file before it acts on the content.

    Raises:
        OSError: the file could not be written.
    """
    length = os.fstat(descriptor).st_size
    try:
        remaining = memoryview(content)
        while remaining:
            # os.write may write fewer bytes than given, for example on a nearly full disk
            remaining = remaining[os.write(descriptor, remaining) :]
        if flush:
            os.fsync(descriptor)
    except OSError:
        with suppress(OSError):
            os.ftruncate(descriptor, length)
        raise


def folders_with(folder: Path, *names: str) -> str:
    """Return the end of an error about a folder without a file: its subfolders that have the file.

    Args:
        folder: the folder that was given.
        names: file names, any of which would do.
    """
    folders = sorted({path.parent.name for name in names for path in folder.glob(f"*/{name}")})
    more = ", ..." if len(folders) > _SHOWN else ""
    return f"; folders in it that have one: {sanitize(', '.join(folders[:_SHOWN]))}{more}" if folders else ""


def sync_folder(path: Path) -> None:
    """Flush a folder's entries to the disk; does nothing on Windows, which journals names itself."""
    if os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
