"""Silos behind the part of a carrier that speaks with the link: threads of this process, without guards' sockets."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator

from fedveil.federation.silo import SiloParty
from fedveil.flower.enrollment.demonstration import Demonstration
from fedveil.flower.folders import SiloFolder
from fedveil.flower.silo_host.key_process import open_silo
from fedveil.flower.silo_host.node import Node

_AGAIN_SECONDS = 1.0
_log = logging.getLogger("fedveil.silo")


class NodeThread(threading.Thread):
    """A silo that answers letters in this process.

    Args:
        folder: the silo's: its node key, and where the coordinator is.
        party: the silo.
        ended: set when it shall end.
    """

    def __init__(self, folder: SiloFolder, party: SiloParty, ended: threading.Event) -> None:
        super().__init__(daemon=True)
        self._node = Node.from_folder(folder.path, folder.settings.coordinator, party.receive)
        self._ended = ended

    def run(self) -> None:
        """Serve until the run has ended; a connection that breaks is made again, as a carrier is started again."""
        while not self._ended.is_set():
            try:
                self._node.serve(self._ended.is_set)
            except (Exception, SystemExit):
                _log.exception("a node was cut off")
                self._ended.wait(_AGAIN_SECONDS)


@contextlib.contextmanager
def connected(made: Demonstration, *, output: int | None = None) -> Iterator[subprocess.Popen[str]]:
    """Play a federation: its coordinator is a process, which is yielded, and its silos are threads.

    Args:
        made: its folders.
        output: where the coordinator's messages go.
    """
    ended, coordinator = threading.Event(), served(made, output=output)
    parties: list[SiloParty] = []
    nodes: list[NodeThread] = []
    try:
        for folder in map(SiloFolder, made.provisioned.silos):
            parties.append(open_silo(folder))
            nodes.append(NodeThread(folder, parties[-1], ended))
        for node in nodes:
            node.start()
        yield coordinator
    finally:
        ended.set()
        for node in nodes:
            if node.is_alive():
                node.join(60)
        for party in parties:
            party.close()
        with coordinator:
            coordinator.terminate()


def served(made: Demonstration, *, output: int | None = None) -> subprocess.Popen[str]:
    """Start ``fedveil coordinator``; return once it knows its silos.

    Raises:
        RuntimeError: it ended instead.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "fedveil", "coordinator", "serve", str(made.provisioned.coordinator)],
        stdout=subprocess.PIPE,
        stderr=output,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "listening on" in line:
            return process
    with process:
        raise RuntimeError(f"the coordinator ended with exit code {process.wait()}")
