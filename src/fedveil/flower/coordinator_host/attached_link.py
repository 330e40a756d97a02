"""The coordinator's hold of its link: a process that it starts itself, or one that another user of the host serves."""

from __future__ import annotations

import contextlib
import socket
import time
from typing import Final

from fedveil.crypto.errors import CryptoError
from fedveil.errors import ConfigError
from fedveil.files import read_text
from fedveil.flower.child_process import ChildProcess, ProcessError
from fedveil.flower.folders import CoordinatorFolder
from fedveil.flower.sockets import DOOR, SECRET, RunningFolder, address, check_closed

_STARTING_SECONDS: Final = 120.0
_LOOK_SECONDS: Final = 1.0


class AttachedLink:
    """A link that listens, and the secret by which it hands out tasks.

    Claim: the coordinator trusts no socket and no secret that every user of its host could have opened. Enforced here,
    whoever started the link.

    Args:
        home: the coordinator's folder.

    Raises:
        ConfigError: the link's folder, socket or secret are open to every user of the host, or its certificate is not
            valid at this clock.
        ProcessError: the link did not start; what it printed says why.
    """

    def __init__(self, home: CoordinatorFolder) -> None:
        folder = home.link
        self._running = folder / "run"
        self.door = self._running / DOOR
        self._group = folder.group
        self._child: ChildProcess | None = None
        if home.settings.start_link:
            folder.check_certificate()
            environment = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_HOME": str(folder / "flower")}
            settings = {"folder": str(folder.path), "party": str(home.path)}
            self._child = ChildProcess("fedveil.flower.coordinator_host.link", settings, environment)
        try:
            self._wait()
            for path in (self._running, self.door, self._running / SECRET):
                check_closed(path)
            self.secret = self._read_secret()
        except BaseException:
            self.stop()
            raise

    @property
    def number(self) -> int | None:
        """The number of the process, if it was started here."""
        return None if self._child is None else self._child.number

    @property
    def ended(self) -> bool:
        """Whether it listens no more."""
        return self._child.ended is not None if self._child is not None else not self._listens()

    def wait(self) -> ProcessError:
        """Wait for its end; return what to say of it."""
        if self._child is not None:
            return ProcessError(f"the link ended with exit code {self._child.wait()}; its messages are above")
        while not self.ended:
            time.sleep(_LOOK_SECONDS)
        return ProcessError(f"the link of {self._running.parent} listens no more")

    def stop(self) -> None:
        """End it, if it was started here, and remove what it has left if it was killed."""
        if self._child is not None:
            self._child.stop()
            with contextlib.suppress(ConfigError, OSError):  # it is served again, or its folder is gone
                RunningFolder(self._running.parent, self._group).close()

    def _wait(self) -> None:
        until = time.monotonic() + _STARTING_SECONDS
        while not self._listens():
            if self._child is not None and (code := self._child.ended) is not None:
                raise ProcessError(f"the link ended with exit code {code}; its messages are above")
            if time.monotonic() > until:
                raise ProcessError(f"{self.door}: no link listens after {_STARTING_SECONDS:g} s")
            time.sleep(0.05)

    def _listens(self) -> bool:
        try:
            with socket.socket(socket.AF_UNIX) as tried:
                return tried.connect_ex(address(self.door)) == 0
        except OSError:  # there is no folder yet
            return False

    def _read_secret(self) -> bytes:
        path = self._running / SECRET
        try:
            secret = bytes.fromhex(read_text(path, ConfigError))
        except ValueError:
            raise CryptoError(f"{path}: not a link's secret") from None
        return secret
