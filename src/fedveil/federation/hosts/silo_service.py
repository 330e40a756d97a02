"""A silo that is served on its host: the key process is this one, the network process one of its own."""

from __future__ import annotations

import contextlib
import logging
import resource
import threading
from pathlib import Path
from typing import Final

from fedveil.errors import FedveilError, HostError
from fedveil.federation.enrollment.certificates import check_client_certificate
from fedveil.federation.hosts.child_process import ChildProcess
from fedveil.federation.hosts.connection_state import BridgeConnection, SiloConnection
from fedveil.federation.hosts.folders import MembershipFile, SiloFolder
from fedveil.federation.hosts.key_process import KeyProcess
from fedveil.federation.hosts.metrics_server import MetricsServer, as_metrics
from fedveil.federation.hosts.served_silo import ServedSilo
from fedveil.federation.hosts.sockets import RunningFolder
from fedveil.federation.hosts.status import party_status
from fedveil.federation.transport.https.connection_faults import proxy_for

_AGAIN_SECONDS: Final = 5.0
_LOOK_SECONDS: Final = 2.0
_SOON_DAYS: Final = 30.0
_log = logging.getLogger("fedveil.silo")


def limit_memory(folder: SiloFolder) -> None:
    """Let this process take no more memory than the silo's policy allows: what needs more fails, and is refused."""
    most = folder.policy.memory_mb << 20
    resource.setrlimit(resource.RLIMIT_DATA, (most, resource.getrlimit(resource.RLIMIT_DATA)[1]))


class SiloService:
    """A silo that is served: the key process answers on a socket, to which messages are carried.

    With ``carrier = "https"`` the silo's own network process carries them; with ``"bridge"`` a process of Flower or
    NVFlare does, which this one neither starts nor knows.

    Args:
        folder: the silo's.

    Raises:
        ConfigError: the client certificate is missing, of another key or not valid at this clock, or the membership
            names no server key; this host has no group of the name in ``silo.toml``; or HTTPS_PROXY is not the URL of
            an HTTP proxy.
        CryptoError: the node key is missing, or others can read it.
    """

    def __init__(self, folder: SiloFolder) -> None:
        self._silo, group = folder, folder.group
        is_bridged = folder.settings.carrier == "bridge"
        self._settings = {} if is_bridged else self._network_settings()
        self._reports, bridged = SiloConnection(), BridgeConnection()
        self._connection = bridged if is_bridged else self._reports
        self._membership = MembershipFile(folder)
        self._newest = folder.membership
        self._stopping, self._lock = threading.Event(), threading.Lock()
        self._failure: FedveilError | None = None
        self._is_renewed = False
        with contextlib.ExitStack() as begun:
            self._running = RunningFolder(folder.path)
            begun.callback(self._running.close)
            key_process = KeyProcess(
                ServedSilo(folder), self._key_socket, group=group, note_contact=bridged.note_contact
            )
            begun.callback(key_process.close)
            threading.Thread(target=key_process.serve, daemon=True).start()
            if not is_bridged:
                self.network = self._start()
                begun.callback(lambda: self.network.stop())  # the one that runs then
            page = MetricsServer(
                self._running,
                folder.settings.metrics,
                self._connection.trouble,
                self._figures,
                self._connection.facts,
            )
            begun.callback(page.close)
            self._begun = begun.pop_all()
        for work in () if is_bridged else (self._keep_network, self._watch_membership):
            threading.Thread(target=work, daemon=True).start()

    @property
    def _key_socket(self) -> Path:
        return self._silo.path / self._silo.settings.socket

    def wait(self) -> None:
        """Wait until :meth:`stop`.

        Raises:
            FedveilError: the network process cannot be started again: a certificate is not valid, say.
        """
        self._stopping.wait()
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """End the network process and the key process."""
        with self._lock:
            self._stopping.set()
        self._begun.close()

    def _keep_network(self) -> None:
        """Start the network process again whenever it ends, and where the membership has changed."""
        while True:
            code = self.network.wait()
            if self._stopping.is_set():
                return
            if not self._is_renewed:
                self._reports.note_end(code)
                _log.warning("the network process ended with exit code %d; it is started again", code)
                self._stopping.wait(_AGAIN_SECONDS)
            self._is_renewed = False
            with self._lock:
                if self._stopping.is_set():
                    return
                try:
                    self._settings = self._network_settings()
                    self.network = self._start()
                except FedveilError as error:
                    if error.exit_code == HostError.exit_code:
                        _log.error("%s", error)
                        continue  # no room now; the process that has ended is waited for again
                    self._failure = error
                    self._stopping.set()
                    return

    def _watch_membership(self) -> None:
        """End the network process where a membership was accepted: the next one has its keys and certificate."""
        while not self._stopping.wait(_LOOK_SECONDS):
            try:
                found = self._membership.read_if_changed(self._newest)
            except FedveilError:
                continue  # the key process says so
            if found is not None:
                self._newest = found
                with self._lock:
                    if not self._stopping.is_set():
                        self._is_renewed = True
                        self.network.stop()

    def _figures(self) -> str:
        status = party_status(self._silo.path, served=True) | {"connection": self._connection.facts()}
        return as_metrics(status)

    def _network_settings(self) -> dict[str, object]:
        folder = self._silo
        proxy_for(folder.settings.coordinator)  # refused here, and not again and again by the network process
        if (days := check_client_certificate(folder.path)) < _SOON_DAYS:
            _log.warning("the certificate client.crt is valid for %.0f days; the founder seals again", days)
        return {
            "folder": str(folder.path),
            "party": str(folder.path),
            "coordinator": folder.settings.coordinator,
            "key_process": str(self._key_socket),
            "server_key": folder.server_key,
            "largest": folder.policy.max_message_bytes,
        }

    def _start(self) -> ChildProcess:
        return ChildProcess(
            "fedveil.federation.transport.https.silo_client", self._settings, self._reports.note_report
        )
