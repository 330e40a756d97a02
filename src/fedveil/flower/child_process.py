"""Processes of a party: each is told its settings on its standard input, and ends when its parent does.

What a child is told stands in no argument and in no environment variable, which other users of a host can read. The
input stays open while the parent lives; at its end, however the parent ended, the child removes the sockets that the
parent left and ends too.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedveil.errors import ConfigError, FedveilError
from fedveil.flower.sockets import RunningFolder


class ProcessError(FedveilError):
    """A process of a party did not do what it is for."""


class ChildProcess:
    """A running module of this package, in a session of its own: Ctrl-C at the terminal reaches the parent alone.

    Args:
        module: its name.
        settings: what it is told, numbers and strings; ``party`` is the folder of the party that starts it.
        environment: beside this process's own.
    """

    def __init__(self, module: str, settings: dict[str, Any], environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module],
            stdin=subprocess.PIPE,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(settings).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended; who waits for it will see

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


def settings_of_parent(end: Callable[[], None]) -> dict[str, Any]:
    """Return what a child is told; when the parent is gone, empty its folder ``run`` and call ``end`` in a thread.

    Raises:
        ProcessError: it was started by hand.
    """
    told = sys.stdin.buffer
    line = told.readline()
    try:
        settings: dict[str, Any] = json.loads(line)
    except ValueError:
        raise ProcessError(
            "this module is a process of `fedveil coordinator serve` or `fedveil silo serve`; start those"
        ) from None

    def watch() -> None:
        while os.read(
            told.fileno(), 1
        ):  # not through the buffer, whose lock would be held while this process ends
            pass
        try:
            with contextlib.suppress(ConfigError, OSError):  # it is served again, or its folder is gone
                RunningFolder(Path(settings["party"])).close()
        finally:
            end()

    threading.Thread(target=watch, daemon=True).start()
    return settings


def end_now() -> None:
    """End this process as an operator would, by SIGTERM."""
    os.kill(os.getpid(), signal.SIGTERM)
