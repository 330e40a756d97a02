"""Unix sockets that their owner alone can open, or a group; the frames on them; the folder that they lie in; ports."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import socket
import stat
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fedveil.errors import BusyError, ConfigError, ProtocolError
from fedveil.federation.transport.interface import BEGINNING, LARGEST_MESSAGE
from fedveil.files import with_host_code, writing
from fedveil.sanitize import FaultLog

LINK: Final = "link"
"""The link's socket for the coordinator, in its folder ``run``."""

PROXY: Final = "proxy"
"""Beside it: the socket for a proxy that ends TLS."""

BRIDGE: Final = "bridge"
"""Beside it: the socket for a bridge to another transport."""

KEY_PROCESS: Final = "guard"
"""The socket of a silo's key process, in the folder ``run`` of the silo."""

LOOPBACK: Final = "127.0.0.1"

_LONGEST_NAME: Final = 100
_LOOKS: Final = 20
_LOOK_SECONDS: Final = 0.02
_PAUSE_SECONDS: Final = 0.1
_MAY_PASS: Final = (errno.EADDRINUSE, errno.EADDRNOTAVAIL)
"""Another process has the address, or this host does not have it yet, as before its network is up."""

_open_folders: dict[Path, int] = {}
_faults = FaultLog(logging.getLogger("fedveil.process"))


def address(path: Path) -> str:
    """Return a name of a socket that the kernel takes: it takes some 100 bytes, so a long one begins at an open folder.

    Raises:
        OSError: there is no such folder.
    """
    if len(os.fsencode(path)) <= _LONGEST_NAME:
        return str(path)
    folder = path.parent
    descriptor = _open_folders.get(folder)
    if descriptor is None or not os.path.samestat(os.fstat(descriptor), os.stat(folder)):
        descriptor = _open_folders[folder] = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    return f"/proc/self/fd/{descriptor}/{path.name}"


def listen(path: Path, group: int | None = None) -> socket.socket:
    """Return a listening socket with mode 0600, or 0660 for a group; a stale one at the path is replaced.

    Raises:
        ConfigError: there is no such folder, a file that is no socket, or the socket cannot be made.
    """
    if path.exists() and not path.is_socket():
        raise ConfigError(f"{path}: a file that is no socket; a socket is to be made there")
    if not path.parent.is_dir():
        raise ConfigError(f"{path.parent}: no such folder; the socket {path.name} is to be made there")
    with writing(path, ConfigError):
        path.unlink(missing_ok=True)
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # Linux gives a bound socket the mode of its descriptor. A umask is of the whole process: what other
            # threads create meanwhile would get it, and two threads at once could leave it behind.
            os.fchmod(listening.fileno(), 0o600)
            listening.bind(address(path))
            if group is not None:
                os.chown(path, -1, group)
            path.chmod(0o600 if group is None else 0o660)
        except BaseException:
            listening.close()
            raise
        listening.listen(64)
    return listening


def listen_at(host: str, port: int, place: str, backlog: int) -> socket.socket:
    """Return a socket that listens at an address of this host.

    Args:
        host: an address, or a name of one.
        port: its port.
        place: where the address is set, for the error.
        backlog: connections that may wait to be accepted.

    Raises:
        BusyError: another process listens there, or this host does not have the address or know the name (yet).
        ConfigError: this process may not listen there; or, with the exit code of a host's fault, it has no room to.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=backlog)
    except UnicodeError:  # of a name with a label that no host's name has
        raise ConfigError(f"{place}: neither an address nor a name of a host") from None
    except OSError as error:
        passes = isinstance(error, socket.gaierror) or error.errno in _MAY_PASS
        # strerror of create_server repeats the address, which the place has
        reason = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        failed = (BusyError if passes else ConfigError)(f"{place}: cannot listen there: {reason}")
        raise failed if passes else with_host_code(error, failed) from None


def accept_connections(listening: socket.socket, is_ending: Callable[[], bool]) -> Iterator[socket.socket]:
    """Yield connections, until ``is_ending()``; a process that has no descriptor left for one tries again."""
    while not is_ending():
        try:
            connection, _ = listening.accept()
        except OSError as error:
            if not is_ending():
                _faults.warn("accept", f"a local connection was not accepted: {error.strerror}")
                time.sleep(_PAUSE_SECONDS)
        else:
            yield connection


def free_port() -> int:
    """Return a port of the loopback interface at which no process listens."""
    with socket.socket() as tried:
        tried.bind((LOOPBACK, 0))
        return int(tried.getsockname()[1])


def check_closed(path: Path) -> None:
    """Return if a file, folder or socket is nobody's but its owner's and the owner's group's.

    Raises:
        ConfigError: others can open it, or this user cannot see it.
        BusyError: there is none (any more).
    """
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except FileNotFoundError:
        raise BusyError(f"{path}: no such file; the process that made it has ended") from None
    except OSError as error:
        raise with_host_code(error, ConfigError(f"{path}: {error.strerror}")) from None
    if mode & 0o007:
        raise ConfigError(f"{path}: mode {mode:04o} gives every user of this host access; chmod o= {path}")


def _locked(descriptor: int) -> bool:
    """Take a folder's lock; whoever tidies up after a party has it for an instant, and must not be in the way."""
    for _ in range(_LOOKS):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(_LOOK_SECONDS)
    return False


