"""The silo's carrier by Flower's own SuperNode, for institutions that want that one, or a link that serves no other.

It is the command ``flower-supernode`` with flags that Flower supports, in a process of its own with the node's key and
nothing else, and beside it in that process the :class:`~.worker.Worker` that answers what the SuperNode
takes. Flower's isolation "process" starts nothing for a message; the SuperNode's port is on the loopback interface, a
free one, and hands tasks to who knows a secret that is new at every start and stands in no file.

Claim: no code that was received is run, and nothing is started for a message.
Not claimed: that another user of the host cannot keep the SuperNode busy through that port.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import stat
import sys
import threading
import time
from pathlib import Path
from typing import Final

import httpx
from flwr.common.constant import ISOLATION_MODE_PROCESS
from flwr.supernode.cli import flower_supernode

from fedveil.flower.child_process import end_now, settings_of_parent
from fedveil.flower.silo_host.ipc import ask
from fedveil.flower.silo_host.worker import Worker
from fedveil.flower.sockets import LOOPBACK, free_port
from fedveil.sanitize import quiet_log

_LOOK_SECONDS: Final = 0.2
_STARTING_SECONDS: Final = 120.0
_ENDING_SECONDS: Final = 10.0
_log = quiet_log("fedveil.silo")


def flags(folder: Path, coordinator: str, port: int, secret: int) -> list[str]:
    """Return the words of the command.

    Args:
        folder: the silo's.
        coordinator: host and port.
        port: of the loopback interface.
        secret: the descriptor that the secret is read from.
    """
    return [
        "flower-supernode",
        *("--superlink", coordinator),
        *("--root-certificates", str(folder / "ca.crt")),
        *("--auth-supernode-private-key", str(folder / "node.key")),
        *("--isolation", ISOLATION_MODE_PROCESS),
        *("--superexec-auth-secret-file", f"/dev/fd/{secret}"),
        *("--host", LOOPBACK, "--port", str(port)),
    ]


def listens(port: int) -> bool:
    """Return whether it is this process that listens at a port of the loopback interface."""
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as held:
                listening = held.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if listening and held.getsockname() == (LOOPBACK, port):
                    return True
    return False


def work(worker: Worker, port: int) -> None:
    """Answer messages as long as there is a SuperNode; end this process where one could not be answered.

    A SuperNode takes no other message before it has an answer to the last. Nothing is asked of a port at which another
    process listens: its user may be another, and the guard would read that user's letters.
    """
    until = time.monotonic() + _STARTING_SECONDS
    while True:
        try:
            if not listens(port):
                raise httpx.ConnectError("there is no SuperNode")
            if not worker.work():
                time.sleep(_LOOK_SECONDS)
            until = time.monotonic() + _ENDING_SECONDS
        except Exception as error:
            if not isinstance(error, httpx.ConnectError) or time.monotonic() > until:
                _log.warning("the SuperNode was not answered (%s); both begin anew", type(error).__name__)
                end_now()
                return
            time.sleep(_LOOK_SECONDS)


def end_with(failed: threading.ExceptHookArgs) -> None:
    """End this process where a thread of it failed: without that of its signs of life a SuperNode goes on, unknown."""
    _log.warning("the SuperNode is not whole any more (%s); it begins anew", failed.exc_type.__name__)
    end_now()


def main() -> None:
    """Carry letters until the parent ends, or until the SuperNode does."""
    settings = settings_of_parent(end_now)
    quiet_log("flwr").setLevel(logging.WARNING)
    threading.excepthook = end_with
    folder, guard, port = Path(settings["folder"]), Path(settings["guard"]), free_port()
    secret = secrets.token_bytes(32)
    reading, writing = os.pipe()
    os.write(writing, secret)
    os.close(writing)
    worker = Worker(f"http://{LOOPBACK}:{port}", secret, lambda letter: ask(guard, letter))
    threading.Thread(target=work, args=(worker, port), daemon=True).start()
    sys.argv = flags(folder, settings["coordinator"], port, reading)
    flower_supernode()
    _log.warning(
        "the SuperNode gave up: the coordinator is not well, or its link.toml does not say supernodes = true"
    )
    end_now()  # or the SuperNode's port would keep this process


if __name__ == "__main__":
    main()
