"""Append-only files of lines, with one rule for a last line that a crash tore.

Rule: a line counts from its newline on. Bytes after the last newline are a torn line. :meth:`LineLog.append` had not
returned when they were written, so nothing that needs the line on disk has happened. Readers leave a torn line out,
and the next append cuts it off. Readers that accept no file in the middle of a write (an audit, a budget) refuse it.

The ledger, the lines of a run folder, the known ledger heads, the marks of answers and the charges of a budget are
such files.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import portalocker
from portalocker import LockFlags

from fedveil.errors import RunFolderError
from fedveil.files import (
    CLOSED_IN_CHILDREN,
    LARGEST_FILE,
    append,
    check_file,
    read_content,
    replace_file,
    sync_folder,
)

_SHARED_SECONDS: Final = 0.5


class Lines(NamedTuple):
    """Content of a file of lines.

    Attributes:
        complete: the lines that end in a newline, without it.
        torn: the bytes after the last newline; empty if no line is torn.
    """

    complete: list[bytes]
    torn: bytes


def split_lines(content: bytes) -> Lines:
    """Split the content of a file of lines."""
    *complete, torn = content.split(b"\n")
    return Lines(complete, torn)


class LineLog:
    """Append-only file of lines.

    Claim: after :meth:`append` returns, all lines are on disk and complete. After an error or a crash, the lines from
    before are complete; of the new ones a prefix may be there, and its last line may be torn.

    Conditions: no other process writes the file (:meth:`lock`), and the disk keeps flushed data. A locked file that was
    removed or replaced takes no further line.

    Args:
        path: the file; the first append creates it. The folder must exist.
        mode: permissions of a new file, before the umask.
    """

    def __init__(self, path: Path, *, mode: int = 0o644) -> None:
        self.path = path
        self._mode = mode
        self._held = -1

    def lock(self, *, wait: bool = False) -> None:
        """Open the file, create it if it is missing, and keep all other processes out until :meth:`close`.

        Args:
            wait: wait for the lock instead of raising an error.

        Raises:
            RunFolderError: the path is no regular file, or another process holds the lock.
            OSError: the file cannot be opened.
        """
        if exists := self.path.exists():
            check_file(self.path, RunFolderError)
        descriptor = self._open()
        try:
            # A new name must survive a crash as well as the file; otherwise its first lines vanish with it.
            if not exists:
                sync_folder(self.path.parent)
            _lock(descriptor, wait)
        except portalocker.LockException as error:
            os.close(descriptor)
            raise RunFolderError(
                f"{self.path}: another process is writing this file; wait for it, or stop it, before running again"
            ) from error
        except OSError:
            os.close(descriptor)
            raise
        self._held = descriptor

    @property
    def is_locked(self) -> bool:
        """Return whether this object holds the lock."""
        return self._held >= 0

    def close(self) -> None:
        """Release the lock; closing twice is harmless."""
        if self.is_locked:
            os.close(self._held)
            self._held = -1

    def content(self) -> bytes:
        """Return all bytes; none if the file is missing.

        Raises:
            RunFolderError: the file cannot be read.
        """
        if self.is_locked:  # of the locked file itself, whatever its name denotes by now
            return _content(self._held)
        return read_content(self.path, RunFolderError, largest=LARGEST_FILE) if self.path.exists() else b""

    def read(self) -> Lines:
        """Return all lines; raises as :meth:`content` does."""
        return split_lines(self.content())

    def append(self, *lines: bytes, flush: bool = True) -> None:
        """Cut off a torn line, and append lines in one write; return when they are on disk.

        Args:
            lines: lines without their newlines.
            flush: False leaves the time of the write to the operating system; see :func:`~fedveil.files.append`.

        Raises:
            OSError: the file could not be written; its complete lines are unchanged. Or the locked file was removed or
                replaced: its lines would be in no file that a later process opens.
        """
        exists = self.path.exists()
        if self.is_locked and not os.path.samestat(os.fstat(self._held), os.stat(self.path)):
            raise OSError(errno.ESTALE, "another file was put in its place", str(self.path))
        with self._opened() as descriptor:
            _cut(descriptor)
            append(descriptor, b"".join(line + b"\n" for line in lines), flush=flush)
        if not exists:
            sync_folder(self.path.parent)

    def mend(self, *, keep: bool = False) -> bool:
        """Cut off a torn line; return whether there was one.

        Args:
            keep: end the line instead: the caller has checked that only its newline is missing.

        Raises:
            OSError: the file could not be written.
        """
        if not self.path.exists():
            return False
        with self._opened() as descriptor:
            if keep and not _ends_a_line(descriptor):
                append(descriptor, b"\n")
                return True
            return _cut(descriptor)

    def replace(self, lines: Sequence[bytes]) -> None:
        """Replace all lines atomically and durably; not while this object holds the lock of the old file.

        Raises:
            OSError: the file could not be written; it is unchanged.
        """
        assert not self.is_locked
        replace_file(self.path, b"".join(line + b"\n" for line in lines), mode=self._mode)

    def _open(self) -> int:
        return os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | CLOSED_IN_CHILDREN, self._mode)

    @contextmanager
    def _opened(self) -> Iterator[int]:
        if self.is_locked:
            yield self._held
            return
        descriptor = self._open()
        try:
            yield descriptor
        finally:
            os.close(descriptor)


def _lock(descriptor: int, wait: bool) -> None:
    """Lock an open file; without ``wait``, try for half a second.

    A process that starts another one shares its open files with it until the new program begins, and the lock with
    them: for some milliseconds a file that was closed is still locked.

    Raises:
        portalocker.LockException: another process holds the lock.
    """
    last = time.monotonic() + _SHARED_SECONDS
    while True:
        try:
            kind = LockFlags.EXCLUSIVE if wait else LockFlags.EXCLUSIVE | LockFlags.NON_BLOCKING
            portalocker.lock(descriptor, kind)
        except portalocker.AlreadyLocked:
            if time.monotonic() > last:
                raise
            time.sleep(0.02)
        else:
            return


def _ends_a_line(descriptor: int) -> bool:
    """Return whether a file is empty or ends in a newline."""
    length = os.fstat(descriptor).st_size
    if not length:
        return True
    os.lseek(descriptor, length - 1, os.SEEK_SET)
    return os.read(descriptor, 1) == b"\n"


def _cut(descriptor: int) -> bool:
    """Cut off a torn last line durably; return whether there was one."""
    if _ends_a_line(descriptor):
        return False
    os.ftruncate(descriptor, _content(descriptor).rfind(b"\n") + 1)
    os.fsync(descriptor)
    return True


def _content(descriptor: int) -> bytes:
    with os.fdopen(os.dup(descriptor), "rb") as stream:
        stream.seek(0)
        return stream.read()