class RunningFolder:
    """The folder ``run`` of a party that is served: its sockets, and what torch makes; gone when it is not.

    Its mode is 0700, or 0750 where a group shares the sockets.

    Args:
        party: the party's folder.
        group: number of the group; None: the owner alone.

    Raises:
        BusyError: the party is served already.
        ConfigError: the folder cannot be made, or is another user's.
    """

    def __init__(self, party: Path, group: int | None = None) -> None:
        self.path = party / "run"
        with writing(self.path, ConfigError):
            self.path.mkdir(mode=0o700, exist_ok=True)
            if group is not None:
                os.chown(self.path, -1, group)
            self.path.chmod(0o700 if group is None else 0o750)
            self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with writing(self.path, ConfigError):
                if not _locked(self._lock):
                    raise BusyError(f"{party}: is already served by another process of this host")
                self._empty()
        except BaseException:
            os.close(self._lock)
            raise
        # torch makes this folder as soon as vmap is used, and would leave it among the temporary files
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(self.path / "torch"))

    def __truediv__(self, name: str) -> Path:
        """Return the path of one of its sockets."""
        return self.path / name

    def close(self) -> None:
        """Empty it and let go of it."""
        self._empty()
        os.close(self._lock)

    def _empty(self) -> None:
        for entry in self.path.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


# --- frames, between a silo's key process and its transport and to submit a run; a run's outcome ---
#
#     frame: length (8) | bytes        request: one frame        answer: one byte, 0 message or 1 refusal, and one frame


_LENGTH: Final = struct.Struct(">Q")


def send_frame(connection: socket.socket, data: bytes) -> None:
    """Send bytes, preceded by their length."""
    connection.sendall(_LENGTH.pack(len(data)))
    connection.sendall(data)


def receive_frame(
    connection: socket.socket,
    longest: Callable[[bytes], int] = lambda beginning: LARGEST_MESSAGE,
    allow: Callable[[int], None] = lambda length: None,
) -> bytes:
    """Return the bytes of a frame.

    Args:
        connection: where they come from.
        longest: how many they may be, by the first :data:`BEGINNING` of them; no more are read of a longer frame.
        allow: called with their number, before the rest of them is read.

    Raises:
        ProtocolError: longer than that, or cut short.
    """
    (length,) = _LENGTH.unpack(_exactly(connection, b"", _LENGTH.size))
    beginning = _exactly(connection, b"", min(length, BEGINNING))
    if length > (limit := longest(beginning)):
        raise ProtocolError(f"a frame of {length} bytes is above the limit of {limit}")
    allow(length)
    return _exactly(connection, beginning, length)


def _exactly(connection: socket.socket, begun: bytes, length: int) -> bytes:
    """Return so many bytes, of which some have been received."""
    received = bytearray(begun)
    while len(received) < length:
        piece = connection.recv(min(length - len(received), 1 << 20))
        if not piece:
            raise ProtocolError(f"a frame ends {length - len(received)} bytes early")
        received += piece
    return bytes(received)


# --- outcome of a submitted run ---


END: Final = "run_end.json"
"""Written when a run's play ends: an :class:`RunOutcome`."""

SOCKET: Final = "party"
"""The coordinator's socket for submissions, in its folder ``run``."""


@dataclass(frozen=True)
class RunOutcome:
    """Outcome of a submitted run.

    Attributes:
        error: what went wrong, if anything.
        stopped: why it ended before its last round, if it did.
        silent: silos whose silence has ended it.
    """

    error: str | None
    stopped: str | None
    silent: tuple[str, ...]
