"""The coordinator's hold of its link: a process that it starts itself, or one that another user of the host serves."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from typing import Final

from fedveil.errors import ConfigError
from fedveil.federation.hosts.child_process import ChildProcess, ProcessError
from fedveil.federation.hosts.folders import CoordinatorFolder
from fedveil.federation.hosts.sockets import LINK, RunningFolder, address, check_closed

_STARTING_SECONDS: Final = 120.0
_LOOK_SECONDS: Final = 0.05
_FIRST_PAUSE: Final = 1.0
_LONGEST_PAUSE: Final = 30.0
_log = logging.getLogger("fedveil.coordinator")


class AttachedLink:
    """A link that listens. One that this coordinator started is started again when it ends.

    Claim: the coordinator trusts no socket that every user of its host could have opened. Enforced here, whoever
    started the link.

    Args:
        home: the coordinator's folder.

    Raises:
        ConfigError: the link's folder or socket is open to every user of the host, its certificate is not valid at
            this clock, or ``link.toml`` asks for something impossible.
        ProcessError: the link did not start; what it logged says why.
    """

    def __init__(self, home: CoordinatorFolder) -> None:
        self._folder, self._party = home.link, home.path
        self._running = self._folder / "run"
        self.socket = self._running / LINK
        self._group = self._folder.group
        self._stopping = threading.Event()
        self._child: ChildProcess | None = None
        if home.settings.start_link:
            self._folder.check_certificate()
            self._child = self._start()
        try:
            self._wait()
            for path in (self._running, self.socket):
                check_closed(path)
        except BaseException:
            self.stop()
            raise
        if self._child is not None:
            threading.Thread(target=self._keep_running, daemon=True).start()

    @property
    def number(self) -> int | None:
        """The number of the process, if it was started here."""
        return None if self._child is None else self._child.number

    @property
    def listens(self) -> bool:
        """Return whether a process accepts connections at the socket."""
        try:
            with socket.socket(socket.AF_UNIX) as tried:
                return tried.connect_ex(address(self.socket)) == 0
        except OSError:  # there is no folder yet
            return False

    def stop(self) -> None:
        """End it, if it was started here, and remove what it has left if it was killed."""
        self._stopping.set()
        if self._child is not None:
            self._child.stop()
            with contextlib.suppress(ConfigError, OSError):  # it is served again, or its folder is gone
                RunningFolder(self._running.parent, self._group).close()

    def _start(self) -> ChildProcess:
        settings = {"folder": str(self._folder.path), "party": str(self._party)}
        return ChildProcess("fedveil.federation.hosts.link", settings)

    def _keep_running(self) -> None:
        """Start the link again whenever it ends: out of memory, say. Silos and runs go on with the next one."""
        pause = _FIRST_PAUSE
        while self._child is not None and not self._stopping.is_set():
            began = time.monotonic()
            code = self._child.wait()
            if self._stopping.is_set():
                return
            pause = (
                _FIRST_PAUSE if time.monotonic() - began > _LONGEST_PAUSE else min(2 * pause, _LONGEST_PAUSE)
            )
            _log.warning("the link ended with exit code %d; it is started again in %g s", code, pause)
            if self._stopping.wait(pause):
                return
            try:
                self._child = self._start()
            except (
                ProcessError
            ) as error:  # no room for a process now; the one that has ended is waited for again
                _log.error("%s", error)

    def _wait(self) -> None:
        until = time.monotonic() + _STARTING_SECONDS
        while not self.listens:
            if self._child is not None and (code := self._child.ended) is not None:
                kind = ConfigError if code == ConfigError.exit_code else ProcessError
                raise kind(f"the link ended with exit code {code}; its messages are above")
            if time.monotonic() > until:
                raise ProcessError(f"{self.socket}: no link listens after {_STARTING_SECONDS:g} s")
            time.sleep(_LOOK_SECONDS)
