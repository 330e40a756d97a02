"""Silos behind the part of a SuperNode that speaks with the SuperLink: threads, without a process for every message."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key

from fedveil.engine.federation.silo import SiloParty
from fedveil.flower.client_app import RECORD
from fedveil.flower.demonstration import Demonstration
from fedveil.flower.folders import CoordinatorFolder, SiloFolder
from fedveil.flower.guard import open_silo
from fedveil.flower.processes import CONNECTION, start_superlink

_POLL_SECONDS = 3.0
_log = logging.getLogger("fedveil.silo")
_REGISTER = """\
import sys
from pathlib import Path
from types import SimpleNamespace
from flwr.cli.supernode.register import register
for path in sys.argv[2:]:
    register(SimpleNamespace(args=[]), Path(path), sys.argv[1])
"""


class Node(threading.Thread):
    """A silo that answers letters from the SuperLink, which it asks every 3 s, as a SuperNode does.

    Args:
        folder: the silo's: its node key, and where the coordinator is.
        party: the silo.
        ended: set when it shall end.
    """

    def __init__(self, folder: SiloFolder, party: SiloParty, ended: threading.Event) -> None:
        super().__init__(daemon=True)
        self._folder, self._party, self._ended = folder, party, ended

    def run(self) -> None:
        """Serve until the run has ended; a connection that breaks is made again, as a SuperNode is started again."""
        while not self._ended.is_set():
            try:
                self._serve()
            except (Exception, SystemExit):
                _log.exception("a node was cut off")
                self._ended.wait(_POLL_SECONDS)

    def _serve(self) -> None:
        from flwr.supercore.run import RunNotRunningException
        from flwr.supernode.fleet_http_connection import http_request_response

        key = load_ssh_private_key((self._folder / "node.key").read_bytes(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        with http_request_response(
            self._folder.settings.coordinator,
            False,
            (self._folder / "ca.crt").read_bytes(),
            (key, key.public_key()),
        ) as (_, receive, send, _, _, pull, push, confirm):
            while not self._ended.is_set():
                received = receive()
                if received is None:
                    self._ended.wait(_POLL_SECONDS)
                    continue
                with contextlib.suppress(
                    RunNotRunningException
                ):  # as a SuperNode does: the run's app is gone
                    self._answer(received, send, pull, push, confirm)

    def _answer(self, received: Any, send: Any, pull: Any, push: Any, confirm: Any) -> None:
        from flwr.app import ConfigRecord, Message, RecordDict
        from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
        from flwr.supercore.inflatable.inflatable_utils import pull_and_inflate_object_from_tree, push_objects

        envelope, tree = received
        run = envelope.metadata.run_id
        message = pull_and_inflate_object_from_tree(
            tree,
            lambda name: pull(run, name),
            lambda name: confirm(run, name),
            return_type=Message,
            max_concurrent_pulls=1,
        )
        message.metadata.__dict__["_message_id"] = tree.object_id
        letter = message.content.config_records[RECORD]["letter"]
        reply = Message(
            RecordDict({RECORD: ConfigRecord({"letter": self._party.receive(letter)})}), reply_to=message
        )
        reply.metadata.__dict__["_message_id"] = reply.object_id
        objects, tree = get_all_nested_objects(reply), get_object_tree(reply)
        wanted, session = send(reply, tree, 0.0)
        push_objects(
            objects,
            lambda name, content: push(run, session, name, content),
            object_ids_to_push=wanted,
            max_concurrent_pushes=1,
        )


def free_port() -> int:
    """Return a port of this machine on which nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(min(free.getsockname()[1], 65000))


@contextlib.contextmanager
def connected(made: Demonstration, *, output: int | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """Play a federation: its SuperLink is a process, which is yielded, and its silos are threads.

    Args:
        made: its folders.
        output: where the SuperLink prints, as for ``start_superlink``.
    """
    home = CoordinatorFolder(made.founded.coordinator)
    ended, link = threading.Event(), start_superlink(home, output=output)
    parties: list[SiloParty] = []
    nodes: list[Node] = []
    try:
        register(home)
        for folder in map(SiloFolder, made.founded.silos):
            parties.append(open_silo(folder))
            nodes.append(Node(folder, parties[-1], ended))
        for node in nodes:
            node.start()
        yield link
    finally:
        ended.set()
        for node in nodes:
            if node.is_alive():
                node.join(60)
        for party in parties:
            party.close()
        link.terminate()
        link.wait()


def register(home: CoordinatorFolder) -> None:
    """Tell the SuperLink all node keys, from one process."""
    keys = [str(home / "nodes" / f"{name}.pub") for name in home.membership.silos]
    folder = home / "flower"
    folder.mkdir(exist_ok=True)
    address = f'address = "{home.settings.host}:{home.settings.port}"'
    (folder / "config.toml").write_text(
        f'[superlink]\ndefault = "{CONNECTION}"\n[superlink.{CONNECTION}]\n{address}\n'
        f'root-certificates = "{home / "ca.crt"}"\ninsecure = false\n'
    )
    environment = {**os.environ, "FLWR_HOME": str(folder)}
    until = time.monotonic() + 120
    while True:
        with socket.socket() as tried:
            if tried.connect_ex((home.settings.host, home.settings.port)) == 0:
                break
        if time.monotonic() > until:
            raise TimeoutError("the SuperLink does not listen")
        time.sleep(0.5)
    subprocess.run(
        [sys.executable, "-c", _REGISTER, CONNECTION, *keys], env=environment, check=True, capture_output=True
    )
