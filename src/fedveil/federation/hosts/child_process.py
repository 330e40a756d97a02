"""Processes of a party: each is told its settings on its standard input, and ends when its parent does.

What a child is told stands in no argument and in no environment variable, which other users of a host can read. The
input stays open while the parent lives; at its end, however the parent ended, the child removes the sockets that the
parent left and ends too.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Final

from fedveil.errors import ConfigError, HostError
from fedveil.federation.hosts.sockets import RunningFolder
from fedveil.sanitize import LogFormat, LogLevel, log_choice, show_log

_LONGEST_REPORT: Final = 1 << 16


_log = logging.getLogger("fedveil.process")


class ProcessError(HostError):
    """A process of a party ended, or did not start; it may work when it is started again."""


class ChildProcess:
    """A running module of this package, in a session of its own: Ctrl-C at the terminal reaches the parent alone.

    Args:
        module: its name.
        settings: what it is told, numbers and strings; ``party`` is the folder of the party that starts it.
        report: called in a thread with each JSON value that the child writes to its standard output, one a line;
            None: the child has the parent's standard output.

    Raises:
        ProcessError: this host has no room for another process.
    """

    def __init__(
        self,
        module: str,
        settings: dict[str, Any],
        report: Callable[[Any], None] | None = None,
    ) -> None:
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module],
                stdin=subprocess.PIPE,
                stdout=None if report is None else subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise ProcessError(f"{module}: the process cannot be started: {error.strerror}") from None
        assert self._process.stdin is not None
        if report is not None:
            threading.Thread(target=self._read_reports, args=(report,), daemon=True).start()
        level, layout = log_choice()
        child_settings = settings | {"log_level": level.value, "log_format": layout.value}
        try:
            self._process.stdin.write(json.dumps(child_settings).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended; whoever waits for it will see

    def _read_reports(self, report: Callable[[Any], None]) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stream:
            while line := stream.readline(_LONGEST_REPORT):
                with contextlib.suppress(ValueError, RecursionError):
                    report(json.loads(line))

    @property
    def number(self) -> int:
        """The number of the process."""
        return self._process.pid

    @property
    def ended(self) -> int | None:
        """The exit code, if it has ended."""
        return self._process.poll()

    def wait(self) -> int:
        """Wait for its end; return the exit code."""
        code = self._process.wait()
        self._close()
        return code

    def stop(self) -> None:
        """End it."""
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._close()

    def _close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()


def settings_of_parent(end: Callable[[], None], pipe: BinaryIO | None = None) -> dict[str, Any]:
    """Return the settings that the parent sent; a thread empties the folder ``run`` and calls ``end`` when it exits.

    Args:
        end: called when the parent exits.
        pipe: from the parent; None: standard input.

    Raises:
        ProcessError: it was started by hand.
    """
    source = sys.stdin.buffer if pipe is None else pipe
    line = source.readline()
    try:
        settings: dict[str, Any] = json.loads(line)
    except ValueError:
        raise ProcessError(
            "this module is a process of `fedveil coordinator serve` or `fedveil silo serve`; start those"
        ) from None

    show_log(LogLevel(settings.pop("log_level", "warning")), LogFormat(settings.pop("log_format", "text")))
    sys.excepthook = _log_uncaught

    def watch() -> None:
        # not through the buffer, whose lock would be held while this process ends
        while os.read(source.fileno(), 1):
            pass
        try:
            with contextlib.suppress(ConfigError, OSError):  # it is served again, or its folder is gone
                RunningFolder(Path(settings["party"])).close()
        finally:
            end()

    threading.Thread(target=watch, daemon=True).start()
    return settings


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Write an error that ends the process as a line of the log, in the log's format."""
    _log.critical("this process failed", exc_info=(kind, error, trace))


def end_now() -> None:
    """End this process as an operator would, by SIGTERM."""
    os.kill(os.getpid(), signal.SIGTERM)
