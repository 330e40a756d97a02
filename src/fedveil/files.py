"""Files: read within limits, replaced whole and durably, or not at all, and added to durably.

Claim: whatever stands in a file that is read here, in its place or under its name (a folder, a queue, a device), what
follows is a value or one error of this project that names the file: no document is read without end, none is nested or
numbered beyond what any of ours is, and what a reader makes of it fails with the same error (:func:`reading`).
``tests/test_files.py`` mutates every kind of file.
"""

from __future__ import annotations

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

from fedveil.errors import ConfigError, FedveilError, RunFolderError
from fedveil.sanitize import sanitize

LARGEST_DOCUMENT: Final = 1 << 26
"""Bytes of a document that is read at once: settings, a schema, a statement, a key."""

LARGEST_FILE: Final = 1 << 32
"""Bytes of any other file: a model, or lines of one run after another."""

CLOSED_IN_CHILDREN: Final = getattr(os, "O_CLOEXEC", 0)
"""Flag of a descriptor that no child process inherits; Windows passes none on by itself."""

_NEVER_WAITED_FOR: Final = (
    getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0) | getattr(os, "O_BINARY", 0)
)

DEEPEST: Final = 64
"""How far the tables and lists of a document may be nested; ours are below 16."""

_PART: Final = r"""(?:[A-Za-z0-9_-]++|"[^"\n]*+"|'[^'\n]*+')"""
_DEEP_KEY: Final = re.compile(
    rf"(?<![A-Za-z0-9_.-])(?<!\.[ \t]){_PART}(?:[ \t]*+\.[ \t]*+{_PART}){{{DEEPEST}}}"
)
"""A key of so many parts that reading it alone would take the square of its length."""

_BYTE_ORDER_MARK: Final = "\ufeff"
"""What some editors begin a UTF-8 file with."""

