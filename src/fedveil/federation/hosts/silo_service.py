"""A silo that is served on its host: the key process is this one, the network process one of its own."""

from __future__ import annotations

import contextlib
import logging
import resource
import threading
import time
from typing import Final

from fedveil.federation.enrollment.certificates import check_client_certificate
from fedveil.federation.hosts.child_process import ChildProcess
from fedveil.federation.hosts.connection_state import BridgeConnection, SiloConnection
from fedveil.federation.hosts.folders import SiloFolder
from fedveil.federation.hosts.key_process import KeyProcess, open_silo
from fedveil.federation.hosts.metrics import as_metrics
from fedveil.federation.hosts.metrics_server import MetricsServer
from fedveil.federation.hosts.sockets import RunningFolder
from fedveil.federation.hosts.status import party_status

_AGAIN_SECONDS: Final = 5.0
_SOON_DAYS: Final = 30.0
_log = logging.getLogger("fedveil.silo")


def limit_memory(folder: SiloFolder) -> None:
    """Let this process take no more memory than the silo's policy allows: what needs more fails, and is refused."""
    most = folder.policy.memory_mb << 20
    resource.setrlimit(resource.RLIMIT_DATA, (most, resource.getrlimit(resource.RLIMIT_DATA)[1]))


class NetworkProcess:
    """The process that carries a silo's messages over HTTPS; it is started again when it ends.

    Args:
        folder: the silo's.

    Raises:
        ConfigError: the client certificate is missing, of another key or not valid at this clock, or the membership
            names no server key.
        CryptoError: the node key is missing, or others can read it.
    """

    def __init__(self, folder: SiloFolder) -> None:
        self._silo = folder
        self._settings = self._read_settings()
        self.connection = SiloConnection()

    def start(self) -> None:
        """Start the process."""
        self._process = ChildProcess(
            "fedveil.federation.transport.https.silo_client", self._settings, self.connection.note_report
        )

    @property
    def number(self) -> int:
        """The number of the process."""
        return self._process.number

    def wait(self) -> None:
        """Wait for the end of the process, and start it again; does not return."""
        while True:
            code = self._process.wait()
            self.connection.note_end(code)
            _log.warning("the network process ended with exit code %d; it is started again", code)
            time.sleep(_AGAIN_SECONDS)
            self._settings = self._read_settings()
            self.start()

    def stop(self) -> None:
        """End the process."""
        self._process.stop()

    def _read_settings(self) -> dict[str, object]:
        folder = self._silo
        if (days := check_client_certificate(folder.path)) < _SOON_DAYS:
            _log.warning("the certificate client.crt is valid for %.0f days; the founder seals again", days)
        return {
            "folder": str(folder.path),
            "party": str(folder.path),
            "coordinator": folder.settings.coordinator,
            "key_process": str(folder / str(folder.settings.socket)),
            "server_key": folder.server_key,
            "largest": folder.policy.max_message_bytes,
        }


class SiloService:
    """A silo that is served: the key process answers on a socket, to which messages are carried.

    With ``carrier = "https"`` the silo's own network process carries them; with ``"bridge"`` a process of Flower or
    NVFlare does, which this one neither starts nor knows.

    Args:
        folder: the silo's.

    Raises:
        FedveilError: see :class:`NetworkProcess` and :func:`~.key_process.open_silo`.
        ConfigError: this host has no group of the name in ``silo.toml``.
    """

    def __init__(self, folder: SiloFolder) -> None:
        self._silo, group = folder, folder.group
        self.network = NetworkProcess(folder) if folder.settings.carrier == "https" else None
        bridged = BridgeConnection()
        self._connection = bridged if self.network is None else self.network.connection
        with contextlib.ExitStack() as begun:
            self._running = RunningFolder(folder.path)
            begun.callback(self._running.close)
            key_process = KeyProcess(
                open_silo(folder),
                folder / str(folder.settings.socket),
                group=group,
                note_contact=bridged.note_contact,
            )
            begun.callback(key_process.close)
            threading.Thread(target=key_process.serve, daemon=True).start()
            if self.network is not None:
                self.network.start()
                begun.callback(self.network.stop)
            page = MetricsServer(
                self._running,
                folder.settings.metrics,
                self._connection.trouble,
                self._figures,
                self._connection.facts,
            )
            begun.callback(page.close)
            self._begun = begun.pop_all()

    def wait(self) -> None:
        """Wait for ever; the network process is started again when it ends."""
        if self.network is None:
            threading.Event().wait()
        else:
            self.network.wait()

    def stop(self) -> None:
        """End the network process and the key process."""
        self._begun.close()

    def _figures(self) -> str:
        status = party_status(self._silo.path, served=True) | {"connection": self._connection.facts()}
        return as_metrics(status)
