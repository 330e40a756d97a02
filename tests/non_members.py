"""Flower's own commands and a SuperNode's first request, each in a process forked from one that imported Flower.

Whoever runs this module writes a command a line, as a JSON list of words, and reads a line: exit status and what was
said. ``connect`` does what a SuperNode does first; any other command is one of ``flwr``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Any


class Stranger:
    """Who has Flower and no part in a federation.

    Args:
        home: where Flower keeps what it knows of this user.
    """

    def __init__(self, home: Path) -> None:
        self.home = home
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.non_members"],
            cwd=Path(__file__).parents[1],
            env={**os.environ, "FLWR_HOME": str(home), "FLWR_TELEMETRY_ENABLED": "0"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def asks(self, *command: str) -> tuple[int, str]:
        """Return the exit status of a command, and what it said."""
        sent, told = self._process.stdin, self._process.stdout
        assert sent is not None
        assert told is not None
        print(json.dumps(command), file=sent, flush=True)
        status, said = json.loads(told.readline())
        return status, said

    def leaves(self) -> None:
        """End the process."""
        self._process.communicate(timeout=60)


def connect(server: str, authority: str, private: str, public: str) -> None:
    """Ask for messages as a SuperNode does; Flower ends the process of a node that is not known."""
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key
    from flwr.supernode.fleet_http_connection import http_request_response

    loaded: Any = tuple(
        load_ssh_private_key(Path(path).read_bytes(), None) for path in (private, public) if path
    )
    keys = (loaded[0], loaded[1].public_key()) if loaded else None
    certificates = Path(authority).read_bytes() if authority else None
    with http_request_response(
        server, not authority, certificates, keys, max_retries=0, max_wait_time=5.0
    ) as link:
        print("waiting:", link[1]())


def perform(command: list[str]) -> None:
    """Do what a command asks for."""
    if command[0] == "connect":
        connect(*command[1:])
        return
    from flwr.cli.app import app

    sys.argv = ["flwr", *command]
    app()


def forked(command: list[str], into: IO[bytes]) -> int:
    """Perform a command in a process of its own; return its exit status."""
    number = os.fork()
    if number == 0:
        for stream in (1, 2):
            os.dup2(into.fileno(), stream)
        status = 1
        try:
            perform(command)
            status = 0
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])


def main() -> None:
    """Perform the commands that standard input names until it ends."""
    import flwr.cli.app
    import flwr.supernode.fleet_http_connection  # noqa: F401

    for line in sys.stdin:
        with tempfile.TemporaryFile() as into:
            status = forked(json.loads(line), into)
            into.seek(0)
            print(json.dumps([status, into.read().decode()]), flush=True)


if __name__ == "__main__":
    main()