_LONGEST_INTEGER: Final = 128
_SHOWN: Final = 8
_GROWN: Final = 1 << 16
_MALFORMED: Final = (
    ValueError,  # with what is no UTF-8, no number, no document
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


def as_path(given: Any, what: str) -> Path:
    """Return a path that was given as text or as a path object.

    Args:
        given: the argument.
        what: names function and argument, for the error.

    Raises:
        ConfigError: it is neither.
    """
    if not isinstance(given, str | os.PathLike) or not isinstance(os.fspath(given), str):
        raise ConfigError(
            f"{what}: a path is needed, as text or as a pathlib.Path, not {type(given).__name__}"
        )
    return Path(given)


@contextmanager
def reading(place: object, error: type[FedveilError]) -> Iterator[None]:
    """Have everything that fails for what a file holds fail with one error, which names the file and no content.

    Args:
        place: what to call it: its path, mostly.
        error: its class.
    """
    try:
        yield
    except OSError as problem:
        known = "no such file" if isinstance(problem, FileNotFoundError) else problem.strerror
        raise error(f"{place} cannot be read: {known or type(problem).__name__}") from None
    except _MALFORMED as problem:
        raise error(f"{place} is damaged, or of another kind ({type(problem).__name__})") from None


@contextmanager
def writing(place: object, error: type[FedveilError], so: str = "") -> Iterator[None]:
    """Have what a disk refuses fail with one error, which names the file.

    Args:
        place: what to call it: its path, mostly.
        error: its class.
        so: what follows from it, as in "; nothing was sent".
    """
    try:
        yield
    except OSError as problem:
        why = problem.strerror or type(problem).__name__
        raise error(f"{place} cannot be written: {why}{so}") from None


def read_content(
    path: Path, error: type[FedveilError], *, largest: int = LARGEST_DOCUMENT, private: bool = False
) -> bytes:
    """Return the bytes of a regular file: all of them, also of one that grows meanwhile or has more than it says.

    Args:
        path: the file.
        error: the class of what is raised.
        largest: bytes beyond which it is not read.
        private: refuse a file that others than its owner may read.

    Raises:
        FedveilError: of class ``error``: missing, no file, too long, or open to others; names it.
    """
    with reading(path, error), _opened(path, error, largest) as stream:
        facts = os.fstat(stream.fileno())
        mode = stat.S_IMODE(facts.st_mode)
        if private and mode & 0o077:
            raise error(
                f"{path} has mode {mode:04o}, so others may have read it; make a new key, or chmod 600 it"
            )
        # room is made for as many bytes as are asked for: somewhat more than there are said to be
        parts, left, room = [], largest + 1, facts.st_size + _GROWN
        while left and (part := stream.read(min(left, room))):
            parts.append(part)
            left, room = left - len(part), _GROWN
        if not left:
            raise _too_long(path, error, largest)
        return b"".join(parts)


def check_file(path: Path, error: type[FedveilError]) -> None:
    """Return if there is a regular file that a library may open by its name: nothing that it would wait for.

    Raises:
        FedveilError: of class ``error``: missing, no file, or longer than any; names it.
    """
    with reading(path, error), _opened(path, error, LARGEST_FILE):
        pass


@contextmanager
def _opened(path: Path, error: type[FedveilError], largest: int) -> Iterator[BinaryIO]:
    descriptor = os.open(path, os.O_RDONLY | CLOSED_IN_CHILDREN | _NEVER_WAITED_FOR)
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
    """Return the text of a file, which must be UTF-8.

    Raises:
        FedveilError: of class ``error``, as :func:`read_content`, or another encoding: names the byte.
    """
    return as_text(read_content(path, error, largest=largest), path, error)


def as_text(content: bytes, place: object, error: type[FedveilError]) -> str:
    """Return the text of bytes.

    Raises:
        FedveilError: of class ``error``: they are not UTF-8.
    """
    try:
        return content.decode()
    except UnicodeDecodeError as problem:
        raise error(f"{place} is damaged: byte {problem.start} is not UTF-8 text") from None


def parse_toml(text: str, place: object, error: type[FedveilError]) -> dict[str, Any]:
    """Return the tables of a TOML document.

    Raises:
        FedveilError: of class ``error``: no TOML (names the line), nested too deep, or a number without end.
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
    """Read a TOML file; an unreadable one is a :class:`ConfigError` that names file and line."""
    return parse_toml(read_text(path, ConfigError), path, ConfigError)


def parse_json(content: bytes | str, place: object, error: type[FedveilError]) -> Any:
    """Return the value of a JSON document, in UTF-8 where it is bytes: no NaN, no infinity, no half character.

    Raises:
        FedveilError: of class ``error``: no JSON, a key that stands twice, nested too deep, or a number without end.
    """
    text = as_text(content, place, error) if isinstance(content, bytes) else content

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise error(
                f"{place} is damaged: a key stands twice in one object, and readers differ in which holds"
            )
        return found

    with reading(place, error):
        try:
            value = json.loads(text, parse_constant=_no_number, object_pairs_hook=once)
        except json.JSONDecodeError as problem:
            raise error(f"{place} is damaged: it is not valid JSON ({problem})") from None
        _check(value, place, error, finite=True)
        return value


def read_json(path: Path, error: type[FedveilError]) -> Any:
    """Return the JSON document of a file; fails as :func:`read_text` and :func:`parse_json` do."""
    return parse_json(read_text(path, error), path, error)


def check_schema_version(value: object, place: object, version: int) -> dict[str, Any]:
    """Return what a document holds: an object of this schema version.

    Raises:
        RunFolderError: it holds something else; names the place.
    """
    if not isinstance(value, dict):
        raise RunFolderError(f"{place} is damaged: it should hold a JSON object")
    if value.get("schema_version") != version:
        raise RunFolderError(
            f"{place} has schema_version {value.get('schema_version')!r}, but this version of fedveil reads "
            f"{version}: read it with the version of fedveil that wrote it (environment.json names it)"
        )
    return value


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no JSON")


def _check(document: Any, place: object, error: type[FedveilError], *, finite: bool = False) -> None:
    """Return if a document is nested, numbered and spelt as one of ours may be."""
    level: list[Any] = [document]
    for _ in range(DEEPEST):
        inner: list[Any] = []
        for value in level:
            if isinstance(value, str):  # most of them
                value.encode()
            elif isinstance(value, dict):
                inner += [*value.keys(), *value.values()]
            elif isinstance(value, list):
                inner += value
            elif isinstance(value, int) and value.bit_length() > _LONGEST_INTEGER:
                raise error(f"{place} is damaged: a whole number has {value.bit_length()} bits")
            elif isinstance(value, float) and finite and not math.isfinite(value):
                raise error(f"{place} is damaged: a number is infinite")
        level = inner
        if not level:
            return
    raise _too_deep(place, error)


def _too_deep(place: object, error: type[FedveilError]) -> FedveilError:
    return error(f"{place} is damaged: tables or lists are nested more than {DEEPEST} deep")


def replace_file(target: Path, content: bytes, *, mode: int = 0o644) -> None:
    """Replace a file by writing a temporary neighbour, flushing it to the disk and renaming it.

    Readers see the old or the new content, never half of one; after the return the new one survives a crash. The
    neighbour is always a new file: what lay in its place, from a crash or by another user of a folder that is shared,
    is neither followed nor written to, and nobody else holds what is written open.

    Args:
        target: the file.
        content: what it shall hold.
        mode: permissions, before the umask.

    Raises:
        OSError: it could not be written; the old content is as it was.
    """
    temporary = target.with_name(f".{target.name}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, target)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(target.parent)


def append_file(target: Path, content: bytes, *, flush: bool = True) -> None:
    """Add to the end of a file by its name, as :func:`append` does; a file that it makes keeps its name too.

    Raises:
        OSError: it could not be written.
    """
    exists = target.exists()
    with target.open("ab", buffering=0) as stream:
        append(stream.fileno(), content, flush=flush)
    if not exists:
        sync_folder(target.parent)


def append(descriptor: int, content: bytes, *, flush: bool = True) -> None:
    """Add to the end of a file, which ends as before where that fails.

    Claim: after the return the file is what it was and the content, and survives a crash of the host. After an error
    (a full disk) it is what it was, in this process and for whoever reads it. After a crash of the host before the
    return, or after an error, or where not even taking back succeeds, it is what it was and any part of the content:
    readers of lines take a last one without its end for none.

    Conditions: nobody else writes the file, and the disk keeps what was fsynced.

    Args:
        descriptor: of the file, opened for appending.
        content: what is added.
        flush: False leaves it to the system when the content reaches the disk: it survives the end of this process, and
            whoever needs more flushes the file before it acts on that.

    Raises:
        OSError: it could not be written.
    """
    length = os.fstat(descriptor).st_size
    try:
        left = memoryview(content)
        while left:
            left = left[os.write(descriptor, left) :]
        if flush:
            os.fsync(descriptor)
    except OSError:
        with suppress(OSError):
            os.ftruncate(descriptor, length)
        raise


def folders_with(folder: Path, *names: str) -> str:
    """Return the end of an error about a folder that lacks a file: which folders in it have one, empty where none has.

    Args:
        folder: what was asked for.
        names: of files, one of which would do.
    """
    found = sorted({path.parent.name for name in names for path in folder.glob(f"*/{name}")})
    more = ", ..." if len(found) > _SHOWN else ""
    return f"; folders in it that have one: {sanitize(', '.join(found[:_SHOWN]))}{more}" if found else ""


def sync_folder(path: Path) -> None:
    """Flush a folder's names to the disk; Windows opens no folder, and keeps names in its journal."""
    if os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
