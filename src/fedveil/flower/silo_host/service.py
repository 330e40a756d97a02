"""A silo that is served on its host: the guard in this process, and the carrier in one of its own."""

from __future__ import annotations

import contextlib
import logging
import resource
import threading
import time
from collections.abc import Mapping
from typing import Final

from fedveil.flower.child_process import ChildProcess
from fedveil.flower.enrollment.certificates import node_public
from fedveil.flower.enrollment.joining import NODE
from fedveil.flower.flower_version import check_flower_version
from fedveil.flower.folders import SiloFolder
from fedveil.flower.metrics import as_metrics
from fedveil.flower.metrics_server import MetricsServer
from fedveil.flower.silo_host.key_process import KeyProcess, open_silo
from fedveil.flower.sockets import RunningFolder
from fedveil.flower.status import party_status

CARRIERS: Final[Mapping[str, str]] = {
    "fleet": "fedveil.flower.silo_host.node",
    "supernode": "fedveil.flower.silo_host.supernode",
}
"""What can carry a silo's letters: by the name that ``silo.toml`` gives it, the module that a process of it runs."""
_AGAIN_SECONDS: Final = 5.0
_log = logging.getLogger("fedveil.silo")


def limit_memory(folder: SiloFolder) -> None:
    """Let this process take no more memory than the silo's policy allows: what needs more fails, and is refused."""
    most = folder.policy.memory_mb << 20
    resource.setrlimit(resource.RLIMIT_DATA, (most, resource.getrlimit(resource.RLIMIT_DATA)[1]))


class SiloService:
    """A silo that is served: the guard in this process, and the carrier in one of its own.

    Args:
        folder: the silo's.

    Raises:
        ConfigError: the carrier was not made for the release of Flower that is installed, or there is none.
        CryptoError: the node's key is missing, or others can read it.
    """

    def __init__(self, folder: SiloFolder) -> None:
        check_flower_version()
        node_public(folder / NODE)
        self._silo = folder
        with contextlib.ExitStack() as begun:
            self._running = RunningFolder(folder.path)
            begun.callback(self._running.close)
            self._guard = KeyProcess(open_silo(folder), self._running / "guard")
            begun.callback(self._guard.close)
            threading.Thread(target=self._guard.serve, daemon=True).start()
            self.carrier = self._start()
            begun.callback(lambda: self.carrier.stop())  # the one that is there then
            page = MetricsServer(self._running, folder.settings.metrics, self._ready, self._figures)
            begun.callback(page.close)
            self._begun = begun.pop_all()

    def wait(self) -> None:
        """Wait for the carrier, which is started again when it gives up.

        It gives up where the coordinator does not listen yet, or does not know its key yet.
        """
        while True:
            code = self.carrier.wait()
            _log.warning("the carrier ended with exit code %d; it is started again", code)
            time.sleep(_AGAIN_SECONDS)
            self.carrier = self._start()

    def stop(self) -> None:
        """End the carrier and the guard."""
        self._begun.close()

    def _ready(self) -> bool:
        return self.carrier.ended is None

    def _figures(self) -> str:
        return as_metrics(party_status(self._silo.path, served=True))

    def _start(self) -> ChildProcess:
        settings = {
            "folder": str(self._silo.path),
            "party": str(self._silo.path),
            "coordinator": self._silo.settings.coordinator,
            "guard": str(self._running / "guard"),
        }
        environment = {
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_HOME": str(self._silo / "flower"),
        }
        return ChildProcess(CARRIERS[self._silo.settings.carrier], settings, environment)
